"""Token-weighted metrics: sums and counts over every token of every data rank, divided once."""

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenMean(Metric):
    """Sum over count. Exact for ragged batches: nothing is averaged before everything is counted."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64 counts 2^53 tokens exactly; float32 would stop counting at 16.8 million.
        self.add_state("total", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add the sum of a quantity over `count` tokens (both scalars)."""
        # Not in place: a state that was made under torch.inference_mode would refuse it afterwards.
        self.total = self.total + total.detach()
        self.count = self.count + count.detach()

    def compute(self) -> Tensor:
        """The mean per token, float32; 0 when there was no token."""
        return (self.total / self.count.clamp(min=1)).float()


class Perplexity(TokenMean):
    """exp of the mean loss per token (nats)."""

    def compute(self) -> Tensor:
        """Perplexity, float32."""
        return super().compute().exp()
