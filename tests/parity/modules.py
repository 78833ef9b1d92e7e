"""A module with four mistakes, each of which only shows in one layout."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from models import CausalLM
from models.config import TransformerOverrides


class UnreducedNorm(nn.RMSNorm):
    """Calls the gradient of its weight whole, though each rank has seen its own positions only."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return super().forward(x)
        assert isinstance(self.weight, DTensor)
        weight = self.weight.to_local(grad_placements=[Replicate()])
        output = F.rms_norm(x.to_local(), self.normalized_shape, weight, self.eps)
        return DTensor.from_local(output, x.device_mesh, x.placements, run_check=False)


class Faulty(CausalLM):
    """Drops a reduction under tensor parallelism, scales a pipeline stage, changes a replica, fails on one shard."""

    def __init__(self, overrides: TransformerOverrides | None = None) -> None:
        super().__init__("debug", overrides=overrides)

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            self.model.get_submodule("layers.1.ffn_norm").__class__ = UnreducedNorm

    def on_train_start(self) -> None:
        if self.device_mesh is not None and self.device_mesh["data_parallel_replicate"].get_local_rank() == 1:
            weight = self.get_parameter("model.layers.0.attention.wk.weight")
            assert isinstance(weight, DTensor)
            weight.to_local().detach().mul_(1.001)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mesh = self.device_mesh
        if batch_idx == 1 and mesh is not None and mesh["data_parallel_shard"].get_local_rank() == 1:
            raise RuntimeError("out of luck")  # while the others wait for this rank
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.pipeline is not None and self.pipeline.is_last:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.001)
