"""One side of `benchmarks.peers` in a process of its own: our Trainer, a bare loop, or Lightning's own strategy."""

import argparse
import json
import sys

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from benchmarks.cases import CASES, CLIP, LEARNING_RATE, Case
from benchmarks.training import Clock, Measurement, Rows, measurement, train
from models import Transformer
from titan_strategy.single_rank import cast_parameters


def loader(case: Case, steps: int) -> DataLoader:
    """Random rows, the same for every side."""
    rows = Rows(case.batch_size, case.model.vocab_size, steps)
    return DataLoader(rows, batch_size=None, num_workers=1, pin_memory=True)


def run_trainer(case: Case, steps: int) -> Measurement:
    """`Trainer(strategy=TitanStrategy())`."""
    return train(case.model, case.precision(), case.batch_size, steps)


def run_bare(case: Case, steps: int) -> Measurement:
    """The same model and settings in a loop without Trainer and strategy."""
    device, precision = torch.device("cuda", 0), case.precision()
    clock = Clock()
    with device:
        model = Transformer(case.model)
    precision.use_device(device)
    precision.convert_module(model)
    precision.apply_to_blocks(list(model.layers.values()))
    casts = cast_parameters(model, precision.compute_dtype, [model])
    compiled_loss = torch.compile(cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    for batch in loader(case, steps):
        tokens, labels = (batch[key].to(device, non_blocking=True) for key in ("tokens", "labels"))
        loss = compiled_loss(model(tokens), labels)
        with casts.during_backward():
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
    return measurement(clock, loss.item())


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all positions, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class HandSharded(pl.LightningModule):
    """What a Lightning user writes for `ModelParallelStrategy`: FSDP2 and compilation by hand."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model: Transformer | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            self.model = Transformer(self.case.model)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        mesh = self.device_mesh["data_parallel"]
        for name, block in self.model.layers.items():
            if self.case.checkpointing == "full":
                block = checkpoint_wrapper(block, preserve_rng_state=False)
                self.model.layers[name] = block
            block.compile(fullgraph=True)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    @torch.no_grad()
    def on_fit_start(self) -> None:
        assert self.model is not None
        self.model.rope.reset_parameters()  # Lightning has filled the memory of parameters, but not of this buffer
        for parameter in self.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return cross_entropy(self.model(batch["tokens"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def run_lightning(case: Case, steps: int) -> Measurement:
    """Lightning's `ModelParallelStrategy`."""
    if case.checkpointing == "selective" or case.float8:
        sys.exit("Lightning offers neither selective activation checkpointing nor Float8 for FSDP2")
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        max_steps=steps,
        gradient_clip_val=CLIP,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(HandSharded(case), loader(case, steps))
    return measurement(clock, float("nan"))


SIDES = {"trainer": run_trainer, "bare": run_bare, "lightning": run_lightning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=list(SIDES), required=True)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(SIDES[options.side](CASES[options.case], options.steps).as_dict()))


if __name__ == "__main__":
    main()
