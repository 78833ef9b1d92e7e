"""A tiny model that records what it is trained on, and a run that saves a checkpoint at every opportunity."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from models import TextDataModule


@dataclass(frozen=True)
class Trained:
    """One micro-batch, as the training step saw it."""

    epoch: int
    batch_idx: int
    global_step: int
    tokens: tuple[tuple[int, ...], ...]


class Recorder(pl.LightningModule):
    """Its weights depend on every token and on their order."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.fail_at = fail_at
        self.trained: list[Trained] = []
        self.validated: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if len(self.trained) == self.fail_at:
            raise InterruptedError("the power went out")
        rows = tuple(tuple(row) for row in batch["tokens"].tolist())
        self.trained.append(Trained(self.current_epoch, batch_idx, self.global_step, rows))
        features = batch["tokens"].reshape(-1)[:4].float() / 8192
        loss = ((self.weight - features) ** 2).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class LoggedSteps(Logger):
    """Remembers under which step each loss was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[tuple[int, float]] = []

    name = "steps"
    version = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.losses.append((step, metrics["loss"]))


@dataclass
class Saved:
    """A checkpoint, when it was saved, and how many micro-batches and logged losses came before."""

    path: Path
    moment: str
    trained: int
    logged: int


class SaveAtEveryHook(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[Saved] = []

    def _save(self, trainer: pl.Trainer, module: Recorder, moment: str) -> None:
        path = self.folder / f"{len(self.saved)}-{moment}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append(Saved(path, moment, len(module.trained), len(trainer.logger.losses)))

    def on_train_start(self, trainer: pl.Trainer, pl_module: Recorder) -> None:
        self._save(trainer, pl_module, "train_start")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Recorder) -> None:
        self._save(trainer, pl_module, "train_epoch_start")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Recorder, *args: Any) -> None:
        self._save(trainer, pl_module, "train_batch_end")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Recorder) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, pl_module, "validation_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Recorder) -> None:
        self._save(trainer, pl_module, "train_epoch_end")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Recorder) -> None:
        self._save(trainer, pl_module, "train_end")

    def on_exception(self, trainer: pl.Trainer, pl_module: Recorder, exception: BaseException) -> None:
        self._save(trainer, pl_module, "exception")


@dataclass
class Run:
    module: Recorder
    trainer: pl.Trainer
    logger: LoggedSteps = field(default_factory=LoggedSteps)
    saved: list[Saved] = field(default_factory=list)


class OneOfSeveral(SingleDeviceStrategy, ParallelStrategy):
    """Runs one rank of a data-parallel group by itself: enough to see which rows it reads."""

    is_distributed = True
    global_rank = local_rank = node_rank = 0
    world_size = 1

    def __init__(self, num_replicas: int, rank: int) -> None:
        super().__init__(device="cpu")
        self.share = {"num_replicas": num_replicas, "rank": rank}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return self.share


def train(
    data: TextDataModule,
    *,
    save_to: Path | None = None,
    ckpt_path: Path | None = None,
    fail_at: int | None = None,
    callbacks: Sequence[Callback] = (),
    **trainer_options: Any,
) -> Run:
    """Trains a Recorder; with `save_to`, checkpoints are saved there at every hook."""
    module, logger = Recorder(fail_at), LoggedSteps()
    saver = SaveAtEveryHook(save_to) if save_to is not None else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[*callbacks, *([saver] if saver else [])],
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        try:
            trainer.fit(module, data, ckpt_path=ckpt_path)
        except InterruptedError:
            assert fail_at is not None
    return Run(module, trainer, logger, saver.saved if saver else [])
