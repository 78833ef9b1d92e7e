"""Layers with experts against a loop over tokens and experts, and the contracts of router and experts."""

import pytest
import torch
from torch import Tensor, nn

from models import MoEConfig, TransformerConfig
from models.moe import MoE, balance_experts
from models.routing import LossScale
from tests.models.hugging_face import assert_equal
from titan_strategy.dispatch import LocalDispatcher

DIM = 16
VARIANTS = {
    "top_1": MoEConfig(6, 1, 8),
    "top_2": MoEConfig(6, 2, 8),
    "top_3": MoEConfig(6, 3, 8),
    "all": MoEConfig(4, 4, 8),
    "renormalised": MoEConfig(6, 3, 8, renormalise=True),
    "sigmoid": MoEConfig(6, 2, 8, score="sigmoid"),
    "sigmoid_renormalised": MoEConfig(6, 2, 8, score="sigmoid", renormalise=True),
    "scaled": MoEConfig(6, 2, 8, route_scale=2.5, renormalise=True),
    "score_before": MoEConfig(6, 2, 8, score_before_experts=True),
    "shared": MoEConfig(6, 2, 8, shared_dim=24),
    "llama4": MoEConfig(6, 1, 8, shared_dim=8, score="sigmoid", score_before_experts=True),
    "groups": MoEConfig(8, 2, 8, expert_groups=4, groups_per_token=2),
    "groups_of_one": MoEConfig(6, 2, 8, expert_groups=6, groups_per_token=3),
    "bias": MoEConfig(6, 2, 8, renormalise=True, balance_rate=1e-3),
    "deepseek": MoEConfig(
        8,
        3,
        8,
        shared_dim=8,
        score="sigmoid",
        renormalise=True,
        route_scale=2.5,
        expert_groups=2,
        groups_per_token=1,
        balance_rate=1e-3,
    ),
    "round_robin": MoEConfig(6, 2, 8, round_robin=True),
}


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_equals_a_loop_over_tokens(variant: str, alignment: int) -> None:
    moe = build(VARIANTS[variant])
    moe.routed.experts.dispatcher = LocalDispatcher(VARIANTS[variant].num_experts, alignment)
    _assert_equals_loop(moe, torch.randn(2, 11, DIM))


def test_experts_without_tokens_have_zero_gradients() -> None:
    moe = build(VARIANTS["bias"])
    moe.routed.router.bias.copy_(torch.tensor([-9.0, 0.0, 0.0, -9.0, 0.0, -9.0]))
    _assert_equals_loop(moe, torch.randn(2, 11, DIM))
    moe(torch.randn(2, 11, DIM)).sum().backward()
    for name, weight in moe.routed.experts.named_parameters():
        used = [expert for expert, gradient in enumerate(weight.grad) if gradient.any()]
        assert used == [1, 2, 4], name


@pytest.mark.parametrize("variant", ["top_3", "llama4", "deepseek", "score_before"])
def test_one_token(variant: str) -> None:
    _assert_equals_loop(build(VARIANTS[variant]), torch.randn(1, 1, DIM))


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("shape", [(0, 7), (2, 0)])
@pytest.mark.parametrize("variant", ["shared", "deepseek", "round_robin"])
def test_no_tokens(variant: str, shape: tuple[int, int], alignment: int) -> None:
    config = VARIANTS[variant]
    moe = build(config)
    moe.routed.experts.dispatcher = LocalDispatcher(config.num_experts, alignment)
    x = torch.randn(*shape, DIM, requires_grad=True)
    output = moe(x)
    output.sum().backward()
    assert output.shape == x.shape
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name

    record = balance_experts(moe, [0], config.num_experts, config.top_k, torch.device("cpu"))[0]
    assert not any(value.any() for value in (record.load, record.entropy, record.auxiliary_loss))


