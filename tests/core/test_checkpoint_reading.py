"""Checkpoints are read by any number of ranks and other strategies, or refused with the reason."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.core.checkpoints import RANKS, STEPS, Job, assert_same, snapshot, train_and_save, use
from tests.core.modules import Language, trainer
from tests.parallel.parity import quiet_trainer
from tests.rank_pool import ExternalRanks
from titan_strategy.checkpoint import CheckpointError, check_complete


def errors(rank_pool, job: Job, ranks: int = RANKS) -> str:
    """The message that every rank gets; fails if a rank gets none."""
    answers = rank_pool.run(use, ranks, job, timeout=60.0)
    messages = {answer["error"] for answer in answers}
    assert None not in messages
    assert len(messages) == 1
    return messages.pop()


# -- Damage ------------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / ".metadata").unlink(), r"whole\.ckpt is not a complete checkpoint, \.metadata is missing"),
        (lambda p: (p / "meta.pt").unlink(), r"whole\.ckpt is not a complete checkpoint, meta\.pt is missing"),
        (lambda p: (p / "__1_0.distcp").unlink(), r"whole\.ckpt is damaged, __1_0\.distcp is missing"),
        (lambda p: truncate(p / "__1_0.distcp"), r"whole\.ckpt is damaged, __1_0\.distcp has \d+ of \d+ bytes"),
        (lambda p: truncate(p / ".metadata"), r"whole\.ckpt is damaged, \.metadata cannot be read"),
        (lambda p: truncate(p / "meta.pt"), r"meta\.pt is missing or damaged"),
        (lambda p: (p / "rank_00001.pt").unlink(), r"rank_00001\.pt is missing"),
        (shutil.rmtree, r"there is no checkpoint at .*whole\.ckpt\. There is no other checkpoint in "),
        (lambda p: [f.unlink() for f in p.iterdir()], r"whole\.ckpt is not a complete checkpoint"),
    ],
    ids=[
        *("metadata-missing", "meta-missing", "shard-missing", "shard-cut", "metadata-cut", "meta-cut", "rank-missing"),
        *("nothing", "empty"),
    ],
)
def test_damage_is_an_error_on_every_rank(
    rank_pool, saved_copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(saved_copy)
    error = errors(rank_pool, Job(saved_copy))
    assert error.startswith("CheckpointError: ")
    assert re.search(message, error), error


def test_a_missing_checkpoint_is_told_what_there_is(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Complete checkpoints in that folder: .*whole\.ckpt") as error:
        check_complete(saved / "other.ckpt")
    assert error.match(r"weights\.ckpt")
    with pytest.raises(CheckpointError, match=r"The folder .*nowhere does not exist"):
        check_complete(saved / "nowhere" / "other.ckpt")


def test_files_that_are_no_checkpoints(rank_pool, tmp_path: Path) -> None:
    text, weights = tmp_path / "notes.ckpt", tmp_path / "weights.ckpt"
    text.write_text("not a checkpoint")
    torch.save({"layer.weight": torch.ones(2)}, weights)
    assert "notes.ckpt is no checkpoint" in errors(rank_pool, Job(text))
    assert "weights.ckpt is not a Lightning checkpoint, it has no 'state_dict'" in errors(rank_pool, Job(weights))


# -- Another model, another optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job("whole.ckpt", module="Wider"), r"model\.0\.weight has shape (13, 6) there and (13, 8) in Wider"),
        (
            Job("whole.ckpt", module="Deeper"),
            "it lacks model.extra.0.bias, model.extra.0.weight. Set strict_loading=False",
        ),
        (Job("whole.ckpt", "validate", "Deeper"), "it lacks model.extra.0.bias, model.extra.0.weight"),
        (Job("whole.ckpt", module="Shallower"), "it has model.1.0.down.bias, "),
        (Job("whole.ckpt", module="Momentum"), "holds the state of another optimizer than SGD: it lacks param_groups."),
        (
            Job("whole.ckpt", module="Lenient"),
            "holds the state of another optimizer than AdamW: it lacks param_groups.model.extra",
        ),
        (Job("weights.ckpt"), "Trying to restore optimizer state but checkpoint contains only the model"),
    ],
    ids=["shape", "missing", "missing-validate", "extra", "optimizer", "optimizer-lenient", "weights-only"],
)
def test_what_does_not_fit_is_refused(rank_pool, saved: Path, job: Job, message: str) -> None:
    path = saved / job.path
    assert message.replace("\\", "") in errors(rank_pool, Job(path, job.stage, job.module))


@pytest.mark.parametrize(
    ("stage", "module", "name"),
    [
        ("validate", "Language", "weights.ckpt"),
        ("test", "Lenient", "whole.ckpt"),
        ("predict", "Momentum", "whole.ckpt"),
    ],
)
def test_evaluation_needs_the_weights_alone(rank_pool, saved: Path, stage: str, module: str, name: str) -> None:
    expected = rank_pool.run(use, RANKS, Job(saved / "whole.ckpt", "validate"))[0]["weights"]
    for answer in rank_pool.run(use, RANKS, Job(saved / name, stage, module)):
        assert answer["error"] is None
        for key, value in expected.items():
            assert torch.equal(answer["weights"][key], value), key


# -- Layouts, strategies, optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("single_file", [False, True], ids=["sharded", "file"])
@pytest.mark.parametrize("module", ["Language", "Momentum", "Stateless", "Unused"])
def test_any_number_of_ranks_reads_what_two_wrote(rank_pool, tmp_path: Path, module: str, single_file: bool) -> None:
    expected = rank_pool.run(train_and_save, RANKS, tmp_path, module, single_file)[0]
    assert (tmp_path / "whole.ckpt").is_file() == single_file
    entries = {"Language": 3, "Momentum": 1, "Stateless": 0, "Unused": 3}[module]
    trained = [name for name in expected["weights"] if name.startswith("model.") and "unused" not in name]
    assert len(expected["optimizer"]) == entries * len(trained)
    for ranks in (1, 4) if module == "Language" else (1, 2):
        for answer in rank_pool.run(use, ranks, Job(tmp_path / "whole.ckpt", module=module)):
            assert_same(answer, expected)


def test_a_save_before_the_first_step_changes_nothing(rank_pool, tmp_path: Path) -> None:
    alone, saving = (rank_pool.run(train_from_start, RANKS, folder)[0] for folder in (None, tmp_path))
    for key, value in alone["weights"].items():
        assert torch.equal(saving["weights"][key], value), key
    start = rank_pool.run(use, RANKS, Job(tmp_path / "zero.ckpt"))[0]
    assert start["step"] == 0
    assert start["optimizer"] == {}


class SaveAtStart(pl.Callback):
    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / "zero.ckpt")


def train_from_start(folder: Path | None) -> dict[str, Any]:
    run = trainer(max_steps=STEPS, callbacks=[SaveAtStart(folder)])
    module = Language()
    run.fit(module)
    return snapshot(run, module)


def train_elsewhere(folder: Path, ddp: bool) -> dict[str, Any]:
    """A checkpoint by one of Lightning's own strategies."""
    ranks = ExternalRanks().world_size()
    strategy = (
        DDPStrategy(cluster_environment=ExternalRanks(), parallel_devices=[torch.device("cpu")] * ranks)
        if ddp
        else pl.strategies.SingleDeviceStrategy("cpu")
    )
    run = quiet_trainer(strategy, ranks, max_steps=STEPS, max_epochs=1)
    module = Language()
    run.fit(module)
    run.save_checkpoint(folder / "lightning.ckpt")
    return snapshot(run, module)


