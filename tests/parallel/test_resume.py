"""A resumed run is the run that was never interrupted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parallel.parity import Trace, relative_difference
from tests.parallel.resuming import Job, train_text, write_corpus

STEPS = 24  # more than one epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    write_corpus(path)
    return path


def tail(trace: Trace, step: int) -> Trace:
    """What a trace tells of the steps after `step`."""
    first = trace["step"].index(step) + 1
    return {key: trace[key][first:] for key in ("rows", "loss", "lr", "step", "epoch")}


@pytest.mark.parametrize(("accumulate", "steps"), [(1, (1, 4, 9, 10, 17, 23)), (2, (1, 10, 23))])
def test_bitwise_on_the_same_layout_at_any_step(rank_pool, folder, accumulate: int, steps: tuple[int, ...]) -> None:
    job = Job(folder / f"same{accumulate}", STEPS, accumulate=accumulate, dropout=0.3, save_every=1)
    write_corpus(job.folder)
    whole = rank_pool.run(train_text, 2, job)
    assert len(set(whole[0]["epoch"])) > 1, "the run must cross an epoch"
    for step in steps:
        resumed = rank_pool.run(train_text, 2, replace(job, save_every=None, ckpt_path=checkpoint(job, step)))
        for rank in range(2):
            expected = tail(whole[rank], step)
            assert {key: resumed[rank][key] for key in expected} == expected, f"after step {step} on rank {rank}"
            for name, value in whole[rank]["final"].items():
                assert torch.equal(resumed[rank]["final"][name], value), f"{name} after step {step} on rank {rank}"


@pytest.fixture(scope="module")
def whole(rank_pool, folder: Path) -> Trace:
    """The run that is not interrupted; it leaves checkpoints in `folder`."""
    trace: Trace = rank_pool.run(train_text, 2, Job(folder, STEPS, save_every=5))[0]
    return trace


@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulate", "options"),
    [
        (1, 4, 1, {}),
        (4, 1, 1, {}),
        (2, 1, 2, {}),
        (4, 1, 1, {"data_parallel_replicate_size": 2}),
        (2, 2, 1, {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 1}),
    ],
    ids=["one-rank", "four-ranks", "accumulating", "hsdp", "replicated"],
)
def test_same_rows_and_losses_on_another_layout(
    rank_pool, folder, whole, ranks, batch_size, accumulate, options
) -> None:
    path = checkpoint(Job(folder, STEPS), 5)
    job = Job(folder, STEPS, batch_size=batch_size, accumulate=accumulate, options=options, ckpt_path=path)
    for resumed in rank_pool.run(train_text, ranks, job):
        expected = tail(whole, 5)
        assert [sorted(rows) for rows in resumed["rows"]] == [sorted(rows) for rows in expected["rows"]]
        assert resumed["lr"] == expected["lr"]
        torch.testing.assert_close(torch.tensor(resumed["loss"]), torch.tensor(expected["loss"]), rtol=1e-6, atol=0)
        for name, value in whole["final"].items():
            assert relative_difference(resumed["final"][name], value) < 1e-5, name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_single_file_checkpoint_resumes(rank_pool, folder, optimizer: str) -> None:
    job = Job(folder / optimizer, 8, save_every=3, optimizer=optimizer, single_file=True)
    write_corpus(job.folder)
    whole = rank_pool.run(train_text, 2, job)[0]
    assert checkpoint(job, 3).is_file()
    resumed = rank_pool.run(train_text, 4, replace(job, batch_size=1, save_every=None, ckpt_path=checkpoint(job, 3)))[0]
    torch.testing.assert_close(torch.tensor(resumed["loss"]), torch.tensor(tail(whole, 3)["loss"]), rtol=1e-6, atol=0)


def checkpoint(job: Job, step: int) -> Path:
    return job.folder / "checkpoints" / f"step={step}.ckpt"
