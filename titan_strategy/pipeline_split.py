"""Which modules each pipeline stage holds, and which stages each rank."""

import copy
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from titan_strategy.plan import ParallelPlan, match_modules

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
_ONE_STAGE_PER_RANK = ("GPipe", "1F1B")
_V_SHAPED = "ZBVZeroBubble"  # rank r holds stages r and 2 * ranks - 1 - r


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is divided into stages and in which order their microbatches run.

    Args:
        schedule: Order of forward and backward passes; the names are torch's (`torch.distributed.pipelining`).
        schedule_csv: A file with the order of operations of each rank, one line per rank, in the format that torch's
            schedules write (`0F1` is the forward pass of stage 0 for microbatch 1). It takes the place of `schedule`,
            and says which stages each rank holds and how many microbatches there are.
        microbatches: Number of microbatches that a rank's batch is cut into; by default the number of stages.
        stages_per_rank: By default 1 for GPipe and 1F1B, and 2 for the others.
        split: For each stage the FQNs of its modules, relative to the module of the plan; by default the blocks are
            divided evenly, with the weights below.
        before_weight: How many blocks the modules before the first block count for.
        after_weight: How many blocks the modules after the last block count for.
    """

    schedule: ScheduleName = "1F1B"
    schedule_csv: Path | None = None
    microbatches: int | None = None
    stages_per_rank: int | None = None
    split: list[list[str]] | None = None
    before_weight: int = 1
    after_weight: int = 1

    @property
    def one_stage_per_rank(self) -> bool:
        """Whether the schedule runs a single stage on each rank."""
        return self.schedule in _ONE_STAGE_PER_RANK

    def stages_on_each_of(self, ranks: int) -> int:
        """Stages per rank.

        Raises:
            ValueError: If `stages_per_rank` does not go with the schedule, or `split` with the number of ranks.
        """
        if self.schedule_csv is not None:
            return self._stages_in_csv(ranks)
        if self.split is not None:
            if len(self.split) % ranks:
                raise ValueError(
                    f"pipeline.split has {len(self.split)} stages, which pipeline_parallel_size={ranks} does not "
                    "divide."
                )
            count = len(self.split) // ranks
        else:
            count = self.stages_per_rank or (1 if self.one_stage_per_rank else 2)
        if self.stages_per_rank is not None and self.stages_per_rank != count:
            raise ValueError(
                f"pipeline.stages_per_rank={self.stages_per_rank}, but pipeline.split has {len(self.split or ())} "
                f"stages for pipeline_parallel_size={ranks}: {count} on each rank."
            )
        if self.one_stage_per_rank and count != 1:
            raise ValueError(
                f"pipeline.schedule={self.schedule!r} runs one stage on each rank, but there are {count}. Schedules "
                "for several: Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble."
            )
        if self.schedule == _V_SHAPED and count != 2:
            raise ValueError(f"pipeline.schedule='ZBVZeroBubble' runs two stages on each rank, but there are {count}.")
        if not self.one_stage_per_rank and count < 2:
            raise ValueError(
                f"pipeline.schedule={self.schedule!r} needs two or more stages on each rank, but there is {count}. "
                "Schedules for one: GPipe, 1F1B."
            )
        return count

    def stages_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The stages that one rank holds, in ascending order."""
        count = self.stages_on_each_of(ranks)
        if self.schedule_csv is not None:
            return tuple(sorted({stage for stage, _ in self._csv_lines()[rank]}))
        if self.schedule == _V_SHAPED:
            return rank, 2 * ranks - 1 - rank
        return tuple(rank + loop * ranks for loop in range(count))

    def _stages_in_csv(self, ranks: int) -> int:
        lines = self._csv_lines()
        held = [{stage for stage, _ in line} for line in lines]
        stages = sorted(stage for line in held for stage in line)
        if len(lines) != ranks:
            raise ValueError(
                f"pipeline.schedule_csv={self.schedule_csv} has {len(lines)} lines, one for each rank, but "
                f"pipeline_parallel_size={ranks}."
            )
        if stages != list(range(len(stages))) or len({len(line) for line in held}) > 1:
            raise ValueError(
                f"pipeline.schedule_csv={self.schedule_csv} gives the ranks the stages "
                f"{' / '.join(str(sorted(line)) for line in held)}. They must be numbered from 0, each must lie on one "
                "rank, and each rank must hold as many."
            )
        return len(held[0])

    def _csv_lines(self) -> list[list[tuple[int, int]]]:
        """Stage and microbatch of each operation, for each rank."""
        assert self.schedule_csv is not None
        try:
            text = self.schedule_csv.read_text()
        except OSError as error:
            raise ValueError(f"pipeline.schedule_csv={self.schedule_csv} cannot be read: {error.strerror}.") from error
        lines = [re.findall(r"(\d+)[FBIW](\d+)", line) for line in text.splitlines() if line.strip()]
        if not lines or not all(lines):
            raise ValueError(f"pipeline.schedule_csv={self.schedule_csv} has a line without operations such as 0F1.")
        return [[(int(stage), int(microbatch)) for stage, microbatch in line] for line in lines]

    def fewest_microbatches(self, stages: int) -> int:
        """How many microbatches the schedule needs at least."""
        return stages if self.schedule_csv is None and self.schedule == "1F1B" else 1

    def microbatches_for(self, stages: int) -> int:
        """Number of microbatches.

        Raises:
            ValueError: If there are too few for the schedule.
        """
        if self.schedule_csv is not None:
            return 1 + max(microbatch for line in self._csv_lines() for _, microbatch in line)
        count = stages if self.microbatches is None else self.microbatches
        if count < 1:
            raise ValueError(f"pipeline.microbatches={count}: expected at least 1.")
        if count < self.fewest_microbatches(stages):
            raise ValueError(
                f"pipeline.microbatches={count} is fewer than the {stages} stages, which pipeline.schedule='1F1B' "
                f"cannot run. Use {stages} or more, or GPipe."
            )
        return count


