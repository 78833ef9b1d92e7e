"""Fixtures for the whole suite."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.rank_pool import RankPool


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    """Warm gloo ranks, fresh for each file, so that no file meets what another has left; see `tests/rank_pool.py`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Takes back what a Trainer in pytest's own process leaves: environment variables and a process group."""
    environment = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
