"""`titan bench`: how fast a configuration trains, with what memory, and where the time goes."""

from titan_strategy.bench.report import Outcome, collect, table, to_json
from titan_strategy.bench.runner import Bench, BenchError

__all__ = ["Bench", "BenchError", "Outcome", "collect", "table", "to_json"]
