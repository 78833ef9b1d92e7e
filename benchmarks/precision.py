"""Training throughput and memory of one model in each precision and each mode of activation checkpointing, on one GPU.

Run `python -m benchmarks.precision` on a machine with a GPU of compute capability 8.9 or more. All settings are
compiled and run in turn in one process; the table gives medians over the steps of all rounds.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.training import SEQUENCE, environment, train
from models import TransformerConfig
from precision_plugins import ActivationCheckpointing, CompileConfig, Float8Precision, TitanPrecision

# 16 layers of width 2048; its head has a weight of its own, as TorchTitan's have.
MODEL = TransformerConfig.preset("llama3_2_1b").override(tie_embeddings=False)


def settings() -> dict[str, TitanPrecision]:
    """What is compared, by name."""
    compile = CompileConfig()

    def bf16(mode: ActivationCheckpointing) -> TitanPrecision:
        return TitanPrecision("bf16-mixed", mode, compile)

    none, selective = ActivationCheckpointing(), ActivationCheckpointing("selective")
    halved = ActivationCheckpointing("selective", recompute_every={"aten.mm.default": 2})
    return {
        "bf16": bf16(none),
        "bf16, selective": bf16(selective),
        "bf16, selective, every 2nd product again": bf16(halved),
        "bf16, every 2 blocks": bf16(ActivationCheckpointing("every_n_blocks", every_n_blocks=2)),
        "bf16, full": bf16(ActivationCheckpointing("full")),
        **{
            f"bf16, memory budget {budget}": bf16(ActivationCheckpointing("memory_budget", memory_budget=budget))
            for budget in (0.75, 0.5, 0.25)
        },
        "float8 tensorwise": Float8Precision("tensorwise", activation_checkpointing=none, compile=compile),
        "float8 tensorwise, selective": Float8Precision(
            "tensorwise", activation_checkpointing=selective, compile=compile
        ),
        "float8 rowwise": Float8Precision("rowwise", activation_checkpointing=none, compile=compile),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=list(settings()), default=list(settings()))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/precision.json"))
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(options.rounds):
        for name in options.only:
            run = train(MODEL, settings()[name], options.batch_size, options.steps)
            runs[name].append(run.as_dict())
            print(f"{name:40} first step {run.first_step:6.1f} s, loss {run.loss:.3f}", flush=True)
            options.output.write_text(json.dumps(report(runs, options.batch_size), indent=1))  # kept if the next fails
    table = report(runs, options.batch_size)["table"]
    base = table[options.only[0]]["tokens_per_second"]
    for name, row in table.items():
        speed = row["tokens_per_second"]
        print(f"{name:40} {speed:10.0f} tokens/s {speed / base:6.3f} {row['gib']:7.1f} GiB")


def report(runs: dict[str, list[dict[str, Any]]], batch_size: int) -> dict[str, Any]:
    """Medians of what has run."""
    table = {}
    for name, mine in runs.items():
        seconds = [second for run in mine for second in run["seconds"]]
        if seconds:
            speed = batch_size * SEQUENCE / statistics.median(seconds)
            table[name] = {"tokens_per_second": speed, "gib": max(run["gib"] for run in mine)}
    return {
        "environment": environment(),
        "settings": {"model": "llama3_2_1b, untied", "batch_size": batch_size, "sequence": SEQUENCE},
        "table": table,
        "runs": runs,
    }


if __name__ == "__main__":
    main()
