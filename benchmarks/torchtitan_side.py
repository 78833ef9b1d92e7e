"""TorchTitan's side of `benchmarks.peers`: the same models and settings, timed as the other sides are.

TorchTitan 0.2.2 and what it needs have to be importable; nothing of this project's packages is imported.
"""

import argparse
import itertools
import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.train import Trainer
from torchtitan.train import main as run_torchtitan

WARM_UP = 5  # steps, as in `benchmarks.training`
# As `benchmarks.cases`: flavour, batch size, arguments.
_SELECTIVE = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
_FLOAT8 = ["--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "output"]
CASES: dict[str, tuple[str, int, list[str]]] = {
    "1b": ("1B", 2, ["--activation_checkpoint.mode", "none"]),
    "1b-selective": ("1B", 2, _SELECTIVE),
    "1b-float8": ("1B", 2, [*_SELECTIVE, *_FLOAT8]),
    "8b-full": ("8B", 1, ["--activation_checkpoint.mode", "full"]),
    "8b-selective": ("8B", 1, _SELECTIVE),
    "8b": ("8B", 1, ["--activation_checkpoint.mode", "none"]),
}

marks: list[torch.cuda.Event] = []


class TimedTrainer(Trainer):
    """Marks the end of each step on the GPU's own time line."""

    def train_step(self, data_iterator):  # type: ignore[no-untyped-def]
        super().train_step(data_iterator)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)


def write_assets(folder: Path) -> None:
    """A tokenizer of words and some text for it."""
    text = "\n".join(
        path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
    )
    words = ["<unk>", *dict.fromkeys(text.split())][:100_000]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    for name in ("tokenizer", "c4_test"):
        (folder / "tests/assets" / name).mkdir(parents=True)
    (folder / "tests/assets/tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    with (folder / "tests/assets/c4_test/data.json").open("w") as lines:
        for start in range(0, len(text), 20_000):
            lines.write(json.dumps({"text": text[start : start + 20_000]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["torchtitan"])
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    # 16 layers of width 2048, 32 query heads and 8 key-value heads, feed-forward 8192: as Llama 3.2 1B.
    llama3_args["1B"] = TransformerModelArgs(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=1024, rope_theta=500_000
    )
    flavour, batch_size, arguments = CASES[options.case]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29778")
    with tempfile.TemporaryDirectory() as folder:
        write_assets(Path(folder))
        os.chdir(folder)
        sys.argv = ["torchtitan", "--model.name", "llama3", "--model.flavor", flavour, "--training.seq_len", "8192"]
        sys.argv += ["--training.local_batch_size", str(batch_size), "--training.steps", str(options.steps)]
        sys.argv += ["--optimizer.lr", "3e-4", "--metrics.log_freq", "1000", "--compile.enable", *arguments]
        run_torchtitan(TimedTrainer)
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks[WARM_UP - 1 :])]
    print(json.dumps({"seconds": seconds, "gib": torch.cuda.max_memory_reserved() / 2**30}))


if __name__ == "__main__":
    main()
