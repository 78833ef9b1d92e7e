"""`TitanStrategy`: the hooks that Lightning calls, in the order in which it calls them."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from precision_plugins import TitanPrecision
from titan_strategy import checkpoint as ckpt
from titan_strategy import distributed, gradients, launch
from titan_strategy.data_parallel import ReshardPolicy, reshard, set_gradient_sync
from titan_strategy.mesh import ParallelMesh, ParallelSizes
from titan_strategy.mesh_strategy import MeshStrategy
from titan_strategy.module import TitanModule
from titan_strategy.parallelize import Layout, Split, earlier_split, parallelize
from titan_strategy.pipeline_split import PipelineConfig
from titan_strategy.plan import ParallelPlan
from titan_strategy.precision import titan_precision
from titan_strategy.preflight import Request, preflight
from titan_strategy.tensor_parallel import whole
from titan_strategy.token_loss import TokenLoss


class TitanStrategy(MeshStrategy):
    """Train a LightningModule with FSDP2, HSDP, tensor, pipeline and expert parallelism, from the meta device.

    The model is built in `configure_model()`. A `TitanModule` gets exactly normalised losses and gradients; any other
    LightningModule with automatic optimisation works with Lightning's averaging over ranks.

    Args:
        data_parallel_shard_size: Ranks that share one copy of parameters, gradients and optimizer state; `"auto"`
            takes all that are left.
        data_parallel_replicate_size: Number of such copies; more than 1 is HSDP.
        tensor_parallel_size: Ranks that share each matrix product; needs a plan.
        pipeline_parallel_size: Ranks among which the layers are divided; needs a `TitanModule` with a plan.
        expert_parallel_size: Ranks among which the experts of a block are divided, taken from those of
            data_parallel_shard_size x tensor_parallel_size; needs a plan.
        sequence_parallel: With tensor parallelism, split activations between the blocks over the sequence.
        loss_parallel: With tensor parallelism, leave the logits of a `TitanModule` split over the vocabulary.
        pipeline: How the layers are divided into stages, and in which order these run.
        reshard_after_forward: When gathered parameters are freed: `"always"` after each unit's forward, `"never"`
            before the backward, `"default"` after each forward except where the backward follows at once.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory (GPU runs only).
        plan: How the model can be split, relative to the LightningModule; by default what the model itself says.
        save_distributed_checkpoint: Save a directory of shards; otherwise one file, gathered on rank 0.
        seed: Seed of the initial weights; by default that of `seed_everything`, else drawn at random.
        process_group_backend: By default gloo for CPU tensors and NCCL for GPU tensors.
        timeout: How long a collective may wait.
        start_method: How processes are started when the script is run plainly: `"popen"` runs the script again for each
            rank; `"spawn"` and `"fork"` start from the current process; `"auto"` is popen, or fork in a notebook.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Where rank and world size come from; detected by the Trainer.
        checkpoint_io: Writes and reads single-file checkpoints.
        precision_plugin: A `TitanPrecision`; by default the one for `Trainer(precision=...)`.

    Raises:
        ValueError: If the sizes cannot work, as early as they are known: here, or when the Trainer is built.
    """

    strategy_name = "titan"
    is_distributed = True  # read by the Trainer: inject distributed samplers, honour sync_dist

    def __init__(
        self,
        data_parallel_shard_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        sequence_parallel: bool = True,
        loss_parallel: bool = True,
        pipeline: PipelineConfig = PipelineConfig(),
        reshard_after_forward: ReshardPolicy = "default",
        cpu_offload: bool = False,
        plan: ParallelPlan | None = None,
        save_distributed_checkpoint: bool = True,
        seed: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: launch.StartMethod = "auto",
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if reshard_after_forward not in ("default", "always", "never"):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r}: valid values are 'default', 'always' and 'never'."
            )
        self._sizes = ParallelSizes(
            shard=data_parallel_shard_size,
            replicate=data_parallel_replicate_size,
            tensor=tensor_parallel_size,
            pipeline=pipeline_parallel_size,
            expert=expert_parallel_size,
        )
        self._sequence_parallel = sequence_parallel
        self._loss_parallel = loss_parallel
        self._pipeline = pipeline
        self._reshard_after_forward: ReshardPolicy = reshard_after_forward
        self._cpu_offload = cpu_offload
        self._plan = plan
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._seed = seed
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = launch.check_start_method(start_method)

        self._parallelized: pl.LightningModule | None = None
        self._split: Split | None = None
        self._token_loss: TokenLoss | None = None
        self._accumulating = False
        self._pending_weights: tuple[Mapping[str, Any], bool] | None = None
        self._pending_rng: dict[str, Any] | None = None

    # -- While the Trainer is built ------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else TitanPrecision("32-true")

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else titan_precision(precision_plugin)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment our ranks; the first moment at which the world size is known."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # Lightning sets it undeclared, too
        self._sizes.resolve(self.num_nodes * self.num_processes)
        if self._cpu_offload and self.root_device.type == "cpu":
            raise ValueError("cpu_offload=True: on accelerator='cpu' the parameters are in host memory already.")

    @property
    def request(self) -> Request:
        """What is to be done with the model, as far as it is known before processes start."""
        sizes = self._sizes.resolve(self.num_nodes * self.num_processes)
        return Request(sizes, self._pipeline, self._sequence_parallel, self._plan, self._cpu_offload)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = launch.make_launcher(self, self._start_method)

    # -- Before the model exists ---------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        super().setup_environment()
        reset_seed()
        self._pending_weights = self._pending_rng = None  # left by a stage that did not use them
        self.set_world_ranks()
        distributed.init_process_group(
            self.cluster_environment, self.root_device, self._process_group_backend, self._timeout
        )
        if self.mesh is None:
            self.mesh = ParallelMesh(self._sizes.resolve(self.world_size), self.root_device.type)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        preflight(trainer, self.lightning_module, getattr(trainer, "datamodule", None))
        # LightningModule.device_mesh reads this attribute, and has no setter.
        self.lightning_module._device_mesh = self.mesh.world

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around `configure_model()`: modules are built on the meta device, without memory."""
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    # -- Loading a checkpoint: read before the model is set up, applied in `setup` -------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        checkpoint, self._pending_rng = ckpt.read(path, weights_only, self.global_rank, self.world_size)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._pending_weights = (checkpoint, strict)  # the parameters do not exist yet

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for index, optimizer in enumerate(self.optimizers):
            ckpt.load_optimizer(checkpoint, self.lightning_module, optimizer, index)

    # -- Setting up the model ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None and self.mesh is not None
        self.accelerator.setup(trainer)
        if self._parallelized is not self.lightning_module:
            self._take(self.lightning_module)
        if self._pending_weights is not None:
            checkpoint, strict = self._pending_weights
            self._pending_weights = None
            ckpt.load_weights(checkpoint["state_dict"], self.lightning_module, strict)
        self._reset_optimizers_and_schedulers()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # A first FSDP2 forward under inference mode makes later training fail; no_grad has no such trap.
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, val_loop):
            loop.inference_mode = False

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if isinstance(module, TitanModule) and any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers):
            raise ValueError(
                f"{type(module).__name__}.configure_optimizers() returns LBFGS, which runs the training step several "
                "times per optimizer step. A TitanModule's exact loss and its pipelines run it once: use another "
                "optimizer."
            )

    def _take(self, module: pl.LightningModule) -> None:
        """Split `module`, or take it over as the strategy of an earlier Trainer has split it."""
        assert self.mesh is not None
        precision = self.precision_plugin
        assert isinstance(precision, TitanPrecision)
        layout = Layout(
            mesh=self.mesh,
            sequence_parallel=self._sequence_parallel,
            loss_parallel=self._splits_logits(module),
            pipeline=self._pipeline,
            reshard_after_forward=self._reshard_after_forward,
            cpu_offload=self._cpu_offload,
        )
        self._split = earlier_split(module, layout, precision) or parallelize(
            module, self._plan, layout, precision, self.root_device, distributed.agree_on_seed(self._seed)
        )
        precision.report(Path(module.trainer.log_dir or module.trainer.default_root_dir))
        self._token_loss = TokenLoss(self.mesh.data_group) if isinstance(module, TitanModule) else None
        precision.use_gradient_clipper(self._clip_gradients)
        self._parallelized = module

    def _roots(self) -> list[nn.Module]:
        return [] if self._split is None else self._split.roots

    def _splits_logits(self, module: pl.LightningModule | None) -> bool:
        """A user's own step may do anything with the logits; a TitanModule's is known to work on split ones."""
        return self._loss_parallel and self._sizes.tensor > 1 and isinstance(module, TitanModule)

    @contextmanager
    def _loss_context(self) -> Generator[None, None, None]:
        with loss_parallel() if self._splits_logits(self.lightning_module) else nullcontext():
            yield

    @override
    def model_to_device(self) -> None:
        """Nothing: `setup` makes the parameters where they belong."""

    # -- Training ------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        if self._token_loss is not None:
            self._token_loss.reset()
        self._parameters_changed()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._pending_rng is not None:
            # Only now: starting the loaders has drawn from the global generators since the checkpoint was read.
            distributed.set_rng_state(self._pending_rng)
            self._pending_rng = None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        module, token_loss = self.lightning_module, self._token_loss
        if token_loss is not None and token_loss.window_is_new:
            assert module is not None
            # Lightning does so after the forward pass, in which they would lie beside all activations.
            gradients.drop(module.parameters())
        with self._loss_context():
            output = super().training_step(*args, **kwargs)
        if token_loss is None:
            return tree_map(whole, output)
        assert module is not None
        loss = token_loss.start(output, last_of_window=not self._accumulating)
        assert isinstance(output, Mapping), "start() has checked it"
        module.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        return {**output, "loss": loss}

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While gradients accumulate they stay local: one reduction per optimizer step."""
        self._accumulating = True
        set_gradient_sync(self._roots(), False)
        try:
            yield
        finally:
            set_gradient_sync(self._roots(), True)
            self._accumulating = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if self._token_loss is None or not isinstance(module, TitanModule):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self._split is not None
        # Lightning has divided closure_loss by accumulate_grad_batches; the exact loss takes its place.
        loss = self.precision_plugin.pre_backward(self._token_loss.take(), module)
        if module.pipeline is not None:
            module.pipeline.restore_gradients()
        else:
            with self._loss_context(), self._split.during_backward():
                self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        factor = self._token_loss.gradient_factor(last_of_window=not self._accumulating)
        if factor is not None:
            gradients.scale_gradients(module.parameters(), factor)
        return self.precision_plugin.post_backward(loss, module)

    def _clip_gradients(
        self, optimizer: Optimizer, limit: float, algorithm: GradClipAlgorithmType, norm_type: float
    ) -> None:
        """Measure and log the norm of the gradients over the whole mesh, then clip them if `limit` is above 0."""
        assert self.lightning_module is not None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert self.mesh is not None
        norm = gradients.global_norm(parameters, norm_type, self.root_device, self.mesh.stages_group)
        self.lightning_module.log("train/grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)
        if limit > 0 and algorithm == GradClipAlgorithmType.NORM:
            gradients.clip_by_norm(parameters, norm, limit)
        elif limit > 0:
            gradients.clip_by_value(parameters, limit)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._parameters_changed()
        return output

    def _parameters_changed(self) -> None:
        assert self._split is not None
        self._split.parameters_changed()

    # -- Evaluation ----------------------------------------------------------------------------------------------------

    # Whoever loads weights or takes averaged ones for an evaluation does so in hooks that come before these.

    on_validation_start = on_test_start = on_predict_start = _parameters_changed

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._loss_context():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._loss_context():
            return super().test_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self._free_gathered()
        self._parameters_changed()  # averaged weights have been put away again

    def _free_gathered(self) -> None:
        """Whoever looks at the parameters next finds the shards, in their storage dtype."""
        reshard(self._roots())

    on_test_end = on_predict_end = _free_gathered

    # -- Saving --------------------------------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        return ckpt.optimizer_state(self.lightning_module, getattr(optimizer, "_optimizer", optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options: TitanStrategy writes to a file system and takes no storage options.")
        path = ckpt.local_path(self.broadcast(str(filepath)))
        if self._save_distributed_checkpoint:
            ckpt.save_sharded(path, checkpoint, distributed.rng_state(self.root_device))
        else:
            assert self.mesh is not None
            ckpt.save_file(path, checkpoint, self.checkpoint_io, self.mesh)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            ckpt.remove(Path(filepath))

    # -- The end -------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Free what the run held. The model stays sharded on its device, ready for the next stage of this Trainer."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
