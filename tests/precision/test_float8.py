"""Emulated Float8 has the bits of torchao's, and grouped products those of one linear map for each group."""

import functools
import os
from dataclasses import replace

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")  # no kernels are needed, and loading them is noisy

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

from precision_plugins.float8 import Float8Recipe, float8_grouped_mm, float8_linear
from tests.precision.numerics import assert_same_bits, compiled, exact, normal, products, run, sqnr

M, N, K = 256, 384, 512
NAN, INF = float("nan"), float("inf")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])


def torchao_linear(x: Tensor, weight: Tensor, recipe: Float8Recipe) -> Tensor:
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    module = Float8Linear.from_float(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), config)
    return matmul_with_hp_or_float8_args.apply(x, weight.t(), module.linear_mm_config, config)


def distribution(name: str, *shape: int, seed: int = 0) -> Tensor:
    x = normal(*shape, seed=seed)
    match name:
        case "outlier_columns":
            x[..., ::40] *= 1000
        case "wide_range":
            x = x * torch.exp2(20 * normal(*shape, seed=seed + 1))
        case "huge":
            x = x * 1e36
        case "tiny":
            x = x * 1e-14
        case "subnormal":
            x = x * 1e-40
        case "powers_of_two":
            x = x.sign() * torch.exp2(torch.randint(-40, 40, shape, generator=torch.Generator().manual_seed(seed)))
        case "zeros":
            x[::2] = 0.0
            x[..., ::3] = -0.0
        case "infinity":
            x[..., 5, 3] = INF
        case "nan":
            x[..., 5, 3] = NAN
    return x


DISTRIBUTIONS = [
    "normal",
    "outlier_columns",
    "wide_range",
    "huge",
    "tiny",
    "subnormal",
    "powers_of_two",
    "zeros",
    "infinity",
    "nan",
]


@RECIPES
@DTYPES
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_linear_has_the_bits_of_torchao(name: str, dtype: torch.dtype, recipe: Float8Recipe) -> None:
    for shape, outputs in (((48, 64), 80), ((2, 3, 7, 50), 9)):
        x, direction = distribution(name, *shape).to(dtype), distribution(name, *shape[:-1], outputs, seed=4).to(dtype)
        weight = distribution(name, outputs, shape[-1], seed=2).to(dtype)
        found = run(functools.partial(float8_linear, recipe=recipe), x, weight, direction)
        expected = run(functools.partial(torchao_linear, recipe=recipe), x, weight, direction)
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)


def test_linear_equals_the_module_of_torchao() -> None:
    """The other tests call what the module calls; this one the module."""
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    module = Float8Linear.from_float(nn.Linear(64, 48, bias=False), config)
    x = normal(2, 5, 64)
    assert_same_bits(float8_linear(x, module.weight, "rowwise"), module(x))


@RECIPES
def test_scales_are_those_of_torchao_for_every_maximum(recipe: Float8Recipe) -> None:
    """All positive finite numbers of bfloat16, as a row's largest."""
    largest = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    rows = (largest[:, None].float() * torch.linspace(-1, 1, 16)).bfloat16()
    identity = torch.eye(16).bfloat16()
    assert_same_bits(float8_linear(rows, identity, recipe), torchao_linear(rows, identity, recipe))


@RECIPES
@DTYPES
def test_linear_keeps_the_precision_of_the_format(dtype: torch.dtype, recipe: Float8Recipe) -> None:
    x, weight, direction = (
        normal(M, K, dtype=dtype),
        normal(N, K, dtype=dtype, seed=1),
        normal(M, N, dtype=dtype, seed=2),
    )
    floors = {"tensorwise": (27, 24, 24), "rowwise": (27, 27, 27), "rowwise_with_gw_hp": (27, 27, 50)}[recipe]
    found = run(functools.partial(float8_linear, recipe=recipe), x, weight, direction)
    for a, b, floor in zip(found, exact(x, weight, direction), floors, strict=True):
        assert sqnr(a, b) > floor
        assert floor == 50 or sqnr(a, b) < 35, "rounding to 4 bits must show"


