"""Initial values from the meta device: the same in every layout, complete, or an error that says what is missing."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.core.modules import SEED, full_state, prepare
from titan_strategy.materialize import materialize

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Sizes that four ranks cannot share evenly: some hold nothing of some tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 3)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5)
        self.norm = nn.LayerNorm(3)
        self.batch_norm = nn.BatchNorm1d(5)
        self.attention = nn.MultiheadAttention(6, 2)
        self.encoder = nn.TransformerEncoderLayer(6, 2, dim_feedforward=7)
        self.conv = nn.Conv1d(3, 2, 3)
        self.scale = Scale()
        self.head = nn.Linear(3, 13, bias=False)
        self.head.weight = self.embedding.weight


class Scale(nn.Module):
    """Its own parameter, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("counter", torch.empty((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))
        self.register_buffer("bytes", torch.empty(3, dtype=torch.uint8))
        self.register_buffer("replaced", torch.empty(2), persistent=False)

    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)
        self.table.copy_(torch.arange(4.0))
        self.counter.zero_()
        self.mask.copy_(torch.tensor([True, False, True]))
        self.bytes.zero_()
        self.replaced = torch.tensor([3.0, 4.0])


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def initialised(build: Callable[[], nn.Module], seed: int = SEED) -> nn.Module:
    model = on_meta(build)
    materialize(model, CPU, CPU, seed)
    return model


def reference() -> dict[str, Tensor]:
    root = nn.Module()  # the names are relative to the LightningModule
    with torch.device("meta"):
        root.net = Odd()
    materialize(root, CPU, CPU, SEED)
    return full_state(root.net)


