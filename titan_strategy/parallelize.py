"""The order in which a meta model becomes a split, sharded and initialised one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric

from precision_plugins import TitanPrecision
from titan_strategy.data_parallel import (
    ReshardPolicy,
    apply_fsdp,
    average_experts,
    find_units,
    route_steps_through_fsdp,
    sum_gradients,
)
from titan_strategy.expert_parallel import apply_expert_parallel
from titan_strategy.materialize import materialize
from titan_strategy.mesh import ParallelMesh, ParallelSizes
from titan_strategy.module import TitanModule
from titan_strategy.pipeline_parallel import Pipeline
from titan_strategy.pipeline_split import PipelineConfig, assign_modules, stage_view
from titan_strategy.plan import ParallelPlan, TensorParallelStyle
from titan_strategy.single_rank import Casts, cast_parameters
from titan_strategy.tensor_parallel import apply_tensor_parallel, local_weight_shapes, resolve_styles
from titan_strategy.tied import check_tied, tied_names

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class Layout:
    """How the strategy was told to split a model; see the arguments of `TitanStrategy`."""

    mesh: ParallelMesh
    sequence_parallel: bool
    loss_parallel: bool
    pipeline: PipelineConfig
    reshard_after_forward: ReshardPolicy
    cpu_offload: bool

    def differences(self, other: "Layout") -> list[str]:
        """What differs between two layouts, each as `argument: ours, theirs`."""
        ours, theirs = ({**vars(layout), "mesh": layout.mesh.sizes} for layout in (self, other))
        return [f"{name}: {ours[name]}, {theirs[name]}" for name in ours if ours[name] != theirs[name]]


@dataclass(frozen=True)
class Split:
    """What became of a module; kept on the module, which may go from one Trainer to another."""

    layout: Layout
    precision: str
    roots: list[nn.Module]  # the modules whose forward starts the units: one, or one for each pipeline stage of a rank
    parameters_changed: Callable[[], None]  # all ranks call it when they have, before the next forward
    casts: Casts | None = None  # of a rank alone

    def during_backward(self) -> AbstractContextManager[None]:
        """Around each backward pass."""
        return nullcontext() if self.casts is None else self.casts.during_backward()


def is_split(module: pl.LightningModule) -> bool:
    """Whether this rank's part of `module` is all that there is of it here."""
    return hasattr(module, "_split")


def earlier_split(module: pl.LightningModule, layout: Layout, precision: TitanPrecision) -> Split | None:
    """What `parallelize` returned for `module` under an earlier Trainer; None if it is not split yet.

    Raises:
        ValueError: If it was split for another layout or precision, which cannot be undone.
    """
    if not is_split(module):
        return None
    split: Split = module._split  # type: ignore[assignment]  # set by `parallelize`
    differences = split.layout.differences(layout)
    if split.precision != precision.description:
        differences.append(f"precision: {split.precision}, {precision.description}")
    if differences:
        raise ValueError(
            f"This {type(module).__name__} was split by an earlier Trainer with other settings "
            f"({'; '.join(differences)}). Use the same settings, or a new module and a checkpoint."
        )
    return split


