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

    def bench(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        compare: list[str] | None = None,
        steps: int = 20,
        warmup: int = 5,
        rounds: int = 1,
        json: Path | None = None,
        peak_tflops: float | None = None,
        timeout: float = 1800.0,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Time the training of a configuration, and of variants of it in turn.

        Validation, checkpoints, loggers and callbacks are left out. The table says for each: tokens (or samples) per
        second over all ranks, the ratio to the first line, model-flops utilisation (of the dense bfloat16 peak), memory
        of rank 0, milliseconds per optimizer step, the share of each part of it, and the seconds from the command to
        the end of the first step. Exit status: 0, or 1 if a variant failed.

        Args:
            model: Given by the configuration.
            datamodule: Given by the configuration.
            compare: Variants, each some overrides in one string: '["data.init_args.batch_size=4",
                "trainer.precision=bf16-true trainer.accumulate_grad_batches=2"]'.
            steps: Optimizer steps to time in each run.
            warmup: Steps before them.
            rounds: How often each runs; the table has medians over all.
            json: A file to write everything to.
            peak_tflops: Operations per second of one device, in 1e12; by default what is known of the GPU's name.
            timeout: Seconds that one run may take.
            ckpt_path: Accepted because `fit` has it; the benchmark begins with initial weights.
            weights_only: Accepted because `fit` has it.
        """
        raise NotImplementedError
