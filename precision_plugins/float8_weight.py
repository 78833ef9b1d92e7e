"""A weight in Float8 with one scale: for autograd, FSDP2 and the compiler a parameter in the compute dtype."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

_aten = torch.ops.aten
# What torch does to a parameter on its way to the product, none of which changes it.
_SAME = (_aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.view.default)


class Float8Weight(Tensor):
    """A matrix that only low-precision products can read; its gradient is an ordinary one.

    Args:
        payload: (N, K), float8_e4m3fn: the weight times `scale`, rounded.
        scale: float32, one number.
        dtype: What the weight claims to be, and its gradient is.
    """

    payload: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor, scale: Tensor, dtype: torch.dtype) -> Self:
        # Private, but the documented way to make a tensor that is made of others; the compiler asks for it.
        return torch.Tensor._make_wrapper_subclass(
            cls, payload.shape, strides=payload.stride(), dtype=dtype, device=payload.device
        )

    def __init__(self, payload: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.payload = payload
        self.scale = scale

    def rounded(self) -> Tensor:
        """The numbers it stands for: (N, K), float32."""
        return self.payload.float() / self.scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["payload", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor], dtype: torch.dtype, size: torch.Size, stride: Sequence[int]
    ) -> "Float8Weight":
        return Float8Weight(parts["payload"], parts["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as no class method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> "Float8Weight":
        weight = args[0]
        if func in _SAME and isinstance(weight, Float8Weight) and _keeps_shape(weight, *args[1:]):
            return Float8Weight(weight.payload, weight.scale, weight.dtype)
        raise RuntimeError(  # operators would turn a TypeError into one of their own
            f"{func} cannot read a weight that was gathered in Float8. If something else than the forward of a linear "
            "map uses it, name it in filter_fqns, or set float8_all_gather=False."
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes a private argument
        return f"Float8Weight({tuple(self.shape)}, {self.dtype}, {self.device})"


def _keeps_shape(weight: Float8Weight, *asked: Any) -> bool:
    """Whether what a view asks for (shape, then strides, then offset) is what there is."""
    return list(map(_listed, asked)) in (
        [],
        [list(weight.shape)],
        [list(weight.shape), list(weight.stride())],
        [list(weight.shape), list(weight.stride()), 0],
    )


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else value
