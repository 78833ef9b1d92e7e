"""Layouts by name: `pp2fsdp2tp2` is 2 pipeline stages x 2 shards x 2 tensor-parallel ranks."""

import re
from dataclasses import dataclass

_GRAMMAR = (
    "A layout is one or more of fsdpN (or shardN), replicateN, hsdpRxS (R replicas of S shards), tpN, ppN and epN "
    "(which takes its ranks from fsdp x tp; alone it brings fsdpN along), each at most once: fsdp2, tp4, pp2tp2, "
    "hsdp2x2tp2, ep2, fsdp4ep2."
)
_PART = re.compile(r"(fsdp|shard|replicate|hsdp|tp|pp|ep)(\d+)(?:x(\d+))?")


class ParityError(ValueError):
    """What was asked for cannot be compared, for a reason that the user can change."""


@dataclass(frozen=True)
class Layout:
    """Number of ranks along each axis.

    Args:
        name: As the user wrote it.
    """

    name: str
    shard: int = 1
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.data_ranks * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Number of processes that read different rows."""
        return self.shard * self.replicate

    def options(self) -> dict[str, int]:
        """The arguments of `TitanStrategy`."""
        return {
            "data_parallel_shard_size": self.shard,
            "data_parallel_replicate_size": self.replicate,
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "expert_parallel_size": self.expert,
        }


def parse_layouts(text: str) -> list[Layout]:
    """Read a comma-separated list.

    Raises:
        ParityError: If a name does not follow the grammar; the message gives it.
    """
    return [_parse(name.strip()) for name in text.split(",")]


def _parse(name: str) -> Layout:
    sizes: dict[str, int] = {}
    position = 0
    while position < len(name):
        match = _PART.match(name, position)
        axes = _axes(*match.groups()) if match is not None else {}
        if match is None or not axes or axes.keys() & sizes or 0 in axes.values():
            raise ParityError(f"--layouts: cannot read {name[position:]!r} in {name!r}. {_GRAMMAR}")
        sizes |= axes
        position = match.end()
    if not sizes:
        raise ParityError(f"--layouts: there is an empty name. {_GRAMMAR}")
    if "expert" in sizes and not sizes.keys() & {"shard", "tensor"}:
        sizes["shard"] = sizes["expert"]
    return Layout(name, **sizes)


def _axes(axis: str, size: str, second: str | None) -> dict[str, int]:
    """The sizes that one part of a name gives; empty if it is not complete or says too much."""
    if (axis == "hsdp") != (second is not None):
        return {}
    if second is not None:
        return {"replicate": int(size), "shard": int(second)}
    return {{"fsdp": "shard", "tp": "tensor", "pp": "pipeline", "ep": "expert"}.get(axis, axis): int(size)}
