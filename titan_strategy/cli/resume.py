"""`--ckpt_path last`: which checkpoint that is, and what a resumed run says about itself."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override


def last_checkpoint(trainer: Trainer) -> Path:
    """The newest of the `last` checkpoints (files or directories) that the trainer's `ModelCheckpoint`s have written.

    Lightning itself only warns when there is none, and starts from scratch.

    Raises:
        ValueError: If no callback writes to a fixed folder, which alone is the same in this run and in the last one.
        FileNotFoundError: If no such folder holds a `last` checkpoint.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    folders = [Path(callback.dirpath) for callback in callbacks if callback.dirpath is not None]
    if not folders:
        raise ValueError(
            "--ckpt_path last needs a ModelCheckpoint in trainer.callbacks with a dirpath and save_last: true; "
            "or give the path of a checkpoint."
        )
    names = {f"{callback.CHECKPOINT_NAME_LAST}*{callback.FILE_EXTENSION}" for callback in callbacks}
    found = [path for folder in folders for name in names for path in folder.glob(name)]
    if not found:
        raise FileNotFoundError(
            f"--ckpt_path last: there is no checkpoint {' or '.join(sorted(names))} in {', '.join(map(str, folders))}; "
            "leave --ckpt_path out to start from scratch."
        )
    return max(found, key=lambda path: path.stat().st_mtime)


class ResumeReport(Callback):
    """Says where a resumed run goes on, and how to go on when the checkpoint is at the end already."""

    def __init__(self) -> None:
        self._started = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = True
        if trainer.ckpt_path is not None:
            rank_zero_info(f"Resumed from {trainer.ckpt_path} at step {trainer.global_step}.")

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._started or trainer.ckpt_path is None:
            return
        steps, limit = trainer.global_step, "max_steps"
        if trainer.max_steps == -1 or steps < trainer.max_steps:
            limit = "max_epochs"
        value = getattr(trainer, limit)
        rank_zero_info(
            f"{trainer.ckpt_path} is at step {steps} already, and trainer.{limit}={value}: there was nothing left to "
            f"train. To train on, raise the limit, e.g. --trainer.{limit} {2 * (value or 1)}."
        )
