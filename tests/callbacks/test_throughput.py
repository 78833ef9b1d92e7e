"""Speed counts what was trained, on all data ranks, and nothing of the time spent elsewhere."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.rank_pool import ExternalRanks, RankPool
from titan_strategy.callbacks import Throughput

ROWS, SEQUENCE = 4, 16


class _Clock(pl.LightningModule):
    """Time stands still, but for a training step, which takes 1 second, and a validation step, which takes 100."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seconds = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seconds += 1
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seconds += 100

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _token_batch(rows: list[int]) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(len(rows), SEQUENCE, dtype=torch.long)}


def _sample_batch(rows: list[int]) -> tuple[str, list[Tensor]]:
    return "a name first", [torch.zeros(len(rows), 3)]


def _text_batch(rows: list[int]) -> list[str]:
    return ["no tensor"]


def _train(folder: Path, collate: Any = _token_batch, **options: Any) -> None:
    loader = DataLoader(list(range(400)), batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 8, "log_every_n_steps": 4} | options
    module = _Clock()
    trainer = pl.Trainer(
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[Throughput()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **settings,
    )
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: module.seconds)
        patch.setattr("titan_strategy.callbacks.throughput.time", clock)
        trainer.fit(module, loader, loader)


def _logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_tokens_per_second(tmp_path: Path) -> None:
    _train(tmp_path)
    rows = _logged(tmp_path)
    assert [row["step"] for row in rows] == ["3", "7"]
    assert [float(row["train/tokens_per_second"]) for row in rows] == [ROWS * SEQUENCE] * 2
    assert all(0.05 < float(row["train/memory_gib"]) < 100 for row in rows)


def test_accumulated_microbatches_count_and_log_once(tmp_path: Path) -> None:
    _train(tmp_path, max_steps=4, log_every_n_steps=2, accumulate_grad_batches=3)
    rows = _logged(tmp_path)
    assert [row["step"] for row in rows] == ["1", "3"]
    assert [float(row["train/tokens_per_second"]) for row in rows] == [ROWS * SEQUENCE] * 2


def test_validation_time_does_not_count(tmp_path: Path) -> None:
    _train(tmp_path, val_check_interval=2, limit_val_batches=1)
    rows = _logged(tmp_path)
    assert [float(row["train/tokens_per_second"]) for row in rows] == [ROWS * SEQUENCE] * 2


def test_batches_without_tokens_count_samples(tmp_path: Path) -> None:
    _train(tmp_path, collate=_sample_batch)
    rows = _logged(tmp_path)
    assert [float(row["train/samples_per_second"]) for row in rows] == [ROWS] * 2


def test_batch_without_a_tensor_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a batch of type list holds no tensor"):
        _train(tmp_path, collate=_text_batch)


def _train_on_this_rank(folder: Path) -> None:
    strategy = DDPStrategy(cluster_environment=ExternalRanks(), parallel_devices=[torch.device("cpu")] * 2)
    _train(folder, strategy=strategy, devices=2)


def test_all_data_ranks_count(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(_train_on_this_rank, 2, tmp_path)
    rows = _logged(tmp_path)
    assert [float(row["train/tokens_per_second"]) for row in rows] == [2 * ROWS * SEQUENCE] * 2
