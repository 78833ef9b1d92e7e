"""Compiled blocks: the same numbers, few graphs, and no new ones in the course of a run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import DataLoader

from models import CausalLM, MoEConfig, Transformer, TransformerConfig
from models.layers import Linear
from models.moe import GroupedExperts
from precision_plugins import ActivationCheckpointing, CompileConfig, TitanPrecision
from precision_plugins.activation_checkpointing import Mode
from precision_plugins.blocks import change_blocks, parts_of
from precision_plugins.compile import _ATTENTION_FLOPS
from precision_plugins.low_precision_linear import swap_product
from precision_plugins.recipes import choose
from precision_plugins.titan_precision import PrecisionName
from tests.gpu.test_one_gpu import train as train_on_gpu
from tests.parallel.parity import (
    SEED,
    Module,
    Recorder,
    Run,
    Trace,
    fit,
    full_parameters,
    microbatch,
    quiet_trainer,
    relative_difference,
)
from tests.rank_pool import ExternalRanks
from titan_strategy import PipelineConfig, TitanStrategy
from titan_strategy.preflight import preflight

MM = torch.ops.aten.mm.default
PRODUCTS = 7  # of a dense block: wq, wk, wv, wo, w1, w3, w2
EVERY = MoEConfig(8, 2, 16, shared_dim=16)  # block has experts
TOKENS = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(0))


class Graphs:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        self.compiled = 0
        self.runs = 0
        self.products_of_backward: list[int] = []
        self.kept: list[int] = []  # numbers that each forward graph returns
        self.budgets: list[float] = []
        self._compile = aot_autograd(
            fw_compiler=self._forward, bw_compiler=self._backward, partition_fn=min_cut_rematerialization_partition
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.budgets.append(torch._functorch.config.activation_memory_budget)
        return self._compile(graph, inputs)

    def _forward(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._functorch.aot_autograd import make_boxed_func

        self.compiled += 1
        outputs = next(iter(graph.graph.find_nodes(op="output"))).args[0]
        values = [out.meta["val"] for out in outputs if isinstance(out, torch.fx.Node) and out.op != "placeholder"]
        self.kept.append(sum(value.numel() for value in values if isinstance(value, Tensor)))

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return make_boxed_func(run)

    def _backward(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._functorch.aot_autograd import make_boxed_func

        self.products_of_backward.append(len(graph.graph.find_nodes(op="call_function", target=MM)))
        return make_boxed_func(graph.forward)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def build(blocks: int, moe: MoEConfig | None = None) -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig.preset("debug", n_layers=blocks, moe=moe))


def change(model: Transformer, graphs: Graphs, mode: str = "none", **options: Any) -> Transformer:
    """As the strategy does on one rank in bfloat16."""
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    checkpointing = ActivationCheckpointing(mode, **options)  # type: ignore[arg-type]
    change_blocks(list(model.layers.values()), checkpointing, CompileConfig(graphs), units=experts)
    return model


def gradients(model: Transformer, divisor: int = 60) -> dict[str, Tensor]:
    loss_sum = model(TOKENS).float().logsumexp(-1).sum()
    model.loss_scale.follow(loss_sum)
    model.zero_grad()
    (loss_sum / divisor).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_difference(found[name].float(), value.float()) <= tolerance, name


def test_blocks_of_one_kind_share_a_graph_and_keep_their_names() -> None:
    plain, compiled, graphs = build(12), build(12), Graphs()
    change(compiled, graphs)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert_close(gradients(compiled), gradients(plain))
    assert (graphs.compiled, graphs.runs) == (1, 12)
    assert graphs.products_of_backward == [2 * PRODUCTS]


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8_rceil"])
def test_blocks_in_low_precision_share_graphs(name: str) -> None:
    """More blocks than the compiler has graphs for one piece of code."""
    plain, compiled, graphs = build(10, EVERY), build(10, EVERY), Graphs()
    for model in (plain, compiled):
        recipe = choose(name, emulate=True, capability=None)
        for module in model.layers.modules():
            if isinstance(module, GroupedExperts):
                module.grouped_mm = recipe.grouped()
            elif type(module) is Linear:
                swap_product(module, recipe.linear)
    change(compiled, graphs)
    assert_close(gradients(compiled), gradients(plain))
    assert graphs.compiled == 3  # attention, experts and shared expert


def test_a_block_with_experts_is_several_graphs_around_its_router() -> None:
    moe = MoEConfig(8, 2, 16, shared_dim=16, interval=2, auxiliary_loss=1.0)
    plain, compiled, graphs = build(2, moe).bfloat16(), build(2, moe).bfloat16(), Graphs()
    block = compiled.layers["1"]
    apart = {module for name, module in block.named_modules() if name.endswith((".router", ".experts"))}
    names = {module: name for name, module in block.named_modules()}
    inside = [names[part] for part in parts_of(block, apart)]
    assert inside == ["attention", "moe.routed.router", "moe.routed.experts", "moe.shared"]  # without the norms
    change(compiled, graphs, "selective")
    # The scale of the auxiliary loss changes from step to step; a graph would keep what it was when it was made.
    for divisor in (60, 7):
        assert_close(gradients(compiled, divisor), gradients(plain, divisor), tolerance=0)
    assert graphs.compiled == 1 + 3  # the dense block, and all parts of the other but the router
    assert graphs.runs == 2 * (1 + 3)


@pytest.mark.parametrize(
    ("mode", "options", "again"),
    [
        ("full", {}, PRODUCTS - 1),  # all but the last, whose output nothing reads
        ("selective", {}, 0),
        ("selective", {"recompute_every": {"aten.mm.default": 2}}, PRODUCTS // 2),
    ],
)
def test_graphs_compute_again_what_the_mode_says(mode: str, options: dict[str, Any], again: int) -> None:
    graphs = Graphs()
    gradients(change(build(2), graphs, mode, **options))
    assert graphs.products_of_backward == [2 * PRODUCTS + again]


def test_memory_budget_holds_for_the_blocks_alone() -> None:
    kept = []
    for budget in (0.0, 0.3, 1.0):
        torch._dynamo.reset()
        graphs = Graphs()
        assert_close(gradients(change(build(1), graphs, "memory_budget", memory_budget=budget)), gradients(build(1)))
        assert graphs.budgets == [budget]
        assert torch._functorch.config.activation_memory_budget == 1
        kept += graphs.kept
    assert kept[0] < kept[1] < kept[2]


# -- Under the strategy ------------------------------------------------------------------------------------------------

TENSOR_2, PIPELINE_2, EXPERT_2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))


def test_attention_is_weighed_by_its_query_heads() -> None:
    from torch.utils.flop_counter import flop_registry

    attention = torch.ops.aten._scaled_dot_product_flash_attention
    query, key = torch.empty(2, 8, 10, 4, device="meta"), torch.empty(2, 8, 6, 4, device="meta")
    expected = flop_registry[attention](query, key, key, out_val=query)
    assert _ATTENTION_FLOPS[attention](query, key, key) == expected == 2 * 2 * (2 * 8 * 10 * 6 * 4)
    assert _ATTENTION_FLOPS[attention](query, key[:, :2], key[:, :2]) == expected


@dataclass(frozen=True)
class Case:
    """A layout, and what its blocks do."""

    ranks: int
    options: dict[str, Any]
    graphs: int  # that are made in training
    moe: MoEConfig | None = None
    precision: PrecisionName = "32-true"
    mode: Mode = "none"
    loss: bool = False
    layers: int = 1
    validate: bool = False


# Of a block with experts, attention and shared expert have a graph each, and so have the experts where they can.
ONE = Case(1, {}, graphs=4, moe=EVERY, precision="bf16-mixed", loss=True, validate=True)
CASES = {
    "shard2": Case(2, {}, graphs=1, precision="bf16-mixed"),
    "tp2": Case(2, TENSOR_2 | {"sequence_parallel": False}, graphs=2, mode="full", loss=True),
    "ep2-tp2": Case(2, TENSOR_2 | EXPERT_2, graphs=2, moe=EVERY),
    "pp2": Case(2, PIPELINE_2, graphs=1, mode="full", layers=2),
}


class Ragged(Module):
    """Its last batch of evaluation is smaller."""

    def val_dataloader(self) -> DataLoader:
        coordinate = self.trainer.strategy.distributed_sampler_kwargs
        batches = []
        for index, rows in enumerate((4, 4, 3)):
            everywhere = microbatch(1000 + index, rows * coordinate["num_replicas"])
            batches.append({k: v[rows * coordinate["rank"] :][:rows] for k, v in everywhere.items()})
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Watch(Recorder):
    """Also notes how many graphs there are after each validation."""

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.graphs = graphs
        self.trace["graphs"] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trace["graphs"].append(self.graphs.compiled)


def eager_and_compiled(case: Case) -> tuple[Trace, Trace, int, int]:
    torch._dynamo.reset()
    graphs = Graphs()
    traces = []
    run = Run(layers=case.layers, moe=case.moe, microbatches=4 if case.validate else 2)
    when: dict[str, Any] = {"val_check_interval": 2} if case.validate else {"limit_val_batches": 0}
    for compile in (None, CompileConfig(graphs, loss=case.loss)):
        watch = Watch(graphs)
        plugin = TitanPrecision(case.precision, ActivationCheckpointing(case.mode), compile)
        module = fit(run, case.options, Ragged, plugin, callbacks=[watch], **when)
        validation = {k: v for k, v in module.trainer.callback_metrics.items() if k.startswith("val/")}
        trace = {"final": full_parameters(module), "validation": validation, "keys": list(module.state_dict())}
        traces.append(watch.trace | trace)
    return *traces, graphs.compiled, graphs.runs


def assert_same_run(eager: Trace, compiled: Trace) -> None:
    assert compiled["keys"] == eager["keys"]
    assert len(compiled["gradients"]) == len(eager["gradients"]) > 1
    for found, expected in zip(compiled["gradients"], eager["gradients"], strict=True):
        assert_close(found, expected)
    assert_close(compiled["final"], eager["final"])
    assert_close(compiled["validation"], eager["validation"])


@pytest.mark.parametrize("name", CASES)
def test_layouts_have_the_numbers_of_eager(rank_pool, name: str) -> None:
    case = CASES[name]
    for eager, compiled, graphs, runs in rank_pool.run(eager_and_compiled, case.ranks, case):
        assert_same_run(eager, compiled)
        # To learn the shapes of a pipeline, torch up to 2.11 runs its stages without gradients, too.
        assert graphs - case.graphs in ({0, 1} if name == "pp2" else {0})
        assert runs > graphs


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process be the only rank of a run."""
    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def test_a_run_makes_no_graphs_after_its_first_validation(one_rank: None) -> None:
    """Not for the smaller last batch, nor for other numbers of tokens that an expert gets."""
    eager, compiled, _, _ = eager_and_compiled(ONE)
    assert_same_run(eager, compiled)
    assert compiled["graphs"] == [2 * ONE.graphs] * 2  # with gradients and without


