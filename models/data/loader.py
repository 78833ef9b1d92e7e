"""The data loader for Lightning's fit loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class LazyDataLoader(DataLoader[Any]):
    """A data loader whose iterator starts with the first batch that is asked for.

    Lightning makes the iterator before it has restored a checkpoint and told the sampler its epoch; with workers, a
    plain loader would by then have fetched the first batches of the wrong epoch.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's base class names its own private iterator
        yield from super().__iter__()

    # Lightning takes a loader with these two for one that can resume inside an epoch, and warns about any other. This
    # one can; its position is kept by the data module, because it belongs to all ranks and not to one loader.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
