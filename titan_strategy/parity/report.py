"""What `titan parity` says about each layout: a line of a table, and the same as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from titan_strategy.parity.layouts import Layout
from titan_strategy.parity.rank import Difference

Verdict = Literal["ok", "DIFFERS", "failed", "cannot run"]


@dataclass(frozen=True)
class Outcome:
    """How one layout compared.

    Args:
        layout: Which one.
        verdict: `failed`: it began, and a rank raised or was silent; `cannot run`: refused before it began.
        worst: The greatest relative difference of all; None if there was no comparison.
        first: Of the parameters, the first that differs more than allowed; None if none does.
        reason: Why it failed or cannot run.
    """

    layout: Layout
    verdict: Verdict
    worst: Difference | None = None
    first: Difference | None = None
    reason: str = ""


def judge(layout: Layout, of_ranks: Sequence[Sequence[Difference]], tolerance: float, expected: set[str]) -> Outcome:
    """The verdict on what the ranks of a layout found.

    Args:
        layout: Which one.
        of_ranks: The comparisons of each rank.
        tolerance: Greatest relative difference that is allowed.
        expected: Names of all parameters.
    """
    everything = [difference for found in of_ranks for difference in found]
    if unseen := sorted(expected - {d.name for d in everything if d.kind == "weight"}):
        return Outcome(layout, "failed", reason=f"no rank holds {', '.join(unseen[:4])}")
    worst = max(everything, key=lambda difference: difference.relative)
    beyond = [(number, d) for found in of_ranks for number, d in enumerate(found) if d.relative > tolerance]
    of_parameters = [(number, d) for number, d in beyond if d.name]
    first = min(of_parameters, key=lambda item: (item[1].step, item[0]))[1] if of_parameters else None
    return Outcome(layout, "DIFFERS" if beyond else "ok", worst, first)


def header(layouts: Sequence[Layout]) -> str:
    """The head of the table."""
    return f"{'layout':<{_width(layouts)}}  ranks  worst difference  verdict"


def verdict_line(outcome: Outcome, layouts: Sequence[Layout]) -> str:
    """The layout's line in the table, and below it what has to be said of it."""
    worst = f"{outcome.worst.relative:.1e}" if outcome.worst is not None else "-"
    row = f"{outcome.layout.name:<{_width(layouts)}}  {outcome.layout.ranks:>5}  {worst:>16}  {outcome.verdict}"
    if outcome.reason:
        return f"{row}: {outcome.reason}"
    row += f" ({outcome.worst})"
    if outcome.first is not None:
        row += f"\n  first parameter that differs: {outcome.first} ({outcome.first.relative:.1e})"
    return row


def to_json(outcomes: Sequence[Outcome], steps: int, tolerance: float) -> dict[str, Any]:
    """All of it as plain values. Infinite differences are the string "inf", which JSON has no number for."""
    layouts = [
        {
            "layout": outcome.layout.name,
            "ranks": outcome.layout.ranks,
            "verdict": outcome.verdict,
            "worst": _plain(outcome.worst),
            "first_parameter": _plain(outcome.first),
            "reason": outcome.reason or None,
        }
        for outcome in outcomes
    ]
    return {"steps": steps, "tolerance": tolerance, "layouts": layouts}


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0: all equal; 1: one differs or failed; 3: all that could run are equal, but some cannot run."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if verdicts & {"DIFFERS", "failed"}:
        return 1
    return 3 if "cannot run" in verdicts else 0


def _plain(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    finite = difference.relative != float("inf")
    return asdict(difference) | {"relative": difference.relative if finite else "inf"}


def _width(layouts: Sequence[Layout]) -> int:
    return max(len("layout"), *(len(layout.name) for layout in layouts))
