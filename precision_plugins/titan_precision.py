"""Dtypes of storage, compute and gradient reduction, as FSDP2 policies instead of autocast."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from precision_plugins.activation_checkpointing import ActivationCheckpointing
from precision_plugins.blocks import change_blocks
from precision_plugins.compile import CompileConfig

PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed"]
GradientClipper = Callable[[Optimizer, float, GradClipAlgorithmType, float], None]


class TitanPrecision(Precision):
    """The dtype policy of a sharded model.

    ============  ===========  =======  ====================
    precision     parameters   compute  gradient reduction
    ============  ===========  =======  ====================
    32-true       float32      float32  float32
    bf16-mixed    float32      bfloat16 float32
    bf16-true     bfloat16     bfloat16 float32
    ============  ===========  =======  ====================

    Buffers keep the dtype the model gave them (rotary tables stay float32), and so does what a module computes in a
    dtype of its own choice.

    Args:
        precision: One of the names in the table.
        activation_checkpointing: What each block keeps for its backward pass.
        compile: How the blocks and the loss are compiled; None for not at all.
        gradient_norm_type: Order of the gradient norm that is logged and clipped by: 2, or infinity (`.inf` in YAML).

    Raises:
        ValueError: If a value is none of those, or activation checkpointing needs `compile`.
    """

    def __init__(
        self,
        precision: PrecisionName = "bf16-mixed",
        activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing(),
        compile: CompileConfig | None = None,
        gradient_norm_type: float = 2.0,
    ) -> None:
        if precision not in ("32-true", "bf16-true", "bf16-mixed"):
            raise ValueError(f"precision={precision!r}: valid values are '32-true', 'bf16-true' and 'bf16-mixed'.")
        if gradient_norm_type not in (2.0, float("inf")):
            raise ValueError(f"gradient_norm_type={gradient_norm_type!r}: valid values are 2.0 and infinity.")
        if activation_checkpointing.mode == "memory_budget":
            if compile is None:
                raise ValueError(
                    "activation_checkpointing.mode='memory_budget' is a choice of torch's compiler: give compile too "
                    "(compile: {} in YAML has the defaults), or use mode 'selective', which needs none."
                )
            compile.check_memory_budget()
        self.precision: PrecisionName = precision
        self.activation_checkpointing = activation_checkpointing
        self.compile = compile
        self.gradient_norm_type = float(gradient_norm_type)
        self._clip: GradientClipper | None = None

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the parameters and of the optimizer's state."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the parameters while a module runs."""
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    def fsdp_policy(self, cast_inputs: bool) -> MixedPrecisionPolicy:
        """The policy of one FSDP2 unit.

        Args:
            cast_inputs: Whether floating-point inputs of the unit are cast to the compute dtype. Off inside a model
                that passes float32 tables between its modules.
        """
        if self.precision == "32-true":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
        )

    @property
    def description(self) -> str:
        """What a model was converted for; a module that was converted for something else cannot be used again."""
        return self.precision

    def use_device(self, device: torch.device) -> None:
        """Take the device of the run, before the model is converted, and raise ValueError if it will not do."""

    def check_cpu_offload(self) -> None:
        """Raise ValueError if parameters cannot lie in host memory."""

    def use_local_shapes(self, shapes: Mapping[nn.Module, tuple[int, ...]], shards: int) -> None:
        """Take how the weights will be split.

        Args:
            shapes: (out, in) of those that tensor parallelism splits, as a rank multiplies them.
            shards: The number of ranks over which FSDP2 then divides the rows of each.
        """

    def report(self, folder: Path) -> None:
        """Tell the user what was converted, on the terminal and in `folder`."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the parameters (not the buffers) the storage dtype, in place: tied parameters stay tied."""
        if self.storage_dtype != torch.float32:
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.storage_dtype)
        return module

    def check_blocks(self, blocks: Sequence[nn.Module]) -> None:
        """Raise ValueError if `blocks`, those of the whole model, are none although they are to be changed."""
        mode = self.activation_checkpointing.mode
        if not blocks and (mode != "none" or self.compile is not None):
            asked = f"activation_checkpointing.mode={mode!r}" if mode != "none" else "compile"
            raise ValueError(
                f"{asked} is for the repeated blocks of a model, and none were found in this one. Name them in a "
                "ParallelPlan (blocks), or leave the setting out."
            )

    def apply_to_blocks(
        self, blocks: Sequence[nn.Module], experts: Sequence[nn.Module] = (), experts_wait: bool = False
    ) -> None:
        """Change how the repeated blocks run; called after every swap and before FSDP2.

        Args:
            blocks: Those of this rank.
            experts: Modules inside which FSDP2 gathers by themselves.
            experts_wait: Whether they make the host wait for the device, as the exchange of tokens between ranks does.
        """
        # torch knows no shapes for grouped products in float32, and a graph cannot wait.
        eager = experts if experts_wait or self.compute_dtype == torch.float32 else ()
        change_blocks(blocks, self.activation_checkpointing, self.compile, experts, eager)

    def apply_to_loss(self, module: nn.Module) -> None:
        """Change how `module.token_loss` runs."""
        if self.compile is not None and self.compile.loss:
            loss: Callable[..., Any] = module.token_loss  # type: ignore[assignment]  # it is a method
            setattr(module, "token_loss", self.compile.compiled_loss(loss))  # noqa: B010

    def prepare_gathers(self, module: nn.Module, shards: dist.ProcessGroup) -> Callable[[], None]:
        """Change how the parameters of `module`, which FSDP2 has split and which have values, are gathered.

        Args:
            module: The converted one, or what this rank has of it.
            shards: The ranks that share one copy of the parameters.

        Returns:
            What all ranks call when parameters have changed, before the next forward.
        """
        return lambda: None

    def use_gradient_clipper(self, clip: GradientClipper) -> None:
        """Take the function that clips over the whole mesh; the strategy hands it in, for it alone knows the mesh."""
        self._clip = clip

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients of `optimizer` over all ranks; a `clip_val` of 0 only measures the norm."""
        if self._clip is None:
            raise RuntimeError(
                "TitanPrecision clips through TitanStrategy; with another strategy use Trainer(precision=...) instead."
            )
        self._clip(optimizer, clip_val, GradClipAlgorithmType(gradient_clip_algorithm), self.gradient_norm_type)

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Nothing around the step: the dtypes are the FSDP2 policy's business, not autocast's."""
        yield

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}
