"""Starting the processes of a run, after checking everything that can be checked without them."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.imports import _IS_INTERACTIVE

# Lightning's launchers have private names, but they are the only ones: its own strategies use these two as well.
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from titan_strategy.checkpoint import gather
from titan_strategy.preflight import preflight

if TYPE_CHECKING:
    from titan_strategy.strategy import TitanStrategy

StartMethod = Literal["popen", "spawn", "fork", "auto"]


def check_start_method(start_method: StartMethod) -> StartMethod:
    """Return `start_method` if it is one, else raise ValueError."""
    if start_method not in get_args(StartMethod):
        valid = ", ".join(map(repr, get_args(StartMethod)))
        raise ValueError(f"start_method={start_method!r}: valid values are {valid}.")
    return start_method


def make_launcher(strategy: "TitanStrategy", start_method: StartMethod) -> _Launcher | None:
    """The launcher for a run, or None when this process is all of it."""
    environment = strategy.cluster_environment
    assert environment is not None
    if strategy.num_processes * strategy.num_nodes == 1 and not environment.creates_processes_externally:
        return None
    if start_method == "auto":
        start_method = "fork" if _IS_INTERACTIVE and not environment.creates_processes_externally else "popen"
    if start_method == "popen":
        return ScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)
    return ProcessLauncher(strategy, start_method)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each further rank."""

    @override
    def launch(self, function: Callable, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _preflight_of_call(function, args, kwargs, trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class ProcessLauncher(_MultiProcessingLauncher):
    """Forks or spawns the ranks; the trained weights come back to the process that called the trainer."""

    @override
    def launch(self, function: Callable, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _preflight_of_call(function, args, kwargs, trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        """Runs on every rank. The parent process cannot hold shards, so after training they are gathered."""
        if trainer.state.fn != TrainerFn.FITTING:
            return super()._collect_rank_zero_results(trainer, results)
        mesh = self._strategy.mesh  # type: ignore[attr-defined]  # Lightning calls it a ParallelStrategy

        def gather_shards(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
            state.update(gather(state, mesh))

        hook = trainer.lightning_module.register_state_dict_post_hook(gather_shards)
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            hook.remove()

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if worker_output.weights_path is not None:
            trainer.lightning_module.configure_model()  # here, too, it builds the model only if there is none
        super()._recover_results_in_main_process(worker_output, trainer)


def _preflight_of_call(function: Callable, args: Any, kwargs: Any, trainer: pl.Trainer | None) -> None:
    if trainer is None:
        return
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    module = arguments.get("model") or trainer.lightning_module
    datamodule = arguments.get("datamodule") or getattr(trainer, "datamodule", None)
    preflight(trainer, module, datamodule, arguments.get("ckpt_path"))
