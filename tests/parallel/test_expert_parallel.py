"""Blocks with experts give the numbers of one process, wherever the experts are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models import MoEConfig
from models.moe import Router
from tests.parallel.parity import ROWS, SEQUENCE, Layout, Module, Run, assert_equal, fit, oracle, train
from titan_strategy import PipelineConfig

TOLERANCE = 1e-5
# Dense blocks and blocks with experts in turn; the bias moves fast enough to change choices within a run.
MOE = MoEConfig(num_experts=8, top_k=2, expert_dim=16, shared_dim=16, interval=2, renormalise=True, balance_rate=0.02)
SIGMOID = replace(MOE, score="sigmoid", score_before_experts=True, shared_dim=0, renormalise=False, route_scale=2.0)
SPARSE = replace(MOE, num_experts=16, top_k=1, renormalise=False)
FEW = replace(SPARSE, num_experts=2)
NO_SEQUENCE = {"sequence_parallel": False}
EXPERT_2, TENSOR_2 = {"expert_parallel_size": 2}, {"tensor_parallel_size": 2}
PIPELINE_2, REPLICATE_2 = {"pipeline_parallel_size": 2}, {"data_parallel_replicate_size": 2}


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        pytest.param(Layout(2, {}), Run(layers=2, moe=MOE, optimizer="adamw"), id="shard2"),
        pytest.param(Layout(2, EXPERT_2), Run(layers=2, moe=MOE, clip=0.05, optimizer="adamw"), id="ep2"),
        pytest.param(
            Layout(2, EXPERT_2),
            Run(layers=2, moe=SIGMOID, microbatches=7, accumulate=3, recompute=True),
            id="ep2-accumulate",
        ),
        pytest.param(Layout(4, {}), Run(layers=2, moe=FEW, clip=0.05), id="shard4-of-two-experts"),
        pytest.param(Layout(4, {"expert_parallel_size": 4}), Run(layers=2, moe=MOE, clip=0.05), id="ep4"),
        pytest.param(Layout(4, EXPERT_2), Run(layers=2, moe=SIGMOID, clip=0.05), id="ep2-shard2"),
        pytest.param(Layout(2, EXPERT_2 | TENSOR_2), Run(layers=2, moe=MOE, clip=0.05), id="ep2-tp2"),
        pytest.param(Layout(4, EXPERT_2 | TENSOR_2), Run(layers=2, moe=MOE, recompute=True), id="ep2-tp2-shard2"),
        pytest.param(Layout(2, EXPERT_2 | TENSOR_2 | NO_SEQUENCE), Run(layers=2, moe=MOE), id="ep2-tp2-no-sp"),
        pytest.param(Layout(2, TENSOR_2), Run(layers=2, moe=MOE, clip=0.05, optimizer="adamw"), id="tp2"),
        pytest.param(Layout(2, TENSOR_2 | NO_SEQUENCE), Run(layers=2, moe=SIGMOID), id="tp2-no-sp"),
        pytest.param(Layout(4, EXPERT_2 | PIPELINE_2), Run(moe=MOE, clip=0.05), id="pp2-ep2"),
        pytest.param(
            Layout(2, PIPELINE_2), Run(moe=MOE, microbatches=7, accumulate=3, recompute=True), id="pp2-accumulate"
        ),
    ],
)
def test_equals_one_process(rank_pool, layout: Layout, run: Run) -> None:
    expected = oracle(run)
    assert all(bias.abs().max() > 0 for bias in expected["bias"].values())
    for trace in rank_pool.run(train, layout.ranks, run, layout.options):
        assert_equal(trace, expected, TOLERANCE)


@pytest.mark.parametrize("layout", [Layout(2, EXPERT_2), Layout(2, TENSOR_2 | EXPERT_2)], ids=["ep2", "ep2-tp2"])
def test_experts_without_tokens(rank_pool, layout: Layout) -> None:
    run = Run(layers=2, moe=SPARSE, microbatch_rows=4)
    expected = oracle(run)
    assert min(load.min() for load in expected["loads"]) == 0
    for trace in rank_pool.run(train, layout.ranks, run, layout.options):
        assert_equal(trace, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [(Layout(2, EXPERT_2), 2), (Layout(2, TENSOR_2), 1), (Layout(4, PIPELINE_2 | EXPERT_2), 2)],
    ids=["ep2-accumulate", "tp2", "pp2-ep2-accumulate"],
)
def test_auxiliary_loss(rank_pool, layout: Layout, accumulate: int) -> None:
    moe = replace(MOE, balance_rate=None)
    run = Run(moe=replace(moe, auxiliary_loss=1.0), accumulate=accumulate)
    expected = oracle(run)
    without = oracle(replace(run, moe=moe))
    assert abs(expected["norm"][0] / without["norm"][0] - 1) > 1e-3, "the loss must matter"
    for trace in rank_pool.run(train, layout.ranks, run, layout.options):
        assert_equal(trace, expected, TOLERANCE)


def test_replicas_equal_one_process_and_stay_bitwise_equal(rank_pool) -> None:
    run = Run(layers=2, moe=MOE, clip=0.05, optimizer="adamw")
    expected = oracle(run)
    traces = rank_pool.run(train, 4, run, EXPERT_2 | REPLICATE_2)
    for trace in traces:
        assert_equal(trace, expected, TOLERANCE)
        for key in ("final", "bias"):
            assert all(torch.equal(trace[key][name], value) for name, value in traces[0][key].items())


class Counting(Module):
    """Never takes the records of its routers."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def count_tokens(run: Run, options: dict[str, Any]) -> dict[str, float]:
    """By router, the choices that it has counted, over all ranks."""
    module = fit(run, options, module_class=Counting)
    counted = {
        name: float(router.statistics[:-2].sum())
        for name, router in module.named_modules()
        if isinstance(router, Router)
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, counted)
    return {name: sum(part.get(name, 0.0) for part in everywhere) for part in everywhere for name in part}


@pytest.mark.parametrize(
    "layout",
    [Layout(2, EXPERT_2), Layout(2, TENSOR_2), Layout(2, PIPELINE_2 | {"pipeline": PipelineConfig("GPipe")})],
    ids=["ep2", "tp2", "pp2"],
)
def test_every_token_is_counted_once(rank_pool, layout: Layout) -> None:
    run = Run(moe=MOE, accumulate=2, recompute=True)
    tokens = run.microbatches * ROWS * SEQUENCE
    for counted in rank_pool.run(count_tokens, layout.ranks, run, layout.options):
        assert len(counted) == 2
        assert set(counted.values()) == {tokens * MOE.top_k}
