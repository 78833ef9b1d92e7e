"""The LightningModule: loss, optimizer, schedule, hyperparameters, and what it refuses before a run."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from models import AdamWConfig, CausalLM, LearningRateSchedule, MoEConfig, RopeScaling, TransformerConfig
from titan_strategy import TitanStrategy

ROPE_SCALING = RopeScaling(factor=2.0, original_max_sequence_length=32)


class Rows(IterableDataset[dict[str, Tensor]]):
    """Counting sequences modulo 16, with every third label missing."""

    def __iter__(self) -> Any:
        for start in range(64):
            row = (torch.arange(17) + start) % 16
            labels = row[1:].clone()
            labels[start % 3 :: 3] = -100
            yield {"tokens": row[:-1], "labels": labels}


class RecordSteps(pl.Callback):
    """Loss and learning rate of each training batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def test_token_loss_is_the_sum_over_labelled_positions() -> None:
    logits = torch.randn(2, 5, 11)
    labels = torch.tensor([[3, -100, 0, 10, -100], [-100, -100, 7, 7, 1]])
    loss_sum, count = CausalLM("debug").token_loss(logits, {"labels": labels})
    log_probabilities = logits.log_softmax(-1)
    expected = -sum(log_probabilities[b, t, labels[b, t]] for b in range(2) for t in range(5) if labels[b, t] >= 0)
    torch.testing.assert_close(loss_sum, expected)
    assert count.item() == 6
    assert not count.is_floating_point()


def test_token_loss_is_float32_from_bfloat16_logits() -> None:
    logits = torch.randn(1, 400, 300).bfloat16()
    batch = {"labels": torch.randint(300, (1, 400))}
    loss_sum, _ = CausalLM("debug").token_loss(logits, batch)
    assert loss_sum.dtype == torch.float32
    torch.testing.assert_close(loss_sum, CausalLM("debug").token_loss(logits.float(), batch)[0])


def test_token_loss_without_any_label_is_zero_with_zero_gradient() -> None:
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss_sum, count = CausalLM("debug").token_loss(logits, {"labels": torch.full((1, 4), -100)})
    loss_sum.backward()
    assert (loss_sum.item(), count.item()) == (0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_token_hits_count_labelled_positions_only() -> None:
    logits = nn.functional.one_hot(torch.tensor([[1, 2, 0, 0]]), 4).float()
    assert CausalLM("debug").token_hits(logits, {"labels": torch.tensor([[1, 3, -100, 0]])}).item() == 2


def test_training_learns_and_follows_the_schedule(tmp_path: Path) -> None:
    pl.seed_everything(0)
    schedule = LearningRateSchedule("wsd", warmup_steps=5, decay_fraction=0.5, min_lr_ratio=0.0)
    module = CausalLM("debug", optimizer=AdamWConfig(lr=5e-3), schedule=schedule)
    record = RecordSteps()
    trainer = _trainer(tmp_path, max_steps=40, callbacks=[record])
    trainer.fit(module, DataLoader(Rows(), batch_size=4))
    assert record.rates == pytest.approx([5e-3 * schedule.factor(step, 40) for step in range(40)])
    assert record.losses[-1] < record.losses[0] - 3


def test_schedule_needs_to_know_the_length_of_the_run(tmp_path: Path) -> None:
    rows = DataLoader(Rows(), batch_size=4)
    with pytest.raises(ValueError, match=r"name=cosine needs the number of optimizer steps.*trainer.max_steps"):
        _trainer(tmp_path, max_epochs=1).fit(CausalLM("debug", schedule=LearningRateSchedule("cosine")), rows)
    constant = CausalLM("debug", schedule=LearningRateSchedule("constant"))
    _trainer(tmp_path, max_epochs=1, limit_train_batches=1).fit(constant, rows)


def test_warmup_longer_than_the_run_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="warmup_steps=100 covers all 2 optimizer steps"):
        _trainer(tmp_path, max_steps=2).fit(CausalLM("debug"), DataLoader(Rows(), batch_size=4))


@pytest.mark.parametrize(("implementation", "fused"), [("auto", False), ("foreach", False), ("fused", True)])
def test_adamw_decays_matrices_only(tmp_path: Path, implementation: Any, fused: bool) -> None:
    optimizer_config = AdamWConfig(weight_decay=0.3, betas=(0.8, 0.9), implementation=implementation)
    module = CausalLM("debug", optimizer=optimizer_config)
    module.configure_model()
    optimizer = module._build_adamw()
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    expected = {id(p): 0.0 if "norm" in name else 0.3 for name, p in module.named_parameters()}
    assert decay == expected
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (fused, not fused)


def test_configure_model_runs_once() -> None:
    module = CausalLM("debug", overrides={"n_layers": 3})
    assert module.model is None
    module.configure_model()
    model = module.model
    module.configure_model()
    assert module.model is model
    assert len(model.layers) == 3