def prepare_odd(options: dict[str, Any], precision: str) -> dict[str, Any]:
    model = prepare(Odd, {"precision": precision}, **options)
    return {
        "state": full_state(model),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "empty": sum(p.to_local().numel() == 0 for p in model.parameters()),
        "tied": model.head.weight is model.embedding.weight,
    }


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (4, {}),
        (4, {"data_parallel_replicate_size": 2}),
        (4, {"data_parallel_replicate_size": 4}),
    ],
    ids=["one", "shard2", "shard4", "hsdp", "replicate4"],
)
def test_values_do_not_depend_on_the_layout(rank_pool, ranks: int, options: dict[str, Any]) -> None:
    expected = reference()
    answers = rank_pool.run(prepare_odd, ranks, options, "32-true")
    for answer in answers:
        assert answer["state"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(answer["state"][name], value), name
        assert answer["sharded"]
        assert answer["tied"]
    if ranks == 4 and not options:
        assert answers[3]["empty"] > 3, "the case is meant to have ranks without elements"


def test_bf16_weights_are_the_rounded_float32_ones(rank_pool) -> None:
    expected = reference()
    for answer in rank_pool.run(prepare_odd, 2, {}, "bf16-true"):
        for name, value in answer["state"].items():
            parameter = name in dict(on_meta(Odd).named_parameters())
            rounded = expected[name].bfloat16() if parameter else expected[name]
            assert value.dtype == rounded.dtype, name
            assert torch.equal(value, rounded), name


def test_a_private_initialiser_that_was_made_public_is_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference()
    # What importing lightning.pytorch.demos does.
    private = nn.MultiheadAttention._reset_parameters
    monkeypatch.setattr(nn.MultiheadAttention, "reset_parameters", private, raising=False)
    state = reference()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_values_are_those_of_torch_initialisers() -> None:
    state = reference()
    # nn.Linear draws from U(-1/sqrt(in), 1/sqrt(in)), nn.Embedding from N(0, 1).
    bound = 3**-0.5
    assert 0.7 * bound < state["first.weight"].abs().max() <= bound
    assert 0.6 < state["embedding.weight"].std() < 1.4
    assert torch.equal(state["norm.weight"], torch.ones(3))
    assert torch.equal(state["batch_norm.running_var"], torch.ones(5))
    assert state["batch_norm.num_batches_tracked"] == 0
    # MultiheadAttention's own method zeroes the bias of its child and leaves the child's weight to it.
    assert torch.equal(state["attention.out_proj.bias"], torch.zeros(6))
    assert 0 < state["attention.out_proj.weight"].abs().max() <= 6**-0.5


def test_buffers_are_rebuilt() -> None:
    scale = initialised(Scale)
    assert scale.scale == 0.5
    assert torch.equal(scale.table, torch.arange(4.0))
    assert scale.counter == 0
    assert scale.counter.dtype == torch.int64
    assert torch.equal(scale.mask, torch.tensor([True, False, True]))
    assert torch.equal(scale.bytes, torch.zeros(3, dtype=torch.uint8))
    assert torch.equal(scale.replaced, torch.tensor([3.0, 4.0]))
    assert "table" not in scale.state_dict()


def test_equal_layers_and_other_seeds_differ() -> None:
    model = initialised(Odd)
    assert not torch.equal(model.first.weight, model.second.weight)
    assert not torch.equal(model.first.weight, initialised(Odd, SEED + 1).first.weight)
    assert torch.equal(model.first.weight, initialised(Odd, SEED).first.weight)


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    initialised(Odd)
    assert torch.equal(torch.get_rng_state(), before)


def prepare_seeds() -> dict[str, Tensor]:
    weights = {}
    for name, everything, seed in [("argument", None, 3), ("everything", 3, None), ("both", 4, 3), ("other", 4, None)]:
        if everything is not None:
            pl.seed_everything(everything, verbose=False)
        weights[name] = full_state(prepare(lambda: nn.Linear(3, 3), seed=seed))["weight"]
    return weights


def prepare_without_seed() -> Tensor:
    return full_state(prepare(lambda: nn.Linear(3, 3), seed=None))["weight"]


def test_seed_is_the_argument_else_that_of_seed_everything(rank_pool) -> None:
    weights = rank_pool.run(prepare_seeds, 1)[0]
    assert torch.equal(weights["argument"], weights["everything"])
    assert torch.equal(weights["argument"], weights["both"])
    assert not torch.equal(weights["argument"], weights["other"])
    # Drawn at random, but by one rank: the shards come from one draw.
    once, again = (rank_pool.run(prepare_without_seed, 2) for _ in range(2))
    assert torch.equal(once[0], once[1])
    assert not torch.equal(once[0], again[0])


def test_nothing_is_left_uninitialised() -> None:
    """Torch's own tool for it: memory that nobody wrote is NaN."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]
    try:
        assert torch.empty(3).isnan().all()
        for name, value in full_state(initialised(Odd)).items():
            assert not value.is_floating_point() or value.isfinite().all(), name
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[assignment]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(2), persistent=False)


class Forgetful(Bare):
    """Fills one parameter, half of another, and no buffer."""

    def reset_parameters(self) -> None:
        self.gain.fill_(1.0)
        self.bias[:2] = 0.0


class Meddling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.own)
        nn.init.zeros_(self.child.weight)


class Data(Meddling):
    """Writes past autograd's version counter, as many older initialisers do."""

    def reset_parameters(self) -> None:
        self.own.data.zero_()
        self.child.weight.data.zero_()


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (Bare, ["layer.bias", "layer.gain", "layer.table"]),
        (Forgetful, ["layer.bias", "layer.table"]),
    ],
)
def test_tensors_without_a_value_are_named(build: Callable[[], nn.Module], named: list[str]) -> None:
    with pytest.raises(RuntimeError, match="left without a value: " + ", ".join(named) + r"\. The module that owns"):
        initialised(lambda: nn.ModuleDict({"layer": build(), "fine": nn.Linear(2, 2)}))


@pytest.mark.parametrize("build", [Meddling, Data])
def test_an_initialiser_keeps_to_its_own_tensors(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(RuntimeError, match=r"reset_parameters\(\) of 'layer' wrote to the parameters of its children"):
        initialised(lambda: nn.ModuleDict({"layer": build()}))


def test_modules_with_values_keep_them() -> None:
    real = nn.Linear(2, 2)
    before = real.weight.detach().clone()
    model = on_meta(lambda: nn.ModuleDict({"meta": nn.Linear(2, 2)}))
    model["real"] = real
    materialize(model, CPU, CPU, SEED)
    assert torch.equal(model["real"].weight, before)
    assert not model["meta"].weight.is_meta


def test_tied_parameters_take_the_value_of_their_first_owner() -> None:
    def tie(first: str, second: str) -> nn.ModuleDict:
        model = nn.ModuleDict({first: nn.Embedding(4, 3), second: nn.Linear(3, 4, bias=False)})
        model[second].weight = model[first].weight
        return model

    model = initialised(lambda: tie("a", "b"))
    assert model["a"].weight is model["b"].weight
    alone = initialised(lambda: nn.ModuleDict({"a": nn.Embedding(4, 3)}))
    assert torch.equal(model["a"].weight, alone["a"].weight)
