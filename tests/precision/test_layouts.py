"""Low precision in every layout: the numbers of one process with the same recipe, and proof that the recipe ran."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models import MoEConfig
from precision_plugins import Float8Precision, MXFP8Precision, TitanPrecision, recipes
from tests.parallel.parity import Layout, Module, Recorder, Run, Trace, fit

# Wide enough for blocks of 32 when two ranks share each product.
SIZES = {"dim": 64, "ffn_dim": 128, "layers": 2}
DENSE = Run(**SIZES, microbatches=2)
EXPERTS = Run(**SIZES, microbatches=2, moe=MoEConfig(num_experts=4, top_k=2, expert_dim=64, interval=2))
PLUGINS = {
    "mxfp8": MXFP8Precision(emulate=True, precision="32-true"),
    "float8": Float8Precision(emulate=True, precision="32-true", recipe="rowwise", grouped_experts=True),
}
TENSOR_2 = {"tensor_parallel_size": 2}


@contextmanager
def counted_products() -> Iterator[dict[str, int]]:
    """How often each emulated product runs."""
    counts: dict[str, int] = {}

    def counting(name: str) -> Any:
        product = getattr(recipes, name)

        def counted(*args: Any, **options: Any) -> Tensor:
            counts[name] = counts.get(name, 0) + 1
            return product(*args, **options)

        return mock.patch.object(recipes, name, counted)

    names = ("mx_linear", "mx_grouped_mm", "float8_linear", "float8_grouped_mm")
    with counting(names[0]), counting(names[1]), counting(names[2]), counting(names[3]):
        yield counts


def train(run: Run, options: dict[str, Any], plugin: str, folder: Path) -> tuple[Trace, dict[str, int]]:
    recorder = Recorder()
    with counted_products() as counts:
        fit(run, options, Module, PLUGINS[plugin], callbacks=[recorder], default_root_dir=folder)
    return recorder.trace, counts


def sqnr(found: Tensor, expected: Tensor) -> float:
    """Signal to noise in dB."""
    noise = (found - expected).norm().item()
    return 20 * math.log10(expected.norm().item() / noise) if noise else math.inf


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize(
    ("layout", "run"),
    [
        (Layout(2, {}), DENSE),
        (Layout(2, TENSOR_2), DENSE),
        (Layout(4, TENSOR_2), DENSE),
        # A pipeline divides by the number of tokens after the backward pass, as accumulation does. Gradients that are
        # scaled otherwise before they are rounded differ by the rounding itself: 28 dB.
        (Layout(2, {"pipeline_parallel_size": 2}), replace(DENSE, accumulate=2)),
        (Layout(2, {"expert_parallel_size": 2}), EXPERTS),
    ],
    ids=["shard2", "tp2", "tp2-shard2", "pp2", "ep2"],
)
def test_equals_one_process_with_the_same_recipe(
    rank_pool, tmp_path: Path, plugin: str, layout: Layout, run: Run
) -> None:
    ((expected, _),) = rank_pool.run(train, 1, run, {}, plugin, tmp_path)
    linear, grouped = (
        f"{'mx' if plugin == 'mxfp8' else plugin}_linear",
        f"{'mx' if plugin == 'mxfp8' else plugin}_grouped_mm",
    )
    for trace, counts in rank_pool.run(train, layout.ranks, run, layout.options, plugin, tmp_path):
        assert counts.get(linear, 0) > 0
        assert (counts.get(grouped, 0) > 0) == (run.moe is not None)
        for step, gradients in enumerate(expected["gradients"]):
            for name, value in gradients.items():
                assert sqnr(trace["gradients"][step][name], value) >= 30, f"{name} in step {step}"
        torch.testing.assert_close(torch.tensor(trace["loss"]), torch.tensor(expected["loss"]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_recipe_makes_a_difference(rank_pool, tmp_path: Path, plugin: str) -> None:
    ((low, _),) = rank_pool.run(train, 1, EXPERTS, {}, plugin, tmp_path)
    ((full, counts),) = rank_pool.run(train_in_full, 1, EXPERTS)
    assert counts == {}
    name = "layers.1.moe.routed.experts.w2"
    assert 10 < sqnr(low["gradients"][0][name], full["gradients"][0][name]) < 40


def train_in_full(run: Run) -> tuple[Trace, dict[str, int]]:
    recorder = Recorder()
    with counted_products() as counts:
        fit(run, {}, Module, precision_plugin=TitanPrecision("32-true"), callbacks=[recorder])
    return recorder.trace, counts
