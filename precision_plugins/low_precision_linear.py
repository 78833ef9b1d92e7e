"""A linear map whose product runs in low precision: an `nn.Linear` that has changed its class, and nothing else.

Parameters, names, hooks, bias, training mode and identity stay what they were, so checkpoints do not depend on the
precision. Products see local tensors: what tensor parallelism has split is taken apart before, and put together after.
"""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Product = Callable[[Tensor, Tensor], Tensor]


class LowPrecisionLinear(nn.Linear):
    """What a linear map runs after `swap_product`.

    Attributes:
        product: Takes the input (..., in) and the weight (out, in), returns (..., out); differentiable in both.
    """

    product: Product

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        output = on_local_tensors(self.product, input, self.weight)
        return output if self.bias is None else output + self.bias


def swap_product(module: nn.Linear, product: Product) -> None:
    """Let `module` multiply by `product`, in place.

    Its class becomes a subclass of what it was, so what the class says elsewhere, such as how weights are initialised,
    still holds.
    """
    module.__class__ = _low_precision(type(module))  # type: ignore[arg-type]  # the class is hashed, not an instance
    assert isinstance(module, LowPrecisionLinear)
    module.product = product


@functools.cache
def _low_precision(cls: type[nn.Linear]) -> type[nn.Linear]:
    """The same subclass each time: blocks whose modules differ in class would not share a compiled graph."""
    return type(f"LowPrecision{cls.__name__}", (LowPrecisionLinear, cls), {"__module__": __name__})


def has_product_of_its_own(module: nn.Linear) -> bool:
    """Whether the class of `module` overrides what `nn.Linear` computes, which a swap would undo."""
    return type(module).forward is not nn.Linear.forward


def on_local_tensors(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    """`product(x, weight)`, also of DTensors on one mesh axis: by each rank, on what it holds.

    Args:
        product: Of plain tensors.
        x: (..., in).
        weight: (out, in).

    Raises:
        NotImplementedError: For placements that no style of tensor parallelism makes.
    """
    if not isinstance(weight, DTensor):
        return product(x, weight)
    if not isinstance(x, DTensor):
        raise NotImplementedError("a plain input meets a weight that tensor parallelism has split")
    (of_x,), (of_weight,) = x.placements, weight.placements
    output, grad_of_x, grad_of_weight = _rule(of_x, of_weight, x.ndim)
    local = product(x.to_local(grad_placements=[grad_of_x]), weight.to_local(grad_placements=[grad_of_weight]))
    return DTensor.from_local(local, x.device_mesh, [output], run_check=False)


def _rule(x: Placement, weight: Placement, ndim: int) -> tuple[Placement, Placement, Placement]:
    """How the output lies, and how the gradients of input and weight come out of the local products."""
    if x == Replicate() and weight == Replicate():
        return Replicate(), Replicate(), Replicate()
    if x == Replicate() and weight == Shard(0):  # colwise: each rank adds to the gradient of the whole input
        return Shard(ndim - 1), Partial(), weight
    if x == Shard(ndim - 1) and weight == Shard(1):  # rowwise: each rank adds to the whole output
        return Partial(), x, weight
    if isinstance(x, Shard) and x != Shard(ndim - 1) and weight == Replicate():  # each rank has rows of its own
        return x, x, Partial()
    raise NotImplementedError(f"an input that lies as {x} meets a weight that lies as {weight}")
