"""A checkpoint that two ranks wrote, for the files that read it."""

import shutil
from pathlib import Path

import pytest

from tests.core.checkpoints import RANKS, train_and_save


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rank_pool.run(train_and_save, RANKS, folder, "Language", False)
    return folder


@pytest.fixture
def saved_copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "whole.ckpt", tmp_path / "whole.ckpt")
    return tmp_path / "whole.ckpt"
