"""The published sizes of models, by name."""

from collections.abc import Mapping
from typing import Literal

from models.config import AttentionTemperature, MoEConfig, RopeScaling, TransformerConfig

PresetName = Literal[
    "debug",
    "debug_moe",
    "tiny",
    "llama2_7b",
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "llama3_2_1b",
    "llama3_2_3b",
    "llama4_scout",
    "qwen3_0_6b",
    "qwen3_1_7b",
    "qwen3_4b",
    "qwen3_8b",
    "qwen3_14b",
    "qwen3_32b",
    "qwen3_30b_a3b",
    "mixtral_8x7b",
]


def _qwen3(
    dim: int,
    n_layers: int,
    n_heads: int,
    ffn_dim: int,
    n_kv_heads: int = 8,
    tie_embeddings: bool = False,
    moe: MoEConfig | None = None,
) -> TransformerConfig:
    """What all Qwen3 models have in common (arXiv:2505.09388 and their config.json)."""
    return TransformerConfig(
        vocab_size=151_936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=128,
        ffn_dim=ffn_dim,
        max_sequence_length=40_960,
        rope_theta=1_000_000.0,
        qk_norm="rms",
        norm_eps=1e-6,
        tie_embeddings=tie_embeddings,
        moe=moe,
    )


# The sizes are those of the published config.json files; the debug ones and `tiny` are ours, for tests and a laptop.
PRESETS: Mapping[PresetName, TransformerConfig] = {
    "debug": TransformerConfig(
        vocab_size=256,
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=96,
        max_sequence_length=128,
        rope_theta=10_000.0,
    ),
    "debug_moe": TransformerConfig(
        vocab_size=256,
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=96,
        max_sequence_length=128,
        rope_theta=10_000.0,
        moe=MoEConfig(num_experts=8, top_k=2, expert_dim=48, shared_dim=48, balance_rate=1e-3),
    ),
    "tiny": TransformerConfig(
        vocab_size=8192,
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        max_sequence_length=1024,
        rope_theta=10_000.0,
    ),
    "llama2_7b": TransformerConfig(
        vocab_size=32_000,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        ffn_dim=11_008,
        max_sequence_length=4096,
        rope_theta=10_000.0,
    ),
    "llama3_8b": TransformerConfig(
        vocab_size=128_256,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=14_336,
        max_sequence_length=8192,
    ),
    "llama3_70b": TransformerConfig(
        vocab_size=128_256,
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        ffn_dim=28_672,
        max_sequence_length=8192,
    ),
    "llama3_405b": TransformerConfig(  # Llama 3.1
        vocab_size=128_256,
        dim=16_384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        ffn_dim=53_248,
        max_sequence_length=131_072,
        rope_scaling=RopeScaling(factor=8.0),
    ),
    "llama3_2_1b": TransformerConfig(
        vocab_size=128_256,
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        max_sequence_length=131_072,
        rope_scaling=RopeScaling(factor=32.0),
        tie_embeddings=True,
    ),
    "llama3_2_3b": TransformerConfig(
        vocab_size=128_256,
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_dim=8192,
        max_sequence_length=131_072,
        rope_scaling=RopeScaling(factor=32.0),
        tie_embeddings=True,
    ),
    "llama4_scout": TransformerConfig(  # the text model of Llama-4-Scout-17B-16E
        vocab_size=202_048,
        dim=5120,
        n_layers=48,
        n_heads=40,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=16_384,  # unused: every block has experts
        # The published maximum is 10,485,760 after long-context training; this is the context of its pre-training.
        max_sequence_length=262_144,
        rope_scaling=RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0),
        nope_interval=4,
        attention_chunk=8192,
        qk_norm="l2",
        attention_temperature=AttentionTemperature(floor_scale=8192, scale=0.1),
        moe=MoEConfig(
            num_experts=16, top_k=1, expert_dim=8192, shared_dim=8192, score="sigmoid", score_before_experts=True
        ),
    ),
    "qwen3_0_6b": _qwen3(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tie_embeddings=True),
    "qwen3_1_7b": _qwen3(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, tie_embeddings=True),
    "qwen3_4b": _qwen3(dim=2560, n_layers=36, n_heads=32, ffn_dim=9728, tie_embeddings=True),
    "qwen3_8b": _qwen3(dim=4096, n_layers=36, n_heads=32, ffn_dim=12_288),
    "qwen3_14b": _qwen3(dim=5120, n_layers=40, n_heads=40, ffn_dim=17_408),
    "qwen3_32b": _qwen3(dim=5120, n_layers=64, n_heads=64, ffn_dim=25_600),
    "qwen3_30b_a3b": _qwen3(
        dim=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        ffn_dim=6144,  # unused: every block has experts
        moe=MoEConfig(num_experts=128, top_k=8, expert_dim=768, renormalise=True),
    ),
    "mixtral_8x7b": TransformerConfig(
        vocab_size=32_000,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=14_336,  # unused: every block has experts
        max_sequence_length=32_768,
        rope_theta=1_000_000.0,
        moe=MoEConfig(num_experts=8, top_k=2, expert_dim=14_336, renormalise=True),
    ),
}
