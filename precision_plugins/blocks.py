"""Activation checkpointing and compilation of the repeated blocks, together: around what, and which within which."""

from collections.abc import Collection, Iterator, Sequence, Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from precision_plugins.activation_checkpointing import ATTENTION, ActivationCheckpointing
from precision_plugins.compile import CompileConfig


def change_blocks(
    blocks: Sequence[nn.Module],
    checkpointing: ActivationCheckpointing,
    compile: CompileConfig | None,
    units: Collection[nn.Module] = (),
    eager: Collection[nn.Module] = (),
) -> None:
    """Change how `blocks` run, in place. Their parameters, names and class stay as they were.

    Args:
        blocks: Those of one rank.
        checkpointing: What they keep for the backward pass.
        compile: How they are compiled, if at all.
        units: Modules inside which FSDP2 will gather by themselves. Its hooks fit neither into a graph nor under a
            selective checkpoint, so blocks are divided around them.
        eager: Those of `units` that cannot be a graph.

    Raises:
        ValueError: If the settings do not go with these blocks.
    """
    named = set() if compile is None else {module for block in blocks for module in compile.left_eager(block)}
    parts = {block: list(parts_of(block, {*units, *named})) for block in blocks}
    every_part = [part for block in blocks for part in parts[block]]
    graphs = [] if compile is None else [part for part in every_part if part not in named and part not in eager]
    if checkpointing.mode == "selective":
        _check_kept(checkpointing, graphs)
        within, around = every_part, []  # an operator in a graph cannot be told apart from outside
    else:
        chosen = checkpointing.chosen(blocks)
        within = [block for block in chosen if compile is None or (parts[block] == [block] and not _split([block]))]
        around = [block for block in chosen if block not in within]
    checkpointing.apply(within)
    if compile is not None:
        if blocks and not graphs:
            raise ValueError(
                "compile.eager leaves nothing of the blocks to compile. Name fewer modules, or compile: null."
            )
        compile.apply(graphs, checkpointing.memory_budget if checkpointing.mode == "memory_budget" else None)
    checkpointing.apply(around)


def parts_of(block: nn.Module, apart: Set[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules of `block` that hold none of `apart`, and these themselves, in the order of definition.

    Without anything apart that is the block itself. Otherwise torch's own norms and the like, which are a single kernel
    each, are passed over, and so are modules without parameters.
    """
    if block in apart or (_has_forward(block) and apart.isdisjoint(block.modules())):
        yield block
        return
    for child in block.children():
        if next(child.parameters(), None) is not None and (child in apart or not _is_kernel(child)):
            yield from parts_of(child, apart)


def _has_forward(module: nn.Module) -> bool:
    """A list of modules has none of its own."""
    return type(module).forward is not nn.Module.forward


def _is_kernel(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _check_kept(checkpointing: ActivationCheckpointing, graphs: Sequence[nn.Module]) -> None:
    recomputed = [name for name in ATTENTION if name not in checkpointing.keep]
    if recomputed and _split(graphs):
        raise ValueError(
            f"activation_checkpointing.keep lacks {', '.join(recomputed)}: with tensor parallelism and compile "
            f"attention has to be kept, for torch {torch.__version__} cannot compute it again in a graph with DTensors."
        )


def _split(modules: Sequence[nn.Module]) -> bool:
    """Whether tensor parallelism has made DTensors of their parameters.

    If attention is computed again in a graph, torch 2.13 confuses the saved random state with the saved device mesh.
    """
    return any(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters())
