"""The table of `titan bench`, and the same as JSON."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from titan_strategy.bench.runner import Bench, Timing
from titan_strategy.bench.step_times import PARTS

# Dense bfloat16 operations per second, from NVIDIA's data sheets; of the fastest form where a name has several.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "GB200": 2500e12}


@dataclass(frozen=True)
class Outcome:
    """What one variant came to: the timings of its runs, and what the one that failed has printed last."""

    variant: str
    runs: list[Timing] = field(default_factory=list)
    failure: list[str] = field(default_factory=list)


def collect(bench: Bench, outcomes: Sequence[Outcome], progress: TextIO) -> None:
    """Run everything, into the outcomes of its variants, with a line for each run on `progress`."""
    of_variants = {outcome.variant: outcome for outcome in outcomes}
    for variant, result in bench.run():
        if isinstance(result, Timing):
            of_variants[variant].runs.append(result)
            progress.write(f"{_name(variant)}: {_rate(result):,.1f} {result.unit}/s\n")
        else:
            of_variants[variant].failure.extend(result)
            progress.write("\n  ".join([f"{_name(variant)} failed:", *result]) + "\n")
        progress.flush()


def summary(outcome: Outcome, peak_tflops: float | None) -> dict[str, Any]:
    """What is said of a variant that has runs.

    Args:
        outcome: The variant.
        peak_tflops: Of one device, in 1e12 operations per second; None for what is known of it.
    """
    first = outcome.runs[0]
    steps = [step for run in outcome.runs for step in run.parts]
    seconds = statistics.median(sum(step.values()) for step in steps)
    total = sum(sum(step.values()) for step in steps)
    return {
        "unit": first.unit,
        "per_second": first.units / seconds,
        "seconds_per_step": seconds,
        "mfu": _utilisation(first, first.units / seconds, peak_tflops),
        "gib": max(run.gib for run in outcome.runs),
        "first_step_seconds": statistics.median(run.first_step for run in outcome.runs),
        "parts": {part: sum(step[part] for step in steps) / total for part in PARTS},
        "loss": outcome.runs[-1].loss,
    }


def table(outcomes: Sequence[Outcome], peak_tflops: float | None) -> list[str]:
    """Lines for the terminal: a head, and one for each variant that ran or failed. Ratios are to the first that ran."""
    said = {outcome.variant: summary(outcome, peak_tflops) for outcome in outcomes if outcome.runs}
    base = next(iter(said.values()))["per_second"] if said else 0.0
    unit = next(iter(said.values()))["unit"] if said else "tokens"
    rows: list[tuple[str, ...]] = [("", f"{unit}/s", "ratio", "MFU", "GiB", "ms/step", *PARTS, "first step")]
    for variant, row in said.items():
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        rows.append(
            (
                _name(variant),
                f"{row['per_second']:,.0f}",
                f"{row['per_second'] / base:.3f}",
                mfu,
                f"{row['gib']:.2f}",
                f"{row['seconds_per_step'] * 1000:,.1f}",
                *(f"{row['parts'][part]:.1%}" for part in PARTS),
                f"{row['first_step_seconds']:.1f} s",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows] if said else []
    return lines + [f"{_name(o.variant)}: failed: {_reason(o.failure)}" for o in outcomes if o.failure]


def to_json(outcomes: Sequence[Outcome], peak_tflops: float | None) -> dict[str, Any]:
    """Everything, by variant; that of the configuration itself is the empty string."""
    return {
        outcome.variant: {
            "summary": summary(outcome, peak_tflops) if outcome.runs else None,
            "runs": [asdict(run) for run in outcome.runs],
            "failure": outcome.failure,
        }
        for outcome in outcomes
    }


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
    return "  ".join([f"{row[0]:<{widths[0]}}", *numbers])


def _name(variant: str) -> str:
    return variant or "as configured"


def _rate(timing: Timing) -> float:
    return timing.units / statistics.median(sum(step.values()) for step in timing.parts)


def _reason(printed: Sequence[str]) -> str:
    """The last line that names an error, else the last."""
    return next((line for line in reversed(printed) if "Error" in line), printed[-1]).strip()


def _utilisation(timing: Timing, rate: float, peak_tflops: float | None) -> float | None:
    """Model-flops utilisation, as PaLM defines it (arXiv:2204.02311, appendix B)."""
    words = re.split(r"[\s-]", timing.device)  # "NVIDIA A100-SXM4-80GB"
    known = [peak for name, peak in _PEAK_FLOPS.items() if name in words]
    peak = peak_tflops * 1e12 if peak_tflops is not None else (known[0] if known else None)
    if peak is None or timing.flops_per_unit is None:
        return None
    return rate * timing.flops_per_unit / (peak * timing.ranks)
