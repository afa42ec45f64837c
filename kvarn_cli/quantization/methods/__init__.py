"""One short class per method, and the specs that name them."""

from collections.abc import Callable
from dataclasses import fields

from kvarn_cli.errors import SettingsError
from kvarn_cli.quantization.methods.base import Method
from kvarn_cli.quantization.methods.exact import Exact
from kvarn_cli.quantization.methods.kivi import KIVI
from kvarn_cli.quantization.methods.kvarn import KVarN
from kvarn_cli.quantization.methods.quarot import QuaRot
from kvarn_cli.settings import KVarNSettings

METHODS: dict[str, type[Method]] = {method.name: method for method in (Exact, KVarN, QuaRot, KIVI)}

__all__ = ["KIVI", "METHODS", "Exact", "KVarN", "Method", "QuaRot", "parse_method"]


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
    values: dict[str, object] = {}
    if preset:
        named = KVarNSettings.from_name(preset)
        values = {key: getattr(named, key) for key in ("key_bits", "value_bits", "group_size")}
    defaults = {field.name: field.default for field in fields(method)}
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
