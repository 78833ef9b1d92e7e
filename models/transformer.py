"""A Llama-style decoder (Llama 2, 3, 3.1, 3.2): RMSNorm, grouped-query attention with rotary embedding, SwiGLU.

Every module that owns parameters or buffers has `reset_parameters()`, which refills them from what the constructor
was told; so a model built on the meta device can be initialised one module at a time, in any layout.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.config import TransformerConfig
from titan_strategy.plan import ParallelPlan


class Transformer(nn.Module):
    """Token ids to next-token logits.

    A pipeline stage is this model with `tok_embeddings`, `norm` or `output` set to None and some of `layers`
    deleted: what is missing is skipped, and what is left keeps its name.

    Args:
        config: Sizes and constants.
    """

    tok_embeddings: nn.Module | None
    norm: nn.Module | None
    output: nn.Module | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        # On their own, the embedding starts with rows of unit variance and the head with logits of unit variance
        # (TorchTitan). A shared weight starts as small as the blocks' (Llama 3.2's initializer_range): the residual
        # stream begins as the embedding, so with larger rows each token would at first predict itself.
        tied = config.tie_embeddings
        embedding = Embedding(config.vocab_size, config.dim, config.init_std if tied else 1.0)
        output = Linear(config.dim, config.vocab_size, config.init_std if tied else config.dim**-0.5)
        if tied:
            output.weight = embedding.weight
        self.tok_embeddings = embedding
        self.rope = RotaryTable(config)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config, i) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = output

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits.

        Args:
            tokens: Token ids, (batch, seq); on a later pipeline stage the hidden states, (batch, seq, dim).

        Returns:
            Logits (batch, seq, vocab_size) in the weights' dtype; the hidden states on an earlier pipeline stage.

        Raises:
            ValueError: If seq exceeds `config.max_sequence_length`.
        """
        if tokens.shape[1] > self.config.max_sequence_length:
            raise ValueError(
                f"the sequence has {tokens.shape[1]} tokens, but max_sequence_length={self.config.max_sequence_length}"
            )
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)  # (batch, seq, dim)
        for block in self.layers.values():
            x = block(x, self.rope.cos, self.rope.sin)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)

    def parallel_plan(self) -> ParallelPlan:
        """How the model can be split, in names relative to it."""
        return ParallelPlan(
            blocks="layers.*",
            before=("tok_embeddings",),
            after=("norm", "output"),
            tensor_parallel={
                "tok_embeddings": "embedding",
                "layers.*.attention_norm": "sequence",
                "layers.*.attention.wq": "colwise",
                "layers.*.attention.wk": "colwise",
                "layers.*.attention.wv": "colwise",
                "layers.*.attention.wo": "rowwise",
                "layers.*.ffn_norm": "sequence",
                "layers.*.feed_forward.w1": "colwise",
                "layers.*.feed_forward.w3": "colwise",
                "layers.*.feed_forward.w2": "rowwise",
                "norm": "sequence",
                "output": "head",
            },
            tied=(("tok_embeddings.weight", "output.weight"),) if self.config.tie_embeddings else (),
        )


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    The projections that write to the stream start smaller the deeper the block, `init_std / sqrt(2 * (layer_id + 1))`,
    so that the stream's variance stays bounded over depth (arXiv:1908.11365; this form is TorchTitan's for Llama 3).

    Args:
        config: Sizes and constants.
        layer_id: Position in the whole model, from 0, also when the model is split.
    """

    def __init__(self, config: TransformerConfig, layer_id: int) -> None:
        super().__init__()
        residual_std = config.init_std / math.sqrt(2 * (layer_id + 1))
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, residual_std)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config, residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape; `cos` and `sin` are the rotary tables."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key-value head.

    Args:
        config: Sizes and constants.
        residual_std: Standard deviation of the output projection's initial weights.
    """

    def __init__(self, config: TransformerConfig, residual_std: float) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.wq = Linear(config.dim, config.n_heads * config.head_size, config.init_std)
        self.wk = Linear(config.dim, config.n_kv_heads * config.head_size, config.init_std)
        self.wv = Linear(config.dim, config.n_kv_heads * config.head_size, config.init_std)
        self.wo = Linear(config.n_heads * config.head_size, config.dim, residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape; `cos` and `sin` are the rotary tables."""
        # -1 stands for the number of heads here, which under tensor parallelism is this rank's share.
        q = self.wq(x).unflatten(-1, (-1, self.head_size))  # (batch, seq, heads, head_size)
        k = self.wk(x).unflatten(-1, (-1, self.head_size))  # (batch, seq, kv_heads, head_size)
        v = self.wv(x).unflatten(-1, (-1, self.head_size))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),  # (batch, heads, seq, head_size)
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): `w2(silu(w1 x) * w3 x)`.

    Args:
        config: Sizes and constants.
        residual_std: Standard deviation of the output projection's initial weights.
    """

    def __init__(self, config: TransformerConfig, residual_std: float) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_dim, config.init_std)
        self.w3 = Linear(config.dim, config.ffn_dim, config.init_std)
        self.w2 = Linear(config.ffn_dim, config.dim, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape."""
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary angles (arXiv:2104.09864), in float32 whatever the model's dtype.

    In bfloat16 the angles of neighbouring positions would coincide from position 256 on.

    Args:
        config: Sizes and constants.
    """

    cos: Tensor  # (max_sequence_length, head_size / 2)
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.max_sequence_length, config.head_size // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill both tables from the configuration."""
        positions = torch.arange(self.config.max_sequence_length, dtype=torch.float32, device=self.cos.device)
        angles = torch.outer(positions, rotary_frequencies(self.config, self.cos.device))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryTable":
        # `model.to(dtype)` and `model.bfloat16()` arrive here, and would round the tables.
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.reset_parameters()
        return self


def rotary_frequencies(config: TransformerConfig, device: torch.device) -> Tensor:
    """Angle per token of each pair of channels, in radians.

    `theta ** (-2i / head_size)`, scaled as Llama 3.1 does (`apply_scaling` in meta-llama/llama-models) if configured.

    Returns:
        float32 tensor (head_size / 2).
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_sequence_length * frequencies / (2 * math.pi)  # over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)  # 1: the frequency stays; 0: it is divided by the factor
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle.

    Channel i pairs with i + head_size / 2, the layout of Hugging Face's checkpoints (Meta's own interleave the pairs).

    Args:
        x: Queries or keys, (batch, seq, heads, head_size).
        cos: Cosines, (at least seq, head_size / 2), float32.
        sin: Sines, likewise.

    Returns:
        A tensor of `x`'s shape and dtype, computed in float32.
    """
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]  # (seq, 1, head_size / 2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Linear(nn.Linear):
    """`nn.Linear` without bias whose weight starts as a normal distribution cut at three standard deviations.

    Args:
        in_features: Size of the input's last dimension.
        out_features: Size of the output's last dimension.
        init_std: Standard deviation of the initial weights.
    """

    def __init__(self, in_features: int, out_features: int, init_std: float) -> None:
        self.init_std = init_std  # first, because nn.Linear's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight."""
        nn.init.trunc_normal_(self.weight, std=self.init_std, a=-3 * self.init_std, b=3 * self.init_std)


class Embedding(nn.Embedding):
    """`nn.Embedding` whose rows start as a normal distribution of a given standard deviation.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Size of a row.
        init_std: Standard deviation of the initial weights.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, init_std: float) -> None:
        self.init_std = init_std  # first, because nn.Embedding's constructor calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the weight."""
        nn.init.normal_(self.weight, std=self.init_std)
