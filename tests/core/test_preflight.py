"""What cannot work is refused before any process starts, with the argument, both numbers and the valid values."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from models import CausalLM, MoEConfig
from precision_plugins import ActivationCheckpointing, Float8Precision, MXFP8Precision, TitanPrecision
from tests.core.modules import Language
from titan_strategy import ParallelPlan, PipelineConfig, TitanStrategy
from titan_strategy.preflight import preflight

EXPERTS = MoEConfig(num_experts=6, top_k=2, expert_dim=16)
PLAN = ParallelPlan(blocks="1.*", before=("0",), after=("2",))


def trainer(ranks: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=ranks, strategy=TitanStrategy(**options), logger=False)


def refused(module: pl.LightningModule, ranks: int, data: dict[str, int] | None = None, **options: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the caller looks at the message
        preflight(trainer(ranks, **options), module, SimpleNamespace(**data or {}))  # type: ignore[arg-type]
    return str(raised.value)


def language(plan: ParallelPlan | None = None, **changes: Any) -> Language:
    module = Language()
    module.parallel_plan = lambda: plan  # type: ignore[method-assign]
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def causal_lm(**overrides: Any) -> CausalLM:
    sizes = {"n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 96, "vocab_size": 1000}
    return CausalLM("debug", overrides=sizes | overrides)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "ranks", "options", "data", "message"),
    [
        (
            {},
            8,
            {"tensor_parallel_size": 8},
            {},
            "tensor_parallel_size=8 does not divide model.overrides.n_kv_heads=4. For this model it must be one of "
            "1, 2, 4.",
        ),
        (
            {},
            3,
            {"tensor_parallel_size": 3},
            {},
            "tensor_parallel_size=3 does not divide model.overrides.n_heads=8 nor model.overrides.n_kv_heads=4. For "
            "this model it must be one of 1, 2, 4.",
        ),
        (
            {"ffn_dim": 98},
            4,
            {"tensor_parallel_size": 4},
            {},
            "tensor_parallel_size=4 does not divide model.overrides.ffn_dim=98. For this model it must be one of 1, 2.",
        ),
        (
            {"vocab_size": 3},
            4,
            {"tensor_parallel_size": 4},
            {},
            "tensor_parallel_size=4 is more than model.overrides.vocab_size=3, which leaves some ranks without a part "
            "of the vocabulary. For this model it must be one of 1, 2.",
        ),
        (
            {},
            4,
            {"tensor_parallel_size": 4},
            {"sequence_length": 30},
            "data.sequence_length=30 is not divisible by tensor_parallel_size=4, as sequence_parallel=True needs: use "
            "28 or 32, or sequence_parallel=False.",
        ),
        (
            {},
            1,
            {},
            {"sequence_length": 4096},
            "data.sequence_length=4096 is longer than model.overrides.max_sequence_length=128",
        ),
        (
            {},
            2,
            {"pipeline_parallel_size": 2},
            {"batch_size": 9},
            "pipeline.microbatches=2 (by default the number of stages) does not divide data.batch_size=9, the rows "
            "that a rank reads at once. Use one of 3, 9, or make data.batch_size a multiple of 2.",
        ),
        (
            {},
            2,
            {"pipeline_parallel_size": 2, "pipeline": PipelineConfig("GPipe", microbatches=4)},
            {"batch_size": 6},
            "pipeline.microbatches=4 does not divide data.batch_size=6, the rows that a rank reads at once. Use one of "
            "1, 2, 3, 6, or make data.batch_size a multiple of 4.",
        ),
        (
            {},
            4,
            {"pipeline_parallel_size": 4},
            {"batch_size": 3},
            "pipeline.microbatches=4 (by default the number of stages) does not divide data.batch_size=3, the rows "
            "that a rank reads at once. It must be at least 4: make data.batch_size a multiple of 4.",
        ),
        (
            {},
            4,
            {"pipeline_parallel_size": 4, "pipeline": PipelineConfig(microbatches=2)},
            {"batch_size": 8},
            "pipeline.microbatches=2 is fewer than the 4 stages, which pipeline.schedule='1F1B' cannot run. Use 4 or "
            "more, or GPipe.",
        ),
        (
            {},
            8,
            {"pipeline_parallel_size": 8},
            {},
            "8 pipeline stages (pipeline_parallel_size x stages per rank) are too many for 4 blocks",
        ),
        (
            {},
            2,
            {"pipeline_parallel_size": 2, "pipeline": PipelineConfig("GPipe", stages_per_rank=2)},
            {},
            "pipeline.schedule='GPipe' runs one stage on each rank, but there are 2. Schedules for several:",
        ),
        (
            {},
            2,
            {"pipeline_parallel_size": 2, "pipeline": PipelineConfig(split=[["tok_embeddings"], ["layers.0", "norm"]])},
            {},
            "pipeline.split leaves out layers.1, layers.2, layers.3, output.",
        ),
        (
            {"moe": EXPERTS},
            5,
            {"expert_parallel_size": 5},
            {},
            "expert_parallel_size=5 does not divide model.overrides.moe.num_experts=6. For this model it must be one "
            "of 1, 2, 3, 6.",
        ),
        (
            {"moe": replace(EXPERTS, shared_dim=36)},
            8,
            {"tensor_parallel_size": 8},
            {},
            "tensor_parallel_size=8 does not divide model.overrides.n_kv_heads=4 nor model.overrides.moe.shared_dim=36."
            " For this model it must be one of 1, 2, 4.",
        ),
        (
            {},
            2,
            {"expert_parallel_size": 2},
            {},
            "expert_parallel_size=2: CausalLM does not say where its experts are.",
        ),
        (
            {"tie_embeddings": True},
            2,
            {"pipeline_parallel_size": 2},
            {},
            "pipeline_parallel_size=2: tok_embeddings.weight and output.weight share storage",
        ),
    ],
)
def test_numbers(
    overrides: dict[str, Any], ranks: int, options: dict[str, Any], data: dict[str, int], message: str
) -> None:
    module = causal_lm(**overrides)
    found = refused(module, ranks, data, **options)
    assert found.startswith(message)
    assert module.model is None


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (None, {"tensor_parallel_size": 2}, "tensor_parallel_size=2: Language does not say how it can be split."),
        (ParallelPlan(blocks="layers.*"), {}, "plan.blocks: the pattern 'layers.*' matches no module"),
        (ParallelPlan(blocks="1.*", experts="1.*.experts"), {}, "plan.experts: the pattern '1.*.experts' matches no"),
        (None, {"expert_parallel_size": 2}, "expert_parallel_size=2: Language does not say where its experts are."),
        (
            ParallelPlan(blocks="1.*", experts="2"),
            {"expert_parallel_size": 2},
            "expert_parallel_size=2 does not divide the 13 experts of Linear. For this model it must be one of 1, 13.",
        ),
        (
            ParallelPlan(blocks="1.*", experts="1.*"),
            {"expert_parallel_size": 2},
            "plan.experts: the parameters of Residual must have the experts as their first dimension, but it has",
        ),
        (
            ParallelPlan(blocks="1.*", before=("0",)),
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2: the plan does not place 2.weight, 2.bias.",
        ),
        (
            ParallelPlan(blocks="1.*", tensor_parallel={"1.*.up": "colwise", "1.0.*": "rowwise"}),
            {"tensor_parallel_size": 2},
            "plan.tensor_parallel gives 1.0.up two styles: '1.*.up' says 'colwise' and '1.0.*' says 'rowwise'.",
        ),
        (
            ParallelPlan(blocks="1.*", tensor_parallel={"0": "embedding", "1.*.*": "replicate"}),
            {"tensor_parallel_size": 2},
            "tensor_parallel_size > 1: plan.tensor_parallel does not say how 2 (Linear) is split.",
        ),
    ],
)
def test_plans(plan: ParallelPlan | None, options: dict[str, Any], message: str) -> None:
    assert refused(language(plan), 2, **options).startswith(message)


class Tied(Language):
    def configure_model(self) -> None:
        super().configure_model()
        assert isinstance(self.model, nn.Sequential)
        self.model[2].weight = self.model[0].weight

    def parallel_plan(self) -> ParallelPlan:
        return PLAN


def test_weights_tied_across_stages_without_a_word_in_the_plan() -> None:
    found = refused(Tied(), 2, pipeline_parallel_size=2)
    assert found.startswith("0.weight and 2.weight share storage, but lie on pipeline stages 0 and 1.")


def test_manual_optimization() -> None:
    found = refused(language(PLAN, automatic_optimization=False), 2, pipeline_parallel_size=2)
    assert found.startswith("Language.automatic_optimization=False")


def test_a_pipeline_needs_a_titan_module() -> None:
    found = refused(pl.LightningModule(), 2, pipeline_parallel_size=2, plan=PLAN)
    assert found.startswith("pipeline_parallel_size=2: LightningModule is not a TitanModule.")


def test_half_precision_is_refused_with_the_trainer() -> None:
    with pytest.raises(ValueError, match=r"precision='16-true'.*'32-true', 'bf16-true', 'bf16-mixed'"):
        pl.Trainer(accelerator="cpu", strategy=TitanStrategy(), precision="16-true", logger=False)


def test_all_problems_are_reported_together() -> None:
    found = refused(
        causal_lm(), 6, {"sequence_length": 31, "batch_size": 3}, tensor_parallel_size=3, pipeline_parallel_size=2
    )
    first, *others = found.splitlines()
    assert first == "3 settings cannot work:"
    assert [line.split("=")[0] for line in others] == [
        "  - tensor_parallel_size",
        "  - data.sequence_length",
        "  - pipeline.microbatches",
    ]


def test_fit_refuses_before_it_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", started)
    data = pl.LightningDataModule()
    data.sequence_length = 31  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"data\.sequence_length=31 is not divisible by tensor_parallel_size=2"):
        trainer(2, tensor_parallel_size=2).fit(causal_lm(), datamodule=data)


@pytest.mark.parametrize(
    ("plugin", "dim", "ranks", "tensor", "message"),
    [
        (
            MXFP8Precision(emulate=True, filter_fqns=["wx"]),
            64,
            1,
            1,
            "filter_fqns: 'wx' matches none of model.layers.*",
        ),
        (MXFP8Precision(emulate=True), 64, 4, 4, "MXFP8Precision converts nothing of CausalLM:"),
        (
            Float8Precision(emulate=True, float8_all_gather=True),
            48,
            32,
            1,
            "float8_all_gather=True: data_parallel_shard_size=32 does not divide the 48 rows of "
            "model.layers.0.attention.wq on a rank.",
        ),
        (
            TitanPrecision(activation_checkpointing=ActivationCheckpointing("every_n_blocks", every_n_blocks=2)),
            64,
            1,
            1,
            "",
        ),
    ],
    ids=["filter", "nothing-fits", "rows", "works"],
)
def test_precision_is_tried_on_the_meta_device(
    plugin: TitanPrecision, dim: int, ranks: int, tensor: int, message: str
) -> None:
    module = causal_lm(n_layers=2, dim=dim)
    options = {"tensor_parallel_size": tensor, "precision_plugin": plugin}
    if message:
        assert refused(module, ranks, **options).startswith(message)
    else:
        preflight(trainer(ranks, **options), module)
    assert module.model is None


def test_what_works_passes_and_leaves_no_model_behind() -> None:
    module = causal_lm(vocab_size=1001)
    data = SimpleNamespace(batch_size=8, sequence_length=64)
    preflight(trainer(8, tensor_parallel_size=2, pipeline_parallel_size=2), module, data)  # type: ignore[arg-type]
    assert module.model is None


def test_a_model_that_is_there_stays() -> None:
    module = language(PLAN)
    module.model = nn.Sequential(nn.Embedding(3, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 3))
    model = module.model
    preflight(trainer(1), module)
    assert module.model is model
    assert not model[0].weight.is_meta


def test_lbfgs_is_refused() -> None:
    module = Language()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign,return-value]
    with pytest.raises(ValueError, match="LBFGS, which runs the training step several times"):
        trainer(1).fit(module)
