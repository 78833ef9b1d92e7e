"""A checkpoint of any layout goes on under any other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parallel.resuming import Job, train_text, write_corpus
from tests.parallel.test_resume import checkpoint, tail

ONE = (1, 4, {})
LAYOUTS = {
    "tp2": (2, 4, {"tensor_parallel_size": 2}),
    "pp2": (2, 4, {"pipeline_parallel_size": 2}),
    "tp2-shard2": (4, 2, {"tensor_parallel_size": 2}),
    "pp2-tp2": (4, 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "hsdp": (4, 1, {"data_parallel_replicate_size": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    write_corpus(path)
    return path


def job(folder: Path, layout: tuple, **options) -> Job:
    _, batch_size, strategy = layout
    return Job(folder, 6, batch_size=batch_size, options=strategy, optimizer="adamw", **options)


@pytest.mark.parametrize("single_file", [False, True], ids=["sharded", "single-file"])
def test_any_layout_resumes_any_other(rank_pool, folder: Path, single_file: bool) -> None:
    whole = rank_pool.run(train_text, 1, job(folder, ONE))[0]
    order = list(LAYOUTS.values()) if not single_file else [LAYOUTS["pp2-tp2"], LAYOUTS["tp2"]]
    for number, saved in enumerate(order):
        place = folder / f"{single_file}{number}"
        write_corpus(place)
        first = job(place, saved, save_every=3, single_file=single_file)
        for trace in rank_pool.run(train_text, saved[0], first):
            torch.testing.assert_close(torch.tensor(trace["loss"]), torch.tensor(whole["loss"]), rtol=1e-5, atol=0)
        resumed = order[(number + 1) % len(order)]
        second = replace(job(place, resumed), ckpt_path=checkpoint(first, 3))
        for trace in rank_pool.run(train_text, resumed[0], second):
            expected = tail(whole, 3)
            assert [set(rows) for rows in trace["rows"]] == [set(rows) for rows in expected["rows"]]
            torch.testing.assert_close(torch.tensor(trace["loss"]), torch.tensor(expected["loss"]), rtol=1e-5, atol=0)
