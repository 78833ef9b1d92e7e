"""The transformer against Hugging Face's Llama, and the contracts that splitting and initialisation rely on."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models import AttentionTemperature, MoEConfig, RopeScaling, Transformer, TransformerConfig
from models.attention import rotary_frequencies
from models.config import TransformerOverrides
from tests.models.hugging_face import assert_logits_and_gradients_equal, llama_config, random_model, weights_of
from titan_strategy.plan import match_modules

SCALED = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_sequence_length=16)
VARIANTS: dict[str, TransformerOverrides] = {
    "grouped_query": {"n_heads": 4, "n_kv_heads": 2},
    "multi_head": {"n_heads": 4, "n_kv_heads": 4},
    "multi_query": {"n_heads": 4, "n_kv_heads": 1},
    "scaled_rope": {"rope_scaling": SCALED},
    "tied": {"tie_embeddings": True},
    "tied_scaled_wide_heads": {"tie_embeddings": True, "rope_scaling": SCALED, "head_dim": 16, "norm_eps": 1e-3},
}

FAMILIES: dict[str, TransformerOverrides] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "qwen3": {"qk_norm": "rms"},
    "experts": {"moe": MoEConfig(4, 2, 48)},
    "llama4": {
        "qk_norm": "l2",
        "nope_interval": 2,
        "attention_chunk": 4,
        "attention_temperature": AttentionTemperature(floor_scale=4),
        "moe": MoEConfig(4, 1, 48, shared_dim=48, interval=2, score="sigmoid", balance_rate=1e-3),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("batch", "sequence_length"), [(2, 50), (1, 1)])
def test_logits_and_gradients_equal_hugging_face(variant: str, batch: int, sequence_length: int) -> None:
    config = TransformerConfig.preset("debug", **VARIANTS[variant])
    theirs = random_model(llama_config(config))
    ours = Transformer(config)
    ours.load_state_dict(weights_of(theirs))
    assert_logits_and_gradients_equal(ours, theirs, batch, sequence_length)


@pytest.mark.parametrize("preset", ["llama3_8b", "llama3_405b", "llama3_2_1b", "llama4_scout", "qwen3_8b"])
def test_rotary_frequencies_of_the_published_models(preset: str) -> None:
    config = TransformerConfig.preset(preset)  # type: ignore[arg-type]
    theirs = llama_config(config)
    if config.rope_scaling is None:
        positions = torch.arange(0, config.head_size, 2) / config.head_size
        expected = config.rope_theta**-positions
    else:
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    torch.testing.assert_close(rotary_frequencies(config, torch.device("cpu")), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_do_not_change_earlier_logits(family: str) -> None:
    model = _model(**FAMILIES[family])
    tokens = torch.randint(256, (1, 20))
    torch.testing.assert_close(model(tokens)[:, :7], model(tokens[:, :7]))


def test_sequence_longer_than_the_maximum_is_refused() -> None:
    model = _model(max_sequence_length=16)
    assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 256)
    with pytest.raises(ValueError, match=r"17 tokens, but max_sequence_length=16"):
        model(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("family", FAMILIES)
def test_owners_of_tensors_refill_them(family: str) -> None:
    expected = _model(**FAMILIES[family])
    with torch.device("meta"):
        model = Transformer(expected.config)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(math.nan)
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own:
            module.reset_parameters()  # type: ignore[operator]
            assert all(tensor.isfinite().all() for tensor in own), type(module).__name__
    for (name, buffer), exact in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, exact), name


def test_initial_scale_follows_depth_and_role() -> None:
    torch.manual_seed(0)
    config = TransformerConfig.preset("debug", dim=256, n_layers=3, ffn_dim=512, vocab_size=1000)
    model = Transformer(config)
    for layer_id, block in enumerate(model.layers.values()):
        for projection in (block.attention.wq, block.attention.wk, block.attention.wv, block.feed_forward.w1):
            _assert_scale(projection.weight, 0.02)
        for projection in (block.attention.wo, block.feed_forward.w2):
            _assert_scale(projection.weight, 0.02 / math.sqrt(2 * (layer_id + 1)))
        assert torch.equal(block.ffn_norm.weight, torch.ones(256))
    _assert_scale(model.output.weight, 256**-0.5)
    assert model.tok_embeddings.weight.std().item() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_untrained_loss_is_near_that_of_a_uniform_guess(tied: bool) -> None:
    torch.manual_seed(0)
    model = _model(dim=128, tie_embeddings=tied)
    tokens, labels = torch.randint(256, (2, 4, 64)).unbind()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    assert math.log(256) < loss < math.log(256) + 1


def test_tied_head_shares_the_embedding() -> None:
    model = _model(tie_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight


def test_rotary_table_stays_float32_and_exact_in_a_bfloat16_model() -> None:
    model = _model()
    exact = model.rope.cos.clone()
    reference = model(torch.arange(100)[None])
    model.bfloat16()
    logits = model(torch.arange(100)[None])
    assert model.rope.cos.dtype == torch.float32
    assert torch.equal(model.rope.cos, exact)
    assert logits.dtype == torch.bfloat16
    assert (logits - reference).norm() / reference.norm() < 0.03


def test_pipeline_stages_compose_to_the_whole() -> None:
    whole = _model(n_layers=3)
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    first.norm = first.output = None
    del first.layers["2"]
    last.tok_embeddings = None
    del last.layers["0"], last.layers["1"]
    tokens = torch.randint(256, (2, 9))
    assert torch.equal(last(first(tokens)), whole(tokens))
    first_names, last_names = set(first.state_dict()), set(last.state_dict())
    assert first_names | last_names == set(whole.state_dict())
    assert not first_names & last_names


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_places_every_module_that_owns_parameters_once(family: str) -> None:
    model = _model(**FAMILIES[family])
    plan = model.parallel_plan()
    placed = [name for pattern in plan.tensor_parallel for name in match_modules(model, pattern, "tensor_parallel")]
    if plan.experts is not None:
        placed += match_modules(model, plan.experts, "experts")
    owners = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    # What routes is placed too, although it owns nothing: it runs on tokens of each rank's own.
    routed = [f"layers.{layer_id}.moe.routed" for layer_id in model.config.moe_layers]
    assert sorted(placed) == sorted(owners + routed)
    assert list(match_modules(model, plan.blocks, "blocks")) == ["layers.0", "layers.1"]
    assert set(model._modules) == {"rope", "layers", *plan.before, *plan.after}
    for first, second in plan.tied:
        assert model.get_parameter(first) is model.get_parameter(second)
    assert bool(plan.tied) == model.config.tie_embeddings


def test_tensor_parallel_share_of_the_heads() -> None:
    """Attention over half the heads, summed over both halves, is attention."""
    attention = _model().layers["0"].attention
    x, rope = torch.randn(2, 10, 32), _model().rope
    halves = []
    for half in range(2):
        part = copy.deepcopy(attention)
        for name in ("wq", "wk", "wv"):
            projection = getattr(part, name)
            projection.weight = nn.Parameter(projection.weight.chunk(2, dim=0)[half])
        part.wo.weight = nn.Parameter(part.wo.weight.chunk(2, dim=1)[half])
        halves.append(part(x, rope.cos, rope.sin))
    torch.testing.assert_close(sum(halves), attention(x, rope.cos, rope.sin))


def test_block_is_one_graph() -> None:
    model = _model()
    block = torch.compile(model.layers["0"], fullgraph=True, backend="eager")
    x = torch.randn(2, 10, 32)
    torch.testing.assert_close(
        block(x, model.rope.cos, model.rope.sin), model.layers["0"](x, model.rope.cos, model.rope.sin)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("n_kv_heads", [2, 8])
def test_compiled_bfloat16_on_the_gpu_follows_float32(n_kv_heads: int) -> None:
    config = TransformerConfig.preset("tiny", n_kv_heads=n_kv_heads, n_layers=2, dim=512)  # heads of 64
    reference = Transformer(config).cuda()
    model = copy.deepcopy(reference).bfloat16()
    for block in model.layers.values():
        block.compile(fullgraph=True)
    tokens = torch.randint(config.vocab_size, (2, 256), device="cuda")
    logits, expected = model(tokens), reference(tokens)
    logits.sum().backward()
    assert (logits - expected).norm() / expected.norm() < 0.03
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def _model(**overrides: object) -> Transformer:
    return Transformer(TransformerConfig.preset("debug", **overrides))  # type: ignore[arg-type]


def _assert_scale(weight: Tensor, std: float) -> None:
    assert weight.abs().max() <= 3 * std
    # Cut at three standard deviations, a normal distribution keeps 98.7 % of its standard deviation.
    assert weight.std().item() == pytest.approx(0.987 * std, rel=0.02)
