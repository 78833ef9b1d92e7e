"""A decoder of the Llama, Qwen3, Llama 4 or Mixtral family: RMSNorm, attention, SwiGLU or experts.

Every module that owns parameters or buffers has `reset_parameters()`, which refills them from what the constructor
was told; so a model built on the meta device can be initialised one module at a time, in any layout.
"""

import math

from torch import Tensor, nn

from models.attention import Attention, RotaryTable
from models.config import TransformerConfig
from models.layers import Embedding, FeedForward, Linear
from models.moe import MoE
from models.routing import LossScale
from titan_strategy.plan import ParallelPlan, TensorParallelStyle


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
        self.loss_scale = LossScale()  # an auxiliary loss counts as much as the loss that this follows
        blocks = (TransformerBlock(config, i, self.loss_scale) for i in range(config.n_layers))
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = output

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute logits.

        Args:
            tokens: Token ids, (batch, seq); on a later pipeline stage the hidden states, (batch, seq, dim).
            labels: Passed on to a head that computes the loss itself; see `models.chunked_loss`.

        Returns:
            Logits (batch, seq, vocab_size) in the weights' dtype; the hidden states on an earlier pipeline stage; with
            labels the sum of the loss.

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
        if self.output is None:
            return x
        return self.output(x) if labels is None else self.output(x, labels)

    def parallel_plan(self) -> ParallelPlan:
        """How the model can be split, in names relative to it."""
        return ParallelPlan(
            blocks="layers.*",
            before=("tok_embeddings",),
            after=("norm", "output"),
            tensor_parallel=self._tensor_parallel_styles(),
            experts=None if self.config.moe is None else "layers.*.moe.routed.experts",
            tied=(("tok_embeddings.weight", "output.weight"),) if self.config.tie_embeddings else (),
        )

    def _tensor_parallel_styles(self) -> dict[str, TensorParallelStyle]:
        config = self.config
        styles: dict[str, TensorParallelStyle] = {
            "tok_embeddings": "embedding",
            "layers.*.attention_norm": "sequence",
            "layers.*.attention.wq": "colwise",
            "layers.*.attention.wk": "colwise",
            "layers.*.attention.wv": "colwise",
            "layers.*.attention.wo": "rowwise",
            "layers.*.ffn_norm": "sequence",
            "norm": "sequence",
            "output": "head",
        }
        if config.qk_norm == "rms":
            styles |= {"layers.*.attention.q_norm": "replicate", "layers.*.attention.k_norm": "replicate"}
        swiglus = ["feed_forward"] if len(config.moe_layers) < config.n_layers else []
        if config.moe is not None:
            styles |= {"layers.*.moe.routed": "tokens", "layers.*.moe.routed.router.gate": "replicate"}
            swiglus += ["moe.shared"] if config.moe.shared_dim else []
        for name in swiglus:
            styles |= {f"layers.*.{name}.w1": "colwise", f"layers.*.{name}.w3": "colwise"}
            styles[f"layers.*.{name}.w2"] = "rowwise"
        return styles


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward or experts, each added to the residual stream.

    The projections that write to the stream start smaller the deeper the block, `init_std / sqrt(2 * (layer_id + 1))`,
    so that the stream's variance stays bounded over depth (arXiv:1908.11365; this form is TorchTitan's for Llama 3).

    Args:
        config: Sizes and constants.
        layer_id: Position in the whole model, from 0, also when the model is split.
        loss_scale: Shared by all routers of the model.
    """

    def __init__(self, config: TransformerConfig, layer_id: int, loss_scale: LossScale) -> None:
        super().__init__()
        residual_std = config.init_std / math.sqrt(2 * (layer_id + 1))
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer_id, residual_std)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward: FeedForward | None = None
        self.moe: MoE | None = None
        if layer_id in config.moe_layers:
            self.moe = MoE(config, layer_id, residual_std, loss_scale)
        else:
            self.feed_forward = FeedForward(config.dim, config.ffn_dim, config.init_std, residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape; `cos` and `sin` are the rotary tables."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        feed_forward = self.moe or self.feed_forward
        assert feed_forward is not None
        return x + feed_forward(self.ffn_norm(x))