def parallelize(
    module: pl.LightningModule,
    plan: ParallelPlan | None,
    layout: Layout,
    precision: TitanPrecision,
    device: torch.device,
    seed: int,
) -> Split:
    """Turn `module`, built by `configure_model()`, into one that is ready to train, in place.

    Args:
        module: The user's LightningModule.
        plan: The plan given to the strategy, relative to `module`; None for the model's own.
        layout: How to split it.
        precision: Decides dtypes and how blocks run.
        device: Where this rank computes.
        seed: Seed of the initial weights, the same on every rank.
    """
    mesh = layout.mesh
    check_module(module)
    root, plan = root_and_plan(module, plan)
    check_plan(module, plan, mesh.sizes)
    _spread_real_values(module, device)
    styles = convert(module, root, plan, mesh.sizes, precision, device)
    tied = tied_names(module)
    units = find_units(root, plan)
    precision.check_blocks(units.blocks)
    stages = _divide_into_stages(module, plan, layout, device)
    units = units.within(module)
    if mesh.sizes.expert > 1:
        apply_expert_parallel(units.experts, mesh.expert)
    apply_tensor_parallel(module, styles, mesh.tensor, layout.sequence_parallel, layout.loss_parallel)
    precision.apply_to_blocks(units.blocks, units.experts, experts_wait=mesh.sizes.expert > 1)
    if isinstance(module, TitanModule):
        precision.apply_to_loss(module)
    roots, casts = stages or [root], None
    if _is_alone(module, layout, precision):
        casts = cast_parameters(root, precision.compute_dtype, [root] if plan else [root, *units.blocks])
    else:
        apply_fsdp(roots, units, mesh, precision, _reshard_policy(layout), layout.cpu_offload, cast_inside=plan is None)
    check_tied(module, tied)
    if root is module:
        route_steps_through_fsdp(module, [step for step in _STEPS if is_overridden(step, module)])
    if isinstance(module, TitanModule):
        sum_gradients(roots)
    else:
        average_experts(units.experts, mesh.sizes.data_ranks)
    materialize(module, torch.device("cpu") if layout.cpu_offload else device, scratch_device=device, seed=seed)
    _place_metrics(module, device, mesh.data_group)
    changed = precision.prepare_gathers(module, mesh.fsdp.get_group(-1)) if casts is None else lambda: None
    split = Split(layout, precision.description, roots, changed, casts)
    module._split = split  # type: ignore[assignment]  # no tensor, no module
    return split


def convert(
    module: pl.LightningModule,
    root: nn.Module,
    plan: ParallelPlan | None,
    sizes: ParallelSizes,
    precision: TitanPrecision,
    device: torch.device,
) -> dict[nn.Module, TensorParallelStyle]:
    """Give a model that is still whole its dtypes and its low-precision products, in place.

    Returns:
        The style of each module that tensor parallelism is going to split.
    """
    assert isinstance(sizes.shard, int), "sizes must be resolved against the world size first"
    styles = resolve_styles(root, plan) if plan is not None and sizes.tensor > 1 else {}
    precision.use_device(device)
    precision.use_local_shapes(local_weight_shapes(styles, sizes.tensor), sizes.shard)
    precision.convert_module(module)
    return styles


def _is_alone(module: pl.LightningModule, layout: Layout, precision: TitanPrecision) -> bool:
    """Whether FSDP2 would only copy: nothing is split, nor stored elsewhere, and gradients add up in float32 anyway.

    Other LightningModules than a `TitanModule` do as they like with their parameters outside of a forward, too.
    """
    return (
        isinstance(module, TitanModule)
        and layout.mesh.world.size() == 1
        and not layout.cpu_offload
        and precision.storage_dtype == torch.float32
    )


def check_module(module: pl.LightningModule) -> None:
    """Raise ValueError for a module, its model built, that cannot be trained."""
    name = type(module).__name__
    if next(module.parameters(), None) is None:
        raise ValueError(f"{name} has no parameters after configure_model(). Build the model there or in __init__.")
    if isinstance(module, TitanModule):
        if not module.automatic_optimization:
            raise ValueError(
                f"{name}.automatic_optimization=False: a TitanModule's exact normalisation needs automatic "
                "optimization. Derive from LightningModule for manual optimization."
            )
        outside = [n for n, _ in module.named_parameters() if not n.startswith("model.")]
        if outside:
            raise ValueError(
                f"{name}: a TitanModule trains the parameters of self.model only, found {', '.join(outside[:4])}."
            )


def root_and_plan(module: pl.LightningModule, plan: ParallelPlan | None) -> tuple[nn.Module, ParallelPlan | None]:
    """The module whose forward starts everything, and the plan relative to it."""
    if not isinstance(module, TitanModule):
        return module, plan
    assert module.model is not None
    return module.model, module.parallel_plan() if plan is None else plan.relative_to("model")


