"""Reading checkpoints, in any layout and at any number of ranks."""

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from titan_strategy.checkpoint.directory import META, CheckpointError, check_complete, rank_file
from titan_strategy.checkpoint.optimizer import empty_state, flat_state, set_optimizer_state
from titan_strategy.checkpoint.save import loader_states
from titan_strategy.checkpoint.together import one_error, together
from titan_strategy.sharding import copy_full_


@dataclass(frozen=True)
class SavedTensors:
    """A state dict that is still on disk, in a checkpoint directory under a prefix."""

    path: Path
    prefix: str

    def contents(self) -> dict[str, Tensor | None]:
        """Names in this state dict; a meta tensor for each tensor, None for other values."""
        entries = dcp.FileSystemReader(self.path).read_metadata().state_dict_metadata
        return {
            name.removeprefix(f"{self.prefix}."): _on_meta(entry)
            for name, entry in entries.items()
            if name.startswith(f"{self.prefix}.")
        }

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place, each rank reading its own shards, and replace its other values."""
        loaded = {self.prefix: state}
        with one_error(self.path):
            dcp.load(loaded, checkpoint_id=self.path)
        state.update(loaded[self.prefix])


@dataclass(frozen=True)
class FullTensors:
    """A state dict of full tensors that every rank has read (or memory-mapped) from one file."""

    path: Path
    state: Mapping[str, Any]

    def contents(self) -> dict[str, Tensor | None]:
        """Names in this state dict; a meta tensor for each tensor, None for other values."""
        return {name: v.to("meta") if isinstance(v, Tensor) else None for name, v in self.state.items()}

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
        if "state_dict" not in checkpoint:
            raise CheckpointError(f"ckpt_path: {path} is not a Lightning checkpoint, it has no 'state_dict'.")
        checkpoint["state_dict"] = FullTensors(path, checkpoint["state_dict"])
        return checkpoint, None
    checkpoint = _torch_load(path / META, weights_only)
    if "titan_strategy" not in checkpoint:
        raise CheckpointError(f"ckpt_path: {path} was not written by TitanStrategy. Convert it to a single file first.")
    written_by = checkpoint["titan_strategy"]
    checkpoint["state_dict"] = SavedTensors(path, "state_dict")
    if written_by["optimizers"] is not None:
        checkpoint["optimizer_states"] = [SavedTensors(path, f"optimizer_{i}") for i in range(written_by["optimizers"])]
    if written_by["world_size"] == world_size:
        own = together(path, lambda: _torch_load(path / rank_file(rank), weights_only))
        if any(own["loaders"] or ()):
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loaders"]
        return checkpoint, own["rng"]
    if any(loader_states(checkpoint) or ()):
        rank_zero_warn(
            f"{path} was written by {written_by['world_size']} ranks and is read by {world_size}: the states of its "
            "data loaders belong to single ranks and are not restored. TextDataModule's position is global and is."
        )
        del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return checkpoint, None


def load_weights(saved: SavedTensors | FullTensors, module: nn.Module, strict: bool) -> None:
    """Fill the parameters and persistent buffers of `module` in place.

    Raises:
        CheckpointError: If shapes differ or, with `strict`, if the names do.
    """
    state = module.state_dict()
    contents = saved.contents()
    if strict:
        _check_names(saved.path, type(module).__name__, _names_on_all_ranks(state), set(contents))
    known = {name: value for name, value in state.items() if name in contents}
    for name, value in known.items():
        found = getattr(contents[name], "shape", None)
        if isinstance(value, Tensor) and found != value.shape:
            raise CheckpointError(
                f"ckpt_path: {saved.path} is of another model. {name} has shape {tuple(found or ())} there and "
                f"{tuple(value.shape)} in {type(module).__name__}."
            )
    saved.load_into(known)
    module.load_state_dict(known, strict=False)  # for get_extra_state, which is no tensor; the rest is in place already


def load_optimizer(checkpoint: Mapping[str, Any], module: nn.Module, optimizer: Optimizer, index: int) -> None:
    """Fill the state of `optimizer`, which was saved as number `index`.

    Raises:
        CheckpointError: If the checkpoint holds the state of another kind of optimizer.
    """
    path, states = checkpoint["state_dict"].path, checkpoint["optimizer_states"]
    if index >= len(states):
        raise CheckpointError(
            f"ckpt_path: {path} holds the state of {len(states)} optimizers, but optimizer {index} is needed."
        )
    saved = states[index]
    if not isinstance(saved, SavedTensors):
        saved = FullTensors(path, flat_state(saved, module, optimizer) if "param_groups" in saved else saved)
    state, missing = empty_state(module, optimizer, saved.contents())
    if missing:
        raise CheckpointError(
            f"ckpt_path: {path} holds the state of another optimizer than {type(optimizer).__name__}: "
            f"it lacks {_some(missing)}."
        )
    saved.load_into(state)
    set_optimizer_state(module, optimizer, state)


def _torch_load(path: Path, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    try:
        mmap = mmap and zipfile.is_zipfile(path)  # not what PyTorch wrote before version 1.6
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"ckpt_path: {path} is no checkpoint, or holds more than tensors and plain values (such as a Path among "
            "the hyperparameters). If you trust it, pass weights_only=False to the trainer's method."
        ) from error
    except (OSError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"ckpt_path: {path} is missing or damaged: {error}") from error


def _on_meta(entry: Any) -> Tensor | None:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")


def _names_on_all_ranks(state: Mapping[str, Any]) -> set[str]:
    """What the ranks expect together: each pipeline stage has names of its own."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(state))
    return set().union(*everywhere)


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
