"""`MXFP8Precision` and `Float8Precision`: matrix products in low precision, the rest as `TitanPrecision` has it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import nn
from typing_extensions import override

from precision_plugins.activation_checkpointing import ActivationCheckpointing
from precision_plugins.compile import CompileConfig
from precision_plugins.float8 import Float8Recipe
from precision_plugins.float8_all_gather import Float8AllGather
from precision_plugins.low_precision_linear import has_product_of_its_own, swap_product
from precision_plugins.manifest import Manifest, ManifestEntry
from precision_plugins.recipes import OLD_NAMES, MXFP8Recipe, Recipe, choose
from precision_plugins.titan_precision import PrecisionName, TitanPrecision
from precision_plugins.torchao_kernels import capability

# Left alone by default. The head and router gates are sensitive and small; projections to keys and values are too small
# to gain with grouped queries.
_HEADS = ("output", "lm_head", "head")
_GATES = ("gate", "router")
_KEYS_AND_VALUES = ("wk", "wv", "k_proj", "v_proj")
_SMALL = 1024  # features: below this, casting costs more than the product gains (torchao's own filter: N <= 1024)


class LowPrecision(TitanPrecision):
    """What the two plugins share: which modules are converted, and the record of it.

    Args:
        recipe: How products run; see the plugins.
        filter_fqns: Patterns of modules that stay as they are: names or ends of names, in which `*` stands for anything
            (`output`, `layers.0.*`, `wk`). None leaves the head, router gates, and small projections to keys and
            values.
        emulate: Compute the numbers of the recipe with ordinary products, on any hardware: a rehearsal, slower than
            bf16.
        linears: Whether linear maps are converted.
        grouped_experts: Whether the grouped products of experts are.
        pad: What the rows of each expert are filled up to a multiple of; None for what the products need.
        precision: Dtypes of everything else; see `TitanPrecision`.
        activation_checkpointing: What each block keeps for its backward pass.
        compile: How the blocks are compiled; None for not at all.
        gradient_norm_type: Order of the gradient norm.

    Raises:
        ValueError: If the recipe is unknown, or `pad` is not a multiple of what it needs.
    """

    recipes: tuple[str, ...]

    def __init__(
        self,
        recipe: str,
        filter_fqns: Sequence[str] | None,
        emulate: bool,
        linears: bool,
        grouped_experts: bool,
        pad: int | None,
        precision: PrecisionName,
        activation_checkpointing: ActivationCheckpointing,
        compile: CompileConfig | None,
        gradient_norm_type: float,
    ) -> None:
        super().__init__(precision, activation_checkpointing, compile, gradient_norm_type)
        if isinstance(filter_fqns, str):
            raise ValueError(f"filter_fqns={filter_fqns!r}: expected a list of patterns, such as [{filter_fqns!r}].")
        if recipe not in self.recipes:
            raise ValueError(f"recipe={recipe!r}: valid names are {', '.join(self.recipes)}.")
        if not linears and not grouped_experts:
            raise ValueError("linears=False and grouped_experts=False leave nothing to convert.")
        self.recipe_name = recipe
        self.filter_fqns = filter_fqns
        self.emulate = emulate
        self.linears = linears
        self.grouped_experts = grouped_experts
        self.pad = pad
        self.manifest: Manifest | None = None
        self._local_shapes: Mapping[nn.Module, tuple[int, ...]] = {}
        self._shards = 1
        self._recipe: Recipe | None = None

    @property
    @override
    def description(self) -> str:
        return f"{self.precision} with {self.recipe_name}{' (emulated)' if self.emulate else ''}"

    @override
    def use_device(self, device: torch.device) -> None:
        recipe = choose(self.recipe_name, self.emulate, capability() if device.type == "cuda" else None)
        if self.pad is not None and (self.pad < 1 or self.pad % recipe.group_multiple):
            raise ValueError(
                f"pad={self.pad}: the products of {recipe.name} need multiples of {recipe.group_multiple} rows for "
                "each expert."
            )
        self._recipe = recipe

    @override
    def use_local_shapes(self, shapes: Mapping[nn.Module, tuple[int, ...]], shards: int) -> None:
        self._local_shapes = shapes
        self._shards = shards

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the parameters their storage dtype, and the products of `module` the recipe, in place.

        Raises:
            ValueError: If a filter matches nothing, or nothing is converted; the message says why.
        """
        if self._recipe is None:
            raise RuntimeError(f"{type(self).__name__} works through TitanStrategy, which tells it the device.")
        super().convert_module(module)
        candidates = dict(_candidates(module))
        self._check_filters(candidates)
        entries = [self._convert(name, child, self._recipe) for name, child in candidates.items()]
        self.manifest = Manifest(str(self.compute_dtype).removeprefix("torch."), entries)
        if not self.manifest.converted:
            found = self.manifest.table() if entries else "it has no linear maps and no grouped experts"
            raise ValueError(f"{type(self).__name__} converts nothing of {type(module).__name__}:\n{found}")
        return module

    @override
    def report(self, folder: Path) -> None:
        """Print what runs as what, and write it to `precision_manifest.json` in `folder`."""
        if self.manifest is None:
            return
        rank_zero_info(self.manifest.table())
        _write_on_rank_zero(self.manifest, folder / "precision_manifest.json")

    def _check_filters(self, candidates: Mapping[str, nn.Module]) -> None:
        for pattern in self.filter_fqns or ():
            if not any(_matches(name, pattern) for name in candidates):
                raise ValueError(
                    f"filter_fqns: {pattern!r} matches none of {', '.join(_folded(candidates)) or 'no modules'}."
                )

    def _convert(self, name: str, module: nn.Module, recipe: Recipe) -> ManifestEntry:
        if isinstance(module, nn.Linear):
            shape = self._local_shapes.get(module, tuple(module.weight.shape))
            reason = self._reason_against_linear(name, module, shape, recipe)
            if not reason:
                swap_product(module, recipe.linear)
            return ManifestEntry(name, "linear", shape, None if reason else recipe.name, reason)
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        reason = self._reason_against_experts(name, shapes, recipe)
        if not reason:
            dispatcher: Any = module.dispatcher
            # nn.Module declares its attributes as tensors or modules.
            setattr(module, "grouped_mm", recipe.grouped())  # noqa: B010
            setattr(module, "dispatcher", replace(dispatcher, alignment=self.pad or recipe.group_multiple))  # noqa: B010
        return ManifestEntry(name, "grouped experts", shapes[0], None if reason else recipe.name, reason)

    def _reason_against_linear(self, name: str, module: nn.Linear, shape: tuple[int, ...], recipe: Recipe) -> str:
        out_features, in_features = shape
        if not self.linears:
            return "linears=False"
        if reason := self._filtered(name, out_features):
            return reason
        if has_product_of_its_own(module):
            return "its class computes something else than nn.Linear"
        for side, size in (("in", in_features), ("out", out_features)):
            if size % recipe.multiple:
                return f"{side}_features {size} on a rank, not a multiple of {recipe.multiple}"
        return ""

    def _reason_against_experts(self, name: str, shapes: Sequence[tuple[int, ...]], recipe: Recipe) -> str:
        if not self.grouped_experts:
            return "grouped_experts=False"
        if any(_matches(name, pattern) for pattern in self.filter_fqns or ()):
            return "filter_fqns"
        odd = sorted({size for shape in shapes for size in shape[1:] if size % recipe.multiple})
        return f"width {odd[0]}, not a multiple of {recipe.multiple}" if odd else ""

    def _filtered(self, name: str, out_features: int) -> str:
        """Why a linear map is left alone by name; empty if it is not."""
        if self.filter_fqns is not None:
            return "filter_fqns" if any(_matches(name, pattern) for pattern in self.filter_fqns) else ""
        last = name.split(".")[-1]
        if last in _HEADS:
            return "head, by default"
        if last in _GATES:
            return "router gate, by default"
        if last in _KEYS_AND_VALUES and out_features <= _SMALL:
            return f"at most {_SMALL} key or value features, by default"
        return ""