def assign_modules(root: nn.Module, plan: ParallelPlan, stages: int, config: PipelineConfig) -> list[list[str]]:
    """For each stage, the FQNs of the plan's modules that it holds.

    Raises:
        ValueError: If there are more stages than blocks can fill, or an explicit split is not a division of the model.
    """
    blocks = list(match_modules(root, plan.blocks, "plan.blocks"))
    before = [name for pattern in plan.before for name in match_modules(root, pattern, "plan.before")]
    after = [name for pattern in plan.after for name in match_modules(root, pattern, "plan.after")]
    everything = [*before, *blocks, *after]
    if config.split is not None:
        _check_split(config.split, everything)
        return config.split
    counts = divide_blocks(len(blocks), stages, config.before_weight, config.after_weight)
    remaining = iter(blocks)
    parts = [[next(remaining) for _ in range(count)] for count in counts]
    parts[0] = [*before, *parts[0]]
    parts[-1] = [*parts[-1], *after]
    return parts


def divide_blocks(blocks: int, stages: int, before_weight: int, after_weight: int) -> list[int]:
    """Number of blocks in each stage.

    The modules before and after the blocks count as `before_weight` and `after_weight` blocks of the first and the last
    stage. What does not divide evenly goes to the earliest stages.

    Raises:
        ValueError: If some stage would be empty.
    """
    total = blocks + before_weight + after_weight
    quotas = [total // stages + (1 if stage < total % stages else 0) for stage in range(stages)]
    quotas[0] -= before_weight
    quotas[-1] -= after_weight
    if stages > blocks + (before_weight > 0) + (after_weight > 0) or min(quotas) < 0 or 0 in quotas[1:-1]:
        raise ValueError(
            f"{stages} pipeline stages (pipeline_parallel_size x stages per rank) are too many for {blocks} blocks "
            f"with pipeline.before_weight={before_weight} and pipeline.after_weight={after_weight}. Use at most "
            f"{blocks} stages, lower the weights, or give pipeline.split."
        )
    return quotas


def stage_view(root: nn.Module, divided: Sequence[str], kept: Sequence[str]) -> nn.Module:
    """`root` as one stage sees it: of the modules named in `divided` only those in `kept`.

    Nothing is copied but the modules on the way to a divided one, so several views share what they have in common, and
    each module keeps its global name. A missing block is gone from its container; any other missing module is None.
    """
    return _view(root, "", frozenset(divided), frozenset(kept))


def _view(module: nn.Module, prefix: str, divided: frozenset[str], kept: frozenset[str]) -> nn.Module:
    if not any(name.startswith(prefix) for name in divided):
        return module
    view = copy.copy(module)
    # copy.copy shares the dictionaries; hooks that are put on one view must not run on the others.
    view.__dict__ |= {key: OrderedDict(value) for key, value in vars(module).items() if isinstance(value, OrderedDict)}
    view._modules = {}
    in_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for key, child in module._modules.items():
        name = f"{prefix}{key}"
        if name not in divided:
            view._modules[key] = None if child is None else _view(child, f"{name}.", divided, kept)
        elif name in kept:
            view._modules[key] = child
        elif not in_container:
            view._modules[key] = None
    return view


def _check_split(split: list[list[str]], everything: list[str]) -> None:
    given = [name for stage in split for name in stage]
    if missing := [name for name in everything if name not in given]:
        raise ValueError(f"pipeline.split leaves out {', '.join(missing[:4])}.")
    if unknown := [name for name in given if name not in everything]:
        raise ValueError(
            f"pipeline.split names {', '.join(unknown[:4])}, which the plan does not: a stage may hold its blocks and "
            "the modules before and after them."
        )
    if given != everything:
        raise ValueError("pipeline.split must name every module once, in the order in which they run.")
    if any(not stage for stage in split):
        raise ValueError("pipeline.split has a stage without modules.")
