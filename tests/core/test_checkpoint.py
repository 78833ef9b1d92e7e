"""Checkpoints: what can be loaded where, what is refused, and what an interrupted save leaves."""

import os
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from tests.core.modules import SEQUENCE, VOCABULARY, Language, Tokens, full_state, titan, trainer
from tests.parallel.parity import full, quiet_trainer
from tests.rank_pool import ExternalRanks
from titan_strategy.checkpoint import CheckpointError, check_complete, save

RANKS = 2
STEPS = 3


@dataclass(frozen=True)
class Job:
    """One use of a checkpoint by a fresh trainer."""

    path: Path | str
    stage: str = "fit"
    module: str = "Language"
    fit_options: dict[str, Any] = field(default_factory=dict)
    single_file: bool = False


class Wider(Language):
    """The shapes of another model."""

    def __init__(self) -> None:
        super().__init__(width=8)


class Deeper(Language):
    """One layer more."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model.extra = nn.Sequential(nn.Linear(VOCABULARY, VOCABULARY))


class Lenient(Deeper):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


class Shallower(Language):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            del self.model[1]


class Momentum(Language):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Stateless(Language):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unused(Language):
    """A parameter that never gets a gradient, hence no optimizer state."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model[0].unused = nn.Linear(3, 3)


class WithHyperparameters(Language):
    def __init__(self, folder: Path = Path("/data"), options: Namespace = Namespace(depth=3)) -> None:  # noqa: B008
        super().__init__()
        self.save_hyperparameters()


class Hooked(Language):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"value": 5}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]["value"]


MODULES = {
    cls.__name__: cls
    for cls in (Language, Wider, Deeper, Lenient, Shallower, Momentum, Stateless, Unused, WithHyperparameters, Hooked)
}


