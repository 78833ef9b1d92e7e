"""tiktoken encodings: the one shipped with the project, those tiktoken knows, and local rank files."""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path

import tiktoken

SHIPPED = "titan_8k"
ASSETS = Path(__file__).parent / "assets"

# How text is cut before byte pairs are merged: a word with its leading space, up to three digits, line breaks with the
# indentation that follows, punctuation with its leading space, other white space. Every character falls in one class.
PATTERN = r" ?[\p{L}_]+|\p{N}{1,3}|[\r\n]+[ \t]*| ?[^\s\p{L}\p{N}_]+|[^\S\r\n]+(?!\S)|\s+"
END_OF_TEXT = "<|endoftext|>"

# Llama 3's pattern and special tokens, from `llama/tokenizer.py` of github.com/meta-llama/llama3 and, for the names
# that 3.1 gave to reserved ones, github.com/meta-llama/llama-models.
LLAMA3_RANKS = 128_000
LLAMA3_SPECIAL_TOKENS = 256
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_END_OF_TEXT = "<|end_of_text|>"
_LLAMA3_NAMED = (
    "<|begin_of_text|>",
    LLAMA3_END_OF_TEXT,
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)


def load_encoding(name: str) -> tiktoken.Encoding:
    """Loads an encoding by name or from a file.

    Args:
        name: `"titan_8k"` (shipped, vocabulary 8192); a local `.tiktoken` file or Llama 3's `tokenizer.model`, both of
            `base64 rank` lines; or a name that tiktoken knows, such as `"cl100k_base"` (downloaded at first use).

    A file with 128,000 ranks is Llama 3's: it gets that model's pattern and its 256 special tokens. Any other file gets
    the shipped encoding's pattern and `<|endoftext|>`.

    Raises:
        FileNotFoundError: `name` looks like a file and nothing is there.
        ValueError: An unknown name, or a file that does not hold `base64 rank` lines.
        ConnectionError: tiktoken knows the name and could not download it.
    """
    if name == SHIPPED:
        return encoding_from_file(ASSETS / f"{SHIPPED}.tiktoken")
    path = Path(name).expanduser()
    if path.is_file():
        return encoding_from_file(path)
    if name in tiktoken.list_encoding_names():
        return _known_encoding(name)
    if path.suffix or len(path.parts) > 1:
        raise FileNotFoundError(f"encoding={name!r} is not a file.")
    known = ", ".join([SHIPPED, *tiktoken.list_encoding_names()])
    raise ValueError(f"encoding={name!r} is unknown. Valid: {known}, or the path of a .tiktoken or Llama 3 file.")


def _known_encoding(name: str) -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # requests' errors are OSErrors
        raise ConnectionError(
            f"encoding={name!r} has to be downloaded at first use, and that failed: {error}. "
            f"Without a network use {SHIPPED!r}, a local .tiktoken file, or a filled TIKTOKEN_CACHE_DIR."
        ) from error


def encoding_from_file(path: Path) -> tiktoken.Encoding:
    """Builds the encoding of a rank file. Its name carries a hash of the content."""
    ranks = read_ranks(path)
    if len(ranks) == LLAMA3_RANKS:
        pattern, special_names = LLAMA3_PATTERN, _llama3_special_tokens()
    else:
        pattern, special_names = PATTERN, [END_OF_TEXT]
    return tiktoken.Encoding(
        name=f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}",
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(special_names)},
    )


def _llama3_special_tokens() -> list[str]:
    reserved = range(2, LLAMA3_SPECIAL_TOKENS - len(_LLAMA3_NAMED) + 2)
    return [*_LLAMA3_NAMED, *(f"<|reserved_special_token_{i}|>" for i in reserved)]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Reads `base64 rank` lines: the bytes of each token and its rank, which is also its id.

    Raises:
        ValueError: A line of another form, a rank twice or missing, or a byte without a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"encoding={str(path)!r} is not a tiktoken file: line {number} is not `base64 rank`. "
                "(SentencePiece models, such as Llama 2's tokenizer.model, are another format.)"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"encoding={str(path)!r}: its ranks are not 0, 1, 2, ... once each.")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"encoding={str(path)!r} has no token for the bytes {missing}: it cannot encode every text.")
    return ranks


def end_of_text(encoding: tiktoken.Encoding) -> int:
    """The id of the token that ends a document."""
    for name in (END_OF_TEXT, LLAMA3_END_OF_TEXT):
        if name in encoding.special_tokens_set:
            return encoding.encode_single_token(name)
    raise ValueError(f"Encoding {encoding.name!r} has no end-of-text token; it has {encoding.special_tokens_set}.")
