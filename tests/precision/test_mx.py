"""Emulated MXFP8 has the bits of torchao's, the precision that the format promises, and fewer demands on its input."""

import functools
import os

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")  # no kernels are needed, and loading them is noisy

import pytest
import torch
from torch import Tensor
from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from precision_plugins.mx import ScaleRounding, fake_quantize, mx_grouped_mm, mx_linear
from tests.precision.numerics import assert_same_bits, compiled, exact, normal, products, run, sqnr

M, N, K = 256, 384, 512
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
ROUNDINGS = pytest.mark.parametrize("rounding", ["rceil", "floor"])
WGRADS = pytest.mark.parametrize("wgrad_in_high_precision", [False, True], ids=["mx-wgrad", "hp-wgrad"])
NAN, INF = float("nan"), float("inf")


def torchao_quantize(x: Tensor, rounding: ScaleRounding) -> Tensor:
    mode = ScaleCalculationMode(rounding)
    return MXTensor.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, mode).dequantize(x.dtype)


def torchao_linear(x: Tensor, weight: Tensor, rounding: ScaleRounding, wgrad_in_high_precision: bool) -> Tensor:
    mode = ScaleCalculationMode(rounding)
    return _to_mxfp8_then_scaled_mm(x, weight, KernelPreference.EMULATED, mode, wgrad_in_high_precision)


def torchao_grouped(
    rows: Tensor, weights: Tensor, offsets: Tensor, rounding: ScaleRounding, wgrad_in_high_precision: bool
) -> Tensor:
    return _to_mxfp8_then_scaled_grouped_mm(
        rows,
        weights.transpose(-2, -1),
        offsets,
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=wgrad_in_high_precision,
        scale_calculation_mode=ScaleCalculationMode(rounding),
    )


def distribution(name: str, dtype: torch.dtype) -> Tensor:
    """(96, 128)."""
    x = normal(96, 128, seed=1)
    match name:
        case "uniform":
            x = x.sigmoid() - 0.5
        case "cauchy":
            x = torch.tan(torch.pi * (x.sigmoid() - 0.5))
        case "outlier_columns":
            x[:, ::40] *= 1000
        case "wide_range":
            x = x * torch.exp2(20 * normal(96, 128, seed=2))
        case "huge":
            x = x * 1e37
        case "tiny":
            x = x * 1e-37
        case "subnormal":
            x = x * 1e-40
        case "powers_of_two":
            x = x.sign() * torch.exp2(torch.randint(-126, 128, x.shape, generator=torch.Generator().manual_seed(0)))
        case "zeros":
            x = x * (x > 1.5)
            x[:8] = 0.0
            x[8:16] = -0.0
        case "infinities":
            x[::3, 5], x[1::3, 70], x[2, 100] = INF, -INF, 3e38
        case "nans":
            x[::3, 5], x[1::3, 70], x[2, 100:102] = NAN, -NAN, torch.tensor([NAN, INF])
        case "constant":
            x = torch.full_like(x, 0.1)
    return x.to(dtype)


DISTRIBUTIONS = [
    "normal",
    "uniform",
    "cauchy",
    "outlier_columns",
    "wide_range",
    "huge",
    "tiny",
    "subnormal",
    "powers_of_two",
    "zeros",
    "infinities",
    "nans",
    "constant",
]


@ROUNDINGS
@DTYPES
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rounds_as_torchao(name: str, dtype: torch.dtype, rounding: ScaleRounding) -> None:
    x = distribution(name, dtype)
    assert_same_bits(fake_quantize(x, -1, rounding), torchao_quantize(x, rounding))
    assert_same_bits(fake_quantize(x, 0, rounding), torchao_quantize(x.T, rounding).T)
    assert_same_bits(fake_quantize(x.T, 0, rounding), torchao_quantize(x, rounding).T)
    experts = x.view(3, 32, 128)
    assert_same_bits(fake_quantize(experts, -2, rounding), torchao_quantize(experts.mT, rounding).mT)
    assert_same_bits(fake_quantize(experts, 1, rounding), torchao_quantize(experts.mT, rounding).mT)


