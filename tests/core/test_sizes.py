"""Sizes that cannot work are refused while the Trainer is built; no process has started by then."""

import importlib

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry

import titan_strategy
from titan_strategy import TitanStrategy


def build(devices: int = 2, **options: object) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=TitanStrategy(**options), logger=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_shard_size": 3},
            r"data_parallel_shard_size=3 makes 3 processes, but this run has 6 .* must be 6 or 'auto'",
        ),
        (
            {"data_parallel_shard_size": 4, "data_parallel_replicate_size": 3},
            r"data_parallel_shard_size=4 x data_parallel_replicate_size=3 makes 12 .* has 6 .* must be 2 or 'auto'",
        ),
        ({"data_parallel_replicate_size": 4}, r"data_parallel_replicate_size=4 .* 6 processes .*: .* 1, 2, 3, 6\."),
        ({"data_parallel_replicate_size": 12}, r"data_parallel_replicate_size=12 .* 6 processes .*: .* 1, 2, 3, 6\."),
        ({"data_parallel_replicate_size": "auto"}, r"data_parallel_replicate_size='auto': only data_parallel_shard_"),
        ({"data_parallel_replicate_size": 0}, r"data_parallel_replicate_size=0: expected a whole number of at least 1"),
        ({"data_parallel_shard_size": 0}, r"data_parallel_shard_size=0: expected"),
        ({"data_parallel_shard_size": -1}, r"data_parallel_shard_size=-1: expected"),
        ({"data_parallel_shard_size": True}, r"data_parallel_shard_size=True: expected"),
        ({"data_parallel_shard_size": 2.0}, r"data_parallel_shard_size=2\.0: expected"),
        ({"data_parallel_shard_size": "2"}, r"data_parallel_shard_size='2': expected"),
        ({"expert_parallel_size": 0}, r"expert_parallel_size=0: expected a whole number of at least 1"),
        ({"expert_parallel_size": "auto"}, r"expert_parallel_size='auto': only data_parallel_shard_size"),
        (
            {"expert_parallel_size": 4},
            r"expert_parallel_size=4 does not divide data_parallel_shard_size=6 x tensor_parallel_size=1 = 6, .* must "
            r"be one of 1, 2, 3, 6\.",
        ),
        (
            {"expert_parallel_size": 6, "data_parallel_replicate_size": 3, "tensor_parallel_size": 2},
            r"expert_parallel_size=6 does not divide data_parallel_shard_size=1 x tensor_parallel_size=2 = 2.* 1, 2\.",
        ),
        ({"reshard_after_forward": "sometimes"}, r"reshard_after_forward='sometimes': valid values are"),
        ({"start_method": "thread"}, r"start_method='thread': valid values are 'popen', 'spawn', 'fork', 'auto'"),
        ({"cpu_offload": True}, r"cpu_offload=True: on accelerator='cpu'"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_building_the_trainer_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(6, **options)


def test_one_process_has_sizes_too() -> None:
    with pytest.raises(ValueError, match="this run has 1 "):
        build(1, data_parallel_shard_size=2)


@pytest.mark.parametrize(
    ("options", "shard", "replicate"),
    [
        ({}, 6, 1),
        ({"data_parallel_replicate_size": 2}, 3, 2),
        ({"data_parallel_replicate_size": 2, "data_parallel_shard_size": 3}, 3, 2),
        ({"data_parallel_replicate_size": 6, "data_parallel_shard_size": 1}, 1, 6),
    ],
)
def test_sizes_that_fit(options: dict[str, object], shard: int, replicate: int) -> None:
    strategy = build(6, **options).strategy
    sizes = strategy._sizes.resolve(strategy.num_processes)
    assert (sizes.shard, sizes.replicate) == (shard, replicate)


def test_shorthand_survives_a_second_import() -> None:
    importlib.reload(titan_strategy)
    assert "titan" in StrategyRegistry
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="titan", logger=False)
    assert isinstance(trainer.strategy, TitanStrategy)
