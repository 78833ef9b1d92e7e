"""`titan bench`: times what it says, and reports what does not run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from models import CausalLM
from tests.parallel.parity import quiet_trainer
from titan_strategy.bench import BenchError, table
from titan_strategy.bench.report import Outcome, summary
from titan_strategy.bench.runner import Timing, overrides
from titan_strategy.bench.step_times import PARTS, StepTimes
from titan_strategy.cli import main

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """`bench(*args)` returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["titan"])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the runs are processes in another folder

    def run(*args: str) -> tuple[int, str, str]:
        small = ["--model=tests.cli.modules.SmallModule", "--data=tests.cli.modules.SmallData"]
        with pytest.raises(SystemExit) as ended:
            main(["bench", "--trainer.accelerator=cpu", "--trainer.devices=1", *small, "--steps=3", *args])
        return ended.value.code, *capsys.readouterr()  # type: ignore[return-value]

    return run


def test_variants_run_in_turn_and_one_that_fails_does_not_stop_the_others(bench: Bench) -> None:
    status, output, _ = bench(
        '--compare=["data.rows=0", "data.width=3", "trainer.accumulate_grad_batches=2 trainer.strategy=titan"]',
        "--rounds=2",
        "--json=result.json",
    )
    assert status == 1
    head, plain, accumulated, empty, failed = output.splitlines()
    assert head.split()[:5] == ["samples/s", "ratio", "MFU", "GiB", "ms/step"]
    assert plain.startswith("as configured ")
    assert plain.split()[3] == "1.000"
    assert accumulated.startswith("trainer.accumulate_grad_batches=2 trainer.strategy=titan ")
    assert empty == "data.rows=0: failed: the run ended after 0 optimizer steps, of which 5 are warm-up"
    assert failed.startswith("data.width=3: failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    result = json.loads(Path("result.json").read_text())
    assert [len(entry["runs"]) for entry in result.values()] == [2, 0, 0, 2]
    assert [len(run["parts"]) for run in result[""]["runs"]] == [3, 3]
    assert result[""]["runs"][0]["units"] == 4
    assert result["trainer.accumulate_grad_batches=2 trainer.strategy=titan"]["runs"][0]["units"] == 8
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["result.json"]


def test_a_misspelt_key_ends_it_before_anything_runs(bench: Bench) -> None:
    status, output, error = bench('--compare=["trainer.accumulate_grad_batchs=2"]')
    assert (status, output) == (2, "")
    assert "Did you mean 'accumulate_grad_batches'?" in error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--warmup=0"], "titan bench: warmup=0 must be at least 1"),
        (["--timeout=0"], "titan bench: timeout=0 must be more than 0 seconds"),
        (
            ['--compare=["data.rows"]'],
            "titan bench: compare: 'data.rows' in 'data.rows' is no override: write key",
        ),
    ],
)
def test_what_cannot_be_asked(bench: Bench, args: list[str], message: str) -> None:
    status, output, error = bench(*args)
    assert (status, output) == (2, "")
    assert error.startswith(message)


