"""Sampling from a model."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from models import Transformer, TransformerConfig, generate
from tests.rank_pool import RankPool


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig.preset("debug", max_sequence_length=12))


def test_greedy_is_repeated_argmax_over_the_last_tokens(model: Transformer) -> None:
    prompt = torch.randint(256, (2, 5))
    expected = prompt
    for _ in range(15):  # runs past the maximum length of 12
        logits = model(expected[:, -12:])[:, -1]
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(generate(model, prompt, 15, temperature=0), expected)


def test_sampling_repeats_with_the_generator_and_needs_no_gradient(model: Transformer) -> None:
    prompt = torch.randint(256, (1, 3))
    first, again, other = (
        generate(model, prompt, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert model(prompt).grad_fn is not None  # gradients are on again outside


def test_top_k_keeps_the_most_likely_tokens(model: Transformer) -> None:
    prompt = torch.randint(256, (1, 3)).repeat(500, 1)
    best = set(model(prompt[:1])[0, -1].topk(4).indices.tolist())
    drawn = generate(model, prompt, 1, temperature=5.0, top_k=4, generator=torch.Generator().manual_seed(0))[:, -1]
    assert set(drawn.tolist()) == best


def test_temperature_sharpens_towards_the_greedy_choice(model: Transformer) -> None:
    prompt = torch.randint(256, (1, 3)).repeat(200, 1)
    greedy = generate(model, prompt, 1, temperature=0)[:, -1]
    agreement = [
        (generate(model, prompt, 1, temperature, generator=torch.Generator().manual_seed(0))[:, -1] == greedy).sum()
        for temperature in (1e-3, 1.0)
    ]
    assert agreement[0] == 200
    assert agreement[1] < 100


def test_number_of_forwards_does_not_depend_on_what_is_sampled(model: Transformer) -> None:
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    generate(model, torch.zeros(1, 1, dtype=torch.long), 6)
    assert len(calls) == 6


def test_sharded_ranks_sample_what_one_process_samples(model: Transformer, rank_pool: RankPool) -> None:
    prompt = torch.randint(256, (2, 5))
    expected = generate(model, prompt, 10, generator=torch.Generator().manual_seed(3)).tolist()
    assert rank_pool.run(_sample_sharded, 2, model.config, model.state_dict(), prompt) == [expected, expected]


def _sample_sharded(config: TransformerConfig, weights: dict[str, torch.Tensor], prompt: torch.Tensor) -> list[int]:
    torch.distributed.init_process_group("gloo")
    model = Transformer(config)
    model.load_state_dict(weights)
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    return generate(model, prompt, 10, generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.long)}, r"shape \(batch, seq\) with seq >= 1, got \(3,\)"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, r"got \(1, 0\)"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_bad_arguments_are_named(model: Transformer, arguments: dict[str, object], message: str) -> None:
    valid = {"tokens": torch.zeros(1, 1, dtype=torch.long), "max_new_tokens": 1}
    with pytest.raises(ValueError, match=message):
        generate(model, **(valid | arguments))  # type: ignore[arg-type]
