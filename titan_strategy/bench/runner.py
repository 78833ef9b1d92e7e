"""Runs of one configuration and its variants, each in processes of its own, in turn."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

_TAIL = 20  # lines of what a failed run has printed


class BenchError(ValueError):
    """A benchmark that cannot be run as it was asked for."""


@dataclass(frozen=True)
class Timing:
    """One run.

    Args:
        parts: Of each optimizer step, the seconds of each part; see `StepTimes`.
        unit: What is counted: `tokens` or `samples`.
        units: How many of them one optimizer step takes, over all data ranks.
        flops_per_unit: Floating-point operations of forward and backward; None if not known.
        gib: As the callback `Throughput` counts memory.
        first_step: Seconds from the start of the command to the end of the first optimizer step.
        device: Its name.
        ranks: Number of processes.
        loss: The last `train/loss`; None if there is none.
    """

    parts: list[dict[str, float]]
    unit: str
    units: int
    flops_per_unit: int | None
    gib: float
    first_step: float
    device: str
    ranks: int
    loss: float | None


@dataclass(frozen=True)
class Bench:
    """What to run.

    Args:
        config: A complete configuration of `titan fit`, in YAML.
        variants: Overrides of it, each as on the command line, but without the leading dashes:
            `data.batch_size=4 trainer.precision=bf16-true`. The empty string is the configuration itself.
        steps: Optimizer steps to time in each run.
        warmup: Steps before them; the first ones compile, and fill the memory allocator.
        rounds: How often each variant runs, in turn with the others.
        timeout: Seconds that one run may take.

    Raises:
        BenchError: If a number is out of range, or a variant is none.
    """

    config: str
    variants: Sequence[str]
    steps: int
    warmup: int
    rounds: int
    timeout: float

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise BenchError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.timeout <= 0:
            raise BenchError(f"timeout={self.timeout:g} must be more than 0 seconds")
        for variant in self.variants:
            overrides(variant)

    def check(self, parser: ArgumentParser) -> None:
        """Let the parser of `titan fit` end the program if a variant is none of its options."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(self.config)
            file.flush()
            for variant in self.variants:
                parser.parse_args([f"--config={file.name}", *overrides(variant)])

    def run(self) -> Iterator[tuple[str, Timing | list[str]]]:
        """Each run in turn: its variant, and its timing or the last lines that it printed. A failed one ends there."""
        failed: set[str] = set()
        for _ in range(self.rounds):
            for variant in self.variants:
                if variant not in failed:
                    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
                        result = self._run(variant, Path(folder))
                    if not isinstance(result, Timing):
                        failed.add(variant)
                    yield variant, result

    def _run(self, variant: str, folder: Path) -> Timing | list[str]:
        output, result = folder / "output.txt", folder / "timing.json"
        (folder / "config.yaml").write_text(self.config)
        started = time.time()
        with output.open("w") as stream:
            code = _call(self._command(variant, folder, result), stream, self.timeout)
        if code != 0:
            said = [line for line in output.read_text(errors="replace").splitlines() if line.strip()][-_TAIL:]
            return [*said, f"no end within {self.timeout:g} s" if code is None else f"exit code {code}"]
        timing = json.loads(result.read_text()) if result.exists() else {"parts": []}
        steps = len(timing["parts"])
        if steps <= self.warmup:
            return [f"the run ended after {steps} optimizer steps, of which {self.warmup} are warm-up"]
        timing["first_step"] -= started
        timing["parts"] = timing["parts"][self.warmup :]
        return Timing(**timing)

    def _command(self, variant: str, folder: Path, result: Path) -> list[str]:
        """`titan fit` without anything that is not training."""
        clock = [{"class_path": "titan_strategy.bench.step_times.StepTimes", "init_args": {"path": str(result)}}]
        own: dict[str, Any] = {
            "max_steps": self.warmup + self.steps,
            "max_epochs": -1,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "logger": False,
            "callbacks": clock,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        settings = [f"--trainer.{name}={json.dumps(value)}" for name, value in own.items()]
        settings.append(f"--trainer.default_root_dir={folder / 'run'}")
        program = [sys.executable, "-m", "titan_strategy", "fit", "--config", str(folder / "config.yaml")]
        return [*program, *overrides(variant), *settings]


def overrides(variant: str) -> list[str]:
    """The command-line options of a variant.

    Raises:
        BenchError: If it is not made of `key=value`.
    """
    try:
        words = shlex.split(variant)
    except ValueError as error:
        raise BenchError(f"compare: {variant!r}: {error}") from error
    for word in words:
        if "=" not in word.lstrip("-") or word.lstrip("-").startswith("="):
            raise BenchError(
                f"compare: {word!r} in {variant!r} is no override: write key=value, such as data.init_args.batch_size=4"
            )
    return [f"--{word.lstrip('-')}" for word in words]


def _call(command: Sequence[str], output: Any, timeout: float) -> int | None:
    """The exit code of a program, None if it is late; the processes that it has started are gone afterwards."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # all are gone; or its other ranks are left, whether it has ended or not
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
