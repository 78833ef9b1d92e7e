"""Mixture of experts: a router picks a few feed-forwards for each token.

How the rows of a token get to an expert, and on which rank that is, is the dispatcher's business; see
`titan_strategy.dispatch`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.config import MoEConfig, TransformerConfig
from models.layers import FeedForward, Linear, draw_weight
from models.routing import LossScale, RoutingRecord, record, sequence_loss
from titan_strategy.dispatch import Dispatcher, LocalDispatcher
from titan_strategy.sharding import local

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


class MoE(nn.Module):
    """Routed experts and, if configured, a dense feed-forward that all tokens use; their outputs are added.

    Args:
        config: Sizes and constants; `config.moe` is not None.
        layer_id: Position of the block in the whole model, from 0.
        residual_std: Standard deviation of the output projections' initial weights.
        loss_scale: Shared by all routers of the model.
    """

    def __init__(self, config: TransformerConfig, layer_id: int, residual_std: float, loss_scale: LossScale) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        router = Router(config.dim, moe, config.init_std, layer_id, loss_scale)
        self.routed = RoutedExperts(router, GroupedExperts(config.dim, moe, config.init_std, residual_std))
        self.shared = FeedForward(config.dim, moe.shared_dim, config.init_std, residual_std) if moe.shared_dim else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape."""
        routed = self.routed(x)
        return routed if self.shared is None else routed + self.shared(x)


class RoutedExperts(nn.Module):
    """Router and experts. Treats tokens one by one, so each rank may run it on tokens of its own."""

    def __init__(self, router: "Router", experts: "GroupedExperts") -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape."""
        weights, chosen = self.router(x)
        return self.experts(x.flatten(0, 1), weights, chosen).view_as(x)


class Router(nn.Module):
    """Scores of all experts for each token, and the choice of the best; in float32 whatever the model's dtype.

    Args:
        dim: Width of the residual stream.
        config: Sizes and constants.
        init_std: Standard deviation of the gate's initial weights.
        layer_id: Position of the block in the whole model, from 0.
        loss_scale: Shared by all routers of the model.

    Attributes:
        bias: Added to the scores for the choice only, (num_experts,); None unless `config.balance_rate` is given.
        statistics: What has been routed since the last optimizer step; see `RoutingRecord`.
    """

    bias: Tensor | None
    statistics: Tensor

    def __init__(self, dim: int, config: MoEConfig, init_std: float, layer_id: int, loss_scale: LossScale) -> None:
        super().__init__()
        self.config = config
        self.layer_id = layer_id
        self.loss_scale = loss_scale
        self.gate = Gate(dim, config.num_experts, init_std)
        self.sequence_group: dist.ProcessGroup | None = None  # the ranks that have other parts of the same sequences
        bias = None if config.balance_rate is None else torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("bias", bias)
        self.register_buffer("statistics", RoutingRecord.zeros(config.num_experts), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # `model.bfloat16()` arrives here, and would round the bias, and the record from 257 tokens on.
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self

    def reset_parameters(self) -> None:
        """Start without preferences and without a record."""
        if self.bias is not None:
            self.bias.zero_()
        self.statistics.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route (batch, seq, dim).

        Returns:
            Weights, float32, and numbers of the chosen experts, both (batch * seq, top_k).
        """
        config = self.config
        logits = self.gate(x)  # (batch, seq, num_experts)
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        chosen = self.choose(scores.detach())
        weights = scores.gather(-1, chosen)
        if config.renormalise:
            weights = normalise(weights)
        weights = weights * config.route_scale
        if self.training and torch.is_grad_enabled():
            probabilities = normalise(scores) if config.score == "sigmoid" else scores
            loss = None
            if config.auxiliary_loss:
                loss = config.auxiliary_loss * sequence_loss(probabilities, chosen, self.sequence_group)
            weights = record(weights, probabilities.detach(), chosen, loss, self.statistics, self.loss_scale)
        return weights.flatten(0, 1), chosen.flatten(0, 1)

    def choose(self, scores: Tensor) -> Tensor:
        """Numbers of the experts that each token goes to: (..., num_experts) to (..., top_k)."""
        config = self.config
        if config.round_robin:
            turns = torch.arange(scores[..., 0].numel() * config.top_k, device=scores.device) % config.num_experts
            return turns.view(*scores.shape[:-1], config.top_k)
        if self.bias is not None:
            scores = scores + self.bias
        if config.groups_per_token < config.expert_groups:
            groups = scores.unflatten(-1, (config.expert_groups, -1))
            ranking = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
            best = ranking.topk(config.groups_per_token, dim=-1).indices
            excluded = torch.ones_like(ranking, dtype=torch.bool).scatter_(-1, best, False)
            scores = groups.masked_fill(excluded[..., None], float("-inf")).flatten(-2)
        return scores.topk(config.top_k, dim=-1).indices

    def balance(self, load: Tensor) -> None:
        """Move the bias against the load of the last optimizer step, (num_experts,)."""
        if self.bias is not None and self.config.balance_rate:
            step = self.config.balance_rate * torch.sign(load.mean() - load)
            self.bias += (step - step.mean()).to(self.bias.dtype)


