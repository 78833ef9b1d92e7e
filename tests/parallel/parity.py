"""One training run in some layout, and the same run as a plain PyTorch loop in one process: the oracle.

The oracle shares with the strategy nothing but the initial weights, the data and the definition of the loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from models import MoEConfig, Transformer, TransformerConfig
from models.moe import Router, balance_experts
from precision_plugins import ActivationCheckpointing, TitanPrecision
from tests.rank_pool import ExternalRanks
from titan_strategy import TitanModule, TitanStrategy
from titan_strategy.materialize import materialize
from titan_strategy.tensor_parallel import whole

VOCABULARY, SEQUENCE, ROWS = 53, 8, 8
SEED = 7
Trace = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What one run does, apart from its layout."""

    microbatches: int = 3
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    tied: bool = False
    frozen: bool = False  # part of the parameters; the rest in two groups
    microbatch_rows: int = ROWS  # over all data ranks
    layers: int = 4
    dim: int = 32
    ffn_dim: int = 48
    moe: MoEConfig | None = None
    recompute: bool = False  # full activation checkpointing


@dataclass(frozen=True)
class Layout:
    """How many ranks a run has and what the strategy is told."""

    ranks: int
    options: dict[str, Any] = field(default_factory=dict)


def config(run: Run) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=VOCABULARY,
        dim=run.dim,
        n_layers=run.layers,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=run.ffn_dim,
        max_sequence_length=SEQUENCE,
        tie_embeddings=run.tied,
        moe=run.moe,
    )


def microbatch(index: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Rows with very different numbers of valid tokens; some rows have none."""
    generator = torch.Generator().manual_seed(index)
    stream = torch.randint(0, VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
    labels = stream[:, 1:].clone()
    keep = torch.randint(0, SEQUENCE + 1, (rows, 1), generator=generator)
    labels[torch.arange(SEQUENCE) >= keep] = -100
    return {"tokens": stream[:, :-1], "labels": labels}


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


class Microbatches(IterableDataset):
    """The rows of each global microbatch that one data rank reads."""

    def __init__(self, count: int, rows: int, rank: int, ranks: int, first: int = 0) -> None:
        self.first, self.count, self.rows, self.rank, self.ranks = first, count, rows, rank, ranks

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        share = self.rows // self.ranks
        for index in range(self.first, self.first + self.count):
            yield {k: v[self.rank * share :][:share] for k, v in microbatch(index, self.rows).items()}


class Module(TitanModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(self.run)

    def model_inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["tokens"],)

    def token_loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss_sum, token_count = token_loss(output, batch["labels"])
        self.model.loss_scale.follow(loss_sum)
        return loss_sum, token_count

    def token_hits(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (whole(output.argmax(-1)) == batch["labels"]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.run)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.run.moe is not None:
            layers = config(self.run).moe_layers
            balance_experts(self.model, layers, self.run.moe.num_experts, self.run.moe.top_k, self.device)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.run.microbatches, first=0)

    def val_dataloader(self) -> DataLoader:
        return self._loader(3, first=1000)

    def _loader(self, count: int, first: int) -> DataLoader:
        coordinate = self.trainer.strategy.distributed_sampler_kwargs
        rows = Microbatches(count, self.run.microbatch_rows, coordinate["rank"], coordinate["num_replicas"], first)
        return DataLoader(rows, batch_size=None)


def build_model(run: Run) -> Transformer:
    model = Transformer(config(run))
    if run.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(("tok_embeddings.", "layers.0.", "layers.2.attention.wq")))
    return model


def make_optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = trained
    if run.frozen:
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        vectors = [parameter for parameter in trained if parameter.ndim == 1]
        groups = [{"params": matrices}, {"params": vectors, "lr": 2e-3}]
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9, foreach=True)
    # At the default eps, Adam turns the rounding noise of a gradient near zero into a step of full size.
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, eps=1e-5, foreach=True)


class Recorder(pl.Callback):
    """Full tensors on every rank, so that a missing or extra rank in a collective shows at once."""

    def __init__(self) -> None:
        self.trace: Trace = {"gradients": [], "loss": [], "norm": []}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trace["initial"] = full_parameters(pl_module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        gradients = {name: full(parameter.grad) for name, parameter in names(pl_module) if parameter.requires_grad}
        self.trace["gradients"].append(on_all_stages(pl_module, gradients))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step > len(self.trace["loss"]):
            self.trace["loss"].append(trainer.callback_metrics["train/loss"].item())
            self.trace["norm"].append(trainer.callback_metrics["train/grad_norm"].item())


def train(run: Run, options: dict[str, Any], trainer_options: dict[str, Any] | None = None) -> Trace:
    """Run on this process's rank of the pool; every rank returns the same trace if all is well."""
    recorder = Recorder()
    module = fit(run, options, callbacks=[recorder], **(trainer_options or {}))
    trace = recorder.trace
    trace["final"] = full_parameters(module)
    trace["bias"] = on_all_stages(module, balance_biases(module.model))
    metrics = module.trainer.callback_metrics
    trace["validation"] = {k: v.item() for k, v in metrics.items() if k.startswith("val/")}
    return trace


def fit(
    run: Run,
    options: dict[str, Any],
    module_class: type[Module] = Module,
    precision_plugin: TitanPrecision | None = None,
    **trainer_options: Any,
) -> Module:
    """Train a module on this process's rank of the pool."""
    world_size = ExternalRanks().world_size()
    recompute: Literal["full", "none"] = "full" if run.recompute else "none"
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")] * world_size,
        seed=SEED,
        precision_plugin=precision_plugin
        or TitanPrecision("32-true", activation_checkpointing=ActivationCheckpointing(recompute)),
        **options,
    )
    trainer = quiet_trainer(
        strategy,
        world_size,
        max_epochs=1,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        gradient_clip_algorithm=run.clip_algorithm if run.clip else None,
        **trainer_options,
    )
    module = module_class(run)
    trainer.fit(module)
    return module


