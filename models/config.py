"""The shape of a decoder: dense or with experts, of the Llama, Qwen3, Llama 4 or Mixtral family."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

if TYPE_CHECKING:
    from models.presets import PresetName


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies to contexts longer than those first trained on.

    Wavelengths (in tokens) of at most `original_max_sequence_length / high_freq_factor` stay, those longer than
    `original_max_sequence_length / low_freq_factor` are multiplied by `factor`, those between are interpolated.
    The defaults are those of Llama 3.1 (`rope_scaling` in its published `config.json`).

    Args:
        factor: What the long wavelengths are multiplied by; at least 1.
        low_freq_factor: Where full stretching begins; positive.
        high_freq_factor: Where stretching ends; at least `low_freq_factor` (equal: all or nothing).
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
        if not 0 < self.low_freq_factor <= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor={self.low_freq_factor} must be positive and at most "
                f"rope_scaling.high_freq_factor={self.high_freq_factor}"
            )
        if self.original_max_sequence_length < 1:
            raise ValueError(
                f"rope_scaling.original_max_sequence_length={self.original_max_sequence_length} must be at least 1"
            )


@dataclass(frozen=True)
class MoEConfig:
    """Feed-forwards that are divided into experts, of which each token uses a few.

    A router scores the experts for each token, picks the `top_k` best and adds up what they make of the token, weighted
    by the scores. No token is ever dropped.

    Args:
        num_experts: Experts in each such block.
        top_k: Experts that a token uses.
        expert_dim: Hidden width of one expert's SwiGLU; a multiple of 8, as grouped products need.
        shared_dim: Hidden width of a dense SwiGLU that every token uses besides; 0 for none.
        interval: Every how many blocks one has experts: block i (from 0) if `(i + 1) % interval == 0`.
        score: How the router's logits become scores: `"softmax"` over the experts, or a `"sigmoid"` for each.
        renormalise: Whether the scores of the picked experts are divided by their sum.
        route_scale: What the weights are multiplied by.
        score_before_experts: Whether the weight scales what goes into an expert, or what comes out.
        expert_groups: Groups of equal size that the experts form, for `groups_per_token`; 1 for none.
        groups_per_token: A token picks from these many groups: those whose best two experts score highest
            (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        balance_rate: Balancing without an auxiliary loss (arXiv:2408.15664): after each optimizer step a bias, which
            counts for the selection only, moves by this much against each expert's load. 0 keeps a bias that does not
            move; None has none. 1e-3 is usual.
        auxiliary_loss: Coefficient of the classic balancing loss (arXiv:2101.03961, equation 4, extended to `top_k`),
            taken over each sequence and averaged over tokens; 0 for none. 1e-2 is usual.
        round_robin: For benchmarks: tokens go to experts in turn, whatever the scores.

    Raises:
        ValueError: If a value is out of range or two do not go together.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int = 0
    interval: int = 1
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    route_scale: float = 1.0
    score_before_experts: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    balance_rate: float | None = None
    auxiliary_loss: float = 0.0
    round_robin: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_dim", "interval", "expert_groups", "groups_per_token"):
            _check_count(f"moe.{name}", getattr(self, name))
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"moe.score={self.score!r} must be softmax or sigmoid")
        if self.expert_dim % 8:
            raise ValueError(f"moe.expert_dim={self.expert_dim} must be a multiple of 8, as grouped products need")
        for name in ("shared_dim", "balance_rate", "auxiliary_loss"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"moe.{name}={getattr(self, name)} must be at least 0")
        if self.num_experts % self.expert_groups:
            raise ValueError(f"moe.expert_groups={self.expert_groups} must divide moe.num_experts={self.num_experts}")
        if self.groups_per_token > self.expert_groups:
            raise ValueError(
                f"moe.groups_per_token={self.groups_per_token} must be at most moe.expert_groups={self.expert_groups}"
            )
        if self.top_k > self.selectable_experts:
            groups = f" in {self.groups_per_token} of {self.expert_groups} groups" if self.expert_groups > 1 else ""
            raise ValueError(
                f"moe.top_k={self.top_k} must be from 1 to {self.selectable_experts}, the experts that a token can "
                f"pick from (moe.num_experts={self.num_experts}{groups})"
            )

    @property
    def selectable_experts(self) -> int:
        """Experts that one token can pick from."""
        return self.num_experts // self.expert_groups * self.groups_per_token


