"""Dtypes of storage, compute and reduction; clipping; activation checkpointing."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from precision_plugins import ActivationCheckpointing, TitanPrecision
from tests.core.modules import titan, trainer
from tests.parallel.parity import full
from titan_strategy import ParallelPlan, TitanModule, TitanStrategy
from titan_strategy.gradients import clip_by_value, global_norm

CPU = torch.device("cpu")
WIDTH = 8
INF = float("inf")


class Block(nn.Module):
    """Uses a float32 table, as rotary embeddings do, and tells what it saw."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        self.seen = {"weight": self.up.weight.dtype, "input": x.dtype, "table": table.dtype, "hidden": hidden.dtype}
        return x + self.dropout(self.down(hidden * torch.cos(table).to(hidden.dtype)))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)
        self.table = Table()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.table.angles)
        return self.head(x)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks="layers.*", before=("embedding",), after=("head",))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(4 * WIDTH), persistent=False)

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(4.0 * WIDTH) / 3)


class Module(TitanModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.p = dropout
        self.stored = 0  # bytes that autograd keeps for the backward pass
        self.gradients: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Net(self.p)

    def model_inputs(self, batch: Tensor) -> tuple[Tensor, ...]:
        return (batch,)

    def token_loss(self, output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(output.flatten(0, 1).float(), batch.flatten(), reduction="sum")
        return loss, torch.tensor(batch.numel())

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        def pack(tensor: Tensor) -> Tensor:
            self.stored += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append({name: full(p.grad) for name, p in self.named_parameters()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        tokens = torch.randint(0, 5, (12, 6), generator=torch.Generator().manual_seed(self.trainer.global_rank))
        return DataLoader(tokens, batch_size=4)  # type: ignore[arg-type]


def dtypes(precision: str, as_plugin: bool) -> dict[str, Any]:
    option = {"plugins": [TitanPrecision(precision)]} if as_plugin else {"precision": precision}
    run = trainer(max_steps=2, **option)
    module = Module()
    run.fit(module)
    state = {key: v.dtype for entries in run.optimizers[0].state.values() for key, v in entries.items()}
    return {
        "plugin": type(run.precision_plugin).__name__,
        "precision": run.precision,
        "parameters": {p.dtype for p in module.parameters()},
        "gradients": {g.dtype for g in module.gradients[0].values()},
        "table": module.model.table.angles.dtype,
        "norm": run.callback_metrics["train/grad_norm"].dtype,
        "loss": run.callback_metrics["train/loss"].dtype,
        "optimizer": {state["exp_avg"], state["exp_avg_sq"]},
        **module.model.layers[1].seen,
    }


@pytest.mark.parametrize("as_plugin", [False, True], ids=["flag", "plugin"])
@pytest.mark.parametrize(
    ("precision", "storage", "compute"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.float32, torch.bfloat16),
    ],
)
def test_dtypes(rank_pool, precision: str, storage: torch.dtype, compute: torch.dtype, as_plugin: bool) -> None:
    for found in rank_pool.run(dtypes, 2, precision, as_plugin):
        assert (found["plugin"], found["precision"]) == ("TitanPrecision", precision)
        assert found["parameters"] == found["gradients"] == found["optimizer"] == {storage}
        assert found["weight"] == found["input"] == found["hidden"] == compute
        assert found["table"] == torch.float32, "the block has to see the table in the dtype that the model gave it"
        assert found["norm"] == found["loss"] == torch.float32


class Product(TitanModule):
    """The gradient of its weight is the sum of the inputs over all ranks, divided by their number."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.Linear(2, 1, bias=False)

    def model_inputs(self, batch: Tensor) -> tuple[Tensor, ...]:
        return (batch,)

    def token_loss(self, output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return output.float().sum(), torch.tensor(1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.full((1, 2), [1.0, 2.0**-9][self.trainer.global_rank]))  # type: ignore[arg-type]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradient = full(self.model.weight.grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def reduced_gradient() -> Tensor:
    module = Product()
    trainer(max_steps=1, precision="bf16-mixed").fit(module)
    return module.gradient


def test_gradients_are_reduced_in_float32(rank_pool) -> None:
    # 1 + 2^-9 needs more bits than bfloat16 has.
    for gradient in rank_pool.run(reduced_gradient, 2):
        assert torch.equal(gradient, torch.full((1, 2), (1 + 2**-9) / 2))


@pytest.mark.parametrize("precision", ["16-true", "64-true"])  # on a CPU Lightning itself replaces "16-mixed"
def test_other_precisions_are_refused_by_name(precision: str) -> None:
    with pytest.raises(ValueError, match=rf"precision='{precision}'.*supports '32-true', 'bf16-true', 'bf16-mixed'"):
        build(precision=precision)


def build(**options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=2, strategy=TitanStrategy(), logger=False, **options)


@pytest.mark.parametrize(
    "plugin",
    [DoublePrecision(), HalfPrecision("16-true"), MixedPrecision("16-mixed", "cpu")],
    ids=lambda p: p.precision,
)
def test_other_plugins_are_refused(plugin: Any) -> None:
    with pytest.raises(ValueError, match=rf"precision='{plugin.precision}' \({type(plugin).__name__}\)"):
        build(plugins=[plugin])


def test_a_subclass_of_a_known_plugin_is_not_replaced() -> None:
    class Own(MixedPrecision):
        """May do anything."""

    with pytest.raises(ValueError, match=r"precision='bf16-mixed' \(Own\)"):
        build(plugins=[Own("bf16-mixed", "cpu")])


def test_flag_and_plugin_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="Choose one"):
        build(precision="bf16-mixed", plugins=[TitanPrecision("bf16-true")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, r"precision='fp8': valid values are '32-true', 'bf16-true' and 'bf16-mixed'"),
        ({"gradient_norm_type": 1.0}, r"gradient_norm_type=1\.0: valid values are 2\.0 and infinity"),
    ],
)
def test_arguments_of_the_plugin(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TitanPrecision(**options)
    with pytest.raises(ValueError, match=r"activation_checkpointing\.mode='half': valid modes are"):
        ActivationCheckpointing("half")  # type: ignore[arg-type]


# -- Clipping ----------------------------------------------------------------------------------------------------------


def norms(options: dict[str, Any]) -> dict[str, float]:
    """Of bfloat16 gradients of a model that this layout shards."""
    run = trainer(titan(**options), precision="bf16-true", max_steps=0)
    module = Module()
    run.fit(module)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator).bfloat16()
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.grad = torch.distributed.tensor.distribute_tensor(values, mesh, placements, src_data_rank=None)
    parameters = list(module.parameters())
    found = {str(kind): global_norm(parameters, kind, CPU).item() for kind in (2.0, INF)}
    clip_by_value(parameters, 0.5)
    return found | {"clipped": global_norm(parameters, INF, CPU).item()}


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {}), (4, {}), (4, {"data_parallel_replicate_size": 2})])
def test_norm_of_bf16_gradients_does_not_depend_on_the_layout(rank_pool, ranks: int, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.device("meta"):
        shapes = [p.shape for p in Net(0.0).parameters()]
    values = torch.cat([torch.randn(shape, generator=generator).bfloat16().double().flatten() for shape in shapes])
    for found in rank_pool.run(norms, ranks, options):
        assert found["2.0"] == pytest.approx(values.norm().item(), rel=1e-6)
        assert found["inf"] == values.abs().max().item()
        assert found["clipped"] == 0.5


def clip_in_training(norm_type: float, limit: float | None, algorithm: str | None) -> dict[str, Any]:
    gradients: list[dict[str, Tensor]] = []

    class AfterClipping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            gradients.append({str(i): full(p.grad) for i, p in enumerate(self.param_groups[0]["params"])})
            return loss

    class Clipped(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return AfterClipping(self.parameters(), lr=0.01)

    run = trainer(
        max_steps=1,
        plugins=[TitanPrecision("32-true", gradient_norm_type=norm_type)],
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    )
    module = Clipped()
    run.fit(module)
    return {
        "logged": run.callback_metrics["train/grad_norm"].item(),
        "before": list(module.gradients[0].values()),
        "after": list(gradients[0].values()),
    }


@pytest.mark.parametrize(
    ("norm_type", "limit", "algorithm"),
    [(2.0, None, None), (2.0, 0.01, "norm"), (INF, 0.01, "norm"), (2.0, 0.01, "value"), (2.0, 1e9, "norm")],
)
def test_clipping(rank_pool, norm_type: float, limit: float | None, algorithm: str | None) -> None:
    for found in rank_pool.run(clip_in_training, 2, norm_type, limit, algorithm):
        before, after = (
            torch.cat([g.flatten() for g in found["before"]]),
            torch.cat([g.flatten() for g in found["after"]]),
        )
        norm = torch.linalg.vector_norm(before, norm_type)
        assert found["logged"] == pytest.approx(norm.item(), rel=1e-6), (
            "the norm before clipping is logged, clipped or not"
        )
        if algorithm == "value":
            expected = before.clamp(-limit, limit)
        else:
            expected = before * min(1.0, (limit or INF) / (norm.item() + 1e-6))
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=0)
        assert (algorithm is None or limit > 1) == torch.equal(before, after)


def test_clipping_needs_the_strategy() -> None:
    with pytest.raises(RuntimeError, match="clips through TitanStrategy"):
        TitanPrecision("32-true").clip_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1.0)


# -- Activation checkpointing ------------------------------------------------------------------------------------------


def with_activation_checkpointing(mode: str, precision: str) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    run = trainer(max_steps=3, plugins=[TitanPrecision(precision, ActivationCheckpointing(mode))])
    module = Module(dropout=0.5)
    run.fit(module)
    return {"gradients": module.gradients, "stored": module.stored, "names": list(module.state_dict())}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_activation_checkpointing_changes_memory_alone(rank_pool, precision: str) -> None:
    none, checkpointed = (rank_pool.run(with_activation_checkpointing, 2, mode, precision) for mode in ("none", "full"))
    for rank in range(2):
        assert checkpointed[rank]["names"] == none[rank]["names"]
        assert len(none[rank]["gradients"]) == 3
        for step, gradients in enumerate(none[rank]["gradients"]):
            for name, value in gradients.items():
                assert torch.equal(checkpointed[rank]["gradients"][step][name], value), (step, name)
        assert checkpointed[rank]["stored"] < 0.5 * none[rank]["stored"]
        assert not math.isclose(none[rank]["stored"], 0)
