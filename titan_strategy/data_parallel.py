"""FSDP2 and HSDP: which modules form a unit, and when a unit is gathered and freed again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from precision_plugins import TitanPrecision
from titan_strategy.expert_parallel import num_experts, prefetch_in_order, shard_dim
from titan_strategy.mesh import ParallelMesh
from titan_strategy.plan import ParallelPlan, match_modules

ReshardPolicy = Literal["default", "always", "never"]


@dataclass(frozen=True)
class Units:
    """The modules of a model as FSDP2 sees them: each entry is gathered and freed as one."""

    before: tuple[nn.Module, ...]
    blocks: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    experts: tuple[nn.Module, ...] = ()  # inside the blocks, gathered over ranks of their own
    tied: bool = False

    def within(self, root: nn.Module) -> "Units":
        """Those that are left of a model after its division into pipeline stages."""
        left = set(root.modules())
        before, blocks, after, experts = (
            tuple(module for module in modules if module in left)
            for modules in (self.before, self.blocks, self.after, self.experts)
        )
        return replace(self, before=before, blocks=blocks, after=after, experts=experts)


def find_units(root: nn.Module, plan: ParallelPlan | None) -> Units:
    """Resolve a plan against the module it describes; without a plan, find the repeated blocks."""
    if plan is None:
        return Units(before=(), blocks=tuple(find_blocks(root)), after=())
    return Units(
        before=_matches(root, plan.before, "plan.before"),
        blocks=tuple(match_modules(root, plan.blocks, "plan.blocks").values()),
        after=_matches(root, plan.after, "plan.after"),
        experts=() if plan.experts is None else tuple(match_modules(root, plan.experts, "plan.experts").values()),
        tied=bool(plan.tied),
    )


def find_blocks(root: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model that has no plan.

    These are the children of every outermost container (`ModuleList`, `ModuleDict`, `Sequential`) that holds at least
    two modules of one class, all with parameters and a forward of their own.
    """
    children = list(root.children())
    if isinstance(root, nn.ModuleList | nn.ModuleDict | nn.Sequential) and _repeat(children):
        return children
    return [block for child in children for block in find_blocks(child)]


def apply_fsdp(
    roots: Sequence[nn.Module],
    units: Units,
    mesh: ParallelMesh,
    precision: TitanPrecision,
    reshard_after_forward: ReshardPolicy,
    cpu_offload: bool,
    cast_inside: bool,
) -> None:
    """Shard a model in place, one unit per entry of `units`, and what is left as the root unit.

    Args:
        roots: The modules whose forward is called from outside; several if this rank has several pipeline stages.
        units: What to gather together.
        mesh: Says over which ranks.
        precision: Gives the dtype policy.
        reshard_after_forward: `"always"` frees every unit after its forward, `"never"` keeps all until the backward;
            `"default"` frees all but the last ones, whose backward comes at once.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory.
        cast_inside: Whether every unit casts its floating-point inputs to the compute dtype, or the root alone. A model
            with a plan may pass float32 tables between its modules.
    """
    gathered_from_root = {"always": True, "never": False, "default": None}[reshard_after_forward]
    free = reshard_after_forward != "never"
    free_last = reshard_after_forward == "always"
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()

    def shard(modules: Sequence[nn.Module], reshard: bool | None, cast_inputs: bool) -> None:
        if modules:
            target = modules[0] if len(modules) == 1 else list(modules)
            policy = precision.fsdp_policy(cast_inputs)
            fully_shard(target, mesh=mesh.fsdp, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    for module in units.experts:
        dim = shard_dim(module, num_experts(module) // mesh.sizes.expert, mesh.expert_fsdp.size(-1))
        fully_shard(
            module,
            mesh=mesh.expert_fsdp,
            reshard_after_forward=free,
            shard_placement_fn=lambda _, dim=dim: Shard(dim),  # type: ignore[misc]
            mp_policy=precision.fsdp_policy(False),
            offload_policy=offload,
        )

    if units.tied:
        shard((*units.before, *units.after), free_last, cast_inside)  # what shares storage must lie in one unit
    else:
        for module in units.before:
            shard([module], free, cast_inside)
    for block in units.blocks:
        shard([block], free, cast_inside)
    if not units.tied:
        shard(units.after, free_last, cast_inside)
    for root in roots:
        shard([root], gathered_from_root, cast_inputs=True)
    if mesh.sizes.expert > 1:
        prefetch_in_order([(block, *(m for m in block.modules() if m in units.experts)) for block in units.blocks])


def route_steps_through_fsdp(module: nn.Module, methods: Sequence[str]) -> None:
    """Gather the root unit around `methods`, which the trainer calls instead of `forward`."""
    for method in methods:
        register_fsdp_forward_method(module, method)


def sum_gradients(roots: Sequence[nn.Module]) -> None:
    """Make every reduction a plain sum: the division by the token count is the only scaling there is."""
    for module in _fsdp_modules(roots):
        module.set_gradient_divide_factor(1.0)
        # Without this the factor becomes a pre-multiplied sum, which gloo lacks.
        module.set_force_sum_reduction_for_comms(True)


def average_experts(modules: Sequence[nn.Module], data_ranks: int) -> None:
    """Divide the gradients of experts by the number of ranks that read different rows, as those of all other units.

    FSDP2 would divide by the number of ranks that share an expert, of which each has tokens from several.
    """
    for module in _fsdp_modules(modules):
        module.set_gradient_divide_factor(float(data_ranks))
        module.set_force_sum_reduction_for_comms(True)  # see `sum_gradients`


def set_gradient_sync(roots: Sequence[nn.Module], enabled: bool) -> None:
    """Whether the next backward passes reduce gradients, or keep them on each rank to add the next ones."""
    for module in _fsdp_modules(roots):
        module.set_requires_gradient_sync(enabled, recurse=False)


def reshard(roots: Sequence[nn.Module]) -> None:
    """Free what is gathered. A forward without a backward leaves the last units gathered, in their compute dtype."""
    for module in _fsdp_modules(roots):
        module.reshard()


def _fsdp_modules(roots: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    return (module for root in roots for module in root.modules() if isinstance(module, FSDPModule))


def _matches(root: nn.Module, patterns: Sequence[str], argument: str) -> tuple[nn.Module, ...]:
    return tuple(module for pattern in patterns for module in match_modules(root, pattern, argument).values())


def _repeat(modules: Sequence[nn.Module]) -> bool:
    """Whether these are at least two modules of one class, each of which can be a unit."""
    return (
        len(modules) > 1
        and len({type(module) for module in modules}) == 1
        and type(modules[0]).forward is not nn.Module.forward  # a list of lists: the blocks are further down
        and all(next(module.parameters(), None) is not None for module in modules)
    )
