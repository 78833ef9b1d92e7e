"""Packing, on examples that can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models import TextDataModule
from models.data.encoding import end_of_text, load_encoding
from models.data.packing import NO_TARGET, PackedRows, TokensInMemory, row_count
from models.data.token_cache import TokenCache, cache_folder, write_token_cache

END = 9
# Documents [1, 2, 3], [4], [5, 6]
STREAM = TokensInMemory(np.array([1, 2, 3, END, 4, END, 5, 6, END], dtype=np.uint16), END)


def rows_of(sequence_length: int, *, cross_document: bool) -> list[tuple[list[int], list[int]]]:
    rows = range(row_count(len(STREAM.tokens), sequence_length))
    packed = PackedRows(STREAM, sequence_length, rows, cross_document=cross_document)
    return [(packed[i]["tokens"].tolist(), packed[i]["labels"].tolist()) for i in range(len(packed))]


def test_rows_follow_each_other_and_the_last_label_is_the_next_rows_first_token() -> None:
    assert rows_of(4, cross_document=True) == [([1, 2, 3, END], [2, 3, END, 4]), ([4, END, 5, 6], [END, 5, 6, END])]


def test_labels_do_not_cross_documents() -> None:
    assert rows_of(4, cross_document=False) == [
        ([1, 2, 3, END], [2, 3, END, NO_TARGET]),
        ([4, END, 5, 6], [END, NO_TARGET, 6, END]),
    ]


def test_the_tail_that_fills_no_row_is_left_out() -> None:
    assert rows_of(3, cross_document=True) == [([1, 2, 3], [2, 3, END]), ([END, 4, END], [4, END, 5])]
    assert rows_of(8, cross_document=True) == [([1, 2, 3, END, 4, END, 5, 6], [2, 3, END, 4, END, 5, 6, END])]


def test_a_row_takes_one_token_more_than_its_length() -> None:
    assert [row_count(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_an_empty_row_has_no_target() -> None:
    row = PackedRows(STREAM, 4, range(2), cross_document=True)[None]
    assert row["labels"].tolist() == [NO_TARGET] * 4
    assert row["tokens"].dtype == row["labels"].dtype == torch.int64


def test_rows_do_not_share_memory_with_the_stream() -> None:
    packed = PackedRows(STREAM, 4, range(2), cross_document=True)
    packed[0]["tokens"].zero_()
    assert STREAM.tokens[:4].tolist() == [1, 2, 3, END]


def test_the_corpus_is_its_documents_joined_by_end_of_text(tmp_path: Path) -> None:
    encoding = load_encoding("titan_8k")
    documents = ["import this\n", "", "ünïcode 漢字 🎉"]
    folder = cache_folder(tmp_path, "some documents", encoding)
    write_token_cache(folder, documents, encoding)
    cache = TokenCache(folder)
    assert encoding.decode(cache.tokens.tolist()) == "import this\n<|endoftext|>ünïcode 漢字 🎉<|endoftext|>"
    assert cache.end_of_text == end_of_text(encoding)
    assert cache.tokens.dtype == np.uint16
    assert (cache.facts.documents, cache.facts.tokens) == (2, len(cache.tokens))


def test_training_and_validation_rows_share_no_token(make_data: Callable[..., TextDataModule]) -> None:
    data = make_data()
    data.prepare_data()
    data.setup()
    assert (len(data.train_rows), len(data.held_out)) == (31, 4)
    tokens = data.held_out.stream.tokens
    rows = [data.train_rows[i]["tokens"] for i in range(31)] + [data.held_out[i]["tokens"] for i in range(4)]
    assert torch.cat(rows).tolist() == tokens[: 35 * 16].tolist()


@pytest.mark.parametrize("cross_document", [True, False])
def test_the_data_module_passes_cross_document_on(tmp_path: Path, cross_document: bool) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"number {i}")
    data = TextDataModule(
        str(tmp_path), sequence_length=8, validation_rows=1, cross_document=cross_document, cache_dir=tmp_path / "cache"
    )
    data.prepare_data()
    data.setup()
    end = end_of_text(data.encoder)
    rows = [data.train_rows[i] for i in range(len(data.train_rows))]
    after_end = torch.cat([row["labels"][row["tokens"] == end] for row in rows])
    others = torch.cat([row["labels"][row["tokens"] != end] for row in rows])
    assert len(after_end) > 10
    assert (after_end == NO_TARGET).all() if not cross_document else (after_end != NO_TARGET).all()
    assert (others != NO_TARGET).all()
