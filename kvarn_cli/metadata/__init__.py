"""The metadata of a converted folder: the `kvarn_config` block, and the manifest."""

from kvarn_cli.metadata.base import FORMAT_VERSION
from kvarn_cli.metadata.config import (
    CONFIG_KEY,
    BaseModelReference,
    CacheFormat,
    KVarNConfig,
    Layers,
    LeftOutLayer,
)
from kvarn_cli.metadata.evidence import (
    Calibration,
    EngineErrors,
    ProofRecord,
    Thresholds,
)
from kvarn_cli.metadata.manifest import (
    MANIFEST_NAME,
    MODEL_CARD_NAME,
    FileRecord,
    HashName,
    Manifest,
)
from kvarn_cli.metadata.rotations import (
    Application,
    FoldedNormRecord,
    RotatedTensor,
    Rotation,
    Rotations,
)

__all__ = [
    "CONFIG_KEY",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "MODEL_CARD_NAME",
    "Application",
    "BaseModelReference",
    "CacheFormat",
    "Calibration",
    "EngineErrors",
    "FileRecord",
    "FoldedNormRecord",
    "HashName",
    "KVarNConfig",
    "Layers",
    "LeftOutLayer",
    "Manifest",
    "ProofRecord",
    "RotatedTensor",
    "Rotation",
    "Rotations",
    "Thresholds",
]
