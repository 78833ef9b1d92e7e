"""FSDP2 and HSDP: which modules form a unit, and when a unit is gathered and freed again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard, register_fsdp_forward_method

from precision_plugins import TitanPrecision
from titan_strategy.plan import ParallelPlan, match_modules

ReshardPolicy = Literal["default", "always", "never"]


@dataclass(frozen=True)
class Units:
    """The modules of a model as FSDP2 sees them: each entry is gathered and freed as one."""

    before: tuple[nn.Module, ...]
    blocks: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    tied: bool = False


def find_units(root: nn.Module, plan: ParallelPlan | None) -> Units:
    """Resolve a plan against the module it describes; without a plan, find the repeated blocks."""
    if plan is None:
        return Units(before=(), blocks=tuple(find_blocks(root)), after=())
    return Units(
        before=_matches(root, plan.before, "plan.before"),
        blocks=tuple(match_modules(root, plan.blocks, "plan.blocks").values()),
        after=_matches(root, plan.after, "plan.after"),
        tied=bool(plan.tied),
    )


def find_blocks(root: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model that has no plan.

    These are the children of every outermost container (`ModuleList`, `ModuleDict`, `Sequential`) that holds at least
    two modules of one class, all with parameters.
    """
    blocks: list[nn.Module] = []
    for child in root.children():
        members = list(child.children())
        same = len(members) > 1 and len({type(member) for member in members}) == 1
        if same and isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) and all(map(_has_parameters, members)):
            blocks += members
        else:
            blocks += find_blocks(child)
    return blocks


def apply_fsdp(
    root: nn.Module,
    units: Units,
    mesh: DeviceMesh,
    precision: TitanPrecision,
    reshard_after_forward: ReshardPolicy,
    cpu_offload: bool,
    has_plan: bool,
) -> None:
    """Shard `root` in place, one unit per entry of `units`, and what is left as the root unit.

    Args:
        root: The module whose forward is the entry point.
        units: What to gather together.
        mesh: 1-D (shard), or 2-D (replicate, shard).
        precision: Gives the dtype policy.
        reshard_after_forward: `"always"` frees every unit after its forward, `"never"` keeps all until the backward;
            `"default"` frees all but the last ones, whose backward comes at once.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory.
        has_plan: A model with a plan passes float32 tables between its modules, so only its root casts inputs.
    """
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()

    def shard(modules: Sequence[nn.Module], reshard: bool | None, cast_inputs: bool) -> None:
        if modules:
            target = modules[0] if len(modules) == 1 else list(modules)
            policy = precision.fsdp_policy(cast_inputs)
            fully_shard(target, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    free = reshard_after_forward != "never"
    if units.tied:
        # Parameters that share storage must lie in one unit.
        shard((*units.before, *units.after), reshard_after_forward == "always", not has_plan)
    else:
        for module in units.before:
            shard([module], free, not has_plan)
    for block in units.blocks:
        shard([block], free, not has_plan)
    if not units.tied:
        shard(units.after, reshard_after_forward == "always", not has_plan)
    shard([root], {"always": True, "never": False, "default": None}[reshard_after_forward], cast_inputs=True)


def route_steps_through_fsdp(module: nn.Module, methods: Sequence[str]) -> None:
    """Gather the root unit around `methods`, which the trainer calls instead of `forward`."""
    for method in methods:
        register_fsdp_forward_method(module, method)


def sum_gradients(root: nn.Module) -> None:
    """Make every reduction a plain sum: the division by the token count is the only scaling there is."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this the factor becomes a pre-multiplied sum, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)


def reshard(root: nn.Module) -> None:
    """Free what is gathered. A forward without a backward leaves the last units gathered, in their compute dtype."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _matches(root: nn.Module, patterns: Sequence[str], argument: str) -> tuple[nn.Module, ...]:
    return tuple(module for pattern in patterns for module in match_modules(root, pattern, argument).values())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
