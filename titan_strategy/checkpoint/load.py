"""Reading checkpoints, in any layout and at any number of ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Size, Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.optim import Optimizer

from titan_strategy.checkpoint.directory import META, CheckpointError, check_complete, rank_file
from titan_strategy.checkpoint.save import loader_states, optimizer_state
from titan_strategy.sharding import copy_full_


@dataclass(frozen=True)
class SavedTensors:
    """A state dict that is still on disk, in a checkpoint directory under a prefix."""

    path: Path
    prefix: str

    def shapes(self) -> dict[str, Size | None]:
        """Names in this state dict; the shape of each tensor, None for other values."""
        entries = dcp.FileSystemReader(self.path).read_metadata().state_dict_metadata
        return {
            name.removeprefix(f"{self.prefix}."): entry.size if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in entries.items()
            if name.startswith(f"{self.prefix}.")
        }

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place, each rank reading its own shards, and replace its other values."""
        loaded = {self.prefix: state}
        dcp.load(loaded, checkpoint_id=self.path)
        state.update(loaded[self.prefix])


@dataclass(frozen=True)
class FullTensors:
    """A state dict of full tensors that every rank has read (or memory-mapped) from one file."""

    path: Path
    state: Mapping[str, Any]

    def shapes(self) -> dict[str, Size | None]:
        """Names in this state dict; the shape of each tensor, None for other values."""
        return {name: value.shape if isinstance(value, Tensor) else None for name, value in self.state.items()}

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place with this rank's part, and replace its other values."""
        for name, value in state.items():
            if isinstance(value, Tensor):
                copy_full_(value, self.state[name])
            else:
                state[name] = self.state[name]


def read(path: Path, weights_only: bool | None, rank: int, world_size: int) -> tuple[dict[str, Any], dict | None]:
    """Read a checkpoint without its tensors.

    Args:
        path: A checkpoint directory, or a file as any Lightning strategy writes it.
        weights_only: As in `torch.load`; None means True.
        rank: This rank.
        world_size: Number of ranks that read.

    Returns:
        Lightning's checkpoint, in which `state_dict` and `optimizer_states` stand for tensors that `load_weights` and
        `load_optimizer` read; and the state of this rank's random number generators if the run that wrote it had as
        many ranks.

    Raises:
        CheckpointError: If it is missing or not complete.
    """
    check_complete(path)
    if not path.is_dir():
        checkpoint = _torch_load(path, weights_only, mmap=True)
        checkpoint["state_dict"] = FullTensors(path, checkpoint["state_dict"])
        return checkpoint, None
    checkpoint = _torch_load(path / META, weights_only)
    written_by = checkpoint["titan_strategy"]
    checkpoint["state_dict"] = SavedTensors(path, "state_dict")
    if written_by["optimizers"] is not None:
        checkpoint["optimizer_states"] = [SavedTensors(path, f"optimizer_{i}") for i in range(written_by["optimizers"])]
    if written_by["world_size"] == world_size:
        own = _torch_load(path / rank_file(rank), weights_only)
        if any(own["loaders"] or ()):
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loaders"]
        return checkpoint, own["rng"]
    if any(loader_states(checkpoint) or ()):
        rank_zero_warn(
            f"{path} was written by {written_by['world_size']} ranks and is read by {world_size}: the states of its data "
            "loaders belong to single ranks and are not restored. TextDataModule's position is global and is."
        )
        del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return checkpoint, None


def load_weights(saved: SavedTensors | FullTensors, module: nn.Module, strict: bool) -> None:
    """Fill the parameters and persistent buffers of `module` in place.

    Raises:
        CheckpointError: If shapes differ or, with `strict`, if the names do.
    """
    state = module.state_dict()
    shapes = saved.shapes()
    if strict:
        _check_names(saved.path, type(module).__name__, set(state), set(shapes))
    known = {name: value for name, value in state.items() if name in shapes}
    for name, value in known.items():
        if isinstance(value, Tensor) and shapes[name] != value.shape:
            raise CheckpointError(
                f"ckpt_path: {saved.path} is of another model. {name} has shape {tuple(shapes[name] or ())} there and "
                f"{tuple(value.shape)} in {type(module).__name__}."
            )
    saved.load_into(known)
    module.load_state_dict(known, strict=False)  # for get_extra_state, which is no tensor; the rest is in place already


def load_optimizer(checkpoint: Mapping[str, Any], module: nn.Module, optimizer: Optimizer, index: int) -> None:
    """Fill the state of `optimizer`, which was saved as number `index`.

    Raises:
        CheckpointError: If the checkpoint holds the state of another kind of optimizer.
    """
    saved = checkpoint["optimizer_states"][index]
    if not isinstance(saved, SavedTensors):
        saved = FullTensors(checkpoint["state_dict"].path, _flat_names(saved, module, optimizer))
    state = optimizer_state(module, optimizer)
    missing = state.keys() - saved.shapes().keys()
    if missing:
        raise CheckpointError(
            f"ckpt_path: {saved.path} holds the state of another optimizer than {type(optimizer).__name__}: "
            f"it lacks {_some(missing)}."
        )
    saved.load_into(state)
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(flatten_optimizer_state_dict=True))


def _torch_load(path: Path, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only is not False)


def _flat_names(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
    """Optimizer state as other strategies write it (by number of the parameter) -> by flat names."""
    if "param_groups" not in state:
        return state
    names = {parameter: name for name, parameter in module.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    flat: dict[str, Any] = {}
    for number, entries in state["state"].items():
        flat |= {f"state.{order[number]}.{key}": value for key, value in entries.items()}
    for group in state["param_groups"]:
        for number in group["params"]:
            flat |= {f"param_groups.{order[number]}.{key}": v for key, v in group.items() if key != "params"}
    return flat


def _check_names(path: Path, model: str, wanted: set[str], saved: set[str]) -> None:
    if wanted == saved:
        return
    differences = []
    if wanted - saved:
        differences.append(f"it lacks {_some(wanted - saved)}")
    if saved - wanted:
        differences.append(f"it has {_some(saved - wanted)}, which {model} has not")
    raise CheckpointError(
        f"ckpt_path: {path} is of another model: {' and '.join(differences)}. "
        "Set strict_loading=False on the LightningModule to load what both have."
    )


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return ", ".join(shown[:4]) + more
