"""From the meta device to initialised shards, with values that do not depend on the layout.

Each rank runs a module's own initialiser on full tensors of that one module, under a generator seeded by
`(seed, FQN of the module)`, and keeps its part. So every layout and world size starts from the same numbers, without
communication, and the peak is the local shards plus one module's own parameters.
"""

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor, nn

from titan_strategy.sharding import copy_full_, local


def materialize(root: nn.Module, device: torch.device, scratch_device: torch.device, seed: int) -> None:
    """Give every meta parameter and buffer of `root` memory and a value, in place.

    Modules without meta tensors are left alone. Tied parameters stay tied and take the value of their first owner.

    Args:
        root: Module whose parameters may be DTensors.
        device: Where the parameters live (the CPU when they are offloaded).
        scratch_device: Where initial values are computed, and where buffers live.
        seed: Same on every rank.

    Raises:
        RuntimeError: If a tensor has no initialiser, or if its initialiser does not write all of it or writes to
            tensors of other modules.
    """
    modules = {name: module for name, module in root.named_modules() if any(t.is_meta for _, t in _own_tensors(module))}
    _allocate(root, device, scratch_device)
    unwritten: list[str] = []
    # Children before parents, as when the modules were constructed, so that a parent may have the last word; and so has
    # the first owner of a tied parameter.
    for name, module in reversed(modules.items()):
        unwritten += _initialise(name, module, scratch_device, seed)
    if unwritten:
        raise RuntimeError(
            "Built on the meta device and left without a value: " + ", ".join(sorted(unwritten)) + ". "
            "The module that owns a parameter or a buffer fills it in its reset_parameters() (or init_weights()): "
            "in place, all of it, non-persistent buffers such as rotary tables included."
        )


def _allocate(root: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Replace meta tensors by uninitialised ones. Unlike `nn.Module.to_empty`, parameters that are tied stay tied."""
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in root.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in replaced:
                    empty = torch.empty_like(parameter, device=device)
                    replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[key] = replaced[parameter]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=buffer_device)


def _initialise(name: str, module: nn.Module, scratch_device: torch.device, seed: int) -> list[str]:
    """Run one module's initialiser and keep the local part of what it wrote; returns the tensors it did not write."""
    initialiser, unit = _initialiser(module)
    if initialiser is None:
        return [_join(name, key) for key, _ in _own_tensors(module)]
    targets = [(part, key, tensor) for part in unit for key, tensor in _own_tensors(part)]
    others = [t for child in module.modules() if child not in unit for _, t in _own_tensors(child)]
    before = _checksums(others)
    with _full_tensors(targets, scratch_device), _seeded(seed, name, scratch_device):
        initialiser()
        written = [_own_tensor(part, key) for part, key, _ in targets]
    if before != _checksums(others):
        raise RuntimeError(
            f"{type(module).__name__}.{initialiser.__name__}() of {name!r} wrote to the parameters of its children. "
            "It may only write what the module itself owns: each child is initialised by its own method, so that its "
            "values do not depend on how the model is split."
        )
    unwritten = []
    for (part, key, target), full in zip(targets, written, strict=True):
        missing = _holds_marker(full)
        if missing and part is not module:
            continue  # it has the value that its own initialiser gave it
        copy_full_(target, full)
        if missing:
            unwritten.append(_join(name, key))
    return unwritten


def _initialiser(module: nn.Module) -> tuple[Callable[[], object] | None, list[nn.Module]]:
    """The method that fills `module`, and the modules whose tensors it writes."""
    for name in ("init_weights", "reset_parameters", "_reset_parameters"):
        method: Callable[[], object] | None = getattr(module, name, None)
        if method is not None:
            # nn.MultiheadAttention and nn.Transformer keep a private method that writes to their children, too. Told by
            # the function's own name, since importing lightning.pytorch.demos gives it a public one as well.
            whole = getattr(method, "__name__", name) == "_reset_parameters"
            return method, list(module.modules()) if whole else [module]
    return None, [module]


@contextlib.contextmanager
def _full_tensors(targets: list[tuple[nn.Module, str, Tensor]], device: torch.device) -> Generator[None, None, None]:
    """Let the modules own full plain tensors for a while, filled with a marker that shows what was not written.

    Parameters are float32 whatever they are stored in: initialisers then draw the same numbers for every precision.
    """
    for module, key, target in targets:
        is_parameter = key in module._parameters
        dtype = torch.float32 if is_parameter and target.is_floating_point() else target.dtype
        full = torch.full(target.shape, _marker(dtype), dtype=dtype, device=device)
        if is_parameter:
            module._parameters[key] = nn.Parameter(full, requires_grad=False)
        else:
            module._buffers[key] = full
    try:
        with torch.no_grad():
            yield
    finally:
        for module, key, target in targets:
            slot = module._parameters if key in module._parameters else module._buffers
            slot[key] = target  # type: ignore[assignment]  # each target goes back to the slot it came from


def _marker(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _holds_marker(tensor: Tensor) -> bool:
    if tensor.dtype.itemsize == 1 or not tensor.dtype.is_signed:
        return False  # any value may be meant
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _checksums(tensors: list[Tensor]) -> list[int]:
    """Of the bytes that this rank holds. Version counters would miss what is written through `tensor.data`."""
    return [int(local(tensor).detach().reshape(-1).view(torch.uint8).sum()) for tensor in tensors]


@contextlib.contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Generator[None, None, None]:
    """Draw from a stream of this module's own, and leave the global generators as they were."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
        yield


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that `module` holds itself, not its children."""
    for slot in (module._parameters, module._buffers):
        for key, tensor in slot.items():
            if tensor is not None:
                yield key, tensor


def _own_tensor(module: nn.Module, key: str) -> Tensor:
    tensor = module._parameters[key] if key in module._parameters else module._buffers[key]
    assert tensor is not None
    return tensor


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
