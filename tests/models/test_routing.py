"""Balancing: the auxiliary loss, the record of what was routed, and the bias that follows from it."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models import MoEConfig, Transformer, TransformerConfig
from models.moe import Router, balance_experts
from models.routing import LossScale, RoutingRecord, routing_metrics
from tests.models.hugging_face import assert_equal

CPU = torch.device("cpu")
DIM, EXPERTS = 16, 8


@pytest.mark.parametrize("divisor", [None, 37])
@pytest.mark.parametrize(("score", "top_k"), [("softmax", 1), ("softmax", 3), ("sigmoid", 2)])
def test_auxiliary_loss_equals_plain_autograd(score: str, top_k: int, divisor: int | None) -> None:
    """Of a loss that is summed, then divided by a number of tokens: the auxiliary sum is divided with it."""
    torch.manual_seed(0)
    config = MoEConfig(EXPERTS, top_k, 8, score=score, auxiliary_loss=0.5)  # type: ignore[arg-type]
    router, x, target = _router(config), _skewed(2, 9), torch.randn(18, top_k)
    weights, _ = router(x)
    loss_sum = (weights * target).sum()
    if divisor is not None:
        router.loss_scale.follow(loss_sum)
    (loss_sum / (divisor or 1)).backward()
    gradients = {"x": x.grad, "gate": router.gate.weight.grad}

    weights, auxiliary, entropy = _plain(router, x)
    total = ((weights * target).sum() + auxiliary) / (divisor or 1)
    references = torch.autograd.grad(total, (x, router.gate.weight), retain_graph=True)
    auxiliary_alone = torch.autograd.grad(auxiliary / (divisor or 1), router.gate.weight)[0]
    assert auxiliary_alone.abs().max() > 0.1 * references[1].abs().max(), "too small to be seen"
    for (name, gradient), reference in zip(gradients.items(), references, strict=True):
        assert_equal(gradient, reference, name)
    assert router.statistics[-1].item() == pytest.approx(auxiliary.item(), rel=1e-5)
    assert router.statistics[-2].item() == pytest.approx(entropy.item(), rel=1e-5)


def test_auxiliary_loss_of_perfect_balance_is_its_coefficient() -> None:
    router = _router(MoEConfig(EXPERTS, 1, 8, auxiliary_loss=0.5))
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(EXPERTS, DIM))
    tokens = torch.eye(EXPERTS, DIM)[None].requires_grad_()  # each expert once
    _route(router, tokens)
    assert balance_experts(router, [0], EXPERTS, 1, CPU)[0].auxiliary_loss.item() == pytest.approx(0.5)


def test_routers_of_a_model_share_one_loss_scale() -> None:
    model = _model()
    scales = [block.moe.routed.router.loss_scale for block in model.layers.values()]
    assert len(scales) == 2
    assert all(scale is model.loss_scale for scale in scales)


def test_record_counts_tokens_of_all_microbatches() -> None:
    torch.manual_seed(0)
    router = _router(MoEConfig(EXPERTS, 2, 8, auxiliary_loss=0.1))
    parts = [_skewed(2, 9), _skewed(1, 5)]
    expected = torch.zeros(EXPERTS + 2, dtype=torch.float64)
    for x in parts:
        chosen = _route(router, x)
        _, auxiliary, entropy = _plain(router, x)
        expected[:-2] += chosen.flatten().bincount(minlength=EXPERTS)
        expected[-2:] += torch.stack([entropy, auxiliary]).detach()
    torch.testing.assert_close(router.statistics, expected, rtol=1e-5, atol=0)

    record = balance_experts(router, [0], EXPERTS, 2, CPU)[0]
    tokens = 2 * 9 + 5
    assert record.load.sum() == 2 * tokens
    torch.testing.assert_close(record.entropy, expected[-2] / tokens, rtol=1e-5, atol=0)
    torch.testing.assert_close(record.auxiliary_loss, expected[-1] / tokens, rtol=1e-5, atol=0)
    assert record.imbalance == record.load.max() / (2 * tokens / EXPERTS)


def test_checkpointed_blocks_count_once() -> None:
    tokens = torch.randint(256, (2, 30))
    plain, recomputed = _model(), _model()
    _train(plain, plain(tokens))
    x = recomputed.tok_embeddings(tokens)
    for block in recomputed.layers.values():
        x = checkpoint(block, x, recomputed.rope.cos, recomputed.rope.sin, use_reentrant=False)
    _train(recomputed, recomputed.output(recomputed.norm(x)))
    for ours, expected in zip(_statistics(recomputed), _statistics(plain), strict=True):
        assert expected[:-2].sum() == 2 * 30 * 2
        assert torch.equal(ours, expected)
    for (name, ours), expected in zip(recomputed.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad), name


def test_compiled_block_counts() -> None:
    model = _model().bfloat16()  # torch has no rule for the shapes of grouped products in float32
    block = model.layers["0"]
    x = torch.randn(2, 10, 32).bfloat16()
    block(x, model.rope.cos, model.rope.sin).sum().backward()
    expected = block.moe.routed.router.statistics.clone()
    block.moe.routed.router.statistics.zero_()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    compiled(x, model.rope.cos, model.rope.sin).sum().backward()
    assert expected[:-2].sum() == 40
    torch.testing.assert_close(block.moe.routed.router.statistics, expected)


def test_only_tokens_that_are_trained_on_count() -> None:
    model = _model()
    tokens = torch.randint(256, (2, 30))
    model(tokens)  # as when a pipeline learns shapes: no backward pass follows
    with torch.no_grad():
        model(tokens)
    model.eval()
    _train(model, model(tokens))
    assert not any(statistics.any() for statistics in _statistics(model))


def test_bias_moves_against_the_load() -> None:
    model = _model(balance_rate=0.25)
    loads = [[9, 1, 1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 2]]
    for block, load in zip(model.layers.values(), loads, strict=True):
        block.moe.routed.router.statistics.copy_(torch.tensor([*load, 4.0, 1.0]))
    records = balance_experts(model, [0, 1], EXPERTS, 2, CPU)

    first, second = (block.moe.routed.router.bias for block in model.layers.values())
    mean = 0.25 * (7 - 1) / 8  # of seven steps up and one down
    torch.testing.assert_close(first, torch.tensor([-0.25] + 7 * [0.25]) - mean)
    assert not second.any()
    assert not any(statistics.any() for statistics in _statistics(model))
    assert [records[layer].load.tolist() for layer in (0, 1)] == loads
    assert (records[0].entropy, records[0].auxiliary_loss, records[0].imbalance) == (0.5, 0.125, 4.5)

    balance_experts(model, [0, 1], EXPERTS, 2, CPU)
    torch.testing.assert_close(first, torch.tensor([-0.25] + 7 * [0.25]) - mean, msg="no tokens, no step")


@pytest.mark.parametrize("balance_rate", [0.0, None])
def test_bias_that_does_not_move(balance_rate: float | None) -> None:
    router = _router(MoEConfig(EXPERTS, 2, 8, balance_rate=balance_rate))
    router.statistics.copy_(torch.arange(EXPERTS + 2))
    record = balance_experts(router, [0], EXPERTS, 2, CPU)[0]
    assert record.load.tolist() == list(range(EXPERTS))
    assert not router.statistics.any()
    assert router.bias is None if balance_rate is None else not router.bias.any()


def test_blocks_of_other_ranks_have_a_place_in_the_records() -> None:
    router = _router(MoEConfig(EXPERTS, 2, 8), layer_id=4)
    router.statistics.fill_(1)
    records = balance_experts(router, [2, 4], EXPERTS, 2, CPU)
    assert list(records) == [2, 4]
    assert (records[2].load.sum(), records[4].load.sum()) == (0, EXPERTS)


def test_record_of_no_tokens_is_zero() -> None:
    record = RoutingRecord.of(RoutingRecord.zeros(EXPERTS), top_k=2)
    assert (record.entropy, record.auxiliary_loss, record.imbalance) == (0, 0, 0)


def test_metrics_of_a_step() -> None:
    statistics = (torch.tensor([6.0, 2.0, 4.0, 3.0]), torch.tensor([4.0, 4.0, 2.0, 1.0]))
    records = {layer: RoutingRecord.of(row, top_k=2) for layer, row in zip((1, 3), statistics, strict=True)}
    metrics = {"moe/dropped_tokens": 0, "moe/imbalance/1": 1.5, "moe/entropy/1": 1, "moe/imbalance/3": 1}
    metrics["moe/entropy/3"] = 0.5
    assert routing_metrics(records, MoEConfig(2, 2, 8)) == metrics
    metrics["moe/auxiliary_loss"] = 0.75 + 0.25  # of both blocks together, as it is in the loss
    assert routing_metrics(records, MoEConfig(2, 2, 8, auxiliary_loss=0.1)) == metrics


@pytest.mark.parametrize(("score", "balance_rate"), [("softmax", 3e-3), ("sigmoid", 5e-3), ("softmax", 0.0)])
def test_bias_balances_a_skewed_stream(score: str, balance_rate: float) -> None:
    """Tokens of eight kinds, each a quarter as frequent as the one before."""
    torch.manual_seed(3)
    router = _router(MoEConfig(EXPERTS, 1, 8, score=score, balance_rate=balance_rate))  # type: ignore[arg-type]
    kinds = torch.randn(8, DIM)
    imbalance = []
    for _ in range(300):
        kind = torch.multinomial(0.25 ** torch.arange(8), 2048, replacement=True)
        _route(router, (kinds[kind] + torch.randn(2048, DIM)).view(4, 512, DIM))
        imbalance.append(balance_experts(router, [0], EXPERTS, 1, CPU)[0].imbalance.item())
    assert imbalance[0] > 3
    if balance_rate:
        assert max(imbalance[-10:]) < 1.3
    else:
        assert min(imbalance[-10:]) > 3
        assert torch.equal(router.bias, torch.zeros(EXPERTS))


def _router(config: MoEConfig, layer_id: int = 0) -> Router:
    return Router(DIM, config, init_std=0.3, layer_id=layer_id, loss_scale=LossScale())


def _skewed(batch: int, length: int) -> Tensor:
    """Sequences each of which prefers experts of its own, so that it matters over which tokens a mean is taken."""
    return (torch.randn(batch, length, DIM) + 2 * torch.randn(batch, 1, DIM)).requires_grad_()


def _route(router: Router, x: Tensor) -> Tensor:
    """Forward and backward pass; the numbers of the chosen experts."""
    weights, chosen = router(x)
    weights.sum().backward()
    return chosen


def _plain(router: Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, auxiliary sum and entropy sum, sequence by sequence and without the router's code."""
    config = router.config
    all_weights, auxiliary, entropy = [], torch.zeros(()), torch.zeros(())
    for sequence in x:
        logits = sequence @ router.gate.weight.T
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
        weights, chosen = scores.topk(config.top_k)
        fractions = chosen.flatten().bincount(minlength=EXPERTS) / chosen.numel()
        balance = EXPERTS * (fractions * probabilities.mean(0)).sum()
        auxiliary = auxiliary + config.auxiliary_loss * balance * len(sequence)
        entropy = entropy - (probabilities * probabilities.log()).sum()
        all_weights.append(weights)
    return torch.cat(all_weights), auxiliary, entropy


def _model(balance_rate: float = 1e-3) -> Transformer:
    torch.manual_seed(0)
    moe = MoEConfig(EXPERTS, 2, 48, shared_dim=48, balance_rate=balance_rate, auxiliary_loss=0.1)
    return Transformer(TransformerConfig.preset("debug", moe=moe))


def _train(model: Transformer, logits: Tensor) -> None:
    loss_sum = logits.logsumexp(-1).sum()
    model.loss_scale.follow(loss_sum)
    (loss_sum / 60).backward()


def _statistics(model: Transformer) -> list[Tensor]:
    return [block.moe.routed.router.statistics for block in model.layers.values()]
