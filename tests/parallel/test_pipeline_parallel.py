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
        (pipeline(2, schedule="GPipe", microbatches=4), Run(microbatches=7, accumulate=3, clip=0.05)),
        (pipeline(2, schedule="Interleaved1F1B"), Run(microbatches=5, accumulate=2, clip=0.05)),
        (pipeline(2, schedule="LoopedBFS"), Run(clip=0.05)),
        (pipeline(2, schedule="InterleavedZeroBubble"), Run(clip=0.05)),
        (pipeline(2, schedule="ZBVZeroBubble"), Run(microbatches=5, accumulate=2, clip=0.05)),
        (pipeline(2), Run(frozen=True, clip=0.05, optimizer="adamw")),
        (pipeline(4, size=4), Run(clip=0.05)),
        (pipeline(4), Run(microbatches=5, accumulate=2, clip=0.05, optimizer="adamw")),
        (pipeline(4, tensor_parallel_size=2), Run(microbatches=7, accumulate=3, clip=0.05)),
        (pipeline(8, tensor_parallel_size=2), Run(microbatches=5, accumulate=2, clip=0.05)),
    ],
)
def test_equals_one_process(rank_pool, layout: Layout, run: Run) -> None:
    expected = oracle(run)
    traces = rank_pool.run(train, layout.ranks, run, layout.options)
    for trace in traces:
        assert_equal(trace, expected, TOLERANCE)


def test_order_from_a_file_equals_one_process(rank_pool, tmp_path) -> None:
    """Two stages on each rank, one microbatch at a time: an order that no named schedule has."""
    order = tmp_path / "order.csv"
    order.write_text("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n2F0,3F0,3B0,2B0,2F1,3F1,3B1,2B1\n")
    layout = pipeline(2, schedule_csv=order)
    run = Run(microbatches=5, accumulate=2, clip=0.05)
    for trace in rank_pool.run(train, layout.ranks, run, layout.options):
        assert_equal(trace, oracle(run), TOLERANCE)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0F0,0B0"], "has 1 lines"),
        (["0F0,0B0", "0F0,0B0"], "each must lie on one rank"),
        (["0F0,0B0", "1F0,2F0"], "hold as many"),
        (["0F0,0B0", "hello"], "line without operations"),
    ],
)
def test_wrong_order_files_are_refused(tmp_path, lines: list[str], message: str) -> None:
    (tmp_path / "order.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        PipelineConfig(schedule_csv=tmp_path / "order.csv").stages_on_each_of(2)
