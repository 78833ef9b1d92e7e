"""On one GPU: the numbers of a plain loop, in every precision that the strategy offers."""

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from precision_plugins import ActivationCheckpointing, TitanPrecision
from tests.parallel.parity import (
    Module,
    Recorder,
    Run,
    Trace,
    assert_equal,
    balance_biases,
    full_parameters,
    oracle,
    relative_difference,
)
from tests.parallel.test_expert_parallel import MOE
from titan_strategy import TitanStrategy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def one_rank(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def train(run: Run, precision: TitanPrecision, folder: Path, **options) -> tuple[Trace, pl.Trainer]:
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=TitanStrategy(seed=7, precision_plugin=precision, **options),
        max_epochs=1,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        callbacks=[recorder],
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(run)
    trainer.fit(module)
    trace = recorder.trace
    trace["final"] = full_parameters(module)
    trace["bias"] = balance_biases(module.model)
    trace["validation"] = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
    return _to_cpu(trace), trainer


def _to_cpu(value):
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_cpu(item) for item in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    "run",
    [
        Run(clip=0.05, optimizer="adamw"),
        Run(microbatches=7, accumulate=3, clip=0.05),
        Run(layers=2, moe=MOE, accumulate=2, clip=0.05),
    ],
    ids=["adamw", "accumulate", "experts"],
)
@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}], ids=["on-gpu", "offloaded"])
def test_float32_equals_a_plain_loop(tmp_path, run: Run, options: dict) -> None:
    device = torch.device("cuda", 0)
    expected = _to_cpu(oracle(run, device))
    found, _ = train(run, TitanPrecision("32-true"), tmp_path, **options)
    assert_equal(found, expected, 1e-5)


def test_bf16_stays_close_to_float32(tmp_path) -> None:
    run = Run(clip=0.05)
    expected = _to_cpu(oracle(run, torch.device("cuda", 0)))
    found, trainer = train(run, TitanPrecision("bf16-mixed"), tmp_path)
    assert {p.dtype for p in trainer.lightning_module.parameters()} == {torch.float32}
    torch.testing.assert_close(torch.tensor(found["loss"]), torch.tensor(expected["loss"]), rtol=5e-3, atol=0)
    name = "layers.0.attention.wq.weight"
    difference = relative_difference(found["gradients"][0][name], expected["gradients"][0][name])
    assert 1e-4 < difference < 5e-2, "bfloat16 compute must show, and must not spoil the gradient"


def test_full_activation_checkpointing_changes_memory_and_nothing_else(tmp_path) -> None:
    run = Run()
    plain, _ = train(run, TitanPrecision("bf16-mixed"), tmp_path)
    recomputed, _ = train(run, TitanPrecision("bf16-mixed", ActivationCheckpointing("full")), tmp_path)
    assert plain["loss"] == recomputed["loss"]
    for name, value in plain["final"].items():
        assert torch.equal(recomputed["final"][name], value), name


def test_checkpoint_resumes_bitwise(tmp_path) -> None:
    run = Run(optimizer="adamw")
    whole, trainer = train(run, TitanPrecision("bf16-mixed"), tmp_path)
    path = trainer.checkpoint_callback.best_model_path
    assert os.path.isdir(path)
    module = Module(run)
    again = pl.Trainer(
        accelerator="gpu", devices=1, strategy="titan", precision="bf16-mixed", logger=False, default_root_dir=tmp_path
    )
    again.validate(module, ckpt_path=path)
    for name, value in full_parameters(module).items():
        assert torch.equal(value.cpu(), whole["final"][name]), name


class NoWaiting(pl.Callback):
    """Makes it an error that the host waits for the GPU, in every step but the first ones."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int) -> None:
        if batch_idx >= 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *args: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.steps += 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_host_does_not_wait_within_a_step(tmp_path, accumulate: int) -> None:
    run = Run(microbatches=6, accumulate=accumulate, clip=0.5, optimizer="adamw")
    callback = NoWaiting()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=TitanStrategy(seed=7, precision_plugin=TitanPrecision("bf16-mixed")),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=run.clip,
        callbacks=[callback],
        default_root_dir=tmp_path,
        use_distributed_sampler=False,
        logger=False,
        limit_val_batches=0,
        log_every_n_steps=1000,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    try:
        trainer.fit(Module(run))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert callback.steps == run.microbatches