def test_bias_counts_for_the_selection_only() -> None:
    router = build(VARIANTS["bias"]).routed.router
    x = torch.randn(2, 11, DIM)
    free, chosen_freely = router(x)
    router.bias[4] = 100.0
    weights, chosen = router(x)
    assert (chosen == 4).any(-1).all()
    assert not (chosen_freely == 4).any(-1).all()
    scores = nn.functional.linear(x, router.gate.weight).softmax(-1).flatten(0, 1).gather(-1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    assert weights.shape == free.shape == (22, 2)


def test_groups_limit_the_selection() -> None:
    """The best expert is in a group whose best two lose against those of both other groups."""
    router = build(MoEConfig(6, 3, 8, expert_groups=3, groups_per_token=2)).routed.router
    scores = torch.tensor([[0.30, 0.01, 0.17, 0.16, 0.19, 0.17]])
    assert router.choose(scores).sort().values.tolist() == [[2, 4, 5]]


def test_round_robin_takes_experts_in_turn() -> None:
    moe = build(MoEConfig(5, 2, 8, round_robin=True))
    weights, chosen = moe.routed.router(torch.randn(2, 5, DIM))
    assert chosen.flatten().tolist() == [0, 1, 2, 3, 4] * 4
    assert weights.unique().numel() > 10, "the weights are still the scores"


def test_scores_that_vanish_do_not_divide_by_zero() -> None:
    moe = build(MoEConfig(6, 2, 8, score="sigmoid", renormalise=True, auxiliary_loss=0.1))
    with torch.no_grad():
        moe.routed.router.gate.weight.fill_(-1.0)
    x = torch.full((1, 2, DIM), 1e3, requires_grad=True)
    moe(x).sum().backward()
    assert moe.routed.router.statistics.isfinite().all()
    for tensor in (x, *moe.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_router_computes_in_float32_and_keeps_count_in_a_bfloat16_model() -> None:
    moe = build(VARIANTS["bias"])
    router = moe.routed.router
    bias = router.bias.clone()
    router.statistics[0] = 257  # which bfloat16 does not have
    moe.bfloat16()
    assert torch.equal(router.bias, bias)
    assert router.statistics[0] == 257
    assert (router.bias.dtype, router.statistics.dtype) == (torch.float32, torch.float64)
    assert {name for name, _ in router.named_buffers()} == {"bias", "statistics"}

    x = torch.randn(2, 11, DIM).bfloat16()
    weights, _ = router(x)
    assert router.gate.weight.dtype == torch.bfloat16
    torch.testing.assert_close(weights, router.float()(x.float())[0], rtol=1e-6, atol=0)
    assert moe.bfloat16()(x).dtype == torch.bfloat16


def test_record_is_not_saved_and_the_bias_is() -> None:
    assert "routed.router.bias" in build(VARIANTS["bias"]).state_dict()
    assert "routed.router.bias" not in build(VARIANTS["top_1"]).state_dict()
    assert not any("statistics" in name for name in build(VARIANTS["bias"]).state_dict())


def test_initial_scale() -> None:
    torch.manual_seed(0)
    config = TransformerConfig.preset("debug", dim=64, init_std=0.1, moe=MoEConfig(8, 2, 64, 64, balance_rate=0.0))
    moe = MoE(config, layer_id=0, residual_std=0.03, loss_scale=LossScale())
    experts, shared = moe.routed.experts, moe.shared
    assert shared is not None
    for weight in (experts.w1, experts.w3, shared.w1.weight, shared.w3.weight, moe.routed.router.gate.weight):
        assert weight.std().item() == pytest.approx(0.987 * 0.1, rel=0.05)  # cut at three standard deviations
    for weight in (experts.w2, shared.w2.weight):
        assert weight.std().item() == pytest.approx(0.987 * 0.03, rel=0.05)
    assert not moe.routed.router.bias.any()


def build(config: MoEConfig) -> MoE:
    """A layer with weights and a bias large enough that each part shows in the output."""
    torch.manual_seed(0)
    moe = MoE(TransformerConfig.preset("debug", dim=DIM, moe=config), 0, 0.02, LossScale())
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.5)
        if moe.routed.router.bias is not None:
            moe.routed.router.bias.normal_(0, 0.2)
    return moe


def _assert_equals_loop(moe: MoE, x: Tensor) -> None:
    tensors = {"x": x.requires_grad_(), **dict(moe.named_parameters())}
    output, expected = moe(x), _loop(moe, x)
    assert expected.std() > 0.1, "output too small for the comparison to mean anything"
    assert_equal(output, expected, "output")
    target = torch.randn_like(x)
    gradients, references = (torch.autograd.grad((y * target).sum(), tensors.values()) for y in (output, expected))
    for name, gradient, reference in zip(tensors, gradients, references, strict=True):
        assert_equal(gradient, reference, name)


def _loop(moe: MoE, x: Tensor) -> Tensor:
    router, experts = moe.routed.router, moe.routed.experts
    config = router.config
    bias = torch.zeros(config.num_experts) if router.bias is None else router.bias
    outputs = []
    for number, token in enumerate(x.flatten(0, 1)):
        logits = router.gate.weight @ token
        scores = logits.softmax(0) if config.score == "softmax" else logits.sigmoid()
        chosen = _pick((scores + bias).tolist(), number, config)
        total = torch.stack([scores[expert] for expert in chosen]).sum() if config.renormalise else 1.0
        output = torch.zeros(DIM) if moe.shared is None else moe.shared(token)
        for expert in chosen:
            weight = config.route_scale * scores[expert] / total
            row = token * weight if config.score_before_experts else token
            hidden = nn.functional.silu(experts.w1[expert] @ row) * (experts.w3[expert] @ row)
            made = experts.w2[expert] @ hidden
            output = output + (made if config.score_before_experts else weight * made)
        outputs.append(output)
    return torch.stack(outputs).view_as(x)


def _pick(scores: list[float], number: int, config: MoEConfig) -> list[int]:
    """Numbers of the experts of token `number`."""
    if config.round_robin:
        return [(number * config.top_k + choice) % config.num_experts for choice in range(config.top_k)]
    size = config.num_experts // config.expert_groups
    groups = [list(range(start, start + size)) for start in range(0, config.num_experts, size)]
    groups.sort(key=lambda group: sum(sorted((scores[expert] for expert in group), reverse=True)[:2]), reverse=True)
    allowed = [expert for group in groups[: config.groups_per_token] for expert in group]
    return sorted(allowed, key=lambda expert: scores[expert], reverse=True)[: config.top_k]
