"""Tokens reach the experts that they chose, and come back, whatever lies between."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_strategy.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher, Routed, group_by_expert

DIM, EXPERTS = 6, 4


def choices(tokens: int, top_k: int, seed: int = 0) -> Tensor:
    """Distinct experts for each token; expert 1 is never chosen, and expert 3 often."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator) + torch.tensor([0.0, -9.0, 0.2, 0.6])
    return scores.topk(top_k).indices


def experts_of_rows(routed: Routed) -> list[range]:
    ends = routed.offsets.tolist()
    assert routed.offsets.dtype == torch.int32
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def run(dispatcher: Dispatcher, first: int, here: int, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Expert e multiplies by e + 1, and by the weight of the row; what is not to be used becomes NaN."""
    routed = dispatcher.dispatch(tokens, weights, chosen)
    factors = torch.full((routed.rows.shape[0], 1), float("nan"))
    for expert, rows in enumerate(experts_of_rows(routed)):
        factors[rows.start : rows.stop] = first + expert + 1
    assert len(routed.offsets) == here
    return routed.combine(routed.rows * factors * routed.weights[:, None])


def expected(tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return tokens * (weights * (chosen + 1)).sum(-1, keepdim=True)


def inputs(count: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, DIM, generator=generator).requires_grad_()
    weights = torch.rand(count, top_k, generator=generator).requires_grad_()
    return tokens, weights, choices(count, top_k, seed)


def check(dispatcher: Dispatcher, first: int, here: int, count: int, top_k: int, seed: int = 0) -> None:
    tokens, weights, chosen = inputs(count, top_k, seed)
    found, wanted = run(dispatcher, first, here, tokens, weights, chosen), expected(tokens, weights, chosen)
    torch.testing.assert_close(found, wanted)
    direction = torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))
    gradients = torch.autograd.grad(found, (tokens, weights), direction)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, (tokens, weights), direction))


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize(("count", "top_k"), [(13, 1), (13, 3), (1, 2), (0, 2)])
def test_on_one_rank(count: int, top_k: int, alignment: int) -> None:
    check(LocalDispatcher(EXPERTS, alignment), 0, EXPERTS, count, top_k)


def check_on_ranks(alignment: int, counts: list[int]) -> bool:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = EXPERTS // ranks
    assert dist.group.WORLD is not None
    dispatcher = AllToAllDispatcher(dist.group.WORLD, EXPERTS, alignment)
    check(dispatcher, rank * here, here, counts[rank], 2, seed=rank)
    return True


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("counts", [[13, 7], [5, 0], [3, 9, 1, 4]], ids=["uneven", "one-without-tokens", "four"])
def test_on_several_ranks(rank_pool, alignment: int, counts: list[int]) -> None:
    assert all(rank_pool.run(check_on_ranks, len(counts), alignment, counts))


@pytest.mark.parametrize("alignment", [8, 32])
def test_groups_are_filled_up(alignment: int) -> None:
    chosen = choices(50, 2)
    grouping = group_by_expert(chosen, EXPERTS, alignment)
    assert grouping.counts.tolist() == torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    assert grouping.counts[1] == 0
    assert not (grouping.offsets % alignment).any()
    rows = grouping.spread(torch.ones(50, DIM))
    assert rows.sum() == 100 * DIM, "what only fills up is zero"
    assert grouping.offsets[-1] <= rows.shape[0]
    assert rows.shape[0] % alignment == 0


def test_rows_keep_the_order_of_tokens_within_an_expert() -> None:
    chosen = torch.tensor([[2], [0], [2], [0], [2]])
    grouping = group_by_expert(chosen, EXPERTS)
    assert grouping.source.tolist() == [1, 3, 0, 2, 4]
    assert grouping.place.flatten().tolist() == [2, 0, 3, 1, 4]
    assert grouping.offsets.tolist() == [2, 2, 5, 5]
