"""What is trained side by side: models, batch sizes and settings, the same for every side."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from models import TransformerConfig
from precision_plugins import (
    ActivationCheckpointing,
    CompileConfig,
    Float8Precision,
    TitanPrecision,
    activation_checkpointing,
)

LEARNING_RATE = 3e-4
CLIP = 1.0
# TorchTitan 0.2.2's rule for a block (models/llama3/infra/parallelize.py): attention, communication, largest magnitudes
# and every other plain product are kept; scaled products are not.
KEEP = [operator for operator in activation_checkpointing.KEEP if not operator.startswith("aten._scaled_mm")]
RECOMPUTE_EVERY = {"aten.mm.default": 2}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        preset: The model, with a head of its own, as TorchTitan's have.
        batch_size: Rows of a step.
        checkpointing: Which activations blocks compute again; "selective" by TorchTitan's rule.
        float8: Whether linear maps but the head run in Float8 with one scale for a tensor.
    """

    preset: Literal["llama3_2_1b", "llama3_8b"]
    batch_size: int
    checkpointing: Literal["none", "selective", "full"] = "none"
    float8: bool = False

    @property
    def model(self) -> TransformerConfig:
        """The model's sizes."""
        return TransformerConfig.preset(self.preset).override(tie_embeddings=False)

    def precision(self) -> TitanPrecision:
        """How it runs."""
        checkpointing, compile = ActivationCheckpointing(self.checkpointing), CompileConfig()
        if self.checkpointing == "selective":
            checkpointing = ActivationCheckpointing("selective", keep=KEEP, recompute_every=RECOMPUTE_EVERY)
        if self.float8:
            filters = ["output"]  # TorchTitan's converts every other linear map
            return Float8Precision("tensorwise", filters, activation_checkpointing=checkpointing, compile=compile)
        return TitanPrecision("bf16-mixed", checkpointing, compile)

    def describe(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


CASES = {
    "1b": Case("llama3_2_1b", 2),
    "1b-selective": Case("llama3_2_1b", 2, "selective"),
    "1b-float8": Case("llama3_2_1b", 2, "selective", float8=True),
    "8b-full": Case("llama3_8b", 1, "full"),
    # Does not fit for every side: the best that does is each side's best.
    "8b-selective": Case("llama3_8b", 1, "selective"),
    "8b": Case("llama3_8b", 1),
}
