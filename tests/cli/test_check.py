"""`titan check`: says what a layout comes to, or what is wrong with it, for machines that are not this one."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from titan_strategy.cli import main

TENSOR_4 = {"class_path": "titan_strategy.TitanStrategy", "init_args": {"tensor_parallel_size": 4}}
Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """`check(*overrides, **trainer)` returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["titan"])

    def run(*overrides: str, **trainer: object) -> tuple[int, str, str]:
        config = {
            "trainer": {"strategy": {"class_path": "titan_strategy.TitanStrategy"}, **trainer},
            "model": {"class_path": "models.CausalLM", "init_args": {"preset": "llama3_8b"}},
            "data": {
                "class_path": "models.TextDataModule",
                "init_args": {"sequence_length": 4096, "batch_size": 4},
            },
        }
        Path("config.yaml").write_text(yaml.safe_dump(config))
        status: object = 0
        try:
            main(["check", "--config", "config.yaml", *overrides])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()  # type: ignore[return-value]

    return run


def test_a_run_for_64_gpus_is_described_here(check: Check) -> None:
    start = time.perf_counter()
    status, output, error = check(
        "--trainer.strategy.tensor_parallel_size=4",
        "--trainer.strategy.pipeline_parallel_size=2",
        "--trainer.strategy.cpu_offload=true",
        accelerator="gpu",
        devices=8,
        num_nodes=8,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
    )
    elapsed = time.perf_counter() - start
    assert status == 0, error
    lines = [line.split(maxsplit=1) for line in output.splitlines()]
    assert lines[0] == ["world", "64 processes = pipeline 2 x replicate 1 x shard 8 x tensor 4"]
    assert "stage 0     pipeline rank 0: tok_embeddings, layers.0, ..., layers.15, 4,015,128,576 parameters" in output
    assert "stage 1     pipeline rank 1: layers.16, layers.17, ..., output, 4,015,132,672 parameters" in output
    assert f"parameters  8,030,261,248; about {4_015_132_672 // 32:,} on a rank at most" in output
    assert "8 data ranks x batch_size 4 x accumulate_grad_batches 2 = 64 rows, 262,144 tokens per optimizer" in output
    assert elapsed < 15  # on a busy machine; nothing of 8 billion parameters was made
    assert sorted(path.name for path in Path().iterdir()) == ["config.yaml"]


def test_experts_take_their_ranks_from_the_others(check: Check) -> None:
    experts = "--model.overrides.moe={num_experts: 8, top_k: 2, expert_dim: 512, balance_rate: 1e-3}"
    ranks = {"accelerator": "gpu", "devices": 8}
    status, output, error = check(experts, "--trainer.strategy.expert_parallel_size=4", **ranks)
    assert status == 0, error
    assert "experts     divided among 4 of the shard 8 x tensor 1 ranks" in output
    status, _, error = check(experts, "--trainer.strategy.expert_parallel_size=3", **ranks)
    assert status == 2
    assert "expert_parallel_size=3 does not divide data_parallel_shard_size=8 x tensor_parallel_size=1 = 8" in error


def test_of_nested_options_only_what_is_wrong_is_said(check: Check) -> None:
    status, _, error = check("--model.overrides.moe={num_experts: 8, top_k: 9, expert_dim: 512}")
    assert status == 2
    assert error == (
        "titan check: moe.top_k=9 must be from 1 to 8, the experts that a token can pick from (moe.num_experts=8)\n"
    )


def test_problems_go_to_stderr_with_status_2(check: Check) -> None:
    status, output, error = check(
        "--trainer.strategy.tensor_parallel_size=16", "--data.sequence_length=9000", accelerator="gpu", devices=16
    )
    assert (status, output) == (2, "")
    assert "titan check: 3 settings cannot work:" in error
    assert "data.sequence_length=9000 is longer than model.overrides.max_sequence_length=8192" in error
    assert "tensor_parallel_size=16 does not divide model.overrides.n_kv_heads=8. For this model" in error
    assert "it must be one of 1, 2, 4, 8." in error
    assert "data.sequence_length=9000 is not divisible by tensor_parallel_size=16" in error


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"accelerator": "gpu", "devices": 6, "strategy": TENSOR_4},
            "tensor_parallel_size=4 does not divide the 6 processes of this run",
        ),
        ({"accelerator": "cpu", "devices": 1, "strategy": "auto"}, "titan check knows runs with strategy 'titan' only"),
        ({"accelerator": "gpu", "devices": 8, "precision": "16-mixed"}, "precision='16-mixed'"),
    ],
)
def test_what_the_trainer_itself_refuses(check: Check, trainer: dict[str, object], message: str) -> None:
    status, output, error = check(**trainer)
    assert (status, output) == (2, "")
    assert "titan check: " in error
    assert message in error
    assert "Traceback" not in error


def test_gpus_must_be_counted_where_there_are_none(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, error = check(accelerator="gpu", devices="auto")
    assert status == 2
    assert "trainer.devices='auto' takes the GPUs that there are, and this machine has none." in error


def test_a_missing_checkpoint_is_a_problem(check: Check) -> None:
    status, _, error = check("--ckpt_path=nowhere.ckpt", accelerator="gpu", devices=8)
    assert status == 2
    assert "ckpt_path: there is no checkpoint at nowhere.ckpt" in error
