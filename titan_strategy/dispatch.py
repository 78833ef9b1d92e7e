"""Tokens to the experts that they chose, and back: the seam between a model and expert parallelism.

A module with grouped experts has an attribute `dispatcher`. It starts as a `LocalDispatcher`; under expert parallelism
the strategy puts an `AllToAllDispatcher` there. The model does not notice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Routed:
    """The rows that the experts on this rank work on, grouped by expert.

    Args:
        rows: (m, dim). Without alignment every row belongs to an expert. With it some are zero, and those after the
            last offset belong to none: what experts make of either is not used.
        weights: Weight of each row, (m,), float32.
        offsets: For each expert here, the end of its rows; int32.
        combine: Takes what the experts made of the rows, (m, dim), and returns for each token the sum of its rows.
    """

    rows: Tensor
    weights: Tensor
    offsets: Tensor
    combine: Callable[[Tensor], Tensor]


class Dispatcher(Protocol):
    """Brings tokens to experts.

    Attributes:
        alignment: Each expert's number of rows is filled up to a multiple of this.
    """

    @property
    def alignment(self) -> int: ...

    def dispatch(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Routed:
        """Differentiable in `tokens` and `weights`.

        Args:
            tokens: (n, dim).
            weights: Weight of each choice, (n, top_k), float32.
            chosen: Numbers of the experts that each token goes to, (n, top_k).
        """
        ...


@dataclass(frozen=True)
class LocalDispatcher:
    """All experts are on this rank.

    Args:
        num_experts: How many there are.
        alignment: Each expert's number of rows is filled up to a multiple of this.
    """

    num_experts: int
    alignment: int = 1

    def dispatch(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Routed:
        """See `Dispatcher`."""
        grouping = group_by_expert(chosen, self.num_experts, self.alignment)
        return Routed(
            grouping.spread(tokens), grouping.spread_weights(weights), grouping.offsets.int(), grouping.collect
        )


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Each rank of a group has an equal part of the experts, in the order of their numbers.

    The host waits for the devices once in each dispatch: it must know how much it sends and receives.

    Args:
        group: The ranks.
        num_experts: How many experts they have together.
        alignment: Each expert's number of rows is filled up to a multiple of this.
    """

    group: dist.ProcessGroup
    num_experts: int
    alignment: int = 1

    def dispatch(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Routed:
        """See `Dispatcher`."""
        ranks = self.group.size()
        outbound = group_by_expert(chosen, self.num_experts)
        sent = outbound.counts
        received = torch.empty_like(sent)  # of each rank in turn, for each expert here
        dist.all_to_all_single(received, sent, group=self.group)
        here = self.num_experts // ranks
        splits = torch.stack([sent, received]).view(2, ranks, here).sum(-1)
        sends, receives = splits.tolist()

        rows = exchange(outbound.spread(tokens), sends, receives, self.group)
        row_weights = exchange(outbound.spread_weights(weights), sends, receives, self.group)
        experts = torch.arange(here, device=tokens.device).repeat(ranks)
        inbound = group_by_expert(
            experts.repeat_interleave(received, output_size=sum(receives))[:, None], here, alignment=self.alignment
        )

        def combine(rows: Tensor) -> Tensor:
            return outbound.collect(exchange(inbound.collect(rows), receives, sends, self.group))

        return Routed(
            inbound.spread(rows), inbound.spread_weights(row_weights[:, None]), inbound.offsets.int(), combine
        )


def exchange(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sends[r]` rows to each rank r of `group` and receive `receives[r]`; differentiable."""
    result: Tensor = _Exchange.apply(rows, sends, receives, group)
    return result


@dataclass(frozen=True)
class Grouping:
    """Where each choice of each token lies when rows are grouped by expert.

    Args:
        source: For each row, the number of its choice (token * top_k + rank of the choice); (m,). One more than the
            last choice for rows that only fill up.
        place: The row of each choice; (n, top_k).
        counts: Rows of each expert, without those that fill up; (num_experts,).
        offsets: The end of each expert's rows; (num_experts,).
    """

    source: Tensor
    place: Tensor
    counts: Tensor
    offsets: Tensor

    def spread(self, tokens: Tensor) -> Tensor:
        """Each token in all of its rows, zero in those that only fill up: (n, dim) to (m, dim)."""
        rows: Tensor = _Spread.apply(tokens, self.source, self.place)
        return rows

    def collect(self, rows: Tensor) -> Tensor:
        """For each token the sum of its rows: (m, dim) to (n, dim)."""
        tokens: Tensor = _Collect.apply(rows, self.source, self.place)
        return tokens

    def spread_weights(self, weights: Tensor) -> Tensor:
        """The weight of each row: (n, top_k) to (m,)."""
        return torch.nn.functional.pad(weights.flatten(), (0, 1))[self.source]


def group_by_expert(chosen: Tensor, num_experts: int, alignment: int = 1) -> Grouping:
    """Group choices by expert, in the order of the tokens, without waiting for the device.

    Args:
        chosen: Numbers of experts, (n, top_k).
        num_experts: Numbers are below this.
        alignment: Each expert's rows are filled up to a multiple of this. How many rows there are is then fixed by the
            number of choices alone: those after the last offset are left over.
    """
    experts, source = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=chosen.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    choices = torch.arange(source.numel(), device=chosen.device)
    if alignment == 1:
        place = torch.empty_like(source).scatter_(0, source, choices)
        return Grouping(source, place.view_as(chosen), counts, ends)
    filled = (counts + alignment - 1) // alignment * alignment
    offsets = filled.cumsum(0)
    rows = choices + ((offsets - filled) - (ends - counts))[experts]  # shifted by what fills up the experts before
    place = torch.empty_like(source).scatter_(0, source, rows)
    most = -(-source.numel() // alignment) * alignment + num_experts * alignment
    padded = source.new_full((most,), source.numel()).scatter_(0, rows, source)
    return Grouping(padded, place.view_as(chosen), counts, offsets)


# Both directions are gathers, each the other's derivative: nothing is added up in an order that depends on timing.


def _take(tokens: Tensor, source: Tensor, top_k: int) -> Tensor:
    choices = tokens.shape[0] * top_k
    if source.numel() == choices:  # no row only fills up
        return tokens.index_select(0, source // top_k)
    rows = torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])])
    return rows.index_select(0, source // top_k)


def _add_up(rows: Tensor, place: Tensor) -> Tensor:
    taken = rows.index_select(0, place.flatten())
    return taken if place.shape[1] == 1 else taken.unflatten(0, place.shape).sum(1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, source: Tensor, place: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place)
        return _take(tokens, source, place.shape[1])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (place,) = ctx.saved_tensors
        return _add_up(gradient, place), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, source: Tensor, place: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(source)
        ctx.top_k = place.shape[1]
        return _add_up(rows, place)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (source,) = ctx.saved_tensors
        return _take(gradient, source, ctx.top_k), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.arguments = sends, receives, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        sends, receives, group = ctx.arguments
        return _all_to_all(gradient, receives, sends, group), None, None, None


def _all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received
