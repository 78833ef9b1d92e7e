"""Small corpora."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import TextDataModule


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in which no two rows are equal."""
    path = tmp_path_factory.mktemp("corpus") / "numbers.txt"
    path.write_text(" ".join(str(7919 * i) for i in range(120)))
    return path


@pytest.fixture
def make_data(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextDataModule]:
    """Makes a data module of 31 training and 4 validation rows of 16 tokens."""

    def make(**options: Any) -> TextDataModule:
        defaults = {"sequence_length": 16, "batch_size": 3, "validation_rows": 4, "cache_dir": corpus_file.parent}
        return TextDataModule(str(corpus_file), **{**defaults, **options})

    return make
