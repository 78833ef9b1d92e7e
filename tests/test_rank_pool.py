"""The rank pool: results by rank, and failures that neither hang nor spread to the next test."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from tests.rank_pool import GRACE_SECONDS, ExternalRanks, RankPool


def _describe(suffix: str) -> str:
    return f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}{suffix}"


def _all_reduce_rank() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def _fail_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("a deliberate failure")
    return "fine"


def _fail_on_rank_1_before_all_reduce() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("a deliberate failure")
    dist.all_reduce(torch.ones(1))


def _fail_on_rank_1_while_rank_0_sleeps() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("a deliberate failure")
    time.sleep(120)


def _die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _leave_traces() -> None:
    seed_everything(7)
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)


def _find_traces() -> tuple[bool, torch.dtype, float]:
    left = any(name in os.environ for name in ("LEFT_BEHIND", "PL_GLOBAL_SEED"))
    return left, torch.get_default_dtype(), torch.rand(()).item()


def _fit_with_ddp(directory: str) -> tuple[int, float]:
    strategy = DDPStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")] * 2,
        process_group_backend="gloo",
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=3,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model: LightningModule = BoringModel()
    trainer.fit(model)
    return trainer.global_rank, sum(parameter.sum().item() for parameter in model.parameters())


def test_results_come_back_in_the_order_of_the_ranks(rank_pool: RankPool) -> None:
    assert rank_pool.run(_describe, 3, "!") == ["0/3!", "1/3!", "2/3!"]


def test_every_run_has_a_fresh_process_group(rank_pool: RankPool) -> None:
    assert rank_pool.run(_all_reduce_rank, 2) == [1.0, 1.0]
    assert rank_pool.run(_all_reduce_rank, 3) == [3.0, 3.0, 3.0]
    assert rank_pool.run(_all_reduce_rank, 2) == [1.0, 1.0]


def test_trainer_uses_the_ranks_again_and_again(rank_pool: RankPool, tmp_path: object) -> None:
    first = rank_pool.run(_fit_with_ddp, 2, str(tmp_path))
    second = rank_pool.run(_fit_with_ddp, 2, str(tmp_path))
    assert [rank for rank, _ in first] == [0, 1]
    assert first[0][1] == first[1][1]
    assert first == second


def test_exception_of_a_rank_is_raised_with_its_rank(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match="a deliberate failure") as caught:
        rank_pool.run(_fail_on_rank_1, 2)
    (note,) = caught.value.__notes__
    assert note.startswith("Raised on rank 1 of 2:")
    assert "_fail_on_rank_1" in note


def test_ranks_waiting_in_a_collective_are_released(rank_pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="a deliberate failure"):
        rank_pool.run(_fail_on_rank_1_before_all_reduce, 2)
    assert time.monotonic() - start < 2 * GRACE_SECONDS
    assert rank_pool.run(_all_reduce_rank, 2) == [1.0, 1.0]


def test_stuck_ranks_are_replaced_after_a_failure(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match="a deliberate failure"):
        rank_pool.run(_fail_on_rank_1_while_rank_0_sleeps, 2)
    assert rank_pool.run(_describe, 2, "") == ["0/2", "1/2"]


def test_silence_is_a_timeout_that_names_the_ranks(rank_pool: RankPool) -> None:
    with pytest.raises(TimeoutError, match=r"_sleep: ranks \[0\] gave no answer within 0.5 s"):
        rank_pool.run(_sleep, 1, 60.0, timeout=0.5)
    assert rank_pool.run(_describe, 1, "") == ["0/1"]


def test_death_of_a_rank_is_an_error_and_it_is_replaced(rank_pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match="died with exit code 3"):
        rank_pool.run(_die_on_rank_1, 2)
    assert rank_pool.run(_describe, 2, "") == ["0/2", "1/2"]


def test_nothing_of_one_run_is_left_for_the_next(rank_pool: RankPool) -> None:
    before = rank_pool.run(_find_traces, 1)
    rank_pool.run(_leave_traces, 1)
    assert rank_pool.run(_find_traces, 1) == before == [(False, torch.float32, before[0][2])]
