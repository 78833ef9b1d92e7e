"""Setting up a model takes the memory of a shard, not of the model."""

import ctypes
import gc
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

from tests.core.modules import prepare

MB = 2**20
RANKS = 4
LAYERS, INPUT, OUTPUT = 50, 4096, 2048
CONSTANT = 120  # MB: buffers of gloo and the allocator, and the modules that are imported on the way


class Slab(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.01)  # random numbers would take most of the test's time


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slab(INPUT, OUTPUT, bias=False) for _ in range(LAYERS))


def _peak_of_setup() -> dict[str, float]:
    """Sizes in MB."""
    prepare(lambda: nn.Linear(2, 2))  # whatever is done once per process
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of the resident memory
    before = _status("VmRSS")
    model = prepare(Large)
    parameters = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    return {
        "peak": _status("VmHWM") - before,
        "shard": sum(p.to_local().nbytes for p in parameters) / MB,
        "largest": max(p.nbytes for p in parameters) / MB,
        "elements": sum(p.numel() for p in parameters),
    }


def _status(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024  # the kernel gives kB


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures through Linux' /proc")
def test_peak_is_the_shard_and_the_largest_parameter(rank_pool) -> None:
    for rank in rank_pool.run(_peak_of_setup, RANKS):
        assert rank["elements"] >= 400e6
        assert rank["peak"] > rank["shard"], "the weights were not written, so nothing was measured"
        assert rank["peak"] < rank["shard"] + rank["largest"] + CONSTANT
        assert rank["shard"] + rank["largest"] + CONSTANT < rank["shard"] * RANKS / 2, (
            "the bound is far below the model"
        )
