"""The part of a full tensor that this rank holds of a DTensor."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


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
        if isinstance(placement, Shard):
            length = part.size(placement.dim)
            chunk = -(-length // like.device_mesh.size(axis))
            start = min(length, chunk * coordinate[axis])
            part = part.narrow(placement.dim, start, min(chunk, length - start))
        elif not placement.is_replicate():
            raise ValueError(f"cannot take a part of a full tensor for the placement {placement}")
    return part


@torch.no_grad()
def copy_full_(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `target`, or the part that this rank holds if `target` is a DTensor."""
    if isinstance(target, DTensor):
        target.to_local().copy_(local_part(full, target))
    else:
        target.copy_(full)