def quiet_trainer(strategy: Any, devices: int, **options: Any) -> pl.Trainer:
    defaults = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **(defaults | options),
    )


def oracle(run: Run, device: torch.device = torch.device("cpu")) -> Trace:
    """The same run in one process, in plain PyTorch."""
    model = initial_model(run, device).train()
    optimizer = make_optimizer(model, run)
    trace: Trace = {"gradients": [], "loss": [], "norm": [], "loads": [], "initial": copies(model)}
    for start in range(0, run.microbatches, run.accumulate):
        window = range(start, min(start + run.accumulate, run.microbatches))
        batches = [microbatch(index, run.microbatch_rows) for index in window]
        rows = {key: torch.cat([batch[key] for batch in batches]).to(device) for key in ("tokens", "labels")}
        with counted_choices(model) as loads:
            loss_sum, tokens = token_loss(model(rows["tokens"]), rows["labels"])
        model.loss_scale.follow(loss_sum)
        (loss_sum / tokens).backward()
        for router, load in loads.items():
            trace["loads"].append(load)
            if run.moe is not None and run.moe.balance_rate:
                step = run.moe.balance_rate * torch.sign(load.float().mean() - load)
                router.bias += step - step.mean()
        trace["loss"].append((loss_sum / tokens).item())
        trace["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        trace["norm"].append(torch.nn.utils.get_total_norm(gradients).item())
        if run.clip and run.clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        elif run.clip:
            torch.nn.utils.clip_grad_value_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
    trace["final"] = copies(model)
    trace["bias"] = balance_biases(model)
    trace["validation"] = evaluate(model, run, device)
    return trace


@contextmanager
def counted_choices(model: nn.Module) -> Iterator[dict[Router, Tensor]]:
    """Tokens that each expert gets, by router, while the model runs."""
    loads: dict[Router, Tensor] = {}

    def count(router: Router, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        loads[router] = torch.bincount(output[1].flatten(), minlength=router.config.num_experts)

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, Router)]
    yield loads
    for handle in handles:
        handle.remove()


def balance_biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("router.bias")}


@torch.no_grad()
def evaluate(model: nn.Module, run: Run, device: torch.device) -> dict[str, float]:
    batches = [microbatch(index, run.microbatch_rows) for index in range(1000, 1003)]
    rows = {key: torch.cat([batch[key] for batch in batches]).to(device) for key in ("tokens", "labels")}
    logits = model(rows["tokens"])
    loss_sum, tokens = token_loss(logits, rows["labels"])
    hits = (logits.argmax(-1) == rows["labels"]).sum()
    loss = (loss_sum / tokens).item()
    return {
        "val/loss": loss,
        "val/perplexity": torch.tensor(loss).exp().item(),
        "val/token_accuracy": (hits / tokens).item(),
    }


def initial_model(run: Run, device: torch.device) -> nn.Module:
    module = nn.Module()  # names are relative to the LightningModule: "model...."
    with torch.device("meta"):
        module.model = build_model(run)
    materialize(module, device, device, SEED)
    return module.model


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def names(module: pl.LightningModule) -> list[tuple[str, nn.Parameter]]:
    """Parameters of `module.model` by name: those of this rank's pipeline stages."""
    return list(module.model.named_parameters())


def full_parameters(module: pl.LightningModule) -> dict[str, Tensor]:
    return on_all_stages(module, {name: full(parameter) for name, parameter in names(module)})


def on_all_stages(module: pl.LightningModule, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the ranks of a pipeline hold, put together on each of them."""
    if module.pipeline is None:
        return tensors
    group = module.trainer.strategy.mesh.pipeline.get_group()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, tensors, group)
    assert sum(map(len, gathered)) == len(set().union(*gathered)), "a parameter lies on two stages"
    return {name: tensor for part in gathered for name, tensor in part.items()}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def assert_equal(found: Trace, expected: Trace, tolerance: float) -> None:
    """Compare initial weights (bitwise), every step's gradients, norm and loss, the final weights and validation."""
    assert found["initial"].keys() == expected["initial"].keys()
    for name, value in expected["initial"].items():
        assert torch.equal(found["initial"][name], value), f"initial {name} differs"
    assert len(found["loss"]) == len(expected["loss"])
    for step, gradients in enumerate(expected["gradients"]):
        for name, value in gradients.items():
            difference = relative_difference(found["gradients"][step][name], value)
            assert difference < tolerance, f"gradient of {name} in step {step} differs by {difference:.2e}"
    for key in ("loss", "norm"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=tolerance, atol=0)
    for name, value in expected["final"].items():
        difference = relative_difference(found["final"][name], value)
        assert difference < tolerance, f"final {name} differs by {difference:.2e}"
    assert found["bias"].keys() == expected["bias"].keys()
    for name, value in expected["bias"].items():
        torch.testing.assert_close(found["bias"][name], value, rtol=0, atol=1e-7, msg=f"final {name} differs")
    for name, number in expected["validation"].items():
        assert abs(found["validation"][name] - number) <= tolerance * abs(number), name
