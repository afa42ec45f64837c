"""The `kvarn_config` block of a finished conversion."""

from collections.abc import Iterable

from kvarn_cli import __version__
from kvarn_cli.conversion.plan import ConversionPlan
from kvarn_cli.metadata import (
    Application,
    BaseModelReference,
    CacheFormat,
    Calibration,
    FoldedNormRecord,
    KVarNConfig,
    Layers,
    LeftOutLayer,
    ProofRecord,
    RotatedTensor,
    Rotation,
    Rotations,
)
from kvarn_cli.model.layout import HeadSlices, ModelLayout
from kvarn_cli.quantization.hadamard import bent_signs


def describe(
    plan: ConversionPlan, proof: ProofRecord | None, calibration: Calibration | None
) -> KVarNConfig:
    """Describe the converted model completely enough to rebuild every matrix."""
    head_dim = plan.cache.head_dim
    latent = plan.cache.rope_dim is not None
    attention = list(plan.attention_modules)
    output = [path for path in plan.attention_modules.values() if path is not None]
    return KVarNConfig(
        kvarn_version=__version__,
        base_model=BaseModelReference(
            name=plan.source.name,
            revision=plan.source.revision,
            index_sha256=plan.checkpoint.index_sha256,
        ),
        cache=CacheFormat.from_settings(plan.settings, head_dim, plan.cache.rope_dim),
        layers=Layers(
            covered=list(plan.cache.covered),
            left_out=[
                LeftOutLayer(layer=layer.index, reason=layer.reason)
                for layer in plan.cache.left_out
            ],
        ),
        rotations=Rotations(
            key=None
            if latent
            else Rotation(
                signs=None,
                head_dim=head_dim,
                where="online",
                apply=[
                    Application(targets=attention, location="q_attn"),
                    Application(targets=attention, location="k_cache"),
                ],
            ),
            value=_fused_rotation(plan.layout)
            if plan.layout
            else Rotation(
                signs=None,
                head_dim=head_dim,
                where="online",
                apply=[
                    Application(
                        targets=attention, location="latent_cache" if latent else "v_cache"
                    ),
                    Application(targets=output, location="input", inverse=True),
                ],
                not_fused=plan.not_fused,
            ),
        ),
        proof=proof,
        calibration=calibration,
    )


def _fused_rotation(layout: ModelLayout) -> Rotation:
    value = [heads for layer in layout.layers for heads in layer.value]
    output = [layer.output for layer in layout.layers]
    return Rotation(
        signs="".join("+" if sign > 0 else "-" for sign in bent_signs(layout.head_dim).tolist()),
        head_dim=layout.head_dim,
        where="fused",
        apply=[
            Application(targets=_modules(value), location="weight_output"),
            Application(targets=_modules(output), location="weight_input", inverse=True),
        ],
        tensors={
            heads.tensor: RotatedTensor(axis=heads.axis, first_channels=list(heads.starts))
            for heads in (*value, *output)
        },
        folded_norms={
            layer.norm.tensor: FoldedNormRecord(into=layer.output.tensor, unit=layer.norm.unit)
            for layer in layout.layers
            if layer.norm is not None
        },
    )


def _modules(parts: Iterable[HeadSlices]) -> list[str]:
    """Modules that own these tensors, each once."""
    return list(dict.fromkeys(map(_module, parts)))


def _module(part: HeadSlices) -> str:
    return part.tensor.rpartition(".")[0]
