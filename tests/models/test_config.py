"""Sizes, presets and their published parameter counts."""

from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from transformers import Llama4TextConfig, MixtralConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from models import AttentionTemperature, MoEConfig, RopeScaling, Transformer, TransformerConfig
from models.config import TransformerOverrides
from models.presets import PresetName
from tests.models.hugging_face import (
    MODELS,
    Describe,
    llama4_config,
    mixtral_config,
    qwen3_config,
    qwen3_moe_config,
)

PUBLISHED_PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
}


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        head_dim=128,
        hidden_size=hidden,
        intermediate_size=intermediate,
        max_position_embeddings=40_960,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        num_key_value_heads=8,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000,
        tie_word_embeddings=tied,
        vocab_size=151_936,
    )


# What the config.json of each model says about its architecture.
PUBLISHED: dict[PresetName, PreTrainedConfig] = {
    "qwen3_0_6b": qwen3(1024, 3072, layers=28, heads=16, tied=True),
    "qwen3_1_7b": qwen3(2048, 6144, layers=28, heads=16, tied=True),
    "qwen3_4b": qwen3(2560, 9728, layers=36, heads=32, tied=True),
    "qwen3_8b": qwen3(4096, 12_288, layers=36, heads=32),
    "qwen3_14b": qwen3(5120, 17_408, layers=40, heads=40),
    "qwen3_32b": qwen3(5120, 25_600, layers=64, heads=64),
    "qwen3_30b_a3b": Qwen3MoeConfig(
        decoder_sparse_step=1,
        head_dim=128,
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40_960,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000,
        tie_word_embeddings=False,
        vocab_size=151_936,
    ),
    "mixtral_8x7b": MixtralConfig(
        head_dim=128,  # which it leaves out: 4096 / 32
        hidden_size=4096,
        intermediate_size=14_336,
        max_position_embeddings=32_768,
        num_attention_heads=32,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_key_value_heads=8,
        num_local_experts=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000,
        sliding_window=None,
        tie_word_embeddings=False,
        vocab_size=32_000,
    ),
    # "text_config" of the base model, Llama-4-Scout-17B-16E. It leaves the temperature to the class's defaults.
    "llama4_scout": Llama4TextConfig(
        attention_chunk_size=8192,
        head_dim=128,
        hidden_size=5120,
        interleave_moe_layer_step=1,
        intermediate_size=8192,
        intermediate_size_mlp=16_384,
        max_position_embeddings=262_144,
        no_rope_layers=[],  # every fourth
        num_attention_heads=40,
        num_experts_per_tok=1,
        num_hidden_layers=48,
        num_key_value_heads=8,
        num_local_experts=16,
        rms_norm_eps=1e-5,
        rope_scaling={
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500_000.0,
        use_qk_norm=True,
        vocab_size=202_048,
    ),
}
DESCRIBE: dict[type[PreTrainedConfig], Describe] = {
    Qwen3Config: qwen3_config,
    Qwen3MoeConfig: qwen3_moe_config,
    MixtralConfig: mixtral_config,
    Llama4TextConfig: llama4_config,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_preset_has_the_published_number_of_parameters(name: PresetName, published: int) -> None:
    assert TransformerConfig.preset(name).num_parameters == published


@pytest.mark.parametrize("name", get_args(PresetName))
def test_number_of_parameters_is_that_of_the_model(name: PresetName) -> None:
    config = TransformerConfig.preset(name)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_equals_the_published_configuration(name: PresetName) -> None:
    published = PUBLISHED[name]
    ours = DESCRIBE[type(published)](TransformerConfig.preset(name))
    assert ours.to_dict() == published.to_dict()


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_and_active_parameters_are_those_of_hugging_face(name: PresetName) -> None:
    config, published = TransformerConfig.preset(name), PUBLISHED[name]
    with torch.device("meta"):
        sizes = {key: p.numel() for key, p in MODELS[type(published)](published).named_parameters()}
    assert config.num_parameters == sum(sizes.values())
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    idle = experts - experts * published.num_experts_per_tok // published.num_local_experts if experts else 0
    assert config.num_active_parameters == sum(sizes.values()) - idle


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3_30b_a3b", 3.35), ("mixtral_8x7b", 12.9), ("llama4_scout", 17.2)]
)
def test_active_parameters_are_those_in_the_name(name: PresetName, billions: float) -> None:
    assert TransformerConfig.preset(name).num_active_parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_blocks_with_experts_and_rotary_embedding() -> None:
    config = TransformerConfig.preset("debug_moe", n_layers=7, nope_interval=3)
    assert config.moe is not None
    assert config.moe_layers == [0, 1, 2, 3, 4, 5, 6]
    assert config.override(moe=replace(config.moe, interval=2)).moe_layers == [1, 3, 5]
    assert config.override(moe=None).moe_layers == []
    assert [config.has_rope(layer_id) for layer_id in range(7)] == [True, True, False, True, True, False, True]
    assert all(config.override(nope_interval=None).has_rope(layer_id) for layer_id in range(7))


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
        ({"n_layers": True}, "n_layers=True must be an integer"),
        ({"nope_interval": 0}, "nope_interval=0 must be an integer of at least 1"),
        ({"attention_chunk": 0}, "attention_chunk=0 must be an integer of at least 1"),
        ({"qk_norm": "layer"}, "qk_norm='layer' must be rms, l2 or null"),
        ({"moe": MoEConfig(4, 1, 8), "dim": 36}, "dim=36 must be a multiple of 8 with experts"),
        ({"moe": MoEConfig(4, 1, 8, interval=3)}, "moe.interval=3 leaves all n_layers=2 blocks dense"),
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
            {"low_freq_factor": 5.0},
            "low_freq_factor=5.0 must be positive and at most rope_scaling.high_freq_factor=4.0",
        ),
        ({"low_freq_factor": 0.0}, "low_freq_factor=0.0 must be positive"),
        ({"original_max_sequence_length": 0}, "original_max_sequence_length=0"),
    ],
)
def test_bad_rope_scaling_is_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 0}, "moe.num_experts=0 must be an integer of at least 1"),
        ({"top_k": 0}, "moe.top_k=0 must be an integer of at least 1"),
        ({"expert_dim": 8.0}, "moe.expert_dim=8.0 must be an integer of at least 1"),
        ({"interval": True}, "moe.interval=True must be an integer of at least 1"),
        ({"expert_groups": 0}, "moe.expert_groups=0 must be an integer of at least 1"),
        ({"groups_per_token": -1}, "moe.groups_per_token=-1 must be an integer of at least 1"),
        ({"score": "tanh"}, "moe.score='tanh' must be softmax or sigmoid"),
        ({"expert_dim": 20}, "moe.expert_dim=20 must be a multiple of 8"),
        ({"shared_dim": -8}, "moe.shared_dim=-8 must be at least 0"),
        ({"balance_rate": -1e-3}, "moe.balance_rate=-0.001 must be at least 0"),
        ({"auxiliary_loss": -0.1}, "moe.auxiliary_loss=-0.1 must be at least 0"),
        ({"expert_groups": 3}, "moe.expert_groups=3 must divide moe.num_experts=8"),
        ({"expert_groups": 2, "groups_per_token": 4}, "moe.groups_per_token=4 must be at most moe.expert_groups=2"),
        ({"top_k": 9}, r"moe.top_k=9 must be from 1 to 8, .*\(moe.num_experts=8\)"),
        (
            {"top_k": 5, "expert_groups": 4, "groups_per_token": 2},
            r"moe.top_k=5 must be from 1 to 4, .*\(moe.num_experts=8 in 2 of 4 groups\)",
        ),
    ],
)
def test_bad_experts_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{"num_experts": 8, "top_k": 2, "expert_dim": 16} | values)


