"""Modules and runs that the tests of checkpoints share."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.core.modules import VOCABULARY, Language, full_state, titan, trainer
from tests.parallel.parity import full

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


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["error"] is None
    assert (found["step"], found["lr"]) == (expected["step"], expected["lr"])
    for part in ("weights", "optimizer"):
        assert found[part].keys() == expected[part].keys()
        for key, value in expected[part].items():
            assert torch.equal(found[part][key], value), key
    assert found["end"] == STEPS + 1