def train_on(compile: CompileConfig | None, epochs: int, start: Path | None = None, save: Path | None = None) -> Trace:
    strategy = TitanStrategy(
        cluster_environment=ExternalRanks(),
        parallel_devices=[torch.device("cpu")],
        seed=SEED,
        precision_plugin=TitanPrecision("32-true", compile=compile),
    )
    trainer = quiet_trainer(strategy, 1, max_epochs=epochs, limit_val_batches=0)
    module = Module(Run(layers=1, microbatches=1, optimizer="adamw"))
    trainer.fit(module, ckpt_path=start)
    if save is not None:
        trainer.save_checkpoint(save)
    return full_parameters(module)


def test_checkpoints_go_from_eager_to_compiled_and_back(one_rank: None, tmp_path: Path) -> None:
    train_on(None, 1, save=tmp_path / "eager")
    compile = CompileConfig("aot_eager", loss=False)
    train_on(compile, 2, start=tmp_path / "eager", save=tmp_path / "compiled")
    assert_close(train_on(None, 3, start=tmp_path / "compiled"), train_on(None, 3), tolerance=0)


@pytest.mark.gpu
@pytest.mark.parametrize("moe", [None, EVERY], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("mode", "options"),
    [("none", {"cpu_offload": True}), ("full", {}), ("selective", {}), ("memory_budget", {})],
    ids=["none-offloaded", "full", "selective", "memory_budget"],
)
def test_inductor_follows_eager_on_the_gpu(
    one_rank: None, tmp_path: Path, mode: Mode, options: dict[str, Any], moe: MoEConfig | None
) -> None:
    run = Run(layers=2, moe=moe)
    eager, _ = train_on_gpu(run, TitanPrecision("bf16-mixed"), tmp_path)
    plugin = TitanPrecision("bf16-mixed", ActivationCheckpointing(mode), CompileConfig())
    compiled, _ = train_on_gpu(run, plugin, tmp_path, **options)
    torch.testing.assert_close(torch.tensor(compiled["loss"]), torch.tensor(eager["loss"]), rtol=5e-3, atol=0)
    for name, value in eager["final"].items():
        assert relative_difference(compiled["final"][name], value) < 5e-2, name


