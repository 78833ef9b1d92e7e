"""The data module as a whole: cache, sizes, streams, configuration."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer

from models import TextDataModule
from models.data.corpus import StandardLibrary
from models.data.encoding import load_encoding
from models.data.text_data_module import default_cache_dir
from models.data.token_cache import FACTS_FILE, TOKENS_FILE, TokenCache, write_token_cache
from tests.data.training import OneOfSeveral, Recorder, train

MakeData = Callable[..., TextDataModule]


def test_the_default_trains_on_real_text(tmp_path: Path) -> None:
    data = TextDataModule(cache_dir=tmp_path)
    data.prepare_data()
    data.setup()
    assert data.vocabulary_size == 8192
    assert 2500 < len(data.train_rows) < 5000
    batch = next(iter(data.train_dataloader()))
    assert batch["tokens"].shape == batch["labels"].shape == (8, 1024)
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    text = data.encoder.decode(data.train_rows[0]["tokens"].tolist())
    first = next(document for document in StandardLibrary().documents() if document)  # which may start with empty files
    assert first.startswith(text[:500])


def test_tokens_are_written_once(make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_data(cache_dir=tmp_path)
    first.prepare_data()
    monkeypatch.setattr("models.data.text_data_module.write_token_cache", lambda *_: pytest.fail("written again"))
    second = make_data(cache_dir=tmp_path, sequence_length=8, seed=3)
    second.prepare_data()
    second.setup()
    (folder,) = tmp_path.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [FACTS_FILE, TOKENS_FILE]


def test_other_text_is_another_cache(make_data: MakeData, corpus_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "corpus.txt"
    copy.write_text(corpus_file.read_text())
    counts = []
    for _ in range(2):
        data = TextDataModule(str(copy), sequence_length=16, validation_rows=1, cache_dir=tmp_path / "cache")
        data.prepare_data()
        data.setup()
        counts.append(len(data.train_rows))
        copy.write_text(copy.read_text() * 2)
    assert counts[1] > 1.9 * counts[0]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def documents() -> Any:
        yield "x" * 3_000_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_cache(tmp_path / "tokens", documents(), load_encoding("titan_8k"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_no_cache(make_data: MakeData, tmp_path: Path) -> None:
    """A process that is killed cannot tidy up: its unfinished folder must not be taken for a finished one."""
    data = make_data(cache_dir=tmp_path)
    remains = tmp_path / "incomplete-abc" / data._cache_folder.name
    remains.mkdir(parents=True)
    (remains / TOKENS_FILE).write_bytes(b"half")
    data.prepare_data()
    data.setup()
    assert len(data.train_rows) == 31


def _write(folder: Path, barrier: Any) -> None:
    barrier.wait(timeout=60)
    write_token_cache(folder, (f"document {i}" for i in range(3000)), load_encoding("titan_8k"))


def test_processes_that_write_at_the_same_time(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(4)
    writers = [fork.Process(target=_write, args=(tmp_path / "tokens", barrier)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert TokenCache(tmp_path / "tokens").facts.documents == 3000


def test_a_damaged_cache(make_data: MakeData, tmp_path: Path) -> None:
    data = make_data(cache_dir=tmp_path)
    data.prepare_data()
    tokens = data._cache_folder / TOKENS_FILE
    tokens.write_bytes(tokens.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"is damaged: \d+ bytes of tokens instead of \d+. Delete the folder"):
        data.setup()


def test_setup_without_tokens(make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"prepare_data\(\) comes before setup\(\)"):
        make_data(cache_dir=tmp_path).setup()


def test_the_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/titan_strategy")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "titan_strategy"


def test_a_large_vocabulary_takes_wider_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = load_encoding("titan_8k")
    monkeypatch.setattr(type(encoding), "n_vocab", 100_000)
    write_token_cache(tmp_path / "tokens", ["some text"], encoding)
    cache = TokenCache(tmp_path / "tokens")
    assert cache.tokens.dtype == "uint32"
    assert encoding.decode(cache.tokens[:-1].tolist()) == "some text"


def test_a_pickled_cache_maps_the_file_again(tmp_path: Path) -> None:
    write_token_cache(tmp_path / "tokens", ["some text " * 10_000], load_encoding("titan_8k"))
    cache = TokenCache(tmp_path / "tokens")
    assert len(cache.tokens) > 10_000
    content = pickle.dumps(cache)
    assert len(content) < 1000
    assert (pickle.loads(content).tokens == cache.tokens).all()


def test_texts_without_any_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    data = TextDataModule(str(tmp_path / "a.jsonl"), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="source holds no text"):
        data.prepare_data()
    assert not any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sequence_length": 1000},
            r"sequence_length=1000 is too long: the corpus has \d+ tokens, and one row takes 1001",
        ),
        ({"validation_rows": 35}, r"validation_rows=35 leaves nothing .* At most 34 rows"),
    ],
)
def test_a_corpus_that_is_too_short(make_data: MakeData, options: dict[str, int], message: str) -> None:
    data = make_data(**options)
    data.prepare_data()
    with pytest.raises(ValueError, match=message):
        data.setup()


def test_a_global_batch_that_cannot_be_filled(make_data: MakeData) -> None:
    with pytest.raises(ValueError, match=r"batch_size=8 on 4 data ranks takes 32 rows at a time, but there are 31"):
        train(make_data(batch_size=8), max_epochs=1, strategy=OneOfSeveral(4, 0))


@pytest.mark.parametrize("name", ["sequence_length", "batch_size", "validation_rows"])
def test_sizes_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        TextDataModule(**{name: 0})


def test_a_batch_larger_than_memory() -> None:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    with pytest.raises(
        ValueError, match=rf"sequence_length=1000000000 x batch_size=1000 .* 14901.2 GiB.* {gib:.1f} GiB"
    ):
        TextDataModule(sequence_length=10**9, batch_size=1000)


def test_steps_can_be_estimated_before_a_checkpoint_is_restored(make_data: MakeData, tmp_path: Path) -> None:
    """A schedule that asks for the number of steps makes Lightning build the loader before it restores the position."""

    class Estimator(Recorder):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            assert self.trainer.estimated_stepping_batches == 20
            return super().configure_optimizers()

    full = train(make_data(num_workers=1), save_to=tmp_path, max_epochs=2)
    for saved in (full.saved[4], full.saved[-4]):
        module = Estimator()
        trainer = Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        trainer.fit(module, make_data(num_workers=1), ckpt_path=saved.path)
        assert module.trained == full.module.trained[saved.trained :]


def test_overfitting_repeats_the_same_rows(make_data: MakeData) -> None:
    run = train(make_data(), max_epochs=3, overfit_batches=2, limit_val_batches=0)
    rows = [batch.tokens for batch in run.module.trained]
    assert len(rows) == 6
    assert rows[:2] == rows[2:4] == rows[4:]


def test_the_command_line_knows_every_argument(tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(TextDataModule, "data")
    options = {"cache_dir": str(tmp_path), "streaming": "true", "subset": "en", "sequence_length": "64"}
    arguments = ["--data=models.TextDataModule", *(f"--data.{name}={value}" for name, value in options.items())]
    data = parser.instantiate_classes(parser.parse_args(arguments)).data
    assert (data.cache_dir, data.streaming, data.sequence_length) == (tmp_path, True, 64)
