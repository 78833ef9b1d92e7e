"""Weights gathered in Float8: the bits of gathering them in the compute dtype, for half of the bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from models import MoEConfig
from precision_plugins import ActivationCheckpointing, CompileConfig, Float8Precision
from precision_plugins.float8 import float8_linear, round_to_float8, scale_of
from precision_plugins.float8_weight import Float8Weight
from precision_plugins.torchao_kernels import float8_linear_kernel
from tests.parallel.parity import (
    SEED,
    Layout,
    Module,
    Recorder,
    Run,
    Trace,
    fit,
    full_parameters,
    quiet_trainer,
)
from tests.rank_pool import ExternalRanks
from titan_strategy import TitanStrategy

RUN = Run(dim=64, ffn_dim=128, layers=2, microbatches=4, accumulate=2, optimizer="adamw", clip=0.5)
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_dim=64, shared_dim=64, interval=2)
SHARD_2 = Layout(2)
TENSOR_2, PIPELINE_2, REPLICATE_2 = (
    {f"{axis}_parallel{size}": 2}
    for axis, size in (("tensor", "_size"), ("pipeline", "_size"), ("data", "_replicate_size"))
)


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """The bytes that this rank sends with each gather of FSDP2."""
    sent: list[int] = []
    name = next(name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name))  # new and old
    gather = getattr(dist, name)

    def counted(output_tensor: Any, input_tensor: Any, *args: Any, **options: Any) -> Any:
        sent.append(input_tensor.nbytes)
        return gather(output_tensor, input_tensor, *args, **options)

    with mock.patch.object(dist, name, counted):
        yield sent


def train(
    run: Run, options: dict[str, Any], plugin_options: dict[str, Any], folder: Path
) -> tuple[Trace, int, dict[str, str], int]:
    """The numbers of a run, the bytes that this rank sent, the recipes in the manifest, and the number of graphs."""
    torch.compiler.reset()
    counters.clear()
    plugin, recorder = Float8Precision(emulate=True, **plugin_options), Recorder()
    with counted_gathers() as sent:
        module = fit(run, options, Module, plugin, callbacks=[recorder], default_root_dir=folder)
    assert plugin.manifest is not None
    metrics = {name: value.item() for name, value in module.trainer.callback_metrics.items()}
    trace = recorder.trace | {"final": full_parameters(module), "metrics": metrics}
    recipes = {entry.name: entry.recipe or "" for entry in plugin.manifest.entries}
    return trace, sum(sent), recipes, counters["stats"]["unique_graphs"]


MIXED, FULL, LOW = ({"precision": name} for name in ("bf16-mixed", "32-true", "bf16-true"))


@pytest.mark.parametrize(
    ("layout", "plugin_options"),
    [
        (SHARD_2, MIXED),
        (SHARD_2, FULL),
        (SHARD_2, LOW),
        (SHARD_2, {"activation_checkpointing": ActivationCheckpointing("selective")}),
        (Layout(4, REPLICATE_2), MIXED),
        (Layout(4, TENSOR_2), {"compile": CompileConfig("aot_eager")}),
        (Layout(4, PIPELINE_2), MIXED),
        (Layout(2, {"expert_parallel_size": 2}), MIXED),
    ],
    ids=["mixed", "full", "low", "selective", "replicate2-shard2", "tp2-shard2-compiled", "pp2-shard2", "ep2"],
)
def test_has_the_bits_of_gathering_in_the_compute_dtype(
    rank_pool, tmp_path: Path, layout: Layout, plugin_options: dict[str, Any]
) -> None:
    run = replace(RUN, frozen=layout is SHARD_2, moe=EXPERTS if "expert_parallel_size" in layout.options else None)
    off, on = (
        rank_pool.run(train, layout.ranks, run, layout.options, {**plugin_options, "float8_all_gather": on}, tmp_path)
        for on in (False, True)
    )
    for (expected, bytes_off, _, graphs_off), (trace, bytes_on, manifest, graphs) in zip(off, on, strict=True):
        assert graphs == graphs_off
        assert 0 < bytes_on < bytes_off
        torch.testing.assert_close(trace, expected, rtol=0, atol=0)
        assert manifest["model.layers.0.attention.wo"] == "float8 tensorwise (emulated), gathered in Float8"
        assert manifest["model.output"] == ""


class Scaling(pl.Callback):
    """Other weights for the time of a validation, as averaging has them."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._scale(pl_module, 3)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._scale(pl_module, 1 / 3)

    @torch.no_grad()
    def _scale(self, module: pl.LightningModule, factor: float) -> None:
        for parameter in module.parameters():
            parameter.mul_(factor)