@ROUNDINGS
def test_rounds_as_torchao_for_every_maximum(rounding: ScaleRounding) -> None:
    """All positive finite numbers of bfloat16, as a block's largest."""
    largest = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    assert largest.isfinite().all()
    blocks = (largest[:, None].float() * torch.linspace(-1, 1, 32)).bfloat16()
    assert torch.equal(blocks.amax(-1), largest)
    assert_same_bits(fake_quantize(blocks, -1, rounding), torchao_quantize(blocks, rounding))


@ROUNDINGS
@pytest.mark.parametrize("mantissa", [1.0, 1.75], ids=["power", "range"])
def test_rounds_as_torchao_next_to_powers_of_two(mantissa: float, rounding: ScaleRounding) -> None:
    """Maxima in float32 a few units of the last place around 2^k and 1.75 * 2^k, where the scale changes."""
    power = torch.exp2(torch.arange(-126, 128).float()) * mantissa
    largest = (power.view(torch.int32)[:, None] + torch.arange(-8, 9)).view(torch.float32)
    blocks = largest.flatten()[:, None] * torch.linspace(-1, 1, 32)
    assert_same_bits(fake_quantize(blocks, -1, rounding), torchao_quantize(blocks, rounding))


@ROUNDINGS
@DTYPES
@pytest.mark.parametrize("size", [1, 31, 33, 100])
def test_last_block_may_be_short(size: int, dtype: torch.dtype, rounding: ScaleRounding) -> None:
    x = normal(6, size, dtype=dtype)
    filled = torchao_quantize(torch.nn.functional.pad(x, (0, -size % 32)), rounding)[:, :size]
    assert_same_bits(fake_quantize(x, -1, rounding), filled)
    assert_same_bits(fake_quantize(x.T, -2, rounding), filled.T)


@WGRADS
@ROUNDINGS
@DTYPES
@pytest.mark.parametrize("shape", [(96,), (2, 3, 32)], ids=str)
def test_linear_has_the_bits_of_torchao(
    shape: tuple[int, ...], dtype: torch.dtype, rounding: ScaleRounding, wgrad_in_high_precision: bool
) -> None:
    x, weight, direction = normal(*shape, 128, dtype=dtype), normal(160, 128, dtype=dtype, seed=1), normal(*shape, 160)
    options = {"rounding": rounding, "wgrad_in_high_precision": wgrad_in_high_precision}
    found = run(functools.partial(mx_linear, **options), x, weight, direction.to(dtype))
    expected = run(functools.partial(torchao_linear, **options), x, weight, direction.to(dtype))
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


@ROUNDINGS
@DTYPES
def test_linear_keeps_the_precision_of_the_format(dtype: torch.dtype, rounding: ScaleRounding) -> None:
    x, weight, direction = (
        normal(M, K, dtype=dtype),
        normal(N, K, dtype=dtype, seed=1),
        normal(M, N, dtype=dtype, seed=2),
    )
    floor = 27 if rounding == "rceil" else 26
    found = run(functools.partial(mx_linear, rounding=rounding), x, weight, direction)
    for a, b in zip(found, exact(x, weight, direction), strict=True):
        assert floor < sqnr(a, b) < 35, "rounding to 4 bits must show"


@DTYPES
def test_high_precision_is_for_the_gradient_of_the_weight_alone(dtype: torch.dtype) -> None:
    x, weight, direction = (
        normal(M, K, dtype=dtype),
        normal(N, K, dtype=dtype, seed=1),
        normal(M, N, dtype=dtype, seed=2),
    )
    found = run(functools.partial(mx_linear, wgrad_in_high_precision=True), x, weight, direction)
    y, dx, dw = (sqnr(a, b) for a, b in zip(found, exact(x, weight, direction), strict=True))
    assert 27 < y < 35
    assert 27 < dx < 35
    assert dw > 50


