"""The corpus as token ids on disk: written once, memory-mapped afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from models.data.encoding import end_of_text
from models.data.packing import TokenArray

# Part of every cache key: another layout of the files or another order of the documents must not find old ones.
FORMAT = 1

TOKENS_FILE = "tokens.bin"
FACTS_FILE = "facts.json"

_ENCODING_THREADS = 2
_CHARACTERS_PER_BATCH = 1 << 21


@dataclass(frozen=True)
class TokenFacts:
    """What is in a token cache.

    Attributes:
        tokens: Number of token ids, the end-of-text token of each document included.
        documents: Number of documents that were not empty.
        end_of_text: Id of the token after each document.
        dtype: NumPy name of the ids' type.
        digest: SHA-256 of the ids: the same text in the same encoding has the same digest on every machine.
    """

    tokens: int
    documents: int
    end_of_text: int
    dtype: str
    digest: str


class TokenCache:
    """The token ids in a folder that `write_token_cache` made.

    Raises:
        ValueError: The folder was damaged after it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = TokenFacts(**json.loads((folder / FACTS_FILE).read_text()))
        size = (folder / TOKENS_FILE).stat().st_size
        expected = self.facts.tokens * np.dtype(self.facts.dtype).itemsize
        if size != expected:
            raise ValueError(f"{folder} is damaged: {size} bytes of tokens instead of {expected}. Delete the folder.")

    @property
    def end_of_text(self) -> int:
        return self.facts.end_of_text

    @cached_property
    def tokens(self) -> TokenArray:
        """All token ids, (tokens,), mapped at first use."""
        return np.memmap(self.folder / TOKENS_FILE, dtype=self.facts.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file itself: a pickled map would be a copy of the corpus.
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


def cache_folder(root: Path, corpus_key: str, encoding: tiktoken.Encoding) -> Path:
    """Where the tokens of that corpus in that encoding belong."""
    digest = hashlib.sha256(f"{FORMAT}\n{corpus_key}\n{encoding.name}".encode()).hexdigest()
    return root / f"tokens-{digest[:32]}"


def write_token_cache(folder: Path, documents: Iterable[str], encoding: tiktoken.Encoding) -> None:
    """Encodes the documents into `folder`.

    The folder appears under its name only when complete. Processes that write the same one at the same time each write
    a copy of their own, and the first to finish wins: the contents are equal. Empty documents are left out.

    Raises:
        ValueError: No document has any text.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="incomplete-", dir=folder.parent) as scratch:
        complete = Path(scratch) / folder.name
        complete.mkdir()
        facts = _write_tokens(complete / TOKENS_FILE, documents, encoding)
        (complete / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2) + "\n")
        try:
            complete.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            # Another process was faster.


def _write_tokens(path: Path, documents: Iterable[str], encoding: tiktoken.Encoding) -> TokenFacts:
    separator = end_of_text(encoding)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 1 << 16 else np.uint32)
    token_count = document_count = 0
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for batch in _batches(documents):
            for ids in encoding.encode_ordinary_batch(batch, num_threads=_ENCODING_THREADS):
                data = np.array([*ids, separator], dtype=dtype).tobytes()
                file.write(data)
                digest.update(data)
                token_count += len(ids) + 1
                document_count += 1
        file.flush()
        os.fsync(file.fileno())
    if document_count == 0:
        raise ValueError("source holds no text: it has no document, or every document is empty.")
    return TokenFacts(token_count, document_count, separator, dtype.name, digest.hexdigest())


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups the documents that are not empty, a few megabytes at a time."""
    batch: list[str] = []
    characters = 0
    for document in filter(None, documents):
        batch.append(document)
        characters += len(document)
        if characters >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