class MXFP8Precision(LowPrecision):
    """Products in MXFP8: 8-bit floats in blocks of 32 that share a power of two as scale (OCP MX specification 1.0).

    Blackwell GPUs (compute capability 10.x) have kernels for it. Everywhere else it runs only if emulation is asked
    for: the same numbers, computed with ordinary products, more slowly than bf16. That is a rehearsal of Blackwell's
    numerics, never a speed-up; on Ada and Hopper GPUs `Float8Precision` is faster than bf16.

    Args:
        recipe: `"mxfp8_rceil"` rounds scales up; `"mxfp8_rceil_wgrad_with_hp"` keeps the weight's gradient in the
            compute dtype; `"mxfp8_floor"` rounds scales down, which loses 1 to 2 dB. `"mxfp8_cublas"` and
            `"mxfp8_cublas_rceil"` are older names of the last and the first. `"auto"` is MXFP8 on Blackwell and Float8
            (rowwise) on Ada and Hopper.
        filter_fqns: Patterns of modules that stay as they are; see `LowPrecision`.
        emulate: Compute the numbers of the recipe with ordinary products.
        linears: Whether linear maps are converted.
        grouped_experts: Whether the grouped products of experts are.
        pad: What the rows of each expert are filled up to a multiple of; None for 128 on Blackwell and 32 emulated.
        precision: Dtypes of everything else.
        activation_checkpointing: What each block keeps for its backward pass.
        compile: How the blocks are compiled; None for not at all.
        gradient_norm_type: Order of the gradient norm.

    Raises:
        ValueError: If the recipe is unknown, or `pad` is not a multiple of what it needs.
    """

    recipes = (*get_args(MXFP8Recipe), *OLD_NAMES, "auto")

    def __init__(
        self,
        recipe: MXFP8Recipe | Literal["auto", "mxfp8_cublas", "mxfp8_cublas_rceil"] = "mxfp8_rceil",
        filter_fqns: list[str] | None = None,
        emulate: bool = False,
        linears: bool = True,
        grouped_experts: bool = True,
        pad: int | None = None,
        precision: PrecisionName = "bf16-mixed",
        activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing(),
        compile: CompileConfig | None = None,
        gradient_norm_type: float = 2.0,
    ) -> None:
        if recipe in OLD_NAMES:
            rank_zero_info(f"recipe={recipe!r} is an older name of {OLD_NAMES[recipe]!r}.")
        super().__init__(
            recipe,
            filter_fqns,
            emulate,
            linears,
            grouped_experts,
            pad,
            precision,
            activation_checkpointing,
            compile,
            gradient_norm_type,
        )


