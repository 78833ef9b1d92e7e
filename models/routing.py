"""What routers do to balance their experts, and the record of it: counted once for each token that is trained on.

The record is written in the backward pass. The forward pass would count tokens again when activation checkpointing
repeats it, and count those that are only evaluated or that a pipeline sends ahead to learn shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import MoEConfig
from titan_strategy.tensor_parallel import whole


@dataclass(frozen=True)
class RoutingRecord:
    """What one router did in one optimizer step, over all ranks and microbatches.

    Args:
        load: Tokens that each expert got, (num_experts,), float64.
        entropy: Mean entropy of a token's distribution over the experts, in nats.
        auxiliary_loss: Mean of the auxiliary loss per token, its coefficient included.
    """

    load: Tensor
    entropy: Tensor
    auxiliary_loss: Tensor

    @staticmethod
    def zeros(num_experts: int) -> Tensor:
        """The buffer that a router counts in: the load, then the sums of entropy and of the auxiliary loss."""
        return torch.zeros(num_experts + 2, dtype=torch.float64)

    @classmethod
    def of(cls, statistics: Tensor, top_k: int) -> "RoutingRecord":
        """What the buffer of a router says."""
        load = statistics[:-2]
        tokens = (load.sum() / top_k).clamp(min=1)
        return cls(load, statistics[-2] / tokens, statistics[-1] / tokens)

    @property
    def imbalance(self) -> Tensor:
        """Highest load over mean load: 1 is perfect balance."""
        return self.load.max() / self.load.mean().clamp(min=1e-12)


def record(
    weights: Tensor,
    probabilities: Tensor,
    chosen: Tensor,
    loss: Tensor | None,
    statistics: Tensor,
    loss_scale: "LossScale",
) -> Tensor:
    """Returns `weights`, whose backward pass writes the record and lets the auxiliary loss have its gradient.

    Args:
        weights: (batch, seq, top_k).
        probabilities: Distribution of each token over the experts, (batch, seq, num_experts).
        chosen: Numbers of experts, (batch, seq, top_k).
        loss: Auxiliary loss, summed over tokens.
        statistics: The router's buffer.
        loss_scale: What the auxiliary loss is multiplied by, known in the backward pass.
    """
    entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum()
    counts = _counts(chosen.flatten(), probabilities.shape[-1])
    auxiliary = loss if loss is not None else entropy.new_zeros(())
    written = torch.cat([counts, torch.stack([entropy, auxiliary.detach()]).double()])
    result: Tensor = _Record.apply(weights, auxiliary, written, statistics, loss_scale)
    return result


def sequence_loss(probabilities: Tensor, chosen: Tensor, sequence_group: dist.ProcessGroup | None) -> Tensor:
    """Balancing loss of arXiv:2101.03961, equation 4, within each sequence, times the tokens of the sequence.

    A sequence of S tokens adds `S * num_experts * sum_e f_e P_e`, where f_e is the part of its choices that fell on
    expert e, and P_e the mean probability of e over its tokens. Within a sequence, because the sum over sequences does
    not depend on how these are spread over ranks and microbatches.

    Args:
        probabilities: (batch, seq, num_experts).
        chosen: Numbers of experts, (batch, seq, top_k).
        sequence_group: The ranks that have other parts of the same sequences; each adds the part of its tokens.
    """
    num_experts = probabilities.shape[-1]
    counts = _counts(chosen.flatten(1), num_experts)  # (batch, num_experts)
    if sequence_group is not None:
        dist.all_reduce(counts, group=sequence_group)
    fractions = (counts / counts.sum(-1, keepdim=True).clamp(min=1)).to(probabilities.dtype)
    return num_experts * (fractions[:, None] * probabilities).sum()


def routing_metrics(records: Mapping[int, RoutingRecord], config: MoEConfig) -> dict[str, Tensor | float]:
    """What is logged of an optimizer step: name -> scalar.

    Args:
        records: Number of the block -> its record.
        config: Of the blocks.
    """
    metrics: dict[str, Tensor | float] = {"moe/dropped_tokens": 0.0}  # by design: groups of rows have any size
    for layer, routed in records.items():
        metrics[f"moe/imbalance/{layer}"] = routed.imbalance
        metrics[f"moe/entropy/{layer}"] = routed.entropy
    if config.auxiliary_loss:
        metrics["moe/auxiliary_loss"] = torch.stack([routed.auxiliary_loss for routed in records.values()]).sum()
    return metrics


class LossScale:
    """How much the number that is minimised grows with the sum of the loss over tokens: what an auxiliary sum counts.

    1 until a loss is followed. One object is shared by all routers of a model.
    """

    def __init__(self) -> None:
        self.value: Tensor | float = 1.0

    def follow(self, loss_sum: Tensor) -> None:
        """Take the scale from the gradient of `loss_sum`, which is known before that of any router."""
        if loss_sum.requires_grad:
            loss_sum.register_hook(self._take)

    def _take(self, gradient: Tensor) -> None:
        self.value = whole(gradient.detach())


def _counts(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs: (..., m) to (..., num_experts), float64. Without atomics, hence reproducible."""
    return (chosen[..., None] == torch.arange(num_experts, device=chosen.device)).sum(-2).double()


class _Record(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, weights: Tensor, auxiliary: Tensor, written: Tensor, statistics: Tensor, scale: LossScale
    ) -> Tensor:
        ctx.save_for_backward(written)
        ctx.statistics, ctx.scale, ctx.loss = statistics, scale, auxiliary.detach()
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        (written,) = ctx.saved_tensors
        ctx.statistics.add_(written)
        return gradient, torch.ones_like(ctx.loss) * ctx.scale.value, None, None, None
