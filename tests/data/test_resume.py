"""A resumed run trains on exactly the rows that the uninterrupted run trains on after the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from models import TextDataModule
from tests.data.training import OneOfSeveral, Run, Saved, train

MakeData = Callable[..., TextDataModule]

# 10 micro-batches per epoch; together these end an epoch, a validation and a run at a batch and inside a window.
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 2},
    "accumulate": {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": 3},
    "steps": {"max_epochs": -1, "max_steps": 12, "limit_val_batches": 0},
    "steps and validation": {"max_epochs": -1, "max_steps": 7, "accumulate_grad_batches": 2, "val_check_interval": 3},
    "short epochs": {"max_epochs": 2, "limit_train_batches": 4, "val_check_interval": 2},
    "validation across epochs": {"max_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 3},
}


def first_batch_to_repeat(saved: Saved, full: Run) -> int:
    """Micro-batches that the checkpoint's weights know: those of complete accumulation windows."""
    in_epoch = saved.trained % full.trainer.num_training_batches
    return saved.trained - in_epoch % full.trainer.accumulate_grad_batches


def loop_state(run: Run) -> dict[str, Any]:
    state = run.trainer.fit_loop.state_dict()
    return {name: state[name] for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_resumes_from_every_hook(make_data: MakeData, tmp_path: Path, options: dict[str, Any]) -> None:
    full = train(make_data(), save_to=tmp_path, **options)
    resumed_inside = 0
    for saved in full.saved:
        resumed = train(make_data(), ckpt_path=saved.path, **options)
        expected = full.module.trained[first_batch_to_repeat(saved, full) :]
        assert resumed.module.trained == expected, saved
        assert torch.equal(resumed.module.weight, full.module.weight), saved
        if expected:
            resumed_inside += saved.trained > 0
            first_step = expected[0].global_step
            assert resumed.logger.losses == [loss for loss in full.logger.losses if loss[0] >= first_step], saved
            assert loop_state(resumed) == loop_state(full), saved
            assert resumed.trainer.current_epoch == full.trainer.current_epoch, saved
    assert resumed_inside >= full.trainer.num_training_batches


def test_resumes_a_resumed_run(make_data: MakeData, tmp_path: Path) -> None:
    """The last batch of an epoch is where Lightning's own counters go wrong for the next restart."""
    full = train(make_data(), save_to=tmp_path / "first", max_epochs=3)
    last_batch = next(saved for saved in full.saved if saved.trained == 10 and saved.moment == "train_batch_end")
    second = train(make_data(), ckpt_path=last_batch.path, save_to=tmp_path / "second", max_epochs=3)
    for saved in second.saved[::3]:
        third = train(make_data(), ckpt_path=saved.path, max_epochs=3)
        assert third.module.trained == full.module.trained[10 + saved.trained :], saved
        assert torch.equal(third.module.weight, full.module.weight), saved


def test_resumes_with_workers(make_data: MakeData, tmp_path: Path) -> None:
    """Workers fetch ahead: what they fetched and training did not consume must come again."""
    full = train(make_data(), max_epochs=2)
    with_workers = train(make_data(num_workers=2), save_to=tmp_path, max_epochs=2)
    assert with_workers.module.trained == full.module.trained
    for saved in with_workers.saved[1::8]:
        resumed = train(make_data(num_workers=2), ckpt_path=saved.path, max_epochs=2)
        assert resumed.module.trained == full.module.trained[saved.trained :], saved


def test_resumes_from_model_checkpoint(make_data: MakeData, tmp_path: Path) -> None:
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    full = train(make_data(), callbacks=[keeper], **options)
    resumed = train(make_data(), ckpt_path=tmp_path / "step=3.ckpt", **options)
    assert resumed.module.trained == full.module.trained[6:]
    assert torch.equal(resumed.module.weight, full.module.weight)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_resumes_after_an_exception(make_data: MakeData, tmp_path: Path, accumulate: int) -> None:
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    full = train(make_data(), **options)
    for fail_at in (0, 4, 9, 10, 15):
        failed = train(make_data(), save_to=tmp_path / str(fail_at), fail_at=fail_at, **options)
        saved = failed.saved[-1]
        assert saved.moment == "exception"
        resumed = train(make_data(), ckpt_path=saved.path, **options)
        first = first_batch_to_repeat(saved, full)
        assert resumed.module.trained == full.module.trained[first:]
        assert torch.equal(resumed.module.weight, full.module.weight)
        assert loop_state(resumed) == loop_state(full)
        first_step = full.module.trained[first].global_step
        assert resumed.logger.losses == [loss for loss in full.logger.losses if loss[0] >= first_step]


def test_a_stopped_run_goes_on_where_it_stopped(make_data: MakeData, tmp_path: Path) -> None:
    """`max_steps` inside an epoch: Lightning counts the epoch as done, but its other rows have not been trained on."""
    full = train(make_data(), max_epochs=-1, max_steps=23)
    for steps in (4, 10):
        stopped = train(make_data(), save_to=tmp_path / str(steps), max_epochs=-1, max_steps=steps)
        for saved in stopped.saved[-2:]:
            resumed = train(make_data(), ckpt_path=saved.path, max_epochs=-1, max_steps=23)
            assert resumed.module.trained == full.module.trained[steps:], saved
            assert torch.equal(resumed.module.weight, full.module.weight), saved


def rows_in_order(run: Run, epoch: int) -> list[tuple[int, ...]]:
    return [row for batch in run.module.trained if batch.epoch == epoch for row in batch.tokens]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 16])
