"""FSDP2 gathers weights in Float8: half of the bytes on the wire, and one cast by each rank of its own part alone.

A weight has one scale, which takes its largest magnitude on any rank. One reduction finds those of all weights, each
time that they have changed; then every gather knows its scale beforehand. The numbers are those of gathering in the
compute dtype and casting afterwards, bit for bit.

FSDP2 hands a parameter's gather to `fsdp_pre_all_gather` and `fsdp_post_all_gather` of its local tensor, if that has
them (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). They need not be methods of a class: it
looks for them once more before its first forward. So the stored parameters stay plain tensors for optimizers and
checkpoints.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from precision_plugins.float8 import round_to_float8, scale_of
from precision_plugins.float8_weight import Float8Weight


class Float8AllGather:
    """The gathers of some weights, with their scales.

    Args:
        weights: Those that FSDP2 has split, but not gathered yet: rows over the ranks of `group`, as many on each.
        group: The ranks that share a copy of each weight.
        dtype: What other weights are gathered in, and products compute in.
    """

    def __init__(self, weights: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._shards = [_Shard(_local(weight)) for weight in weights]
        self._group = group
        self._dtype = dtype
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the scales anew; to be called by all ranks when weights have changed, and before the next forward."""
        norms = torch._foreach_norm([shard.values for shard in self._shards], float("inf"), dtype=torch.float32)
        largest = torch.stack(list(norms))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        # The largest number after the cast to the compute dtype is the cast of the largest number.
        scales = scale_of(largest.to(self._dtype), "tensorwise", torch.float8_e4m3fn)
        for shard, scale in zip(self._shards, scales.unbind(), strict=True):
            shard.scale = scale


class _Shard:
    """What one rank adds to the gather of one weight."""

    scale: Tensor

    def __init__(self, values: Tensor) -> None:
        self.values = values
        for hook in (self.fsdp_pre_all_gather, self.fsdp_post_all_gather):
            setattr(values, hook.__name__, hook)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], Tensor]:
        """What to send, and what else the gathered weight is made of."""
        dtype = policy.param_dtype or self.values.dtype
        payload = round_to_float8(self.values.to(dtype), self.scale[None, None], torch.float8_e4m3fn)
        return (payload.view(torch.uint8),), self.scale  # bytes, because gloo knows no Float8

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Float8Weight, tuple[()]] | None:
        """The gathered weight; `out` is the one of the last gather, whose payload has already been written."""
        if out is None:
            return Float8Weight(gathered[0].view(torch.float8_e4m3fn), scale, dtype), ()
        weight: Any = _local(out)
        weight.scale = scale
        return None


def _local(tensor: Tensor) -> Tensor:
    """The very tensor that a rank holds: the public `to_local` returns another one that shares its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
