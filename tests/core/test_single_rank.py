"""A rank alone: without FSDP2, and with the numbers that FSDP2 has."""

from pathlib import Path

import pytest
import torch
from torch import nn

from precision_plugins import ActivationCheckpointing, CompileConfig, TitanPrecision
from precision_plugins.activation_checkpointing import Mode
from tests.parallel.parity import SEED, Module, Recorder, Run, Trace, full_parameters, quiet_trainer
from tests.parallel.test_expert_parallel import MOE
from tests.rank_pool import ExternalRanks
from titan_strategy import TitanStrategy
from titan_strategy.single_rank import cast_parameters


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def train(run: Run, precision: TitanPrecision) -> tuple[Trace, Module]:
    recorder = Recorder()
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")],
        seed=SEED,
        precision_plugin=precision,
    )
    trainer = quiet_trainer(strategy, 1, max_epochs=1, accumulate_grad_batches=run.accumulate, callbacks=[recorder])
    module = Module(run)
    trainer.fit(module)
    validation = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {**recorder.trace, "final": full_parameters(module), "validation": validation}, module


@pytest.mark.parametrize(
    ("run", "mode", "compiled"),
    [
        (Run(accumulate=2, microbatches=4), "none", False),
        (Run(), "full", False),
        (Run(), "selective", False),
        (Run(layers=2), "none", True),
        (Run(layers=2), "full", True),
        (Run(layers=2, moe=MOE), "full", False),
    ],
    ids=["accumulate", "full", "selective", "compiled", "compiled-full", "experts"],
)
def test_numbers_are_those_of_fsdp(monkeypatch: pytest.MonkeyPatch, run: Run, mode: Mode, compiled: bool) -> None:
    def precision() -> TitanPrecision:
        compile = CompileConfig("aot_eager", loss=False) if compiled else None
        return TitanPrecision("bf16-mixed", ActivationCheckpointing(mode), compile)

    alone, module = train(run, precision())
    assert module._split.casts is not None
    monkeypatch.setattr("titan_strategy.parallelize._is_alone", lambda *_: False)
    torch._dynamo.reset()
    sharded, _ = train(run, precision())
    torch._dynamo.reset()
    assert alone["loss"] == sharded["loss"]
    assert alone["validation"] == sharded["validation"]
    for step, gradients in enumerate(sharded["gradients"]):
        for name, gradient in gradients.items():
            assert torch.equal(alone["gradients"][step][name], gradient), (step, name)
    for name, weight in sharded["final"].items():
        assert torch.equal(alone["final"][name], weight), name


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_parameters_are_cast_while_the_model_runs_and_stored_otherwise() -> None:
    model = build()
    names, parameters, linear = list(model.state_dict()), list(model.parameters()), model[0]
    cast_parameters(model, torch.bfloat16, [model])
    seen = []
    linear.register_forward_hook(lambda module, inputs, output: seen.append((module.weight.dtype, inputs[0].dtype)))
    output = model(torch.randn(3, 4))
    assert (output.dtype, seen) == (torch.bfloat16, [(torch.bfloat16, torch.bfloat16)])
    assert linear.weight is parameters[0]
    with torch.no_grad():
        linear.weight.zero_()
    assert not parameters[0].any()
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert isinstance(linear, nn.Linear)
    assert type(linear) is type(model[2])
    assert repr(linear).startswith("Linear(")
    output.sum().backward()
    assert {p.grad.dtype for p in parameters} == {torch.float32}


def test_a_failed_forward_leaves_the_stored_parameters_in_sight() -> None:
    model = build()
    cast_parameters(model, torch.bfloat16, [model])
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert model[0].weight.dtype == torch.float32


def test_new_values_take_effect(tmp_path: Path) -> None:
    model, other = build(), build()
    cast_parameters(model, torch.bfloat16, [model])
    torch.save(other.state_dict(), tmp_path / "weights.pt")
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), other.to(torch.bfloat16)(x.to(torch.bfloat16)), rtol=0, atol=0)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert not model[0](x.to(torch.bfloat16).float()).sub(model[0].bias).any()
