"""Where documents come from: the standard library, files of one's own, or a data set on the hub."""

from __future__ import annotations

import hashlib
import os
import pydoc_data.topics
import sysconfig
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

STANDARD_LIBRARY = "stdlib"

# Suffix -> builder of the `datasets` package. A .txt file is one document; so is each record of the others.
BUILDERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}

_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SHUFFLE_SEED = 0


class Corpus(Protocol):
    """A source of documents.

    `documents` comes in a fixed pseudo-random order: the validation rows are the tail of the packed corpus, and only a
    tail that is a fair sample of the whole makes the validation loss mean something. `stream` keeps the source's order.
    """

    def key(self) -> str:
        """Text that changes whenever the documents change; the token cache is found by it."""
        ...

    def stream_key(self) -> str:
        """Text by which a checkpoint recognises the stream, on another machine too; known without reading it."""
        ...

    def documents(self) -> Iterator[str]:
        """Yields every document, in the same order each time."""
        ...

    def stream(self, skip: int = 0) -> Iterator[str]:
        """Yields the documents after the first `skip`, without holding the source in memory or on disk."""
        ...


def open_corpus(source: str, *, text_field: str, subset: str | None, split: str, scratch: Path) -> Corpus:
    """Finds out what `source` names.

    Args:
        source: `"stdlib"`, a folder or file of .txt, .jsonl or .parquet, or the name of a data set on the hub.
        text_field: Column that holds the text of a record.
        subset: Configuration of a hub data set.
        split: Split of a hub data set.
        scratch: Folder for a temporary copy of the records of local files.

    Raises:
        FileNotFoundError: `source` looks like a path and nothing is there.
        ValueError: A folder without a usable file or with several kinds of them, or a file of an unknown kind.
    """
    if source == STANDARD_LIBRARY:
        return StandardLibrary()
    path = Path(source).expanduser()
    if path.exists():
        return Files(find_files(path), text_field, scratch)
    if _looks_like_path(source):
        raise FileNotFoundError(
            f"source={source!r} does not exist. Valid: {STANDARD_LIBRARY!r}, a folder or file of {_known_kinds()}, "
            "or the name of a data set on the hub such as 'owner/name'."
        )
    return HubDataset(source, text_field, subset, split)


def find_files(path: Path) -> tuple[Path, ...]:
    """The corpus files at or below `path`, all of one kind, in the order of their names."""
    if path.is_file():
        if path.suffix.lower() not in BUILDERS:
            raise ValueError(f"source={str(path)!r} is not a file of {_known_kinds()}.")
        return (path,)
    files = tuple(sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in BUILDERS))
    kinds = sorted({file.suffix.lower() for file in files})
    if not kinds:
        raise ValueError(f"source={str(path)!r} is a folder without any file of {_known_kinds()}.")
    if len(kinds) > 1:
        raise ValueError(f"source={str(path)!r} holds files of {' and '.join(kinds)}: keep one kind in the folder.")
    return files


def _known_kinds() -> str:
    return ", ".join(BUILDERS)


def _looks_like_path(source: str) -> bool:
    """Whether `source` can only be a path: hub names are `name` or `owner/name` and carry no data file's suffix."""
    is_rooted = source.startswith((".", "/", "~", "\\"))
    return is_rooted or source.count("/") > 1 or source.endswith("/") or Path(source).suffix.lower() in BUILDERS