def test_selectable_experts() -> None:
    assert MoEConfig(8, 8, 16).selectable_experts == 8
    assert MoEConfig(8, 6, 16, expert_groups=4, groups_per_token=3).selectable_experts == 6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"floor_scale": 0}, "attention_temperature.floor_scale=0 must be an integer of at least 1"),
        ({"scale": -0.1}, "attention_temperature.scale=-0.1 must be at least 0"),
    ],
)
def test_bad_attention_temperature_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionTemperature(**values)


def test_flops_per_token_of_llama3_8b() -> None:
    # Independently: 6 per matrix weight, 8.03e9 less the 525 336 576 of the embedding; 12 * 32 layers * 4096 * 8192.
    expected = 6 * (8_030_261_248 - 525_336_576) + 12 * 32 * 4096 * 8192
    assert TransformerConfig.preset("llama3_8b").flops_per_token(8192) == expected


def test_flops_count_a_tied_head() -> None:
    tied = TransformerConfig.preset("debug", tie_embeddings=True)
    assert tied.num_parameters < TransformerConfig.preset("debug").num_parameters
    assert tied.flops_per_token(64) == TransformerConfig.preset("debug").flops_per_token(64)


def test_flops_count_the_experts_that_a_token_uses() -> None:
    # Independently, per block of Qwen3-30B-A3B: attention of 32 + 4 + 4 + 32 heads, norms, router, 8 of 128 experts.
    block = 72 * 128 * 2048 + 2 * (2048 + 128) + 2048 * 128 + 8 * 3 * 768 * 2048
    expected = 6 * (48 * block + 2048 + 151_936 * 2048) + 12 * 48 * 32 * 128 * 4096
    assert TransformerConfig.preset("qwen3_30b_a3b").flops_per_token(4096) == expected
