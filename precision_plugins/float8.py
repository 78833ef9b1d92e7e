"""Float8 emulated in plain operations: the numbers of `torchao.float8.Float8Linear(emulate=True)`, bit for bit.

Both operands of a product are scaled to the range of an 8-bit float, rounded, divided by their scales again, and then
multiplied in float32. With s_R the scale of a row, s_C of a column and s_T of the whole tensor:

    ==================  ====================  =======================  ========================
    recipe              y = x w^T             dx = dy w                dw = dy^T x
    ==================  ====================  =======================  ========================
    tensorwise          s_T and s_T           s_T (E5M2) and s_T       s_T (E5M2) and s_T
    rowwise             s_R and s_R           s_R and s_C              s_C and s_C
    rowwise_with_gw_hp  s_R and s_R           s_R and s_T              operands as they are
    ==================  ====================  =======================  ========================

Everything else is E4M3. Scales of the last two recipes are rounded down to a power of two.
Unlike torchao's, these run without rows, and for groups of rows with a weight each: what one linear map for each group
would give. The recipes are torchao's:
https://docs.pytorch.org/ao/main/api_reference/generated/torchao.float8.Float8LinearRecipeName.html.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from precision_plugins.float8_weight import Float8Weight
from precision_plugins.products import multiply

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_ROWS, _COLUMNS, _WHOLE = (-1,), (-2,), (-2, -1)  # the dimensions that share one scale
_SMALLEST_MAXIMUM = 1e-12  # torchao's; keeps scales of zeros finite


def float8_linear(x: Tensor, weight: Tensor, recipe: Float8Recipe) -> Tensor:
    """`x @ weight.T` with operands rounded to Float8, in both directions. A frozen operand's product is left out.

    Args:
        x: (..., K); bfloat16 or float32.
        weight: (N, K). One that was gathered in Float8 is taken as it is, with the recipe "tensorwise".
        recipe: See the module.

    Returns:
        (..., N) in x's dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = int(rows.shape[0] == 0)  # without any there is no largest number to scale by: add one of zeros
    y: Tensor = _Float8Product.apply(pad(rows, (0, 0, 0, 1)) if missing else rows, weight, None, recipe)
    return y[missing:].reshape(*x.shape[:-1], weight.shape[0])


def float8_grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor, recipe: Float8Recipe) -> Tensor:
    """Multiply each group of rows with a matrix of its own, as one `float8_linear` for each group would.

    So no scale is shared between experts: where a linear map scales a column or a whole tensor, here it is a column or
    all of the expert's own rows. Groups can have any number of rows, and the host does not wait to know it, except
    inside `grouped_mm` on a GPU in float32 or with the recipe "tensorwise", whose operands no shorter dtype can hold.

    Args:
        rows: (M, K); group e ends before row `offsets[e]`. What follows the last group may be anything, NaN included:
            its rows of the output and of the gradient of `rows` are undefined, and nothing else depends on it.
        weights: (E, N, K), of the same dtype. N and K are multiples of 8, as `grouped_mm` demands.
        offsets: (E,), int32.
        recipe: See the module.

    Returns:
        (M, N).
    """
    if rows.shape[0] == 0:  # which not every kernel accepts
        return rows @ weights[0].T
    y: Tensor = _Float8Product.apply(rows, weights, offsets, recipe)
    return y


