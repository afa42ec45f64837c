"""Recognise weights that are quantized already, by configuration and by tensors.

A rotation needs plain numbers: rotating codes without their scales, or scales without their codes,
breaks a model. So such a checkpoint keeps its weights as they are, and V is rotated online.
"""

from collections.abc import Mapping
from typing import Any

_DESCRIPTIONS = ("quantization_config", "compression_config")
_METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "fbgemm_fp8": "FBGEMM FP8",
    "gptq": "GPTQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}
_CODE_DTYPES = {
    "I8",
    "U8",
    "I32",
    "U32",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
}
_PACKED_ENDINGS = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_scale_2": "ModelOpt NVFP4",
    "_blocks": "MXFP4",
}


def quantized_format(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """Name the format of quantized weights, with the place that shows it.

    Args:
        config: config.json; a configuration nested in it is looked at too.
        dtypes: safetensors' name of each tensor's dtype, such as `BF16`, by tensor name.

    Returns:
        None for plain weights.
    """
    nested = [value for value in config.values() if isinstance(value, dict)]
    for block in (config, *nested):
        for key in _DESCRIPTIONS:
            described = block.get(key)
            if isinstance(described, dict) and described:
                return f"{_name(described)} ({key})"
    for tensor, dtype in dtypes.items():
        for ending, name in _PACKED_ENDINGS.items():
            if tensor.endswith(ending) and dtype not in {"BF16", "F16", "F64"}:
                return f"{name} ({tensor})"
    for tensor, dtype in dtypes.items():
        if tensor.endswith(".weight") and dtype in _CODE_DTYPES:
            return f"{dtype} ({tensor})"
    return None


def _name(described: Mapping[str, Any]) -> str:
    method = described.get("quant_method") or described.get("quant_algo")
    nested = described.get("quantization")
    if not method and isinstance(nested, dict):
        method = nested.get("quant_algo")
    method = method or "unnamed"
    name = _METHODS.get(str(method).lower(), str(method))
    details = described.get("quant_algo") or described.get("fmt") or described.get("format")
    return f"{name} {details}" if details and str(details) != str(method) else name