@dataclass(frozen=True)
class StandardLibrary:
    """Python's own sources (no tests) and its manual's topics: 11 MB of real text on every machine, no download."""

    def key(self) -> str:
        digest = hashlib.sha256()
        for name, source in self._sources():
            content = source.read_bytes() if isinstance(source, Path) else source.encode()
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
        return f"stdlib {digest.hexdigest()}"

    def stream_key(self) -> str:
        return self.key()

    def documents(self) -> Iterator[str]:
        for _, source in self._sources():
            yield _read_source(source) if isinstance(source, Path) else source

    def stream(self, skip: int = 0) -> Iterator[str]:
        return islice(self.documents(), skip, None)

    @staticmethod
    def _sources() -> list[tuple[str, Path | str]]:
        """Names, in their scattered order, with the file or the text itself."""
        root = Path(sysconfig.get_path("stdlib"))
        files = {file.relative_to(root).as_posix(): file for file in _python_files(root)}
        topics = {f"pydoc_data/topics/{name}": text for name, text in pydoc_data.topics.topics.items()}
        files.pop("pydoc_data/topics.py", None)  # the topics once more, as one escaped literal
        return sorted((files | topics).items(), key=lambda source: _scatter(source[0]))


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_CORPUS
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _scatter(name: str) -> str:
    """A sort key that scatters names, and does not move one when another is missing."""
    return hashlib.sha256(name.encode()).hexdigest()


def _read_source(file: Path) -> str:
    with tokenize.open(file) as stream:  # honours the file's coding cookie
        return stream.read()


@dataclass(frozen=True)
class Files:
    """Local files of one kind, read through `datasets`."""

    files: tuple[Path, ...]
    text_field: str
    scratch: Path

    def key(self) -> str:
        stats = {str(file.resolve()): file.stat() for file in self.files}
        return f"files {self.text_field} {[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]}"

    def stream_key(self) -> str:
        return f"files {self.text_field} {[(file.name, file.stat().st_size) for file in self.files]}"

    def documents(self) -> Iterator[str]:
        self.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="records-", dir=self.scratch) as folder:
            records = self._load(streaming=False, cache_dir=folder)
            yield from _texts(records.shuffle(seed=_SHUFFLE_SEED), self._column)

    def stream(self, skip: int = 0) -> Iterator[str]:
        return _texts(self._load(streaming=True).skip(skip), self._column)

    @property
    def _builder(self) -> str:
        return BUILDERS[self.files[0].suffix.lower()]

    @property
    def _column(self) -> str:
        return "text" if self._builder == "text" else self.text_field

    def _load(self, **options: Any) -> Any:
        if self._builder == "text":
            options["sample_by"] = "document"
        import datasets  # seconds, and the standard library needs none of it

        names = [str(file) for file in self.files]
        return datasets.load_dataset(self._builder, data_files=names, split="train", **options)


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub, or in its local cache."""

    name: str
    text_field: str
    subset: str | None
    split: str

    def key(self) -> str:
        # The fingerprint covers the files and their revision. It has no public name, and nothing public replaces it.
        return f"hub {self.text_field} {self._load(streaming=False)._fingerprint}"

    def stream_key(self) -> str:
        return f"hub {self.text_field} {self.name} {self.subset} {self.split}"

    def documents(self) -> Iterator[str]:
        return _texts(self._load(streaming=False).shuffle(seed=_SHUFFLE_SEED), self.text_field)

    def stream(self, skip: int = 0) -> Iterator[str]:
        return _texts(self._load(streaming=True).skip(skip), self.text_field)

    def _load(self, *, streaming: bool) -> Any:
        import datasets  # as above

        try:
            return datasets.load_dataset(self.name, self.subset, split=self.split, streaming=streaming)
        except OSError as error:  # not found and not reachable are both OSErrors
            raise ValueError(
                f"source={self.name!r} is neither {STANDARD_LIBRARY!r} nor an existing file or folder, and the hub did "
                f"not give a data set of that name (subset={self.subset!r}, split={self.split!r}): {error}"
            ) from error


def _texts(records: Iterable[dict[str, Any]], column: str) -> Iterator[str]:
    """The text of each record.

    Raises:
        ValueError: A record without that column (named with the columns it has), or whose value is not a string.
    """
    for number, record in enumerate(records):
        if column not in record:
            raise ValueError(f"text_field={column!r} is not a column of the data; its columns: {sorted(record)}.")
        if not isinstance(record[column], str):
            found = type(record[column]).__name__
            raise ValueError(f"text_field={column!r} must hold strings, but record {number} holds a {found}.")
        yield record[column]
