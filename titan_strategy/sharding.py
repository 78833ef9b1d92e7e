"""The part of a full tensor that this rank holds of a DTensor."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """The view of `full` that corresponds to this rank's shard of `like`, without communication.

    Mesh axes are taken from the innermost outwards: a dimension that tensor parallelism splits is split again by
    FSDP inside each tensor-parallel part. Parts are cut as `torch.chunk` cuts them: the last ones may be shorter.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    part = full
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        dim = sharded_dim(placement)
        if dim is not None:
            length = part.size(dim)
            chunk = -(-length // like.device_mesh.size(axis))
            start = min(length, chunk * coordinate[axis])
            part = part.narrow(dim, start, min(chunk, length - start))
    return part


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement splits, None if it splits none.

    FSDP2 marks a dimension that tensor parallelism has split before it with a placement of its own, no `Shard`.
    """
    return getattr(placement, "dim", None)


@torch.no_grad()
def copy_full_(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `target`, or the part that this rank holds if `target` is a DTensor."""
    local(target).copy_(local_part(full, target) if isinstance(target, DTensor) else full)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
