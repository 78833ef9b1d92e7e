"""Parameters that share storage stay one parameter, or are refused."""

import pytest
import torch
from torch import Tensor, nn

from tests.core.modules import Residual, prepare
from titan_strategy import ParallelPlan


class Tied(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.layers = nn.ModuleList(Residual(4) for _ in range(2))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        raise AssertionError("only set up")


class SharedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(4) for _ in range(2))
        self.layers[1].up.weight = self.layers[0].up.weight


PLAN = ParallelPlan(blocks="net.layers.*", before=("net.embedding",), after=("net.head",))
DECLARED = ParallelPlan(
    blocks="net.layers.*",
    before=("net.embedding",),
    after=("net.head",),
    tied=(("net.embedding.weight", "net.head.weight"),),
)


def tied_after_setup(plan: ParallelPlan | None, precision: str, real: bool) -> bool:
    built = Tied() if real else None
    model = prepare(lambda: built or Tied(), {"precision": precision}, plan=plan)
    return model.head.weight is model.embedding.weight and not model.head.weight.is_meta


@pytest.mark.parametrize("plan", [None, DECLARED], ids=["without-plan", "declared"])
@pytest.mark.parametrize(("precision", "real"), [("32-true", False), ("bf16-true", False), ("32-true", True)])
def test_tied_parameters_stay_tied(rank_pool, plan: ParallelPlan | None, precision: str, real: bool) -> None:
    assert rank_pool.run(tied_after_setup, 2, plan, precision, real) == [True, True]


def test_a_plan_that_would_part_them_is_refused(rank_pool) -> None:
    message = r"net\.embedding\.weight and net\.head\.weight share storage, but lie in parts"
    with pytest.raises(ValueError, match=message):
        rank_pool.run(tied_after_setup, 2, PLAN, "32-true", False)


def set_up_shared_blocks() -> torch.Size:
    return prepare(SharedBlocks).layers[0].up.weight.shape


def test_blocks_must_not_share_parameters(rank_pool) -> None:
    with pytest.raises(ValueError, match=r"net\.layers\.0\.up\.weight and net\.layers\.1\.up\.weight share storage"):
        rank_pool.run(set_up_shared_blocks, 2)