def check_plan(module: pl.LightningModule, plan: ParallelPlan | None, sizes: ParallelSizes) -> None:
    """Raise ValueError for sizes that need a plan, or another one."""
    name = type(module).__name__
    for argument, size in (("tensor_parallel_size", sizes.tensor), ("pipeline_parallel_size", sizes.pipeline)):
        if size > 1 and plan is None:
            raise ValueError(
                f"{argument}={size}: {name} does not say how it can be split. Give its model a parallel_plan() "
                "method, or the strategy a plan."
            )
    if sizes.expert > 1 and (plan is None or plan.experts is None):
        raise ValueError(
            f"expert_parallel_size={sizes.expert}: {name} does not say where its experts are. Name them in its plan "
            "(ParallelPlan.experts), or use expert_parallel_size=1."
        )
    if sizes.pipeline == 1:
        return
    if not isinstance(module, TitanModule):
        raise ValueError(
            f"pipeline_parallel_size={sizes.pipeline}: {name} is not a TitanModule. A pipeline runs forward and "
            "backward of microbatches in an order of its own, and needs model_inputs() and token_loss() to do so."
        )
    assert plan is not None
    if plan.tied:
        raise ValueError(
            f"pipeline_parallel_size={sizes.pipeline}: {' and '.join(plan.tied[0])} share storage, but the first and "
            "the last pipeline stage hold them apart. Use a model without tied weights, or pipeline_parallel_size=1."
        )


def _divide_into_stages(
    module: pl.LightningModule, plan: ParallelPlan | None, layout: Layout, device: torch.device
) -> list[nn.Module]:
    """Leave in `module.model` what this rank's pipeline stages hold; returns the stages, none without a pipeline."""
    mesh, config = layout.mesh.pipeline, layout.pipeline
    if mesh.size() == 1:
        return []
    assert isinstance(module, TitanModule) and module.model is not None and plan is not None
    root = module.model
    parts = divide_model(root, plan, mesh.size(), config)
    everything = [name for part in parts for name in part]
    own = config.stages_of(mesh.get_local_rank(), mesh.size())
    module.model = stage_view(root, everything, [name for number in own for name in parts[number]])
    views = {number: stage_view(module.model, everything, parts[number]) for number in own}
    module.pipeline = Pipeline(module, views, config, mesh, device)
    return list(views.values())


def divide_model(root: nn.Module, plan: ParallelPlan, ranks: int, config: PipelineConfig) -> list[list[str]]:
    """For each pipeline stage, the FQNs of its modules; together they hold every parameter of `root`.

    Raises:
        ValueError: If the model cannot be divided like that.
    """
    parts = assign_modules(root, plan, config.stages_on_each_of(ranks) * ranks, config)
    everything = [name for part in parts for name in part]
    outside = [n for n, _ in root.named_parameters() if not any(n.startswith(f"{name}.") for name in everything)]
    if outside:
        raise ValueError(
            f"pipeline_parallel_size={ranks}: the plan does not place {', '.join(outside[:4])}. Every parameter must "
            "belong to a block or to a module before or after the blocks."
        )
    _check_ties(root, parts)
    return parts


def _check_ties(root: nn.Module, parts: list[list[str]]) -> None:
    """Two stages would each have a copy of a parameter that they share, and each train its own."""
    stage_of = {f"{name}.": stage for stage, part in enumerate(parts) for name in part}
    seen: dict[nn.Parameter, tuple[str, int]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        stage = next(stage for prefix, stage in stage_of.items() if name.startswith(prefix))
        first, first_stage = seen.setdefault(parameter, (name, stage))
        if stage != first_stage:
            raise ValueError(
                f"{first} and {name} share storage, but lie on pipeline stages {first_stage} and {stage}. Use a model "
                "without tied weights, pipeline_parallel_size=1, or a pipeline.split that keeps them together."
            )


def _reshard_policy(layout: Layout) -> ReshardPolicy:
    """With a pipeline, freeing after each forward would gather every unit again for each microbatch."""
    if layout.reshard_after_forward == "default" and layout.mesh.sizes.pipeline > 1:
        return "never"
    return layout.reshard_after_forward


def _spread_real_values(root: nn.Module, device: torch.device) -> None:
    """Modules built outside `configure_model()` have values on every rank; rank 0's are the ones that count."""
    real: list[Any] = [t for t in (*root.parameters(), *root.buffers()) if not t.is_meta]
    with torch.no_grad():
        for tensor in real:
            tensor.data = tensor.data.to(device)
            dist.broadcast(tensor.data, src=0)


def _place_metrics(module: pl.LightningModule, device: torch.device, data_group: dist.ProcessGroup) -> None:
    """Metrics live on the device and are reduced over the ranks that see different data."""
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
            child.reset()  # spawned ranks would otherwise share the memory of their counters
            if child.process_group is None:
                child.process_group = data_group
