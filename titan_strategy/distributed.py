"""The process group of the run, what ranks must agree on, and what is each rank's own."""

import atexit
import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor


def init_process_group(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta
) -> None:
    """Join the default process group, once per process; it lasts until the process ends.

    Raises:
        RuntimeError: If a group of another size exists.
    """
    if dist.is_initialized():
        if dist.get_world_size() != environment.world_size():
            raise RuntimeError(
                f"This process already belongs to a process group of {dist.get_world_size()} ranks, but this Trainer "
                f"has {environment.world_size()}. Destroy that group first, or use the same number of devices."
            )
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def agree_on_seed(seed: int | None) -> int:
    """`seed`, else the one of `seed_everything`, else one that rank 0 draws; the same on all ranks."""
    if seed is None:
        given = os.environ.get("PL_GLOBAL_SEED")
        seed = int(given) if given is not None else random.SystemRandom().randrange(2**31)
    agreed = [seed]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def reduce(tensor: Tensor, group: dist.ProcessGroup | None, operation: dist.ReduceOp | str | None) -> Tensor:
    """Reduce a copy of `tensor` over `group`. `"mean"` is a sum divided by the group's size, for gloo has no mean."""
    mean = operation in (None, "mean", "avg", dist.ReduceOp.AVG)
    result = tensor.detach().clone()
    dist.all_reduce(result, dist.ReduceOp.SUM if mean else _reduce_op(operation), group=group)
    return result / dist.get_world_size(group) if mean else result


def _reduce_op(operation: dist.ReduceOp | str | None) -> Any:
    return getattr(dist.ReduceOp, operation.upper()) if isinstance(operation, str) else operation


def all_rows(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows (dimension 0, as many on each rank) of all ranks of a group, in the order of the ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of this rank's random number generators, loadable with `weights_only=True`."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "python": (version, list(numbers), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
