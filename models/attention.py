"""Causal self-attention and its rotary embedding."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.config import AttentionTemperature, TransformerConfig
from models.layers import Linear

# The first of these that can. On one H200, causal at a sequence of 8192, forward and backward together, cuDNN ran at
# 426 (head size 64) and 510 (128) TFLOP/s, torch's flash kernel at 261 and 282. torch itself would take the latter.
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key-value head.

    Args:
        config: Sizes and constants.
        layer_id: Position of the block in the whole model, from 0, which decides about the rotary embedding.
        residual_std: Standard deviation of the output projection's initial weights.
    """

    def __init__(self, config: TransformerConfig, layer_id: int, residual_std: float) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.norm_eps = config.norm_eps
        self.grouped_queries = config.n_heads != config.n_kv_heads
        self.has_rope = config.has_rope(layer_id)
        self.chunk = config.attention_chunk if self.has_rope else None
        self.temperature = None if self.has_rope else config.attention_temperature
        self.unscaled_norm = config.qk_norm == "l2" and self.has_rope
        self.wq = Linear(config.dim, config.n_heads * config.head_size, config.init_std)
        self.wk = Linear(config.dim, config.n_kv_heads * config.head_size, config.init_std)
        self.wv = Linear(config.dim, config.n_kv_heads * config.head_size, config.init_std)
        self.wo = Linear(config.n_heads * config.head_size, config.dim, residual_std)
        self.q_norm = self.k_norm = None
        if config.qk_norm == "rms":
            self.q_norm = nn.RMSNorm(config.head_size, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_size, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape; `cos` and `sin` are the rotary tables."""
        # -1 stands for the number of heads here, which under tensor parallelism is this rank's share.
        q = self.wq(x).unflatten(-1, (-1, self.head_size))  # (batch, seq, heads, head_size)
        k = self.wk(x).unflatten(-1, (-1, self.head_size))  # (batch, seq, kv_heads, head_size)
        v = self.wv(x).unflatten(-1, (-1, self.head_size))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.unscaled_norm:
            q, k = (nn.functional.rms_norm(t.float(), t.shape[-1:], eps=self.norm_eps).to(t.dtype) for t in (q, k))
        if self.temperature is not None:
            q = q * query_scale(self.temperature, q.shape[1], q.device)[:, None, None].to(q.dtype)
        return self.wo(attend(q, k, v, self.grouped_queries, self.chunk).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, grouped_queries: bool, chunk: int | None) -> Tensor:
    """Causal attention, within consecutive chunks of the sequence if `chunk` is a number of tokens.

    Args:
        q: Queries (batch, seq, heads, head_size).
        k: Keys (batch, seq, kv_heads, head_size).
        v: Values, likewise.
        grouped_queries: Whether there are fewer key heads than query heads. Told rather than read off the shapes, which
            a graph may not know.
        chunk: Tokens of a chunk.

    Returns:
        (batch, seq, heads, head_size).
    """
    if chunk is not None and q.shape[1] > chunk:
        pieces = zip(q.split(chunk, 1), k.split(chunk, 1), v.split(chunk, 1), strict=True)
        return torch.cat([attend(*piece, grouped_queries, chunk=None) for piece in pieces], dim=1)
    with sdpa_kernel(KERNELS, set_priority=True):
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),  # (batch, heads, seq, head_size)
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=grouped_queries,
        )
    return out.transpose(1, 2)


def query_scale(temperature: AttentionTemperature, length: int, device: torch.device) -> Tensor:
    """What the query at each position is multiplied by; float32 (length)."""
    positions = torch.arange(1, length + 1, dtype=torch.float32, device=device)
    return torch.log1p(torch.floor(positions / temperature.floor_scale)) * temperature.scale + 1


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
    width = max(scaling.high_freq_factor - scaling.low_freq_factor, 1e-12)  # 0: every frequency is on one side
    keep = (turns - scaling.low_freq_factor) / width
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
