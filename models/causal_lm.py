"""Next-token training of a `Transformer`: model, loss, optimizer and schedule as one LightningModule."""

from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from models.chunked_loss import loss_in_chunks
from models.config import TransformerConfig, TransformerOverrides
from models.moe import balance_experts
from models.presets import PresetName
from models.routing import routing_metrics
from models.schedules import LearningRateSchedule
from models.transformer import Transformer
from titan_strategy.dimensions import Dimension, ModelDimensions
from titan_strategy.module import TitanModule
from titan_strategy.tensor_parallel import whole

IGNORE_INDEX = -100  # the label of a position without a target; the default of torch's cross-entropy


@dataclass(frozen=True)
class AdamWConfig:
    """Decoupled weight decay (arXiv:1711.05101) with the constants usual for language models (arXiv:2302.13971).

    Args:
        lr: Peak learning rate.
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Applied to matrices only, not to the norms' scales.
        implementation: `fused` and `foreach` are torch's; `auto` is fused on CUDA and foreach elsewhere.

    Raises:
        ValueError: If a value is out of range.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    implementation: Literal["auto", "fused", "foreach"] = "auto"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr={self.lr} must be greater than 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas} must be two numbers, each at least 0 and less than 1")
        for name in ("eps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0")
        if self.implementation not in ("auto", "fused", "foreach"):
            raise ValueError(f"optimizer.implementation={self.implementation!r} must be auto, fused or foreach")


class CausalLM(TitanModule):
    """A language model that learns to predict the next token.

    A batch is `{"tokens": (batch, seq), "labels": (batch, seq)}`, where `labels[:, t]` is the token that follows
    `tokens[:, t]`, or -100 where there is nothing to predict.

    With experts, their balance is kept once in each optimizer step, and logged whenever the Trainer logs: for each
    block i `moe/imbalance/i` (highest load of an expert over the mean) and `moe/entropy/i` (of a token's distribution
    over the experts, in nats), `moe/dropped_tokens` (none ever), and `moe/auxiliary_loss` per token, if there is one.
    `train/loss` is without the auxiliary loss.

    Args:
        preset: Name of a model size; give either this or `config`.
        config: The model's sizes, spelt out.
        overrides: Fields of the preset or of `config` to set differently, e.g. `{"n_layers": 4}`.
        optimizer: AdamW's constants.
        schedule: Course of the learning rate over the run.
        loss_chunks: In training, head and loss take the tokens of a batch in this many parts, one after another, and
            the logits of one part alone are in memory: at a vocabulary of 128256 in bfloat16, 16384 tokens have logits
            of 3.9 GiB, and gradients as large. Costs a few milliseconds. With tensor or pipeline parallelism, which
            divide the logits otherwise, they are computed at once whatever this says.

    Raises:
        ValueError: If not exactly one of `preset` and `config` is given, or the sizes are not valid.
    """

    def __init__(
        self,
        preset: PresetName | None = None,
        config: TransformerConfig | None = None,
        overrides: TransformerOverrides | None = None,
        optimizer: AdamWConfig = AdamWConfig(),
        schedule: LearningRateSchedule = LearningRateSchedule(),
        loss_chunks: int = 1,
    ) -> None:
        super().__init__()
        # A checkpoint holds plain values only, so that it loads with `weights_only=True`; Lightning's instantiator
        # makes the dataclasses again in `load_from_checkpoint`.
        self.save_hyperparameters()
        self.save_hyperparameters(
            {"_instantiator": "lightning.pytorch.cli.instantiate_module"} | _plain(dict(self.hparams))
        )
        if (preset is None) == (config is None):
            raise ValueError(f"give either preset or config, got preset={preset!r} and config={config!r}")
        if loss_chunks < 1:
            raise ValueError(f"loss_chunks={loss_chunks} must be at least 1")
        base = TransformerConfig.preset(preset) if preset is not None else config
        assert base is not None
        self.config = base.override(**(overrides or {}))
        self.optimizer_config = optimizer
        self.schedule = schedule
        self.loss_chunks = loss_chunks

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = Transformer(self.config)
            if self.loss_chunks > 1:
                assert isinstance(self.model.output, nn.Linear)
                loss_in_chunks(self.model.output, self.loss_chunks, self._chunk_loss)

    @property
    def _section(self) -> str:
        """The argument that sets single fields of the configuration."""
        return "overrides" if self.hparams["preset"] is not None else "config"

    @override
    def dimensions(self) -> ModelDimensions:
        def dimension(name: str) -> Dimension:
            return Dimension(f"model.{self._section}.{name}", getattr(self.config, name))

        moe, dense = self.config.moe, len(self.config.moe_layers) < self.config.n_layers
        split = [dimension("n_heads"), dimension("n_kv_heads"), *([dimension("ffn_dim")] if dense else [])]
        if moe is not None and moe.shared_dim:
            split.append(Dimension(f"model.{self._section}.moe.shared_dim", moe.shared_dim))
        experts = None if moe is None else Dimension(f"model.{self._section}.moe.num_experts", moe.num_experts)
        return ModelDimensions(split=tuple(split), vocabulary=dimension("vocab_size"), experts=experts)

    @override
    def flops_per_token(self, sequence_length: int) -> int:
        return self.config.flops_per_token(sequence_length)

    @override
    def check_setup(self, trainer: pl.Trainer, datamodule: pl.LightningDataModule | None) -> None:
        section = self._section
        sequence_length = getattr(datamodule, "sequence_length", None)
        if sequence_length is not None and sequence_length > self.config.max_sequence_length:
            limit = self.config.max_sequence_length
            raise ValueError(
                f"data.sequence_length={sequence_length} is longer than model.{section}.max_sequence_length={limit}: "
                f"set data.sequence_length to at most {limit}, or raise the model's maximum."
            )
        vocabulary_size = getattr(datamodule, "vocabulary_size", None)
        if vocabulary_size is not None and vocabulary_size > self.config.vocab_size:
            raise ValueError(
                f"data.encoding has a vocabulary of {vocabulary_size} tokens, more than "
                f"model.{section}.vocab_size={self.config.vocab_size}: choose another data.encoding, or set "
                f"model.{section}.vocab_size to at least {vocabulary_size}."
            )

    @override
    def model_inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["tokens"], batch["labels"]) if self._in_chunks else (batch["tokens"],)

    @property
    def _in_chunks(self) -> bool:
        """Whether the head of this rank has all of the logits, and computes the loss of a training step itself."""
        if self.loss_chunks == 1 or not torch.is_grad_enabled() or self.pipeline is not None:
            return False
        mesh = getattr(self.trainer.strategy, "mesh", None)
        return mesh is None or mesh.sizes.tensor == 1

    def _chunk_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.token_loss(logits, {"labels": labels})[0]

    @override
    def token_loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of logits (batch, seq, vocab), in nats and float32, summed over the labelled positions.

        The head may have done so already: then `output` is the sum.
        """
        labels = batch["labels"].flatten()
        loss_sum = output if output.ndim == 0 else _cross_entropy(output.flatten(0, 1), labels)
        if self.config.moe is not None:
            assert isinstance(self.model, Transformer)
            self.model.loss_scale.follow(loss_sum)
        return loss_sum, (labels != IGNORE_INDEX).sum()

    @override
    def token_hits(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        # The most likely token is never IGNORE_INDEX, so positions without a target cannot be hits.
        return (whole(output.argmax(dim=-1)) == batch["labels"]).sum()

    @override
    def row_mask(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE_INDEX).any(dim=-1)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        moe = self.config.moe
        if moe is None:
            return
        assert self.model is not None
        records = balance_experts(self.model, self.config.moe_layers, moe.num_experts, moe.top_k, self.device)
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # the Trainer sets it undeclared
        if self.trainer.training and every and (self.trainer.global_step + 1) % every == 0:
            self.log_dict(routing_metrics(records, moe), on_step=True, on_epoch=False, batch_size=1)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._build_adamw()
        factor = partial(self.schedule.factor, total_steps=self._total_steps())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def _build_adamw(self) -> torch.optim.AdamW:
        config = self.optimizer_config
        parameters = list(self.parameters())
        implementation = config.implementation
        if implementation == "auto":
            implementation = "fused" if parameters[0].is_cuda else "foreach"
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=implementation == "fused",
            foreach=implementation == "foreach",
        )

    def _total_steps(self) -> float:
        """Optimizer steps of the whole run; infinite only where the schedule does not need to know."""
        if self.schedule.name == "constant":
            return float("inf")
        total = self.trainer.estimated_stepping_batches
        if not 0 < total < float("inf"):
            raise ValueError(
                f"model.schedule.name={self.schedule.name} needs the number of optimizer steps, which this run does "
                "not know: set trainer.max_steps, or model.schedule.name=constant."
            )
        if self.schedule.warmup_steps >= total:
            rank_zero_warn(
                f"model.schedule.warmup_steps={self.schedule.warmup_steps} covers all {total} optimizer steps of the "
                "run: the learning rate never reaches model.optimizer.lr."
            )
        return total


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def _plain(value: Any) -> Any:
    """`value` with dataclasses as dicts, at any depth of dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
