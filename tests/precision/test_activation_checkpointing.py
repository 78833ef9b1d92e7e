"""What blocks keep for the backward pass: never another number, as many operators and bytes as the mode says."""

from collections import Counter
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from models import CausalLM, MoEConfig, Transformer, TransformerConfig
from models.moe import GroupedExperts
from precision_plugins import ActivationCheckpointing, TitanPrecision, activation_checkpointing
from precision_plugins.activation_checkpointing import ATTENTION, KEEP
from precision_plugins.blocks import change_blocks
from tests.parallel.parity import Recorder, Run, fit, full_parameters
from titan_strategy import PipelineConfig, TitanStrategy
from titan_strategy.preflight import preflight

MM = "aten.mm.default"
PRODUCTS = 7  # of a dense block: wq, wk, wv, wo, w1, w3, w2
MOE = MoEConfig(8, 2, 48, shared_dim=48, interval=2, auxiliary_loss=0.1)
TOKENS = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(0))
MODES = ["full", "every_n_blocks", "selective"]


class Watch(TorchDispatchMode):
    """Counts operators, and keeps an eye on the memory that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def alive(self) -> int:
        """Bytes of it that have not been freed."""
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def build(moe: MoEConfig | None = None, blocks: int = 2) -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig.preset("debug", moe=moe, n_layers=blocks))


def change(model: Transformer, checkpointing: ActivationCheckpointing) -> Transformer:
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    change_blocks(list(model.layers.values()), checkpointing, None, units=experts)
    return model


def train(model: nn.Module, inputs: Tensor = TOKENS) -> tuple[dict[str, Tensor], Watch, int]:
    """One forward and backward pass: gradients and counters by name, the operators, and bytes kept in between."""
    torch.manual_seed(1)
    with Watch() as watch:
        output = model(inputs)
        kept = watch.alive
        output.logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {name: b.clone() for name, b in model.named_buffers()}, watch, kept


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("mode", MODES)
def test_numbers_names_and_counted_tokens_stay_the_same(mode: str, moe: MoEConfig | None) -> None:
    plain, changed = build(moe), build(moe)
    names, classes = list(changed.state_dict()), [type(module) for module in changed.modules()]
    change(changed, ActivationCheckpointing(mode))  # type: ignore[arg-type]
    assert list(changed.state_dict()) == names
    assert [type(module) for module in changed.modules()] == classes
    assert_same(train(changed)[0], train(plain)[0])


def test_memory_and_products_of_each_mode() -> None:
    def products_and_bytes(**options: Any) -> tuple[int, int]:
        _, watch, kept = train(change(build(blocks=4), ActivationCheckpointing(**options)))
        return watch.calls[MM], kept

    none, most = products_and_bytes()
    full, least = products_and_bytes(mode="full")
    every, half = products_and_bytes(mode="every_n_blocks")
    every_third, more = products_and_bytes(mode="every_n_blocks", every_n_blocks=3)
    selective, some = products_and_bytes(mode="selective")
    halved, less = products_and_bytes(mode="selective", recompute_every={MM: 2})
    assert none == 3 * (4 * PRODUCTS + 1)  # forward, and two gradients; the head is not in a block
    # The last product of a block is not needed again.
    assert full - none == 4 * (PRODUCTS - 1)
    assert every - none == 2 * (PRODUCTS - 1)
    assert every_third - none == PRODUCTS - 1
    assert selective == none
    assert halved - none == 4 * (PRODUCTS // 2)
    assert least < less < some < most
    assert least < half < more < most


@pytest.mark.parametrize(("every", "again"), [({}, 0), ({MM: 3}, 2), ({MM: 2}, 3), ({MM: 1}, PRODUCTS - 1)])
def test_every_nth_product_runs_again(every: dict[str, int], again: int) -> None:
    none = train(build())[1].calls
    found = train(change(build(), ActivationCheckpointing("selective", recompute_every=every)))[1].calls
    assert found[MM] - none[MM] == 2 * again


@pytest.mark.parametrize("operator", ["aten.topk.default", "aten._grouped_mm.default", *ATTENTION])
def test_kept_operators_run_once(operator: str) -> None:
    counts = {}
    for mode in ("none", "full", "selective"):
        model = build(MOE) if operator not in ATTENTION else build(blocks=1)
        counts[mode] = train(change(model.bfloat16(), ActivationCheckpointing(mode)))[1].calls[operator]  # type: ignore[arg-type]
    if operator == "aten._scaled_dot_product_flash_attention_for_cpu.default":
        assert counts["none"] == 1  # the others belong to GPUs
    assert counts["selective"] == counts["none"]
    assert counts["full"] > counts["none"] or not counts["none"]


def test_what_is_kept_is_the_users_choice() -> None:
    def runs(operator: str, **options: Any) -> int:
        return train(change(build(blocks=1), ActivationCheckpointing("selective", **options)))[1].calls[operator]

    silu, attention = "aten.silu.default", ATTENTION[4]
    assert (runs(silu), runs(silu, keep=[*KEEP, silu])) == (2, 1)
    assert (runs(attention), runs(attention, keep=[MM])) == (1, 2)


class Random(nn.Module):
    """Attention that draws random numbers, and can be kept; then dropout, which draws the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.native_dropout(self.linear(x), 0.5, True)[0]
        return self.dropout(torch.tanh(x))


