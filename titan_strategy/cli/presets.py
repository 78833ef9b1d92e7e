"""The configurations that come with the package, and how `--config` finds them."""

from pathlib import Path


def presets() -> dict[str, Path]:
    """The shipped configurations by name, e.g. `quickstart`."""
    package = Path(__file__).parents[1]
    installed, source_tree = package / "configs", package.parent / "configs"
    folder = installed if installed.is_dir() else source_tree
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(value: str) -> str:
    """Path of the configuration that a `--config` value means.

    Args:
        value: An existing file, a URL, or the name of a preset: `quickstart`, `quickstart.yaml` or
            `configs/quickstart.yaml`. A file of the user's wins over a preset of that name.

    Raises:
        FileNotFoundError: If it is none of these; the message lists the presets.
    """
    if Path(value).is_file() or "://" in value:
        return value
    for name, path in presets().items():
        if value in (name, f"{name}.yaml", f"configs/{name}.yaml"):
            return str(path)
    raise FileNotFoundError(f"{value!r} is neither a file nor a preset; the presets are {', '.join(presets())}.")
