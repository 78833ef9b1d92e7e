"""What a model tells the strategy about itself: `ParallelPlan`, and how its name patterns are resolved."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

TensorParallelStyle = Literal["colwise", "rowwise", "sequence", "embedding", "head", "replicate", "tokens"]


@dataclass(frozen=True)
class ParallelPlan:
    """How a model can be split, as data.

    Every name is a fully qualified name (FQN) relative to the module that returns the plan, or to the LightningModule
    when the plan is given to the strategy. In a pattern `*` stands for exactly one component: `layers.*` matches
    `layers.3` but not `layers.3.attention`.

    Args:
        blocks: Pattern of the repeated blocks: the unit of sharding, activation checkpointing and compilation.
        before: Modules that run before the first block, such as the embedding.
        after: Modules that run after the last block, such as the final norm and the head.
        tensor_parallel: Pattern of a module -> how tensor parallelism splits it.
        experts: Pattern of the modules with grouped experts. The parameters of such a module have the experts as their
            first dimension, and it has an attribute `dispatcher`; see `titan_strategy.dispatch`.
        tied: Pairs of parameter names that share storage.
    """

    blocks: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    tensor_parallel: Mapping[str, TensorParallelStyle] = field(default_factory=dict)
    experts: str | None = None
    tied: tuple[tuple[str, str], ...] = ()

    def relative_to(self, prefix: str) -> "ParallelPlan":
        """The same plan with names relative to the child `prefix`.

        Raises:
            ValueError: If a name lies outside that child.
        """

        def strip(name: str) -> str:
            if not name.startswith(f"{prefix}."):
                raise ValueError(
                    f"plan: {name!r} does not begin with {prefix!r}. A plan given to the strategy is relative to the "
                    f"LightningModule, and all that a TitanModule trains is in self.{prefix}."
                )
            return name.removeprefix(f"{prefix}.")

        return ParallelPlan(
            blocks=strip(self.blocks),
            before=tuple(map(strip, self.before)),
            after=tuple(map(strip, self.after)),
            tensor_parallel={strip(name): style for name, style in self.tensor_parallel.items()},
            experts=None if self.experts is None else strip(self.experts),
            tied=tuple((strip(first), strip(second)) for first, second in self.tied),
        )


def match_modules(root: nn.Module, pattern: str, argument: str) -> dict[str, nn.Module]:
    """Modules below `root` whose FQN matches `pattern`, in the order of registration.

    Args:
        root: The module that the names are relative to.
        pattern: An FQN in which `*` stands for exactly one component.
        argument: The name under which the user wrote the pattern, for the error message.

    Raises:
        ValueError: If nothing matches; the message lists the most similar names.
    """
    modules = {name: module for name, module in root.named_modules() if name}
    regex = pattern_regex(pattern)
    matches = {name: module for name, module in modules.items() if regex.fullmatch(name)}
    if not matches:
        raise ValueError(
            f"{argument}: the pattern {pattern!r} matches no module of {type(root).__name__}.{_hint(pattern, modules)}"
        )
    return matches


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Compile an FQN pattern in which `*` stands for one component (or a part of one)."""
    return re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))


def _hint(pattern: str, names: Iterable[str]) -> str:
    """The names closest to a pattern that matched nothing, numbers folded so that each layer shows once."""
    folded = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    near = difflib.get_close_matches(re.sub(r"\b\d+\b", "*", pattern), folded, n=3, cutoff=0.5)
    return f" Names close to it: {', '.join(near)}." if near else f" Its modules are: {', '.join(folded[:12])}."
