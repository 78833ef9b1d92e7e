"""MXFP8 emulated in plain operations: the numbers of Blackwell's tensor cores on any device, at no gain in speed.

MXFP8 stores 32 numbers as E4M3 and one scale for all of them, a power of two (E8M0); see the OCP Microscaling Formats
specification v1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
Here both operands of every product are rounded to that format, in blocks along the dimension that is summed over, and
then multiplied as what they were before. An operand meets two products that sum over different dimensions, so it is
rounded twice, differently:

    y = q(x, K) q(w, K)^T        dx = q(dy, N) q(w, N)        dw = q(dy, M)^T q(x, M)

Every number equals that of torchao 0.18 with `KernelPreference.EMULATED`, bit for bit, wherever torchao runs. This runs
for any sizes and strides, for float32 experts too, and under `torch.compile`; only the grouped product fails there on
the CPU with inductor of torch 2.13, as torchao's does ("aot_eager" works).
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from precision_plugins.products import multiply

ScaleRounding = Literal["rceil", "floor"]

BLOCK = 32
_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = torch.finfo(_E4M3).max  # 448
_E4M3_EXPONENT = 8  # of the largest power of two in E4M3
_E8M0_EXPONENT = 127  # scales lie from 2^-127 to 2^127
_FLOAT32_MANTISSA_BITS = 23


def fake_quantize(x: Tensor, dim: int, rounding: ScaleRounding) -> Tensor:
    """Round to MXFP8 and back.

    A NaN spreads over its block. An infinity stays one, but takes all numbers of its block up to 2^117 (`"floor"`:
    2^110) to zero. A last block that is too short is filled up with zeros, which do not change its maximum.

    Args:
        x: Any shape and strides; bfloat16 or float32.
        dim: The dimension that blocks of 32 lie along.
        rounding: How a block's scale follows from its largest magnitude m. `"rceil"` takes the smallest power of two
            with m / scale <= 448, so nothing saturates (https://docs.nvidia.com/cuda/cublas/#d-block-quantization;
            why it trains better: https://arxiv.org/abs/2506.08027). `"floor"` takes 2^(floor(log2 m) - 8) as section
            6.3 of the specification does, so numbers above 1.75 * 2^floor(log2 m) saturate.

    Returns:
        x's shape and dtype, row-major; the gap in a last block that was filled up is left in the strides.
    """
    dim = dim if dim < 0 else dim - x.ndim  # which then also is the dimension inside the blocks
    size = x.shape[dim]
    if torch.compiler.is_compiling() or size % BLOCK:  # compiled, one graph does for all sizes, and no copy is made
        x = pad(x, [0, 0] * (-dim - 1) + [0, -size % BLOCK])
    blocks = x.unflatten(dim, (x.shape[dim] // BLOCK, BLOCK))  # (..., size / 32, 32, ...)
    down, up = _factors(blocks.abs().amax(dim, keepdim=True).float(), rounding)
    # Casts beyond the range give NaN up to torch 2.11. Row-major, because grouped products refuse other strides, and
    # at this point it costs no pass of its own.
    scaled = (blocks * down).clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3, memory_format=torch.contiguous_format)
    # E4M3 and powers of two are exact in both dtypes, and so is their product, unless it leaves the dtype's range.
    return (scaled.to(x.dtype) * up.to(x.dtype)).flatten(dim - 1, dim).narrow(dim, 0, size)


def mx_linear(
    x: Tensor, weight: Tensor, rounding: ScaleRounding = "rceil", wgrad_in_high_precision: bool = False
) -> Tensor:
    """`x @ weight.T` with operands rounded to MXFP8, in both directions. A frozen operand's product is left out.

    Args:
        x: (..., K).
        weight: (N, K), of the same dtype.
        rounding: See `fake_quantize`.
        wgrad_in_high_precision: Whether the product that gives the gradient of `weight` takes operands as they are.

    Returns:
        (..., N).
    """
    y: Tensor = _MXProduct.apply(x.reshape(-1, x.shape[-1]), weight, None, rounding, wgrad_in_high_precision)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def mx_grouped_mm(
    rows: Tensor,
    weights: Tensor,
    offsets: Tensor,
    rounding: ScaleRounding = "rceil",
    wgrad_in_high_precision: bool = False,
) -> Tensor:
    """Multiply each group of rows with a matrix of its own, with operands rounded to MXFP8, in both directions.

    For the gradient of the weights blocks lie along the rows. The caller fills each group up to a multiple of 32 rows,
    or blocks reach into the next expert, whose outliers then cost this one its precision.

    Args:
        rows: (M, K); group e ends before row `offsets[e]`. What follows the last group may be anything, NaN included:
            its rows of the output and of the gradient of `rows` are undefined, and nothing else depends on it.
        weights: (E, N, K), of the same dtype. N and K are multiples of 8, as `grouped_mm` demands.
        offsets: (E,), int32.
        rounding: See `fake_quantize`.
        wgrad_in_high_precision: As for `mx_linear`.

    Returns:
        (M, N).
    """
    if rows.shape[0] == 0:  # which not every kernel accepts
        return rows @ weights[0].T
    y: Tensor = _MXProduct.apply(rows, weights, offsets, rounding, wgrad_in_high_precision)
    return y


class _MXProduct(torch.autograd.Function):
    """`rows @ weight.T`, of all rows with one weight, or of groups of rows with one weight each."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (M, K)
        weight: Tensor,  # (N, K), or (E, N, K) with offsets
        offsets: Tensor | None,
        rounding: ScaleRounding,
        wgrad_in_high_precision: bool,
    ) -> Tensor:
        rows_need_gradient, weight_needs_gradient, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if weight_needs_gradient else None, weight if rows_need_gradient else None, offsets)
        ctx.rounding, ctx.wgrad_in_high_precision = rounding, wgrad_in_high_precision
        return multiply(fake_quantize(rows, -1, rounding), fake_quantize(weight, -1, rounding).mT, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight, offsets = ctx.saved_tensors
        rounding = ctx.rounding
        rows_gradient = weight_gradient = None
        if weight is not None:
            quantized = fake_quantize(gradient, -1, rounding)  # (M, N)
            rows_gradient = multiply(quantized, fake_quantize(weight, -2, rounding), offsets)
        if rows is not None:
            if ctx.wgrad_in_high_precision:
                gradient, rows = gradient.contiguous(), rows.contiguous()  # as grouped products demand
            else:
                gradient, rows = fake_quantize(gradient, -2, rounding), fake_quantize(rows, -2, rounding)
            weight_gradient = multiply(gradient.mT, rows, offsets)
        return rows_gradient, weight_gradient, None, None, None


def _factors(largest: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """What to multiply a block by before it is rounded to E4M3, and after.

    They are inverse unless the scale is 2^-127. There torchao differs from itself, and we from neither: with `"rceil"`
    the block becomes zero, with `"floor"` it is halved, both without effect on a model.

    Args:
        largest: Magnitude of each block's largest number, float32.
        rounding: See `fake_quantize`.

    Returns:
        Two of the same shape, float32; NaN for blocks with NaN.
    """
    if rounding == "rceil":
        # One power too low for numbers a few units of the last place above one: the logarithm rounds, torchao's too.
        exponent = torch.log2(largest / _E4M3_MAX).ceil().clamp(-_E8M0_EXPONENT, _E8M0_EXPONENT)
        down = torch.where(exponent == -_E8M0_EXPONENT, 1.0, torch.exp2(-exponent))
    else:
        floor = (largest.view(torch.int32) >> _FLOAT32_MANTISSA_BITS) - _E8M0_EXPONENT  # float32's bias is the same
        exponent = (floor - _E4M3_EXPONENT).clamp(min=-_E8M0_EXPONENT)
        exponent = torch.where(largest.isnan(), largest, exponent)
        down = torch.exp2(-exponent.clamp(min=1 - _E8M0_EXPONENT))
    return down, torch.exp2(exponent)
