"""Head and loss on parts of the tokens, one after another, so that the logits of one part alone take memory.

Each part runs forward and backward at once, on the sum of its losses. What is left to the backward pass is one factor:
the gradient of the whole sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (1, rows, vocab) and labels (1, rows) to a scalar


def loss_in_chunks(head: nn.Linear, chunks: int, loss: Loss) -> None:
    """Let `head(x, labels)` be the sum of the loss over all positions; `head(x)` is what it was.

    The forward is replaced on the instance, so that the class may still change to one with another product.

    Args:
        head: Maps hidden states to logits; its weight is whole on this rank when it runs, and it has no bias.
        chunks: How many parts, of which the last may be smaller.
        loss: Summed over the positions; differentiable in the logits.
    """
    assert head.bias is None, "its gradient is not computed"
    head.forward = partial(_forward, head, chunks, loss)


def _forward(head: nn.Linear, chunks: int, loss: Loss, x: Tensor, labels: Tensor | None = None) -> Tensor:
    if labels is None:
        logits: Tensor = type(head).forward(head, x)
        return logits
    product = getattr(head, "product", linear)  # a map converted to low precision keeps its own there
    total: Tensor = _ChunkedLoss.apply(x, head.weight, labels, chunks, product, loss)
    return total


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (batch, seq, dim)
        weight: Tensor,  # (vocab, dim)
        labels: Tensor,  # (batch, seq)
        chunks: int,
        product: Callable[[Tensor, Tensor], Tensor],
        loss: Loss,
    ) -> Tensor:
        rows, targets = x.flatten(0, 1), labels.flatten()
        whole = weight.detach().requires_grad_(ctx.needs_input_grad[1])
        rows_gradient = torch.empty_like(rows)
        weight_gradient = (
            torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if whole.requires_grad else None
        )
        total = torch.zeros((), device=x.device)
        parts = zip(rows.chunk(chunks), targets.chunk(chunks), rows_gradient.chunk(chunks), strict=True)
        for part, part_targets, part_gradient in parts:
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                part_loss = loss(product(part, whole)[None], part_targets[None])
            inputs = (part,) if weight_gradient is None else (part, whole)
            gradient, *of_weight = torch.autograd.grad(part_loss, inputs)
            part_gradient.copy_(gradient)
            if weight_gradient is not None:
                weight_gradient.add_(of_weight[0])
            total += part_loss.detach()
        ctx.save_for_backward(rows_gradient.view_as(x), weight_gradient)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient, weight_gradient = ctx.saved_tensors
        of_weight = None if weight_gradient is None else (weight_gradient * factor).to(ctx.dtype)
        return x_gradient * factor.to(x_gradient.dtype), of_weight, None, None, None, None
