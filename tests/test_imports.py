"""Which package may import which, and that a user's own `models` package does no harm."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "titan_strategy": {"models", "tests"},
    "precision_plugins": {"models", "titan_strategy", "tests"},
    "models": {"tests"},
}


def _imported_packages(path: Path) -> Iterator[str]:
    """The top-level packages that a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_in_one_direction(package: str) -> None:
    modules = list((ROOT / package).rglob("*.py"))
    assert modules
    wrong = {
        str(module.relative_to(ROOT)): sorted(found)
        for module in modules
        if (found := FORBIDDEN[package].intersection(_imported_packages(module)))
    }
    assert not wrong


def test_a_foreign_models_package_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise ImportError('the foreign models was imported')")
    program = f"""
import importlib, pkgutil, sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
for name in ("titan_strategy", "precision_plugins"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert "models" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
