"""Lightning precision plugins for sharded training: dtype policies and activation checkpointing."""

from precision_plugins.activation_checkpointing import ActivationCheckpointing
from precision_plugins.titan_precision import TitanPrecision

__all__ = ["ActivationCheckpointing", "TitanPrecision"]
