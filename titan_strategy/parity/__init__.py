"""`titan parity`: the same few optimizer steps in one process and in each layout, compared tensor by tensor."""

from titan_strategy.parity.layouts import Layout, ParityError, parse_layouts
from titan_strategy.parity.recipe import Recipe
from titan_strategy.parity.report import Outcome, exit_code, header, to_json, verdict_line
from titan_strategy.parity.runner import compare_layouts

__all__ = [
    "Layout",
    "Outcome",
    "ParityError",
    "Recipe",
    "compare_layouts",
    "exit_code",
    "header",
    "parse_layouts",
    "to_json",
    "verdict_line",
]
