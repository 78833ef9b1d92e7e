"""Linear maps, embedding and feed-forward that know how they are initialised."""

from torch import Tensor, nn


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
        draw_weight(self.weight, self.init_std)


def draw_weight(weight: Tensor, std: float) -> None:
    """Fill `weight` from a normal distribution cut at three standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


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


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): `w2(silu(w1 x) * w3 x)`.

    Args:
        dim: Width of the residual stream.
        hidden_dim: Hidden width.
        init_std: Standard deviation of the input projections' initial weights.
        residual_std: Standard deviation of the output projection's initial weights.
    """

    def __init__(self, dim: int, hidden_dim: int, init_std: float, residual_std: float) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim, init_std)
        self.w3 = Linear(dim, hidden_dim, init_std)
        self.w2 = Linear(hidden_dim, dim, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape."""
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
