"""The loss curve as a picture."""

import importlib.util
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override


class LossCurve(Callback):
    """Draws training and validation loss against the optimizer step when `fit` ends.

    The points are those that the run logs: the training loss every `log_every_n_steps`, the loss of every validation.
    With `num_sanity_val_steps=-1` the sanity check is a whole validation; its loss is the point at step 0, and is
    logged too, which Lightning does not do. The points are part of the checkpoint, so the curve of a resumed run begins
    at step 0.

    Args:
        path: Where the PNG goes; by default `loss_curve.png` in the run's log folder.
        train_metric: Name under which the training loss is logged.
        val_metric: Name under which the validation loss is logged.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """

    def __init__(self, path: str | None = None, train_metric: str = "train/loss", val_metric: str = "val/loss") -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                "LossCurve draws with matplotlib: install titan-strategy[quickstart], "
                "or take the callback out of trainer.callbacks."
            )
        self._path = path
        self._metrics = {"train": train_metric, "val": val_metric}
        self._points: dict[str, list[tuple[int, float]]] = {"train": [], "val": []}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning reads the loss back from the device at these steps anyway, to log it.
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # the Trainer sets it undeclared
        if trainer.global_step % interval == 0:
            self._add("train", trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._add("val", trainer)
        elif trainer.num_sanity_val_steps == float("inf"):  # how the Trainer keeps -1
            self._add("val", trainer)
            for step, loss in self._points["val"]:
                for logger in trainer.loggers:
                    logger.log_metrics({self._metrics["val"]: loss}, step=step)

    def _add(self, curve: str, trainer: Trainer) -> None:
        points, value = self._points[curve], trainer.callback_metrics.get(self._metrics[curve])
        if value is not None and (not points or points[-1][0] < trainer.global_step):
            points.append((trainer.global_step, float(value)))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {curve: list(points) for curve, points in self._points.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._points = {curve: [tuple(point) for point in points] for curve, points in state_dict.items()}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir  # on every rank: the property is a collective
        if not trainer.is_global_zero:
            return
        path = Path(self._path) if self._path is not None else Path(folder or ".") / "loss_curve.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._draw(path)
        if points := self._points["val"]:
            (first, before), (last, after) = points[0], points[-1]
            name = self._metrics["val"]
            rank_zero_info(f"{name}: {before:.3f} at step {first}, {after:.3f} at step {last}. Curve: {path}")

    def _draw(self, path: Path) -> None:
        from matplotlib.figure import Figure  # not pyplot: no global state, no display

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for curve, marker in (("train", ""), ("val", "o")):
            if points := self._points[curve]:
                steps, losses = zip(*points, strict=True)
                axes.plot(steps, losses, marker=marker, label=self._metrics[curve])
        axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
        figure.savefig(path, dpi=120)
