"""Learning-rate schedules as pure functions: optimizer steps done so far -> factor on the peak learning rate.

All of them warm up linearly over `warmup_steps`: step s (counted from 0) runs at (s + 1) / (warmup_steps + 1) of the
peak, so that no step is spent at 0 and the first step after the warm-up runs at the peak.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRateSchedule:
    """A choice of schedule.

    Args:
        name: `wsd` (warm-up, stable, linear decay), `cosine` or `constant`.
        warmup_steps: Optimizer steps of linear warm-up.
        decay_fraction: With `wsd`, the part of the run, at its end, over which the rate falls; 0 to 1.
        min_lr_ratio: With `wsd` and `cosine`, the factor reached when the run ends; 0 to 1.

    Raises:
        ValueError: If a value is out of range.
    """

    name: Literal["wsd", "cosine", "constant"] = "wsd"
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in ("wsd", "cosine", "constant"):
            raise ValueError(f"schedule.name={self.name!r} must be wsd, cosine or constant")
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps={self.warmup_steps} must be at least 0")
        for name in ("decay_fraction", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}={getattr(self, name)} must lie between 0 and 1")

    def factor(self, step: int, total_steps: float) -> float:
        """The factor at `step` of a run of `total_steps` (which `constant` ignores)."""
        match self.name:
            case "wsd":
                return wsd(step, total_steps, self.warmup_steps, self.decay_fraction, self.min_lr_ratio)
            case "cosine":
                return cosine(step, total_steps, self.warmup_steps, self.min_lr_ratio)
            case "constant":
                return constant(step, self.warmup_steps)


def wsd(step: int, total_steps: float, warmup_steps: int, decay_fraction: float, min_lr_ratio: float) -> float:
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395), with a linear decay as in arXiv:2405.18392.

    The peak holds until `(1 - decay_fraction) * total_steps`, then the factor falls to `min_lr_ratio` at `total_steps`
    and stays there. Where a long warm-up overlaps the decay, the smaller of the two factors counts.
    """
    decay_steps = decay_fraction * total_steps
    progress = _progress(step, total_steps - decay_steps, total_steps)
    return min(constant(step, warmup_steps), 1 - (1 - min_lr_ratio) * progress)


def cosine(step: int, total_steps: float, warmup_steps: int, min_lr_ratio: float) -> float:
    """Half a cosine (arXiv:1608.03983) from the end of the warm-up down to `min_lr_ratio` at `total_steps`."""
    progress = _progress(step, warmup_steps, total_steps)
    return min(constant(step, warmup_steps), min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def constant(step: int, warmup_steps: int) -> float:
    """Warm-up, then the peak for ever."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _progress(step: int, start: float, end: float) -> float:
    """Position of `step` between `start` and `end`, clipped to 0..1."""
    if step <= start:
        return 0.0
    return min(1.0, (step - start) / (end - start)) if start < end else 1.0