@pytest.mark.parametrize("ddp", [False, True], ids=["single-device", "ddp"])
def test_checkpoints_of_other_strategies(rank_pool, tmp_path: Path, ddp: bool) -> None:
    expected = rank_pool.run(train_elsewhere, 2 if ddp else 1, tmp_path, ddp)[0]
    assert expected["optimizer"]
    for answer in rank_pool.run(use, RANKS, Job(tmp_path / "lightning.ckpt")):
        assert_same(answer, expected)


def test_other_strategies_read_our_single_file(rank_pool, tmp_path: Path) -> None:
    expected = rank_pool.run(train_and_save, RANKS, tmp_path, "Language", True)[0]
    run = quiet_trainer(pl.strategies.SingleDeviceStrategy("cpu"), 1)
    module = Language()
    run.validate(module, ckpt_path=tmp_path / "whole.ckpt", verbose=False)
    for key, value in expected["weights"].items():
        assert torch.equal(module.state_dict()[key], value), key


# -- Loading with weights_only -----------------------------------------------------------------------------------------


def test_what_we_write_loads_with_weights_only(saved: Path) -> None:
    files = sorted(path.name for path in (saved / "whole.ckpt").glob("*.pt"))
    assert files == ["meta.pt", "rank_00000.pt", "rank_00001.pt"]
    for name in files:
        torch.load(saved / "whole.ckpt" / name, weights_only=True)


def test_other_objects_need_weights_only_false(rank_pool, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, RANKS, tmp_path, "WithHyperparameters", False)
    job = Job(tmp_path / "whole.ckpt", module="WithHyperparameters")
    assert "If you trust it, pass weights_only=False to the trainer's method" in errors(rank_pool, job)
    job = Job(job.path, module=job.module, fit_options={"weights_only": False})
    for answer in rank_pool.run(use, RANKS, job):
        assert answer["error"] is None
        assert answer["step"] == STEPS


def test_hooks_see_the_checkpoint(rank_pool, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, RANKS, tmp_path, "Hooked", False)
    for stage in ("fit", "validate"):
        for answer in rank_pool.run(use, RANKS, Job(tmp_path / "whole.ckpt", stage, "Hooked")):
            assert answer["hook"] == 5


# -- Saves that do not end well ----------------------------------------------------------------------------------------
