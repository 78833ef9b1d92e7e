"""From a parsed configuration to its module, data and trainer: anew for each layout, in any process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy

from titan_strategy.module import TitanModule
from titan_strategy.parity.layouts import Layout, ParityError
from titan_strategy.strategy import TitanStrategy

# What the comparison decides itself: where and how it runs.
_OWN_CHOICE = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "precision_plugin",
    "process_group_backend",
    "cpu_offload",
)


@dataclass(frozen=True)
class Recipe:
    """The parts of a configuration that decide what a training step computes. Picklable.

    Args:
        model: `class_path` and `init_args` of the LightningModule.
        data: The same of the data module.
        strategy: The same of the strategy; its sizes are replaced.
        accumulate: `trainer.accumulate_grad_batches`.
        clip: `trainer.gradient_clip_val`.
        clip_algorithm: `trainer.gradient_clip_algorithm`.
        max_steps: What learning rate schedules take for the length of the run.
        seed: Of the initial weights and of everything else.
    """

    model: Namespace
    data: Namespace
    strategy: Namespace
    accumulate: int
    clip: float | None
    clip_algorithm: Literal["norm", "value"]
    max_steps: int
    seed: int

    @classmethod
    def from_config(cls, config: Namespace, steps: int) -> "Recipe":
        """Take what matters from the parsed options of the command line.

        Raises:
            ParityError: If there is something that cannot be compared.
        """
        trainer = config.trainer
        if config.get("data") is None:
            raise ParityError("titan parity needs a data module (data: in the configuration).")
        strategy = trainer.strategy
        if strategy in ("auto", "titan"):
            strategy = Namespace(class_path="titan_strategy.TitanStrategy", init_args=Namespace())
        if not isinstance(strategy, Namespace):
            raise ParityError(f"trainer.strategy={strategy!r}: titan parity compares layouts of strategy 'titan' only.")
        seed = strategy.init_args.get("seed")
        if seed is None:
            seed = 0 if config.seed_everything is False else config.seed_everything
        return cls(
            model=config.model,
            data=config.data,
            strategy=strategy,
            accumulate=trainer.accumulate_grad_batches,
            clip=trainer.gradient_clip_val,
            clip_algorithm=trainer.gradient_clip_algorithm or "norm",
            max_steps=max(steps, trainer.max_steps),
            seed=seed,
        )

    def build(self, data_ranks: int) -> tuple[TitanModule, pl.LightningDataModule]:
        """The module, and data whose global microbatch has the same rows for any number of data ranks.

        Raises:
            ParityError: If `data_ranks` ranks cannot share the rows of a batch, or the module is no `TitanModule`.
        """
        pl.seed_everything(self.seed, workers=True, verbose=False)
        parser = ArgumentParser()
        parser.add_subclass_arguments(pl.LightningModule, "model")
        parser.add_subclass_arguments(pl.LightningDataModule, "data")
        built = parser.instantiate_classes(Namespace(model=self.model, data=self.data))
        if not isinstance(built.model, TitanModule):
            raise ParityError(
                f"{type(built.model).__name__} is not a TitanModule. Of any other module the loss is a mean of the "
                "ranks' means, which depends on the layout: there is nothing that all layouts should equal."
            )
        if data_ranks > 1:
            _divide_batch(built.data, data_ranks)
        return built.model, built.data

    def trainer(
        self, layout: Layout, accelerator: str, callbacks: Sequence[pl.Callback] = (), **options: Any
    ) -> pl.Trainer:
        """A quiet trainer for one rank of `layout`, in float32."""
        return pl.Trainer(
            accelerator=accelerator,
            devices=layout.ranks,
            strategy=self._strategy(layout),
            plugins=[LightningEnvironment()],
            precision="32-true",
            callbacks=list(callbacks),
            accumulate_grad_batches=self.accumulate,
            gradient_clip_val=self.clip,
            gradient_clip_algorithm=self.clip_algorithm if self.clip is not None else None,
            max_epochs=-1,
            max_steps=self.max_steps,
            limit_val_batches=0,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    def _strategy(self, layout: Layout) -> TitanStrategy:
        given = {key: value for key, value in vars(self.strategy.init_args).items() if key not in _OWN_CHOICE}
        options = Namespace(**given | layout.options() | {"seed": self.seed})
        parser = ArgumentParser()
        parser.add_subclass_arguments(Strategy, "strategy")
        wanted = Namespace(class_path=self.strategy.class_path, init_args=options)
        strategy = parser.instantiate_classes(Namespace(strategy=wanted)).strategy
        if not isinstance(strategy, TitanStrategy):
            raise ParityError(f"trainer.strategy={self.strategy.class_path} is not a TitanStrategy.")
        return strategy


def _divide_batch(data: pl.LightningDataModule, data_ranks: int) -> None:
    rows = getattr(data, "batch_size", None)
    if rows is None:
        raise ParityError(
            f"{type(data).__name__} has no attribute batch_size, through which the rows of a batch could be shared "
            f"among {data_ranks} data ranks."
        )
    if rows % data_ranks:
        raise ParityError(
            f"data.batch_size={rows} cannot be shared among {data_ranks} data ranks: make it a multiple of "
            f"{data_ranks}."
        )
    data.batch_size = rows // data_ranks  # type: ignore[attr-defined]
