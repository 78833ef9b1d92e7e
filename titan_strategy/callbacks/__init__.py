"""What a run shows of itself: speed, memory and the loss curve."""

from titan_strategy.callbacks.loss_curve import LossCurve
from titan_strategy.callbacks.throughput import Throughput

__all__ = ["LossCurve", "Throughput"]
