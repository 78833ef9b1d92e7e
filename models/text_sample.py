"""A sample of what a language model writes."""

from pathlib import Path

import tiktoken
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from models.generate import generate
from models.transformer import Transformer


class TextSample(Callback):
    """Continues a prompt when `fit` ends; rank 0 prints the text and writes it to a file.

    The module's `model` must be a `Transformer`, and the data module must have an `encoder`, as `CausalLM` and
    `TextDataModule` do.

    Args:
        prompt: The text to continue.
        max_new_tokens: Length of the continuation in tokens.
        temperature: Divides the logits; 0 takes the most likely token each time.
        top_k: Sample among this many most likely tokens; all of them when None.
        seed: Seed of the sampling, which leaves the run's own random numbers alone.
        path: Where the text goes; by default `sample.txt` in the run's log folder.
        after_validation: Also sample after every validation; the file then holds the latest text.

    Raises:
        ValueError: If the prompt is empty; when the run starts, if the data module has no encoder, or if tensor or
            pipeline parallelism splits the model.
        TypeError: When the run starts, if the module's `model` is no `Transformer`.
    """

    def __init__(
        self,
        prompt: str = "def",
        max_new_tokens: int = 120,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
        path: str | None = None,
        after_validation: bool = False,
    ) -> None:
        if not prompt:
            raise ValueError("TextSample: prompt must not be empty.")
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._top_k = top_k
        self._seed = seed
        self._path = path
        self._after_validation = after_validation

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _encoder(trainer)  # better now than after training

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module.model, Transformer):
            raise TypeError(f"TextSample: {type(pl_module).__name__}.model must be a Transformer, as CausalLM's is.")
        mesh = getattr(trainer.strategy, "mesh", None)
        if mesh is not None and mesh.sizes.tensor * mesh.sizes.pipeline > 1:
            raise ValueError(
                "TextSample runs the model as one process does: take it out of trainer.callbacks, or train with "
                "tensor_parallel_size=1 and pipeline_parallel_size=1."
            )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sample(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._after_validation and not trainer.sanity_checking:
            self._sample(trainer, pl_module)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        text = self._generate(trainer, pl_module)  # on every rank: the forward gathers sharded parameters
        folder = trainer.log_dir  # so does this property
        if not trainer.is_global_zero:
            return
        path = Path(self._path) if self._path is not None else Path(folder or ".") / "sample.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        rank_zero_info(f"Sample at step {trainer.global_step} ({path}):\n{text}")

    def _generate(self, trainer: Trainer, pl_module: LightningModule) -> str:
        model, device, encoder = pl_module.model, pl_module.device, _encoder(trainer)
        assert isinstance(model, Transformer), "checked in on_fit_start"
        was_training = model.training
        model.eval()
        tokens = torch.tensor([encoder.encode_ordinary(self._prompt)], device=device)
        generator = torch.Generator(device).manual_seed(self._seed)
        tokens = generate(model, tokens, self._max_new_tokens, self._temperature, self._top_k, generator)
        model.train(was_training)
        return encoder.decode(tokens[0].tolist())


def _encoder(trainer: Trainer) -> tiktoken.Encoding:
    encoder = getattr(getattr(trainer, "datamodule", None), "encoder", None)
    if encoder is None:
        raise ValueError("TextSample needs a data module with an encoder, such as TextDataModule.")
    return encoder
