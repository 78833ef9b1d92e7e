"""The loss curve holds the values that were logged, across a resume, and ends as a picture."""

import csv
import importlib.util
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from titan_strategy.callbacks import LossCurve


class _Counter(pl.LightningModule):
    """The training loss logged at step s is s; the validation loss is 100 + s."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("train/loss", float(self.trainer.global_step + 1))
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", 100.0 + self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(
    folder: Path, curve: LossCurve, ckpt_path: str | None = None, num_sanity_val_steps: int = -1, **options: Any
) -> pl.Trainer:
    loader = DataLoader(TensorDataset(torch.ones(16, 1)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[curve],
        log_every_n_steps=2,
        val_check_interval=4,
        num_sanity_val_steps=num_sanity_val_steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(_Counter(), loader, loader, ckpt_path=ckpt_path)
    return trainer


def test_curve_is_what_was_logged(tmp_path: Path) -> None:
    curve = LossCurve()
    _fit(tmp_path, curve, max_steps=9)
    assert curve.state_dict() == {
        "train": [(2, 2.0), (4, 4.0), (6, 6.0), (8, 8.0)],
        "val": [(0, 100.0), (4, 104.0), (8, 108.0)],
    }
    with (tmp_path / "metrics.csv").open() as file:
        logged = [(row["step"], row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    assert logged == [("0", "100.0"), ("3", "104.0"), ("7", "108.0")]
    assert (tmp_path / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_partial_sanity_check_is_not_a_point(tmp_path: Path) -> None:
    curve = LossCurve()
    _fit(tmp_path, curve, num_sanity_val_steps=2, max_steps=4)
    assert curve.state_dict()["val"] == [(4, 104.0)]


def test_curve_of_a_resumed_run_begins_at_step_0(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "some.ckpt")
    _fit(tmp_path, LossCurve(), max_steps=5).save_checkpoint(checkpoint)
    resumed, whole = LossCurve(), LossCurve()
    _fit(tmp_path, resumed, ckpt_path=checkpoint, max_steps=9)
    _fit(tmp_path, whole, max_steps=9)
    assert resumed.state_dict() == whole.state_dict()


def test_picture_goes_where_it_is_told(tmp_path: Path) -> None:
    _fit(tmp_path, LossCurve(path=str(tmp_path / "a" / "b.png")), max_steps=2)
    assert (tmp_path / "a" / "b.png").is_file()


def test_missing_matplotlib_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"titan-strategy\[quickstart\]"):
        LossCurve()
