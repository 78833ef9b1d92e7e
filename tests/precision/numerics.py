"""What the tests of emulated products share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

Product = Callable[[Tensor, Tensor], Tensor]
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.precision_plugins.grouped_mm_float32.default,
}


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal down to the signs of zeros; NaN in the same places, whatever its bits."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[found.dtype]
    wrong = (found.contiguous().view(integer) != expected.contiguous().view(integer)) & ~found.isnan()
    assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()}: {found[wrong][:5]} instead of {expected[wrong][:5]}"


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Signal to quantisation noise, dB."""
    error = found.double() - exact
    return float(20 * torch.log10(exact.norm() / error.norm()))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(product: Product, x: Tensor, weight: Tensor, direction: Tensor) -> list[Tensor]:
    """Output, gradient of x, gradient of weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = product(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), direction)]


def compiled(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`product` as one graph for all numbers of rows."""
    torch._dynamo.reset()  # another compilation of the same function elsewhere would count as one too many
    graph = torch.compile(product, backend="aot_eager", fullgraph=True)

    def call(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return graph(x, weight, **options)

    return call


def exact(x: Tensor, weight: Tensor, direction: Tensor) -> list[Tensor]:
    """The same of a plain product in float64."""
    return run(linear, x.double(), weight.double(), direction.double())


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def products(product: Product, x: Tensor, weight: Tensor, trained: tuple[bool, bool]) -> int:
    """How many matrix products run, forward and backward, if only some operands need a gradient."""
    x, weight = x.detach().requires_grad_(trained[0]), weight.detach().requires_grad_(trained[1])
    with CountProducts() as counter:
        y = product(x, weight)
        if y.requires_grad:
            y.sum().backward()
    assert (x.grad is not None, weight.grad is not None) == trained
    return counter.count
