"""Tensor and sequence parallelism from a plan: one style per module, applied with torch's own parallel styles.

Between blocks activations are plain tensors, split over the sequence with sequence parallelism and whole without. A
norm gathers its output once for all the products that read it; a row-wise product reduces (and splits) its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from titan_strategy.plan import ParallelPlan, TensorParallelStyle, match_modules

SEQUENCE_DIM = 1  # activations are (batch, sequence, features)


def resolve_styles(root: nn.Module, plan: ParallelPlan) -> dict[nn.Module, TensorParallelStyle]:
    """The style of every module that owns parameters.

    Raises:
        ValueError: If a pattern matches nothing, a module has two styles, or a module with parameters has none.
    """
    chosen: dict[str, tuple[str, TensorParallelStyle]] = {}
    for pattern, style in plan.tensor_parallel.items():
        for name in match_modules(root, pattern, "plan.tensor_parallel"):
            if name in chosen and chosen[name][1] != style:
                first, other = chosen[name]
                raise ValueError(
                    f"plan.tensor_parallel gives {name} two styles: {first!r} says {other!r} and {pattern!r} says "
                    f"{style!r}."
                )
            chosen[name] = (pattern, style)
    experts = match_modules(root, plan.experts, "plan.experts") if plan.experts is not None else {}
    for name, module in root.named_modules():
        if name not in chosen and name not in experts and next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"tensor_parallel_size > 1: plan.tensor_parallel does not say how {name or 'the root module'} "
                f"({type(module).__name__}) is split. Give it a style: colwise, rowwise, sequence, embedding, head, "
                "replicate or tokens."
            )
    return {root.get_submodule(name): style for name, (_, style) in chosen.items()}


def local_weight_shapes(
    styles: Mapping[nn.Module, TensorParallelStyle], ranks: int
) -> dict[nn.Module, tuple[int, int]]:
    """Of each linear map, the largest part (out, in) of its weight that one of `ranks` ranks will hold."""
    shapes: dict[nn.Module, tuple[int, int]] = {}
    for module, style in styles.items():
        if isinstance(module, nn.Linear):
            out_features, in_features = module.weight.shape
            if style in ("colwise", "head"):
                out_features = -(-out_features // ranks)
            elif style == "rowwise":
                in_features = -(-in_features // ranks)
            shapes[module] = (out_features, in_features)
    return shapes


def apply_tensor_parallel(
    root: nn.Module,
    styles: Mapping[nn.Module, TensorParallelStyle],
    mesh: DeviceMesh,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Split the modules of `root` in place. Their parameters become DTensors on `mesh`; tied ones stay tied.

    Args:
        root: The model, on the meta device.
        styles: Style by module; those that are not in `root`, but in another pipeline stage, are passed over.
        mesh: 1-D.
        sequence_parallel: Split the activations between blocks over the sequence.
        loss_parallel: Leave the logits split over the vocabulary.
    """
    stream: Placement = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    shared = _shared_parameters(root)
    for module in root.modules():
        if module in styles:
            parallelize_module(module, mesh, _parallel_style(styles[module], stream, loss_parallel))
    for first, *others in shared:
        for module, key in others:
            module._parameters[key] = first[0]._parameters[first[1]]


def _parallel_style(style: TensorParallelStyle, stream: Placement, loss_parallel: bool) -> ParallelStyle:
    match style:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel(output_layouts=stream)
        case "embedding":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        case "sequence":
            return GatheredNorm(stream)
        case "head":
            logits = Shard(-1) if loss_parallel else Replicate()
            return ColwiseParallel(output_layouts=logits, use_local_output=not loss_parallel)
        case "replicate":
            return Replicated()
        case "tokens":
            return OwnTokens(stream)


class GatheredNorm(ParallelStyle):
    """A norm over the features of the residual stream; its output is whole on every rank.

    Gathering here, once, instead of at each product that follows, also makes the backward pass reduce once: the
    partial gradients of those products are added before they are reduced.

    Args:
        stream: How the residual stream lies over the mesh.
    """

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _around(module, device_mesh, self._enter, self._leave)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (DTensor.from_local(inputs[0], mesh, [self._stream], run_check=False), *inputs[1:])

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> DTensor:
        return output.redistribute(placements=[Replicate()])


class Replicated(ParallelStyle):
    """Every rank holds the whole module, which treats rows independently, and runs it on what it has.

    A whole DTensor is processed as such. A plain tensor is this rank's part (its heads, its positions): each rank then
    has a part of the parameters' gradients, and these are summed.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _around(module, device_mesh, self._enter, self._leave)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if isinstance(inputs[0], DTensor):
            return inputs
        # Rows are independent, so which dimension is called the split one makes no difference.
        return (DTensor.from_local(inputs[0], mesh, [Shard(0)], run_check=False), *inputs[1:])

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output if output.placements == (Replicate(),) else output.to_local()


class OwnTokens(ParallelStyle):
    """Each rank runs the module, which treats tokens independently, on its part of the sequence.

    An attribute `sequence_group` of a module inside is set to the ranks that have the other parts.

    Args:
        stream: How the residual stream lies over the mesh, and the output with it.
    """

    def __init__(self, stream: Placement) -> None:
        self._stream = stream
        self._shape = torch.Size()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            if hasattr(part, "sequence_group"):
                setattr(part, "sequence_group", device_mesh.get_group())  # noqa: B010
        module.register_forward_pre_hook(lambda _, inputs: self._enter(inputs, device_mesh))
        module.register_forward_hook(lambda _, __, output: self._leave(output, device_mesh))
        return module

    def _enter(self, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        whole_input = inputs[0]
        if not isinstance(whole_input, DTensor):
            whole_input = DTensor.from_local(whole_input, mesh, [Replicate()], run_check=False)
        self._shape = whole_input.shape
        return (whole_input.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local(), *inputs[1:])

    def _leave(self, output: Tensor, mesh: DeviceMesh) -> Tensor:
        if self._stream == Shard(SEQUENCE_DIM):
            return output
        # With a shape, because the last parts of a sequence may be shorter, or empty.
        stride = torch.empty(self._shape, device="meta").stride()
        parts = DTensor.from_local(
            output, mesh, [Shard(SEQUENCE_DIM)], run_check=False, shape=self._shape, stride=stride
        )
        return parts.redistribute(placements=[self._stream]).to_local()


def _around(module: nn.Module, mesh: DeviceMesh, enter: Callable[..., Any], leave: Callable[..., Any]) -> nn.Module:
    """Make the parameters of `module` whole DTensors, and let it run between two hooks that return what they change."""
    # torch declares these hooks as returning nothing, and uses what they return.
    return distribute_module(module, mesh, input_fn=enter, output_fn=leave)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor as a plain whole tensor, differentiably; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shared_parameters(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(parameter, []).append((module, key))
    return [group for group in holders.values() if len(group) > 1]
