"""The order in which a meta model becomes a sharded, initialised one."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric

from precision_plugins import TitanPrecision
from titan_strategy.data_parallel import ReshardPolicy, apply_fsdp, find_units, route_steps_through_fsdp, sum_gradients
from titan_strategy.materialize import materialize
from titan_strategy.mesh import ParallelMesh
from titan_strategy.module import TitanModule
from titan_strategy.plan import ParallelPlan

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def parallelize(
    module: pl.LightningModule,
    plan: ParallelPlan | None,
    mesh: ParallelMesh,
    precision: TitanPrecision,
    device: torch.device,
    seed: int,
    reshard_after_forward: ReshardPolicy,
    cpu_offload: bool,
) -> nn.Module:
    """Turn `module`, built by `configure_model()`, into one that is ready to train, in place.

    Args:
        module: The user's LightningModule.
        plan: The plan given to the strategy, relative to `module`; None for the model's own.
        mesh: The run's mesh.
        precision: Decides dtypes and how blocks run.
        device: Where this rank computes.
        seed: Seed of the initial weights, the same on every rank.
        reshard_after_forward: See `apply_fsdp`.
        cpu_offload: Keep the parameters in host memory.

    Returns:
        The root of the FSDP2 units.
    """
    _check(module)
    root, plan = _root_and_plan(module, plan)
    precision.convert_module(module)
    units = find_units(root, plan)
    precision.apply_to_blocks(units.blocks)
    _spread_real_values(root, device)
    apply_fsdp(root, units, mesh.fsdp, precision, reshard_after_forward, cpu_offload, has_plan=plan is not None)
    if root is module:
        route_steps_through_fsdp(module, [step for step in _STEPS if is_overridden(step, module)])
    if isinstance(module, TitanModule):
        sum_gradients(root)
    parameter_device = torch.device("cpu") if cpu_offload else device
    materialize(module, parameter_device, scratch_device=device, seed=seed)
    _place_the_rest(module, device, mesh.data_group)
    return root


def _check(module: pl.LightningModule) -> None:
    name = type(module).__name__
    if next(module.parameters(), None) is None:
        raise ValueError(f"{name} has no parameters after configure_model(). Build the model there or in __init__.")
    if isinstance(module, TitanModule):
        if not module.automatic_optimization:
            raise ValueError(
                f"{name}.automatic_optimization=False: a TitanModule's exact normalisation needs automatic optimization. "
                "Derive from LightningModule for manual optimization."
            )
        outside = [n for n, _ in module.named_parameters() if not n.startswith("model.")]
        if outside:
            raise ValueError(
                f"{name}: a TitanModule trains the parameters of self.model only, found {', '.join(outside[:4])}."
            )


def _root_and_plan(module: pl.LightningModule, plan: ParallelPlan | None) -> tuple[nn.Module, ParallelPlan | None]:
    """The module whose forward starts everything, and the plan relative to it."""
    if plan is not None:
        return module, plan
    if isinstance(module, TitanModule):
        assert module.model is not None
        return module.model, module.parallel_plan()
    return module, None


def _spread_real_values(root: nn.Module, device: torch.device) -> None:
    """Modules built outside `configure_model()` have values on every rank; rank 0's are the ones that count."""
    real: list[Any] = [t for t in (*root.parameters(), *root.buffers()) if not t.is_meta]
    with torch.no_grad():
        for tensor in real:
            tensor.data = tensor.data.to(device)
            dist.broadcast(tensor.data, src=0)


def _place_the_rest(module: pl.LightningModule, device: torch.device, data_group: dist.ProcessGroup) -> None:
    """Metrics live on the device and are reduced over the ranks that see different data."""
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
            child.reset()  # spawned ranks would otherwise share the memory of their counters
            if child.process_group is None:
                child.process_group = data_group
