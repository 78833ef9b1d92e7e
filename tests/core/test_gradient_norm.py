"""The gradient norm is right to float32, for any shape and size."""

import math

import pytest
import torch

from titan_strategy.gradients import global_norm


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("shape", [(), (1,), (4096,), (4097,), (12_000_000,), (3, 1_000_003), (2048, 8192)])
def test_norm_of_large_tensors(shape: tuple[int, ...], norm_type: float) -> None:
    """torch's norm on the CPU adds up in one running float32 sum, off by 6e-4 for the larger shapes here."""
    parameter = torch.nn.Parameter(torch.empty(shape))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.vector_norm(parameter.grad.double(), norm_type)
    found = global_norm([parameter], norm_type, torch.device("cpu"))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_no_gradient_is_zero() -> None:
    assert global_norm([torch.nn.Parameter(torch.ones(3))], 2.0, torch.device("cpu")) == 0


def test_nan_is_seen() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, float("nan"), 2.0])
    assert global_norm([parameter], 2.0, torch.device("cpu")).isnan()