@WGRADS
@DTYPES
@pytest.mark.parametrize("sizes", [(33, 50, 7), (1, 1, 1), (70, 32, 100)], ids=str)
def test_linear_takes_any_sizes(sizes: tuple[int, int, int], dtype: torch.dtype, wgrad_in_high_precision: bool) -> None:
    rows, inputs, outputs = sizes
    x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, seed=1)
    direction = normal(rows, outputs, dtype=dtype, seed=2)
    found = run(functools.partial(mx_linear, wgrad_in_high_precision=wgrad_in_high_precision), x, weight, direction)

    def rounded(tensor: Tensor, dim: int) -> Tensor:
        return fake_quantize(tensor, dim, "rceil").double()

    dw = direction.double().T @ x.double() if wgrad_in_high_precision else rounded(direction, 0).T @ rounded(x, 0)
    expected = [rounded(x, 1) @ rounded(weight, 1).T, rounded(direction, 1) @ rounded(weight, 0), dw]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize(("trained", "count"), [((True, True), 3), ((True, False), 2), ((False, True), 2)])
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_frozen_operands_cost_no_product(trained: tuple[bool, bool], count: int, grouped: bool) -> None:
    x = normal(64, 32)
    if grouped:
        offsets = torch.tensor([32, 64], dtype=torch.int32)
        assert products(functools.partial(mx_grouped_mm, offsets=offsets), x, normal(2, 16, 32), trained) == count
    else:
        assert products(mx_linear, x, normal(16, 32), trained) == count


def test_frozen_operands_are_not_kept() -> None:
    x, weight = normal(64, 32), normal(16, 32)
    for trained, kept in ((weight, x), (x, weight)):
        saved: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.shape), lambda t: t):
            operands = (tensor.detach().requires_grad_(tensor is trained) for tensor in (x, weight))
            mx_linear(*operands)
        assert saved == [kept.shape]


def test_second_derivatives_are_refused() -> None:
    """They would be those of the rounding, which are zero."""
    x, weight = normal(64, 32).requires_grad_(), normal(16, 32).requires_grad_()
    (gradient,) = torch.autograd.grad(mx_linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def scattered(x: Tensor) -> Tensor:
    """The same numbers, no two of them neighbours in memory."""
    return torch.stack([x, x * NAN], -1).mT.contiguous().mT[..., 0].mT.contiguous().mT


@WGRADS
@DTYPES
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_strides_do_not_matter(grouped: bool, dtype: torch.dtype, wgrad_in_high_precision: bool) -> None:
    rows = 96
    x, direction = normal(rows + 5, 64, dtype=dtype), normal(rows + 5, 48, dtype=dtype, seed=2)
    product = functools.partial(mx_linear, wgrad_in_high_precision=wgrad_in_high_precision)
    weight = normal(48, 64, dtype=dtype, seed=1)
    if grouped:
        offsets = torch.tensor([32, 32, rows], dtype=torch.int32)  # the last 5 rows are undefined
        weight = normal(3, 48, 64, dtype=dtype, seed=1)
        product = functools.partial(mx_grouped_mm, offsets=offsets, wgrad_in_high_precision=wgrad_in_high_precision)

    def results(*operands: Tensor) -> list[Tensor]:
        y, dx, dw = run(product, *operands)
        return [y[:rows], dx[:rows], dw]

    expected = results(x, weight, direction)
    for strided in (scattered, lambda tensor: tensor.mT.contiguous().mT):
        assert not strided(x).is_contiguous()
        for a, b in zip(results(strided(x), strided(weight), strided(direction)), expected, strict=True):
            assert_same_bits(a, b)
    constant = torch.ones((), dtype=dtype).expand_as(direction)
    for a, b in zip(results(x, weight, constant), results(x, weight, constant.clone()), strict=True):
        assert_same_bits(a, b)


@WGRADS
@ROUNDINGS
def test_grouped_has_the_bits_of_torchao(rounding: ScaleRounding, wgrad_in_high_precision: bool) -> None:
    offsets = torch.tensor([32, 32, 128, 192], dtype=torch.int32)  # the second expert has no rows
    rows, weights = normal(192, 128).bfloat16(), normal(4, 96, 128, seed=1).bfloat16()
    direction = normal(192, 96, seed=2).bfloat16()
    options = {"offsets": offsets, "rounding": rounding, "wgrad_in_high_precision": wgrad_in_high_precision}
    found = run(functools.partial(mx_grouped_mm, **options), rows, weights, direction)
    expected = run(functools.partial(torchao_grouped, **options), rows, weights, direction)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)
    assert not found[2][1].any(), "an expert without rows has a gradient of zero"


