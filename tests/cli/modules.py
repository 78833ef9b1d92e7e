"""What the command line tests train: small, and with the kinds of argument that YAML has to express."""

from dataclasses import dataclass
from typing import Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Constants:
    lr: float = 1e-3
    steps: int = 10


class SmallModule(pl.LightningModule):
    """A linear model, built as any strategy expects it."""

    def __init__(
        self,
        width: int = 4,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        constants: Constants | None = None,
        mode: Literal["plain", "other"] = "plain",
    ) -> None:
        super().__init__()
        self.width, self.lr, self.betas, self.constants, self.mode = width, lr, betas, constants, mode
        self.layer: nn.Linear | None = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(self.width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.layer is not None
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert self.layer is not None
        self.log("val/loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class SmallData(pl.LightningDataModule):
    def __init__(self, rows: int = 32, width: int = 4) -> None:
        super().__init__()
        self.rows, self.width = rows, width

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        rows = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows), batch_size=4)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.train_dataloader()
