"""What fails on one rank fails on all, with the message of the first: no rank is left waiting for another."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from titan_strategy.checkpoint.directory import CheckpointError

T = TypeVar("T")


def together(path: Path, action: Callable[[], T]) -> T:
    """Run `action` on every rank and wait for all of them.

    Args:
        path: The checkpoint, for the message.
        action: What to do, without collectives.

    Raises:
        CheckpointError: On every rank, if `action` raises on any.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as failure:
        error = failure
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, None if error is None else f"{path}: rank {dist.get_rank()}: {error}")
    if any(reports):
        raise CheckpointError("; ".join(filter(None, reports))) from error
    return result


@contextmanager
def one_error(path: Path) -> Generator[None, None, None]:
    """Around calls to `torch.distributed.checkpoint`, whose error is no `Exception` and holds the ranks' tracebacks."""
    try:
        yield
    except CheckpointException as error:
        failures = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
        raise CheckpointError(f"{path}: {failures}") from error
