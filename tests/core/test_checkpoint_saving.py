"""No checkpoint is lost or half-written, and each stage of a run gets what is its own."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.core.checkpoints import RANKS, STEPS, Job, use
from tests.core.modules import SEQUENCE, Language, Tokens, full_state, titan, trainer
from titan_strategy.checkpoint import CheckpointError, check_complete, save


def fail(message: str) -> Callable[..., None]:
    def raising(*args: Any, **kwargs: Any) -> None:
        raise OSError(message)

    return raising


def save_and_fail(folder: Path, where: str, failing_rank: int) -> dict[str, Any]:
    """Save, train on, and fail to save again under the same name. All ranks must raise."""
    single_file = where == "file"
    run = trainer(titan(save_distributed_checkpoint=not single_file), max_steps=2)
    module = Language()
    run.fit(module)
    run.save_checkpoint(folder / "kept.ckpt")
    before = full_state(module)
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(module)
    patches = {
        "shards": (dcp.FileSystemWriter, "write_data"),
        "rank-file": (save, "rank_file"),
        "folder": (Path, "mkdir"),
        "publish": (save, "publish"),
        "file": (type(run.strategy.checkpoint_io), "save_checkpoint"),
    }
    owner, name = patches[where]
    original = getattr(owner, name)
    if run.global_rank == failing_rank:
        setattr(owner, name, fail("No space left on device"))
    start = time.monotonic()
    try:
        run.save_checkpoint(folder / "kept.ckpt")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "no error"
    finally:
        setattr(owner, name, original)
    return {"error": message, "before": before, "seconds": time.monotonic() - start}


@pytest.mark.parametrize(
    ("where", "rank"), [("shards", 1), ("rank-file", 1), ("folder", 0), ("publish", 0), ("file", 0)]
)
def test_a_failed_save_stops_all_ranks_and_leaves_the_older_checkpoint(
    rank_pool, tmp_path: Path, where: str, rank: int
) -> None:
    answers = rank_pool.run(save_and_fail, RANKS, tmp_path, where, rank, timeout=60.0)
    for answer in answers:
        assert "No space left on device" in answer["error"]
        assert answer["error"].startswith(f"CheckpointError: {tmp_path}/kept.ckpt: rank {rank}: ")
        assert answer["seconds"] < 10
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["kept.ckpt"]
    again = rank_pool.run(use, RANKS, Job(tmp_path / "kept.ckpt", "validate"))[0]
    for key, value in answers[0]["before"].items():
        assert torch.equal(again["weights"][key], value), key


def save_and_die(folder: Path) -> None:
    """Rank 0 is killed while the shards of the second checkpoint are written."""
    run = trainer(max_steps=1)
    module = Language()
    run.fit(module)
    run.save_checkpoint(folder / "kept.ckpt")
    written = dcp.FileSystemWriter.write_data

    def die(*args: Any, **kwargs: Any) -> None:
        written(*args, **kwargs).wait()
        os._exit(3)

    dcp.FileSystemWriter.write_data = die  # type: ignore[method-assign]
    for name in ("kept.ckpt", "new.ckpt"):
        run.save_checkpoint(folder / name)


def test_a_killed_save_leaves_no_checkpoint_of_that_name(rank_pool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died with exit code 3"):
        rank_pool.run(save_and_die, 1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kept.ckpt.incomplete", "kept.ckpt"]
    check_complete(tmp_path / "kept.ckpt")
    # The next run of that name sweeps up.
    rank_pool.run(save_twice, 1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.ckpt"]


def save_twice(folder: Path) -> None:
    run = trainer(max_steps=1)
    run.fit(Language(), ckpt_path=folder / "kept.ckpt")
    run.save_checkpoint(folder / "kept.ckpt")
    run.save_checkpoint(folder / "kept.ckpt")


def test_a_kill_between_the_two_renames_is_explained(saved_copy: Path) -> None:
    hidden = saved_copy.with_name(".whole.ckpt.replaced")
    saved_copy.rename(hidden)
    with pytest.raises(CheckpointError, match=r"was being replaced; what it was is now .*\.whole\.ckpt\.replaced"):
        check_complete(saved_copy)


# -- ModelCheckpoint ---------------------------------------------------------------------------------------------------


def train_with_model_checkpoint(folder: Path, save_last: bool | str) -> dict[str, Any]:
    callback = ModelCheckpoint(
        folder, monitor="val/loss", save_top_k=2, save_last=save_last, filename="{step}", every_n_epochs=1
    )
    run = trainer(max_epochs=4, enable_checkpointing=True, callbacks=[callback])
    module = Language(rows=4)
    run.fit(module)
    final = full_state(module)
    best = Path(callback.best_model_path)
    result = {"final": final, "left": sorted(p.name for p in folder.iterdir()), "best": best.name}
    run.validate(module, ckpt_path="best", verbose=False)
    result["best_score"] = run.callback_metrics["val/loss"].item()
    result["score"] = callback.best_model_score.item()
    resumed = trainer(
        max_epochs=5,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, monitor="val/loss", save_last=save_last)],
    )
    module = Language(rows=4)
    resumed.fit(module, ckpt_path="last")
    return result | {"resumed_from": Path(resumed.ckpt_path).name, "steps": resumed.global_step}


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint(rank_pool, tmp_path: Path, save_last: bool | str) -> None:
    for answer in rank_pool.run(train_with_model_checkpoint, RANKS, tmp_path, save_last):
        assert answer["left"] == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
        assert answer["best"] in ("step=6.ckpt", "step=8.ckpt")
        assert answer["best_score"] == pytest.approx(answer["score"], rel=1e-6)
        assert answer["resumed_from"] == "last.ckpt"
        assert answer["steps"] == 10
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    check_complete(tmp_path / "last.ckpt")


# -- One trainer, several stages ---------------------------------------------------------------------------------------


def several_stages(path: Path) -> dict[str, Any]:
    run = trainer(max_steps=STEPS)
    first, second = Language(), Language()
    run.validate(first, ckpt_path=path, verbose=False)
    saved_weights = full_state(first)
    run.fit(first)
    trained = full_state(first)
    fresh = run.test(second, ckpt_path=path, verbose=False)[0]["test/loss"]
    again = full_state(second)
    validated = run.validate(first, verbose=False)[0]["val/loss"]
    after = full_state(first)
    run.fit_loop.epoch_loop.max_steps = 2 * STEPS
    run.fit_loop.max_epochs = 2
    run.fit(first)
    another = trainer(max_steps=STEPS)
    another.fit(first)
    return {
        "saved": saved_weights,
        "trained": trained,
        "again": again,
        "after": after,
        "losses": (fresh, validated),
        "steps": (run.global_step, another.global_step),
    }


def test_stages_modules_and_trainers_take_turns(rank_pool, saved: Path) -> None:
    expected = rank_pool.run(use, RANKS, Job(saved / "whole.ckpt", "validate"))[0]["weights"]
    for answer in rank_pool.run(several_stages, RANKS, saved / "whole.ckpt"):
        for key, value in expected.items():
            assert torch.equal(answer["saved"][key], value), key
            assert torch.equal(answer["again"][key], value), key
            assert torch.equal(answer["after"][key], answer["trained"][key]), key
        assert answer["losses"][1] < answer["losses"][0]
        assert answer["steps"] == (2 * STEPS, STEPS)


class Drawing(Language):
    """Remembers the state of the global generator in its last step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.generator = torch.get_rng_state()
        return super().training_step(batch, batch_idx)


