"""Trains the encoding that the project ships, and writes it in tiktoken's format.

    pip install tokenizers && python scripts/train_encoding.py

A byte-level BPE on the Python standard library's sources and its manual's topics: 256 bytes, 7935 merges and
`<|endoftext|>` make a vocabulary of 8192. The same Python release gives the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread: the order of equally frequent pairs must not vary

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from models.data.corpus import StandardLibrary
from models.data.encoding import ASSETS, PATTERN, SHIPPED, encoding_from_file

VOCABULARY_SIZE = 8192
SPECIAL_TOKENS = 1


def train() -> list[bytes]:
    """Returns the tokens as bytes, in the order in which they were learnt; the 256 bytes come first."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - SPECIAL_TOKENS, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(StandardLibrary().documents(), trainer)
    vocabulary = tokenizer.get_vocab()
    to_byte = printable_bytes()
    learnt = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens = [bytes(to_byte[character] for character in token) for token in learnt]
    return [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]


def printable_bytes() -> dict[str, int]:
    """The byte behind each of the printable characters that byte-level BPE writes bytes with.

    The convention is GPT-2's: printable Latin-1 characters stand for themselves, the other bytes follow from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ASSETS / f"{SHIPPED}.tiktoken")
    output: Path = parser.parse_args().output
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(train())]
    output.write_bytes(b"".join(lines))

    encoding = encoding_from_file(output)
    documents = list(StandardLibrary().documents())
    ids = encoding.encode_ordinary_batch(documents, num_threads=2)
    if encoding.n_vocab != VOCABULARY_SIZE or encoding.decode_batch(ids) != documents:
        raise RuntimeError(f"{output}: a vocabulary of {encoding.n_vocab}, or text that does not come back as it was.")
    count = sum(map(len, ids))
    size = sum(len(document.encode()) for document in documents)
    sys.stdout.write(f"{output}: {size} bytes of corpus are {count} tokens, {size / count:.2f} bytes each\n")


if __name__ == "__main__":
    main()
