"""The only calls of torchao: its kernels for Blackwell (MXFP8) and for Ada and Hopper (Float8).

torchao renames these with every release, so they are imported where they are used, and what is missing is an error that
says so: a run that was asked for low precision never continues without it. The names are those of torchao 0.18.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from precision_plugins.float8 import Float8Recipe
from precision_plugins.float8_weight import Float8Weight
from precision_plugins.low_precision_linear import Product
from precision_plugins.mx import ScaleRounding

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]

# What torchao's grouped MXFP8 kernels import at their first call, without being installed with torchao.
_GROUPED_MX_PACKAGES = {
    "cutlass": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "cuda": "cuda-python",
}


def capability() -> tuple[int, int] | None:
    """Compute capability of the current GPU; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def mx_linear_kernel(rounding: ScaleRounding, wgrad_in_high_precision: bool) -> Product:
    """MXFP8 product on Blackwell."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    mode = ScaleCalculationMode(rounding)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = _to_mxfp8_then_scaled_mm(x, weight, KernelPreference.AUTO, mode, wgrad_in_high_precision)
        return output

    return _on_filled_rows(product, multiple=32)


def mx_grouped_kernel(rounding: ScaleRounding, wgrad_in_high_precision: bool) -> GroupedProduct:
    """Grouped MXFP8 product on Blackwell.

    Raises:
        ModuleNotFoundError: If a package is missing that torchao would miss at the first step only.
    """
    missing = [package for module, package in _GROUPED_MX_PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"MXFP8 for grouped experts needs {', '.join(missing)}, which torchao does not install: pip install "
            f"{' '.join(missing)}, or use grouped_experts=False."
        )
    from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    mode = ScaleCalculationMode(rounding)

    def product(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        output: Tensor = _to_mxfp8_then_scaled_grouped_mm(
            rows,
            weights.transpose(-2, -1),
            offs=offsets,
            wgrad_with_hp=wgrad_in_high_precision,
            scale_calculation_mode=mode,
        )
        return output

    return product


def float8_linear_kernel(recipe: Float8Recipe) -> Product:
    """Float8 product on Ada and Hopper."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    config = Float8LinearConfig.from_recipe_name(recipe)
    with torch.device("meta"):
        mm_config = Float8Linear(16, 16, bias=False, config=config).linear_mm_config

    class ToTorchao(torch.autograd.Function):
        """A weight gathered in Float8 as the class that torchao takes for one that it has cast itself."""

        @staticmethod
        def forward(ctx: Any, weight: Float8Weight) -> Tensor:
            scaled: Tensor = Float8TrainingTensor(
                weight.payload, weight.scale, weight.dtype, mm_config, GemmInputRole.WEIGHT
            )
            return scaled

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(weight, Float8Weight):
            weight = ToTorchao.apply(weight)
        output: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), mm_config, config)
        return output

    return _on_filled_rows(product, multiple=16)


def float8_grouped_kernel() -> GroupedProduct:
    """Grouped Float8 product with row-wise scales on Hopper."""
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    def product(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        output: Tensor = _to_fp8_rowwise_then_scaled_grouped_mm(
            rows, weights.transpose(-2, -1), offsets, rows.dtype, pad_token_groups_for_grouped_mm=False
        )
        return output

    return product


def _on_filled_rows(product: Product, multiple: int) -> Product:
    """`product` on (rows, in) with rows filled up to a multiple, as the kernels of the weight gradient want them.

    Rows of zeros change no scale and no sum.
    """

    def filled(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        missing = -rows.shape[0] % multiple
        output = product(pad(rows, (0, 0, 0, missing)) if missing else rows, weight)
        return output[: rows.shape[0]].unflatten(0, x.shape[:-1])

    return filled
