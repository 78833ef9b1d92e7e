"""Runs through the command line: logs, configuration files, resuming, and the installed command."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_strategy.cli import main

Titan = Callable[..., None]

CHECKPOINTS = [
    "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.dirpath=checkpoints",
    "--trainer.callbacks.save_last=true",
]
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.log_every_n_steps=1",
    "--trainer.num_sanity_val_steps=0",
]


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Titan:
    """`titan(subcommand, *args)` in an empty folder and in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["titan"])
    monkeypatch.setattr("sys.path", [*sys.path])

    def run(subcommand: str, *args: str) -> None:
        model = ["--model=tests.cli.modules.SmallModule", "--data=tests.cli.modules.SmallData"]
        main([subcommand, *QUIET, *model, *args])

    return run


def test_second_run_in_one_log_folder_keeps_the_first_configuration(titan: Titan) -> None:
    for steps in (1, 2, 3):
        titan(
            "fit",
            f"--trainer.max_steps={steps}",
            "--trainer.logger=CSVLogger",
            "--trainer.logger.save_dir=logs",
            "--trainer.logger.name=run",
            "--trainer.logger.version=only",
            "--trainer.enable_checkpointing=false",
        )
    folder = Path("logs/run/only")
    saved = {path.name: path.read_text() for path in folder.glob("config*.yaml")}
    assert sorted(saved) == ["config-1.yaml", "config-2.yaml", "config.yaml"]
    for name, steps in (("config-1.yaml", 1), ("config-2.yaml", 2), ("config.yaml", 3)):
        assert f"max_steps: {steps}\n" in saved[name]


def test_last_without_a_checkpoint_is_an_error(titan: Titan, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        titan("fit", "--trainer.max_steps=1", *CHECKPOINTS, "--ckpt_path=last")
    assert "there is no checkpoint last*.ckpt in " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        titan("fit", "--trainer.max_steps=1", "--ckpt_path=last")
    assert "needs a ModelCheckpoint" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["auto", "titan"])
def test_last_resumes_from_the_newest_checkpoint(titan: Titan, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    run = [f"--trainer.strategy={strategy}", *CHECKPOINTS]
    titan("fit", "--trainer.max_steps=2", *run)
    titan("fit", "--trainer.max_steps=5", *run, "--ckpt_path=last")
    assert "last.ckpt at step 2." in caplog.text
    titan("fit", "--trainer.max_steps=7", *run, "--ckpt_path=last")
    assert "at step 5." in caplog.text


def test_resuming_a_finished_run_says_how_to_go_on(titan: Titan, caplog: pytest.LogCaptureFixture) -> None:
    titan("fit", "--trainer.max_steps=2", *CHECKPOINTS)
    titan("fit", "--trainer.max_steps=2", *CHECKPOINTS, "--ckpt_path=last")
    assert "is at step 2 already, and trainer.max_steps=2: there was nothing left to train." in caplog.text
    assert "--trainer.max_steps 4" in caplog.text


def test_validate_takes_last_too(titan: Titan) -> None:
    titan("fit", "--trainer.max_steps=2", *CHECKPOINTS)
    titan("validate", *CHECKPOINTS, "--ckpt_path=last")


def _command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The command as an installed script runs it: without the current folder on the path, and in its own process."""
    script = folder / "bin" / "titan"
    script.parent.mkdir()
    script.write_text("from titan_strategy.cli import main\nmain()\n")
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(script), *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_command_on_two_processes_with_a_module_from_the_current_folder(tmp_path: Path) -> None:
    module = Path(__file__).with_name("modules.py").read_text()
    (tmp_path / "my_project.py").write_text(module)
    (tmp_path / "models").mkdir()  # a user's own, which must not matter
    (tmp_path / "models" / "__init__.py").write_text("raise ImportError('not ours')")
    result = _command(
        tmp_path,
        "fit",
        "--model=my_project.SmallModule",
        "--data=my_project.SmallData",
        *QUIET,
        "--trainer.strategy=titan",
        "--trainer.devices=2",
        "--trainer.max_steps=2",
    )
    assert result.returncode == 0, result.stderr
    (metrics,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    assert len(metrics.read_text().splitlines()) == 3
