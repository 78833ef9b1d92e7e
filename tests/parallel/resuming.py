"""A run on text that can stop, save and resume, and tells what it read and computed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from models import MoEConfig, TextDataModule, Transformer, TransformerConfig
from models.moe import balance_experts
from tests.parallel.parity import (
    Run,
    Trace,
    balance_biases,
    full_parameters,
    make_optimizer,
    on_all_stages,
    quiet_trainer,
    token_loss,
)
from tests.rank_pool import ExternalRanks
from titan_strategy import ParallelPlan, TitanModule, TitanStrategy

SEQUENCE = 16
SMALL = TransformerConfig(
    vocab_size=8192, dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=32, max_sequence_length=SEQUENCE
)


@dataclass(frozen=True)
class Job:
    """One training run over a folder of text.

    `batch_size` rows per rank and microbatch; ranks x batch_size x accumulate is the batch of an optimizer step.
    """

    folder: Path
    max_steps: int
    batch_size: int = 2
    accumulate: int = 1
    save_every: int | None = None
    ckpt_path: Path | None = None
    dropout: float = 0.0
    optimizer: str = "adamw"
    single_file: bool = False
    options: Any = None
    moe: MoEConfig | None = None


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8192, 16)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 8192)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            blocks="layers.*",
            before=("embedding",),
            after=("norm", "head"),
            tensor_parallel={
                "embedding": "embedding",
                "layers.*.norm": "sequence",
                "layers.*.up": "colwise",
                "layers.*.down": "rowwise",
                "norm": "sequence",
                "head": "head",
            },
        )


class Module(TitanModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def configure_model(self) -> None:
        if self.model is None:
            moe = self.job.moe
            self.model = Net(self.job.dropout) if moe is None else Transformer(replace(SMALL, moe=moe))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        moe = self.job.moe
        if moe is not None:
            balance_experts(self.model, replace(SMALL, moe=moe).moe_layers, moe.num_experts, moe.top_k, self.device)

    def model_inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["tokens"],)

    def token_loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return token_loss(output, batch["labels"])

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, Run(optimizer=self.job.optimizer))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(pl.Callback):
    """Rows that all ranks read for each optimizer step, and what came of it."""

    def __init__(self) -> None:
        self.trace: Trace = {"rows": [], "loss": [], "lr": [], "step": [], "epoch": []}
        self._window: list[Tensor] = []
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *args: Any) -> None:
        gathered = trainer.strategy.all_gather(batch["tokens"])
        self._window += list(gathered.reshape(-1, gathered.shape[-1]))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.trace["rows"].append([tuple(row.tolist()) for row in self._window])
            self.trace["loss"].append(trainer.callback_metrics["train/loss"].item())
            self.trace["lr"].append(trainer.optimizers[0].param_groups[0]["lr"])
            self.trace["step"].append(trainer.global_step)
            self.trace["epoch"].append(trainer.current_epoch)
            self._window = []


def data_module(job: Job) -> TextDataModule:
    return TextDataModule(
        source=str(job.folder / "text"),
        sequence_length=SEQUENCE,
        batch_size=job.batch_size,
        validation_rows=6,  # leaves 84 rows: whole batches in every layout of the tests
        cache_dir=job.folder / "cache",
    )


def train_text(job: Job) -> Trace:
    """Run on this process's rank of the pool."""
    ranks = ExternalRanks().world_size()
    pl.seed_everything(11, verbose=False)
    recorder = Recorder()
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=job.folder / "checkpoints", every_n_train_steps=job.save_every, save_top_k=-1, filename="{step}"
    )
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")] * ranks,
        save_distributed_checkpoint=not job.single_file,
        **(job.options or {}),
    )
    trainer = quiet_trainer(
        strategy,
        ranks,
        max_steps=job.max_steps,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=1.0,
        val_check_interval=None,
        limit_val_batches=0,
        enable_checkpointing=job.save_every is not None,
        callbacks=[recorder, *([checkpoint] if job.save_every else [])],
    )
    module = Module(job)
    trainer.fit(module, datamodule=data_module(job), ckpt_path=job.ckpt_path)
    biases = on_all_stages(module, balance_biases(module.model))
    return {**recorder.trace, "final": full_parameters(module), "bias": biases}


def write_corpus(folder: Path) -> None:
    """Enough text for 90 rows of `SEQUENCE` tokens."""
    (folder / "text").mkdir(parents=True)
    for number in range(12):
        words = " ".join(f"item {number} of {place} is {place * number % 17};" for place in range(12))
        (folder / "text" / f"{number:02d}.txt").write_text(words)
