"""Sizes, presets and their published parameter counts."""

from dataclasses import fields
from typing import get_args

import pytest
import torch

from models import RopeScaling, Transformer, TransformerConfig
from models.config import PresetName, TransformerOverrides

PUBLISHED_PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_preset_has_the_published_number_of_parameters(name: PresetName, published: int) -> None:
    config = TransformerConfig.preset(name)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == published
    assert config.num_parameters == published


@pytest.mark.parametrize("name", get_args(PresetName))
def test_every_declared_name_is_a_preset(name: PresetName) -> None:
    assert TransformerConfig.preset(name).n_layers > 0


def test_unknown_preset_lists_the_valid_names() -> None:
    with pytest.raises(ValueError, match=r"'llama3_8B'; valid names: .*llama3_8b, llama3_70b"):
        TransformerConfig.preset("llama3_8B")  # type: ignore[arg-type]


def test_preset_with_overrides() -> None:
    config = TransformerConfig.preset("llama3_8b", n_layers=2, vocab_size=512)
    assert (config.n_layers, config.vocab_size, config.dim) == (2, 512, 4096)


def test_unknown_override_is_named_with_the_valid_fields() -> None:
    with pytest.raises(ValueError, match="layers; valid: vocab_size, dim, n_layers"):
        TransformerConfig.preset("debug", layers=3)  # type: ignore[call-arg]


def test_overrides_declare_the_same_fields_and_types() -> None:
    assert TransformerOverrides.__annotations__ == {field.name: field.type for field in fields(TransformerConfig)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_layers": 0}, "n_layers=0 must be an integer of at least 1"),
        ({"vocab_size": 2.5}, "vocab_size=2.5 must be an integer"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 must divide n_heads=4"),
        ({"dim": 34}, "n_heads=4 must divide dim=34"),
        ({"dim": 20}, "dim=20 / n_heads=4 = 5 must be even"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be greater than 0"),
    ],
)
def test_bad_sizes_are_named(overrides: TransformerOverrides, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig.preset("debug", **overrides)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"factor": 0.5}, "factor=0.5 must be at least 1"),
        (
            {"low_freq_factor": 4.0},
            "low_freq_factor=4.0 must be positive and less than rope_scaling.high_freq_factor=4.0",
        ),
        ({"original_max_sequence_length": 0}, "original_max_sequence_length=0"),
    ],
)
def test_bad_rope_scaling_is_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**values)  # type: ignore[arg-type]


def test_flops_per_token_of_llama3_8b() -> None:
    # Independently: 6 per matrix weight, 8.03e9 less the 525 336 576 of the embedding; 12 * 32 layers * 4096 * 8192.
    expected = 6 * (8_030_261_248 - 525_336_576) + 12 * 32 * 4096 * 8192
    assert TransformerConfig.preset("llama3_8b").flops_per_token(8192) == expected


def test_flops_count_a_tied_head() -> None:
    tied = TransformerConfig.preset("debug", tie_embeddings=True)
    assert tied.num_parameters < TransformerConfig.preset("debug").num_parameters
    assert tied.flops_per_token(64) == TransformerConfig.preset("debug").flops_per_token(64)
