"""`torch.compile` for the repeated blocks and for the loss: what is one graph, and with which settings."""

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves, tree_map_only

Function = Callable[..., Any]
# Those whose graphs torch's partitioner divides between forward and backward.
_PARTITIONED = ("inductor", "aot_eager", "aot_eager_decomp_partition")


@dataclass(frozen=True)
class CompileConfig:
    """Compile the forward of each block, and the loss.

    A block is one graph, and all blocks of one kind share it. Where modules inside must stay eager, its other modules
    are one graph each. FSDP2 gathers and frees parameters outside of the graphs.

    Args:
        backend: A name from `torch.compiler.list_backends()`; in code also a function.
        mode: Inductor's, such as `"max-autotune-no-cudagraphs"`; `torch._inductor.list_mode_options()` has the names.
            Not together with `options`.
        fullgraph: Whether it is an error if a graph cannot hold everything; otherwise the rest runs eagerly. The loss
            always may have such gaps.
        dynamic: Whether sizes are unknown to the graphs. By default they are fixed in training, until one changes, and
            in evaluation the number of rows is free, so that the last batch may be smaller.
        options: The backend's own settings; for inductor the names in `torch._inductor.list_options()`.
        loss: Whether `TitanModule.token_loss` is compiled too.
        eager: Names of modules inside the blocks that stay eager, with all that is in them. By default routers: the
            gradient of their auxiliary loss depends on a number that is only known in the backward pass, and a graph
            would hold that of an earlier step. Without an auxiliary loss this list may be empty.

    Raises:
        ValueError: If the backend, the mode or an option does not exist.
    """

    backend: str | Function = "inductor"
    mode: str | None = None
    fullgraph: bool = True
    dynamic: bool | None = None
    options: dict[str, bool | int | float | str] | None = None
    loss: bool = True
    eager: list[str] = field(default_factory=lambda: ["router"])

    def __post_init__(self) -> None:
        if isinstance(self.backend, str) and self.backend not in torch.compiler.list_backends(exclude_tags=()):
            # Without those that exist for torch's own tests.
            valid = ", ".join((*torch.compiler.list_backends(), "aot_eager", "eager"))
            raise ValueError(f"compile.backend={self.backend!r}: valid names are {valid}.")
        if self.mode is not None and self.options is not None:
            raise ValueError(
                f"compile.mode={self.mode!r} and compile.options exclude each other: a mode is a set of options. Use "
                "compile.options alone."
            )
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"compile.mode={self.mode!r} is inductor's, but compile.backend={self.backend!r}.")
        if self.backend == "inductor":
            _check_name("mode", self.mode, list(torch._inductor.list_mode_options()))
            for name in self.options or {}:
                _check_name("options", name, torch._inductor.list_options())

    def check_memory_budget(self) -> None:
        """Raise ValueError unless the backend can choose what to keep for the backward pass."""
        if isinstance(self.backend, str) and self.backend not in _PARTITIONED:
            raise ValueError(
                f"activation_checkpointing.mode='memory_budget' does nothing with compile.backend={self.backend!r}. "
                f"Use one of {', '.join(_PARTITIONED)}."
            )

    def left_eager(self, block: nn.Module) -> set[nn.Module]:
        """The modules inside `block` that are named in `eager`."""
        return {module for name, module in block.named_modules() if name.split(".")[-1] in self.eager}

    def apply(self, modules: Sequence[nn.Module], memory_budget: float | None = None) -> None:
        """Compile the forward of each module, in place. Their parameters, names and class stay as they were.

        Args:
            modules: What is to be one graph each.
            memory_budget: The part of the memory for activations that torch may use; by default all that it likes.
        """
        options = self._options(memory_budget)
        for module in modules:
            # The forward alone: the module's hooks, FSDP2's above all, stay outside of the graph.
            module.forward = self._prepared(torch.compile(module.forward, fullgraph=self.fullgraph, **options))

    def compiled_loss(self, loss: Function) -> Function:
        """A compiled `TitanModule.token_loss`."""
        return self._prepared(torch.compile(loss, **self._options(None)))

    def _options(self, memory_budget: float | None) -> dict[str, Any]:
        if memory_budget is not None:
            return {"backend": self._backend_within(memory_budget), "dynamic": self.dynamic}
        # torch takes what it knows out of the dict.
        options = None if self.options is None else dict(self.options)
        return {"backend": self.backend, "mode": self.mode, "options": options, "dynamic": self.dynamic}

    def _backend_within(self, memory_budget: float) -> Function:
        """The backend, for which alone torch's global setting of the budget is changed."""
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx
        from torch.utils.flop_counter import flop_registry

        backend: Function
        if self.backend == "inductor":
            settings = torch._inductor.list_mode_options(self.mode) if self.mode else dict(self.options or {})
            backend = functools.partial(compile_fx, config_patches=settings)
        else:
            extra = {"options": self.options} if self.options else {}
            backend = functools.partial(lookup_backend(self.backend), **extra)

        def compile_within_budget(graph: Any, inputs: Any) -> Any:
            with config.patch(activation_memory_budget=memory_budget), patch.dict(flop_registry, _ATTENTION_FLOPS):
                return backend(graph, inputs)

        return compile_within_budget

    def _prepared(self, compiled: Function) -> Function:
        """Make the arguments fit for a graph."""

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(AsyncCollectiveTensor, _received, (args, kwargs))
            if self.dynamic is None and not torch.is_grad_enabled():
                _free_rows([arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor) and arg.ndim])
            return compiled(*args, **kwargs)

        return run


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Two products of each query with each key, 2 operations a number; tensors are (batch, heads, seq, head_size)."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


# torch's compiler weighs operators by these, and up to 2.11 its own fail where key heads are fewer than query heads.
_ATTENTION_FLOPS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention"): _attention_flops
    for kernel in ("flash", "efficient", "cudnn")
}


def _check_name(argument: str, name: str | None, valid: Sequence[str]) -> None:
    if name is not None and name.replace("-", "_") not in {other.replace("-", "_") for other in valid}:
        near = difflib.get_close_matches(name, valid, n=6) or valid
        raise ValueError(f"compile.{argument}: inductor has no {name!r}. Valid: {', '.join(near)}")


def _free_rows(tensors: Sequence[Tensor]) -> None:
    """Tell the compiler that the first dimension of the first tensor may change, and with it those of its size."""
    for tensor in tensors:
        if tensor.shape[0] == tensors[0].shape[0]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _received(tensor: AsyncCollectiveTensor) -> Tensor:
    """What a collective has brought, with its gradient; a graph (torch 2.13) would treat it as a constant."""
    plain: Tensor = _Wait.apply(tensor)
    return plain


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
