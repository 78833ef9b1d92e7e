"""The shape of a Llama-style decoder, with the published sizes by name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, TypedDict, Unpack

PresetName = Literal[
    "debug",
    "tiny",
    "llama2_7b",
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "llama3_2_1b",
    "llama3_2_3b",
]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies to contexts longer than those first trained on.

    Wavelengths (in tokens) shorter than `original_max_sequence_length / high_freq_factor` stay, those longer than
    `original_max_sequence_length / low_freq_factor` are multiplied by `factor`, those between are interpolated.
    The defaults are those of Llama 3.1 (`rope_scaling` in its published `config.json`).

    Args:
        factor: What the long wavelengths are multiplied by; at least 1.
        low_freq_factor: Where full stretching begins; positive.
        high_freq_factor: Where stretching ends; greater than `low_freq_factor`.
        original_max_sequence_length: Tokens of context before the stretching.

    Raises:
        ValueError: If a value is out of range.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_sequence_length: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor={self.factor} must be at least 1")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor={self.low_freq_factor} must be positive and less than "
                f"rope_scaling.high_freq_factor={self.high_freq_factor}"
            )
        if self.original_max_sequence_length < 1:
            raise ValueError(
                f"rope_scaling.original_max_sequence_length={self.original_max_sequence_length} must be at least 1"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of a `Transformer`.

    Args:
        vocab_size: Rows of the embedding and of the head.
        dim: Width of the residual stream.
        n_layers: Number of blocks.
        n_heads: Query heads.
        n_kv_heads: Key and value heads; divides `n_heads` (equal to it: multi-head, less: grouped-query attention).
        ffn_dim: Hidden width of the SwiGLU feed-forward.
        max_sequence_length: Rows of the rotary table: the longest sequence the model accepts.
        head_dim: Width of one head; `dim / n_heads` when None.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Llama 3.1's frequency scaling; None for plain rotary embedding.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: Whether the head uses the embedding's weight.
        init_std: Standard deviation of the initial weights inside the blocks (before depth scaling) and of a tied
            embedding.

    Raises:
        ValueError: If sizes are not positive or do not divide as stated.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    max_sequence_length: int
    head_dim: int | None = None
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_sequence_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} must divide dim={self.dim}, or give head_dim")
        if self.head_size < 2 or self.head_size % 2:
            origin = f"dim={self.dim} / n_heads={self.n_heads}" if self.head_dim is None else "head_dim"
            raise ValueError(f"{origin} = {self.head_size} must be even: rotary embedding turns pairs of channels")

    @classmethod
    def preset(cls, name: PresetName, **overrides: Unpack["TransformerOverrides"]) -> "TransformerConfig":
        """The configuration published under `name`, with single fields replaced.

        Args:
            name: One of `PresetName`.
            overrides: Fields of this class to set differently, e.g. `n_layers=4`.

        Raises:
            ValueError: If the name or a field is unknown, or the result is not valid.
        """
        if name not in _PRESETS:
            raise ValueError(f"unknown model preset {name!r}; valid names: {', '.join(_PRESETS)}")
        return _PRESETS[name].override(**overrides)

    def override(self, **overrides: Unpack["TransformerOverrides"]) -> "TransformerConfig":
        """A copy with single fields replaced.

        Raises:
            ValueError: If a field is unknown, or the result is not valid.
        """
        names = [field.name for field in fields(self)]
        if unknown := sorted(set(overrides) - set(names)):
            raise ValueError(f"unknown model fields in overrides: {', '.join(unknown)}; valid: {', '.join(names)}")
        return replace(self, **overrides)

    @property
    def head_size(self) -> int:
        """Width of one attention head: `head_dim`, or `dim / n_heads`."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied head is counted once."""
        embedding = self.vocab_size * self.dim
        attention = 2 * self.dim * self.head_size * (self.n_heads + self.n_kv_heads)
        feed_forward = 3 * self.dim * self.ffn_dim
        block = attention + feed_forward + 2 * self.dim
        return self.n_layers * block + self.dim + embedding * (1 if self.tie_embeddings else 2)

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of forward and backward per trained token.

        `6 * N + 12 * n_layers * n_heads * head_size * sequence_length`, from PaLM (arXiv:2204.02311, appendix B). N
        are the parameters that multiply each token: all but the embedding table, which is a look-up. The head is
        counted, tied or not. As in the paper, attention is counted in full (a causal kernel does half of it) and
        recomputation is not counted, so that model-flops utilisation compares across implementations.

        Args:
            sequence_length: Tokens that each token may attend to.
        """
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.dim
        attention = 12 * self.n_layers * self.n_heads * self.head_size * sequence_length
        return 6 * (self.num_parameters - embedding) + attention


class TransformerOverrides(TypedDict, total=False):
    """Any subset of `TransformerConfig`'s fields, checked by name and type in YAML and on the command line."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    max_sequence_length: int
    head_dim: int | None
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    init_std: float


# The Llama sizes are those of the published config.json files; `debug` and `tiny` are ours, for tests and for a laptop.
_PRESETS: Mapping[PresetName, TransformerConfig] = {
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
}