def normalise(scores: Tensor) -> Tensor:
    """Divide by the sum over the last dimension, (..., n) to (..., n)."""
    # Sigmoids can all vanish. The limit is far above the smallest number, so that gradients divided by it are finite.
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)


class Gate(Linear):
    """The router's linear map, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to logits (..., num_experts), float32."""
        return nn.functional.linear(x.float(), self.weight.float())


class GroupedExperts(nn.Module):
    """SwiGLU feed-forwards side by side, computed as products grouped by expert.

    Args:
        dim: Width of the residual stream.
        config: Sizes and constants.
        init_std: Standard deviation of the input projections' initial weights.
        residual_std: Standard deviation of the output projections' initial weights.

    Attributes:
        dispatcher: Brings tokens to the experts; the strategy replaces it under expert parallelism.
        grouped_mm: The product of rows and weights; low-precision plugins replace it.
    """

    def __init__(self, dim: int, config: MoEConfig, init_std: float, residual_std: float) -> None:
        super().__init__()
        self.init_std, self.residual_std = init_std, residual_std
        self.score_before = config.score_before_experts
        self.w1 = nn.Parameter(torch.empty(config.num_experts, config.expert_dim, dim))
        self.w3 = nn.Parameter(torch.empty(config.num_experts, config.expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, dim, config.expert_dim))
        self.dispatcher: Dispatcher = LocalDispatcher(config.num_experts)
        self.grouped_mm: GroupedMM = grouped_mm
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        draw_weight(self.w1, self.init_std)
        draw_weight(self.w3, self.init_std)
        draw_weight(self.w2, self.residual_std)

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum over each token's experts.

        Args:
            tokens: (n, dim).
            weights: (n, top_k), float32.
            chosen: Numbers of experts, (n, top_k).

        Returns:
            (n, dim).
        """
        routed = self.dispatcher.dispatch(tokens, weights, chosen)
        w1, w2, w3 = (local(weight) for weight in (self.w1, self.w2, self.w3))  # of the experts on this rank
        scale = routed.weights[:, None].to(tokens.dtype)
        rows = routed.rows * scale if self.score_before else routed.rows
        gate = self.grouped_mm(rows, w1, routed.offsets)
        hidden = nn.functional.silu(gate) * self.grouped_mm(rows, w3, routed.offsets)
        # Scaling here is scaling what comes out, at the hidden width: the last product is linear.
        hidden = hidden if self.score_before else hidden * scale
        return routed.combine(self.grouped_mm(hidden, w2, routed.offsets))


def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each group of rows with a matrix of its own.

    Args:
        rows: (m, in); group e ends before row `offsets[e]`. What follows the last group comes out undefined.
        weights: (groups, out, in).
        offsets: (groups,), int32.

    Returns:
        (m, out).
    """
    if rows.shape[0] == 0:  # which the kernel refuses
        return rows @ weights[0].T
    return nn.functional.grouped_mm(rows, weights.transpose(-2, -1), offs=offsets)


@torch.no_grad()
def balance_experts(
    model: nn.Module, layers: Sequence[int], num_experts: int, top_k: int, device: torch.device
) -> Mapping[int, RoutingRecord]:
    """Take the records of all routers, and let each move its bias against its load.

    To be called once in each optimizer step, by all ranks at once: tokens are counted over all of them.

    Args:
        model: Holds all blocks with experts, or those of this rank's pipeline stages.
        layers: Numbers of all blocks with experts, on whichever rank.
        num_experts: Experts of each.
        top_k: Experts of each token.
        device: Where the model computes.

    Returns:
        Number of the block -> its record, the same on every rank.
    """
    routers = {module.layer_id: module for module in model.modules() if isinstance(module, Router)}
    empty = RoutingRecord.zeros(num_experts).to(device)
    total = torch.stack([routers[layer].statistics if layer in routers else empty for layer in layers])
    if dist.is_initialized():
        dist.all_reduce(total)  # a rank without the block adds nothing
    records = {layer: RoutingRecord.of(row, top_k) for layer, row in zip(layers, total.unbind(), strict=True)}
    for layer, router in routers.items():
        router.statistics.zero_()
        router.balance(records[layer].load)
    return records
