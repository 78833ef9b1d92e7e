"""The run in one process that every layout is compared with: a plain PyTorch loop.

It shares with the strategy the initial weights, the data, and the user's own loss and optimizer; nothing of how
gradients are computed, reduced, normalised or clipped.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

# Lightning has no public way to read what configure_optimizers returned in any of the forms it may have.
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from titan_strategy.materialize import materialize
from titan_strategy.module import TitanModule
from titan_strategy.parity.layouts import Layout, ParityError
from titan_strategy.parity.recipe import Recipe

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """The files that `record_reference` wrote, one to be read at a time.

    Args:
        folder: Where they are.
    """

    folder: Path

    def initial(self) -> Tensors:
        """Weights before the first step."""
        return self._load("initial")

    def final(self) -> Tensors:
        """Weights after the last step."""
        return self._load("final")

    def gradients(self, step: int) -> Tensors:
        """Gradients of one step, before clipping."""
        return self._load(f"gradients-{step}")

    def scalars(self, step: int) -> Tensors:
        """`loss` and `norm` of one step."""
        return self._load(f"scalars-{step}")

    def save(self, name: str, tensors: Tensors) -> None:
        """Write one file; copies to the host."""
        torch.save({key: tensor.detach().cpu() for key, tensor in tensors.items()}, self.folder / f"{name}.pt")

    def _load(self, name: str) -> Tensors:
        return torch.load(self.folder / f"{name}.pt", mmap=True, weights_only=True)


def record_reference(recipe: Recipe, steps: int, device: torch.device, reference: Reference) -> None:
    """Train for `steps` optimizer steps in this process and keep what a layout is compared by.

    Raises:
        ParityError: If the data or the optimizer do not fit such a comparison.
    """
    module, data = recipe.build(data_ranks=1)
    module.trainer = recipe.trainer(Layout("one process"), "cpu")  # knows the length of the run
    with torch.device("meta"):
        module.configure_model()
    materialize(module, device, device, recipe.seed)
    module.train()
    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    if len(optimizers) != 1:
        raise ParityError(
            f"{type(module).__name__} has {len(optimizers)} optimizers: titan parity follows exactly one."
        )
    optimizer = optimizers[0]
    reference.save("initial", _weights(module))
    windows = _windows(data, steps, recipe.accumulate)
    for step, batches in enumerate(windows):
        loss = _loss(module, [move_data_to_device(batch, device) for batch in batches])
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        reference.save(f"gradients-{step}", gradients)
        # In float32, torch's norm of a large tensor on the CPU is off by up to 1e-4.
        norm = torch.nn.utils.get_total_norm([gradient.double() for gradient in gradients.values()])
        reference.save(f"scalars-{step}", {"loss": loss, "norm": norm})
        module.on_before_optimizer_step(optimizer)
        _clip(module, recipe, norm)
        optimizer.step()
        for config in schedulers:
            scheduler = config.scheduler
            if isinstance(scheduler, LRScheduler) and config.interval == "step" and (step + 1) % config.frequency == 0:
                scheduler.step()
    reference.save("final", _weights(module))


def _loss(module: TitanModule, batches: list[Any]) -> Tensor:
    """Loss per token over all batches of an optimizer step."""
    parts = [module.token_loss(module(*module.model_inputs(batch)), batch) for batch in batches]
    loss_sums, counts = zip(*parts, strict=True)
    return torch.stack(loss_sums).sum() / torch.stack(counts).sum()


def _clip(module: TitanModule, recipe: Recipe, norm: Tensor) -> None:
    if recipe.clip and recipe.clip_algorithm == "norm":
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), recipe.clip, norm)
    elif recipe.clip:
        torch.nn.utils.clip_grad_value_(module.parameters(), recipe.clip)


def _windows(data: pl.LightningDataModule, steps: int, accumulate: int) -> Iterator[list[Any]]:
    """The batches of each optimizer step."""
    data.prepare_data()
    data.setup("fit")
    batches = iter(_in_global_order(data.train_dataloader()))
    for step in range(steps):
        window = list(islice(batches, accumulate))
        if len(window) < accumulate:
            raise ParityError(
                f"--steps={steps} x trainer.accumulate_grad_batches={accumulate} takes {steps * accumulate} batches, "
                f"but the data has {step * accumulate + len(window)}. Use fewer --steps or a smaller data.batch_size."
            )
        yield window


def _in_global_order(loader: Any) -> Any:
    """The loader with the order of rows that Lightning gives to an ordinary one on several ranks."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        return loader
    shuffle = isinstance(loader.sampler, RandomSampler)
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    order: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=order,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
    )


def _weights(module: TitanModule) -> Tensors:
    return dict(module.named_parameters())
