"""Head and loss in parts: the numbers of all at once, with the logits of one part in memory."""

from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from models import AdamWConfig, CausalLM, LearningRateSchedule, MoEConfig, chunked_loss
from models.chunked_loss import loss_in_chunks
from precision_plugins import ActivationCheckpointing, CompileConfig, Float8Precision, TitanPrecision
from tests.parallel.parity import SEED, full_parameters, quiet_trainer
from tests.rank_pool import ExternalRanks
from titan_strategy import TitanStrategy

VOCABULARY = 64


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("rows", "chunks"), [(12, 1), (12, 4), (13, 4), (3, 8), (1, 2)])
def test_sum_and_gradients(rows: int, chunks: int, frozen: bool) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(8, 11, bias=False), torch.randn(1, rows, 8, requires_grad=True)
    labels = torch.randint(11, (1, rows))
    labels[0, rows // 2 :: 3] = -100
    head.weight.requires_grad_(not frozen)
    inputs = (x,) if frozen else (x, head.weight)
    expected = summed(head(x), labels)
    of_expected = torch.autograd.grad(expected / 7, inputs)
    loss_in_chunks(head, chunks, summed)
    found = head(x, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found / 7, inputs), of_expected)
    assert head(x).shape == (1, rows, 11)


class Largest(TorchDispatchMode):
    """The most logits in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.shape[-1:] == (11,):
            self.rows = max(self.rows, output.numel() // 11)
        return output


@pytest.mark.parametrize(("chunks", "rows"), [(1, 40), (4, 10), (7, 6)])
def test_logits_of_one_part_at_a_time(chunks: int, rows: int) -> None:
    head, x = nn.Linear(5, 11, bias=False), torch.randn(2, 20, 5, requires_grad=True)
    loss_in_chunks(head, chunks, summed)
    with Largest() as largest:
        head(x, torch.zeros(2, 20, dtype=torch.long)).backward()
    assert largest.rows == rows


# -- In training -------------------------------------------------------------------------------------------------------


def rows_of(rank: int, ranks: int) -> DataLoader:
    """Three batches of 4 rows among all ranks, with labels missing."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (3, 4, 17), generator=generator)
    labels = tokens[..., 1:].clone()
    labels[:, ::2, 5:] = -100
    mine = slice(4 * rank // ranks, 4 * (rank + 1) // ranks)
    batches = [{"tokens": t[mine, :-1], "labels": n[mine]} for t, n in zip(tokens, labels, strict=True)]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Model(CausalLM):
    def train_dataloader(self) -> DataLoader:
        coordinate = self.trainer.strategy.distributed_sampler_kwargs
        return rows_of(coordinate["rank"], coordinate["num_replicas"])

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


def train(
    chunks: int, options: dict[str, Any], plugin: TitanPrecision, overrides: dict[str, Any], folder: Path, **more: Any
) -> tuple[list[float], dict[str, float], dict[str, Tensor], int]:
    """Losses, the validation's metrics, the final weights, and how many parts there were."""
    ranks = ExternalRanks().world_size()
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")] * ranks,
        seed=SEED,
        precision_plugin=plugin,
        **options,
    )
    losses: list[float] = []
    note = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, *_: losses.append(trainer.callback_metrics["train/loss"].item())
    )
    trainer = quiet_trainer(strategy, ranks, max_epochs=1, callbacks=[note], default_root_dir=folder, **more)
    module = Model(
        "debug",
        overrides={"vocab_size": VOCABULARY, "n_layers": 2, **overrides},  # type: ignore[arg-type]
        optimizer=AdamWConfig(lr=1e-2, eps=1e-5),
        schedule=LearningRateSchedule("constant"),
        loss_chunks=chunks,
    )
    with mock.patch("models.chunked_loss._forward", side_effect=chunked_loss._forward) as forward:
        trainer.fit(module)
    parts = sum(call.args[1] for call in forward.call_args_list if len(call.args) == 5)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return losses, metrics, full_parameters(module), parts


FULL = TitanPrecision("32-true")
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_dim=16, auxiliary_loss=0.1)


@pytest.mark.parametrize(
    ("ranks", "options", "plugin", "overrides"),
    [
        (1, {}, FULL, {}),
        (2, {}, FULL, {}),
        (2, {"tensor_parallel_size": 2}, FULL, {}),
        (2, {"pipeline_parallel_size": 2}, FULL, {}),
        (1, {}, FULL, {"tie_embeddings": True}),
        (2, {}, FULL, {"moe": EXPERTS}),
        (2, {}, TitanPrecision("32-true", ActivationCheckpointing("full"), CompileConfig("aot_eager")), {}),
    ],
    ids=["alone", "shard2", "tp2", "pp2", "tied", "experts", "compiled"],
)
def test_training_has_the_numbers_of_all_at_once(
    rank_pool, tmp_path: Path, ranks: int, options: dict[str, Any], plugin: TitanPrecision, overrides: dict[str, Any]
) -> None:
    whole, parts = (rank_pool.run(train, ranks, n, options, plugin, overrides, tmp_path) for n in (1, 3))
    for expected, found in zip(whole, parts, strict=True):
        assert len(expected[0]) == 3
        assert (expected[3], found[3]) == (
            0,
            0 if {"tensor_parallel_size", "pipeline_parallel_size"} & {*options} else 9,
        )
        torch.testing.assert_close(found[:3], expected[:3], rtol=1e-5, atol=1e-6)


def test_a_head_in_low_precision_keeps_its_product(rank_pool, tmp_path: Path) -> None:
    arguments = {}, Float8Precision(emulate=True, filter_fqns=["wk"], precision="32-true"), {}, tmp_path
    ((losses, _, weights, _),) = rank_pool.run(train, 1, 2, *arguments)
    ((expected, _, of_expected, _),) = rank_pool.run(train, 1, 1, *arguments)
    ((full, *_),) = rank_pool.run(train, 1, 1, {}, FULL, {}, tmp_path)
    # Each part has scales of its own.
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[0] != pytest.approx(full[0], rel=1e-5)
    assert weights.keys() == of_expected.keys()


def test_number_of_parts() -> None:
    with pytest.raises(ValueError, match="loss_chunks=0 must be at least 1"):
        CausalLM("debug", loss_chunks=0)
