"""The text sample: written once by rank 0 from a sharded model, and without touching the run's random numbers."""

from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from models import CausalLM, TextDataModule
from models.text_sample import TextSample
from tests.rank_pool import ExternalRanks, RankPool
from titan_strategy import TitanStrategy

PROMPT = "The sum of"


class _RandomState(pl.Callback):
    """Looks at the global generator around the callback before it."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states.append(torch.get_rng_state())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states.append(torch.get_rng_state())


def _fit(folder: Path, ranks: int) -> tuple[bool, bool]:
    """Returns whether the random state and the training mode are what they were before the sample."""
    data = TextDataModule(
        str(folder / "corpus.txt"), sequence_length=16, batch_size=2, validation_rows=2, cache_dir=folder / "cache"
    )
    model = CausalLM(preset="debug", overrides={"vocab_size": 8192, "n_layers": 1})
    strategy = TitanStrategy(cluster_environment=ExternalRanks(), parallel_devices=[torch.device("cpu")] * ranks)
    state = _RandomState()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=2,
        logger=False,
        default_root_dir=folder,
        callbacks=[TextSample(PROMPT, max_new_tokens=5), state],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, data)
    before, after = state.states
    assert model.model is not None
    return torch.equal(before, after), model.model.training


@pytest.mark.parametrize("ranks", [1, 2])
def test_sample_continues_the_prompt(ranks: int, rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("two and two is four\n" * 400)
    assert rank_pool.run(_fit, ranks, tmp_path, ranks) == [(True, True)] * ranks
    text = (tmp_path / "sample.txt").read_text()
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT)


def test_data_without_an_encoder_is_an_error_before_training(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[TextSample()],
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match="TextSample needs a data module with an encoder"):
        trainer.fit(CausalLM(preset="debug"), torch.utils.data.DataLoader([0]))  # type: ignore[arg-type]


def test_a_model_split_over_ranks_is_an_error_before_training() -> None:
    module = CausalLM(preset="debug")
    module.configure_model()
    sizes = SimpleNamespace(tensor=2, pipeline=1)
    trainer = SimpleNamespace(strategy=SimpleNamespace(mesh=SimpleNamespace(sizes=sizes)))
    with pytest.raises(ValueError, match="train with tensor_parallel_size=1"):
        TextSample().on_fit_start(trainer, module)  # type: ignore[arg-type]


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="prompt must not be empty"):
        TextSample(prompt="")
