"""Name patterns, and the blocks of models that have no plan."""

import pytest
from torch import Tensor, nn

from titan_strategy.data_parallel import Units, find_blocks, find_units
from titan_strategy.plan import ParallelPlan, match_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.attention(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 4)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Decoder(), Decoder()
        self.bridge = nn.Linear(2, 2)


def test_star_is_one_component_and_order_is_that_of_registration() -> None:
    model = Decoder()
    assert list(match_modules(model, "layers.*", "plan.blocks")) == [f"layers.{i}" for i in range(12)]
    assert list(match_modules(model, "layers.*.attention", "plan.blocks")) == [
        f"layers.{i}.attention" for i in range(12)
    ]
    assert list(match_modules(model, "*", "plan.blocks")) == ["embedding", "layers", "norm", "head"]
    assert list(match_modules(model, "layers.1*", "plan.blocks")) == ["layers.10", "layers.11"]
    assert list(match_modules(EncoderDecoder(), "*.layers.0", "plan.blocks")) == [
        "encoder.layers.0",
        "decoder.layers.0",
    ]


def test_other_characters_of_a_pattern_are_themselves() -> None:
    with pytest.raises(ValueError, match=r"matches no module"):
        match_modules(Decoder(), "layers.[0-9]+", "plan.blocks")
    with pytest.raises(ValueError, match=r"matches no module"):
        match_modules(Decoder(), "layersX0", "plan.blocks")


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layer.*", r"Names close to it: .*layers\.\*"),
        ("layers.*.attn", r"Names close to it: .*layers\.\*\.attention"),
        ("transformer.h.*.mlp", r"Its modules are: embedding, layers, layers\.\*, .*layers\.\*\.attention"),
    ],
)
def test_a_pattern_without_a_match_is_told_what_comes_near(pattern: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"plan\.blocks: the pattern '{pattern.replace('*', '.')}'") as error:
        match_modules(Decoder(), pattern, "plan.blocks")
    assert error.match(hint)


@pytest.mark.parametrize("argument", ["blocks", "before", "after", "experts"])
def test_each_name_of_a_plan_must_match(argument: str) -> None:
    wrong = {argument: "block.*"} if argument in ("blocks", "experts") else {argument: ("norn",)}
    with pytest.raises(ValueError, match=rf"plan\.{argument}: the pattern"):
        find_units(Decoder(), ParallelPlan(**{"blocks": "layers.*", **wrong}))


def test_units_of_a_plan() -> None:
    model = Decoder()
    plan = ParallelPlan(blocks="layers.*", before=("embedding",), after=("norm", "head"))
    expected = Units(before=(model.embedding,), blocks=tuple(model.layers), after=(model.norm, model.head))
    assert find_units(model, plan) == expected


def test_blocks_of_an_encoder_and_a_decoder_are_found() -> None:
    model = EncoderDecoder()
    assert find_blocks(model) == [*model.encoder.layers, *model.decoder.layers]
    assert find_units(model, None).blocks == (*model.encoder.layers, *model.decoder.layers)


def test_blocks_are_those_of_the_outermost_container_of_equals() -> None:
    stages = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3)))
    assert find_blocks(nn.ModuleDict({"body": stages})) == list(stages)
    # Unequal members are no blocks; the search goes on inside them.
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Block(), Block()))
    assert find_blocks(nn.ModuleDict({"body": mixed})) == list(mixed[1])


def test_blocks_in_a_container_at_the_root() -> None:
    body = nn.Sequential(Block(), Block())
    assert find_blocks(body) == list(body)


def test_lists_of_lists_are_searched() -> None:
    stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    assert find_blocks(stages) == [*stages[0], *stages[1]]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.ModuleDict({"act": nn.Sequential(nn.ReLU(), nn.ReLU())}),  # nothing to shard
        nn.ModuleDict({"body": nn.ModuleList([Block()])}),  # nothing repeats
        nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))}),
    ],
)
def test_a_model_without_repeated_blocks_has_none(model: nn.Module) -> None:
    assert find_blocks(model) == []
