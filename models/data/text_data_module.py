"""The Lightning data module for text."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import Sampler

from models.data.corpus import STANDARD_LIBRARY, open_corpus
from models.data.encoding import SHIPPED, load_encoding
from models.data.loader import LazyDataLoader
from models.data.order import GlobalOrderSampler, HeldOutSampler, Position
from models.data.packing import PackedRows, TokenStream, row_count
from models.data.resume import DataProgress
from models.data.streaming import StreamedBatches, StreamLoader, held_out_rows
from models.data.token_cache import TokenCache, cache_folder, write_token_cache

_GIB = 1 << 30
_BYTES_PER_TOKEN = 16  # the token and its label, int64


class TextDataModule(LightningDataModule):
    """Text as packed rows of token ids, in one order that does not depend on ranks or batch size.

    Batches are `{"tokens", "labels"}`, int64, both (batch_size, sequence_length); `labels[t]` is the token after
    `tokens[t]`, or -100 where there is nothing to predict.

    The documents are encoded once per node, joined by end-of-text tokens and cut into rows. A checkpoint keeps the
    number of rows that all ranks have consumed, so training resumes at exactly the next row, inside an epoch too, with
    any number of ranks and any batch size. `test` and `predict` read the validation rows.

    Args:
        source: `"stdlib"` (the Python standard library's sources and its manual: no download), a folder or file of
            .txt, .jsonl or .parquet, or the name of a data set on the Hugging Face hub.
        encoding: `"titan_8k"` (shipped), a name that tiktoken knows, or the path of a `.tiktoken` file or of Llama 3's
            `tokenizer.model`.
        sequence_length: Tokens per row.
        batch_size: Rows per data rank and micro-batch.
        validation_rows: Rows held out for validation: the last ones of a corpus, the first ones of a stream.
        cross_document: Whether a document's end-of-text token is asked to predict the next document's first token.
        seed: Seed of the order of the training rows.
        streaming: Read and encode `source` as training goes, in the order in which it comes, without a copy on disk.
            Every rank reads all of it, and `validation_rows` are read into memory. Resuming passes over the documents
            already read without encoding them.
        num_workers: Worker processes per data loader; for a stream at most one is used.
        cache_dir: Where token ids are kept; by default `titan_strategy` in `$XDG_CACHE_HOME` or `~/.cache`.
        text_field: Column that holds the text of .jsonl, .parquet and hub records.
        subset: Configuration of a hub data set.
        split: Split of a hub data set.

    Raises:
        ValueError: An argument is out of range, or one batch does not fit in this machine's memory.
        FileNotFoundError: `source` is a path where nothing is.
    """

    def __init__(
        self,
        source: str = STANDARD_LIBRARY,
        encoding: str = SHIPPED,
        sequence_length: int = 1024,
        batch_size: int = 8,
        validation_rows: int = 64,
        cross_document: bool = True,
        seed: int = 0,
        streaming: bool = False,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        text_field: str = "text",
        subset: str | None = None,
        split: str = "train",
    ) -> None:
        super().__init__()
        sizes = {"sequence_length": sequence_length, "batch_size": batch_size, "validation_rows": validation_rows}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        _check_memory(sequence_length, batch_size)
        self.encoding = encoding
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.validation_rows = validation_rows
        self.cross_document = cross_document
        self.seed = seed
        self.streaming = streaming
        self.num_workers = num_workers
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        self.corpus = open_corpus(source, text_field=text_field, subset=subset, split=split, scratch=self.cache_dir)

        self._train_rows: PackedRows | None = None
        self._held_out: PackedRows | None = None
        self._digest = ""
        self._first_document = 0
        self._progress = DataProgress()

    @cached_property
    def encoder(self) -> tiktoken.Encoding:
        """The encoding: `encoder.encode_ordinary(text)` and `encoder.decode(ids)`."""
        return load_encoding(self.encoding)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, special tokens included."""
        return self.encoder.n_vocab

    @property
    def train_rows(self) -> PackedRows:
        """The training rows; a stream has none that could be counted."""
        if self._train_rows is None:
            raise RuntimeError("There are no training rows before setup(), nor with streaming=True.")
        return self._train_rows

    @property
    def held_out(self) -> PackedRows:
        """The validation rows."""
        if self._held_out is None:
            raise RuntimeError("There are no validation rows before setup().")
        return self._held_out

    @cached_property
    def _cache_folder(self) -> Path:
        return cache_folder(self.cache_dir, self.corpus.key(), self.encoder)

    def prepare_data(self) -> None:
        """Encodes the corpus into the token cache, unless it is there."""
        if not self.streaming and not self._cache_folder.exists():
            write_token_cache(self._cache_folder, self.corpus.documents(), self.encoder)

    def setup(self, stage: str | None = None) -> None:
        """Splits training from validation.

        Raises:
            ValueError: The corpus is too short for the rows that are asked for.
        """
        if self.streaming:
            self._split_stream()
        elif self._cache_folder.exists():
            self._split_corpus(TokenCache(self._cache_folder))
        else:
            raise RuntimeError(f"There are no tokens in {self._cache_folder}: prepare_data() comes before setup().")
        if stage == TrainerFn.FITTING and self.trainer is not None:
            self._progress.begin(Position())
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set undeclared
            if self._progress not in callbacks:
                callbacks.insert(0, self._progress)

    def _split_corpus(self, cache: TokenCache) -> None:
        rows = row_count(cache.facts.tokens, self.sequence_length)
        if rows == 0:
            raise ValueError(
                f"sequence_length={self.sequence_length} is too long: the corpus has {cache.facts.tokens} tokens, and "
                f"one row takes {self.sequence_length + 1}."
            )
        train = rows - self.validation_rows
        if train < 1:
            raise ValueError(
                f"validation_rows={self.validation_rows} leaves nothing to train on: the corpus of "
                f"{cache.facts.tokens} tokens makes {rows} rows of sequence_length={self.sequence_length}. "
                f"At most {rows - 1} rows can be held out."
            )
        self._digest = cache.facts.digest
        self._train_rows = self._packed(cache, range(train))
        self._held_out = self._packed(cache, range(train, rows))

    def _split_stream(self) -> None:
        rows, length = self.validation_rows, self.sequence_length
        tokens, self._first_document = held_out_rows(self.corpus, self.encoder, rows=rows, sequence_length=length)
        self._held_out = self._packed(tokens, range(rows))

    def _packed(self, stream: TokenStream, rows: range) -> PackedRows:
        return PackedRows(stream, self.sequence_length, rows, cross_document=self.cross_document)

    def train_dataloader(self) -> LazyDataLoader | StreamLoader:
        """This rank's training batches.

        Raises:
            ValueError: The training rows do not fill one global micro-batch.
        """
        return self._streamed_loader() if self.streaming else self._packed_loader()

    def _packed_loader(self) -> LazyDataLoader:
        sampler = GlobalOrderSampler(len(self.train_rows), seed=self.seed, **self._share())
        if len(sampler) == 0:
            raise ValueError(
                f"batch_size={self.batch_size} on {sampler.num_replicas} data ranks takes {sampler.global_batch_size} "
                f"rows at a time, but there are {sampler.rows} training rows."
            )
        self._progress.attach(sampler)
        return self._loader(self.train_rows, sampler)

    def _streamed_loader(self) -> StreamLoader:
        batches = StreamedBatches(
            self.corpus,
            self.encoder,
            self.sequence_length,
            first_document=self._first_document,
            cross_document=self.cross_document,
            **self._share(),
        )
        loader = StreamLoader(batches, num_workers=self.num_workers)
        self._progress.attach(loader)
        return loader

    def val_dataloader(self) -> LazyDataLoader:
        """This rank's validation batches: over all ranks every row once."""
        return self._loader(self.held_out, HeldOutSampler(len(self.held_out), **self._share()))

    def test_dataloader(self) -> LazyDataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> LazyDataLoader:
        return self.val_dataloader()

    def _share(self) -> dict[str, int]:
        """Which part of each global micro-batch this rank reads."""
        coordinate = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return {"batch_size": self.batch_size, **(coordinate or {"num_replicas": 1, "rank": 0})}

    def _loader(self, rows: PackedRows, sampler: Sampler[Any]) -> LazyDataLoader:
        return LazyDataLoader(
            rows,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            # Without its own generator a loader draws from the global one each time it is iterated.
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the position, the same on every rank, and what it is a position in."""
        return {"position": asdict(self._progress.position(self.trainer)), "data": self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues training at a position that `state_dict` gave, on any number of ranks.

        Raises:
            ValueError: The position is one in other data, or in another order.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # weights may be evaluated on any data
        found, expected = state_dict["data"], self._identity()
        differences = [
            f"{name} was {found.get(name)!r} and is {expected.get(name)!r}"
            for name in sorted(found.keys() | expected.keys())
            if found.get(name) != expected.get(name)
        ]
        if differences:
            raise ValueError(
                f"The checkpoint's position is one in other data: {'; '.join(differences)}. Resume with the data that "
                "the checkpoint was made with, or start a new run from its weights."
            )
        self._progress.restore(Position(**state_dict["position"]))

    def _identity(self) -> dict[str, Any]:
        """Everything that decides which row is the n-th."""
        shared = {"sequence_length": self.sequence_length, "validation_rows": self.validation_rows}
        if self.streaming:
            return {**shared, "stream": self.corpus.stream_key(), "encoding": self.encoder.name}
        return {**shared, "seed": self.seed, "rows": len(self.train_rows), "tokens": self._digest}


def default_cache_dir() -> Path:
    """`titan_strategy` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan_strategy"


def _check_memory(sequence_length: int, batch_size: int) -> None:
    """Refuses a batch that is larger than the machine's memory, before anything of its size is made."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = sequence_length * batch_size * _BYTES_PER_TOKEN
    if wanted > memory:
        raise ValueError(
            f"sequence_length={sequence_length} x batch_size={batch_size} makes a batch of {wanted / _GIB:.1f} GiB, "
            f"more than this machine's {memory / _GIB:.1f} GiB of memory."
        )
