"""`TitanModule`: a LightningModule that declares its inputs and a per-token loss, and gets exact numbers for it."""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from titan_strategy.dimensions import ModelDimensions
from titan_strategy.distributed import all_rows
from titan_strategy.metrics import Perplexity, TokenMean
from titan_strategy.plan import ParallelPlan
from titan_strategy.tensor_parallel import whole

if TYPE_CHECKING:
    from titan_strategy.pipeline_parallel import Pipeline


class TitanModule(pl.LightningModule):
    """A model trained by the sum of a loss over tokens.

    A subclass builds `self.model` in `configure_model()` (on the meta device; the strategy splits and fills it) and
    declares `model_inputs` and `token_loss`. Training, validation, test and prediction steps follow from these.

    Under `TitanStrategy` the gradient of an optimizer step is exactly that of one process: the sum of the loss over
    all its ranks and microbatches, divided once by the number of valid tokens among them. Under any other strategy
    the steps work too, with Lightning's own averaging over ranks and microbatches.

    Logged: `train/loss` (nats per token, over the whole optimizer step), `val/loss`, `val/perplexity`,
    `val/token_accuracy`, and the same for `test`.
    """

    model: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self.model = None
        self.pipeline: Pipeline | None = None  # set by TitanStrategy
        self.val_metrics = _EvaluationMetrics()
        self.test_metrics = _EvaluationMetrics()

    def model_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """The positional arguments of `self.model`, each with the batch dimension first."""
        raise NotImplementedError(f"{type(self).__name__} must define model_inputs(batch).")

    def token_loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Loss summed over the valid tokens of `batch` (float32 scalar) and their number (integer scalar)."""
        raise NotImplementedError(f"{type(self).__name__} must define token_loss(output, batch).")

    def token_hits(self, output: Any, batch: Any) -> Tensor | None:
        """How many valid tokens `output` predicts right (scalar), or None where that has no meaning."""
        return None

    def row_mask(self, batch: Any) -> Tensor:
        """Which rows of a batch are to be predicted (bool); false for those that only fill up the last batch."""
        rows = self.model_inputs(batch)[0]
        return torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)

    def parallel_plan(self) -> ParallelPlan | None:
        """How `self.model` can be split; by default what the model itself says."""
        own = getattr(self.model, "parallel_plan", None)
        return own() if own is not None else None

    def dimensions(self) -> ModelDimensions | None:
        """The sizes that a layout must divide, for the checks before a run; None leaves them unchecked."""
        return None

    def flops_per_token(self, sequence_length: int) -> int | None:
        """Floating-point operations of forward and backward for each token, for `titan bench`; None if not known."""
        return None

    def check_setup(self, trainer: pl.Trainer, datamodule: pl.LightningDataModule | None) -> None:
        """Raise ValueError for what cannot work. Called before processes start, when no model exists yet."""

    @override
    def forward(self, *inputs: Tensor) -> Any:
        """The output of the whole model; with pipeline parallelism None except on the ranks of the last stage."""
        if self.pipeline is not None:
            return self.pipeline.forward(*inputs)
        assert self.model is not None, "configure_model() has not run yet"
        return self.model(*inputs)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Returns `loss` (mean per token of this batch), `loss_sum` and `token_count`.

        An override returns what this method returned, or a dict that holds these three.
        """
        if self.pipeline is not None:
            return self.pipeline.train(batch)
        loss_sum, token_count = self.token_loss(self(*self.model_inputs(batch)), batch)
        loss_sum = whole(loss_sum)
        return {"loss": loss_sum / token_count.clamp(min=1), "loss_sum": loss_sum, "token_count": token_count}

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluation_step(batch, "val", self.val_metrics)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluation_step(batch, "test", self.test_metrics)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The model's output for the rows that all data ranks read in this step, in their order, on every rank."""
        output = tree_map(whole, self(*self.model_inputs(batch)))
        if self.pipeline is not None:
            output = self.pipeline.objects_from_last_stage(output)
        mesh = getattr(self.trainer.strategy, "mesh", None)
        if mesh is None:
            return output
        mask = all_rows(self.row_mask(batch), mesh.data_group)
        return tree_map(lambda tensor: all_rows(tensor, mesh.data_group)[mask], output)

    def _evaluation_step(self, batch: Any, stage: str, metrics: "_EvaluationMetrics") -> None:
        loss_sum, token_count, hits = self._evaluate(batch)
        metrics.loss.update(loss_sum, token_count)
        metrics.perplexity.update(loss_sum, token_count)
        self.log(f"{stage}/loss", metrics.loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=1)
        self.log(f"{stage}/perplexity", metrics.perplexity, on_step=False, on_epoch=True, batch_size=1)
        if self._counts_hits:
            metrics.token_accuracy.update(hits, token_count)
            self.log(f"{stage}/token_accuracy", metrics.token_accuracy, on_step=False, on_epoch=True, batch_size=1)

    def _evaluate(self, batch: Any) -> Tensor:
        """Sum of the loss, number of tokens and number of hits (0 if they are not counted), float64."""
        output = self(*self.model_inputs(batch))
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self.pipeline is None or self.pipeline.is_last:
            loss_sum, token_count = self.token_loss(output, batch)
            hits = self.token_hits(output, batch) if self._counts_hits else None
            counted = (loss_sum, token_count, totals[2] if hits is None else hits)
            totals = torch.stack([whole(number).double() for number in counted])
        return totals if self.pipeline is None else self.pipeline.from_last_stage(totals)

    @property
    def _counts_hits(self) -> bool:
        return type(self).token_hits is not TitanModule.token_hits


class _EvaluationMetrics(nn.Module):
    """What one evaluation loop counts; it has no values of its own in a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = TokenMean()
        self.perplexity = Perplexity()
        self.token_accuracy = TokenMean()
