"""Every pipeline schedule gives the numbers of one process."""

import pytest

from tests.parallel.parity import Layout, Run, assert_equal, oracle, train
from titan_strategy import PipelineConfig

TOLERANCE = 1e-5


def pipeline(ranks: int, size: int = 2, **options) -> Layout:
    others = {key: options.pop(key) for key in list(options) if key.endswith("_size")}
    return Layout(ranks, {"pipeline_parallel_size": size, "pipeline": PipelineConfig(**options), **others})


@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (pipeline(2), Run(clip=0.05, optimizer="adamw")),
        (pipeline(2, schedule="GPipe", microbatches=4), Run(microbatches=13, accumulate=3, clip=0.05)),
        (pipeline(2, schedule="Interleaved1F1B"), Run(microbatches=9, accumulate=2, clip=0.05)),
        (pipeline(2, schedule="LoopedBFS"), Run(clip=0.05)),
        (pipeline(2, schedule="InterleavedZeroBubble"), Run(clip=0.05)),
        (pipeline(2, schedule="ZBVZeroBubble"), Run(microbatches=9, accumulate=2, clip=0.05)),
        (pipeline(2), Run(frozen=True, clip=0.05, optimizer="adamw")),
        (pipeline(4, size=4), Run(clip=0.05)),
        (pipeline(4), Run(microbatches=9, accumulate=2, clip=0.05, optimizer="adamw")),
        (pipeline(4, tensor_parallel_size=2), Run(microbatches=13, accumulate=3, clip=0.05)),
        (pipeline(8, tensor_parallel_size=2), Run(microbatches=9, accumulate=2, clip=0.05)),
    ],
)
def test_equals_one_process(rank_pool, layout: Layout, run: Run) -> None:
    expected = oracle(run)
    traces = rank_pool.run(train, layout.ranks, run, layout.options)
    for trace in traces:
        assert_equal(trace, expected, TOLERANCE)
