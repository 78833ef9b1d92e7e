"""Each family of models against Hugging Face's code: logits, and the gradients of all parameters."""

import pytest
import torch

from models import AttentionTemperature, MoEConfig, RopeScaling, Transformer, TransformerConfig
from models.config import TransformerOverrides
from models.moe import Router
from tests.models.hugging_face import (
    Describe,
    assert_logits_and_gradients_equal,
    llama4_config,
    mixtral_config,
    qwen3_config,
    qwen3_moe_config,
    random_model,
    weights_of,
)

BATCH, LENGTH = 2, 50

QWEN3: TransformerOverrides = {"qk_norm": "rms", "head_dim": 16, "norm_eps": 1e-3}
QWEN3_EXPERTS = MoEConfig(num_experts=8, top_k=3, expert_dim=24, renormalise=True)
LLAMA4: TransformerOverrides = {
    "n_layers": 4,
    "nope_interval": 4,
    "attention_chunk": 16,  # which does not divide LENGTH
    "qk_norm": "l2",
    "norm_eps": 1e-3,
    "attention_temperature": AttentionTemperature(floor_scale=8, scale=0.3),
    "rope_scaling": RopeScaling(16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_sequence_length=64),
}
LLAMA4_EXPERTS = MoEConfig(
    num_experts=4, top_k=1, expert_dim=48, shared_dim=48, score="sigmoid", score_before_experts=True
)

FAMILIES: dict[str, tuple[Describe, TransformerOverrides]] = {
    "qwen3": (qwen3_config, QWEN3),
    "qwen3_tied": (qwen3_config, QWEN3 | {"tie_embeddings": True}),
    "qwen3_moe": (qwen3_moe_config, QWEN3 | {"moe": QWEN3_EXPERTS}),
    "qwen3_moe_every_second_block": (
        qwen3_moe_config,
        QWEN3 | {"n_layers": 4, "moe": MoEConfig(num_experts=6, top_k=2, expert_dim=24, interval=2)},
    ),
    "mixtral": (mixtral_config, {"moe": MoEConfig(num_experts=8, top_k=2, expert_dim=96, renormalise=True)}),
    "llama4": (llama4_config, LLAMA4 | {"moe": LLAMA4_EXPERTS}),
    "llama4_every_second_block": (
        llama4_config,
        LLAMA4
        | {
            "moe": MoEConfig(
                num_experts=4,
                top_k=2,
                expert_dim=48,
                shared_dim=48,
                interval=2,
                score="sigmoid",
                score_before_experts=True,
            )
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_hugging_face(family: str) -> None:
    describe, overrides = FAMILIES[family]
    config = TransformerConfig.preset("debug", **overrides)
    theirs = random_model(describe(config))
    ours = Transformer(config)
    ours.load_state_dict(weights_of(theirs))
    assert_logits_and_gradients_equal(ours, theirs, BATCH, LENGTH)

    routers = [module for module in ours.modules() if isinstance(module, Router)]
    assert len(routers) == len(config.moe_layers)
    for router in routers:
        load = router.statistics[:-2]
        assert load.min() > 0, "an expert without tokens was not compared"
        assert load.sum() == BATCH * LENGTH * router.config.top_k


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"norm_eps": 1e-5}),
        ("qwen3_moe", {"moe": MoEConfig(num_experts=8, top_k=3, expert_dim=24)}),
        ("llama4", {"nope_interval": None}),
        ("llama4", {"attention_chunk": None}),
        ("llama4", {"attention_chunk": 17}),
        ("llama4", {"qk_norm": None}),
        ("llama4", {"norm_eps": 1e-5}),
        ("llama4", {"attention_temperature": None}),
        ("llama4", {"attention_temperature": AttentionTemperature(floor_scale=9, scale=0.3)}),
        ("llama4", {"rope_scaling": None}),
        ("llama4", {"moe": MoEConfig(4, 1, 48, 48, score="sigmoid")}),
        ("llama4", {"moe": MoEConfig(4, 1, 48, 48, score_before_experts=True)}),
    ],
)
def test_logits_show_each_feature(family: str, overrides: TransformerOverrides) -> None:
    """The comparison would notice if one feature were missing: without it the logits differ."""
    torch.manual_seed(0)
    describe, usual = FAMILIES[family]
    config = TransformerConfig.preset("debug", **usual)
    weights = weights_of(random_model(describe(config)))
    tokens = torch.randint(config.vocab_size, (BATCH, LENGTH))
    with torch.no_grad():
        logits, changed = (_logits(config, weights, tokens), _logits(config.override(**overrides), weights, tokens))
    assert (logits - changed).abs().max() > 1e-3 * logits.abs().max()


def _logits(config: TransformerConfig, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    model = Transformer(config)
    model.load_state_dict(weights)
    logits: torch.Tensor = model(tokens)
    return logits
