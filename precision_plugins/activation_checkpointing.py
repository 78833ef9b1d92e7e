"""Which activations a block keeps for its backward pass, and which it computes again."""

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Mode = Literal["none", "full", "every_n_blocks", "selective", "memory_budget"]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# Whichever kernel torch picks.
ATTENTION = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "higher_order.flex_attention",
)
# What is dear to compute again for the memory it takes. Names that this version of torch lacks stand for nothing.
KEEP = (
    *ATTENTION,
    # Communication, which would be waited for once more.
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_to_all_single.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    # The choice of experts: small, and it must come out the same.
    "aten.topk.default",
    # Matrix products.
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten._grouped_mm.default",
    "aten._scaled_grouped_mm.default",
    "aten._scaled_grouped_mm_v2.default",
    "precision_plugins.grouped_mm_float32.default",
    # Largest magnitudes, from which low precision takes its scales: tiny, and each reads a whole tensor.
    "aten.max.default",
    "aten.amax.default",
)


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Trade compute for memory, block by block. The numbers stay the same bit for bit.

    ================  ==================================================================================
    mode              what a block keeps from its forward to its backward pass
    ================  ==================================================================================
    none              everything that the backward pass reads
    full              its inputs; its forward runs again
    every_n_blocks    every n-th block like `full`, the others like `none`
    selective         its inputs and the outputs of the operators in `keep`; the others run again
    memory_budget     what torch's compiler chooses, so that it fits a part of the memory; needs `compile`
    ================  ==================================================================================

    Args:
        mode: One of the table.
        every_n_blocks: The n of that mode, counted over the blocks that a rank holds; 1 is `full`.
        keep: The operators of `selective`, as torch names them below autograd, overload included: `aten.mm.default`.
            The default holds attention, communication, the choice of experts and matrix products.
        recompute_every: Exceptions from `keep`: of each operator here every n-th call in a block runs again, in the
            order of the block's forward. Each operator is counted by itself, so another one does not shift its turn.
            None by default; `{"aten.mm.default": 2}` is TorchTitan's rule: half of the products' memory for half of
            their time.
        memory_budget: For that mode, the memory for activations: 1 is what compiled code takes by itself, 0 is `full`.

    Raises:
        ValueError: If a number is out of range, or an operator does not exist or cannot be kept.
    """

    mode: Mode = "none"
    every_n_blocks: int = 2
    keep: list[str] = field(default_factory=lambda: list(KEEP))
    recompute_every: dict[str, int] = field(default_factory=dict)
    memory_budget: float = 0.5

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            modes = ", ".join(map(repr, get_args(Mode)))
            raise ValueError(f"activation_checkpointing.mode={self.mode!r}: valid modes are {modes}.")
        if self.every_n_blocks < 1:
            raise ValueError(f"activation_checkpointing.every_n_blocks={self.every_n_blocks} must be at least 1.")
        if not 0 <= self.memory_budget <= 1:
            raise ValueError(f"activation_checkpointing.memory_budget={self.memory_budget} must be between 0 and 1.")
        for name, every in self.recompute_every.items():
            if every < 1:
                raise ValueError(f"activation_checkpointing.recompute_every: {name}={every} must be at least 1.")
            if name not in self.keep:
                raise ValueError(
                    f"activation_checkpointing.recompute_every names {name}, which activation_checkpointing.keep does "
                    "not, so every call of it runs again anyway. Add it there, or leave it out here."
                )
        self.rules()

    def apply(self, modules: Sequence[nn.Module]) -> None:
        """Change how `modules` run, in place. Their parameters, names and class stay as they were."""
        if self.mode == "selective":
            rules = self.rules()
            recompute(modules, lambda: create_selective_checkpoint_contexts(_Policy(rules)))
        elif self.mode in ("full", "every_n_blocks"):
            recompute(modules)

    def chosen(self, blocks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Those of a rank's blocks that `apply` is for.

        Raises:
            ValueError: If `every_n_blocks` leaves all of them as they are.
        """
        if self.mode != "every_n_blocks":
            return blocks
        if 0 < len(blocks) < self.every_n_blocks:
            raise ValueError(
                f"activation_checkpointing.every_n_blocks={self.every_n_blocks} recomputes none of the {len(blocks)} "
                f"blocks on a rank: it must be at most {len(blocks)}."
            )
        return blocks[self.every_n_blocks - 1 :: self.every_n_blocks]

    def rules(self) -> "dict[Any, _Rule]":
        """The operators to keep, by the object that torch calls.

        Raises:
            ValueError: If there is no such operator, or its output cannot be kept.
        """
        found = {name: _find_operator(name) for name in self.keep}
        return {op: _Rule.of(op, self.recompute_every.get(name)) for name, op in found.items() if op is not None}


