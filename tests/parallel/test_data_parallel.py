"""FSDP2 and HSDP give the numbers of one process."""

import pytest

from tests.parallel.parity import Layout, Run, assert_equal, oracle, train

SHARD_2 = Layout(2)
SHARD_4 = Layout(4)
HSDP = Layout(4, {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 2})
TOLERANCE = 1e-6


@pytest.mark.parametrize("layout", [Layout(1), SHARD_2, SHARD_4, HSDP], ids=["one", "shard2", "shard4", "hsdp"])
@pytest.mark.parametrize(
    "run",
    [
        Run(),
        Run(clip=0.05, optimizer="adamw"),
        Run(microbatches=5, accumulate=2, optimizer="adamw"),
        Run(microbatches=7, accumulate=3, clip=0.05),
    ],
    ids=["plain", "clip-adamw", "accumulate2-ragged-adamw", "accumulate3-ragged-clip"],
)
def test_equals_one_process(rank_pool, layout: Layout, run: Run) -> None:
    expected = oracle(run)
    for trace in rank_pool.run(train, layout.ranks, run, layout.options):
        assert_equal(trace, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (Run(clip=1e-3, clip_algorithm="value"), {}),
        (Run(tied=True, clip=0.05), {}),
        (Run(), {"reshard_after_forward": "never"}),
        (Run(), {"reshard_after_forward": "always"}),
    ],
    ids=["clip-by-value", "tied", "never-reshard", "always-reshard"],
)
def test_variants_equal_one_process(rank_pool, run: Run, options: dict) -> None:
    expected = oracle(run)
    for trace in rank_pool.run(train, 2, run, options):
        assert_equal(trace, expected, TOLERANCE)