def test_a_run_that_does_not_end_is_ended(bench: Bench) -> None:
    started = time.monotonic()
    status, output, _ = bench("--timeout=0.5")
    assert status == 1
    assert output.splitlines()[-1] == "as configured: failed: no end within 0.5 s"
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_benchmark_leaves_no_process(tmp_path: Path, number: int, status: int) -> None:
    root = str(Path(__file__).parents[2])
    endless = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=titan", "--steps=1000000"]
    program = [sys.executable, "-m", "titan_strategy", "bench", *endless]
    program += ["--model=tests.cli.modules.SmallModule", "--data=tests.cli.modules.SmallData"]
    process = subprocess.Popen(
        program,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        # A shell starts what it runs in the background, such as this suite, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        _wait_until(lambda: len(_running(str(tmp_path))) >= 2)
        process.send_signal(number)
        assert process.wait(60) == status
        _wait_until(lambda: not _running(str(tmp_path)))
    finally:
        process.kill()
        process.communicate()


def _running(word: str) -> list[int]:
    """Processes of ours with this word on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("", []),
        ("a.b=1 --c=2", ["--a.b=1", "--c=2"]),
        ('plugins=\'[{"class_path": "x"}]\'', ['--plugins=[{"class_path": "x"}]']),
    ],
)
def test_overrides(variant: str, options: list[str]) -> None:
    assert overrides(variant) == options


def test_unclosed_quotes_are_no_override() -> None:
    with pytest.raises(BenchError, match="No closing quotation"):
        overrides("a='b")


class Slow(pl.LightningModule):
    """Sleeps for a known time in each part."""

    SECONDS: ClassVar = {"data": 0.02, "forward": 0.04, "backward": 0.06, "optimizer": 0.08}

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.SECONDS["forward"])
        loss = self.layer(batch).sum()
        loss.register_hook(lambda _: time.sleep(self.SECONDS["backward"]))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        time.sleep(self.SECONDS["optimizer"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowRows(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(6):
            time.sleep(Slow.SECONDS["data"])
            yield torch.ones(3, 2)


def test_each_part_takes_its_own_time(tmp_path: Path) -> None:
    clock = StepTimes(str(tmp_path / "timing.json"))
    trainer = quiet_trainer("auto", 1, max_epochs=1, accumulate_grad_batches=2, callbacks=[clock])
    trainer.fit(Slow(), DataLoader(SlowRows(), batch_size=None))
    timing = Timing(**json.loads((tmp_path / "timing.json").read_text()))
    assert (timing.unit, timing.units, timing.flops_per_unit, timing.ranks) == ("samples", 6, None, 1)
    assert len(timing.parts) == 3
    for part, seconds in Slow.SECONDS.items():
        batches = 1 if part == "optimizer" else 2
        found = min(step[part] for step in timing.parts[:-1])  # Lightning reads one batch ahead
        assert seconds * batches <= found < seconds * batches + 0.03, part


def timing(device: str, ranks: int = 1, **changes: Any) -> Timing:
    step = dict(zip(PARTS, (0.1, 0.2, 0.3, 0.4), strict=True))
    values: dict[str, Any] = {"unit": "tokens", "units": 1000, "flops_per_unit": 2 * 10**9, "gib": 3.0}
    values |= {"parts": [step, step], "first_step": 5.0, "device": device, "ranks": ranks, "loss": 2.5}
    return Timing(**(values | changes))


@pytest.mark.parametrize(
    ("device", "peak_tflops", "expected"),
    [
        ("NVIDIA H200", None, 2e12 / (2 * 989e12)),
        ("NVIDIA A100-SXM4-80GB", None, 2e12 / (2 * 312e12)),
        ("NVIDIA GH200 480GB", None, 2e12 / (2 * 989e12)),
        ("NVIDIA H200", 10.0, 2e12 / (2 * 10e12)),
        ("NVIDIA H2000", None, None),
        ("CPU", None, None),
    ],
)
def test_utilisation(device: str, peak_tflops: float | None, expected: float | None) -> None:
    found = summary(Outcome("", [timing(device, ranks=2)]), peak_tflops)["mfu"]
    assert found == (None if expected is None else pytest.approx(expected))


def test_medians_ratios_and_parts_of_all_runs() -> None:
    slow = dict.fromkeys(PARTS, 1.0)
    outcomes = [
        Outcome("", [timing("CPU"), timing("CPU", gib=4.0)]),
        Outcome("a=1", [timing("CPU", parts=[slow])]),
        Outcome("b=2", [], ["x", "RuntimeError: no", "exit code 1"]),
    ]
    first = summary(outcomes[0], None)
    assert (first["per_second"], first["gib"]) == (pytest.approx(1000), 4.0)
    assert first["parts"] == pytest.approx(dict(zip(PARTS, (0.1, 0.2, 0.3, 0.4), strict=True)))
    lines = table(outcomes, None)
    assert lines[2].split()[:5] == ["a=1", "250", "0.250", "-", "3.00"]
    assert lines[3] == "b=2: failed: RuntimeError: no"


def test_a_language_model_knows_its_operations() -> None:
    module = CausalLM("llama3_2_1b")
    assert module.flops_per_token(8192) == module.config.flops_per_token(8192) > 6e9
