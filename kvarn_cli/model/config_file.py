"""What a config.json must not hold, checked before transformers acts on it.

transformers turns some counts into lists as soon as it reads them, so a lying one takes all memory
or hours before anything can refuse it.
"""

import re
from pathlib import Path
from typing import Any

from kvarn_cli.checkpoint.strict_json import quoted, read_object
from kvarn_cli.errors import CheckpointError

MAX_COUNT = 10_000
"""Of layers, labels or experts; the largest public models have a few hundred of each."""

_COUNTS = re.compile(r"(layers?|labels|experts)$")


def check_config_file(path: Path) -> None:
    """Refuse a config.json whose values transformers could not survive.

    Raises:
        CheckpointError: the file is no JSON object, a count in it is absurd, or a description of
            quantized weights is no object.
    """
    document = read_object(path)
    pending: list[Any] = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
            for key, count in value.items():
                if _COUNTS.search(key) and isinstance(count, int | float) and count > MAX_COUNT:
                    raise CheckpointError(
                        f"{path}: {quoted(key)} is above {MAX_COUNT}, more than any model has"
                    )
    for key in ("quantization_config", "compression_config"):
        if not isinstance(document.get(key), dict | None):
            raise CheckpointError(f"{path}: {key} must be an object")
