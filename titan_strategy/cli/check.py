"""`titan check`: the checks that `fit` makes before it starts processes, and what the layout comes to."""

import math
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl

from titan_strategy.module import TitanModule
from titan_strategy.parallelize import divide_model, root_and_plan
from titan_strategy.preflight import Request, built_on_meta, preflight
from titan_strategy.strategy import TitanStrategy


def check(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    ckpt_path: str | Path | None = None,
) -> str:
    """Check a run and describe it; starts nothing.

    Returns:
        A few lines of text for the terminal.

    Raises:
        ValueError: If the run cannot work; one line for each problem.
    """
    if not isinstance(trainer.strategy, TitanStrategy):
        raise ValueError(
            f"trainer.strategy is {type(trainer.strategy).__name__}: titan check knows runs with strategy 'titan' only."
        )
    preflight(trainer, module, datamodule, ckpt_path)
    report = _report(trainer, module, datamodule, trainer.strategy.request)
    return "\n".join(f"{title:<12}{text}" for title, text in report)


def _report(
    trainer: pl.Trainer, module: pl.LightningModule, datamodule: pl.LightningDataModule | None, request: Request
) -> Iterator[tuple[str, str]]:
    sizes = request.sizes
    axes = {"pipeline": sizes.pipeline, "replicate": sizes.replicate, "shard": sizes.shard, "tensor": sizes.tensor}
    world = math.prod(axes.values())
    yield "world", f"{world} processes = " + " x ".join(f"{name} {size}" for name, size in axes.items())
    if sizes.expert > 1:
        assert isinstance(sizes.shard, int)
        yield "experts", f"divided among {sizes.expert} of the shard {sizes.shard} x tensor {sizes.tensor} ranks"
    if isinstance(module, TitanModule):
        with built_on_meta(trainer, module):
            yield from _model(module, request)
    yield "batch", _batch(trainer, datamodule, request)


def _model(module: TitanModule, request: Request) -> Iterator[tuple[str, str]]:
    sizes, config = request.sizes, request.pipeline
    root, plan = root_and_plan(module, request.plan)
    total = largest = sum(parameter.numel() for parameter in root.parameters())
    if sizes.pipeline > 1:
        assert plan is not None
        parts = divide_model(root, plan, sizes.pipeline, config)
        counts = [sum(p.numel() for name in part for p in root.get_submodule(name).parameters()) for part in parts]
        of_ranks = [config.stages_of(rank, sizes.pipeline) for rank in range(sizes.pipeline)]
        largest = max(sum(counts[stage] for stage in stages) for stages in of_ranks)
        rank_of = {stage: rank for rank, stages in enumerate(of_ranks) for stage in stages}
        schedule, microbatches = config.schedule_csv or config.schedule, config.microbatches_for(len(parts))
        yield "pipeline", f"{schedule}, {microbatches} microbatches"
        for stage, (part, count) in enumerate(zip(parts, counts, strict=True)):
            yield f"stage {stage}", f"pipeline rank {rank_of[stage]}: {_abridged(part)}, {count:,} parameters"
    assert isinstance(sizes.shard, int)
    yield "parameters", f"{total:,}; about {largest // (sizes.shard * sizes.tensor):,} on a rank at most"


def _batch(trainer: pl.Trainer, datamodule: pl.LightningDataModule | None, request: Request) -> str:
    readers, accumulate = request.sizes.data_ranks, trainer.accumulate_grad_batches
    batch_size, sequence = (getattr(datamodule, name, None) for name in ("batch_size", "sequence_length"))
    if batch_size is None:
        return f"{readers} data ranks x accumulate_grad_batches {accumulate}; data has no batch_size"
    rows = readers * batch_size * accumulate
    tokens = f", {rows * sequence:,} tokens" if sequence is not None else ""
    return (
        f"{readers} data ranks x batch_size {batch_size} x accumulate_grad_batches {accumulate} = "
        f"{rows} rows{tokens} per optimizer step"
    )


def _abridged(names: list[str]) -> str:
    """`embedding, layers.0, ..., layers.7` for a long list of modules."""
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
