"""Lightning's precision flags -> the FSDP2-aware plugin."""

from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision

from precision_plugins import TitanPrecision


def titan_precision(plugin: Precision) -> TitanPrecision:
    """The `TitanPrecision` that does what `plugin` says.

    Raises:
        ValueError: If the strategy cannot do it; the message lists what it can.
    """
    if isinstance(plugin, TitanPrecision):
        return plugin
    # Exact types: a subclass may do anything, and must not be replaced silently.
    if type(plugin) is Precision:
        return TitanPrecision("32-true")
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return TitanPrecision("bf16-true")
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return TitanPrecision("bf16-mixed")
    raise ValueError(
        f"precision={plugin.precision!r} ({type(plugin).__name__}): TitanStrategy supports '32-true', 'bf16-true', "
        "'bf16-mixed' and the classes of precision_plugins."
    )
