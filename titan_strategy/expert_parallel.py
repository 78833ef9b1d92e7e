"""Expert parallelism: the experts of a block divided among ranks, and tokens sent to them."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

from titan_strategy.dispatch import AllToAllDispatcher


def num_experts(module: nn.Module) -> int:
    """How many experts `module` holds: the first dimension of its parameters.

    Raises:
        ValueError: If they do not agree on it.
    """
    counts = {name: parameter.shape[0] for name, parameter in module.named_parameters()}
    if len(set(counts.values())) != 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no parameters"
        raise ValueError(
            f"plan.experts: the parameters of {type(module).__name__} must have the experts as their first dimension, "
            f"but it has {shown}."
        )
    return next(iter(counts.values()))


def check_experts(modules: Sequence[nn.Module], size: int) -> None:
    """Raise ValueError unless `size` ranks can share the experts of each module equally."""
    for module in modules:
        count = num_experts(module)
        if count % size:
            valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ValueError(
                f"expert_parallel_size={size} does not divide the {count} experts of {type(module).__name__}. For this "
                f"model it must be one of {valid}."
            )
        if not hasattr(module, "dispatcher"):
            raise ValueError(
                f"plan.experts: {type(module).__name__} has no attribute `dispatcher`, through which tokens would "
                "reach experts on other ranks; see titan_strategy.dispatch."
            )


def apply_expert_parallel(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Leave on each rank of the 1-D `mesh` an equal part of the experts of each module."""
    check_experts(modules, mesh.size())
    for module in modules:
        alignment = module.dispatcher.alignment  # type: ignore[union-attr]  # as the precision plugin wants it
        dispatcher = AllToAllDispatcher(mesh.get_group(), num_experts(module), alignment)  # type: ignore[arg-type]
        setattr(module, "dispatcher", dispatcher)  # noqa: B010
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def shard_dim(module: nn.Module, here: int, ranks: int) -> int:
    """The dimension along which FSDP2 cuts the parameters of `module`, of whose experts `here` are on each rank.

    Where there are more ranks than experts, those left without one would gather padding only: then the next dimension
    is cut, if all parameters divide evenly, as FSDP2 demands of any dimension but the first.
    """
    divides = all(parameter.ndim > 1 and parameter.shape[1] % ranks == 0 for parameter in module.parameters())
    return 1 if ranks > here and divides else 0


def prefetch_in_order(units: Sequence[Sequence[nn.Module]]) -> None:
    """Let each unit gather the next one while it runs.

    FSDP2 would issue that when the next unit begins. But a dispatch makes the host wait for the device, so by then the
    device has nothing to do.

    Args:
        units: In the order of the forward pass: a module and the sharded modules in it, all sharded by FSDP2.
    """
    for current, following in pairwise(units):
        _sharded(current[0]).set_modules_to_forward_prefetch([_sharded(module) for module in following])
        _sharded(following[0]).set_modules_to_backward_prefetch([_sharded(module) for module in current])


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