@dataclass(frozen=True)
class AttentionTemperature:
    """Llama 4's scaling of the queries in blocks without rotary embedding, which keeps attention sharp far out.

    A query at position p (from 0) is multiplied by `1 + scale * ln(1 + floor((p + 1) / floor_scale))`; see
    arXiv:2501.19399. The defaults are those of Llama 4 Scout.

    Args:
        floor_scale: Number of positions that share a factor.
        scale: How fast the factor grows.

    Raises:
        ValueError: If a value is out of range.
    """

    floor_scale: int = 8192
    scale: float = 0.1

    def __post_init__(self) -> None:
        _check_count("attention_temperature.floor_scale", self.floor_scale)
        if self.scale < 0:
            raise ValueError(f"attention_temperature.scale={self.scale} must be at least 0")


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of a `Transformer`.

    Args:
        vocab_size: Rows of the embedding and of the head.
        dim: Width of the residual stream.
        n_layers: Number of blocks.
        n_heads: Query heads.
        n_kv_heads: Key and value heads; divides `n_heads` (equal to it: multi-head, less: grouped-query attention).
        ffn_dim: Hidden width of the SwiGLU feed-forward (of the blocks without experts).
        max_sequence_length: Rows of the rotary table: the longest sequence the model accepts.
        head_dim: Width of one head; `dim / n_heads` when None.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Llama 3.1's frequency scaling; None for plain rotary embedding.
        nope_interval: Every how many blocks one has no rotary embedding: block i (from 0) if
            `(i + 1) % nope_interval == 0`. None: all blocks have it.
        attention_chunk: Blocks with rotary embedding attend within consecutive chunks of this many tokens only. None:
            to everything before.
        qk_norm: Normalise each head's query and key: `"rms"` with a learned scale before the rotary embedding (Qwen3),
            `"l2"` without one after it, in the blocks that have it (Llama 4).
        attention_temperature: Scale queries by their position in blocks without rotary embedding.
        moe: Experts in place of the feed-forward of some or all blocks.
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
    nope_interval: int | None = None
    attention_chunk: int | None = None
    qk_norm: Literal["rms", "l2"] | None = None
    attention_temperature: AttentionTemperature | None = None
    moe: MoEConfig | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_sequence_length"):
            _check_count(name, getattr(self, name))
        for name in ("nope_interval", "attention_chunk"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.qk_norm not in (None, "rms", "l2"):
            raise ValueError(f"qk_norm={self.qk_norm!r} must be rms, l2 or null")
        if self.moe is not None and self.dim % 8:
            raise ValueError(f"dim={self.dim} must be a multiple of 8 with experts, as grouped products need")
        if self.moe is not None and self.moe.interval > self.n_layers:
            raise ValueError(f"moe.interval={self.moe.interval} leaves all n_layers={self.n_layers} blocks dense")
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
    def preset(cls, name: "PresetName", **overrides: Unpack["TransformerOverrides"]) -> "TransformerConfig":
        """The configuration published under `name`, with single fields replaced.

        Args:
            name: One of `PresetName`.
            overrides: Fields of this class to set differently, e.g. `n_layers=4`.

        Raises:
            ValueError: If the name or a field is unknown, or the result is not valid.
        """
        from models.presets import PRESETS  # which is made of this class

        if name not in PRESETS:
            raise ValueError(f"unknown model preset {name!r}; valid names: {', '.join(PRESETS)}")
        return PRESETS[name].override(**overrides)

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
    def moe_layers(self) -> list[int]:
        """Numbers of the blocks that have experts, from 0."""
        return [] if self.moe is None else list(range(self.moe.interval - 1, self.n_layers, self.moe.interval))

    def has_rope(self, layer_id: int) -> bool:
        """Whether block `layer_id` (from 0) has rotary embedding."""
        return self.nope_interval is None or (layer_id + 1) % self.nope_interval != 0

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied head is counted once."""
        return self._count(experts=0 if self.moe is None else self.moe.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses: of the experts only the `top_k` that it is sent to."""
        return self._count(experts=0 if self.moe is None else self.moe.top_k)

    def _count(self, experts: int) -> int:
        embedding = self.vocab_size * self.dim
        attention = 2 * self.dim * self.head_size * (self.n_heads + self.n_kv_heads)
        norms = 2 * self.dim + (2 * self.head_size if self.qk_norm == "rms" else 0)
        feed_forwards = (self.n_layers - len(self.moe_layers)) * 3 * self.dim * self.ffn_dim
        if self.moe is not None:
            router = self.dim * self.moe.num_experts
            swiglu = 3 * self.dim * (experts * self.moe.expert_dim + self.moe.shared_dim)
            feed_forwards += len(self.moe_layers) * (router + swiglu)
        blocks = self.n_layers * (attention + norms) + feed_forwards
        return blocks + self.dim + embedding * (1 if self.tie_embeddings else 2)

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of forward and backward per trained token.

        `6 * N + 12 * n_layers * n_heads * head_size * sequence_length`, from PaLM (arXiv:2204.02311, appendix B). N
        are the parameters that multiply each token: all but the embedding table, which is a look-up, and the experts
        that the token is not sent to. The head is counted, tied or not. As in the paper, attention is counted in full
        (a causal kernel does half of it, one within chunks less) and recomputation is not counted, so that model-flops
        utilisation compares across implementations.

        Args:
            sequence_length: Tokens that each token may attend to.
        """
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.dim
        attention = 12 * self.n_layers * self.n_heads * self.head_size * sequence_length
        return 6 * (self.num_active_parameters - embedding) + attention


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
    nope_interval: int | None
    attention_chunk: int | None
    qk_norm: Literal["rms", "l2"] | None
    attention_temperature: AttentionTemperature | None
    moe: MoEConfig | None
    norm_eps: float
    tie_embeddings: bool
    init_std: float


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")
