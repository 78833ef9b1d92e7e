"""Documents, joined by their end-of-text tokens, cut into rows of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

NO_TARGET = -100
"""Label of a position that has nothing to predict; `torch.nn.functional.cross_entropy` ignores it by default."""

TokenArray = np.ndarray[Any, np.dtype[Any]]
Row = dict[str, Tensor]


class TokenStream(Protocol):
    """Documents as token ids, each followed by the end-of-text token."""

    @property
    def tokens(self) -> TokenArray:
        """All token ids, (tokens,)."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id of the token after each document; it occurs nowhere else."""
        ...


@dataclass(frozen=True)
class TokensInMemory:
    """A short stream."""

    tokens: TokenArray
    end_of_text: int


def row_count(tokens: int, sequence_length: int) -> int:
    """Rows that fit in a stream: each takes `sequence_length` tokens, and the last label needs one token more."""
    return max(0, (tokens - 1) // sequence_length)


def make_row(window: TokenArray, end_of_text: int, *, cross_document: bool) -> Row:
    """Makes inputs and labels of a window of the stream.

    Args:
        window: Consecutive token ids, (sequence_length + 1,).
        end_of_text: Id of the token that ends a document.
        cross_document: Whether the end-of-text token is asked to predict the next document's first token.

    Returns:
        `tokens` and `labels`, int64, both (sequence_length,); `labels[t]` is the token after `tokens[t]`.
    """
    ids = torch.from_numpy(window.astype(np.int64))
    tokens, labels = ids[:-1].clone(), ids[1:].clone()
    if not cross_document:
        labels[tokens == end_of_text] = NO_TARGET
    return {"tokens": tokens, "labels": labels}


def empty_row(sequence_length: int) -> Row:
    """A row without any target: it fills up a batch and counts nowhere."""
    tokens = torch.zeros(sequence_length, dtype=torch.int64)
    return {"tokens": tokens, "labels": torch.full_like(tokens, NO_TARGET)}


class PackedRows(Dataset[Row]):
    """Some of the rows of a packed stream. A row is read when it is asked for, so memory does not grow with the corpus.

    Args:
        stream: The documents.
        sequence_length: Tokens per row.
        rows: Numbers of the rows, counted from the start of the stream. Its tail that fills no row is left out.
        cross_document: Whether labels may cross document boundaries.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, rows: range, *, cross_document: bool) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.rows = rows
        self.cross_document = cross_document

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | None) -> Row:
        """Row number `index` of these; `None` stands for an empty row."""
        if index is None:
            return empty_row(self.sequence_length)
        start = self.rows[index] * self.sequence_length
        window = self.stream.tokens[start : start + self.sequence_length + 1]
        return make_row(window, self.stream.end_of_text, cross_document=self.cross_document)
