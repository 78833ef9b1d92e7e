"""What the tests of the core have in common: how a run is built on a rank of the pool, and a small TitanModule."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.parallel.parity import full, quiet_trainer
from tests.rank_pool import ExternalRanks
from titan_strategy import TitanModule, TitanStrategy

SEED = 7
VOCABULARY, WIDTH, SEQUENCE = 13, 6, 5


def titan(**options: Any) -> TitanStrategy:
    """The strategy for the ranks of the pool that run this test."""
    ranks = ExternalRanks().world_size()
    return TitanStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")] * ranks,
        **({"seed": SEED} | options),
    )


def trainer(strategy: TitanStrategy | None = None, **options: Any) -> pl.Trainer:
    """A trainer without output on the ranks of the pool."""
    return quiet_trainer(strategy or titan(), ExternalRanks().world_size(), **({"max_epochs": 1} | options))


class Prepared(pl.LightningModule):
    """Any module, to be initialised and sharded but not trained."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.build, self.net = build, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.build()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise AssertionError("there is nothing to train")

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(1))  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def prepare(build: Callable[[], nn.Module], trainer_options: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """The module that `build` returns, after the strategy has set it up on this rank."""
    module = Prepared(build)
    trainer(titan(**options), max_steps=0, **(trainer_options or {})).fit(module)
    assert module.net is not None
    return module.net


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers as full tensors; a collective."""
    return {name: full(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


class Tokens(Dataset):
    """Rows of random tokens; row `i` is the same whoever reads it."""

    def __init__(self, rows: int, ignore_all: bool = False) -> None:
        self.rows, self.ignore_all = rows, ignore_all

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        labels = torch.full((SEQUENCE,), -100) if self.ignore_all else row[1:]
        return {"tokens": row[:-1], "labels": labels}


class Language(TitanModule):
    """An embedding, a few residual blocks and a head."""

    def __init__(self, width: int = WIDTH, rows: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.width, self.rows, self.lr = width, rows, lr

    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.Sequential(
                nn.Embedding(VOCABULARY, self.width),
                nn.Sequential(*(Residual(self.width) for _ in range(2))),
                nn.Linear(self.width, VOCABULARY),
            )

    def model_inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["tokens"],)

    def token_loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"].flatten()
        return F.cross_entropy(output.flatten(0, 1).float(), labels, reduction="sum"), (labels != -100).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-6)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Tokens(self.rows), batch_size=2)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Tokens(6), batch_size=1)

    test_dataloader = predict_dataloader = val_dataloader


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))
