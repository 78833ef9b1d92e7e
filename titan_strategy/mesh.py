"""Sizes of the parallel axes -> the one device mesh of the run. Nothing else in the project creates process groups."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PIPELINE = "pipeline_parallel"
REPLICATE = "data_parallel_replicate"
SHARD = "data_parallel_shard"
TENSOR = "tensor_parallel"
EXPERT = "expert_parallel"
EXPERT_SHARD = "expert_shard"
DATA = "data_parallel"  # replicate x shard, flattened: the ranks that read different rows

_SHARD_ARGUMENT = "data_parallel_shard_size"


@dataclass(frozen=True)
class ParallelSizes:
    """Number of ranks along each axis.

    Args:
        shard: Ranks that share one copy of the parameters; `"auto"` takes all ranks that the other axes leave.
        replicate: Number of such copies (more than 1 is HSDP).
        tensor: Ranks that share each matrix product.
        pipeline: Ranks among which the layers are divided.
        expert: Ranks among which the experts of a block are divided. They are taken from shard x tensor, which they
            divide: the number of processes is that of the other four.
    """

    shard: int | Literal["auto"] = "auto"
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for argument, size in {**self._by_argument(), "expert_parallel_size": self.expert}.items():
            if size == "auto" and argument != _SHARD_ARGUMENT:
                raise ValueError(f"{argument}='auto': only {_SHARD_ARGUMENT} can be 'auto'; give a number here.")
            if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{argument}={size!r}: expected a whole number of at least 1.")

    def resolve(self, world_size: int) -> "ParallelSizes":
        """Fill in `"auto"` and check that the sizes multiply to the number of processes.

        Raises:
            ValueError: If they do not; the message gives the valid sizes.
        """
        others = {argument: size for argument, size in self._by_argument().items() if argument != _SHARD_ARGUMENT}
        product = math.prod(int(size) for size in others.values())
        shown = " x ".join(f"{argument}={size}" for argument, size in others.items() if size != 1)
        if world_size % product:
            valid = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ValueError(
                f"{shown} does not divide the {world_size} processes of this run (devices x num_nodes): "
                f"the product must be one of {valid}."
            )
        fitting = world_size // product
        if self.shard not in ("auto", fitting):
            raise ValueError(
                f"{_SHARD_ARGUMENT}={self.shard}{' x ' if shown else ''}{shown} makes {self.shard * product} "
                f"processes, but this run has {world_size} (devices x num_nodes). Here {_SHARD_ARGUMENT} must be "
                f"{fitting} or 'auto'."
            )
        resolved = replace(self, shard=fitting)
        if resolved.lent_ranks % self.expert:
            valid = ", ".join(str(n) for n in range(1, resolved.lent_ranks + 1) if resolved.lent_ranks % n == 0)
            raise ValueError(
                f"expert_parallel_size={self.expert} does not divide {_SHARD_ARGUMENT}={fitting} x "
                f"tensor_parallel_size={self.tensor} = {resolved.lent_ranks}, the ranks that it can take. It must be "
                f"one of {valid}."
            )
        return resolved

    @property
    def data_ranks(self) -> int:
        """How many ranks read different rows; of resolved sizes."""
        assert isinstance(self.shard, int), "sizes must be resolved against the world size first"
        return self.replicate * self.shard

    @property
    def lent_ranks(self) -> int:
        """How many ranks experts can be spread over: those that share a copy of the model; of resolved sizes."""
        assert isinstance(self.shard, int), "sizes must be resolved against the world size first"
        return self.shard * self.tensor

    def _by_argument(self) -> dict[str, int | str]:
        return {
            "pipeline_parallel_size": self.pipeline,
            "data_parallel_replicate_size": self.replicate,
            _SHARD_ARGUMENT: self.shard,
            "tensor_parallel_size": self.tensor,
        }


class ParallelMesh:
    """The device mesh of a run and the views of it that the other parts use.

    Axes from the outermost: pipeline, replicate, shard, tensor. Ranks that differ only in the innermost are neighbours.

    Args:
        sizes: Resolved sizes (no `"auto"`).
        device_type: `"cpu"` or `"cuda"`.
    """

    def __init__(self, sizes: ParallelSizes, device_type: str) -> None:
        assert isinstance(sizes.shard, int), "sizes must be resolved against the world size first"
        self.sizes = sizes
        self.world = init_device_mesh(
            device_type,
            (sizes.pipeline, sizes.replicate, sizes.shard, sizes.tensor),
            mesh_dim_names=(PIPELINE, REPLICATE, SHARD, TENSOR),
        )
        # There is no public way to give a merged axis a name in the mesh itself, which modules written for Lightning's
        # ModelParallelStrategy look up as device_mesh["data_parallel"].
        self.data: DeviceMesh = self.world[REPLICATE, SHARD]._flatten(DATA)

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 1-D, or 2-D (replicate, shard) for HSDP."""
        return self.world[REPLICATE, SHARD] if self.sizes.replicate > 1 else self.world[SHARD]

    @functools.cached_property
    def _expert_world(self) -> DeviceMesh:
        """The same ranks as experts see them, with shard x tensor divided otherwise. Made by all ranks at once."""
        sizes = self.sizes
        return init_device_mesh(
            self.world.device_type,
            (sizes.pipeline, sizes.replicate, sizes.lent_ranks // sizes.expert, sizes.expert),
            mesh_dim_names=(PIPELINE, REPLICATE, EXPERT_SHARD, EXPERT),
        )

    @property
    def expert(self) -> DeviceMesh:
        """The ranks among which the experts of a block are divided."""
        return self._expert_world[EXPERT]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard` of experts. Tensor parallelism does not split them: its ranks share them, too."""
        if self.sizes.expert == self.sizes.tensor == 1:
            return self.fsdp
        world = self._expert_world
        return world[REPLICATE, EXPERT_SHARD] if self.sizes.replicate > 1 else world[EXPERT_SHARD]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share each matrix product."""
        return self.world[TENSOR]

    @property
    def pipeline(self) -> DeviceMesh:
        """The ranks among which the layers are divided."""
        return self.world[PIPELINE]

    @property
    def stages_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the pipeline stages of one copy of the model; None without a pipeline."""
        return self.pipeline.get_group() if self.sizes.pipeline > 1 else None

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank comes first among those that hold the same pipeline stages."""
        coordinate = self.world.get_coordinate()
        assert coordinate is not None
        return not any(coordinate[1:])

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks over which losses, token counts and metrics are reduced."""
        return self.data.get_group()