@pytest.mark.parametrize("arguments", [{}, {"preset": "debug", "config": TransformerConfig.preset("debug")}])
def test_exactly_one_of_preset_and_config(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give either preset or config"):
        CausalLM(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"preset": "debug", "overrides": {"n_layers": 3, "rope_scaling": ROPE_SCALING}},
        {"config": TransformerConfig.preset("debug", rope_scaling=ROPE_SCALING), "overrides": {"n_heads": 2}},
    ],
)
def test_checkpoint_holds_plain_values_and_restores_the_module(tmp_path: Path, arguments: dict[str, Any]) -> None:
    options = {"optimizer": AdamWConfig(lr=1e-2), "schedule": LearningRateSchedule("constant", 7)}
    module = CausalLM(**arguments, **options)
    trainer = _trainer(tmp_path, max_steps=1)
    trainer.fit(module, DataLoader(Rows(), batch_size=4))
    trainer.save_checkpoint(tmp_path / "model.ckpt")

    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["optimizer"]["lr"] == 1e-2
    restored = CausalLM.load_from_checkpoint(tmp_path / "model.ckpt")
    assert restored.config == module.config
    assert restored.optimizer_config == module.optimizer_config
    assert restored.schedule == module.schedule
    weights = module.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in restored.state_dict().items())


def test_yaml_and_command_line(tmp_path: Path) -> None:
    overrides = {"n_layers": 3, "rope_scaling": {"factor": 2.0}}
    init_args = {"preset": "debug", "overrides": overrides, "optimizer": {"lr": "LR"}}
    text = yaml.safe_dump({"model": {"class_path": "models.CausalLM", "init_args": init_args}}).replace("LR", "1e-4")
    (tmp_path / "run.yaml").write_text(text)
    arguments = ["--model.overrides.vocab_size=512", "--model.schedule.name=cosine"]
    module = _from_command_line("--config", str(tmp_path / "run.yaml"), *arguments)
    assert module.config == TransformerConfig.preset(
        "debug", n_layers=3, rope_scaling=RopeScaling(factor=2.0), vocab_size=512
    )
    assert module.optimizer_config == AdamWConfig(lr=1e-4)
    assert module.schedule == LearningRateSchedule("cosine")
    torch.save(dict(module.hparams), tmp_path / "hparams.pt")
    assert torch.load(tmp_path / "hparams.pt", weights_only=True)["preset"] == "debug"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--model.overrides.n_layer=3", "n_layer"),
        ("--model.overrides.n_layers=three", "three"),
        ("--model.optimizer.learning_rate=1", "learning_rate"),
        ("--model.preset=llama3_9b", "llama3_8b"),
        ("--model.schedule.name=linear", "cosine"),
    ],
)
def test_mistakes_on_the_command_line_are_named(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _from_command_line("--model=models.CausalLM", "--model.preset=debug", argument)
    assert message in capsys.readouterr().err


def test_setup_accepts_data_that_fits() -> None:
    module = CausalLM("debug")
    module.check_setup(pl.Trainer(accelerator="cpu", logger=False), None)
    _check_setup(module, sequence_length=128, vocabulary_size=256)
    _check_setup(module)


def test_setup_refuses_sequences_longer_than_the_model() -> None:
    message = r"data.sequence_length=129 is longer than model.overrides.max_sequence_length=128: .* at most 128"
    with pytest.raises(ValueError, match=message):
        _check_setup(CausalLM("debug"), sequence_length=129)


def test_setup_refuses_a_vocabulary_larger_than_the_model() -> None:
    message = r"vocabulary of 300 tokens, more than model.config.vocab_size=256: .* at least 300"
    with pytest.raises(ValueError, match=message):
        _check_setup(CausalLM(config=TransformerConfig.preset("debug")), vocabulary_size=300)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, "optimizer.lr=0.0 must be greater than 0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas=\(0.9, 1.0\)"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay=-1.0 must be at least 0"),
        ({"implementation": "loop"}, "'loop' must be auto, fused or foreach"),
    ],
)
def test_bad_optimizer_constants_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamWConfig(**values)


def _check_setup(module: CausalLM, **attributes: int) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    module.check_setup(trainer, SimpleNamespace(**attributes))  # type: ignore[arg-type]


def _trainer(root: Path, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=root,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def _from_command_line(*arguments: str) -> CausalLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["titan", *arguments])
        module = LightningCLI(CausalLM, subclass_mode_model=True, run=False, seed_everything_default=False).model
    assert isinstance(module, CausalLM)
    return module


def test_routing_is_balanced_in_each_step_and_logged_when_the_trainer_logs(tmp_path: Path) -> None:
    class Steps(pl.Callback):
        def __init__(self) -> None:
            self.biases: list[Tensor] = []

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            self.biases.append(module.model.layers["1"].moe.routed.router.bias.clone())
            assert not module.model.layers["1"].moe.routed.router.statistics.any()

    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=16, interval=2, balance_rate=0.01, auxiliary_loss=0.1)
    steps, logger = Steps(), CSVLogger(tmp_path)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=TitanStrategy(seed=0),
        max_steps=4,
        log_every_n_steps=2,
        logger=logger,
        callbacks=[steps],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(CausalLM("debug", overrides={"moe": moe}), DataLoader(Rows(), batch_size=4))
    assert steps.biases[0].abs().max() > 0
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    logged = [row for row in rows if row["moe/imbalance/1"]]
    assert [row["step"] for row in logged] == ["1", "3"]
    for row in logged:
        assert 1 <= float(row["moe/imbalance/1"]) <= 2  # one expert got each token
        assert 0 < float(row["moe/entropy/1"]) <= math.log(4) + 1e-6
        assert float(row["moe/dropped_tokens"]) == 0
        assert 0.09 < float(row["moe/auxiliary_loss"]) < 0.2  # the coefficient, if all is balanced
    assert "moe/imbalance/0" not in rows[0]
