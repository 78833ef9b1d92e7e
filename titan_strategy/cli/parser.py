"""The argument parser: presets by name, and errors that say what was probably meant."""

import dataclasses
import difflib
import importlib
import inspect
import re
import typing
from argparse import ArgumentParser as ArgparseParser
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from titan_strategy.cli.presets import find_config

_UNKNOWN_KEY = re.compile(r"(?:[Oo]ption '|unrecognized arguments: --|Unexpected keys: \{')([\w.]+)")
_UNION = "Does not validate against any of the Union subtypes"
_CAUSE = re.compile(rf"^ *- (?!{_UNION}|Expected a )(.+)$", re.MULTILINE)
_CLASS_PATH = re.compile(r"class_path '([\w.]+)\.(\w+)'")


class ConfigOrPreset(ActionConfigFile):
    """`--config` takes a file or the name of a preset."""

    @override
    def __call__(self, parser: ArgparseParser, cfg: Namespace, values: Any, option_string: str | None = None) -> None:
        try:
            path = find_config(values)
        except FileNotFoundError as error:
            raise TypeError(f"--config {error}") from error  # what jsonargparse turns into a command line error
        super().__call__(parser, cfg, path, option_string)


class TitanParser(LightningArgumentParser):
    """Lightning's parser, with the nearest valid name beside an unknown one."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(message + _suggestion(message), ex)


def cause_of(message: str) -> str:
    """What is wrong, of a message that repeats every type and value that an option may have or has."""
    causes = _CAUSE.findall(message) if _UNION in message else []
    return "\n".join(dict.fromkeys(causes)) or message


def _suggestion(message: str) -> str:
    """` Did you mean ...?` for a parser's message about an unknown key, or nothing."""
    unknown = _UNKNOWN_KEY.search(message)
    if unknown is None:
        return ""
    *prefix, name = unknown[1].split(".")
    owners = [getattr(importlib.import_module(module), cls) for module, cls in _CLASS_PATH.findall(message)]
    if prefix == ["trainer"]:
        owners = [Trainer]
    valid = [name for owner in owners for name in _names(owner)]
    near = difflib.get_close_matches(name, valid, n=1)
    return f"\nDid you mean {near[0]!r}?" if near else ""


def _names(annotation: Any) -> Iterator[str]:
    """The keys that a class takes in YAML, those of its nested dataclasses and typed dicts included."""
    if isinstance(annotation, type) and (dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation)):
        yield from typing.get_type_hints(annotation)
    elif inspect.isclass(annotation):
        for name, parameter in inspect.signature(annotation).parameters.items():
            yield name
            for nested in (parameter.annotation, *typing.get_args(parameter.annotation)):
                if dataclasses.is_dataclass(nested) or typing.is_typeddict(nested):
                    yield from _names(nested)
