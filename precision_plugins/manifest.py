"""What really runs: for each module with a matrix product its recipe, or why it has none."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ManifestEntry:
    """One module.

    Args:
        name: Its name in the LightningModule.
        kind: What it multiplies.
        shape: Of the weight that one rank multiplies: (out, in), or (experts, out, in) for each expert's first product.
        recipe: What its products run as; None if they stay in the plugin's compute dtype.
        reason: Why it has no recipe; empty if it has one.
    """

    name: str
    kind: Literal["linear", "grouped experts"]
    shape: tuple[int, ...]
    recipe: str | None
    reason: str = ""


@dataclass(frozen=True)
class Manifest:
    """All modules of a model that multiply matrices, in the order of the model.

    Args:
        dtype: What runs without a recipe.
        entries: The modules.
    """

    dtype: str
    entries: Sequence[ManifestEntry]

    @property
    def converted(self) -> list[ManifestEntry]:
        """Those that have a recipe."""
        return [entry for entry in self.entries if entry.recipe is not None]

    def table(self) -> str:
        """For the terminal: a line for each kind of module, layers of the same kind together."""
        groups: dict[tuple[str, ...], int] = {}
        for entry in self.entries:
            pattern = ".".join("*" if part.isdigit() else part for part in entry.name.split("."))
            shape = " x ".join(map(str, entry.shape))
            line = (pattern, shape, entry.recipe or self.dtype, entry.reason)
            groups[line] = groups.get(line, 0) + 1
        rows = [("module", "number", "weight", "runs as", ""), *_rows(groups)]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def write(self, path: Path) -> None:
        """Write `path` as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"without_recipe": self.dtype, "modules": [asdict(entry) for entry in self.entries]}
        path.write_text(json.dumps(content, indent=2) + "\n")


def _rows(groups: dict[tuple[str, ...], int]) -> list[tuple[str, ...]]:
    return [(pattern, str(count), shape, runs, reason) for (pattern, shape, runs, reason), count in groups.items()]
