"""Which launcher a run gets, and what is refused before it starts a process."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.core.modules import Language
from titan_strategy import TitanStrategy
from titan_strategy.checkpoint import CheckpointError
from titan_strategy.launch import ProcessLauncher, ScriptLauncher


def build(devices: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=TitanStrategy(**options), logger=False, max_steps=1)


def test_one_process_needs_no_launcher() -> None:
    assert build(1).strategy.launcher is None


@pytest.mark.parametrize(
    ("start_method", "kind", "interactive"),
    [
        ("auto", ScriptLauncher, False),
        ("popen", ScriptLauncher, False),
        ("spawn", ProcessLauncher, False),
        ("fork", ProcessLauncher, True),
    ],
)
def test_start_method(start_method: str, kind: type, interactive: bool) -> None:
    launcher = build(2, start_method=start_method).strategy.launcher
    assert type(launcher) is kind
    assert launcher.is_interactive_compatible == interactive


def test_torchrun_brings_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    strategy = build(2).strategy
    assert (strategy.global_rank, strategy.world_size) == (1, 2)
    started: list[object] = []
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: started.append(args))
    assert strategy.launcher.launch(lambda: "ran here") == "ran here"
    assert started == []


class Refusing(Language):
    def check_setup(self, trainer: pl.Trainer, datamodule: pl.LightningDataModule | None) -> None:
        raise ValueError("sequence_length=4096 exceeds max_sequence_length=2048")


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
@pytest.mark.parametrize(
    ("module", "ckpt_path", "error", "message"),
    [
        (Refusing, None, ValueError, "sequence_length=4096 exceeds"),
        (Language, "none.ckpt", CheckpointError, "there is no checkpoint at none.ckpt"),
    ],
    ids=["check_setup", "ckpt_path"],
)
def test_no_process_starts_for_what_cannot_work(
    start_method: str, module: type[Language], ckpt_path: Path, error: type[Exception], message: str, monkeypatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: started.append(args))
    monkeypatch.setattr("torch.multiprocessing.start_processes", lambda *args, **kwargs: started.append(args))
    with pytest.raises(error, match=message):
        build(2, start_method=start_method).fit(module(), ckpt_path=ckpt_path)
    assert started == []
