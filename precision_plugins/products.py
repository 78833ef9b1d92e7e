"""The plain matrix products that emulated ones end in."""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


def multiply(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """Multiply two matrices, or groups of rows or columns of them.

    Args:
        a: (M, K).
        b: (K, N); or a matrix for each of E groups of rows of `a`, (E, K, N).
        offsets: None for a plain product. Else the end of each group, (E,), int32, with K and N multiples of 16 bytes:
            groups of `a`'s rows, or, if `b` is one matrix, of the dimension that is summed over.

    Returns:
        (M, N); or, if `b` is one matrix and there are groups, the sum over each of them, (E, M, N). What lies after the
        last group counts for nothing; if it is rows of the result, they are undefined.
    """
    if offsets is None:
        return torch.mm(a, b)
    if a.dtype == torch.float32:
        return _grouped_mm_float32(a, b, offsets)
    return grouped_mm(a, b, offs=offsets)


# An operator of our own, because up to torch 2.13 the compiler refuses grouped_mm in float32, which does run.
@torch.library.custom_op("precision_plugins::grouped_mm_float32", mutates_args=())
def _grouped_mm_float32(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return grouped_mm(a, b, offs=offsets).contiguous()


@_grouped_mm_float32.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[2]) if b.ndim == 3 else a.new_empty(len(offsets), a.shape[0], b.shape[1])
