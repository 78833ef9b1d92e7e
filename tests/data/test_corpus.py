"""Where documents come from, and what is said when they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from models.data import corpus as corpora
from models.data.corpus import Corpus, StandardLibrary, open_corpus

Open = Callable[..., Corpus]


@pytest.fixture
def open_source(tmp_path: Path) -> Open:
    def open_source(source: object, **options: Any) -> Corpus:
        defaults = {"text_field": "text", "subset": None, "split": "train", "scratch": tmp_path / "scratch"}
        return open_corpus(str(source), **{**defaults, **options})

    return open_source


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(records).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_standard_library_has_sources_and_topics_but_no_tests() -> None:
    names = [name for name, _ in StandardLibrary._sources()]
    assert {"dataclasses.py", "json/decoder.py", "pydoc_data/topics/assignment"} <= set(names)
    assert not {"test", "tests", "idle_test", "site-packages"} & {part for name in names for part in name.split("/")}
    documents = list(StandardLibrary().documents())
    assert len(documents) == len(names)
    assert 8_000_000 < sum(map(len, documents)) < 20_000_000
    assert documents[names.index("dataclasses.py")].startswith("import re\n")


def test_the_standard_librarys_tail_is_a_fair_sample() -> None:
    """Sorted by name, the validation rows would all be manual topics, or all be `zipfile`."""
    tail = [name for name, _ in StandardLibrary._sources()][-60:]
    topics = sum("topics" in name for name in tail)
    assert 2 < topics < 30
    assert len({name[0] for name in tail}) > 10


def test_the_standard_library_lacks_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [name for name, _ in StandardLibrary._sources()]
    files = list(corpora._python_files(Path(corpora.sysconfig.get_path("stdlib"))))
    monkeypatch.setattr(corpora, "_python_files", lambda root: iter(file for file in files if file.name != "ast.py"))
    assert [name for name, _ in StandardLibrary._sources()] == [
        name for name in whole if not name.endswith("/ast.py") and name != "ast.py"
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_records(open_source: Open, tmp_path: Path, suffix: str) -> None:
    texts = [f"document {i}" for i in range(30)]
    for part in range(3):
        records = [{"body": text, "id": i} for i, text in enumerate(texts[10 * part : 10 * part + 10])]
        write_records(tmp_path / "data" / f"part{part}{suffix}", records)
    corpus = open_source(tmp_path / "data", text_field="body")
    documents = list(corpus.documents())
    assert documents != texts
    assert sorted(documents) == sorted(texts)
    assert documents == list(corpus.documents())
    assert list(corpus.stream()) == texts
    assert list(corpus.stream(skip=17)) == texts[17:]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_text_file_is_one_document(open_source: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first line\n\nsecond line\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("other")
    assert sorted(open_source(tmp_path).documents()) == ["first line\n\nsecond line\n", "other"]
    assert list(open_source(tmp_path / "a.txt", text_field="body").documents()) == ["first line\n\nsecond line\n"]


def test_the_key_follows_the_content(open_source: Open, tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"text": "one"}])
    before = open_source(path).key()
    assert open_source(path).key() == before
    write_records(path, [{"text": "one"}, {"text": "two"}])
    assert open_source(path).key() != before
    assert StandardLibrary().key() == StandardLibrary().key()


def test_a_hub_name(open_source: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    local = {"data_files": str(write_records(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}]))}
    load_dataset = datasets.load_dataset

    def from_hub(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        return load_dataset("json", split="train", streaming=streaming, cache_dir=tmp_path / "hub", **local)

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    corpus = open_source("owner/name", subset="en", split="test")
    assert sorted(corpus.documents()) == ["one", "two"]
    assert list(corpus.stream(skip=1)) == ["two"]
    assert asked == [("owner/name", "en", "test", False), ("owner/name", "en", "test", True)]
    assert corpus.key() == corpus.key()


def test_a_hub_name_that_the_hub_does_not_give(open_source: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("could not reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"source='wikitxt' is neither 'stdlib' nor .* could not reach") as caught:
        next(open_source("wikitxt").documents())
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize(
    "source", ["./data", "/no/such/folder", "~/no such", "a/b/c", "corpus.jsonl", "data/x.parquet"]
)
def test_a_path_where_nothing_is(open_source: Open, source: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist. Valid: 'stdlib', a folder or file of .txt"):
        open_source(source)


def test_files_that_cannot_be_used(open_source: Open, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder without any file of .txt, .jsonl, .parquet"):
        open_source(tmp_path)
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"a.csv' is not a file of .txt"):
        open_source(tmp_path / "a.csv")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"holds files of .jsonl and .txt: keep one kind"):
        open_source(tmp_path)


def test_records_without_text(open_source: Open, tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"body": "x", "id": 1}])
    for read in (lambda: open_source(path).documents(), lambda: open_source(path).stream()):
        with pytest.raises(
            ValueError, match=r"text_field='text' is not a column of the data; its columns: \['body', 'id'\]"
        ):
            next(read())
    with pytest.raises(ValueError, match=r"text_field='id' must hold strings, but record 0 holds a int"):
        next(open_source(path, text_field="id").documents())
