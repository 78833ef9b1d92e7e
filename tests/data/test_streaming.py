"""Streams: the same promises as for a corpus on disk, in the order of the source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from models import TextDataModule
from models.data.encoding import end_of_text, load_encoding
from models.data.packing import NO_TARGET
from models.data.streaming import TokenReader
from tests.data.test_resume import loop_state, rows_in_order
from tests.data.training import OneOfSeveral, train

MakeData = Callable[..., TextDataModule]
LENGTH = 16


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """Shorter and longer than a row, and empty ones at every place where that could matter."""
    texts = ["", *(" ".join(str(7919 * j) for j in range(i, i + i % 9)) for i in range(30)), "", ""]
    assert "" in texts[5:-5]
    return texts


@dataclass(frozen=True)
class Listed:
    """A corpus that opens faster than a file."""

    texts: list[str]

    def stream(self, skip: int = 0) -> Iterator[str]:
        return iter(self.texts[skip:])

    def stream_key(self) -> str:
        return f"{len(self.texts)} texts"


@pytest.fixture
def make_stream(documents: list[str]) -> MakeData:
    encoding = load_encoding("titan_8k")

    def make(**options: Any) -> TextDataModule:
        defaults = {"sequence_length": LENGTH, "batch_size": 2, "validation_rows": 2, "streaming": True}
        data = TextDataModule(**{**defaults, **options})
        data.corpus = Listed(documents)
        data.encoder = encoding
        return data

    return make


def joined(documents: list[str]) -> list[int]:
    encoding = load_encoding("titan_8k")
    return [token for text in documents if text for token in [*encoding.encode_ordinary(text), end_of_text(encoding)]]


def test_windows_follow_each_other(documents: list[str]) -> None:
    corpus, encoding, expected = Listed(documents), load_encoding("titan_8k"), joined(documents)
    reader = TokenReader(corpus, encoding)
    for start in range(0, len(expected) - 8, 7):
        again = TokenReader(corpus, encoding, document=reader.document, token=reader.token)
        assert reader.window(8, advance=7).tolist() == expected[start : start + 8]
        assert again.window(8, advance=7).tolist() == expected[start : start + 8]
    assert reader.window(8, advance=7) is None


def test_training_reads_the_documents_after_the_held_out_ones(make_stream: MakeData, documents: list[str]) -> None:
    data = make_stream()
    run = train(data, max_epochs=2)
    held_out = torch.cat([data.held_out[i]["tokens"] for i in range(2)]).tolist()
    assert held_out == joined(documents)[: 2 * LENGTH]
    count = next(n for n in range(len(documents)) if len(joined(documents[:n])) > 2 * LENGTH)
    expected = joined(documents[count:])
    rows = [tuple(expected[i : i + LENGTH]) for i in range(0, len(expected) - LENGTH, LENGTH)]
    rows = rows[: len(rows) // 2 * 2]
    assert len(rows) > 10
    assert rows_in_order(run, 0) == rows_in_order(run, 1) == rows


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2},
        {"max_epochs": 2, "accumulate_grad_batches": 3},
        {"max_epochs": -1, "max_steps": 25, "val_check_interval": 4, "check_val_every_n_epoch": None},
    ],
)
def test_resumes_from_every_hook(make_stream: MakeData, tmp_path: Path, options: dict[str, Any]) -> None:
    full = train(make_stream(), save_to=tmp_path, **options)
    per_epoch = sum(batch.epoch == 0 for batch in full.module.trained)
    assert len(full.module.trained) > per_epoch
    for saved in full.saved:
        resumed = train(make_stream(), ckpt_path=saved.path, **options)
        in_epoch = saved.trained % per_epoch
        expected = full.module.trained[saved.trained - in_epoch % full.trainer.accumulate_grad_batches :]
        assert resumed.module.trained == expected, saved
        assert torch.equal(resumed.module.weight, full.module.weight), saved
        if expected:
            assert loop_state(resumed) == loop_state(full), saved


def test_a_worker_reads_ahead_without_moving_the_position(make_stream: MakeData, tmp_path: Path) -> None:
    full = train(make_stream(num_workers=3), save_to=tmp_path, max_epochs=1)
    assert full.module.trained == train(make_stream(), max_epochs=1).module.trained
    saved = full.saved[len(full.saved) // 2]
    resumed = train(make_stream(num_workers=3), ckpt_path=saved.path, max_epochs=1)
    assert resumed.module.trained == full.module.trained[saved.trained :]


def test_resumes_on_another_number_of_ranks(make_stream: MakeData, tmp_path: Path) -> None:
    full = train(make_stream(batch_size=4), save_to=tmp_path, max_epochs=1)
    saved = next(saved for saved in full.saved if saved.trained == 2)
    ranks = [
        train(make_stream(), ckpt_path=saved.path, max_epochs=1, strategy=OneOfSeveral(2, rank)).module.trained
        for rank in (0, 1)
    ]
    together = [first.tokens + second.tokens for first, second in zip(*ranks, strict=True)]
    assert together == [batch.tokens for batch in full.module.trained[2:]]


def test_labels_do_not_cross_documents(make_stream: MakeData) -> None:
    data = make_stream(cross_document=False)
    data.setup()
    for batch in data.train_dataloader():
        assert set(batch) == {"tokens", "labels"}
        assert ((batch["labels"] == NO_TARGET) == (batch["tokens"] == end_of_text(data.encoder))).all()


def test_the_standard_library_as_a_stream(tmp_path: Path) -> None:
    data = TextDataModule(streaming=True, sequence_length=64, validation_rows=4, cache_dir=tmp_path / "cache")
    data.prepare_data()
    data.setup()
    assert next(iter(data.train_dataloader()))["tokens"].shape == (8, 64)
    assert not (tmp_path / "cache").exists()


def test_a_stream_that_is_too_short(make_stream: MakeData) -> None:
    with pytest.raises(ValueError, match=r"source ends before validation_rows=1000 of sequence_length=16 are filled"):
        make_stream(validation_rows=1000).setup()


def test_resumes_a_stream_of_files(documents: list[str], tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    options = {"sequence_length": LENGTH, "batch_size": 2, "validation_rows": 2, "streaming": True}
    full = train(TextDataModule(str(path), **options), save_to=tmp_path, max_epochs=1)
    saved = full.saved[len(full.saved) // 2]
    resumed = train(TextDataModule(str(path), **options), ckpt_path=saved.path, max_epochs=1)
    assert resumed.module.trained == full.module.trained[saved.trained :]
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r"stream was .* and is"):
        train(TextDataModule(str(path), **options), ckpt_path=saved.path, max_epochs=1)