# -- Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nope"}, r"compile\.backend='nope': valid names are .*inductor.*aot_eager"),
        ({"mode": "fast"}, r"compile\.mode: inductor has no 'fast'\. Valid: default.*max-autotune"),
        ({"options": {"max_autotun": True}}, r"compile\.options: inductor has no 'max_autotun'\. Valid: max_autotune"),
        ({"mode": "default", "options": {}}, r"compile\.mode='default' and compile\.options exclude each other"),
        (
            {"backend": "eager", "mode": "default"},
            r"compile\.mode='default' is inductor's, but compile\.backend='eager'",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompileConfig(**options)


def test_memory_budget_needs_a_backend_that_divides_graphs() -> None:
    with pytest.raises(ValueError, match=r"does nothing with compile\.backend='eager'\. Use one of inductor"):
        TitanPrecision("32-true", ActivationCheckpointing("memory_budget"), CompileConfig("eager"))


def test_nothing_left_to_compile() -> None:
    compile = CompileConfig(eager=["attention_norm", "attention", "ffn_norm", "feed_forward"])
    with pytest.raises(ValueError, match=r"compile\.eager leaves nothing of the blocks to compile"):
        change_blocks(list(build(1).layers.values()), ActivationCheckpointing(), compile)


def test_graphs_with_dtensors_must_keep_attention() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    block = nn.Linear(4, 4)
    whole = distribute_tensor(block.weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()])
    block.weight = nn.Parameter(whole)
    checkpointing = ActivationCheckpointing("selective", keep=["aten.mm.default"])
    with pytest.raises(ValueError, match=r"keep lacks aten\._scaled_dot.*attention has to be kept"):
        change_blocks([block], checkpointing, CompileConfig("aot_eager"))
    change_blocks([block], checkpointing, None)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble"])
def test_schedules_that_split_the_backward_pass_are_refused(schedule: str) -> None:
    config = PipelineConfig(schedule)  # type: ignore[arg-type]
    plugin = TitanPrecision("32-true", compile=CompileConfig("aot_eager"))
    strategy = TitanStrategy(pipeline_parallel_size=2, pipeline=config, precision_plugin=plugin)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    message = f"pipeline.schedule='{schedule}' splits the backward .* use compile: null.*1F1B, GPipe, Interleaved1F1B"
    with pytest.raises(ValueError, match=message):
        preflight(trainer, CausalLM("debug", overrides={"n_layers": 4}))


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(TitanPrecision, "plugin")
    parser.add_argument("--config", action="config")
    for text, expected in (
        ("null", None),
        ("{}", CompileConfig()),
        (
            "{mode: max-autotune-no-cudagraphs, loss: false}",
            CompileConfig(mode="max-autotune-no-cudagraphs", loss=False),
        ),
        ("{options: {max_autotune: true}, eager: []}", CompileConfig(options={"max_autotune": True}, eager=[])),
    ):
        file.write_text(f"plugin:\n  compile: {text}\n")
        assert parser.instantiate(parser.parse_args([f"--config={file}"])).plugin.compile == expected
