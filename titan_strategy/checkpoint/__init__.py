"""Checkpoints: a directory of shards that appears under its name only when complete, or one file gathered on rank 0."""

from titan_strategy.checkpoint.directory import CheckpointError, check_complete, local_path, remove
from titan_strategy.checkpoint.load import load_optimizer, load_weights, read
from titan_strategy.checkpoint.optimizer import optimizer_state
from titan_strategy.checkpoint.save import gather, save_file, save_sharded

__all__ = [
    "CheckpointError",
    "check_complete",
    "gather",
    "load_optimizer",
    "load_weights",
    "local_path",
    "optimizer_state",
    "read",
    "remove",
    "save_file",
    "save_sharded",
]
