"""Speed and memory, in the progress bar and the logger."""

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

_GIB = 2**30


class Throughput(Callback):
    """Logs speed and memory every `log_every_n_steps` optimizer steps.

    * `train/tokens_per_second`, over all data ranks, where the batch is a mapping with a tensor `tokens`; for any other
      batch `train/samples_per_second`, from the first dimension of its first tensor. Every data rank is taken to have a
      batch of this rank's size. The first batch after the start, which compiles and allocates, and the time spent in
      validation are not counted.
    * `train/memory_gib`, of rank 0: on CUDA the most that the allocator has reserved, elsewhere the peak resident set.

    The clock is the host's. It does not wait for the device, which is at most a few steps behind it.
    """

    def __init__(self) -> None:
        self._window_start: float | None = None
        self._validation_start = 0.0
        self._units = 0
        self._logged_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window_start = None
        self._logged_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._window_start is None:
            self._window_start, self._units = time.perf_counter(), 0
            return
        units, unit = batch_size(batch)
        self._units += units * data_ranks(trainer)
        step = trainer.global_step
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # the Trainer sets it undeclared
        if step == self._logged_step or step % interval:
            return
        now = time.perf_counter()
        rate, memory = self._units / (now - self._window_start), memory_gib(pl_module.device)
        pl_module.log_dict({f"train/{unit}_per_second": rate, "train/memory_gib": memory})
        pl_module.log_dict({f"{unit}/s": rate, "GiB": memory}, logger=False, prog_bar=True)
        self._window_start, self._units, self._logged_step = now, 0, step

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window_start is not None:
            self._window_start += time.perf_counter() - self._validation_start


def batch_size(batch: Any) -> tuple[int, str]:
    """Number of units in this rank's batch, and what they are."""
    if isinstance(batch, Mapping) and isinstance(batch.get("tokens"), Tensor):
        return batch["tokens"].numel(), "tokens"
    first = next(_tensors(batch), None)
    if first is None or first.ndim == 0:
        raise TypeError(f"Throughput: a batch of type {type(batch).__name__} holds no tensor with a batch dimension.")
    return first.shape[0], "samples"


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors(list(batch.values()))
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for item in batch:
            yield from _tensors(item)


def data_ranks(trainer: Trainer) -> int:
    """Ranks with different data: not the world where several ranks share a batch."""
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)


def memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / _GIB
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
