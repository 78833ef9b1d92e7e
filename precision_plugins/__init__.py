"""Lightning precision plugins for sharded training: dtypes, Float8 and MXFP8, activation checkpointing, compilation."""

from precision_plugins.activation_checkpointing import ActivationCheckpointing
from precision_plugins.compile import CompileConfig
from precision_plugins.low_precision import Float8Precision, MXFP8Precision
from precision_plugins.titan_precision import TitanPrecision

__all__ = ["ActivationCheckpointing", "CompileConfig", "Float8Precision", "MXFP8Precision", "TitanPrecision"]
