"""Tensor and sequence parallelism give the numbers of one process."""

import pytest

from tests.parallel.parity import Layout, Run, assert_equal, oracle, train

TOLERANCE = 1e-5
TENSOR_2 = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (Layout(2, TENSOR_2), Run(clip=0.05, optimizer="adamw")),
        (Layout(2, TENSOR_2), Run(microbatches=7, accumulate=3, clip=0.05)),
        (Layout(4, {"tensor_parallel_size": 4}), Run(microbatches=5, accumulate=2, clip=0.05)),
        (Layout(2, TENSOR_2 | {"sequence_parallel": False}), Run(clip=0.05)),
        (Layout(2, TENSOR_2 | {"loss_parallel": False}), Run(clip=0.05)),
        (Layout(2, TENSOR_2 | {"loss_parallel": False, "sequence_parallel": False}), Run()),
        (Layout(2, TENSOR_2), Run(tied=True, clip=0.05)),
        (Layout(2, TENSOR_2), Run(frozen=True, clip=0.05, optimizer="adamw")),
        (Layout(4, TENSOR_2), Run(microbatches=5, accumulate=2, clip=0.05, optimizer="adamw")),
        (Layout(4, TENSOR_2), Run(tied=True, clip=0.05)),
        (Layout(4, TENSOR_2 | {"data_parallel_replicate_size": 2}), Run(clip=0.05)),
    ],
)
def test_equals_one_process(rank_pool, layout: Layout, run: Run) -> None:
    expected = oracle(run)
    for trace in rank_pool.run(train, layout.ranks, run, layout.options):
        assert_equal(trace, expected, TOLERANCE)
