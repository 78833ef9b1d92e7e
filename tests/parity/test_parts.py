"""Names of layouts, the measure of a difference, and processes that do not answer."""

import pytest
import torch

from titan_strategy.parity.layouts import parse_layouts
from titan_strategy.parity.processes import RankError, Ranks
from titan_strategy.parity.rank import Difference, relative_difference
from titan_strategy.parity.report import exit_code, judge


@pytest.mark.parametrize(
    ("name", "sizes", "ranks"),
    [
        ("fsdp2", (2, 1, 1, 1), 2),
        ("shard4", (4, 1, 1, 1), 4),
        ("hsdp2x3", (3, 2, 1, 1), 6),
        ("replicate2tp4", (1, 2, 4, 1), 8),
        ("tp2pp2", (1, 1, 2, 2), 4),
        ("pp2fsdp3tp2", (3, 1, 2, 2), 12),
        ("ep2", (2, 1, 1, 1, 2), 2),
        ("fsdp4ep2", (4, 1, 1, 1, 2), 4),
        ("tp2ep2", (1, 1, 2, 1, 2), 2),
        ("hsdp2x2ep2pp2", (2, 2, 1, 2, 2), 8),
    ],
)
def test_layouts_by_name(name: str, sizes: tuple[int, ...], ranks: int) -> None:
    (layout,) = parse_layouts(name)
    expert = sizes[4] if len(sizes) > 4 else 1
    assert (layout.shard, layout.replicate, layout.tensor, layout.pipeline, layout.expert) == (*sizes[:4], expert)
    assert layout.ranks == ranks


@pytest.mark.parametrize(
    "name", ["", "tp", "tp0", "tp2tp2", "hsdp4", "tp2x2", "ddp2", "fsdp2hsdp2x2", "fsdp2 tp2", "tp2,"]
)
def test_names_that_are_no_layout(name: str) -> None:
    with pytest.raises(ValueError, match=r"--layouts: .*each at most once"):
        parse_layouts(name)


def test_a_difference_is_relative_to_what_is_expected() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_difference(expected, expected) == 0
    assert relative_difference(torch.tensor([3.0, 5.0]), expected) == pytest.approx(0.2)
    assert relative_difference(torch.tensor([3.0, 5.0]), expected, floor=100.0) == pytest.approx(0.01)
    assert relative_difference(torch.tensor(1.0), torch.tensor(0.0)) == float("inf")
    assert relative_difference(torch.tensor(float("nan")), torch.tensor(1.0)) == float("inf")
    assert relative_difference(torch.tensor(1.0), torch.tensor(float("nan"))) == float("inf")


def test_the_first_parameter_is_that_of_the_earliest_step_on_any_rank() -> None:
    (layout,) = parse_layouts("pp2")
    first_rank = [
        Difference("gradient", "a", 0, 1e-7),
        Difference("gradient", "a", 1, 0.5),
        Difference("weight", "a", 2, 0),
    ]
    second_rank = [Difference("gradient", "b", 0, 0.1), Difference("norm", "", 0, 9.0), Difference("weight", "b", 2, 0)]
    outcome = judge(layout, [first_rank, second_rank], 1e-5, {"a", "b"})
    assert (outcome.verdict, outcome.first, outcome.worst) == ("DIFFERS", second_rank[0], second_rank[1])
    assert exit_code([outcome]) == 1
    fine = judge(layout, [first_rank, second_rank], 10.0, {"a", "b"})
    assert (fine.verdict, fine.first, exit_code([fine])) == ("ok", None, 0)


def test_a_parameter_that_no_rank_holds_is_no_agreement() -> None:
    (layout,) = parse_layouts("pp2")
    outcome = judge(layout, [[Difference("weight", "a", 2, 0.0)]], 1e-5, {"a", "b"})
    assert (outcome.verdict, outcome.reason) == ("failed", "no rank holds b")


def test_silent_ranks_are_ended() -> None:
    with Ranks(timeout=0.5, start_method="spawn") as ranks:
        with pytest.raises(RankError, match=r"no answer from rank 0, 1 within 0\.5 s"):
            ranks.run(torch.zeros, 2, 1)  # importing torch alone takes longer
        assert ranks._workers == []
