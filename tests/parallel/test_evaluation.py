"""Validation, test and prediction over every layout: each row once, in the order of the data."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from models import TextDataModule
from tests.parallel.parity import SEED, Layout, quiet_trainer
from tests.parallel.resuming import Job, Module, data_module, write_corpus
from tests.rank_pool import ExternalRanks
from titan_strategy import PipelineConfig, TitanStrategy
from titan_strategy.materialize import materialize

LAYOUTS = {
    "one": Layout(1),
    "shard2": Layout(2),
    "tp2": Layout(2, {"tensor_parallel_size": 2}),
    "pp2": Layout(2, {"pipeline_parallel_size": 2, "pipeline": PipelineConfig(schedule="GPipe", microbatches=3)}),
    "pp2-shard2": Layout(4, {"pipeline_parallel_size": 2}),
}


class Predicting(Module):
    def row_mask(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != -100).any(dim=-1)


def held_out_data(job: Job) -> TextDataModule:
    data = data_module(job)
    data.validation_rows = 11  # fills no whole number of global batches
    return data


def evaluate(job: Job, options: dict) -> tuple[float, float, Tensor]:
    """Validation loss, test loss and predictions, on this process's rank of the pool."""
    ranks = ExternalRanks().world_size()
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(), parallel_devices=[torch.device("cpu")] * ranks, seed=SEED, **options
    )
    trainer = quiet_trainer(strategy, ranks)
    module, data = Predicting(job), held_out_data(job)
    validated = trainer.validate(module, data, verbose=False)[0]["val/loss"]
    tested = trainer.test(module, data, verbose=False)[0]["test/loss"]
    return validated, tested, torch.cat(trainer.predict(module, data))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_row_once_and_in_order(rank_pool, tmp_path, layout: Layout) -> None:
    job = Job(tmp_path, max_steps=0, batch_size=2)
    write_corpus(tmp_path)
    module = pl.LightningModule()
    with torch.device("meta"):
        source = Predicting(job)
        source.configure_model()
    module.model = source.model
    materialize(module, torch.device("cpu"), torch.device("cpu"), SEED)
    data = held_out_data(job)
    data.prepare_data()
    data.setup("validate")
    rows = [data.held_out[number] for number in range(len(data.held_out))]
    tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
    with torch.no_grad():
        logits = module.model(tokens)
        loss_sum, count = source.token_loss(logits, {"labels": labels})
    for validated, tested, predicted in rank_pool.run(evaluate, layout.ranks, job, layout.options):
        assert predicted.shape == logits.shape
        torch.testing.assert_close(predicted, logits, rtol=1e-4, atol=1e-5)
        assert validated == pytest.approx((loss_sum / count).item(), rel=1e-6)
        assert tested == validated


def fit_with_callbacks(job: Job, options: dict) -> tuple[int, str, float, list[str]]:
    """A run that EarlyStopping ends; what it saved, its best score, and what rank 0's logger wrote."""
    ranks = ExternalRanks().world_size()
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(), parallel_devices=[torch.device("cpu")] * ranks, seed=SEED, **options
    )
    best = pl.callbacks.ModelCheckpoint(job.folder / "best", monitor="val/loss", filename="{step}")
    trainer = quiet_trainer(
        strategy,
        ranks,
        max_steps=20,
        val_check_interval=2,
        callbacks=[best, EarlyStopping("val/loss", patience=2, min_delta=100.0), LearningRateMonitor("step")],
        enable_checkpointing=True,
        logger=CSVLogger(job.folder, version=0),
    )
    trainer.fit(Module(job), data_module(job))
    assert best.best_model_score is not None
    log = Path(trainer.logger.log_dir) / "metrics.csv"
    columns = log.read_text().splitlines()[0].split(",") if trainer.is_global_zero else []
    return trainer.global_step, best.best_model_path, best.best_model_score.item(), columns


@pytest.mark.parametrize("layout", [LAYOUTS["shard2"], LAYOUTS["pp2-shard2"]], ids=["shard2", "pp2-shard2"])
def test_callbacks_and_loggers_see_the_same_numbers_on_every_rank(rank_pool, tmp_path, layout: Layout) -> None:
    job = Job(tmp_path, max_steps=20, batch_size=2)
    write_corpus(tmp_path)
    answers = rank_pool.run(fit_with_callbacks, layout.ranks, job, layout.options)
    steps, path, score, columns = answers[0]
    assert steps == 6, "the first validation sets the best score, two more without improvement end the run"
    assert Path(path).is_dir()
    assert {answer[:3] for answer in answers} == {(steps, path, score)}
    assert {"train/loss", "train/grad_norm", "val/loss", "lr-AdamW"} <= set(columns)
