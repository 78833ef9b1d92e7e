"""A finished run leaves nothing behind: models would pile up in a notebook, and on a GPU the third would not fit."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from precision_plugins import ActivationCheckpointing, CompileConfig, Float8Precision, TitanPrecision
from tests.parallel.parity import Run, fit

RUN = Run(microbatches=2, layers=2, dim=64, ffn_dim=128)
PLUGINS = {
    "eager": lambda: TitanPrecision("bf16-mixed"),
    "compiled": lambda: TitanPrecision("bf16-mixed", ActivationCheckpointing("selective"), CompileConfig("aot_eager")),
    "float8": lambda: Float8Precision(emulate=True, float8_all_gather=True),
}


def parameters_alive_after(name: str, runs: int, folder: Path) -> list[int]:
    """After each of some runs, how many parameters of all finished ones are still there."""
    alive: list[weakref.ref[torch.Tensor]] = []
    counts = []
    for _ in range(runs):
        module = fit(RUN, {}, precision_plugin=PLUGINS[name](), default_root_dir=folder)
        alive += [weakref.ref(parameter) for parameter in module.parameters()]
        del module
        gc.collect()
        counts.append(sum(reference() is not None for reference in alive))
    return counts


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", PLUGINS)
def test_parameters_of_finished_runs_are_freed(rank_pool, tmp_path: Path, name: str, ranks: int) -> None:
    for counts in rank_pool.run(parameters_alive_after, ranks, name, 2, tmp_path):
        assert counts == [0, 0]
