"""Training loss of one model in MXFP8 (emulated) and Float8 against bf16, from the same weights on the same text.

Run `python -m benchmarks.convergence` on a machine with a GPU of compute capability 8.9 or more, and
`python -m benchmarks.convergence --plot` anywhere to draw the curves. Each seed has weights and an order of the rows of
its own; its runs differ in precision alone. The text is the Python source of the packages beside torch.
"""

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.training import environment
from models import AdamWConfig, CausalLM, LearningRateSchedule, TextDataModule, TransformerConfig
from precision_plugins import CompileConfig, Float8Precision, MXFP8Precision, TitanPrecision
from titan_strategy import TitanStrategy

MODEL = TransformerConfig(
    vocab_size=8192, dim=768, n_layers=6, n_heads=12, n_kv_heads=12, ffn_dim=3072, max_sequence_length=1024
)
PEAK_LEARNING_RATE, WARM_UP = 1e-3, 100
LAST = 100  # steps whose mean loss is compared
SEEDS = (0, 1, 2)
BATCH_SIZE = 4


def precisions() -> dict[str, TitanPrecision]:
    """What is compared, by name. Everything but the head is converted, also what would be left alone by default."""
    head, compile = ["output"], CompileConfig()
    return {
        "bf16": TitanPrecision("bf16-mixed", compile=compile),
        "mxfp8_rceil (emulated)": MXFP8Precision(filter_fqns=head, emulate=True, compile=compile),
        "float8 tensorwise": Float8Precision("tensorwise", filter_fqns=head, compile=compile),
        "float8 rowwise": Float8Precision("rowwise", filter_fqns=head, compile=compile),
    }


class Losses(pl.Callback):
    """Prints the loss of every step, in nats per token; read in portions, so that steps do not wait for it."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self._losses.append(trainer.callback_metrics["train/loss"].clone())
        if len(self._losses) == 100:
            self._print()

    def on_train_end(self, *args: object) -> None:
        if self._losses:
            self._print()

    def _print(self) -> None:
        print(*torch.stack(self._losses).tolist(), sep="\n", flush=True)
        self._losses.clear()


def data(source: str, seed: int) -> TextDataModule:
    """Rows of 1024 tokens."""
    return TextDataModule(source, sequence_length=1024, batch_size=BATCH_SIZE, seed=seed, num_workers=1)


def write_python_sources(path: Path, megabytes: int) -> None:
    """The sources of the packages installed beside torch, a record for each file, up to a size."""
    left = megabytes * 10**6
    with path.open("w") as records:
        for file in sorted(Path(torch.__file__).parent.parent.rglob("*.py")):
            text = file.read_text(errors="replace")
            left -= len(text)
            if left < 0:
                return
            if text:
                records.write(json.dumps({"text": text}) + "\n")


def train(name: str, seed: int, steps: int, source: str) -> None:
    """Print the loss of each step."""
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=TitanStrategy(seed=seed, precision_plugin=precisions()[name]),
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[Losses()],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=f"runs/convergence/{name.split()[-1]}-{seed}",
    )
    schedule = LearningRateSchedule("cosine", WARM_UP)
    module = CausalLM(config=MODEL, optimizer=AdamWConfig(PEAK_LEARNING_RATE), schedule=schedule)
    trainer.fit(module, data(source, seed))


def compare(runs: dict[str, list[list[float]]]) -> dict[str, dict[str, Any]]:
    """Mean loss of the last steps of each seed, and how far it lies from that of bf16."""
    means = {name: [statistics.fmean(losses[-LAST:]) for losses in seeds] for name, seeds in runs.items()}
    return {
        name: {
            "last_loss": seeds,
            "relative_to_bf16": [mine / base - 1 for mine, base in zip(seeds, means["bf16"], strict=True)],
        }
        for name, seeds in means.items()
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """The curves, each a mean over the seeds and over windows of 20 steps; below, how far they lie from bf16's."""
    from matplotlib.figure import Figure

    curves = {name: _smooth(seeds) for name, seeds in result["losses"].items()}
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name, curve in curves.items():
        steps = [20 * i + 10 for i in range(len(curve))]
        above.plot(steps, curve, label=name)
        below.plot(steps, [100 * (mine / base - 1) for mine, base in zip(curve, curves["bf16"], strict=True)])
    above.set_ylabel("training loss, nats per token")
    above.legend()
    below.set_ylabel("difference from bf16, %")
    below.set_ylim(-2, 2)
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def _smooth(seeds: list[list[float]], width: int = 20) -> list[float]:
    mean = [statistics.fmean(losses) for losses in zip(*seeds, strict=True)]
    return [statistics.fmean(mean[i : i + width]) for i in range(0, len(mean) - width + 1, width)]


def run_side_by_side(names: list[str], steps: int, folder: Path) -> dict[str, list[list[float]]]:
    """The losses of each seed by name, from a process for each of them; `folder` keeps what was done if one fails."""
    command = [sys.executable, "-m", "benchmarks.convergence", "--steps", str(steps)]
    runs = list(itertools.product(names, SEEDS))
    logs = [folder / (re.sub(r"\W+", "-", f"{name} seed {seed}") + ".txt") for name, seed in runs]
    processes = [
        subprocess.Popen([*command, "--only", name, "--seed", str(seed)], stdout=log.open("w"))
        for (name, seed), log in zip(runs, logs, strict=True)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a run failed; its error stands above")
    losses = [list(map(float, log.read_text().split())) for log in logs]
    return {name: losses[i * len(SEEDS) : (i + 1) * len(SEEDS)] for i, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=60, help="of text")
    parser.add_argument("--only", nargs="+", choices=list(precisions()), default=list(precisions()))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/convergence.json"))
    parser.add_argument("--logs", type=Path, default=Path("runs/convergence"), help="folder for the losses of each run")
    parser.add_argument("--seed", type=int, help="run this one alone and print its losses")
    parser.add_argument("--plot", action="store_true", help="draw what --output holds")
    options = parser.parse_args()
    source = Path("runs/convergence/sources.jsonl")
    if options.seed is not None:
        train(options.only[0], options.seed, options.steps, str(source))
        return
    if options.plot:
        plot(json.loads(options.output.read_text()), options.output.with_suffix(".png"))
        return
    for folder in (source.parent, options.output.parent, options.logs):
        folder.mkdir(parents=True, exist_ok=True)
    write_python_sources(source, options.megabytes)
    data(str(source), 0).prepare_data()  # once, before the runs begin side by side
    runs = run_side_by_side(options.only, options.steps, options.logs)
    result = {
        "environment": environment(),
        "settings": {
            "model": asdict(MODEL),
            "parameters": MODEL.num_parameters,
            "steps": options.steps,
            "tokens_per_step": 1024 * BATCH_SIZE,
            "text_bytes": source.stat().st_size,
            "seeds": SEEDS,
            "last": LAST,
        },
        "comparison": compare(runs),
        "losses": {name: [[round(loss, 5) for loss in losses] for losses in seeds] for name, seeds in runs.items()},
    }
    options.output.write_text(json.dumps(result))
    for name, row in result["comparison"].items():
        print(name, *(f"{loss:.4f} ({100 * d:+.2f} %)" for loss, d in zip(*row.values(), strict=True)), sep="  ")


if __name__ == "__main__":
    main()
