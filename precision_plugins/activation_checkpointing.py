"""Which activations a block keeps for its backward pass, and which it computes again."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Trade compute for memory, block by block.

    Args:
        mode: `"none"` keeps every activation; `"full"` keeps only the inputs of each block and runs its forward again
            in the backward pass.
    """

    mode: Literal["none", "full"] = "none"

    def __post_init__(self) -> None:
        if self.mode not in ("none", "full"):
            raise ValueError(f"activation_checkpointing.mode={self.mode!r}: valid modes are 'none' and 'full'.")

    def apply(self, blocks: Iterable[nn.Module]) -> None:
        """Change how `blocks` run, in place. Their parameters, names and class stay as they were."""
        if self.mode == "none":
            return
        for block in blocks:
            # Replacing the bound forward instead of wrapping the module keeps every parameter name canonical.
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