def test_resumes_with_another_batch_size(make_data: MakeData, tmp_path: Path, batch_size: int) -> None:
    """31 rows: 10 batches of 3 in one run, as many of the other size as the rest makes in the next."""
    full = train(make_data(), save_to=tmp_path, max_epochs=2)
    whole = {epoch: rows_in_order(train(make_data(batch_size=1), max_epochs=2), epoch) for epoch in (0, 1)}
    for saved in full.saved[1::5]:
        resumed = train(make_data(batch_size=batch_size), ckpt_path=saved.path, max_epochs=2)
        epoch, done = divmod(saved.trained, 10)
        for later in range(epoch, 2):
            start = 3 * done if later == epoch else 0
            count = (31 - start) // batch_size * batch_size
            assert rows_in_order(resumed, later) == whole[later][start : start + count], saved
        batches = [batch.batch_idx for batch in resumed.module.trained if batch.epoch == epoch]
        assert batches == list(range(31 // batch_size))[-len(batches) :] or not batches
        assert resumed.trainer.current_epoch == 2


def test_resumes_on_another_number_of_ranks(make_data: MakeData, tmp_path: Path) -> None:
    full = train(make_data(batch_size=4), save_to=tmp_path, max_epochs=2)
    saved = next(saved for saved in full.saved if saved.trained == 3 and saved.moment == "train_batch_end")
    ranks = [
        train(make_data(batch_size=2), ckpt_path=saved.path, max_epochs=2, strategy=OneOfSeveral(2, rank))
        for rank in (0, 1)
    ]
    together = [
        first.tokens + second.tokens for first, second in zip(*(run.module.trained for run in ranks), strict=True)
    ]
    assert together == [batch.tokens for batch in full.module.trained[3:]]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"sequence_length": 15}, {"validation_rows": 5}])
def test_refuses_a_position_in_other_data(make_data: MakeData, tmp_path: Path, changed: dict[str, int]) -> None:
    saved = train(make_data(), save_to=tmp_path, max_epochs=1).saved[-1]
    ((name, value),) = changed.items()
    with pytest.raises(ValueError, match=rf"{name} was \d+ and is {value}"):
        train(make_data(**changed), ckpt_path=saved.path)


def test_a_new_run_with_the_same_data_module_starts_at_the_beginning(make_data: MakeData, tmp_path: Path) -> None:
    data = make_data()
    full = train(data, save_to=tmp_path, max_epochs=1)
    train(data, ckpt_path=full.saved[5].path, max_epochs=1)
    assert train(data, max_epochs=1).module.trained == full.module.trained


def test_evaluation_takes_weights_from_other_data(make_data: MakeData, tmp_path: Path) -> None:
    run = train(make_data(), save_to=tmp_path, max_epochs=1)
    run.trainer.validate(run.module, make_data(seed=1, sequence_length=8), ckpt_path=run.saved[-1].path)


def test_a_checkpoint_loads_without_unpickling_code(make_data: MakeData, tmp_path: Path) -> None:
    saved = train(make_data(), save_to=tmp_path, max_epochs=1).saved[3]
    state = torch.load(saved.path, weights_only=True)["TextDataModule"]
    assert state["position"] == {"epoch": 0, "samples": 6, "is_complete": False, "document": 0, "token": 0}
    assert state["data"]["rows"] == 31
