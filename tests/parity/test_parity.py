"""`titan parity` finds that layouts agree, and finds the mistakes that make them differ."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from titan_strategy.cli import main

SIZES = {"vocab_size": 257, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a little text and an encoding by bytes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["titan"])
    monkeypatch.setattr("sys.path", [*sys.path])
    Path("text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(100)))
    Path("bytes.tiktoken").write_bytes(b"".join(base64.b64encode(bytes([n])) + b" %d\n" % n for n in range(256)))


def parity(
    class_path: str, layouts: str, moe: dict[str, Any] | None = None, **trainer: object
) -> tuple[Any, dict[str, Any]]:
    """The exit status, and the entries of the JSON file by layout."""
    preset = {"preset": "debug"} if class_path == "models.CausalLM" else {}
    sizes = SIZES if moe is None else SIZES | {"moe": moe}
    config = {
        "trainer": {"accelerator": "gpu", "devices": 64, "strategy": "titan", "precision": "bf16-true", **trainer},
        "model": {"class_path": class_path, "init_args": preset | {"overrides": sizes}},
        "data": {
            "class_path": "models.TextDataModule",
            "init_args": {
                "source": "text.txt",
                "encoding": "bytes.tiktoken",
                "cache_dir": "cache",
                "sequence_length": 8,
                "batch_size": 4,
                "validation_rows": 2,
            },
        },
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as ended:
        main(["parity", "--config", "config.yaml", "--layouts", layouts, "--json", "result.json"])
    if not Path("result.json").exists():
        return ended.value.code, {}
    layouts_of = json.loads(Path("result.json").read_text())["layouts"]
    return ended.value.code, {entry["layout"]: entry for entry in layouts_of}


def test_layouts_agree_and_what_cannot_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {
        "class_path": "titan_strategy.TitanStrategy",
        "init_args": {"tensor_parallel_size": 8, "pipeline": {"schedule": "GPipe", "microbatches": 2}},
    }
    status, found = parity(
        "models.CausalLM",
        "fsdp2,tp2,pp2,tp4,fsdp3",
        strategy=strategy,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )
    output = capsys.readouterr().out
    assert {name: entry["verdict"] for name, entry in found.items()} == {
        "fsdp2": "ok",
        "tp2": "ok",
        "pp2": "ok",
        "tp4": "cannot run",
        "fsdp3": "cannot run",
    }, output
    assert status == 3
    for name in ("fsdp2", "tp2", "pp2"):
        assert 0 < found[name]["worst"]["relative"] < 1e-5
    assert "tensor_parallel_size=4 does not divide model.overrides.n_kv_heads=2" in found["tp4"]["reason"]
    assert "data.batch_size=4 cannot be shared among 3 data ranks" in found["fsdp3"]["reason"]
    assert [line.split()[0] for line in output.splitlines()] == ["layout", "fsdp2", "tp2", "pp2", "tp4", "fsdp3"]


def test_experts(capsys: pytest.CaptureFixture[str]) -> None:
    moe = {"num_experts": 4, "top_k": 2, "expert_dim": 16, "shared_dim": 16, "balance_rate": 0.01}
    status, found = parity("models.CausalLM", "ep2,tp2ep2,fsdp4ep3", moe=moe | {"auxiliary_loss": 0.1})
    output = capsys.readouterr().out
    assert [entry["verdict"] for entry in found.values()] == ["ok", "ok", "cannot run"], output
    assert status == 3
    assert "expert_parallel_size=3 does not divide data_parallel_shard_size=4" in found["fsdp4ep3"]["reason"]


def test_mistakes_are_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = parity("tests.parity.modules.Faulty", "tp2,pp2,replicate2,fsdp2,fsdp1")
    output = capsys.readouterr().out
    assert status == 1, output
    assert {name: entry["verdict"] for name, entry in found.items()} == {
        "tp2": "DIFFERS",
        "pp2": "DIFFERS",
        "replicate2": "DIFFERS",
        "fsdp2": "failed",
        "fsdp1": "ok",
    }, output
    assert found["fsdp2"]["reason"] == "rank 1: RuntimeError: out of luck"
    dropped = found["tp2"]["first_parameter"]
    assert (dropped["kind"], dropped["name"], dropped["step"]) == ("gradient", "model.layers.1.ffn_norm.weight", 0)
    assert dropped["relative"] > 1e-3
    scaled = found["pp2"]["first_parameter"]
    assert (scaled["kind"], scaled["name"]) == ("gradient", "model.layers.1.attention_norm.weight")
    assert 1e-5 < scaled["relative"] < 1.1e-3
    assert found["replicate2"]["first_parameter"]["step"] == 0
    assert "first parameter that differs: gradient of model.layers.1.ffn_norm.weight in step 0" in output


def test_too_little_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity("models.CausalLM", "fsdp2", accumulate_grad_batches=1000)[0] == 2
    assert "trainer.accumulate_grad_batches=1000 takes 3000 batches" in capsys.readouterr().err


def test_a_plain_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["parity", "--model=tests.cli.modules.SmallModule", "--data=tests.cli.modules.SmallData", "--layouts=tp2"])
    assert ended.value.code == 2
    assert "SmallModule is not a TitanModule" in capsys.readouterr().err
