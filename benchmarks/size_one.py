"""What the strategy costs on one GPU: `Trainer(strategy=TitanStrategy())` against a bare FSDP2 loop, same model.

Run `python benchmarks/size_one.py` on a machine with a GPU. The two alternate in processes of their own; the table
gives medians over all steps after warm-up, and the JSON file everything measured.
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, IterableDataset

from models import CausalLM, Transformer, TransformerConfig
from titan_strategy import TitanStrategy

STEPS, WARM_UP = 24, 6
SEQUENCE = 8192


class Rows(IterableDataset):
    """Random rows; the same ones for both sides."""

    def __init__(self, batch_size: int, vocabulary: int) -> None:
        self._shape, self._vocabulary = (batch_size, SEQUENCE + 1), vocabulary

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            ids = torch.randint(0, self._vocabulary, self._shape, generator=generator)
            yield {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class Clock(pl.Callback):
    """Marks the end of each step on the GPU's own time line, without waiting for it."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def on_train_batch_end(self, *args: object) -> None:
        self.mark()

    def step_times(self) -> list[float]:
        """Seconds per step after warm-up."""
        torch.cuda.synchronize()
        marks = self._marks[WARM_UP:]
        return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def run_trainer(config: TransformerConfig, loader: DataLoader) -> list[float]:
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=TitanStrategy(seed=0),
        precision="bf16-mixed",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(CausalLM(config=config), loader)
    return clock.step_times()


def run_bare(config: TransformerConfig, loader: DataLoader) -> list[float]:
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29777", rank=0, world_size=1)
    torch.cuda.set_device(0)
    with torch.device("cuda"):
        model = Transformer(config)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(model.tok_embeddings, mp_policy=policy)
    for block in model.layers.values():
        fully_shard(block, mp_policy=policy)
    fully_shard([model.norm, model.output], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    clock = Clock()
    for batch in loader:
        tokens, labels = (batch[key].to("cuda", non_blocking=True) for key in ("tokens", "labels"))
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
    return clock.step_times()


def measure(side: str, preset: str, batch_size: int) -> None:
    """Run one side in this process and print what it took as JSON."""
    config = TransformerConfig.preset(preset)
    loader = DataLoader(Rows(batch_size, config.vocab_size), batch_size=None, num_workers=1, pin_memory=True)
    times = (run_trainer if side == "trainer" else run_bare)(config, loader)
    print(json.dumps({"side": side, "seconds": times, "gib": torch.cuda.max_memory_reserved() / 2**30}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["trainer", "bare"], help="run one side only, and print its figures")
    parser.add_argument("--preset", default="llama3_2_1b")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/size_one.json"))
    options = parser.parse_args()
    if options.side:
        measure(options.side, options.preset, options.batch_size)
        return
    runs = []
    for _ in range(options.rounds):
        for side in ("bare", "trainer"):
            command = [sys.executable, __file__, "--side", side, "--preset", options.preset]
            command += ["--batch-size", str(options.batch_size)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    tokens = options.batch_size * SEQUENCE
    table = {}
    for side in ("bare", "trainer"):
        mine = [run for run in runs if run["side"] == side]
        median = statistics.median(seconds for run in mine for seconds in run["seconds"])
        table[side] = {"tokens_per_second": tokens / median, "gib": max(run["gib"] for run in mine)}
    ratio = table["trainer"]["tokens_per_second"] / table["bare"]["tokens_per_second"]
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
    settings = {"preset": options.preset, "batch_size": options.batch_size, "sequence": SEQUENCE, "compiled": False}
    result = {"environment": environment, "settings": settings, "table": table, "ratio": ratio, "runs": runs}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1))
    for side, row in table.items():
        print(f"{side:8} {row['tokens_per_second']:10.0f} tokens/s {row['gib']:7.1f} GiB")
    print(f"trainer / bare: {ratio:.4f}")


if __name__ == "__main__":
    main()
