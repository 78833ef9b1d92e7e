"""Four ways to train one model on one GPU, side by side: this project, a bare loop, TorchTitan and Lightning alone.

Run `python -m benchmarks.peers --torchtitan FOLDER` on a machine with a GPU, where FOLDER holds TorchTitan and what it
needs, apart from the project's own environment:

    pip install --target FOLDER torchtitan==0.2.2 "datasets<4.8"

The sides alternate in processes of their own; the table gives medians over the steps of all rounds, and the most memory
that torch held. Without --torchtitan that side is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.training import SEQUENCE, environment

SIDES = ("trainer", "bare", "torchtitan", "lightning")


def command(side: str, case: str, steps: int) -> list[str]:
    """What to run for one side; its last line of output is JSON."""
    module = "benchmarks.torchtitan_side" if side == "torchtitan" else "benchmarks.sides"
    return [sys.executable, "-m", module, "--side", side, "--case", case, "--steps", str(steps)]


def run(side: str, case: str, steps: int, torchtitan: Path | None) -> dict[str, Any]:
    """Seconds of each step after warm-up, and GiB; or what went wrong."""
    paths = [str(torchtitan)] if side == "torchtitan" else []
    variables = {
        "PYTHONPATH": os.pathsep.join([*paths, os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        # As TorchTitan's own start script has it; the same for all.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    done = subprocess.run(
        command(side, case, steps),
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"error": [*done.stderr.strip().splitlines()[-20:], f"exit code {done.returncode}"]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def tabulate(case: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians of each side that ran."""
    tokens = CASES[case].batch_size * SEQUENCE
    table = {}
    for side, mine in runs.items():
        seconds = [second for one in mine for second in one.get("seconds", [])]
        if seconds:
            gib = max(one["gib"] for one in mine if "gib" in one)
            table[side] = {"tokens_per_second": tokens / statistics.median(seconds), "gib": gib}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--torchtitan", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/peers.json"))
    options = parser.parse_args()
    sides = [side for side in options.sides if side != "torchtitan" or options.torchtitan]
    settings = {"sequence": SEQUENCE, "steps": options.steps, "rounds": options.rounds}
    result: dict[str, Any] = {"environment": environment(), "settings": settings, "cases": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for case in options.cases:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                runs[side].append(run(side, case, options.steps, options.torchtitan))
                if "error" in runs[side][-1]:
                    print(f"{case:16} {side:12} did not run:", *runs[side][-1]["error"], sep="\n    ", flush=True)
        table = tabulate(case, runs)
        result["cases"][case] = {"settings": CASES[case].describe(), "table": table, "runs": runs}
        options.output.write_text(json.dumps(result, indent=1))  # what is done is kept if the next case fails
        for side, row in table.items():
            ratio = table["trainer"]["tokens_per_second"] / row["tokens_per_second"] if "trainer" in table else 0.0
            speed = f"{row['tokens_per_second']:10.0f} tokens/s {row['gib']:7.1f} GiB"
            print(f"{case:16} {side:12} {speed}   trainer / this: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
