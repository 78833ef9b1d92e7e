"""Gradients over the whole mesh: one global norm, clipping, and the exact division by tokens."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_strategy.sharding import local, sharded_dim


@torch.no_grad()
def global_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float,
    device: torch.device,
    stages: dist.ProcessGroup | None = None,
) -> Tensor:
    """Norm over all gradients of the model, the same on every rank.

    Computed in float32 whatever the gradients' dtype, because a bfloat16 sum depends on where the tensor was cut.

    Args:
        parameters: Parameters whose `.grad` counts; replicated ones count once.
        norm_type: 2.0 or infinity.
        device: Where the result is wanted (the gradients may be offloaded).
        stages: The ranks that hold the other pipeline stages of the model, if there are any.

    Returns:
        A float32 scalar; 0 when there is no gradient.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[_sharding_groups(parameter.grad)].append(local(parameter.grad))
    infinite = norm_type == float("inf")
    combine = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    total = torch.zeros((), device=device)
    for shard_groups, gradients in groups.items():
        part = _power_sum([g for g in gradients if g.numel()], norm_type, device)
        for group in shard_groups:
            dist.all_reduce(part, combine, group=group)
        total = torch.maximum(total, part) if infinite else total + part
    if stages is not None:
        dist.all_reduce(total, combine, group=stages)
    return total if infinite else total.pow(1 / norm_type)


@torch.no_grad()
def clip_by_norm(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients by `min(1, max_norm / (norm + 1e-6))`, the formula of `torch.nn.utils.clip_grad_norm_`."""
    scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def clip_by_value(parameters: Sequence[nn.Parameter], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit]."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by a scalar tensor, without reading it on the host."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_device[local(parameter.grad).device].append(local(parameter.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def drop(parameters: Iterable[nn.Parameter]) -> None:
    """Free the gradients."""
    for parameter in parameters:
        parameter.grad = None


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over local tensors, or their maximum for the infinity norm; float32 scalar on `device`."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack([norm.to(device) for norm in _norms(gradients, norm_type)])
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def _norms(gradients: list[Tensor], norm_type: float) -> Sequence[Tensor]:
    """The norm of each tensor, float32."""
    if gradients[0].device.type == "cuda":
        # One kernel for all. torch.nn.utils.get_total_norm, its public entry, cannot ask for float32 accumulation.
        return torch._foreach_norm(gradients, norm_type, dtype=torch.float32)
    return [_norm_on_cpu(gradient.flatten(), norm_type) for gradient in gradients]


def _norm_on_cpu(flat: Tensor, norm_type: float) -> Tensor:
    """Norm in short float32 sums, which are then added in float64.

    torch's own norm of a whole tensor is one running float32 sum on the CPU: wrong in the fourth digit at 10 million
    elements.
    """
    width = 4096
    whole = flat.numel() // width * width
    parts = [part for part in (flat[:whole].view(-1, width), flat[whole:].view(1, -1)) if part.numel()]
    rows = [torch.linalg.vector_norm(part, norm_type, dim=-1, dtype=torch.float32) for part in parts]
    return torch.linalg.vector_norm(torch.cat(rows).double(), norm_type).float()


def _sharding_groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which the parts of a gradient lie; empty for one that every rank holds whole."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(axis) for axis, p in enumerate(gradient.placements) if sharded_dim(p) is not None)
