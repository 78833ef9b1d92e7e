"""Language models, its LightningModule and its text data."""

from models.causal_lm import AdamWConfig, CausalLM
from models.config import AttentionTemperature, MoEConfig, RopeScaling, TransformerConfig
from models.data import TextDataModule
from models.generate import generate
from models.schedules import LearningRateSchedule
from models.transformer import Transformer

__all__ = [
    "AdamWConfig",
    "AttentionTemperature",
    "CausalLM",
    "LearningRateSchedule",
    "MoEConfig",
    "RopeScaling",
    "TextDataModule",
    "Transformer",
    "TransformerConfig",
    "generate",
]
