"""The sizes of a model that its layout must divide, as the model itself reports them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Dimension:
    """One size of a model.

    Args:
        argument: How the user sets it, e.g. `model.overrides.n_heads`.
        size: Its value.
    """

    argument: str
    size: int

    def __str__(self) -> str:
        return f"{self.argument}={self.size}"


@dataclass(frozen=True)
class ModelDimensions:
    """What `TitanModule.dimensions` returns.

    Args:
        split: Each is cut into `tensor_parallel_size` equal parts: heads, key and value heads, hidden width of the
            feed-forward.
        vocabulary: Cut over the same ranks, into parts that need not be equal.
        experts: Divided into `expert_parallel_size` equal parts.
    """

    split: tuple[Dimension, ...] = ()
    vocabulary: Dimension | None = None
    experts: Dimension | None = None

    def tensor_parallel_sizes(self) -> list[int]:
        """All sizes that tensor parallelism can have."""
        common = math.gcd(*(dimension.size for dimension in self.split))
        limit = min(common, self.vocabulary.size if self.vocabulary is not None else common)
        return [size for size in range(1, limit + 1) if common % size == 0]
