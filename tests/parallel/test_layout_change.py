"""A checkpoint of any layout goes on under any other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models import MoEConfig
from tests.parallel.parity import quiet_trainer
from tests.parallel.resuming import Job, Module, data_module, train_text, write_corpus
from tests.parallel.test_resume import checkpoint, tail
from tests.rank_pool import ExternalRanks
from titan_strategy import TitanStrategy

ONE = (1, 4, {})
LAYOUTS = {
    "tp2": (2, 4, {"tensor_parallel_size": 2}),
    "pp2": (2, 4, {"pipeline_parallel_size": 2}),
    "tp2-shard2": (4, 2, {"tensor_parallel_size": 2}),
    "pp2-tp2": (4, 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "hsdp": (4, 1, {"data_parallel_replicate_size": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    write_corpus(path)
    return path


def job(folder: Path, layout: tuple, **options) -> Job:
    _, batch_size, strategy = layout
    return Job(folder, 6, batch_size=batch_size, options=strategy, optimizer="adamw", **options)


@pytest.mark.parametrize("single_file", [False, True], ids=["sharded", "single-file"])
def test_any_layout_resumes_any_other(rank_pool, folder: Path, single_file: bool) -> None:
    whole = rank_pool.run(train_text, 1, job(folder, ONE))[0]
    order = list(LAYOUTS.values()) if not single_file else [LAYOUTS["pp2-tp2"], LAYOUTS["tp2"]]
    for number, saved in enumerate(order):
        place = folder / f"{single_file}{number}"
        write_corpus(place)
        first = replace(job(place, saved, save_every=3, single_file=single_file), max_steps=3)
        for trace in rank_pool.run(train_text, saved[0], first):
            torch.testing.assert_close(torch.tensor(trace["loss"]), torch.tensor(whole["loss"][:3]), rtol=1e-5, atol=0)
        resumed = order[(number + 1) % len(order)]
        second = replace(job(place, resumed), ckpt_path=checkpoint(first, 3))
        for trace in rank_pool.run(train_text, resumed[0], second):
            expected = tail(whole, 3)
            assert [set(rows) for rows in trace["rows"]] == [set(rows) for rows in expected["rows"]]
            torch.testing.assert_close(torch.tensor(trace["loss"]), torch.tensor(expected["loss"]), rtol=1e-5, atol=0)


def test_experts_resume_on_any_number_of_ranks(rank_pool, folder: Path) -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=16, balance_rate=0.01)
    whole = rank_pool.run(train_text, 1, job(folder, ONE, moe=moe))[0]
    order = [
        (2, 2, {"expert_parallel_size": 2}),
        ONE,
        (4, 2, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}),
        (4, 1, {"expert_parallel_size": 4}),
    ]
    for number, saved in enumerate(order):
        place = folder / f"experts{number}"
        write_corpus(place)
        first = replace(job(place, saved, save_every=3, moe=moe), max_steps=3)
        rank_pool.run(train_text, saved[0], first)
        resumed = order[(number + 1) % len(order)]
        second = replace(job(place, resumed, moe=moe), ckpt_path=checkpoint(first, 3))
        for trace in rank_pool.run(train_text, resumed[0], second):
            expected = tail(whole, 3)
            torch.testing.assert_close(torch.tensor(trace["loss"]), torch.tensor(expected["loss"]), rtol=1e-5, atol=0)
            assert len(trace["bias"]) == 2
            for name, value in whole["bias"].items():
                torch.testing.assert_close(trace["bias"][name], value, rtol=0, atol=1e-7)


def one_module_two_trainers(job: Job) -> tuple[float, float, str]:
    """Train and validate one module with two Trainers, then try a third one with other settings."""
    ranks = ExternalRanks().world_size()

    def trainer(**options):
        devices = [torch.device("cpu")] * ranks
        strategy = TitanStrategy(
            cluster_environment=ExternalRanks(), parallel_devices=devices, **job.options, **options
        )
        return quiet_trainer(strategy, ranks, max_steps=job.max_steps, limit_val_batches=2)

    module, data = Module(job), data_module(job)
    first = trainer()
    first.fit(module, datamodule=data)
    trained = first.validate(module, datamodule=data, verbose=False)[0]["val/loss"]
    again = trainer().validate(module, datamodule=data, verbose=False)[0]["val/loss"]
    with pytest.raises(ValueError, match="split by an earlier Trainer") as refusal:
        trainer(reshard_after_forward="always").validate(module, datamodule=data, verbose=False)
    return trained, again, str(refusal.value)


@pytest.mark.parametrize("layout", [LAYOUTS["tp2"], LAYOUTS["pp2"]], ids=["tp2", "pp2"])
def test_a_module_goes_from_one_trainer_to_another(rank_pool, folder: Path, layout: tuple) -> None:
    for trained, again, refusal in rank_pool.run(one_module_two_trainers, layout[0], job(folder, layout)):
        assert trained == again
        assert "reshard_after_forward: default, always" in refusal
