"""What Lightning asks of any strategy with several ranks: who they are, and collectives among them."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from titan_strategy import distributed
from titan_strategy.mesh import ParallelMesh


class MeshStrategy(ParallelStrategy):
    """Ranks on a device mesh, of which only some read different data.

    Attributes:
        mesh: Exists once the trainer has started.
        num_nodes: Set by the Trainer.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mesh: ParallelMesh | None = None
        self.num_nodes = 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The data coordinate: ranks that share rows of the data have the same one."""
        assert self.mesh is not None, "the mesh exists once the trainer has started"
        return {"num_replicas": self.mesh.data.size(), "rank": self.mesh.data.get_local_rank()}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Refuse a prediction that would hang: Lightning may give a rank a row more, but sharded models run in step."""
        sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
        if isinstance(sampler, UnrepeatedDistributedSampler) and sampler.total_size % sampler.num_replicas:
            raise ValueError(
                f"predict: {sampler.total_size} rows cannot be shared evenly by {sampler.num_replicas} data ranks. Use "
                "a number of rows that they divide, one process, or a sampler of your own with "
                "Trainer(use_distributed_sampler=False)."
            )
        return dataloader

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce over `group`, by default over the data ranks."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        if group is None and self.mesh is not None:
            group = self.mesh.data_group
        return distributed.reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = self.reduce(votes, group=dist.group.WORLD, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)
