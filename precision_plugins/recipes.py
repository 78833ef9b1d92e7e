"""Recipes by name: which products run in low precision, on which hardware, and what sizes they take."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

from torch import Tensor

from precision_plugins import torchao_kernels
from precision_plugins.float8 import Float8Recipe, float8_grouped_mm, float8_linear
from precision_plugins.low_precision_linear import Product
from precision_plugins.mx import ScaleRounding, mx_grouped_mm, mx_linear

MXFP8Recipe = Literal["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp", "mxfp8_floor"]
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
Capability = tuple[int, int]

# The names of torchao until 0.16, which articles and configurations still use.
OLD_NAMES: dict[str, MXFP8Recipe] = {"mxfp8_cublas": "mxfp8_floor", "mxfp8_cublas_rceil": "mxfp8_rceil"}


@dataclass(frozen=True)
class Recipe:
    """How products run.

    Args:
        name: As the manifest shows it.
        linear: The product of a linear map.
        grouped: The product of grouped experts, made when it is needed, for what it needs may be missing; the same one
            each time, so that all blocks can share a compiled graph.
        multiple: What input and output features must be divisible by.
        group_multiple: What the rows of each expert are filled up to a multiple of.
    """

    name: str
    linear: Product
    grouped: Callable[[], GroupedProduct]
    multiple: int
    group_multiple: int


def choose(recipe: str, emulate: bool, capability: Capability | None) -> Recipe:
    """The recipe called `recipe` for a GPU of this compute capability, or for the CPU.

    Args:
        recipe: A valid name, or `"auto"` for the one that the hardware runs fastest.
        emulate: Compute the same numbers, but with ordinary products.
        capability: Of the GPU; None for the CPU.

    Raises:
        ValueError: If the hardware lacks what the recipe needs and `emulate` is off.
    """
    if recipe == "auto":
        recipe = _fastest(emulate, capability)
    recipe = OLD_NAMES.get(recipe, recipe)
    if recipe in get_args(MXFP8Recipe):
        return _mxfp8(recipe, emulate, capability)
    return _float8(recipe, emulate, capability)  # type: ignore[arg-type]  # the other names


def _fastest(emulate: bool, capability: Capability | None) -> str:
    if capability is not None and capability[0] == 10:
        return "mxfp8_rceil"
    if capability is not None and (8, 9) <= capability < (10, 0):
        return "rowwise"
    if emulate:
        return "mxfp8_rceil"
    raise ValueError(
        f"recipe='auto': {_hardware(capability)} has no kernels for MXFP8 (compute capability 10.x) or Float8 (8.9 and "
        "9.x). emulate=True computes the same numbers as Blackwell would, more slowly than bf16."
    )


def _mxfp8(recipe: str, emulate: bool, capability: Capability | None) -> Recipe:
    rounding: ScaleRounding = "floor" if recipe == "mxfp8_floor" else "rceil"
    wgrad = recipe == "mxfp8_rceil_wgrad_with_hp"
    if emulate:
        return Recipe(
            f"{recipe} (emulated)",
            partial(mx_linear, rounding=rounding, wgrad_in_high_precision=wgrad),
            cache(lambda: partial(mx_grouped_mm, rounding=rounding, wgrad_in_high_precision=wgrad)),
            multiple=32,
            group_multiple=32,
        )
    if capability is None or capability[0] != 10:
        raise ValueError(
            f"recipe={recipe!r} needs a GPU of compute capability 10.x (Blackwell), but this is "
            f"{_hardware(capability)}. emulate=True computes the same numbers, more slowly than bf16; on Ada and "
            "Hopper GPUs Float8Precision is faster than bf16."
        )
    return Recipe(
        recipe,
        torchao_kernels.mx_linear_kernel(rounding, wgrad),
        cache(lambda: torchao_kernels.mx_grouped_kernel(rounding, wgrad)),
        multiple=32,
        group_multiple=128,  # of torchao's quantisation of activations; see its _to_mxfp8_then_scaled_grouped_mm
    )


def _float8(recipe: Float8Recipe, emulate: bool, capability: Capability | None) -> Recipe:
    if emulate:
        return Recipe(
            f"float8 {recipe} (emulated)",
            partial(float8_linear, recipe=recipe),
            cache(lambda: partial(float8_grouped_mm, recipe=recipe)),
            multiple=16,
            group_multiple=16,
        )
    if capability is None or capability < (8, 9):
        raise ValueError(
            f"recipe={recipe!r} needs a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell), but this is "
            f"{_hardware(capability)}. emulate=True computes the same numbers, more slowly than bf16."
        )
    return Recipe(
        f"float8 {recipe}",
        torchao_kernels.float8_linear_kernel(recipe),
        cache(lambda: _float8_grouped(recipe)),
        multiple=16,
        group_multiple=16,
    )


def _float8_grouped(recipe: Float8Recipe) -> GroupedProduct:
    if recipe != "rowwise":
        raise ValueError(
            f"recipe={recipe!r}: the kernels for grouped experts scale by rows. Use recipe='rowwise', or "
            "grouped_experts=False."
        )
    return torchao_kernels.float8_grouped_kernel()


def _hardware(capability: Capability | None) -> str:
    return "the CPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"
