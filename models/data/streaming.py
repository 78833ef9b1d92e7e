"""Rows of a stream of documents that is read as training goes, without a copy on disk.

Every rank reads and encodes the whole stream and keeps its slice of each global micro-batch: that is what makes the
order, and a position in it, independent of the number of ranks. It costs one core per rank; the token cache of a source
that is not streamed is written once and costs nothing afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import tiktoken
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from models.data.corpus import Corpus
from models.data.encoding import end_of_text
from models.data.order import Position
from models.data.packing import Row, TokenArray, TokensInMemory, make_row

# How many of the last batches a position can be asked for: an accumulation window and what Lightning prefetches.
_REMEMBERED_BATCHES = 4096


class TokenReader:
    """Reads windows of consecutive tokens from the documents of a corpus.

    Args:
        corpus: The documents; empty ones are passed over.
        encoding: Turns them into token ids.
        document: Documents to skip.
        token: Tokens of the next document to skip.
    """

    def __init__(self, corpus: Corpus, encoding: tiktoken.Encoding, *, document: int = 0, token: int = 0) -> None:
        self.document = document
        self.token = token
        self._documents = corpus.stream(skip=document)
        self._encoding = encoding
        self._end_of_text = end_of_text(encoding)
        # Documents from number `document` on; the first is used up to `token`.
        self._read: deque[list[int]] = deque()
        self._available = -token

    def window(self, length: int, advance: int) -> TokenArray | None:
        """The next `length` tokens, or None when so many are not left; the reader then moves on by `advance`."""
        while self._available < length:
            text = next(self._documents, None)
            if text is None:
                return None
            ids = [*self._encoding.encode_ordinary(text), self._end_of_text] if text else []
            self._read.append(ids)
            self._available += len(ids)
        window = self._peek(length)
        self._advance(advance)
        return window

    def _peek(self, length: int) -> TokenArray:
        window: list[int] = []
        skip = self.token
        for ids in self._read:
            window += ids[skip : skip + length - len(window)]
            skip = 0
        return np.array(window)

    def _advance(self, count: int) -> None:
        self._available -= count
        self.token += count
        while self._read and self.token >= len(self._read[0]):
            self.token -= len(self._read.popleft())
            self.document += 1


def held_out_rows(
    corpus: Corpus, encoding: tiktoken.Encoding, *, rows: int, sequence_length: int
) -> tuple[TokensInMemory, int]:
    """The first `rows` rows of the stream, and the number of documents that they touch.

    Raises:
        ValueError: The stream ends before.
    """
    reader = TokenReader(corpus, encoding)
    length = rows * sequence_length + 1
    tokens = reader.window(length, advance=length)
    if tokens is None:
        raise ValueError(f"source ends before validation_rows={rows} of sequence_length={sequence_length} are filled.")
    return TokensInMemory(tokens, end_of_text(encoding)), reader.document + (reader.token > 0)


class StreamedBatches(IterableDataset[dict[str, Any]]):
    """A data rank's slices of the global micro-batches of a stream, each with the position after it.

    The training rows begin with document `first_document` of the source. Rows that do not fill a last global
    micro-batch are left out.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoding: tiktoken.Encoding,
        sequence_length: int,
        *,
        first_document: int,
        cross_document: bool,
        batch_size: int,
        num_replicas: int,
        rank: int,
    ) -> None:
        self.corpus = corpus
        self.encoding = encoding
        self.sequence_length = sequence_length
        self.first_document = first_document
        self.cross_document = cross_document
        self.global_batch_size = num_replicas * batch_size
        self.mine = range(rank * batch_size, (rank + 1) * batch_size)
        self.entry = Position()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = self.first_document
        reader = TokenReader(self.corpus, self.encoding, document=first + self.entry.document, token=self.entry.token)
        samples = self.entry.samples
        while (batch := self._next_batch(reader)) is not None:
            samples += self.global_batch_size
            yield {**batch, "position": (samples, reader.document - first, reader.token)}

    def _next_batch(self, reader: TokenReader) -> Row | None:
        separator = end_of_text(self.encoding)
        rows = []
        for i in range(self.global_batch_size):
            window = reader.window(self.sequence_length + 1, advance=self.sequence_length)
            if window is None:
                return None
            if i in self.mine:
                rows.append(make_row(window, separator, cross_document=self.cross_document))
        batch: Row = default_collate(rows)
        return batch


class StreamLoader:
    """Loads the batches of a stream and knows the position after each; a `PositionedReader`.

    Args:
        batches: This rank's batches.
        num_workers: 0 or 1; a second worker would read and encode the whole stream once more.
    """

    def __init__(self, batches: StreamedBatches, *, num_workers: int) -> None:
        self.batches = batches
        self.num_workers = min(num_workers, 1)
        self._read: deque[Position] = deque(maxlen=_REMEMBERED_BATCHES)
        self.start_at(Position())

    @property
    def sampler(self) -> StreamLoader:
        """What Lightning tells the epoch."""
        return self

    def start_at(self, position: Position) -> None:
        if self._read:
            raise RuntimeError(
                "The stream was read before the checkpoint's position in it was restored: something, such as "
                "Trainer.estimated_stepping_batches, asked for the training data early. Set Trainer(max_steps=...) "
                "without max_epochs, so that the number of steps is known without them."
            )
        self.start = self.entry = position

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.entry.epoch:
            self.entry = self.start if epoch == self.start.epoch else Position(epoch)
            self._read.clear()

    @property
    def batches_before(self) -> int:
        return self.entry.samples // self.batches.global_batch_size

    def position(self, batches_done: int) -> Position:
        samples = self.entry.samples + (batches_done - self.batches_before) * self.batches.global_batch_size
        if not self._read or samples <= self.entry.samples:
            return self.entry
        return next(position for position in self._read if position.samples == samples)

    def __iter__(self) -> Iterator[Row]:
        self._read.clear()
        if self.entry.is_complete:
            return
        self.batches.entry = self.entry
        loader = DataLoader(
            self.batches,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),
        )
        for batch in loader:
            samples, document, token = batch.pop("position")
            self._read.append(Position(self.entry.epoch, samples, document=document, token=token))
            yield batch

    # See LazyDataLoader.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
