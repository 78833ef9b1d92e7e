"""The comparison from beginning to end: reference, then one layout after another on the same processes."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from titan_strategy.parity.layouts import Layout
from titan_strategy.parity.processes import RankError, Ranks
from titan_strategy.parity.rank import run_rank
from titan_strategy.parity.recipe import Recipe
from titan_strategy.parity.reference import Reference, record_reference
from titan_strategy.parity.report import Outcome, judge
from titan_strategy.preflight import preflight


def compare_layouts(
    recipe: Recipe, layouts: Sequence[Layout], steps: int, tolerance: float, timeout: float
) -> Iterator[Outcome]:
    """Yield the outcome of each layout as soon as it is known.

    GPUs are used if there are enough for the largest layout, else the CPU.

    Args:
        recipe: What to run.
        layouts: Where to run it.
        steps: Number of optimizer steps.
        tolerance: Greatest relative difference that counts as equal.
        timeout: Seconds that a layout may take.

    Raises:
        ParityError: If the reference itself cannot run.
    """
    refusals = {layout: _refusal(recipe, layout) for layout in layouts}
    accelerator = "gpu" if torch.cuda.device_count() >= max(layout.ranks for layout in layouts) else "cpu"
    start_method: Literal["forkserver", "spawn"] = "spawn" if accelerator == "gpu" else "forkserver"
    with tempfile.TemporaryDirectory(prefix="titan-parity-") as folder, Ranks(timeout, start_method) as ranks:
        reference = Reference(Path(folder))
        record_reference(recipe, steps, torch.device("cuda" if accelerator == "gpu" else "cpu"), reference)
        names = set(reference.initial())
        for layout in layouts:
            if reason := refusals[layout]:
                yield Outcome(layout, "cannot run", reason=reason)
                continue
            try:
                found = ranks.run(run_rank, layout.ranks, recipe, layout, steps, accelerator, reference)
            except RankError as error:
                yield Outcome(layout, "failed", reason=str(error))
            else:
                yield judge(layout, found, tolerance, names)


def _refusal(recipe: Recipe, layout: Layout) -> str:
    """Why a layout cannot run, from the checks that `fit` makes; empty if it can."""
    try:
        module, data = recipe.build(layout.data_ranks)
        preflight(recipe.trainer(layout, "cpu"), module, data)
    except (ValueError, MisconfigurationException) as error:
        return str(error)
    return ""
