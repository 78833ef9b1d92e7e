"""The shipped encoding and those of local files."""

from __future__ import annotations

import base64
import dataclasses
import itertools
from pathlib import Path

import pytest
import tiktoken

from models.data import encoding as encodings
from models.data.encoding import ASSETS, LLAMA3_RANKS, end_of_text, load_encoding, read_ranks

SAMPLES = [
    "def f(x):\n    return x + 1\n\n\n\n# end",
    "tabs\tand  two spaces \r\n\r\n  \n trailing   ",
    "12345 3.14 0xff _private __dunder__ CamelCase",
    "Ünïcödé 漢字 עברית 🎉👩‍👩‍👧 e\u0301 \u00a0\u2003\x00\x7f",
    "<|endoftext|> is text here",
    "",
]


@pytest.fixture(scope="module")
def shipped() -> tiktoken.Encoding:
    return load_encoding("titan_8k")


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back_as_it_was(shipped: tiktoken.Encoding, text: str) -> None:
    ids = shipped.encode_ordinary(text)
    assert shipped.decode(ids) == text
    assert all(token < end_of_text(shipped) for token in ids)


def test_every_byte_has_a_token(shipped: tiktoken.Encoding) -> None:
    assert [shipped.decode_single_token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_the_vocabulary_is_8192(shipped: tiktoken.Encoding) -> None:
    assert shipped.n_vocab == 8192
    assert end_of_text(shipped) == 8191
    assert shipped.decode([8191]) == "<|endoftext|>"


def test_it_is_good_at_python(shipped: tiktoken.Encoding) -> None:
    source = Path(dataclasses.__file__).read_text()
    assert len(source) / len(shipped.encode_ordinary(source)) > 3


def merge(piece: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """Byte-pair encoding as in the textbook: merge the pair of lowest rank until none is left below a rank."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks.get(a + b, below), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        rank, i = min(pairs, default=(below, 0))
        if rank >= below:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_every_token_is_the_merge_of_two_older_ones() -> None:
    ranks = read_ranks(ASSETS / "titan_8k.tiktoken")
    learnt = {token: rank for token, rank in ranks.items() if len(token) > 1}
    assert len(learnt) == 8192 - 256 - 1
    for token, rank in learnt.items():
        assert len(merge(token, ranks, below=rank)) == 2, token


def test_encoding_is_textbook_merging(shipped: tiktoken.Encoding) -> None:
    ranks = read_ranks(ASSETS / "titan_8k.tiktoken")
    for word in (" return", "__init__", "unforeseeable", " 漢字"):
        assert shipped.encode_ordinary(word) == [ranks[part] for part in merge(word.encode(), ranks, below=len(ranks))]


def write_ranks(path: Path, tokens: list[bytes]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_a_local_file(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc"]
    encoding = load_encoding(str(write_ranks(tmp_path / "mine.tiktoken", tokens)))
    assert encoding.encode_ordinary("abcab") == [257, 256]
    assert (encoding.n_vocab, end_of_text(encoding)) == (259, 258)


def test_a_llama3_file(tmp_path: Path) -> None:
    words = (bytes(pair) for pair in itertools.product(range(256), repeat=2))
    triples = (b"abc" + bytes(pair) for pair in itertools.product(range(256), repeat=2))
    tokens = [bytes([byte]) for byte in range(256)] + list(
        itertools.islice(itertools.chain(words, triples), LLAMA3_RANKS - 256)
    )
    encoding = load_encoding(str(write_ranks(tmp_path / "tokenizer.model", tokens)))
    assert encoding.n_vocab == 128_256
    assert end_of_text(encoding) == 128_001
    special = {"<|begin_of_text|>": 128_000, "<|start_header_id|>": 128_006, "<|eot_id|>": 128_009}
    assert {name: encoding.encode_single_token(name) for name in special} == special
    assert encoding.decode([128_255]) == "<|reserved_special_token_246|>"
    assert encoding.decode(encoding.encode_ordinary(SAMPLES[0])) == SAMPLES[0]


def test_a_changed_file_is_another_encoding(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    first = load_encoding(str(write_ranks(tmp_path / "mine.tiktoken", tokens))).name
    second = load_encoding(str(write_ranks(tmp_path / "mine.tiktoken", [*tokens, b"ab"]))).name
    assert first != second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x0a\x0e\x0a\x05<unk>", "line 1 is not `base64 rank`"),  # a SentencePiece model
        (b"AA== 0\nAQ== x\n", "line 2 is not `base64 rank`"),
        (b"AA== 0\nAQ== 2\n", "ranks are not 0, 1, 2"),
        (b"AA== 0\nAQ== 1\n", "no token for the bytes"),
    ],
)
def test_a_file_of_another_format(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_encoding(str(path))


def test_names_that_are_no_encoding() -> None:
    with pytest.raises(ValueError, match=r"encoding='cl1000k' is unknown. Valid: titan_8k, .*cl100k_base"):
        load_encoding("cl1000k")
    with pytest.raises(FileNotFoundError, match=r"encoding='nowhere/x.tiktoken' is not a file"):
        load_encoding("nowhere/x.tiktoken")


def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise OSError("no route to host")

    monkeypatch.setattr(encodings.tiktoken, "get_encoding", no_network)
    with pytest.raises(ConnectionError, match=r"encoding='cl100k_base' .* no route to host.* 'titan_8k'") as caught:
        load_encoding("cl100k_base")
    assert isinstance(caught.value.__cause__, OSError)
