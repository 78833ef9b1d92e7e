"""Real launches: processes start, numbers come back, and a failing rank takes the others with it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from titan_strategy import TitanStrategy

ROOT = Path(__file__).parents[2]

# A user's project: its own package of the name `models`, a plain LightningModule, and nothing of this repository's.
USER_MODELS = """
import json, os
import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)

class UserModule(pl.LightningModule):
    def __init__(self, fail: bool = False):
        super().__init__()
        self.fail = fail
        self.net = Net()

    def training_step(self, batch, batch_idx):
        if self.fail and self.global_rank == 1 and batch_idx == 1:
            print("FAILING", __import__("time").time(), flush=True)
            raise ZeroDivisionError("rank 1 has a problem of its own")
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_end(self):
        report = {
            "world": self.trainer.world_size,
            "units": [n for n, m in self.named_modules() if isinstance(m, FSDPModule)],
            "sharded": all(isinstance(p, DTensor) for p in self.parameters()),
            "loss": self.trainer.callback_metrics["loss"].item(),
            "steps": self.trainer.global_step,
        }
        with open(f"report{self.global_rank}.json", "w") as file:
            json.dump(report, file)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class UserData(pl.LightningDataModule):
    def train_dataloader(self):
        rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(rows, batch_size=2)
"""

SCRIPT = """
import sys
import lightning.pytorch as pl
from models import UserData, UserModule
import titan_strategy

if __name__ == "__main__":
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="titan", max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(UserModule(fail="fail" in sys.argv), datamodule=UserData())
    print(f"DONE {trainer.global_rank}\\n", end="")
"""

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: titan_strategy.TitanStrategy
    init_args:
      plan:
        blocks: net.blocks.*
        before: [net.stem]
        after: [net.head]
model: models.UserModule
data: models.UserData
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text(USER_MODELS)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def reports(project: Path) -> list[dict[str, object]]:
    return [json.loads((project / f"report{rank}.json").read_text()) for rank in range(2)]


def test_a_script_beside_a_package_called_models(project: Path) -> None:
    result = run(project, "train.py")
    assert result.returncode == 0, result.stderr
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("DONE")) == ["DONE 0", "DONE 1"]
    for report in reports(project):
        assert report["world"] == 2
        assert report["steps"] == 4, "each rank reads half of the 16 rows, two at a time"
        assert report["units"] == ["", "net.blocks.a", "net.blocks.b"]
        assert report["sharded"]
    assert reports(project)[0]["loss"] == reports(project)[1]["loss"]


def test_the_command_line_with_a_plan_in_yaml(project: Path) -> None:
    result = run(project, "-m", "titan_strategy", "fit", "--config", "config.yaml")
    assert result.returncode == 0, result.stderr
    for report in reports(project):
        assert set(report["units"]) == {"", "net.stem", "net.blocks.a", "net.blocks.b", "net.head"}
        assert (report["world"], report["steps"]) == (2, 4)


def test_a_failing_rank_ends_the_run(project: Path) -> None:
    result = run(project, "train.py", "fail")
    ended = time.time()
    assert result.returncode != 0
    assert "ZeroDivisionError: rank 1 has a problem of its own" in result.stderr
    (failing,) = (line for line in result.stdout.splitlines() if line.startswith("FAILING"))
    assert ended - float(failing.split()[1]) < 20
    assert not any("DONE" in line for line in result.stdout.splitlines())
    assert processes_in(project) == [], "no rank is left behind"


def processes_in(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").resolve() == folder:
                found.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile, or not ours
    return found


# -- Processes that start from this one --------------------------------------------------------------------------------


class Counted(pl.LightningModule):
    """Learns the mean of its rows; validation sums what every rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.rows = SumMetric()  # would be too large if the ranks shared its memory

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(torch.ones_like(batch)) - batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.rows.update(batch)
        self.log("rows", self.rows)
        self.log("output", self.net(torch.ones(1, 1)).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.arange(1.0, 9.0)[:, None], batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_weights_and_metrics_come_back(start_method: str) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TitanStrategy(start_method=start_method, seed=5),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Counted()
    trainer.fit(module)
    assert trainer.callback_metrics["rows"] == 36, "each of the 8 rows once"
    assert module.net is not None
    assert not any(parameter.is_meta for parameter in module.parameters())
    with torch.no_grad():
        output = module.net(torch.ones(1, 1))
    assert trainer.callback_metrics["output"].item() == pytest.approx(output.item(), rel=1e-6)
    assert abs(output.item()) > 1, "it has learnt something"
