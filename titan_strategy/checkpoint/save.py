"""Writing checkpoints."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_strategy.checkpoint.directory import META, prepare, publish, rank_file, staging
from titan_strategy.checkpoint.together import one_error, together
from titan_strategy.mesh import ParallelMesh


def save_sharded(path: Path, checkpoint: dict[str, Any], rng: dict[str, Any]) -> None:
    """Write a checkpoint directory; returns when it is complete under its name. Call it on every rank.

    Args:
        path: The directory to make; an existing checkpoint is replaced once the new one is complete.
        checkpoint: Lightning's checkpoint. Its state dicts hold this rank's shards; of the rest, rank 0's is written.
        rng: State of this rank's random number generators.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizers = checkpoint.get("optimizer_states")
    tensors = {"state_dict": checkpoint["state_dict"]}
    tensors |= {f"optimizer_{index}": state for index, state in enumerate(optimizers or ())}
    meta = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    meta["titan_strategy"] = {"world_size": world_size, "optimizers": None if optimizers is None else len(optimizers)}
    own = {"rng": rng, "loaders": loader_states(checkpoint)}
    together(path, lambda: prepare(path) if rank == 0 else None)
    with one_error(path):
        dcp.save(tensors, checkpoint_id=staging(path))
    together(path, lambda: torch.save(own, staging(path) / rank_file(rank)))
    together(path, lambda: _finish(path, meta) if rank == 0 else None)


def save_file(path: Path, checkpoint: dict[str, Any], checkpoint_io: CheckpointIO, mesh: ParallelMesh) -> None:
    """Gather everything on rank 0 and write it as one file through `checkpoint_io`. Call it on every rank."""
    full = {**checkpoint, "state_dict": gather(checkpoint["state_dict"], mesh)}
    if "optimizer_states" in checkpoint:
        full["optimizer_states"] = [gather(state, mesh) for state in checkpoint["optimizer_states"]]

    def write() -> None:
        checkpoint_io.save_checkpoint(full, staging(path))
        publish(path)

    together(path, lambda: write() if dist.get_rank() == 0 else None)


def _finish(path: Path, meta: dict[str, Any]) -> None:
    torch.save(meta, staging(path) / META)
    publish(path)


def loader_states(checkpoint: dict[str, Any]) -> list[Any] | None:
    """The states of the training data loaders in a Lightning checkpoint, which are this rank's own."""
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")


def gather(state: dict[str, Any], mesh: ParallelMesh) -> dict[str, Any]:
    """Full tensors of all pipeline stages, in host memory of rank 0; the other ranks take part and keep nothing."""
    own = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if mesh.is_first_of_stage:
            own[name] = value.cpu() if isinstance(value, Tensor) else value
    if mesh.stages_group is None or not mesh.is_first_of_stage:
        return own if dist.get_rank() == 0 else {}
    stages: list[Any] | None = [None] * mesh.sizes.pipeline if dist.get_rank() == 0 else None
    dist.gather_object(own, stages, group=mesh.stages_group, group_dst=0)
    return {name: value for stage in stages or () for name, value in stage.items()}