def test_later_random_numbers_stay_the_same() -> None:
    torch.manual_seed(0)
    plain, changed, x = Random(), Random(), torch.randn(8, 16)
    changed.load_state_dict(plain.state_dict())
    keep = [*KEEP, "aten.native_dropout.default"]
    change_blocks([changed], ActivationCheckpointing("selective", keep=keep), None)
    assert_same(train(changed, x)[0], train(plain, x)[0])


def test_attention_with_dropout_runs_again() -> None:
    """Its random numbers would be missing in the repetition."""
    rules = ActivationCheckpointing().rules()
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.empty(1)
    assert not rules[op].draws((q, q, q, 0.0, True), {})
    assert not rules[op].draws((q, q, q), {})
    assert rules[op].draws((q, q, q, 0.1, True), {})
    assert rules[op].draws((q, q, q), {"dropout_p": 0.1})
    assert not rules[torch.ops.aten.mm.default].draws((q, q), {})


# -- Under the strategy ------------------------------------------------------------------------------------------------

LAYOUTS = {
    "shard2": {},
    "tp2": {"tensor_parallel_size": 2},
    "ep2-tp2": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "zero-bubble": {"pipeline_parallel_size": 2, "pipeline": PipelineConfig("ZBVZeroBubble")},
}


def gradients_by_mode(run: Run, options: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    found = {}
    for mode in ("none", *modes):
        recorder = Recorder()
        plugin = TitanPrecision("32-true", ActivationCheckpointing(mode))  # type: ignore[arg-type]
        module = fit(run, options, precision_plugin=plugin, callbacks=[recorder], limit_val_batches=0)
        found[mode] = [*recorder.trace["gradients"], full_parameters(module)]
    return found


@pytest.mark.parametrize(
    ("layout", "run", "modes"),
    [
        ("shard2", Run(layers=2, moe=MOE, microbatches=2), ["full", "selective"]),
        ("tp2", Run(layers=2, microbatches=2), MODES),
        ("ep2-tp2", Run(layers=2, moe=MOE, microbatches=2), ["full", "selective"]),
        ("zero-bubble", Run(microbatches=2), ["full"]),
    ],
)
def test_layouts_have_the_numbers_of_none(rank_pool, layout: str, run: Run, modes: list[str]) -> None:
    for found in rank_pool.run(gradients_by_mode, 2, run, LAYOUTS[layout], modes):
        for mode in modes:
            for step, expected in enumerate(found["none"]):
                assert_same(found[mode][step], expected)


# -- Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "half"},
            r"mode='half': valid modes are 'none', 'full', 'every_n_blocks', 'selective', 'memory_budget'",
        ),
        ({"every_n_blocks": 0}, r"every_n_blocks=0 must be at least 1"),
        ({"memory_budget": 1.5}, r"memory_budget=1\.5 must be between 0 and 1"),
        ({"recompute_every": {MM: 0}}, rf"recompute_every: {MM}=0 must be at least 1"),
        (
            {"recompute_every": {"aten.tanh.default": 2}},
            r"recompute_every names aten\.tanh\.default, which .*keep does not",
        ),
        ({"keep": ["aten.mmm.default"]}, r"has no operator aten\.mmm\.default. Did you mean aten\.mm\.default"),
        ({"keep": ["aten.mm"]}, r"has no operator aten\.mm\. Did you mean aten\.mm\.default or"),
        ({"keep": ["no such thing"]}, r"has no operator no such thing\. Names are like aten\.mm\.default"),
        ({"keep": ["aten.add_.Tensor"]}, r"aten\.add_\.Tensor writes into memory that it is given"),
        ({"keep": ["c10d.alltoall_base_.default"]}, r"alltoall_base_\.default writes .* _c10d_functional"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationCheckpointing(**options)


def test_defaults_of_another_torch_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    known = len(ActivationCheckpointing().rules())
    newer = (*KEEP, "aten._matrix_product_of_the_future.default")
    monkeypatch.setattr(activation_checkpointing, "KEEP", newer)
    assert len(ActivationCheckpointing("selective", keep=list(newer)).rules()) == known


def test_too_few_blocks() -> None:
    with pytest.raises(ValueError, match="every_n_blocks=3 recomputes none of the 2 blocks on a rank: it must be at"):
        change(build(), ActivationCheckpointing("every_n_blocks", every_n_blocks=3))


def test_a_model_without_blocks() -> None:
    with pytest.raises(ValueError, match="mode='full' is for the repeated blocks of a model, and none were found"):
        TitanPrecision("32-true", ActivationCheckpointing("full")).check_blocks([])
    TitanPrecision("32-true").check_blocks([])


def test_memory_budget_needs_the_compiler() -> None:
    with pytest.raises(ValueError, match="mode='memory_budget' is a choice of torch's compiler: give compile too"):
        TitanPrecision("32-true", ActivationCheckpointing("memory_budget"))


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "0F0,0I0,0W0\n1F0,1I0,1W0\n"])
def test_selective_refuses_schedules_that_split_the_backward_pass(schedule: str, tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text(schedule)
    config = PipelineConfig(schedule_csv=file) if "F0" in schedule else PipelineConfig(schedule)  # type: ignore[arg-type]

    def check(mode: str) -> None:
        plugin = TitanPrecision("32-true", ActivationCheckpointing(mode))  # type: ignore[arg-type]
        strategy = TitanStrategy(pipeline_parallel_size=2, pipeline=config, precision_plugin=plugin)
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
        preflight(trainer, CausalLM("debug", overrides={"n_layers": 4}))

    check("full")
    with pytest.raises(
        ValueError, match=r"splits the backward .*mode='selective' keeps its values for one: use 'full'"
    ):
        check("selective")


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "plugin:\n  activation_checkpointing:\n    mode: selective\n    keep+: [aten.silu.default]\n"
        "    recompute_every: {aten.mm.default: 3, aten.addmm.default: 2}\n"
    )
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(TitanPrecision, "plugin")
    parser.add_argument("--config", action="config")
    found = parser.instantiate(parser.parse_args([f"--config={file}"])).plugin.activation_checkpointing
    assert found == ActivationCheckpointing(
        "selective", keep=[*KEEP, "aten.silu.default"], recompute_every={MM: 3, "aten.addmm.default": 2}
    )
