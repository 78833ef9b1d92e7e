"""Everything that can be known before processes start, checked there: `fit` and `titan check` run the same code."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from precision_plugins import TitanPrecision
from titan_strategy.checkpoint import check_complete
from titan_strategy.data_parallel import find_units
from titan_strategy.dimensions import Dimension
from titan_strategy.expert_parallel import check_experts
from titan_strategy.mesh import ParallelSizes
from titan_strategy.module import TitanModule
from titan_strategy.parallelize import check_module, check_plan, convert, divide_model, is_split, root_and_plan
from titan_strategy.pipeline_split import PipelineConfig
from titan_strategy.plan import ParallelPlan
from titan_strategy.tensor_parallel import resolve_styles

if TYPE_CHECKING:
    from titan_strategy.strategy import TitanStrategy


@dataclass(frozen=True)
class Request:
    """What a strategy was asked to do with a model; see the arguments of `TitanStrategy`."""

    sizes: ParallelSizes  # resolved
    pipeline: PipelineConfig
    sequence_parallel: bool
    plan: ParallelPlan | None
    cpu_offload: bool


def preflight(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None = None,
    ckpt_path: str | Path | None = None,
) -> None:
    """Raise for everything that is known to fail, before any process waits for another.

    Args:
        trainer: Its strategy is a `TitanStrategy`.
        module: What it is going to run; left as it was.
        datamodule: If it has `batch_size` (rows per data rank and microbatch) or `sequence_length`, these are checked.
        ckpt_path: What a run was given as such.

    Raises:
        ValueError: One message with a line for each problem. A single problem is raised as it is.
    """
    strategy: TitanStrategy = trainer.strategy  # type: ignore[assignment]
    request = strategy.request
    problems = _Problems()
    with problems.collected():
        if ckpt_path not in (None, "best", "last", "hpc", "registry"):
            check_complete(Path(ckpt_path))
    if isinstance(module, TitanModule):
        with problems.collected():
            module.check_setup(trainer, datamodule)
        _check_dimensions(module, request, problems)
    with problems.collected():
        _check_sequence(datamodule, request)
    if trainer.state.fn in (None, TrainerFn.FITTING):  # evaluation takes batches of any size
        with problems.collected():
            _check_microbatches(datamodule, request)
        with problems.collected():
            _check_schedule(trainer, request)
    with problems.collected():
        _check_precision(trainer, request)
    if not is_split(module):
        _check_model(trainer, module, request, problems)
    problems.raise_if_any()


@contextmanager
def built_on_meta(trainer: pl.Trainer, module: TitanModule) -> Generator[None, None, None]:
    """`module` with its model, on the meta device; afterwards without, so that the real one can be built elsewhere."""
    if module.model is not None:
        yield
        return
    if module._trainer is None:  # the public property raises instead of returning None
        module.trainer = trainer
    try:
        with trainer.strategy.tensor_init_context():
            module.configure_model()
        yield
    finally:
        module.model = None


class _Problems:
    """Exceptions that are reported together."""

    def __init__(self) -> None:
        self._errors: list[ValueError] = []

    @contextmanager
    def collected(self) -> Generator[None, None, None]:
        try:
            yield
        except ValueError as error:
            if str(error) not in map(str, self._errors):  # two checks may meet the same one
                self._errors.append(error)

    def raise_if_any(self) -> None:
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            lines = "\n".join(f"  - {error}" for error in self._errors)
            raise ValueError(f"{len(self._errors)} settings cannot work:\n{lines}")


def _check_dimensions(module: TitanModule, request: Request, problems: _Problems) -> None:
    size, dimensions = request.sizes.tensor, module.dimensions()
    if dimensions is None:
        return
    with problems.collected():
        _check_experts(dimensions.experts, request.sizes.expert)
    if size == 1:
        return
    undivided = [str(dimension) for dimension in dimensions.split if dimension.size % size]
    vocabulary = dimensions.vocabulary
    valid = ", ".join(map(str, dimensions.tensor_parallel_sizes()))
    with problems.collected():
        if undivided:
            raise ValueError(
                f"tensor_parallel_size={size} does not divide {' nor '.join(undivided)}. For this model it must be one "
                f"of {valid}."
            )
    with problems.collected():
        if vocabulary is not None and vocabulary.size < size:
            raise ValueError(
                f"tensor_parallel_size={size} is more than {vocabulary}, which leaves some ranks without a part of the "
                f"vocabulary. For this model it must be one of {valid}."
            )


def _check_experts(experts: Dimension | None, size: int) -> None:
    if experts is not None and experts.size % size:
        valid = ", ".join(str(n) for n in range(1, experts.size + 1) if experts.size % n == 0)
        raise ValueError(
            f"expert_parallel_size={size} does not divide {experts}. For this model it must be one of {valid}."
        )


def _check_precision(trainer: pl.Trainer, request: Request) -> None:
    """Whether the hardware runs the recipe."""
    precision = trainer.precision_plugin
    if not isinstance(precision, TitanPrecision):
        return
    if _stands_on_the_device(trainer):
        precision.use_device(trainer.strategy.root_device)
    if request.cpu_offload:
        precision.check_cpu_offload()


def _stands_on_the_device(trainer: pl.Trainer) -> bool:
    """`titan check` may stand on another machine than the run will."""
    return trainer.strategy.root_device.type != "cuda" or torch.cuda.is_available()


def _check_sequence(datamodule: pl.LightningDataModule | None, request: Request) -> None:
    size, length = request.sizes.tensor, getattr(datamodule, "sequence_length", None)
    if length is None or not request.sequence_parallel or length % size == 0:
        return
    raise ValueError(
        f"data.sequence_length={length} is not divisible by tensor_parallel_size={size}, as sequence_parallel=True "
        f"needs: use {length - length % size or size} or {length - length % size + size}, or sequence_parallel=False."
    )


def _check_microbatches(datamodule: pl.LightningDataModule | None, request: Request) -> None:
    ranks, config = request.sizes.pipeline, request.pipeline
    if ranks == 1:
        return
    stages = config.stages_on_each_of(ranks) * ranks
    count, rows = config.microbatches_for(stages), getattr(datamodule, "batch_size", None)
    if rows is None or rows % count == 0:
        return
    fewest = config.fewest_microbatches(stages)
    valid = [n for n in range(fewest, rows + 1) if rows % n == 0]
    default = " (by default the number of stages)" if config.microbatches is None else ""
    remedy = f"Use one of {', '.join(map(str, valid))}, or" if valid else f"It must be at least {fewest}:"
    raise ValueError(
        f"pipeline.microbatches={count}{default} does not divide data.batch_size={rows}, the rows that a rank reads at "
        f"once. {remedy} make data.batch_size a multiple of {count}."
    )


def _check_schedule(trainer: pl.Trainer, request: Request) -> None:
    """Some schedules go twice through what autograd recorded: for the gradients of activations, then of weights."""
    config, precision = request.pipeline, trainer.precision_plugin
    if request.sizes.pipeline == 1 or not splits_backward(config) or not isinstance(precision, TitanPrecision):
        return
    unable = []
    if precision.compile is not None:
        unable.append("a compiled block (compile) goes through once: use compile: null")
    if precision.activation_checkpointing.mode == "selective":
        unable.append(
            "activation_checkpointing.mode='selective' keeps its values for one: use 'full', 'every_n_blocks' or 'none'"
        )
    if unable:
        schedule = (
            f"schedule={config.schedule!r}" if config.schedule_csv is None else f"schedule_csv={config.schedule_csv}"
        )
        raise ValueError(
            f"pipeline.{schedule} splits the backward pass in two, but {'; and '.join(unable)}. Schedules that do not "
            "split it: 1F1B, GPipe, Interleaved1F1B, LoopedBFS."
        )


def splits_backward(config: PipelineConfig) -> bool:
    """Whether the schedule computes the gradients of weights apart from those of activations."""
    if config.schedule_csv is None:
        return config.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble")
    return config.schedule_csv.exists() and re.search(r"\d[IW]\d", config.schedule_csv.read_text()) is not None


def _check_model(trainer: pl.Trainer, module: pl.LightningModule, request: Request, problems: _Problems) -> None:
    """Check what the plan says against the modules that there are. A plain LightningModule's come into being later."""
    if not isinstance(module, TitanModule):
        with problems.collected():
            check_plan(module, request.plan, request.sizes)
        return
    sizes, thrown_away = request.sizes, module.model is None
    with built_on_meta(trainer, module), problems.collected():
        check_module(module)
        root, plan = root_and_plan(module, request.plan)
        check_plan(module, plan, sizes)
        units = find_units(root, plan)
        if plan is not None:
            with problems.collected():
                dimensions = module.dimensions()
                if dimensions is None or dimensions.experts is None:  # else they are checked by the argument's name
                    check_experts(units.experts, sizes.expert)
                if sizes.pipeline > 1:
                    divide_model(root, plan, sizes.pipeline, request.pipeline)
        precision = trainer.precision_plugin
        if thrown_away and isinstance(precision, TitanPrecision) and _stands_on_the_device(trainer):
            precision.check_blocks(units.blocks)
            convert(module, root, plan, sizes, precision, trainer.strategy.root_device)
        elif plan is not None and sizes.tensor > 1:
            resolve_styles(root, plan)
