"""A planned and a finished conversion in words."""

import shlex
from typing import TYPE_CHECKING, Any

from kvarn_cli.cli.console import Console

if TYPE_CHECKING:
    from kvarn_cli.conversion.plan import ConversionPlan
    from kvarn_cli.conversion.run import Conversion
    from kvarn_cli.metadata import Calibration, ProofRecord
    from kvarn_cli.model.cache_layout import CacheLayout


def show_plan(console: Console, plan: "ConversionPlan", summary: dict[str, Any]) -> None:
    """Print what a conversion would do.

    Args:
        console: where to.
        plan: of the conversion.
        summary: the same as data, see `plan_summary`.
    """
    settings, cache = plan.settings, plan.cache
    where = f"fused into {len(plan.rotated_tensors)} tensors" if plan.layout else "online"
    if plan.not_fused is not None:
        where += f", not fused: {plan.not_fused}"
    per_token = summary["cache_bytes_per_token"]
    lines = {
        "model": f"{plan.source.name} ({summary['architecture']})",
        "cache": f"{settings.cache_dtype}, {summary['record_bytes']:,} bytes a record, "
        f"{summary['bits_per_element']:.4g} bits an element, {settings.encoder} encoder",
        "layers": f"{len(cache.covered)} of {len(cache.covered) + len(cache.left_out)} covered, "
        + _cached(cache),
        "rotation" if plan.cache.rope_dim is not None else "rotation of V": where,
        "weights": f"{len(plan.checkpoint.shards)} files, {plan.checkpoint.shard_bytes:,} bytes; "
        f"{summary['bytes_rotated']:,} of them change",
        "read, written": f"{summary['bytes_read']:,} and {summary['bytes_written']:,} bytes",
        "cache a token": f"{per_token['packed']:,.0f} bytes, float16 takes "
        f"{per_token['float16']:,}",
    }
    if plan.proof is not None:
        lines["proof"] = (
            f"fusion moves {_proven_outputs(plan.proof.checked)} by "
            f"{plan.proof.largest_difference:.1e} of the largest (allowed "
            f"{plan.proof.tolerance:.0e})"
        )
    for length, sizes in summary["cache_bytes"].items():
        lines[f"cache at {int(length) // 1024}k"] = (
            f"{sizes['packed'] / 2**20:,.1f} MiB, float16 takes {sizes['float16'] / 2**20:,.1f} MiB"
        )
    if summary["tensors_cast"]:
        lines["cast"] = f"{len(summary['tensors_cast'])} more tensors to {plan.torch_dtype}"
    if summary["seconds_at_that_speed"] is not None:
        lines["writing"] = (
            f"about {summary['seconds_at_that_speed']:,.0f} s at the "
            f"{summary['disk_bytes_per_second'] / 1e6:,.0f} MB/s that this disk took just now"
        )
    if plan.header_requests:
        lines["headers"] = (
            f"{plan.header_requests} range requests, {plan.header_bytes_received:,} bytes"
        )
    for name, text in lines.items():
        console.result(f"{name:14} {text}")
    for layer in cache.left_out:
        console.result(f"left out       layer {layer.index}: {layer.reason}")
    for path, reason in plan.checkpoint.left_out:
        console.result(f"not copied     {path}: {reason}")
    console.result("How engines are told, as their public sources say (none was run here):")
    for backend in summary["backends"]:
        told = backend["command"] or f"does not take this; it {backend['note']}"
        console.result(f"  {backend['backend']}: {told}")


def _cached(cache: "CacheLayout") -> str:
    if cache.rope_dim is not None:
        return f"a latent of {cache.head_dim} and a RoPE key of {cache.rope_dim} channels"
    heads = " or ".join(map(str, sorted(set(cache.kv_heads.values()))))
    return f"{heads} KV heads of {cache.head_dim}"


def show_conversion(console: Console, conversion: "Conversion") -> None:
    """Print what a conversion found and wrote."""
    metadata = conversion.metadata
    for warning in conversion.warnings:
        console.result(f"warning: {warning}")
    if metadata.proof is not None:
        console.result(_proof_line(metadata.proof))
    if metadata.calibration is not None:
        _show_calibration(console, metadata.calibration)
    value = metadata.rotations.value
    if value.not_fused is not None:
        console.result(
            f"The rotation of {metadata.rotated} is left to the engine: {value.not_fused}"
        )
    console.result(f"Wrote {conversion.output} ({metadata.cache.dtype})")
    folder = shlex.quote(str(conversion.output))
    console.note(f'Try it: kvarn generate {folder} "Why is the sky blue?"')


def _proven_outputs(checked: str) -> str:
    if checked == "model":
        return "the logits of a random float64 instance"
    return "the outputs of the attention modules alone, random and in float64,"


def _proof_line(proof: "ProofRecord") -> str:
    return (
        f"Proof: fusion moves {_proven_outputs(proof.checked)} by "
        f"{proof.instance_difference:.1e} of the largest (allowed {proof.instance_tolerance:.0e}); "
        f"any one tensor left out, by {proof.smallest_control:.2f} or more. "
        f"Rounding changes the real attention output by {proof.weight_change:.1e}."
    )


def _show_calibration(console: Console, calibration: "Calibration") -> None:
    console.table(
        ["engine", "encoder", "KL", "top-1", "loss", "original", "attention MAE"],
        [
            [
                errors.engine,
                errors.encoder,
                f"{errors.kl_mean:.4f}",
                f"{errors.top1_agreement:.2%}",
                f"{errors.loss_quantized:.4f}",
                f"{errors.loss_original:.4f}",
                f"{errors.attention_mae:.4f}",
            ]
            for errors in calibration.engines
        ],
        title=f"Against the original: {calibration.num_samples} windows of "
        f"{calibration.sequence_length} tokens, {calibration.dataset}",
    )
    for miss in calibration.misses:
        console.result(f"missed: {miss}")