def recompute(modules: Sequence[nn.Module], contexts: Contexts | None = None) -> None:
    """Let the forward of each module run again in the backward pass, under `contexts` if given.

    The forward is replaced instead of the module wrapped: so every parameter keeps its name.
    """
    options = {} if contexts is None else {"context_fn": contexts}
    # The compiler has a limited number of graphs for each piece of code, and shares them between functions made of it.
    codes: dict[type[nn.Module], CodeType] = {}
    for module in modules:
        run = _checkpointed(module.forward, options)
        run.__code__ = codes.setdefault(type(module), run.__code__.replace(co_name="forward"))
        module.forward = run


def _checkpointed(forward: Callable[..., Any], options: Mapping[str, Any]) -> FunctionType:
    # Not a `functools.partial`, which has no frame for the compiler to begin at.
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    assert isinstance(run, FunctionType)
    return run


@dataclass(frozen=True)
class _Rule:
    """When the output of one operator is kept.

    Args:
        every: Every n-th call runs again.
        random: Whether the operator may draw random numbers.
        probability: Position of its dropout probability among the arguments; at 0 it draws none.
    """

    every: int | None
    random: bool = False
    probability: int | None = None

    @classmethod
    def of(cls, op: Any, every: int | None) -> "_Rule":
        if not isinstance(op, torch._ops.OpOverload):
            return cls(every)  # higher-order operators say nothing about themselves
        names = [argument.name for argument in op._schema.arguments]
        position = names.index("dropout_p") if "dropout_p" in names else None
        return cls(every, torch.Tag.nondeterministic_seeded in op.tags, position)

    def draws(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call draws random numbers."""
        if not self.random or self.probability is None:
            return self.random
        given = args[self.probability] if self.probability < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(given != 0)


class _Policy:
    """What to do with each call of an operator, for one run of a block and its repetition."""

    def __init__(self, rules: Mapping[Any, _Rule]) -> None:
        self._rules = rules
        self._calls: Counter[tuple[Any, bool]] = Counter()

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        rule = self._rules.get(op)
        # The repetition begins with the forward's random state. If it left out a draw, all later ones would differ.
        if rule is None or rule.draws(args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if rule.every is not None:
            call = (op, context.is_recompute)  # torch up to 2.11 asks again in the repetition
            self._calls[call] += 1
            if self._calls[call] % rule.every == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def _find_operator(name: str) -> Any:
    """The operator of that name, or None if this torch lacks it and `KEEP` has it."""
    op: Any = torch.ops
    try:
        for part in name.split("."):
            op = getattr(op, part)
    except AttributeError:
        op = None
    if isinstance(op, torch._ops.OpOverload):
        if op.namespace == "c10d" or op._schema.is_mutable:
            raise ValueError(
                f"activation_checkpointing.keep: {name} writes into memory that it is given. Only what an operator "
                "returns can be kept; for communication these are the operators of _c10d_functional."
            )
        return op
    if isinstance(op, torch._ops.HigherOrderOperator):
        return op
    if name in KEEP:
        return None
    near = " or ".join(_near(name))
    raise ValueError(
        f"activation_checkpointing.keep: torch {torch.__version__} has no operator {name}."
        + (f" Did you mean {near}?" if near else " Names are like aten.mm.default.")
    )


def _near(name: str) -> list[str]:
    """Operators with names like `name`; first the overloads, if it lacks one."""
    listed = torch._C._dispatch_get_all_op_names()  # torch.ops itself only lists what has been used
    names = [n.replace("::", ".") if "." in n else n.replace("::", ".") + ".default" for n in listed]
    overloads = sorted(n for n in names if n.startswith(f"{name}.") and not n.endswith("out"))
    return overloads[:3] or difflib.get_close_matches(name, names)
