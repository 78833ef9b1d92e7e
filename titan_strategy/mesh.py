"""Sizes of the parallel axes -> the one device mesh of the run. Nothing else in the project creates process groups."""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE = "data_parallel_replicate"
SHARD = "data_parallel_shard"
TENSOR = "tensor_parallel"
DATA = "data_parallel"  # replicate x shard, flattened: the ranks that read different rows


@dataclass(frozen=True)
class ParallelSizes:
    """Number of ranks along each axis, before the world size is known.

    Args:
        shard: Ranks that share one copy of the parameters; `"auto"` takes all ranks that the other axes leave.
        replicate: Number of such copies (more than 1 is HSDP).
    """

    shard: int | Literal["auto"] = "auto"
    replicate: int = 1

    def __post_init__(self) -> None:
        if self.replicate == "auto":
            raise ValueError(
                "data_parallel_replicate_size='auto': only data_parallel_shard_size can be 'auto'; give a number here."
            )
        for argument, size in (("data_parallel_shard_size", self.shard), ("data_parallel_replicate_size", self.replicate)):
            if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{argument}={size!r}: expected a whole number of at least 1.")

    def resolve(self, world_size: int) -> "ParallelSizes":
        """Fill in `"auto"` and check that the sizes multiply to the number of processes.

        Raises:
            ValueError: If they do not; the message gives the valid sizes.
        """
        if world_size % self.replicate:
            raise ValueError(
                f"data_parallel_replicate_size={self.replicate} does not divide the {world_size} processes of this run "
                f"(devices x num_nodes). Valid sizes: {', '.join(map(str, _divisors(world_size)))}."
            )
        fitting = world_size // self.replicate
        if self.shard not in ("auto", fitting):
            raise ValueError(
                f"data_parallel_shard_size={self.shard} x data_parallel_replicate_size={self.replicate} = "
                f"{self.shard * self.replicate}, but this run has {world_size} processes (devices x num_nodes). "
                f"With data_parallel_replicate_size={self.replicate}, data_parallel_shard_size must be {fitting} or 'auto'."
            )
        return ParallelSizes(shard=fitting, replicate=self.replicate)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


class ParallelMesh:
    """The device mesh of a run and the views of it that the other parts use.

    Axes from the outermost: replicate, shard, tensor. Ranks that differ only in the innermost axis are neighbours.

    Args:
        sizes: Resolved sizes (no `"auto"`).
        device_type: `"cpu"` or `"cuda"`.
    """

    def __init__(self, sizes: ParallelSizes, device_type: str) -> None:
        assert isinstance(sizes.shard, int), "sizes must be resolved against the world size first"
        self.sizes = sizes
        self.world = init_device_mesh(
            device_type, (sizes.replicate, sizes.shard, 1), mesh_dim_names=(REPLICATE, SHARD, TENSOR)
        )
        # There is no public way to give a merged axis a name in the mesh itself, which modules written for Lightning's
        # ModelParallelStrategy look up as device_mesh["data_parallel"].
        self.data: DeviceMesh = self.world[REPLICATE, SHARD]._flatten(DATA)

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 1-D, or 2-D (replicate, shard) for HSDP."""
        return self.world[REPLICATE, SHARD] if self.sizes.replicate > 1 else self.world[SHARD]

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks over which losses, token counts and metrics are reduced."""
        return self.data.get_group()
