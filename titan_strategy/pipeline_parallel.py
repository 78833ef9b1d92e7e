"""Running the stages of a pipeline: torch's schedules, fed from a batch of any structure."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.utils._pytree import tree_map

from titan_strategy.gradients import drop
from titan_strategy.module import TitanModule
from titan_strategy.pipeline_split import PipelineConfig
from titan_strategy.tensor_parallel import whole


class Pipeline:
    """The stages that this rank holds, and the schedule that runs them with those of the other ranks.

    A schedule runs forward and backward at once, inside `training_step`, where Lightning expects a forward only. The
    gradients are therefore set aside until Lightning calls for the backward pass.

    Args:
        module: The LightningModule, whose `model` holds what this rank's stages hold.
        stages: Number of the stage -> its part of the model.
        config: The user's choices.
        mesh: 1-D, the ranks of the pipeline.
        device: Where this rank computes.
    """

    def __init__(
        self,
        module: TitanModule,
        stages: dict[int, nn.Module],
        config: PipelineConfig,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self._module = module
        self._stages = stages
        self._config = config
        self._group = mesh.get_group()
        self._device = device
        self._num_stages = config.stages_on_each_of(mesh.size()) * mesh.size()
        self._microbatches = config.microbatches_for(self._num_stages)
        self._rank = mesh.get_local_rank()
        self._rank_of = {stage: rank for rank in range(mesh.size()) for stage in config.stages_of(rank, mesh.size())}
        self._last_rank = self._rank_of[self._num_stages - 1]
        self._schedules: dict[tuple[torch.Size, ...], _PipelineSchedule] = {}
        self._parts: Sequence[Any] = ()
        self._counts: dict[int, Tensor] = {}
        self._set_aside: dict[nn.Parameter, Tensor | None] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self._stages

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._num_stages - 1 in self._stages

    def train(self, batch: Any) -> dict[str, Tensor]:
        """Forward and backward of one batch; gradients of the summed loss are set aside for `restore_gradients`.

        Returns:
            `loss_sum`, `token_count` and `loss`, without gradient, the same on all ranks of the pipeline.

        Raises:
            ValueError: If the rows of the batch do not divide into microbatches.
        """
        # torch's stages compare the strides of each microbatch with those of its buffers.
        inputs = tuple(tensor.contiguous() for tensor in self._module.model_inputs(batch))
        rows = inputs[0].shape[0]
        if rows % self._microbatches:
            raise ValueError(
                f"a training batch has {rows} rows on each rank, which do not divide into "
                f"pipeline.microbatches={self._microbatches}."
            )
        self._parts = _split(batch, rows, self._microbatches)
        self._counts = {}
        losses: list[Tensor] = []
        schedule = self._schedule(inputs)
        # The schedule hands each microbatch's target to the loss: here its number, by which `_loss` finds the rest.
        target = torch.arange(self._microbatches) if self.is_last else None
        schedule.step(*(inputs if self.is_first else ()), target=target, losses=losses, return_outputs=False)
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self.is_last:
            counts = list(self._counts.values())
            total = torch.stack([torch.stack(part).detach().double().sum() for part in (losses, counts)])
        total = self.from_last_stage(total)
        self._set_aside = {parameter: parameter.grad for parameter in self._module.parameters()}
        drop(self._module.parameters())
        return {"loss": total[0] / total[1].clamp(min=1), "loss_sum": total[0], "token_count": total[1]}

    def restore_gradients(self) -> None:
        """Put back what `train` has computed."""
        for parameter, gradient in self._set_aside.items():
            parameter.grad = gradient
        self._set_aside = {}

    @torch.no_grad()
    def forward(self, *inputs: Tensor) -> Any:
        """Forward of a batch of any number of rows; the output on the ranks that hold the last stage, else None.

        Each stage takes all microbatches before the next one begins. torch's schedules are of no use here: they want
        microbatches of one size, and those with two neighbouring stages on a rank cannot run without a backward pass.
        """
        parts = min(self._microbatches, inputs[0].shape[0])
        values: list[Any] = list(zip(*(tensor.tensor_split(parts) for tensor in inputs), strict=True))
        for number, stage in self._stages.items():
            source, target = self._rank_of.get(number - 1, self._rank), self._rank_of.get(number + 1, self._rank)
            # Two ranks that send to each other would wait for ever, so what goes on at once goes upwards, and the rest
            # when nothing comes in any more.
            upwards = source <= self._rank < target
            for index in range(parts):
                value = values[index] if source == self._rank else self._receive(source)
                values[index] = stage(*value)
                if number < self._num_stages - 1 and not isinstance(values[index], tuple):
                    values[index] = (values[index],)
                if upwards:
                    self._send(values[index], target)
            if target != self._rank and not upwards:
                for value in values:
                    self._send(value, target)
        return tree_map(lambda *tensors: torch.cat(tensors), *values) if self.is_last else None

    def from_last_stage(self, value: Tensor) -> Tensor:
        """A tensor of the rank that holds the last stage, on all ranks of the pipeline; the others give its shape."""
        dist.broadcast(value, group=self._group, group_src=self._last_rank)
        return value

    def objects_from_last_stage(self, value: Any) -> Any:
        """Any object of the rank that holds the last stage, on all ranks of the pipeline."""
        objects = [value]
        dist.broadcast_object_list(objects, group=self._group, group_src=self._last_rank, device=self._device)
        return objects[0]

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        loss_sum, token_count = self._module.token_loss(output, self._parts[int(number)])
        # By number, because torch calls this once more to learn the shapes of gradients.
        self._counts[int(number)] = token_count
        return whole(loss_sum)

    def _send(self, tensors: tuple[Tensor, ...], rank: int) -> None:
        target = dist.get_global_rank(self._group, rank)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        dist.send_object_list([shapes], target, self._group, self._device)
        for tensor in tensors:
            dist.send(tensor.contiguous(), target, self._group)

    def _receive(self, rank: int) -> tuple[Tensor, ...]:
        source = dist.get_global_rank(self._group, rank)
        objects: list[Any] = [None]
        dist.recv_object_list(objects, source, self._group, self._device)
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in objects[0])
        for tensor in tensors:
            dist.recv(tensor, source, self._group)
        return tensors

    def _schedule(self, inputs: tuple[Tensor, ...]) -> _PipelineSchedule:
        """The schedule for inputs of these shapes; torch's stages allocate their buffers for one shape."""
        key = tuple(tensor.shape for tensor in inputs)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule()
        return self._schedules[key]

    def _make_schedule(self) -> _PipelineSchedule:
        stages = [
            PipelineStage(part, number, self._num_stages, self._device, group=self._group)
            for number, part in self._stages.items()
        ]
        for part in self._stages.values():
            _undo_first_call(part)
        # Gradients are summed over microbatches; torch would by default divide what has accumulated at each step.
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if self._config.schedule_csv is not None:
            # There is no public way to run a schedule from a file.
            runtime = _PipelineScheduleRuntime(stages, self._microbatches, **options)
            runtime._load_csv(str(self._config.schedule_csv))
            return runtime
        schedule = get_schedule_class(self._config.schedule)
        if issubclass(schedule, PipelineScheduleSingle):
            return schedule(stages[0], self._microbatches, **options)
        return schedule(stages, self._microbatches, **options)


def _undo_first_call(stage: nn.Module) -> None:
    """Give the buffers of `stage` back what they hold now when its second forward pass begins.

    Before the first microbatch torch runs each stage once on memory as it finds it, forward and backward, to learn
    shapes. What that does to counters and running statistics must not stay.
    """
    saved: list[list[Tensor]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        if not saved:
            saved.append([buffer.clone() for buffer in module.buffers()])
            return
        for buffer, value in zip(module.buffers(), saved[0], strict=True):
            if not torch.equal(buffer, value):  # others may be in the graph of another stage of this rank already
                buffer.copy_(value)
        handle.remove()

    handle = stage.register_forward_pre_hook(before)


def _split(batch: Any, rows: int, parts: int) -> list[Any]:
    """Cut every tensor of a batch that has `rows` rows into `parts`; the rest goes to each part as it is."""
    size = rows // parts

    def part(value: Any, number: int) -> Any:
        is_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows
        return value[number * size : (number + 1) * size] if is_rows else value

    return [tree_map(lambda value, n=number: part(value, n), batch) for number in range(parts)]
