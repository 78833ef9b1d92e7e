"""Which rows a data rank reads, and when: one global order that does not depend on the number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


@dataclass(frozen=True)
class Position:
    """How far training has read, counted over all data ranks.

    Attributes:
        epoch: Epoch, from 0.
        samples: Rows of this epoch that training has consumed.
        is_complete: Nothing of this epoch is left to train on, though it has not been left yet.
        document: Only for streams: training documents read to the end.
        token: Only for streams: tokens of the next document that are used up.
    """

    epoch: int = 0
    samples: int = 0
    is_complete: bool = False
    document: int = 0
    token: int = 0

    @property
    def is_epoch_start(self) -> bool:
        return self.samples == 0 and not self.is_complete


class PositionedReader(Protocol):
    """What reads the training rows of one rank, from any position on."""

    @property
    def batches_before(self) -> int:
        """Micro-batches that stand for the part of the current epoch before the position it was entered at."""
        ...

    def start_at(self, position: Position) -> None:
        """Makes epoch `position.epoch` begin at `position`; every other epoch begins at its start."""
        ...

    def position(self, batches_done: int) -> Position:
        """The position after `batches_done` micro-batches of the current epoch, `batches_before` included."""
        ...


def permutation(rows: int, seed: int, epoch: int) -> Tensor:
    """The order of the training rows in one epoch, int64, (rows,)."""
    # Hashed, so that (seed 0, epoch 1) and (seed 1, epoch 0) are unrelated.
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(rows, generator=generator)


# Lightning puts its own sampler into a data loader unless it finds a DistributedSampler there. Deriving from it is the
# public way to keep one's own under every strategy.
class GlobalOrderSampler(DistributedSampler[int]):
    """A data rank's share of the training rows.

    Global micro-batch k is `num_replicas * batch_size` consecutive rows of the epoch's permutation; rank r reads the
    r-th `batch_size` of them. Rows that do not fill a last global micro-batch are left out of the epoch.

    An epoch that is entered at a position other than its start is cut into micro-batches from there on. The rows before
    count as so many micro-batches that the epoch keeps its usual number: this is what makes a position independent of
    ranks and batch size.
    """

    def __init__(self, rows: int, *, batch_size: int, num_replicas: int, rank: int, seed: int) -> None:
        numbers = range(rows)  # all that the base class wants of a data set is its length
        super().__init__(numbers, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.rows = rows
        self.batch_size = batch_size
        self.global_batch_size = num_replicas * batch_size
        self.start_at(Position())

    def start_at(self, position: Position) -> None:
        self.start = position
        self.set_epoch(position.epoch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.has_begun = False

    @property
    def batches_before(self) -> int:
        return self.rows // self.global_batch_size - self._batches_left

    def position(self, batches_done: int) -> Position:
        entry = self._entry
        # Between two epochs the caller's count may still be that of the last one.
        batches_read = batches_done - self.batches_before if self.has_begun else 0
        if entry.is_complete or batches_read <= 0:
            return entry
        return Position(self.epoch, entry.samples + batches_read * self.global_batch_size)

    @property
    def _entry(self) -> Position:
        """Where the current epoch is entered."""
        return self.start if self.start.epoch == self.epoch else Position(self.epoch)

    @property
    def _batches_left(self) -> int:
        entry = self._entry
        return 0 if entry.is_complete else (self.rows - entry.samples) // self.global_batch_size

    def __len__(self) -> int:
        """Rows that this rank reads in a whole epoch."""
        return self.rows // self.global_batch_size * self.batch_size

    def __iter__(self) -> Iterator[int]:
        self.has_begun = True
        order = permutation(self.rows, self.seed, self.epoch)
        mine = self._entry.samples + self.rank * self.batch_size
        for _ in range(self._batches_left):
            yield from order[mine : mine + self.batch_size].tolist()
            mine += self.global_batch_size


class HeldOutSampler(DistributedSampler[int | None]):
    """A data rank's share of the validation rows: over all ranks every row once, in order.

    All ranks get the same number of batches; `None` fills the places after the last row.
    """

    def __init__(self, rows: int, *, batch_size: int, num_replicas: int, rank: int) -> None:
        numbers = range(rows)  # as above
        super().__init__(numbers, num_replicas, rank, shuffle=False)  # type: ignore[arg-type]
        self.rows = rows
        self.batch_size = batch_size
        self.global_batch_size = num_replicas * batch_size

    def __len__(self) -> int:
        return -(-self.rows // self.global_batch_size) * self.batch_size

    def __iter__(self) -> Iterator[int | None]:
        for first in range(0, self.rows, self.global_batch_size):
            mine = first + self.rank * self.batch_size
            yield from (row if row < self.rows else None for row in range(mine, mine + self.batch_size))
