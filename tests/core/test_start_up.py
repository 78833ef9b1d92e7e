"""How long a user waits before anything happens."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from models import Transformer, TransformerConfig


def cpu_seconds(script: str, folder: Path) -> float:
    """What a new process, in a folder of its own, prints last."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True, timeout=240
    )
    return float(done.stdout.splitlines()[-1])


# Processor time, of the best of three: the machine may be busy with other tests.
IMPORT = """
import time
import lightning.pytorch
start = time.process_time()
import titan_strategy
print(time.process_time() - start)
"""
CHECK = """
import sys, time
import lightning.pytorch.cli
start = time.process_time()
from titan_strategy.cli import main
main(["check", "--config", "llama3_8b", "--trainer.devices", "64"])
print(time.process_time() - start)
"""


def test_import_adds_little_to_that_of_lightning(tmp_path: Path) -> None:
    assert any(cpu_seconds(IMPORT, tmp_path) < 0.3 for _ in range(3))


def test_check_answers_at_once(tmp_path: Path) -> None:
    assert any(cpu_seconds(CHECK, tmp_path) < 3 for _ in range(3))


@pytest.mark.parametrize("preset", ["llama3_70b", "llama3_405b"])
def test_large_models_are_built_without_time_or_memory(preset: str) -> None:
    start = time.process_time()
    with torch.device("meta"):
        model = Transformer(TransformerConfig.preset(preset))
    assert time.process_time() - start < 5
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert sum(parameter.numel() for parameter in model.parameters()) > 70e9