def separately(
    rows: Tensor, weights: Tensor, ends: list[int], direction: Tensor, recipe: Float8Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of one linear map of torchao's for each group that has rows."""
    y, dx, dw = torch.empty_like(direction), torch.empty_like(rows), torch.zeros_like(weights)
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            part = run(
                functools.partial(torchao_linear, recipe=recipe),
                rows[start:end],
                weights[expert],
                direction[start:end],
            )
            y[start:end], dx[start:end], dw[expert] = part
    return y, dx, dw


@RECIPES
@DTYPES
@pytest.mark.parametrize("name", ["normal", "outlier_columns", "huge", "tiny", "zeros", "nan"])
@pytest.mark.parametrize("ends", [[7, 7, 30, 61], [0, 0, 0, 61], [61, 61, 61, 61], [16, 32, 48, 61]], ids=str)
def test_grouped_equals_one_linear_for_each_expert(
    ends: list[int], name: str, dtype: torch.dtype, recipe: Float8Recipe
) -> None:
    rows, direction = distribution(name, 61, 64).to(dtype), distribution(name, 61, 48, seed=4).to(dtype)
    weights = normal(4, 48, 64, dtype=dtype, seed=2) * torch.tensor([1e-3, 1, 1e3, 7])[:, None, None].to(dtype)
    grouped = functools.partial(float8_grouped_mm, offsets=torch.tensor(ends).int(), recipe=recipe)
    found = run(grouped, rows, weights, direction)
    for a, b in zip(found, separately(rows, weights, ends, direction, recipe), strict=True):
        assert_same_bits(a, b)


@RECIPES
@DTYPES
@pytest.mark.parametrize("what", [NAN, INF, 1e30], ids=str)
def test_what_follows_the_last_group_stays_there(what: float, dtype: torch.dtype, recipe: Float8Recipe) -> None:
    rows, weights = normal(61, 64, dtype=dtype), normal(3, 48, 64, dtype=dtype, seed=1)
    direction = normal(61, 48, dtype=dtype, seed=2)
    product = functools.partial(float8_grouped_mm, offsets=torch.tensor([20, 20, 61]).int(), recipe=recipe)
    y, dx, dw = run(product, rows, weights, direction)

    def with_tail(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_full((35, tensor.shape[1]), what)])

    found = run(product, with_tail(rows), weights, with_tail(direction))
    assert_same_bits(found[0][:61], y)
    assert_same_bits(found[1][:61], dx)
    assert_same_bits(found[2], dw)


@RECIPES
@pytest.mark.parametrize(("trained", "count"), [((True, True), 3), ((True, False), 2), ((False, True), 2)])
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_frozen_operands_cost_no_product(
    trained: tuple[bool, bool], count: int, grouped: bool, recipe: Float8Recipe
) -> None:
    x = normal(20, 32)
    if grouped:
        product = functools.partial(float8_grouped_mm, offsets=torch.tensor([7, 20]).int(), recipe=recipe)
        assert products(product, x, normal(2, 16, 32), trained) == count
    else:
        assert products(functools.partial(float8_linear, recipe=recipe), x, normal(16, 32), trained) == count


def test_second_derivatives_are_refused() -> None:
    """They would be those of the rounding, which are zero."""
    x, weight = normal(20, 32).requires_grad_(), normal(16, 32).requires_grad_()
    (gradient,) = torch.autograd.grad(float8_linear(x, weight, "rowwise").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@RECIPES
@DTYPES
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_strides_do_not_matter(grouped: bool, dtype: torch.dtype, recipe: Float8Recipe) -> None:
    x, direction = normal(61, 64, dtype=dtype), normal(61, 48, dtype=dtype, seed=2)
    product = functools.partial(float8_linear, recipe=recipe)
    weight = normal(48, 64, dtype=dtype, seed=1)
    if grouped:
        weight = normal(3, 48, 64, dtype=dtype, seed=1)
        product = functools.partial(float8_grouped_mm, offsets=torch.tensor([20, 20, 61]).int(), recipe=recipe)
    expected = run(product, x, weight, direction)
    strided = [tensor.mT.contiguous().mT for tensor in (x, weight, direction)]
    sliced = [torch.stack([tensor, tensor * NAN], -1)[..., 0] for tensor in (x, weight, direction)]
    for operands in (strided, sliced):
        assert not any(tensor.is_contiguous() for tensor in operands)
        for a, b in zip(run(product, *operands), expected, strict=True):
            assert_same_bits(a, b)
    constant = torch.ones((), dtype=dtype).expand_as(direction)
    for a, b in zip(run(product, x, weight, constant), run(product, x, weight, constant.clone()), strict=True):
        assert_same_bits(a, b)


@RECIPES
@DTYPES
def test_no_rows(dtype: torch.dtype, recipe: Float8Recipe) -> None:
    weight = normal(16, 32, dtype=dtype)
    for x in (normal(0, 32, dtype=dtype), normal(2, 0, 32, dtype=dtype)):
        direction = x.new_zeros(*x.shape[:-1], 16)
        y, dx, dw = run(functools.partial(float8_linear, recipe=recipe), x, weight, direction)
        assert (y.shape, y.dtype, dx.shape) == (direction.shape, dtype, x.shape)
        assert torch.equal(dw, torch.zeros_like(weight))
    weights, x = normal(3, 16, 32, dtype=dtype), normal(0, 32, dtype=dtype)
    product = functools.partial(float8_grouped_mm, offsets=torch.zeros(3).int(), recipe=recipe)
    y, dx, dw = run(product, x, weights, x.new_zeros(0, 16))
    assert (y.shape, y.dtype, dx.shape) == ((0, 16), dtype, (0, 32))
    assert torch.equal(dw, torch.zeros_like(weights))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiles_once_for_all_numbers_of_rows(recipe: Float8Recipe) -> None:
    """Linear and grouped in one graph, to be quick."""

    def both(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        return float8_linear(x, weights[0], recipe) + float8_grouped_mm(x, weights, offsets, recipe)

    graph, weights = compiled(both), normal(2, 48, 64).bfloat16()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ends in ([20, 96], [9, 9], [0, 77]):
            x, direction = normal(ends[-1], 64).bfloat16(), normal(ends[-1], 48, seed=2).bfloat16()
            found, expected = (
                run(functools.partial(product, offsets=torch.tensor(ends).int()), x, weights, direction)
                for product in (graph, both)
            )
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b)
