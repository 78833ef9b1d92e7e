"""What a run does besides its numbers: reductions, metrics, stages in any order, windows without a label."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from tests.core.modules import Language, Tokens, full_state, titan, trainer
from tests.parallel.parity import full, quiet_trainer
from tests.rank_pool import ExternalRanks
from titan_strategy.metrics import Perplexity, TokenMean

# -- Reductions --------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts the calls of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class PerStep(pl.Callback):
    """Collectives between the ends of two optimizer steps."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives, self.steps, self._before = collectives, [], Counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append(self.collectives.counts - self._before)
            self._before = self.collectives.counts.copy()


def count_collectives(accumulate: int, options: dict[str, Any]) -> list[Counter[str]]:
    with Collectives() as collectives:
        per_step = PerStep(collectives)
        run = trainer(titan(**options), accumulate_grad_batches=accumulate, limit_val_batches=0, callbacks=[per_step])
        run.fit(Language(rows=8 * accumulate))
    return per_step.steps


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_reduction_of_each_unit_per_optimizer_step(rank_pool, accumulate: int) -> None:
    units = 3  # two blocks and the rest
    for steps in rank_pool.run(count_collectives, 2, accumulate, {}):
        assert len(steps) == 4
        for counts in steps[1:]:
            assert counts["_reduce_scatter_base_"] == units
            assert counts["_allgather_base_"] >= units * accumulate
    (with_copies, *_), (without, *_) = (
        rank_pool.run(count_collectives, ranks, accumulate, {"data_parallel_replicate_size": ranks // 2})
        for ranks in (4, 2)
    )
    for counts, fewer in zip(with_copies[1:], without[1:], strict=True):
        assert counts["_reduce_scatter_base_"] == units
        assert counts["allreduce_"] == fewer["allreduce_"] + units, "one more of each unit: over the copies"


# -- Metrics -----------------------------------------------------------------------------------------------------------


class Forwards(Language):
    """Notes before each forward pass whether there are gradients, and after each batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.found[-1] += (self._has_gradients(),)

    def training_step(self, *args: Any) -> Any:
        self.found.append((self._has_gradients(),))
        return super().training_step(*args)

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters())


def gradients_around_batches(accumulate: int) -> list[tuple[bool, bool]]:
    module = Forwards(rows=24)
    module.found = []
    trainer(titan(), accumulate_grad_batches=accumulate, limit_val_batches=0).fit(module)
    return module.found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_the_last_step_are_gone_in_the_next_forward(rank_pool, ranks: int, accumulate: int) -> None:
    for found in rank_pool.run(gradients_around_batches, ranks, accumulate):
        assert len(found) > accumulate
        assert not any(before for before, _ in found[::accumulate])
        assert all(after for _, after in found[accumulate - 1 :: accumulate])


def test_token_mean_counts_beyond_float32() -> None:
    mean = TokenMean()
    for _ in range(3):
        mean.update(torch.tensor(2.0**24), torch.tensor(2**24))
        mean.update(torch.tensor(1.0), torch.tensor(1))
    assert mean.count == 3 * (2**24 + 1)
    assert mean.total == 3 * (2**24 + 1)
    assert mean.compute() == 1


def test_token_mean_of_nothing() -> None:
    mean, perplexity = TokenMean(), Perplexity()
    for metric in (mean, perplexity):
        metric.update(torch.tensor(0.0), torch.tensor(0))
    assert mean.compute() == 0
    assert perplexity.compute() == 1
    assert mean.compute().dtype == torch.float32


class Measured(pl.LightningModule):
    """Logs in every way there is; rank r sees the values of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Linear | None = None
        self.sum, self.mean = SumMetric(), MeanMetric()

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(1, 1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.sum.update(batch)
        self.mean.update(batch)
        self.log("metric/sum", self.sum)
        self.log("metric/mean", self.mean)
        value = batch.sum()
        self.log("logged/mean", value, sync_dist=True)
        self.log("logged/sum", value, sync_dist=True, reduce_fx="sum")
        self.log("logged/max", value, sync_dist=True, reduce_fx="max")


def measure(options: dict[str, Any]) -> dict[str, Any]:
    strategy = titan(**options)
    run = trainer(strategy)
    rank, ranks = run.global_rank, run.world_size
    run.validate(Measured(), DataLoader(torch.arange(1.0, 9.0)[rank::ranks, None], batch_size=1), verbose=False)
    found = {key: value.item() for key, value in run.callback_metrics.items()}
    lone = rank == ranks - 1
    return found | {
        "all": strategy.reduce_boolean_decision(lone, all=True),
        "any": strategy.reduce_boolean_decision(lone, all=False),
        "none": strategy.reduce_boolean_decision(False, all=False),
        "every": strategy.reduce_boolean_decision(True, all=True),
        "broadcast": strategy.broadcast({"rank": rank}, src=1),
        "gathered": strategy.all_gather(torch.tensor(rank)).tolist(),
        "mean": strategy.reduce(torch.tensor(float(rank)), reduce_op="mean").item(),
        "sum": strategy.reduce(torch.tensor(rank), reduce_op="sum").item(),
        "kept": strategy.reduce("not a tensor"),
    }


@pytest.mark.parametrize("options", [{}, {"data_parallel_replicate_size": 2}], ids=["shard", "hsdp"])
def test_metrics_and_collectives(rank_pool, options: dict[str, Any]) -> None:
    for found in rank_pool.run(measure, 4, options):
        assert found["metric/sum"] == 36
        assert found["metric/mean"] == 4.5
        assert found["logged/mean"] == 4.5
        assert found["logged/sum"] == 36
        assert found["logged/max"] == 8
        assert (found["all"], found["any"], found["none"], found["every"]) == (False, True, False, True)
        assert found["broadcast"] == {"rank": 1}
        assert found["gathered"] == [0, 1, 2, 3]
        assert (found["mean"], found["sum"], found["kept"]) == (1.5, 6, "not a tensor")


# -- Stages in any order -----------------------------------------------------------------------------------------------


def evaluate_then_fit() -> dict[str, Any]:
    module = Language()
    run = trainer(max_steps=2, num_sanity_val_steps=1, inference_mode=True)
    before = run.validate(module, verbose=False)[0]["val/loss"]
    tested = run.test(module, verbose=False)[0]["test/loss"]
    predictions = run.predict(module)
    run.fit(module)
    after = run.validate(module, verbose=False)[0]["val/loss"]
    loops = (run.validate_loop, run.test_loop, run.predict_loop, run.fit_loop.epoch_loop.val_loop)
    return {
        "losses": (before, tested, after),
        "predictions": torch.cat(predictions),
        "inference_mode": [loop.inference_mode for loop in loops],
        "perplexity": run.callback_metrics["val/perplexity"].item(),
    }


def test_evaluation_before_fit(rank_pool) -> None:
    for answer in rank_pool.run(evaluate_then_fit, 2):
        before, tested, after = answer["losses"]
        assert before == tested
        assert after < before
        assert answer["perplexity"] == pytest.approx(torch.tensor(after).exp().item(), rel=1e-6)
        assert answer["predictions"].shape == (12, 5, 13), "the rows of both ranks, on each"
        # Gloo never uses it, so that only the setting shows that NCCL would not either.
        assert answer["inference_mode"] == [False] * 4


def predict_rows(rows: int) -> list[int]:
    ranks = ExternalRanks().world_size()
    run = pl.Trainer(accelerator="cpu", devices=ranks, strategy=titan(), logger=False, enable_progress_bar=False)
    return [len(batch) for batch in run.predict(Language(), DataLoader(Tokens(rows), batch_size=2))]


def test_prediction_of_rows_that_ranks_cannot_share_is_refused(rank_pool) -> None:
    assert rank_pool.run(predict_rows, 2, 6) == [[4, 2]] * 2
    with pytest.raises(ValueError, match="predict: 5 rows cannot be shared evenly by 2 data ranks"):
        rank_pool.run(predict_rows, 2, 5, timeout=60.0)


def fit_elsewhere(name: str) -> dict[str, Any]:
    ranks = ExternalRanks().world_size()
    devices = {"cluster_environment": ExternalRanks(), "parallel_devices": [torch.device("cpu")] * ranks}
    strategy = DDPStrategy(**devices) if name == "ddp" else SingleDeviceStrategy("cpu")
    run = quiet_trainer(strategy, ranks, max_epochs=2)
    module = Language()
    before = run.validate(module, verbose=False)[0]["val/loss"]
    run.fit(module)
    return {"before": before, "after": run.callback_metrics["val/loss"].item(), "state": full_state(module)}


@pytest.mark.parametrize(("name", "ranks"), [("single-device", 1), ("ddp", 2)])
def test_a_titan_module_trains_under_other_strategies(rank_pool, name: str, ranks: int) -> None:
    for answer in rank_pool.run(fit_elsewhere, ranks, name):
        assert answer["after"] < answer["before"] - 0.1


# -- No label at all ---------------------------------------------------------------------------------------------------


class Unlabelled(Language):
    """The first optimizer step has no label on any rank, the second one on rank 1 alone."""

    def __init__(self, accumulate: int) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        empty, filled = Tokens(1, ignore_all=True)[0], Tokens(1)[0]
        second = filled if self.trainer.global_rank == 1 else empty
        rows = [empty] * self.accumulate + [second] * self.accumulate
        return DataLoader(rows, batch_size=1)  # type: ignore[arg-type]

    def token_loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(output.flatten(0, 1).float(), labels, reduction="sum", ignore_index=-100)
        return loss, (labels != -100).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append({name: full(p.grad) for name, p in self.named_parameters()})
        self.losses.append(self.trainer.callback_metrics["train/loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_unlabelled(accumulate: int) -> dict[str, Any]:
    module = Unlabelled(accumulate)
    run = trainer(accumulate_grad_batches=accumulate, gradient_clip_val=1.0, limit_val_batches=0)
    run.fit(module)
    norm = run.callback_metrics["train/grad_norm"].item()
    return {"losses": module.losses, "gradients": module.gradients, "norm": norm}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_windows_without_labels(rank_pool, accumulate: int) -> None:
    for answer in rank_pool.run(train_unlabelled, 2, accumulate):
        assert answer["losses"][0] == 0
        assert answer["losses"][1] > 1
        first, second = answer["gradients"]
        assert all(not gradient.any() for gradient in first.values())
        assert all(gradient.isfinite().all() for gradient in second.values())
        assert second["model.0.weight"].any()
        assert 0 < answer["norm"] < float("inf")


def validate_unlabelled() -> dict[str, float]:
    run = trainer()
    module = Unlabelled(1)
    run.validate(module, DataLoader(Tokens(4, ignore_all=True), batch_size=2), verbose=False)
    return {key: value.item() for key, value in run.callback_metrics.items()}


def test_validation_without_labels(rank_pool) -> None:
    assert rank_pool.run(validate_unlabelled, 2) == [{"val/loss": 0.0, "val/perplexity": 1.0}] * 2
