"""Every row once, in one order, whatever the ranks and the batch size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import Trainer

from models import TextDataModule
from models.data.order import GlobalOrderSampler, HeldOutSampler, Position, permutation
from models.data.packing import NO_TARGET
from tests.data.training import OneOfSeveral, Recorder, train

MakeData = Callable[..., TextDataModule]

ROWS = 50
LAYOUTS = [(1, 1), (1, 7), (2, 3), (3, 4), (5, 2), (50, 1), (1, 50)]  # (data ranks, batch size)


def global_order(
    ranks: int, batch_size: int, *, epoch: int = 0, seed: int = 0, start: Position | None = None
) -> list[int]:
    """The rows that all ranks together read, micro-batch after micro-batch."""
    samplers = [
        GlobalOrderSampler(ROWS, batch_size=batch_size, num_replicas=ranks, rank=rank, seed=seed)
        for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.start_at(start or Position())
        sampler.set_epoch(epoch)
    reads = [list(sampler) for sampler in samplers]
    assert len({len(read) for read in reads}) == 1
    batches = range(0, len(reads[0]), batch_size)
    return [row for first in batches for read in reads for row in read[first : first + batch_size]]


@pytest.mark.parametrize(("ranks", "batch_size"), LAYOUTS)
@pytest.mark.parametrize("epoch", [0, 3])
def test_all_layouts_read_the_same_order(ranks: int, batch_size: int, epoch: int) -> None:
    order = global_order(ranks, batch_size, epoch=epoch)
    assert order == permutation(ROWS, seed=0, epoch=epoch).tolist()[: len(order)]
    assert len(order) == ROWS // (ranks * batch_size) * ranks * batch_size
    assert len(set(order)) == len(order)


def test_a_whole_epoch_is_every_row_once() -> None:
    assert sorted(global_order(5, 2)) == list(range(ROWS))


def test_orders_of_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(ROWS, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize(("ranks", "batch_size"), LAYOUTS)
@pytest.mark.parametrize("samples", [1, 7, 12, 43, 50])
def test_every_layout_goes_on_from_every_position(ranks: int, batch_size: int, samples: int) -> None:
    rest = global_order(ranks, batch_size, epoch=2, start=Position(2, samples))
    assert rest == permutation(ROWS, seed=0, epoch=2).tolist()[samples : samples + len(rest)]
    assert len(rest) == (ROWS - samples) // (ranks * batch_size) * ranks * batch_size


def test_positions_count_the_rows_of_all_ranks() -> None:
    sampler = GlobalOrderSampler(ROWS, batch_size=2, num_replicas=3, rank=1, seed=0)
    sampler.start_at(Position(1, 20))
    assert sampler.batches_before == 3  # 8 batches of 6 in an epoch, 5 in the 30 rows that are left
    assert sampler.position(3) == Position(1, 20)
    next(iter(sampler))
    assert [sampler.position(done).samples for done in (3, 4, 8)] == [20, 26, 50]
    sampler.set_epoch(2)
    assert sampler.position(8) == Position(2, 0)  # the count is still that of epoch 1


def test_nothing_is_left_of_a_complete_epoch() -> None:
    sampler = GlobalOrderSampler(ROWS, batch_size=2, num_replicas=1, rank=0, seed=0)
    sampler.start_at(Position(4, 18, is_complete=True))
    assert list(sampler) == []
    sampler.set_epoch(5)
    assert len(list(sampler)) == ROWS


@pytest.mark.parametrize(("ranks", "batch_size"), [*LAYOUTS, (4, 20)])
def test_validation_reads_every_row_once_on_ranks_of_equal_length(ranks: int, batch_size: int) -> None:
    reads = [list(HeldOutSampler(ROWS, batch_size=batch_size, num_replicas=ranks, rank=rank)) for rank in range(ranks)]
    assert len({len(read) for read in reads}) == 1
    assert len(reads[0]) % batch_size == 0
    assert sorted(row for read in reads for row in read if row is not None) == list(range(ROWS))


@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_sums_do_not_depend_on_ranks(make_data: MakeData, ranks: int) -> None:
    """Rows that fill up a last batch have no target, so that sum over count stays exact."""
    counts, sums = 0, 0
    for rank in range(ranks):
        data = make_data(batch_size=3)
        module = Recorder()
        trainer = Trainer(
            strategy=OneOfSeveral(ranks, rank), accelerator="cpu", logger=False, enable_progress_bar=False
        )
        trainer.validate(module, data, verbose=False)
        labels = torch.cat([batch["labels"] for batch in module.validated])
        assert len(labels) == (6 if ranks == 1 else 3)
        counts += int((labels != NO_TARGET).sum())
        sums += int(labels[labels != NO_TARGET].sum())
    held_out = torch.stack([data.held_out[i]["labels"] for i in range(4)])
    assert (counts, sums) == (held_out.numel(), int(held_out.sum()))


def test_lightning_keeps_the_order_of_a_distributed_run(make_data: MakeData) -> None:
    """`use_distributed_sampler` is left on: Lightning would replace an ordinary sampler."""
    runs = [train(make_data(batch_size=2), max_epochs=1, strategy=OneOfSeveral(3, rank)) for rank in range(3)]
    data = make_data()
    data.prepare_data()
    data.setup()
    order = permutation(31, seed=0, epoch=0)[:30].tolist()
    for rank, run in enumerate(runs):
        assert type(run.trainer.train_dataloader.sampler) is GlobalOrderSampler
        read = [row for batch in run.module.trained for row in batch.tokens]
        mine = [row for k in range(5) for row in order[6 * k + 2 * rank : 6 * k + 2 * rank + 2]]
        assert read == [tuple(data.train_rows[row]["tokens"].tolist()) for row in mine]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_leaves_the_global_random_state_alone(make_data: MakeData, num_workers: int) -> None:
    data = make_data(num_workers=num_workers)
    data.prepare_data()
    data.setup()
    before = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert len(list(loader)) == len(loader) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_prediction_reads_the_validation_rows(make_data: MakeData) -> None:
    class Predictor(Recorder):
        def predict_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["tokens"]

    data = make_data(batch_size=2)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    predicted = torch.cat(trainer.predict(Predictor(), data))
    assert predicted.tolist() == [data.held_out[i]["tokens"].tolist() for i in range(4)]
