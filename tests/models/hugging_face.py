"""Hugging Face's models as oracles: made from our configurations, their weights and gradients in our layout."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from models import MoEConfig, Transformer, TransformerConfig

Describe = Callable[[TransformerConfig], PreTrainedConfig]

MODELS: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {
    LlamaConfig: LlamaForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
    MixtralConfig: MixtralForCausalLM,
    Llama4TextConfig: Llama4ForCausalLM,
}

# Replaced in this order: a name comes before those that are a part of it.
OUR_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "mlp.experts": "moe.routed.experts",
    "mlp.gate.": "moe.routed.router.gate.",
    "feed_forward.experts": "moe.routed.experts",
    "feed_forward.router": "moe.routed.router.gate",
    "feed_forward.shared_expert": "moe.shared",
    "mlp": "feed_forward",
    "gate_up_proj": "w1_w3",  # both input projections of the experts, stacked
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "lm_head": "output",
}


def llama_config(config: TransformerConfig) -> LlamaConfig:
    return LlamaConfig(**_sizes(config))


def qwen3_config(config: TransformerConfig) -> Qwen3Config:
    assert config.qk_norm == "rms"
    return Qwen3Config(**_sizes(config))


def qwen3_moe_config(config: TransformerConfig) -> Qwen3MoeConfig:
    moe = _experts(config, score="softmax", score_before_experts=False, shared_dim=0)
    assert config.qk_norm == "rms"
    return Qwen3MoeConfig(
        **_sizes(config),
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.expert_dim,
        norm_topk_prob=moe.renormalise,
        decoder_sparse_step=moe.interval,
    )


def mixtral_config(config: TransformerConfig) -> MixtralConfig:
    moe = _experts(config, score="softmax", score_before_experts=False, shared_dim=0, renormalise=True, interval=1)
    sizes = _sizes(config) | {"intermediate_size": moe.expert_dim}
    return MixtralConfig(**sizes, num_local_experts=moe.num_experts, num_experts_per_tok=moe.top_k)


def llama4_config(config: TransformerConfig) -> Llama4TextConfig:
    moe = _experts(config, score="sigmoid", score_before_experts=True, renormalise=False)
    assert moe.shared_dim == moe.expert_dim, "Llama 4 has one width for both"
    temperature = config.attention_temperature
    scales = {} if temperature is None else {"floor_scale": temperature.floor_scale, "attn_scale": temperature.scale}
    return Llama4TextConfig(
        **_sizes(config) | {"intermediate_size": moe.expert_dim},
        **scales,
        intermediate_size_mlp=config.ffn_dim,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        interleave_moe_layer_step=moe.interval,
        no_rope_layers=[int(config.has_rope(layer_id)) for layer_id in range(config.n_layers)],
        attention_chunk_size=config.attention_chunk,
        use_qk_norm=config.qk_norm == "l2",
        attn_temperature_tuning=temperature is not None,
    )


def _experts(config: TransformerConfig, **fixed: object) -> MoEConfig:
    """The configuration of the experts, in which a family fixes what it has no name for."""
    assert config.moe is not None
    assert replace(config.moe, route_scale=1.0, expert_groups=1, **fixed) == config.moe  # type: ignore[arg-type]
    return config.moe


def _sizes(config: TransformerConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_sequence_length,
        },
        # Their plainest code: the fast paths are what we would be compared with ourselves.
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Hugging Face's model with weights large enough that each part shows in the logits."""
    torch.manual_seed(0)
    model = MODELS[type(config)](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


def weights_of(theirs: PreTrainedModel) -> dict[str, Tensor]:
    """What `Transformer.load_state_dict` takes."""
    return _in_our_form(theirs, theirs.state_dict())


def gradients_of(theirs: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of our parameters."""
    return _in_our_form(theirs, {name: parameter.grad for name, parameter in theirs.named_parameters()})


def _in_our_form(theirs: PreTrainedModel, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    is_llama4 = isinstance(theirs, Llama4ForCausalLM)
    for their_name, tensor in tensors.items():
        assert tensor is not None, f"{their_name} has no gradient"
        name = our_name(their_name)
        if is_llama4 and ".routed.experts." in name:
            tensor = tensor.transpose(1, 2)  # (experts, in, out) to (experts, out, in)
        if is_llama4 and name.endswith(("wq.weight", "wk.weight")):
            tensor = _halves_from_pairs(tensor, theirs.config.head_dim)
        if name.endswith("w1_w3"):
            prefix = name.removesuffix("w1_w3")
            result[f"{prefix}w1"], result[f"{prefix}w3"] = tensor.chunk(2, dim=1)
        else:
            result[name] = tensor
    return result


def _halves_from_pairs(weight: Tensor, head_size: int) -> Tensor:
    """Llama 4 turns channels 2i and 2i + 1 of a head together, we turn i and i + head_size / 2."""
    return weight.unflatten(0, (-1, head_size // 2, 2)).transpose(1, 2).flatten(0, 2)


def our_name(name: str) -> str:
    for theirs, ours in OUR_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def assert_logits_and_gradients_equal(ours: Transformer, theirs: PreTrainedModel, batch: int, length: int) -> None:
    """Of the summed cross-entropy over random tokens, for every parameter."""
    tokens, labels = torch.randint(ours.config.vocab_size, (2, batch, length)).unbind()
    logits, expected = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.3, "logits too small for the comparison to mean anything"
    assert_equal(logits, expected, "logits")
    for output in (logits, expected):
        nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    gradients, references = {name: p.grad for name, p in ours.named_parameters()}, gradients_of(theirs)
    assert gradients.keys() == references.keys()
    for name, gradient in gradients.items():
        assert_equal(gradient, references[name], name)


def assert_equal(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Equal to 1e-5 of the largest entry, or to 1e-6 where all of it is zero (one token has no choice to attend to)."""
    assert actual is not None, what
    assert expected is not None, what
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    error = (actual - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max() + 1e-6, f"{what}: off by {error} of {expected.abs().max()}"