class _Float8Product(torch.autograd.Function):
    """`rows @ weight.T`, of all rows with one weight, or of groups of rows with one weight each."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (M, K)
        weight: Tensor,  # (N, K), or (E, N, K) with offsets
        offsets: Tensor | None,
        recipe: Float8Recipe,
    ) -> Tensor:
        rows_need_gradient, weight_needs_gradient, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if weight_needs_gradient else None, weight if rows_need_gradient else None, offsets)
        ctx.recipe = recipe
        dims = _WHOLE if recipe == "tensorwise" else _ROWS
        a, b = _fake_quantize(rows, dims, recipe, offsets), _rounded_weight(weight, dims, recipe)
        return _multiply(a, b.mT, offsets, recipe, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, offsets = ctx.saved_tensors
        recipe = ctx.recipe
        whole = recipe == "tensorwise"
        dtype = torch.float8_e5m2 if whole else torch.float8_e4m3fn
        rows_gradient = weight_gradient = None
        if weight is not None:
            a = _fake_quantize(gradient, _WHOLE if whole else _ROWS, recipe, offsets, dtype)  # (M, N)
            b = _rounded_weight(weight, _COLUMNS if recipe == "rowwise" else _WHOLE, recipe)
            rows_gradient = _multiply(a, b, offsets, recipe, gradient.dtype)
        if rows is not None and recipe == "rowwise_with_gw_hp":
            gradient, rows = gradient.contiguous(), rows.contiguous()  # as grouped products demand
            weight_gradient = multiply(gradient.T, rows, offsets)
        elif rows is not None:
            dims = _WHOLE if whole else _COLUMNS
            a, b = _fake_quantize(gradient, dims, recipe, offsets, dtype), _fake_quantize(rows, dims, recipe, offsets)
            weight_gradient = _multiply(a.T, b, offsets, recipe, gradient.dtype)
        return rows_gradient, weight_gradient, None, None


def scale_of(largest: Tensor, recipe: Float8Recipe, dtype: torch.dtype) -> Tensor:
    """What to multiply by so that `largest` becomes the largest number of `dtype`; the same shape, float32."""
    # In float64, because compiled and eager code divide differently in float32.
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=_SMALLEST_MAXIMUM)).float()
    return scale if recipe == "tensorwise" else scale.log2().floor().exp2()


def round_to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x * scale` in the 8-bit `dtype`, row-major.

    Args:
        x: Any shape.
        scale: float32; of as many dimensions as x, or the product would be rounded to x's dtype first.
        dtype: Of the result.
    """
    limit = torch.finfo(dtype).max  # casts beyond the range give NaN or infinity up to torch 2.11
    # Row-major, because grouped products refuse other strides, and at this point it costs no pass of its own.
    return (x * scale).clamp(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def _rounded_weight(weight: Tensor, dims: tuple[int, ...], recipe: Float8Recipe) -> Tensor:
    return weight.rounded() if isinstance(weight, Float8Weight) else _fake_quantize(weight, dims, recipe)


def _fake_quantize(
    x: Tensor,
    dims: tuple[int, ...],
    recipe: Float8Recipe,
    offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    """Round to an 8-bit float and back.

    Args:
        x: Rows (M, K), one weight (N, K) or a weight for each expert (E, N, K).
        dims: The dimensions that share one scale.
        recipe: See the module.
        offsets: If given, x is rows, and only those of the same group share a scale.
        dtype: Of the 8-bit float.

    Returns:
        x's shape, float32, row-major.
    """
    if offsets is None or -2 not in dims:
        scale = scale_of(x.abs().amax(dims, keepdim=True), recipe, dtype)
    else:
        each = x.abs().amax(-1, keepdim=True) if -1 in dims else x.abs()  # (M, 1) or (M, K)
        expert = torch.searchsorted(offsets, torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype), right=True)
        # The rows after the last group become a group of their own, so that what is in them stays there.
        largest = each.new_zeros(offsets.shape[0] + 1, each.shape[1])
        largest = largest.scatter_reduce(0, expert[:, None].expand_as(each), each, "amax")
        scale = scale_of(largest, recipe, dtype)[expert]
    return round_to_float8(x, scale, dtype).float() / scale


def _multiply(a: Tensor, b: Tensor, offsets: Tensor | None, recipe: Float8Recipe, dtype: torch.dtype) -> Tensor:
    """The product of operands from `_fake_quantize`, in `dtype`."""
    if offsets is not None and a.is_cuda and recipe != "tensorwise":
        # In float32 grouped_mm would wait for the device. Numbers with 4 bits times a power of two fit in bfloat16.
        return multiply(a.to(dtype), b.to(dtype), offsets)
    return multiply(a, b, offsets).to(dtype)
