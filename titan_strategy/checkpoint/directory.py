"""A checkpoint as a directory on disk: written under a hidden name, renamed when complete, checked before it is read.

::

    step=100.ckpt/
        .metadata        what torch.distributed.checkpoint needs to find a tensor (its own pickle)
        __0_0.distcp ... tensors, one file or more per writing rank
        meta.pt          the rest of Lightning's checkpoint (loops, schedulers, callbacks, hyperparameters)
        rank_00000.pt    what belongs to one rank: random number generators, its data loaders
"""

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

METADATA = ".metadata"
META = "meta.pt"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message says which and why."""


def rank_file(rank: int) -> str:
    """Name of the file with the state of one rank."""
    return f"rank_{rank:05d}.pt"


def local_path(filepath: str) -> Path:
    """`filepath` as a path on a local or mounted file system.

    Raises:
        ValueError: If it is a URL.
    """
    if "://" in filepath:
        raise ValueError(f"filepath={filepath!r}: checkpoints are written to local or mounted folders, not to URLs.")
    return Path(filepath)


def check_complete(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a checkpoint file or a complete checkpoint directory.

    A directory is complete when its metadata exists and every file that it refers to is as long as it must be.
    """
    if not path.exists():
        if _previous(path).exists():
            raise CheckpointError(f"ckpt_path: {path} was being replaced; what it was is now {_previous(path)}.")
        raise CheckpointError(f"ckpt_path: there is no checkpoint at {path}.{_alternatives(path)}")
    if not path.is_dir():
        return
    for name in (METADATA, META):
        if not (path / name).is_file():
            raise CheckpointError(
                f"ckpt_path: {path} is not a complete checkpoint, {name} is missing.{_alternatives(path)}"
            )
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # a pickle that was cut off can fail with anything
        raise CheckpointError(
            f"ckpt_path: {path} is damaged, {METADATA} cannot be read.{_alternatives(path)}"
        ) from error
    needed: dict[str, int] = defaultdict(int)
    for entry in (metadata.storage_data or {}).values():
        needed[entry.relative_path] = max(needed[entry.relative_path], entry.offset + entry.length)
    for name, length in needed.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found is None or found < length:
            state = "is missing" if found is None else f"has {found} of {length} bytes"
            raise CheckpointError(f"ckpt_path: {path} is damaged, {name} {state}.{_alternatives(path)}")


def prepare(path: Path) -> None:
    """Make the empty hidden directory beside `path` to write into. Call it on one rank."""
    _delete(staging(path))  # what a killed run left
    staging(path).mkdir(parents=True)


def publish(path: Path) -> None:
    """Give the staged checkpoint its name. A previous one of that name goes only when the new one is in place."""
    previous = _previous(path)
    _delete(previous)
    if (path.exists() or path.is_symlink()) and (path.is_dir() or staging(path).is_dir()):
        path.rename(previous)  # only a file takes the place of another in one step
    staging(path).replace(path)
    _delete(previous)


def remove(path: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves none of that name."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        doomed = path.with_name(f".{path.name}.removed")
        _delete(doomed)
        path.rename(doomed)
        _delete(doomed)


def staging(path: Path) -> Path:
    """The hidden name under which a checkpoint is written."""
    return path.with_name(f".{path.name}.incomplete")


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _delete(path: Path) -> None:
    delete: Callable[[Path], None] = Path.unlink if path.is_symlink() or path.is_file() else shutil.rmtree
    if path.exists() or path.is_symlink():
        delete(path)


def _alternatives(path: Path) -> str:
    """The complete checkpoints beside `path`, newest first."""
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist."
    siblings = [p for p in path.parent.iterdir() if p != path and not p.name.startswith(".") and _looks_complete(p)]
    siblings.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    if not siblings:
        return f" There is no other checkpoint in {path.parent}."
    return " Complete checkpoints in that folder: " + ", ".join(p.name for p in siblings[:5]) + "."


def _looks_complete(path: Path) -> bool:
    return (path / METADATA).is_file() and (path / META).is_file() if path.is_dir() else path.suffix == ".ckpt"
