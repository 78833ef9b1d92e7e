"""The exact loss of an optimizer step: summed over ranks and microbatches, divided once by all their tokens."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class TokenLoss:
    """Bookkeeping for one window of microbatches (all that make up one optimizer step).

    A window of one microbatch is normalised in the loss: its global token count is known before the backward pass. In a
    longer window the counts of later microbatches are not known yet, so the sums of gradients are divided at its end.

    Args:
        group: The ranks that see different tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._window: Tensor | None = None  # (2,) float64: sum of losses, number of tokens, over all ranks so far
        self._loss: Tensor | None = None
        self._factor: Tensor | None = None

    @property
    def window_is_new(self) -> bool:
        """Whether the next microbatch is the first one of an optimizer step."""
        return self._window is None

    def reset(self) -> None:
        """Forget an unfinished window."""
        self._window = self._loss = self._factor = None

    def start(self, output: object, last_of_window: bool) -> Tensor:
        """Take a step's `loss_sum` and `token_count`; returns the mean loss per token of the window so far.

        Args:
            output: What `TitanModule.training_step` returned.
            last_of_window: Whether an optimizer step follows this microbatch.

        Returns:
            A float32 scalar, the same on every rank of the group.
        """
        loss_sum, token_count = _unpack(output)
        total = torch.stack([loss_sum.detach().double(), token_count.double()])
        dist.all_reduce(total, group=self._group)
        # A pipeline has run its backward pass already, on the plain sum.
        alone = last_of_window and self._window is None and loss_sum.requires_grad
        self._window = total if self._window is None else self._window + total
        mean_loss, tokens = self._window[0], self._window[1].clamp(min=1)
        self._loss = loss_sum / tokens.to(loss_sum.dtype) if alone else loss_sum
        self._factor = None if alone else tokens.reciprocal().float()
        if last_of_window:
            self._window = None
        return (mean_loss / tokens).float()

    def take(self) -> Tensor:
        """The scalar to call backward on."""
        assert self._loss is not None, "start() comes first"
        loss, self._loss = self._loss, None
        return loss

    def gradient_factor(self, last_of_window: bool) -> Tensor | None:
        """What the accumulated gradients are multiplied by after this backward pass; None for nothing."""
        return self._factor if last_of_window else None


def _unpack(output: object) -> tuple[Tensor, Tensor]:
    if not isinstance(output, Mapping) or not {"loss_sum", "token_count"} <= output.keys():
        raise TypeError(
            "TitanModule.training_step must return what super().training_step() returned, a dict with 'loss_sum' and "
            f"'token_count'; got {type(output).__name__}."
        )
    return output["loss_sum"], output["token_count"]
