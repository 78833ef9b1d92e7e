"""The callback that times a run from inside: marks on the device's own time line, read when the run is over."""

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from titan_strategy.callbacks.throughput import batch_size, data_ranks, memory_gib
from titan_strategy.module import TitanModule

PARTS = ("data", "forward", "backward", "optimizer")
_Mark = torch.cuda.Event | float


class StepTimes(pl.Callback):
    """Times each optimizer step and its parts on rank 0, without waiting for the device, and writes them at the end.

    `data` is the time from the end of a batch to the start of the next, `forward` to the loss (with a pipeline: its
    whole schedule), `backward` to the gradients, and `optimizer` the rest: norm, clipping, step, logging.

    Args:
        path: JSON; see `bench.runner.Timing`.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._marks: list[_Mark] = []  # of each batch: end of the one before, then of each part
        self._last_of_step: list[int] = []  # batches
        self._steps = 0
        self._units, self._unit = 0, "tokens"
        self._flops: int | None = None
        self._first_step = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark = _on_device if pl_module.device.type == "cuda" else time.perf_counter
        self._marks.append(self._mark())
        self._steps = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._marks.append(self._mark())

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._marks.append(self._mark())

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._marks.append(self._mark())

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._marks.append(self._mark())
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._last_of_step.append(len(self._marks) // len(PARTS))
        if len(self._last_of_step) == 1:
            _wait(pl_module.device)
            self._first_step = time.time()
            units, self._unit = batch_size(batch)
            self._units = units * data_ranks(trainer) * trainer.accumulate_grad_batches
            self._flops = _flops_per_unit(pl_module, batch)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        _wait(pl_module.device)
        timing = {
            "parts": self._parts(),
            "unit": self._unit,
            "units": self._units,
            "flops_per_unit": self._flops,
            "gib": memory_gib(pl_module.device),
            "first_step": self._first_step,
            "device": torch.cuda.get_device_name(pl_module.device) if pl_module.device.type == "cuda" else "CPU",
            "ranks": trainer.world_size,
            "loss": _loss(trainer),
        }
        self._path.write_text(json.dumps(timing))

    def _parts(self) -> list[dict[str, float]]:
        """Seconds of each part of each optimizer step."""
        between = [_seconds(first, second) for first, second in zip(self._marks, self._marks[1:], strict=False)]
        steps: list[dict[str, float]] = []
        first = 0
        for end in self._last_of_step:
            batches = [between[i : i + len(PARTS)] for i in range(first * len(PARTS), end * len(PARTS), len(PARTS))]
            steps.append({part: sum(batch[i] for batch in batches) for i, part in enumerate(PARTS)})
            first = end
        return steps


def _on_device() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) / 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flops_per_unit(module: pl.LightningModule, batch: Any) -> int | None:
    """Operations per token; None where the module does not say, or its batch has no tokens."""
    if not isinstance(module, TitanModule) or batch_size(batch)[1] != "tokens":
        return None
    return module.flops_per_token(batch["tokens"].shape[-1])


def _loss(trainer: pl.Trainer) -> float | None:
    loss = trainer.callback_metrics.get("train/loss")
    return None if loss is None else loss.item()