class StepsByHand(pl.LightningModule):
    """Two optimizer steps in each training step; nothing but linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(2)))

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.layers(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=5.0)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0)), batch_size=None)


def trainer(on: bool, folder: Path, **options: Any) -> pl.Trainer:
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")] * 2,
        seed=SEED,
        precision_plugin=Float8Precision(emulate=True, float8_all_gather=on),
    )
    return quiet_trainer(strategy, 2, max_epochs=1, default_root_dir=folder, **options)


def steps_by_hand(on: bool, folder: Path) -> list[float]:
    module = StepsByHand()
    trainer(on, folder).fit(module)
    return module.losses


def weights_that_change(on: bool, folder: Path) -> list[dict[str, Any]]:
    """Metrics after training with other weights in each validation, of a new module that loads them, and resumes."""
    first, second = Module(RUN), Module(RUN)
    fitting = trainer(on, folder, callbacks=[Scaling()], val_check_interval=2)
    fitting.fit(first)
    fitting.save_checkpoint(folder / "checkpoint")
    evaluation = trainer(on, folder)
    evaluated = evaluation.validate(second, ckpt_path=str(folder / "checkpoint"), verbose=False)
    resumed = trainer(on, folder, callbacks=[recorder := Recorder()])
    resumed.fit_loop.max_epochs = 2
    resumed.fit(Module(RUN), ckpt_path=str(folder / "checkpoint"))
    return [dict(fitting.callback_metrics), dict(evaluated[0]), recorder.trace]


def test_scales_follow_every_step_of_manual_optimization(rank_pool, tmp_path: Path) -> None:
    (off, _), (on, _) = (rank_pool.run(steps_by_hand, 2, on, tmp_path) for on in (False, True))
    assert on == off
    assert off[-1] < 0.5 * off[0]


def test_scales_follow_weights_that_are_loaded_or_exchanged(rank_pool, tmp_path: Path) -> None:
    (off, _), (on, _) = (rank_pool.run(weights_that_change, 2, on, tmp_path / str(on)) for on in (False, True))
    torch.testing.assert_close(on, off, rtol=0, atol=0)
    assert len(on[2]["loss"]) == RUN.microbatches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "rowwise"}, "float8_all_gather=True: recipe='rowwise' scales rows"),
        ({"linears": False, "grouped_experts": True}, "float8_all_gather=True is for linear maps"),
    ],
)
def test_what_cannot_be_gathered_in_float8(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Float8Precision(float8_all_gather=True, **options)


def test_gathers_from_host_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu_offload=True: the gathers of float8_all_gather=True start from param"):
        Float8Precision(float8_all_gather=True).check_cpu_offload()
    Float8Precision().check_cpu_offload()


def test_rows_that_the_ranks_do_not_divide() -> None:
    plugin = Float8Precision(emulate=True, float8_all_gather=True)
    plugin.use_device(torch.device("cpu"))
    plugin.use_local_shapes({}, shards=3)
    with pytest.raises(ValueError, match=r"data_parallel_shard_size=3 does not divide the 32 rows of layers\.0 on a r"):
        plugin.convert_module(torch.nn.ModuleDict({"layers": torch.nn.Sequential(torch.nn.Linear(32, 32))}))


def test_a_weight_that_two_modules_use_is_gathered_as_ever() -> None:
    module = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(32, 32), "map": torch.nn.Linear(32, 32)})
    module["map"].weight = module["embedding"].weight
    plugin = Float8Precision(emulate=True, float8_all_gather=True)
    plugin.use_device(torch.device("cpu"))
    plugin.use_local_shapes({}, shards=2)
    plugin.convert_module(module)
    assert plugin.manifest is not None
    assert [entry.recipe for entry in plugin.manifest.entries] == ["float8 tensorwise (emulated)"]


def test_a_gathered_weight_is_for_products_alone() -> None:
    weight = Float8Weight(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.tensor(2.0), torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    assert weight.view(2, 3).rounded().tolist() == [[0.5] * 3] * 2
    for misuse in (lambda: weight + 1, lambda: weight.view(3, 2), lambda: weight.t(), lambda: weight.float()):
        with pytest.raises(RuntimeError, match=r"cannot read a weight .* filter_fqns, or set float8_all_gather=False"):
            misuse()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", [False, True], ids=["emulated", "torchao"])
def test_products_take_a_gathered_weight_as_one_that_they_cast(kernel: bool, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.bfloat16) for shape in ((32, 64), (48, 64), (32, 48))
    )
    scale = scale_of(weight.abs().max(), "tensorwise", torch.float8_e4m3fn)
    payload = round_to_float8(weight, scale[None, None], torch.float8_e4m3fn)
    gathered = torch.nn.Parameter(Float8Weight(payload, scale, torch.bfloat16))
    product = float8_linear_kernel("tensorwise") if kernel else partial(float8_linear, recipe="tensorwise")
    expected = _with_gradients(product, x, weight.requires_grad_(), gradient)
    if compiled:
        product = torch.compile(product, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(_with_gradients(product, x, gathered, gradient), expected, rtol=0, atol=0)


def _with_gradients(product: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = product(x, weight)
    return y, *torch.autograd.grad(y, (x, weight), gradient)