@WGRADS
@DTYPES
def test_grouped_equals_one_linear_for_each_expert(dtype: torch.dtype, wgrad_in_high_precision: bool) -> None:
    ends = [64, 64, 96, 224]
    rows, weights = normal(224, 64, dtype=dtype), normal(4, 48, 64, dtype=dtype, seed=1)
    direction = normal(224, 48, dtype=dtype, seed=2)
    grouped = functools.partial(
        mx_grouped_mm, offsets=torch.tensor(ends).int(), wgrad_in_high_precision=wgrad_in_high_precision
    )
    single = functools.partial(mx_linear, wgrad_in_high_precision=wgrad_in_high_precision)
    y, dx, dw = run(grouped, rows, weights, direction)
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected = run(single, rows[start:end], weights[expert], direction[start:end])
        for a, b in zip((y[start:end], dx[start:end], dw[expert]), expected, strict=True):
            assert_same_bits(a, b)


@WGRADS
@DTYPES
@pytest.mark.parametrize("tail", [32, 50])
def test_what_follows_the_last_group_stays_there(tail: int, dtype: torch.dtype, wgrad_in_high_precision: bool) -> None:
    offsets = torch.tensor([32, 96], dtype=torch.int32)
    rows, weights = normal(96, 64, dtype=dtype), normal(2, 48, 64, dtype=dtype, seed=1)
    direction = normal(96, 48, dtype=dtype, seed=2)
    product = functools.partial(mx_grouped_mm, offsets=offsets, wgrad_in_high_precision=wgrad_in_high_precision)
    y, dx, dw = run(product, rows, weights, direction)

    def with_tail(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_full((tail, tensor.shape[1]), NAN)])

    found = run(product, with_tail(rows), weights, with_tail(direction))
    assert_same_bits(found[0][:96], y)
    assert_same_bits(found[1][:96], dx)
    assert_same_bits(found[2], dw)


@DTYPES
def test_no_rows(dtype: torch.dtype) -> None:
    weight = normal(16, 32, dtype=dtype)
    for x in (normal(0, 32, dtype=dtype), normal(2, 0, 32, dtype=dtype)):
        y, dx, dw = run(mx_linear, x, weight, x.new_zeros(*x.shape[:-1], 16))
        assert (y.shape, dx.shape) == ((*x.shape[:-1], 16), x.shape)
        assert torch.equal(dw, torch.zeros_like(weight))
    weights, offsets = normal(3, 16, 32, dtype=dtype), torch.zeros(3, dtype=torch.int32)
    x = normal(0, 32, dtype=dtype)
    y, dx, dw = run(functools.partial(mx_grouped_mm, offsets=offsets), x, weights, x.new_zeros(0, 16))
    assert (y.shape, dx.shape) == ((0, 16), (0, 32))
    assert torch.equal(dw, torch.zeros_like(weights))


def test_compiles_once_for_all_numbers_of_rows() -> None:
    """Above 32: one block is a graph of its own."""
    graph, weight = compiled(mx_linear), normal(48, 64).bfloat16()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (96, 33, 40, 128):
            x, direction = normal(rows, 64).bfloat16(), normal(rows, 48, seed=2).bfloat16()
            found, expected = (run(product, x, weight, direction) for product in (graph, mx_linear))
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b)


def test_grouped_compiles_once_for_all_numbers_of_rows() -> None:
    graph, weights = compiled(mx_grouped_mm), normal(2, 48, 64).bfloat16()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for counts in ((64, 32), (0, 64), (32, 192)):
            offsets = torch.tensor(counts).cumsum(0).int()
            x, direction = normal(sum(counts), 64).bfloat16(), normal(sum(counts), 48, seed=2).bfloat16()
            found, expected = (
                run(functools.partial(product, offsets=offsets), x, weights, direction)
                for product in (graph, mx_grouped_mm)
            )
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b)
