"""Makes Lightning's fit loop continue where the data continues.

Lightning's own counters say how many batches of an epoch this run's configuration has done. They are not enough to
resume exactly:

* with another number of ranks or another batch size, the rest of an epoch is another number of batches;
* gradients of an unfinished accumulation window are not in a checkpoint, so its batches have to be done again;
* a run that stopped in the middle of an epoch (`max_steps`) has counted that epoch as done;
* a restart at the end of an epoch leaves `epoch_progress` off by one in several cases (Lightning 2.6: `max_steps` set,
  or the checkpoint saved in the last batch's `on_train_batch_end`).

So the position is taken from the data, and the counters are set to what they are at that place in an uninterrupted run.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn

from models.data.order import Position, PositionedReader


def current_position(trainer: pl.Trainer, reader: PositionedReader) -> Position:
    """The position that a checkpoint saved now has to resume from: all rows whose gradients are in the weights."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    done: int = progress.current.processed
    is_complete = done == trainer.num_training_batches or (progress.is_last_batch and done == progress.current.ready)
    if not is_complete:
        done -= done % trainer.accumulate_grad_batches
    position = reader.position(done)
    if position.is_epoch_start or not (is_complete or position.is_complete):
        return position
    epochs: Any = trainer.fit_loop.epoch_progress
    if epochs.current.processed > position.epoch:
        return Position(position.epoch + 1)
    return Position(position.epoch, position.samples, is_complete=True)


class DataProgress(Callback):
    """Knows where training stands in the data, and after a restart sets the fit loop's counters to match."""

    def __init__(self) -> None:
        self.begin(Position())

    def begin(self, start: Position) -> None:
        """A new run starts at `start`, unless `restore` says otherwise."""
        self.start = start
        self.reader: PositionedReader | None = None
        self._is_restored = False

    def attach(self, reader: PositionedReader) -> None:
        """Makes `reader` the one whose rows training consumes."""
        reader.start_at(self.start)
        self.reader = reader

    def restore(self, position: Position) -> None:
        """The run continues at `position`. The reader may be attached already, or later."""
        self.start = position
        self._is_restored = True
        if self.reader is not None:
            self.reader.start_at(position)

    def position(self, trainer: pl.Trainer | None) -> Position:
        """The position that a checkpoint saved now has to resume from."""
        if self.reader is None or trainer is None:
            return self.start
        return current_position(trainer, self.reader)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_restored and self.reader is not None:
            set_loop_counters(trainer, self.start, self.reader)
        elif trainer.ckpt_path:
            rank_zero_warn(f"{trainer.ckpt_path} holds no position in the data: training reads it from the beginning.")
        self._is_restored = False


def set_loop_counters(trainer: pl.Trainer, position: Position, reader: PositionedReader) -> None:
    """Tells the fit loop that it stands at `position`: at the start of an epoch, or behind one of its batches."""
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    steps_logged = trainer.global_step
    if position.is_epoch_start and not fit_loop.restarted_mid_epoch:
        _set(fit_loop.epoch_progress, begun=position.epoch, processed=position.epoch, completed=position.epoch)
        epoch_loop.restarting = False
        fit_loop.reset_restart_stage()
        epoch_loop.reset_restart_stage()
    else:
        # As if saved in a batch's `on_train_batch_end`, from where Lightning goes on with the next batch.
        done = int(min(reader.batches_before, trainer.num_training_batches))
        _set(fit_loop.epoch_progress, begun=position.epoch + 1, processed=position.epoch, completed=position.epoch)
        _set(epoch_loop.batch_progress, begun=done, processed=done, completed=done - 1)
        epoch_loop.batch_progress.is_last_batch = position.is_complete
        fit_loop.restarting = True
        fit_loop.update_restart_stage()
        if position.is_complete or done % trainer.accumulate_grad_batches == 0:
            steps_logged -= 1  # the restart adds the step of that batch
    if trainer.lightning_module.automatic_optimization:
        # Loggers count steps on their own, and miss or double one where batches are done again or an exception struck.
        epoch_loop.on_load_checkpoint({"_batches_that_stepped": steps_logged})


def _set(progress: Any, *, begun: int, processed: int, completed: int) -> None:
    """Sets the counters of a loop's current run, and accordingly those of all its runs together."""
    earlier_runs = progress.total.processed - progress.current.processed
    for name, count in {"ready": begun, "started": begun, "processed": processed, "completed": completed}.items():
        setattr(progress.current, name, count)
        setattr(progress.total, name, earlier_runs + count)
