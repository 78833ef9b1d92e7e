"""An ordinary LightningModule: Lightning's own semantics, the numbers of DistributedDataParallel."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from tests.core.modules import SEED, Residual, full_state, titan, trainer
from tests.parallel.parity import full, relative_difference
from titan_strategy import ParallelPlan
from titan_strategy.materialize import materialize

ROWS, WIDTH, PER_RANK, RANKS = 20, 4, 2, 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    accumulate: int = 1
    in_init: bool = False  # real weights, made in __init__, different on each rank
    manual: bool = False
    plan: ParallelPlan | None = None


class Plain(pl.LightningModule):
    """Blocks, a module that is only used through a method of its own, a parameter of its own, and a frozen layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = not case.manual
        self.encoder: Encoder | None = None
        if case.in_init:
            self.configure_model()

    def configure_model(self) -> None:
        if self.encoder is None:
            self.encoder = Encoder()
            self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(2))
            self.head = nn.Linear(WIDTH, 1)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.encoder.encode(x)) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - batch.sum(-1, keepdim=True)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        if not self.case.manual:
            return loss
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True, batch_size=len(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for n, p in self.named_parameters() if "bias" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in self.named_parameters() if "bias" in n], "lr": 0.02},
        ]
        if self.case.manual:
            return [torch.optim.SGD([group], **{"lr": 0.05} | {"momentum": 0.9}) for group in groups]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def loader(rank: int = 0, ranks: int = 1) -> DataLoader[Tensor]:
    return DataLoader(rows()[rank::ranks], batch_size=PER_RANK)  # type: ignore[arg-type]


class Gradients(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.seen.append({n: full(p.grad) for n, p in pl_module.named_parameters() if p.grad is not None})


def train_plain(case: Case) -> dict[str, Any]:
    strategy = titan(plan=case.plan)
    gradients = Gradients()
    run = trainer(strategy, accumulate_grad_batches=case.accumulate, callbacks=[gradients])
    torch.manual_seed(100 + run.global_rank)  # what a script gets that does not seed
    module = Plain(case)
    before = full_state(module)
    data = loader(run.global_rank, run.world_size)
    run.fit(module, data, data)
    result = {
        "before": before,
        "gradients": gradients.seen,
        "final": full_state(module),
        "units": [name for name, child in module.named_modules() if isinstance(child, FSDPModule)],
        "val": run.callback_metrics["val"].item(),
    }
    result["test"] = run.test(module, data, verbose=False)[0]["test"]
    result["validate"] = run.validate(module, data, verbose=False)[0]["val"]
    result["predictions"] = torch.cat(run.predict(module, data))
    return result


def reference(case: Case, initial: dict[str, Tensor] | None) -> dict[str, Any]:
    """DDP with `RANKS` ranks, written out in one process: mean over ranks of each rank's mean, over the window too."""
    with torch.device("cpu" if case.in_init else "meta"):
        module = Plain(case)
        module.configure_model()
    if initial is None:
        materialize(module, CPU, CPU, SEED)
    else:
        module.load_state_dict(initial)
    optimizers = module.configure_optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    seen = []
    batches = list(zip(*(loader(rank, RANKS) for rank in range(RANKS)), strict=True))
    for index, of_ranks in enumerate(batches):
        loss = sum(module.loss(batch) for batch in of_ranks) / RANKS / case.accumulate
        loss.backward()
        if (index + 1) % case.accumulate == 0 or index + 1 == len(batches):
            seen.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        return {
            "gradients": seen,
            "final": full_state(module),
            "val": module.loss(rows()).item(),
            "output": module(rows()),
        }


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(accumulate=3),
        Case(in_init=True),
        Case(manual=True),
        Case(plan=ParallelPlan(blocks="layers.*", before=("encoder.inner",), after=("frozen", "head"))),
    ],
    ids=["plain", "accumulate3-ragged", "built-in-init", "manual-two-optimizers", "plan"],
)
def test_equals_ddp(rank_pool, case: Case) -> None:
    answers = rank_pool.run(train_plain, RANKS, case)
    if case.in_init:
        assert not torch.equal(answers[0]["before"]["head.weight"], answers[1]["before"]["head.weight"])
    expected = reference(case, answers[0]["before"] if case.in_init else None)
    for rank, answer in enumerate(answers):
        if not case.manual:
            assert len(answer["gradients"]) == len(expected["gradients"])
            for step, gradients in enumerate(expected["gradients"]):
                assert answer["gradients"][step].keys() == gradients.keys()
                for name, value in gradients.items():
                    assert relative_difference(answer["gradients"][step][name], value) < 1e-6, (step, name)
        for name, value in expected["final"].items():
            assert relative_difference(answer["final"][name], value) < 1e-6, name
        for key in ("val", "test", "validate"):
            assert answer[key] == pytest.approx(expected["val"], rel=1e-5), key
        torch.testing.assert_close(answer["predictions"], expected["output"][rank::RANKS], rtol=1e-5, atol=1e-6)
        units = {"", "layers.0", "layers.1"} | (set() if case.plan is None else {"encoder.inner", "frozen", "head"})
        assert set(answer["units"]) == units


class Normalised(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        # Falls three times, then rises: early stopping has to end the third epoch.
        self.log("val", abs(2.5 - self.current_epoch) + self.global_rank, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_with_callbacks(folder: Path) -> dict[str, Any]:
    stop = EarlyStopping("val", patience=1)
    best = ModelCheckpoint(folder, monitor="val", save_top_k=1, filename="{epoch}")
    run = trainer(max_epochs=9, enable_checkpointing=True, callbacks=[stop, best])
    module = Normalised()
    data = loader(run.global_rank, run.world_size)
    run.fit(module, data, data)
    norm = module.net[1]
    result = {
        "epochs": run.current_epoch,
        "stopped": stop.stopped_epoch,
        "best": best.best_model_path,
        "score": best.best_model_score.item(),
        "running": {"mean": norm.running_mean.clone(), "batches": norm.num_batches_tracked.item()},
    }
    run.validate(module, data, ckpt_path="best", verbose=False)
    return result | {
        "restored": norm.num_batches_tracked.item(),
        "left": sorted(path.name for path in folder.iterdir()),
    }


def test_callbacks_and_batch_norm(rank_pool, tmp_path: Path) -> None:
    for answer in rank_pool.run(train_with_callbacks, RANKS, tmp_path):
        # |2.5 - epoch| + mean rank: 3.0, 2.0, 1.0, 1.0 (no better, so patience is spent)
        assert answer["stopped"] == 3
        assert answer["epochs"] == 4
        assert answer["best"] == str(tmp_path / "epoch=2.ckpt")
        assert answer["score"] == 1.0
        assert answer["left"] == ["epoch=2.ckpt"]
        batches = ROWS // RANKS // PER_RANK
        assert answer["running"]["batches"] == 4 * batches
        assert answer["running"]["mean"].abs().min() > 0
        assert answer["restored"] == 3 * batches
