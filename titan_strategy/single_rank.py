"""A rank alone has nothing to gather or to reduce: its parameters stay whole, and are cast where they are used.

FSDP2 would copy every parameter twice on its way to the compute dtype, once in the forward and once in the backward
pass, and every gradient twice on its way back. A cast inside the module that uses it is a single pass, which the
compiler can merge with what follows, and activation checkpointing frees it like everything else.
"""

import functools
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass
class Casts:
    """What the modules of one model share.

    Args:
        dtype: What their parameters are cast to.
        running: Whether a forward or backward pass of the model is under way. At any other time a module's parameters
            are the ones that it stores, for whoever reads them or writes to them.
    """

    dtype: torch.dtype
    running: bool = False

    @contextmanager
    def during_backward(self) -> Generator[None, None, None]:
        """Around a backward pass, in which activation checkpointing runs modules again."""
        self.running = True
        try:
            yield
        finally:
            self.running = False


def cast_parameters(root: nn.Module, dtype: torch.dtype, cast_inputs: Iterable[nn.Module]) -> Casts:
    """Let every module inside `root` see its floating-point parameters in `dtype` while `root` runs.

    Each keeps its parameters, names and hooks; its class becomes a subclass that reads them differently. Gradients come
    back in the dtype of the parameters.

    Args:
        root: The module whose forward starts everything.
        dtype: To compute in.
        cast_inputs: Modules whose floating-point inputs are cast, too.
    """
    casts = Casts(dtype)
    for module in root.modules():
        names = tuple(name for name, p in module._parameters.items() if p is not None and p.is_floating_point())
        if names:
            module.__class__ = _reading_casts(type(module), names)  # type: ignore[arg-type]  # it is hashed itself
            module._casts = casts  # type: ignore[assignment]  # nn.Module declares its attributes as modules or tensors
    for module in cast_inputs:
        module.register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)
    root.register_forward_pre_hook(lambda *_: setattr(casts, "running", True), prepend=True)
    root.register_forward_hook(lambda *_: setattr(casts, "running", False), always_call=True)
    return casts


@functools.cache
def _reading_casts(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The same subclass each time: the compiler shares graphs between modules of one class."""
    properties: dict[str, Any] = {name: _cast(name) for name in names}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **properties})


def _cast(name: str) -> property:
    def get(module: nn.Module) -> Tensor | None:
        parameter, casts = module._parameters[name], module._casts
        if not casts.running or parameter is None:  # type: ignore[union-attr]  # it is a `Casts`
            return parameter
        return parameter.to(casts.dtype)  # type: ignore[arg-type]

    return property(get)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    cast_args, cast_kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    return cast_args, cast_kwargs
