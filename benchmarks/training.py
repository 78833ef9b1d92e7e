"""What the benchmarks of training share: one short run on one GPU, timed on the GPU's own time line."""

import gc
import itertools
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from models import CausalLM, TransformerConfig
from precision_plugins import TitanPrecision
from titan_strategy import TitanStrategy

SEQUENCE = 8192
WARM_UP = 5  # steps; the first ones compile, and fill the memory allocator


@dataclass(frozen=True)
class Measurement:
    """One run.

    Args:
        seconds: Of each step after warm-up.
        gib: The most memory that torch held, in GiB.
        first_step: Seconds from the start of the run to the end of its first step.
        loss: After the last step, nats per token.
    """

    seconds: list[float]
    gib: float
    first_step: float
    loss: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Rows(IterableDataset):
    """Random rows, the same ones in every run."""

    def __init__(self, batch_size: int, vocabulary: int, steps: int) -> None:
        self._shape, self._vocabulary, self._steps = (batch_size, SEQUENCE + 1), vocabulary, steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self._steps):
            ids = torch.randint(0, self._vocabulary, self._shape, generator=generator)
            yield {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class Clock(pl.Callback):
    """Marks the end of each step on the GPU's own time line, without waiting for it."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._marks: list[torch.cuda.Event] = []
        self.first_step = 0.0

    def mark(self) -> None:
        """A step has ended."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if not self._marks:
            event.synchronize()
            self.first_step = time.perf_counter() - self._started
        self._marks.append(event)

    def on_train_batch_end(self, *args: object) -> None:
        self.mark()

    def step_times(self) -> list[float]:
        """Seconds per step after warm-up."""
        torch.cuda.synchronize()
        marks = self._marks[WARM_UP - 1 :]
        return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def train(
    config: TransformerConfig,
    precision: TitanPrecision,
    batch_size: int,
    steps: int,
    module_class: type[CausalLM] = CausalLM,
    callbacks: tuple[pl.Callback, ...] = (),
) -> Measurement:
    """Train a new model for some steps in this process.

    Args:
        config: The model's sizes.
        precision: Dtypes, low precision, activation checkpointing and compilation.
        batch_size: Rows of a step.
        steps: How many, warm-up included.
        module_class: What to train.
        callbacks: More of them.
    """
    forget_earlier_runs()
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=TitanStrategy(seed=0, precision_plugin=precision),
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[clock, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rows = Rows(batch_size, config.vocab_size, steps)
    trainer.fit(module_class(config=config), DataLoader(rows, batch_size=None, num_workers=1, pin_memory=True))
    return measurement(clock, trainer.callback_metrics["train/loss"].item())


def measurement(clock: Clock, loss: float) -> Measurement:
    """What a run on the current GPU, just ended, has taken."""
    return Measurement(clock.step_times(), torch.cuda.max_memory_reserved() / 2**30, clock.first_step, loss)


def forget_earlier_runs() -> None:
    """Give their memory and their graphs back."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def environment() -> dict[str, str]:
    """The GPU and the versions that the figures hold for."""
    packages = {name: version(name) for name in ("torch", "lightning", "torchao")}
    return {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), **packages}
