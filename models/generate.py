"""Sampling text from a causal language model, token by token."""

import torch
from torch import Tensor

from models.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row of `tokens`.

    There is no key-value cache and no stop token: each new token costs one forward over the last `max_sequence_length`
    tokens, and there are exactly `max_new_tokens` forwards. So under FSDP2 all ranks may, and must, call this together
    with the same arguments; seed their generators alike to get the same text on all of them.

    Args:
        model: The model; it may be sharded.
        tokens: Token ids, (batch, seq) with seq >= 1, on the model's device.
        max_new_tokens: Tokens to add to each row.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among the k most likely tokens only; all of them when None.
        generator: Source of randomness, on the model's device; torch's global one when None.

    Returns:
        Token ids (batch, seq + max_new_tokens): the prompt and its continuation.

    Raises:
        ValueError: If an argument is out of range.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must have shape (batch, seq) with seq >= 1, got {tuple(tokens.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 0")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    for _ in range(max_new_tokens):
        context = tokens[:, -model.config.max_sequence_length :]
        logits = model(context)[:, -1].float()  # (batch, vocab)
        tokens = torch.cat((tokens, _sample(logits, temperature, top_k, generator)), dim=1)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row of (batch, vocab) logits, as (batch, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kth_best = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth_best, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), num_samples=1, generator=generator)
