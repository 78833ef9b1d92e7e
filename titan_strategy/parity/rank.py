"""What one rank of a layout does: train like any rank, and compare what it sees with the reference."""

import logging
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_strategy.parity.layouts import Layout
from titan_strategy.parity.recipe import Recipe
from titan_strategy.parity.reference import Reference, Tensors

Kind = Literal["initial weight", "loss", "gradient", "norm", "weight"]

# A gradient that is zero but for rounding has no meaningful relative error of its own. Below this part of the norm of
# all gradients, a parameter's error counts relative to that norm: at the default tolerance everything still shows that
# is larger than 1e-7 of it, the resolution of float32.
_SMALL = 1e-2


@dataclass(frozen=True)
class Difference:
    """How far one number or tensor is from the reference.

    Args:
        kind: What it is.
        name: Of the parameter; empty for loss and norm.
        step: Optimizer step, from 0; for weights the number of steps made.
        relative: Norm of the difference over the norm of what is expected.
    """

    kind: Kind
    name: str
    step: int
    relative: float

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        steps = f"after {self.step} steps" if self.kind == "weight" else f"in step {self.step}"
        return f"{self.kind}{of}" + ("" if self.kind == "initial weight" else f" {steps}")


def run_rank(recipe: Recipe, layout: Layout, steps: int, accelerator: str, reference: Reference) -> list[Difference]:
    """Train this process's rank of `layout`; returns every comparison in the order in which it was made."""
    for chatty in ("lightning.pytorch", "torch.distributed.tensor"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # a run of the user's own shows them
    torch.set_num_threads(max(1, torch.get_num_threads() // layout.ranks))
    module, data = recipe.build(layout.data_ranks)
    comparison = Comparison(reference, steps)
    recipe.trainer(layout, accelerator, [comparison]).fit(module, datamodule=data)
    return comparison.differences


class Comparison(pl.Callback):
    """Compares full tensors, one at a time, on every rank: a rank whose copy has gone astray shows, too.

    Args:
        reference: What to expect.
        steps: Number of optimizer steps after which training stops.
    """

    def __init__(self, reference: Reference, steps: int) -> None:
        self.differences: list[Difference] = []
        self._reference = reference
        self._steps = steps
        self._done = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare_weights("initial weight", pl_module, self._reference.initial())

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        expected = self._reference.gradients(self._done)
        floor = _SMALL * float(self._reference.scalars(self._done)["norm"])
        for name, parameter in pl_module.named_parameters():
            gradient = torch.zeros(()) if parameter.grad is None else _full(parameter.grad)
            wanted = expected.get(name, torch.zeros(()))
            self._add("gradient", gradient, wanted, name, floor)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._done:
            return  # gradients accumulate
        expected = self._reference.scalars(self._done)
        self._add("loss", trainer.callback_metrics["train/loss"], expected["loss"])
        self._add("norm", trainer.callback_metrics["train/grad_norm"], expected["norm"])
        self._done += 1
        if self._done == self._steps:
            self._compare_weights("weight", pl_module, self._reference.final())
            trainer.should_stop = True

    def _compare_weights(self, kind: Kind, module: pl.LightningModule, expected: Tensors) -> None:
        for name, parameter in module.named_parameters():
            self._add(kind, _full(parameter), expected[name], name)

    def _add(self, kind: Kind, found: Tensor, expected: Tensor, name: str = "", floor: float = 0.0) -> None:
        self.differences.append(Difference(kind, name, self._done, relative_difference(found, expected, floor)))


def relative_difference(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of what is expected, but no less than `floor`; infinite for 0 or NaN."""
    expected = expected.double()
    error = (found.detach().cpu().double() - expected).norm().item()
    if error == 0:
        return 0.0
    scale = max(expected.norm().item(), floor)
    relative = error / scale if scale > 0 else float("inf")
    return relative if relative == relative else float("inf")


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
