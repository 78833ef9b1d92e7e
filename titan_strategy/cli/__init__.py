"""The command line: `titan fit --config quickstart`."""

from titan_strategy.cli.main import TitanCLI, main

__all__ = ["TitanCLI", "main"]