def full_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {
        f"{names[p]}.{key}": full(value) if isinstance(value, Tensor) else value
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def snapshot(run: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    return {
        "weights": full_state(module),
        "optimizer": full_optimizer(run.optimizers[0], module) if run.optimizers else None,
        "lr": run.optimizers[0].param_groups[0]["lr"] if run.optimizers else None,
        "step": run.global_step,
    }


def train_and_save(folder: Path, module_name: str, single_file: bool, steps: int = STEPS) -> dict[str, Any]:
    run = trainer(titan(save_distributed_checkpoint=not single_file), max_steps=steps)
    module = MODULES[module_name]()
    run.fit(module)
    run.save_checkpoint(folder / "whole.ckpt")
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return snapshot(run, module)


class Snapshot(pl.Callback):
    """What a run starts from."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.taken = snapshot(trainer, pl_module)


def use(job: Job) -> dict[str, Any]:
    """Run on a rank; an error is returned, so that a rank that does not get it is found out by the time limit."""
    start = Snapshot()
    strategy = titan(save_distributed_checkpoint=not job.single_file, seed=99)
    run = trainer(strategy, max_steps=STEPS + 1, max_epochs=2, callbacks=[start])
    module = MODULES[job.module]()
    try:
        if job.stage == "fit":
            run.fit(module, ckpt_path=job.path, **job.fit_options)
        else:
            getattr(run, job.stage)(module, ckpt_path=job.path)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    taken = start.taken if job.stage == "fit" else snapshot(run, module)
    return {"error": None, **taken, "hook": getattr(module, "loaded", None), "end": run.global_step}


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rank_pool.run(train_and_save, RANKS, folder, "Language", False)
    return folder


@pytest.fixture
def saved_copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "whole.ckpt", tmp_path / "whole.ckpt")
    return tmp_path / "whole.ckpt"


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


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["error"] is None
    assert (found["step"], found["lr"]) == (expected["step"], expected["lr"])
    for part in ("weights", "optimizer"):
        assert found[part].keys() == expected[part].keys()
        for key, value in expected[part].items():
            assert torch.equal(found[part][key], value), key
    assert found["end"] == STEPS + 1


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


def fail(message: str) -> Callable[..., None]:
    def raising(*args: Any, **kwargs: Any) -> None:
        raise OSError(message)

    return raising


def save_and_fail(folder: Path, where: str, failing_rank: int) -> dict[str, Any]:
    """Save, train on, and fail to save again under the same name. All ranks must raise."""
    single_file = where == "file"
    run = trainer(titan(save_distributed_checkpoint=not single_file), max_steps=2)
    module = Language()
    run.fit(module)
    run.save_checkpoint(folder / "kept.ckpt")
    before = full_state(module)
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(module)
    patches = {
        "shards": (dcp.FileSystemWriter, "write_data"),
        "rank-file": (save, "rank_file"),
        "folder": (Path, "mkdir"),
        "publish": (save, "publish"),
        "file": (type(run.strategy.checkpoint_io), "save_checkpoint"),
    }
    owner, name = patches[where]
    original = getattr(owner, name)
    if run.global_rank == failing_rank:
        setattr(owner, name, fail("No space left on device"))
    start = time.monotonic()
    try:
        run.save_checkpoint(folder / "kept.ckpt")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "no error"
    finally:
        setattr(owner, name, original)
    return {"error": message, "before": before, "seconds": time.monotonic() - start}


@pytest.mark.parametrize(
    ("where", "rank"), [("shards", 1), ("rank-file", 1), ("folder", 0), ("publish", 0), ("file", 0)]
)
def test_a_failed_save_stops_all_ranks_and_leaves_the_older_checkpoint(
    rank_pool, tmp_path: Path, where: str, rank: int
) -> None:
    answers = rank_pool.run(save_and_fail, RANKS, tmp_path, where, rank, timeout=60.0)
    for answer in answers:
        assert "No space left on device" in answer["error"]
        assert answer["error"].startswith(f"CheckpointError: {tmp_path}/kept.ckpt: rank {rank}: ")
        assert answer["seconds"] < 10
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["kept.ckpt"]
    again = rank_pool.run(use, RANKS, Job(tmp_path / "kept.ckpt", "validate"))[0]
    for key, value in answers[0]["before"].items():
        assert torch.equal(again["weights"][key], value), key


def save_and_die(folder: Path) -> None:
    """Rank 0 is killed while the shards of the second checkpoint are written."""
    run = trainer(max_steps=1)
    module = Language()
    run.fit(module)
    run.save_checkpoint(folder / "kept.ckpt")
    written = dcp.FileSystemWriter.write_data

    def die(*args: Any, **kwargs: Any) -> None:
        written(*args, **kwargs).wait()
        os._exit(3)

    dcp.FileSystemWriter.write_data = die  # type: ignore[method-assign]
    for name in ("kept.ckpt", "new.ckpt"):
        run.save_checkpoint(folder / name)


def test_a_killed_save_leaves_no_checkpoint_of_that_name(rank_pool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died with exit code 3"):
        rank_pool.run(save_and_die, 1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kept.ckpt.incomplete", "kept.ckpt"]
    check_complete(tmp_path / "kept.ckpt")
    # The next run of that name sweeps up.
    rank_pool.run(save_twice, 1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.ckpt"]


def save_twice(folder: Path) -> None:
    run = trainer(max_steps=1)
    run.fit(Language(), ckpt_path=folder / "kept.ckpt")
    run.save_checkpoint(folder / "kept.ckpt")
    run.save_checkpoint(folder / "kept.ckpt")


def test_a_kill_between_the_two_renames_is_explained(saved_copy: Path) -> None:
    hidden = saved_copy.with_name(".whole.ckpt.replaced")
    saved_copy.rename(hidden)
    with pytest.raises(CheckpointError, match=r"was being replaced; what it was is now .*\.whole\.ckpt\.replaced"):
        check_complete(saved_copy)


# -- ModelCheckpoint ---------------------------------------------------------------------------------------------------


def train_with_model_checkpoint(folder: Path, save_last: bool | str) -> dict[str, Any]:
    callback = ModelCheckpoint(
        folder, monitor="val/loss", save_top_k=2, save_last=save_last, filename="{step}", every_n_epochs=1
    )
    run = trainer(max_epochs=4, enable_checkpointing=True, callbacks=[callback])
    module = Language(rows=4)
    run.fit(module)
    final = full_state(module)
    best = Path(callback.best_model_path)
    result = {"final": final, "left": sorted(p.name for p in folder.iterdir()), "best": best.name}
    run.validate(module, ckpt_path="best", verbose=False)
    result["best_score"] = run.callback_metrics["val/loss"].item()
    result["score"] = callback.best_model_score.item()
    resumed = trainer(
        max_epochs=5,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, monitor="val/loss", save_last=save_last)],
    )
    module = Language(rows=4)
    resumed.fit(module, ckpt_path="last")
    return result | {"resumed_from": Path(resumed.ckpt_path).name, "steps": resumed.global_step}


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint(rank_pool, tmp_path: Path, save_last: bool | str) -> None:
    for answer in rank_pool.run(train_with_model_checkpoint, RANKS, tmp_path, save_last):
        assert answer["left"] == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
        assert answer["best"] in ("step=6.ckpt", "step=8.ckpt")
        assert answer["best_score"] == pytest.approx(answer["score"], rel=1e-6)
        assert answer["resumed_from"] == "last.ckpt"
        assert answer["steps"] == 10
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    check_complete(tmp_path / "last.ckpt")


# -- One trainer, several stages ---------------------------------------------------------------------------------------


def several_stages(path: Path) -> dict[str, Any]:
    run = trainer(max_steps=STEPS)
    first, second = Language(), Language()
    run.validate(first, ckpt_path=path, verbose=False)
    saved_weights = full_state(first)
    run.fit(first)
    trained = full_state(first)
    fresh = run.test(second, ckpt_path=path, verbose=False)[0]["test/loss"]
    again = full_state(second)
    validated = run.validate(first, verbose=False)[0]["val/loss"]
    after = full_state(first)
    run.fit_loop.epoch_loop.max_steps = 2 * STEPS
    run.fit_loop.max_epochs = 2
    run.fit(first)
    another = trainer(max_steps=STEPS)
    another.fit(first)
    return {
        "saved": saved_weights,
        "trained": trained,
        "again": again,
        "after": after,
        "losses": (fresh, validated),
        "steps": (run.global_step, another.global_step),
    }


def test_stages_modules_and_trainers_take_turns(rank_pool, saved: Path) -> None:
    expected = rank_pool.run(use, RANKS, Job(saved / "whole.ckpt", "validate"))[0]["weights"]
    for answer in rank_pool.run(several_stages, RANKS, saved / "whole.ckpt"):
        for key, value in expected.items():
            assert torch.equal(answer["saved"][key], value), key
            assert torch.equal(answer["again"][key], value), key
            assert torch.equal(answer["after"][key], answer["trained"][key]), key
        assert answer["losses"][1] < answer["losses"][0]
        assert answer["steps"] == (2 * STEPS, STEPS)


class Drawing(Language):
    """Remembers the state of the global generator in its last step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.generator = torch.get_rng_state()
        return super().training_step(batch, batch_idx)


def generator_of_first_step(validated: Path | None) -> Tensor:
    run = trainer(max_steps=1)
    module = Drawing()
    run.validate(module, ckpt_path=validated, verbose=False)
    torch.manual_seed(77)
    run.fit(module)
    return module.generator


def test_only_the_run_that_resumes_gets_the_generators_back(rank_pool, saved: Path) -> None:
    with_checkpoint, without = (rank_pool.run(generator_of_first_step, RANKS, p) for p in (saved / "whole.ckpt", None))
    for rank in range(RANKS):
        assert torch.equal(with_checkpoint[rank], without[rank])


# -- Loaders with a state of their own ---------------------------------------------------------------------------------


class CountingLoader:
    """A loader with a state, as torchdata's is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        while self.position < 8:
            self.position += 1
            yield {
                **Tokens(1)[0],
                "tokens": torch.full((1, SEQUENCE), self.rank),
                "number": 100 * self.rank + self.position,
            }

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position + 100 * self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"] - 100 * self.rank


class Counted(Language):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def token_loss(self, output: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if self.training:
            self.numbers.append(batch["number"])
        return super().token_loss(output, batch)

    def train_dataloader(self) -> Any:
        return CountingLoader(self.trainer.global_rank)


def count(path: Path, resume: bool) -> list[int]:
    run = trainer(max_steps=6 if resume else 3, max_epochs=2, limit_val_batches=0)
    module = Counted()
    run.fit(module, ckpt_path=path if resume else None)
    if not resume:
        run.save_checkpoint(path)
    return module.numbers


def test_each_rank_gets_its_own_loader_state_back(rank_pool, tmp_path: Path) -> None:
    path = tmp_path / "counted.ckpt"
    assert rank_pool.run(count, RANKS, path, False) == [[1, 2, 3], [101, 102, 103]]
    assert rank_pool.run(count, RANKS, path, True) == [[4, 5, 6], [104, 105, 106]]


# -- Where checkpoints go ----------------------------------------------------------------------------------------------


def save_to_strange_places(folder: Path) -> list[str]:
    run = trainer(max_steps=1)
    run.fit(Language())
    messages = []
    for path, options in [("s3://bucket/x.ckpt", None), (folder / "x.ckpt", {"endpoint": "here"})]:
        try:
            run.save_checkpoint(path, storage_options=options)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_only_folders_are_written_to(rank_pool, tmp_path: Path) -> None:
    for url, options in rank_pool.run(save_to_strange_places, RANKS, tmp_path):
        assert url == "filepath='s3://bucket/x.ckpt': checkpoints are written to local or mounted folders, not to URLs."
        assert "takes no storage options" in options
    assert list(tmp_path.iterdir()) == []
