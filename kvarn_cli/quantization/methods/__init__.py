"""One short class per method, and the specs that name them."""

from collections.abc import Callable
from dataclasses import fields

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.methods.ablation import Ablation
from kvarn_cli.quantization.methods.base import Method, PresetMethod
from kvarn_cli.quantization.methods.exact import Exact
from kvarn_cli.quantization.methods.fp8 import FP8
from kvarn_cli.quantization.methods.ggml_blocks import Q40, Q80
from kvarn_cli.quantization.methods.kivi import KIVI
from kvarn_cli.quantization.methods.kvarn import KVarN
from kvarn_cli.quantization.methods.kvquant import KVQuant
from kvarn_cli.quantization.methods.quarot import QuaRot
from kvarn_cli.quantization.methods.turboquant import TurboQuant
from kvarn_cli.settings import KVarNSettings

_ALL = (Exact, KVarN, Ablation, QuaRot, KIVI, KVQuant, TurboQuant, FP8, Q80, Q40)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "FP8",
    "KIVI",
    "METHODS",
    "Q40",
    "Q80",
    "Ablation",
    "Exact",
    "KVQuant",
    "KVarN",
    "Method",
    "QuaRot",
    "TurboQuant",
    "parse_method",
]


def parse_method(spec: str) -> Method:
    """Read `NAME[:PRESET][,key=value…]`, e.g. `kvarn:k2v2_g128,iterations=16`.

    Raises:
        SettingsError: unknown name, preset or option, or a value that does not fit.
    """
    head, *options = spec.split(",")
    name, _, preset = head.partition(":")
    method = METHODS.get(name)
    if method is None:
        raise SettingsError(
            f"unknown method {name!r} in {spec!r}", hint=f"methods: {', '.join(METHODS)}"
        )
    defaults = {field.name: field.default for field in fields(method) if field.compare}
    values: dict[str, object] = {}
    if preset:
        if not issubclass(method, PresetMethod):
            raise SettingsError(f"{name} has no presets: {spec!r}", hint=f"write {name}")
        named = KVarNSettings.from_name(preset)
        keys = ("key_bits", "value_bits", "group_size", "iterations")
        values = {key: getattr(named, key) for key in keys if key in defaults}
    for option in options:
        key, _, text = option.partition("=")
        if key not in defaults or not text:
            raise SettingsError(
                f"{option!r} in {spec!r} is no option of {name}",
                hint=f"write key=value; keys: {', '.join(defaults)}",
            )
        values[key] = _parsed(text, type(defaults[key]), option)
    return method(**values)  # type: ignore[arg-type]


def _parsed(text: str, kind: Callable[[str], object], option: str) -> object:
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        number = "whole number" if kind is int else "number"
        raise SettingsError(f"{option!r} needs a {number}") from None