def generator_of_first_step(validated: Path | None) -> Tensor:
    run = trainer(max_steps=1)
    module = Drawing()
    run.validate(module, ckpt_path=validated, verbose=False)
    torch.manual_seed(77)
    run.fit(module)
    return module.generator


def test_only_the_run_that_resumes_gets_the_generators_back(rank_pool, saved: Path) -> None:
    with_checkpoint, without = (rank_pool.run(generator_of_first_step, RANKS, p) for p in (saved / "whole.ckpt", None))
    for rank in range(RANKS):
        assert torch.equal(with_checkpoint[rank], without[rank])


# -- Loaders with a state of their own ---------------------------------------------------------------------------------


class CountingLoader:
    """A loader with a state, as torchdata's is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        while self.position < 8:
            self.position += 1
            yield {
                **Tokens(1)[0],
                "tokens": torch.full((1, SEQUENCE), self.rank),
                "number": 100 * self.rank + self.position,
            }

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position + 100 * self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"] - 100 * self.rank


class Counted(Language):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def token_loss(self, output: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if self.training:
            self.numbers.append(batch["number"])
        return super().token_loss(output, batch)

    def train_dataloader(self) -> Any:
        return CountingLoader(self.trainer.global_rank)


def count(path: Path, resume: bool) -> list[int]:
    run = trainer(max_steps=6 if resume else 3, max_epochs=2, limit_val_batches=0)
    module = Counted()
    run.fit(module, ckpt_path=path if resume else None)
    if not resume:
        run.save_checkpoint(path)
    return module.numbers


def test_each_rank_gets_its_own_loader_state_back(rank_pool, tmp_path: Path) -> None:
    path = tmp_path / "counted.ckpt"
    assert rank_pool.run(count, RANKS, path, False) == [[1, 2, 3], [101, 102, 103]]
    assert rank_pool.run(count, RANKS, path, True) == [[4, 5, 6], [104, 105, 106]]


# -- Where checkpoints go ----------------------------------------------------------------------------------------------


def save_to_strange_places(folder: Path) -> list[str]:
    run = trainer(max_steps=1)
    run.fit(Language())
    messages = []
    for path, options in [("s3://bucket/x.ckpt", None), (folder / "x.ckpt", {"endpoint": "here"})]:
        try:
            run.save_checkpoint(path, storage_options=options)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_only_folders_are_written_to(rank_pool, tmp_path: Path) -> None:
    for url, options in rank_pool.run(save_to_strange_places, RANKS, tmp_path):
        assert url == "filepath='s3://bucket/x.ckpt': checkpoints are written to local or mounted folders, not to URLs."
        assert "takes no storage options" in options
    assert list(tmp_path.iterdir()) == []
