"""The state of an optimizer under flat names: `state.<parameter>.<entry>` and `param_groups.<parameter>.<option>`.

They do not depend on how parameters are spread over optimizers, groups and ranks. To learn what the state looks like,
PyTorch's functions for this make a step: that moves the step count of a run that is saved before its first step, and a
run with parameters that never had a gradient cannot be resumed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of `optimizer`, tensors sharded as they are.

    Raises:
        TypeError: If it holds something that could not be read again in another layout.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter, {})
            _check_entries(entries, parameter, optimizer)
            flat |= {f"state.{names[parameter]}.{key}": value for key, value in entries.items()}
            flat |= {f"param_groups.{names[parameter]}.{key}": v for key, v in group.items() if key != "params"}
    return flat


def empty_state(
    module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Tensor | None]
) -> tuple[dict[str, Any], set[str]]:
    """Room for what a checkpoint holds for the parameters of `optimizer`.

    Args:
        module: Names the parameters.
        optimizer: Will take the state.
        saved: Flat names in the checkpoint; a meta tensor for each tensor.

    Returns:
        The flat state to load into, and the names of options that `optimizer` needs and the checkpoint has not.
    """
    own = set(_parameters(optimizer))
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter in own}
    parsed = {entry: _parse(entry).parameter for entry in saved}
    flat = {entry: _room(saved[entry], parameters[name]) for entry, name in parsed.items() if name in parameters}
    needed = {f"param_groups.{name}.{option}" for name in parameters for option in optimizer.defaults}
    return flat, needed - flat.keys()


def set_optimizer_state(module: nn.Module, optimizer: Optimizer, flat: Mapping[str, Any]) -> None:
    """Give `optimizer` the state that `empty_state` made room for."""
    number_of = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}
    number = {name: number_of[p] for name, p in module.named_parameters() if p in number_of}
    state: dict[int, dict[str, Any]] = defaultdict(dict)
    options: dict[int, dict[str, Any]] = defaultdict(dict)
    for entry, value in flat.items():
        section, name, key = _parse(entry)
        (state if section == "state" else options)[number[name]][key] = value
    groups = []
    for group in optimizer.param_groups:
        numbers = [number_of[parameter] for parameter in group["params"]]
        saved = options[numbers[0]] if numbers else {}
        groups.append({**group, **saved, "params": numbers})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def flat_state(numbered: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
    """The state of an optimizer as other strategies save it, by number of the parameter -> by flat names."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    order = [names[parameter] for parameter in _parameters(optimizer)]
    flat: dict[str, Any] = {}
    for number, entries in numbered["state"].items():
        flat |= {f"state.{order[number]}.{key}": value for key, value in entries.items()}
    for group in numbered["param_groups"]:
        for number in group["params"]:
            flat |= {f"param_groups.{order[number]}.{key}": v for key, v in group.items() if key != "params"}
    return flat


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    """In the order in which `Optimizer.state_dict` numbers them."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class _Entry(NamedTuple):
    section: str
    parameter: str
    key: str


def _parse(entry: str) -> _Entry:
    """`state.layers.0.weight.exp_avg` -> `state`, `layers.0.weight`, `exp_avg`."""
    section, _, rest = entry.partition(".")
    parameter, _, key = rest.rpartition(".")
    return _Entry(section, parameter, key)


def _room(saved: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
    if saved is None:
        return None
    if saved.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.empty(saved.shape, dtype=saved.dtype)  # such as the number of steps


def _check_entries(entries: Mapping[str, Any], parameter: nn.Parameter, optimizer: Optimizer) -> None:
    for key, value in entries.items():
        reshaped = isinstance(value, DTensor) and value.shape != parameter.shape
        if reshaped or not isinstance(value, Tensor | int | float | bool | None):
            what = f"a sharded tensor of shape {tuple(value.shape)}" if reshaped else f"a {type(value).__name__}"
            raise TypeError(
                f"{type(optimizer).__name__} keeps {what} as {key!r} of a parameter of shape {tuple(parameter.shape)}. "
                "Checkpoints take numbers, plain tensors, and sharded tensors of the parameter's shape."
            )
