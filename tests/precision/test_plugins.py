"""The low-precision plugins: what they convert, what they leave alone and why, and that nothing else changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from models import CausalLM, MoEConfig, Transformer, TransformerConfig
from models.layers import Linear
from precision_plugins import Float8Precision, MXFP8Precision, TitanPrecision, recipes, torchao_kernels
from precision_plugins.low_precision import LowPrecision
from precision_plugins.low_precision_linear import swap_product
from titan_strategy import TitanStrategy
from titan_strategy.preflight import preflight

CPU = torch.device("cpu")
SIZES = TransformerConfig(
    vocab_size=96,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=128,
    max_sequence_length=32,
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=64, interval=2),
)


class Net(pl.LightningModule):
    def __init__(self, config: TransformerConfig = SIZES) -> None:
        super().__init__()
        self.model = Transformer(config)


def emulated(**options: Any) -> MXFP8Precision:
    return MXFP8Precision(**{"emulate": True, "precision": "32-true", **options})


def convert(plugin: LowPrecision, module: nn.Module) -> dict[str, tuple[str | None, str]]:
    plugin.use_device(CPU)
    plugin.convert_module(module)
    assert plugin.manifest is not None
    return {entry.name: (entry.recipe, entry.reason) for entry in plugin.manifest.entries}


def test_each_module_is_converted_or_has_a_reason() -> None:
    recipe = "mxfp8_rceil (emulated)"
    assert convert(emulated(), Net()) == {
        "model.layers.0.attention.wq": (recipe, ""),
        "model.layers.0.attention.wk": (None, "at most 1024 key or value features, by default"),
        "model.layers.0.attention.wv": (None, "at most 1024 key or value features, by default"),
        "model.layers.0.attention.wo": (recipe, ""),
        "model.layers.0.feed_forward.w1": (recipe, ""),
        "model.layers.0.feed_forward.w3": (recipe, ""),
        "model.layers.0.feed_forward.w2": (recipe, ""),
        "model.layers.1.attention.wq": (recipe, ""),
        "model.layers.1.attention.wk": (None, "at most 1024 key or value features, by default"),
        "model.layers.1.attention.wv": (None, "at most 1024 key or value features, by default"),
        "model.layers.1.attention.wo": (recipe, ""),
        "model.layers.1.moe.routed.router.gate": (None, "router gate, by default"),
        "model.layers.1.moe.routed.experts": (recipe, ""),
        "model.output": (None, "head, by default"),
    }


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"filter_fqns": ["layers.0.*"]}, "model.layers.0.attention.wq", "filter_fqns"),
        ({"filter_fqns": ["wo"]}, "model.layers.1.attention.wo", "filter_fqns"),
        ({"filter_fqns": ["experts"]}, "model.layers.1.moe.routed.experts", "filter_fqns"),
        ({"filter_fqns": []}, "model.output", ""),
        ({"filter_fqns": []}, "model.layers.1.attention.wk", ""),
        (
            {"filter_fqns": []},
            "model.layers.1.moe.routed.router.gate",
            "its class computes something else than nn.Linear",
        ),
        ({"linears": False}, "model.layers.1.attention.wo", "linears=False"),
        ({"grouped_experts": False}, "model.layers.1.moe.routed.experts", "grouped_experts=False"),
    ],
)
def test_what_is_left_alone_can_be_chosen(options: dict[str, Any], name: str, reason: str) -> None:
    recipe, found = convert(emulated(**options), Net())[name]
    assert found == reason
    assert (recipe is None) == bool(reason)


def test_sizes_count_as_a_rank_will_hold_them() -> None:
    module = Net()
    plugin = emulated()
    plugin.use_local_shapes({module.model.layers["0"].attention.wo: (64, 16)}, shards=1)
    recipe, reason = convert(plugin, module)["model.layers.0.attention.wo"]
    assert (recipe, reason) == (None, "in_features 16 on a rank, not a multiple of 32")


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (
            lambda: MXFP8Precision("mxfp8_ceil"),
            r"recipe='mxfp8_ceil': valid names are mxfp8_rceil, .*mxfp8_floor.*auto",
        ),  # type: ignore[arg-type]
        (lambda: Float8Precision("mxfp8_rceil"), r"recipe='mxfp8_rceil': valid names are tensorwise, rowwise, "),  # type: ignore[arg-type]
        (lambda: emulated(linears=False, grouped_experts=False), r"linears=False and grouped_experts=False leave"),
        (lambda: emulated(filter_fqns="wo"), r"filter_fqns='wo': expected a list of patterns, such as \['wo'\]"),
    ],
)
def test_bad_arguments(plugin: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin()


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (
            emulated(filter_fqns=["qkv"]),
            r"filter_fqns: 'qkv' matches none of model\.layers\.\*\.attention\.wq, .*output",
        ),
        (emulated(filter_fqns=["*"]), r"MXFP8Precision converts nothing of Net:\nmodule .*\n.*filter_fqns"),
        (emulated(pad=48), r"pad=48: .* mxfp8_rceil \(emulated\) need multiples of 32 rows"),
        (MXFP8Precision(), r"recipe='mxfp8_rceil' needs .* 10\.x \(Blackwell\), but this is the CPU\. emulate=True"),
        (MXFP8Precision("auto"), r"recipe='auto': the CPU has no kernels .* emulate=True"),
        (Float8Precision(), r"recipe='tensorwise' needs .* 8\.9 or higher .*, but this is the CPU\. emulate=True"),
    ],
)
def test_what_cannot_work(plugin: LowPrecision, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(plugin, Net())


def test_a_model_without_products_is_refused() -> None:
    module = pl.LightningModule()
    module.norm = nn.LayerNorm(4)
    with pytest.raises(ValueError, match=r"converts nothing of LightningModule:\nit has no linear maps"):
        convert(emulated(), module)


def test_hardware_is_checked_before_processes_start() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=TitanStrategy(), plugins=[MXFP8Precision()], logger=False
    )
    with pytest.raises(ValueError, match="but this is the CPU"):
        preflight(trainer, CausalLM("debug"))


def test_nothing_but_the_product_changes() -> None:
    torch.manual_seed(0)
    module, calls = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), []
    module[0].register_forward_hook(lambda *_: calls.append("hook"))
    module[1].weight = nn.Parameter(module[0].weight.detach().T.contiguous())
    module[0].eval()
    before, state = dict(module.named_parameters()), {k: v.clone() for k, v in module.state_dict().items()}
    x = torch.randn(5, 64)
    full = module(x)
    convert(emulated(), module)
    assert {name: id(p) for name, p in module.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())
    assert isinstance(module[0], nn.Linear)
    assert not module[0].training
    low = module(x)
    assert calls == ["hook", "hook"]
    assert 0 < (low - full).norm() / full.norm() < 0.1
    with torch.no_grad():
        module[0].bias += 1000
    assert module[0](x).mean() > 900, "the bias counts"


def test_tied_weights_stay_tied() -> None:
    model = Transformer(TransformerConfig.preset("debug", dim=64, vocab_size=96, ffn_dim=64, tie_embeddings=True))
    recipe, _ = convert(emulated(filter_fqns=[]), model)["output"]
    assert recipe is not None
    assert model.output.weight is model.tok_embeddings.weight


def test_initialisers_survive() -> None:
    linear = Linear(64, 64, init_std=0.5)
    swap_product(linear, nn.functional.linear)
    linear.reset_parameters()
    assert 0.4 < linear.weight.std() < 0.6


def test_checkpoints_do_not_know_the_precision(tmp_path: Path) -> None:
    """bf16 -> MXFP8 -> bf16, through files."""
    config = TransformerConfig.preset("debug", dim=64, ffn_dim=64, vocab_size=96)

    def through(plugin: TitanPrecision, source: Path | None, target: Path) -> dict[str, Tensor]:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=TitanStrategy(seed=1, precision_plugin=plugin, save_distributed_checkpoint=False),
            max_steps=0,
            logger=False,
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        module = CausalLM(config=config)
        rows = torch.zeros(1, 8, dtype=torch.long)
        batches = DataLoader([{"tokens": rows, "labels": rows}], batch_size=None)
        trainer.validate(module, batches, ckpt_path=source, verbose=False, weights_only=True)
        trainer.save_checkpoint(target)
        return torch.load(target, weights_only=True)["state_dict"]

    first = through(TitanPrecision("bf16-mixed"), None, tmp_path / "a.ckpt")
    second = through(emulated(precision="bf16-mixed"), tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    third = through(TitanPrecision("bf16-mixed"), tmp_path / "b.ckpt", tmp_path / "c.ckpt")
    assert first.keys() == second.keys() == third.keys()
    assert all(torch.equal(first[name], value) and torch.equal(second[name], value) for name, value in third.items())
    manifest = json.loads((tmp_path / "precision_manifest.json").read_text())
    runs = {entry["name"]: entry["recipe"] for entry in manifest["modules"]}
    assert runs["model.layers.0.attention.wq"] == "mxfp8_rceil (emulated)"
    assert runs["model.output"] is None
    assert manifest["without_recipe"] == "bfloat16"


def test_the_table_shows_layers_of_a_kind_together() -> None:
    plugin = emulated()
    convert(plugin, Net())
    assert plugin.manifest is not None
    lines = [line.split() for line in plugin.manifest.table().splitlines()]
    assert lines[0] == ["module", "number", "weight", "runs", "as"]
    assert ["model.layers.*.attention.wq", "2", "64", "x", "64", "mxfp8_rceil", "(emulated)"] in lines
    assert any(line[:2] == ["model.output", "1"] and line[-3:] == ["head,", "by", "default"] for line in lines)


@pytest.mark.parametrize(
    ("recipe", "capability", "runs"),
    [
        ("auto", (10, 0), "mxfp8_rceil"),
        ("auto", (9, 0), "float8 rowwise"),
        ("auto", (8, 9), "float8 rowwise"),
        ("mxfp8_cublas", (10, 3), "mxfp8_floor"),
        ("mxfp8_cublas_rceil", (10, 0), "mxfp8_rceil"),
        ("mxfp8_rceil_wgrad_with_hp", (10, 0), "mxfp8_rceil_wgrad_with_hp"),
        ("tensorwise", (9, 0), "float8 tensorwise"),
        ("tensorwise", (12, 0), "float8 tensorwise"),
    ],
)
def test_recipes_by_hardware(recipe: str, capability: tuple[int, int], runs: str) -> None:
    assert recipes.choose(recipe, emulate=False, capability=capability).name == runs


@pytest.mark.parametrize(
    ("recipe", "capability"), [("mxfp8_rceil", (9, 0)), ("mxfp8_floor", (12, 0)), ("rowwise", (8, 0))]
)
def test_hardware_without_kernels(recipe: str, capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"capability {capability[0]}\.{capability[1]}\. emulate=True"):
        recipes.choose(recipe, emulate=False, capability=capability)


def test_blackwell_gets_rows_in_the_sizes_that_its_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it can be seen without the hardware: dispatch, shapes and padding of the calls to torchao."""
    import torchao.prototype.moe_training as grouped
    import torchao.prototype.moe_training.mxfp8_linear as dense

    seen: list[tuple[Any, ...]] = []

    def linear(x: Tensor, weight: Tensor, preference: Any, mode: Any, wgrad: bool) -> Tensor:
        seen.append(("linear", x.shape[0] % 32, preference.name, mode.name, wgrad))
        return x @ weight.T

    def product(
        rows: Tensor, weights: Tensor, offs: Tensor, wgrad_with_hp: bool, scale_calculation_mode: Any
    ) -> Tensor:
        seen.append(("grouped", offs.dtype, bool((offs % 128).any()), wgrad_with_hp, scale_calculation_mode.name))
        return nn.functional.grouped_mm(rows, weights, offs=offs)

    monkeypatch.setattr(dense, "_to_mxfp8_then_scaled_mm", linear)
    monkeypatch.setattr(grouped, "_to_mxfp8_then_scaled_grouped_mm", product)
    monkeypatch.setattr("precision_plugins.torchao_kernels._GROUPED_MX_PACKAGES", {})
    monkeypatch.setattr("precision_plugins.low_precision.capability", lambda: (10, 0))
    module, reference = Net(), Net()
    reference.load_state_dict(module.state_dict())
    plugin = MXFP8Precision(precision="32-true")
    plugin.use_device(torch.device("cuda"))
    plugin.convert_module(module)
    tokens = torch.randint(96, (3, 7))
    torch.testing.assert_close(module.model(tokens), reference.model(tokens))
    assert set(seen) == {("linear", 0, "AUTO", "RCEIL", False), ("grouped", torch.int32, False, False, "RCEIL")}


def test_packages_that_torchao_leaves_out_are_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs nvidia-cutlass-dsl, apache-tvm-ffi, cuda-python.*pip install"
    ):
        torchao_kernels.mx_grouped_kernel("rceil", False)