class Float8Precision(LowPrecision):
    """Products in 8-bit floats with one scale for a tensor, or one for each row. For Ada, Hopper and Blackwell GPUs.

    Args:
        recipe: `"tensorwise"` is the fastest; its gradients are E5M2 (2 bits of mantissa). `"rowwise"` is more
            accurate: E4M3 throughout, scales that are powers of two. `"rowwise_with_gw_hp"` keeps the weight's gradient
            in the compute dtype.
        filter_fqns: Patterns of modules that stay as they are; see `LowPrecision`.
        emulate: Compute the numbers of the recipe with ordinary products.
        linears: Whether linear maps are converted.
        grouped_experts: Whether the grouped products of experts are. Off by default: on one H200 the row-wise kernel
            ran at 0.81 of the bf16 one's speed (16 experts, 16384 x 2048 x 4096).
        pad: What the rows of each expert are filled up to a multiple of; None for 16.
        float8_all_gather: With the recipe `"tensorwise"`, let FSDP2 gather the weights of converted linear maps in
            Float8: half of the bytes, and the same numbers bit for bit. A weight that several modules share, and all
            weights of a run on one rank, are gathered as ever.
        precision: Dtypes of everything else.
        activation_checkpointing: What each block keeps for its backward pass.
        compile: How the blocks are compiled; None for not at all. Without, casting costs more than products gain.
        gradient_norm_type: Order of the gradient norm.

    Raises:
        ValueError: If the recipe is unknown, `pad` is not a multiple of what it needs, or `float8_all_gather` is asked
            of another recipe than "tensorwise".
    """

    recipes = get_args(Float8Recipe)

    def __init__(
        self,
        recipe: Float8Recipe = "tensorwise",
        filter_fqns: list[str] | None = None,
        emulate: bool = False,
        linears: bool = True,
        grouped_experts: bool = False,
        pad: int | None = None,
        float8_all_gather: bool = False,
        precision: PrecisionName = "bf16-mixed",
        activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing(),
        compile: CompileConfig | None = None,
        gradient_norm_type: float = 2.0,
    ) -> None:
        super().__init__(
            recipe,
            filter_fqns,
            emulate,
            linears,
            grouped_experts,
            pad,
            precision,
            activation_checkpointing,
            compile,
            gradient_norm_type,
        )
        if float8_all_gather and recipe != "tensorwise":
            raise ValueError(
                f"float8_all_gather=True: recipe={recipe!r} scales rows, and its backward pass needs other scales than "
                "its forward. Use recipe='tensorwise', or float8_all_gather=False."
            )
        if float8_all_gather and not linears:
            raise ValueError("float8_all_gather=True is for linear maps, and linears=False leaves them as they are.")
        self.float8_all_gather = float8_all_gather
        self._gathered: set[str] = set()

    @property
    @override
    def description(self) -> str:
        return f"{super().description}{', gathered in Float8' if self.float8_all_gather else ''}"

    @override
    def check_cpu_offload(self) -> None:
        if self.float8_all_gather:
            raise ValueError(
                "cpu_offload=True: the gathers of float8_all_gather=True start from parameters on the GPU. Turn one of "
                "them off."
            )

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        super().convert_module(module)
        if self.float8_all_gather and self._shards > 1:
            self._choose_gathered(module)
        return module

    @override
    def prepare_gathers(self, module: nn.Module, shards: dist.ProcessGroup) -> Callable[[], None]:
        weights = [child.weight for name, child in module.named_modules() if name in self._gathered]
        if not weights:
            return super().prepare_gathers(module, shards)
        return Float8AllGather(weights, shards, self.compute_dtype).refresh

    def _choose_gathered(self, module: nn.Module) -> None:
        """Note, here and in the manifest, whose weights are gathered in Float8: those that nothing else uses."""
        assert self.manifest is not None
        uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
        linears = (entry for entry in self.manifest.converted if entry.kind == "linear")
        chosen = [entry for entry in linears if uses[module.get_submodule(entry.name).weight] == 1]  # type: ignore[index]
        for entry in chosen:
            if entry.shape[0] % self._shards:
                raise ValueError(
                    f"float8_all_gather=True: data_parallel_shard_size={self._shards} does not divide the "
                    f"{entry.shape[0]} rows of {entry.name} on a rank. Name it in filter_fqns, or set "
                    "float8_all_gather=False."
                )
        self._gathered = {entry.name for entry in chosen}
        entries = [
            replace(entry, recipe=f"{entry.recipe}, gathered in Float8") if entry.name in self._gathered else entry
            for entry in self.manifest.entries
        ]
        self.manifest = replace(self.manifest, entries=entries)


@rank_zero_only
def _write_on_rank_zero(manifest: Manifest, path: Path) -> None:
    manifest.write(path)


def _candidates(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that multiply matrices in a way that can be replaced."""
    for name, module in root.named_modules():
        if isinstance(module, nn.Linear) or hasattr(module, "grouped_mm"):
            yield name, module


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _folded(names: Mapping[str, nn.Module]) -> list[str]:
    """The names, each kind of layer once."""
    parts = (name.split(".") for name in names)
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name) for name in parts))
