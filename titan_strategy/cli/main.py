"""The `titan` command: Lightning's command line, with the defaults and the error messages of this project."""

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ActionYesNo, Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

import titan_strategy  # noqa: F401  # registers strategy="titan"
from titan_strategy import bench, parity
from titan_strategy.cli.check import check
from titan_strategy.cli.devices import absent_gpus
from titan_strategy.cli.parser import ConfigOrPreset, TitanParser, cause_of
from titan_strategy.cli.resume import ResumeReport, last_checkpoint
from titan_strategy.cli.subcommands import TrainerWithSubcommands

_DEFAULT_LOGGER = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}}

# `parity` and `bench` make trainers elsewhere; the one that Lightning insists on must work on any machine.
_ANY_TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "precision": None,
    "plugins": None,
    "callbacks": None,
}


_OWN = ("check", "parity", "bench")  # subcommands that Lightning does not have


def main(args: ArgsType = None) -> None:
    """Entry point of `titan` and of `python -m titan_strategy`."""
    # An installed command does not look for modules in the current folder, where the user's own class_paths live.
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    # Lightning 2.6 calls this on every rank; there is nothing that a user could do about it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    TitanCLI(args)


class TitanCLI(LightningCLI):
    """`fit`, `validate`, `test`, `predict`, `check`, `parity` and `bench`. Model and data are named by `class_path`."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            args=args,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=42,
            save_config_callback=KeepConfigs,
            trainer_class=TrainerWithSubcommands,
            trainer_defaults={"logger": _DEFAULT_LOGGER, "callbacks": [ResumeReport()]},
            parser_class=TitanParser,
            # Without these an error comes below two screens of usage.
            parser_kwargs={"prog": "titan"}
            | {name: {"usage": f"titan {name} [options]"} for name in self.subcommands()},
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        own = {"model", "datamodule"}
        return LightningCLI.subcommands() | {"check": own, "parity": own, "bench": own}

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ConfigOrPreset, help="A YAML file, or the name of a preset.")
        return parser

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--tensorboard", action=ActionYesNo, default=False, help="Log to TensorBoard besides trainer.logger."
        )

    @override
    def before_instantiate_classes(self) -> None:
        if self.subcommand not in _OWN:
            return
        settings = self.config[self.subcommand]
        self._as_given = settings.clone()
        settings.trainer.logger = False  # some begin to talk to a server when they are built
        if self.subcommand != "check":
            settings.trainer.update(Namespace(**_ANY_TRAINER))

    @override
    def instantiate_classes(self) -> None:
        if self.subcommand in _OWN:
            with self._refusing(ValueError, MisconfigurationException):
                super().instantiate_classes()
            return
        try:
            super().instantiate_classes()
        except ValueError as error:
            if cause_of(str(error)) == str(error):
                raise
            raise ValueError(cause_of(str(error))) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand].trainer
        if self.subcommand == "check" and (gpus := absent_gpus(settings.accelerator, settings.devices)) is not None:
            kwargs["accelerator"] = gpus
        return super().instantiate_trainer(**kwargs)

    def check(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Run `titan check`."""
        with self._refusing(ValueError):
            sys.stdout.write(check(self.trainer, model, datamodule, ckpt_path) + "\n")

    def parity(
        self,
        model: LightningModule,
        layouts: str,
        steps: int,
        tolerance: float,
        json: Path | None,
        timeout: float,
        **ignored: Any,
    ) -> NoReturn:
        """Run `titan parity`."""
        outcomes = []
        with self._refusing(parity.ParityError):
            recipe, wanted = parity.Recipe.from_config(self._as_given, steps), parity.parse_layouts(layouts)
            sys.stdout.write(parity.header(wanted) + "\n")
            for outcome in parity.compare_layouts(recipe, wanted, steps, tolerance, timeout):
                outcomes.append(outcome)
                sys.stdout.write(parity.verdict_line(outcome, wanted) + "\n")
                sys.stdout.flush()
        if json is not None:
            _write_json(json, parity.to_json(outcomes, steps, tolerance))
        sys.exit(parity.exit_code(outcomes))

    def bench(
        self,
        model: LightningModule,
        compare: list[str] | None,
        steps: int,
        warmup: int,
        rounds: int,
        json: Path | None,
        peak_tflops: float | None,
        timeout: float,
        **ignored: Any,
    ) -> NoReturn:
        """Run `titan bench`."""
        variants = list(dict.fromkeys(["", *(compare or [])]))
        with self._refusing(bench.BenchError):
            plan = bench.Bench(self._as_fit(), variants, steps, warmup, rounds, timeout)
            plan.check(self._parser("fit"))
        outcomes = [bench.Outcome(variant) for variant in variants]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by default nothing is cleaned up
        interrupted = False
        try:
            bench.collect(plan, outcomes, sys.stderr)
        except KeyboardInterrupt:
            interrupted = True
            sys.stderr.write("titan bench: interrupted; what has run until now:\n")
        sys.stdout.write("\n".join(bench.table(outcomes, peak_tflops)) + "\n")
        if json is not None:
            _write_json(json, bench.to_json(outcomes, peak_tflops))
        failed = any(outcome.failure for outcome in outcomes)
        sys.exit(128 + signal.SIGINT if interrupted else int(failed))

    def _as_fit(self) -> str:
        """The configuration without the options of `bench`, in YAML."""
        settings = self._as_given.clone()
        parser = self._parser("fit")  # private; Lightning offers no other way to a subcommand's parser
        known = set(parser.get_defaults().keys())
        for option in list(settings.__dict__):
            if option not in ("model", "data") and not any(key.split(".")[0] == option for key in known):
                settings.pop(option)
        settings.ckpt_path = None
        return parser.dump(settings, skip_none=False)

    @contextmanager
    def _refusing(self, *errors: type[Exception]) -> Generator[None, None, None]:
        """Without Lightning's remarks on the devices; `errors` are for the user and end the program."""
        logger = logging.getLogger("lightning.pytorch")
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            yield
        except errors as error:
            sys.stderr.write(f"titan {self.subcommand}: {cause_of(str(error))}\n")
            sys.exit(2)
        finally:
            logger.setLevel(level)

    @override
    def after_instantiate_classes(self) -> None:
        settings = self.config_init[self.subcommand]
        if settings.get("tensorboard"):
            self.trainer.loggers = [*self.trainer.loggers, _tensorboard_beside(self.trainer)]
        if settings.get("ckpt_path") == "last":
            try:
                settings["ckpt_path"] = str(last_checkpoint(self.trainer))
            except (FileNotFoundError, ValueError) as error:
                self.parser.error(str(error))


class KeepConfigs(SaveConfigCallback):
    """Writes the whole configuration to the log folder as `config.yaml`.

    In a folder that holds one from an earlier run, that one is renamed to `config-1.yaml`, `config-2.yaml`, ...
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # on every rank: the property is a collective
        if trainer.is_global_zero and not self.already_saved and log_dir is not None:
            _set_aside(Path(log_dir) / self.config_filename)
        super().setup(trainer, pl_module, stage)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _set_aside(path: Path) -> None:
    if path.exists():
        number = 1
        while (older := path.with_stem(f"{path.stem}-{number}")).exists():
            number += 1
        path.rename(older)


def _tensorboard_beside(trainer: Trainer) -> TensorBoardLogger:
    """A TensorBoard logger that writes to the folder of the first logger, or to the trainer's root folder."""
    first = trainer.logger
    if first is None or first.save_dir is None:
        return TensorBoardLogger(save_dir=trainer.default_root_dir)
    return TensorBoardLogger(save_dir=first.save_dir, name=first.name, version=first.version)
