"""The options of the subcommands that Lightning does not have."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer


class TrainerWithSubcommands(Trainer):
    """Lightning reads a subcommand's options from the trainer's method of that name. `TitanCLI` runs these."""

    def check(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Check a configuration without starting anything; exit status 2 if it cannot work.

        Args:
            model: Given by the configuration.
            datamodule: Given by the configuration.
            ckpt_path: The checkpoint that `fit` would resume from.
            weights_only: Accepted because `fit` has it.
        """
        raise NotImplementedError

    def parity(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        layouts: str = "fsdp2",
        steps: int = 3,
        tolerance: float = 1e-5,
        json: Path | None = None,
        timeout: float = 600.0,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Compare training in one process with training in other layouts, in float32.

        Exit status: 0 all equal, 1 one differs or failed, 2 nothing could be compared, 3 one cannot run and the others
        are equal.

        Args:
            model: Given by the configuration.
            datamodule: Given by the configuration.
            layouts: Comma-separated: fsdpN, replicateN, hsdpRxS, tpN, ppN and combinations such as pp2fsdp2tp2. The
                configuration gives all else, such as the pipeline's schedule.
            steps: Optimizer steps to compare.
            tolerance: Greatest relative difference of a loss, gradient norm, gradient or weight. Adam turns rounding in
                a gradient near zero into a step of full size; raise its eps or this where that shows.
            json: A file to write the result to.
            timeout: Seconds that a layout may take.
            ckpt_path: Accepted because `fit` has it; the comparison begins with initial weights.
            weights_only: Accepted because `fit` has it.
        """
        raise NotImplementedError
