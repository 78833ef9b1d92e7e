"""Training throughput of two models with experts on one GPU: grouped products against a loop over the experts.

Run `python -m benchmarks.moe` on a machine with a GPU. The two alternate in one process; the table gives medians over
all steps after warm-up, and the JSON file everything measured. Tokens go to the experts in turn, so that the figures do
not depend on what a router has learnt.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.training import SEQUENCE, environment, train
from models import CausalLM, MoEConfig, TransformerConfig
from models.moe import GroupedExperts
from precision_plugins import TitanPrecision

STEPS = 14

# Both have 8 blocks of width 2048 and a vocabulary of 128256, as the flavours that TorchTitan is measured with.
_COMMON: dict[str, Any] = {"vocab_size": 128_256, "dim": 2048, "n_layers": 8, "n_heads": 16, "ffn_dim": 6144}
MODELS = {
    "16 experts, top-1, shared": TransformerConfig(
        **_COMMON,
        n_kv_heads=8,
        max_sequence_length=SEQUENCE,
        moe=MoEConfig(
            num_experts=16,
            top_k=1,
            expert_dim=2816,
            shared_dim=2816,
            score="sigmoid",
            score_before_experts=True,
            balance_rate=1e-3,
            round_robin=True,
        ),
    ),
    "64 experts, top-8": TransformerConfig(
        **_COMMON,
        n_kv_heads=4,
        head_dim=128,
        max_sequence_length=SEQUENCE,
        qk_norm="rms",
        moe=MoEConfig(num_experts=64, top_k=8, expert_dim=768, renormalise=True, balance_rate=1e-3, round_robin=True),
    ),
}


def loop_over_experts(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The baseline: a product for each expert, whose number of rows the host waits for."""
    ends = offsets.tolist()
    groups = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return torch.cat([group @ weight.T for group, weight in zip(groups, weights, strict=True)])


class LoopOverExperts(CausalLM):
    """A `CausalLM` whose experts are multiplied one after the other."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, GroupedExperts):
                module.grouped_mm = loop_over_experts


SIDES = {"grouped": CausalLM, "loop": LoopOverExperts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/moe.json"))
    options = parser.parse_args()
    settings = {"batch_size": options.batch_size, "sequence": SEQUENCE, "precision": "bf16-mixed", "compiled": False}
    result: dict[str, Any] = {"environment": environment(), "settings": settings, "models": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    tokens = options.batch_size * SEQUENCE
    for name, config in MODELS.items():
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, module_class in SIDES.items():
                run = train(config, TitanPrecision("bf16-mixed"), options.batch_size, STEPS, module_class)
                runs[side].append(run.as_dict())
        table = {}
        for side, mine in runs.items():
            median = statistics.median(seconds for run in mine for seconds in run["seconds"])
            table[side] = {"tokens_per_second": tokens / median, "gib": max(run["gib"] for run in mine)}
            print(f"{name:28} {side:8} {tokens / median:10.0f} tokens/s {table[side]['gib']:7.1f} GiB", flush=True)
        ratio = table["grouped"]["tokens_per_second"] / table["loop"]["tokens_per_second"]
        print(f"{name:28} grouped / loop: {ratio:.3f}", flush=True)
        result["models"][name] = {
            "parameters": config.num_parameters,
            "active_parameters": config.num_active_parameters,
            "table": table,
            "ratio": ratio,
            "runs": runs,
        }
        options.output.write_text(json.dumps(result, indent=1))  # what is done is kept if the next model fails


if __name__ == "__main__":
    main()
