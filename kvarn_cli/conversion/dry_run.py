"""What `kvarn convert --dry-run` says: the plan, what it costs, and how to run the result."""

from dataclasses import asdict
from pathlib import Path

from kvarn_cli.checkpoint.disk_space import measure_write_speed
from kvarn_cli.checkpoint.output_folder import existing_parent
from kvarn_cli.checkpoint.shard_stream import plan_shard
from kvarn_cli.conversion.backends import backend_commands
from kvarn_cli.conversion.patches import conversion_patches
from kvarn_cli.conversion.plan import ConversionPlan
from kvarn_cli.model.proof import Proof
from kvarn_cli.runtime.coverage import architecture_of

CONTEXT_LENGTHS = (32_768, 131_072)


def plan_summary(plan: ConversionPlan, output: Path | None) -> dict[str, object]:
    """The plan as JSON-ready data.

    Args:
        plan: from headers alone.
        output: where the result would go; its disk's speed is measured with a 64 MiB file, which
            is removed again. None measures the current folder's.
    """
    checkpoint, settings, cache = plan.checkpoint, plan.settings, plan.cache
    patches = conversion_patches(checkpoint, plan.layout, plan.dtype)
    shards = {name: plan_shard(header, patches) for name, header in checkpoint.shards.items()}
    sidecar_bytes = sum((checkpoint.folder / path).stat().st_size for path in checkpoint.sidecars)
    bytes_written = sum(shard.size_bytes for shard in shards.values()) + sidecar_bytes
    speed = measure_write_speed(existing_parent(output) if output else Path.cwd())
    return {
        "model": plan.source.name,
        "revision": plan.source.revision,
        "architecture": architecture_of(plan.config),
        "cache_dtype": settings.cache_dtype,
        "encoder": settings.encoder,
        "rotation": "fused" if plan.layout else "online",
        "not_fused": plan.not_fused,
        "dtype": plan.dtype,
        "proof": plan.proof and _numbers(plan.proof),
        "head_dim": cache.head_dim,
        "rope_dim": cache.rope_dim,
        "record_bytes": settings.record_bytes(*cache.widths),
        "bits_per_element": settings.bits_per_element(*cache.widths),
        "layers_covered": list(cache.covered),
        "layers_left_out": [
            {"layer": layer.index, "reason": layer.reason} for layer in cache.left_out
        ],
        "tensors_rotated": list(plan.rotated_tensors),
        "tensors_cast": sorted(patches.keys() - set(plan.rotated_tensors)),
        "bytes_rotated": sum(checkpoint.info(n).size_bytes for n in plan.rotated_tensors),
        "bytes_read": checkpoint.shard_bytes + sidecar_bytes,
        "bytes_written": bytes_written,
        "disk_bytes_per_second": speed,
        "seconds_at_that_speed": bytes_written / speed if speed else None,
        "header_requests": plan.header_requests,
        "header_bytes_received": plan.header_bytes_received,
        "files": sorted([*checkpoint.shards, *map(str, checkpoint.sidecars)]),
        "files_left_out": [
            {"path": str(path), "reason": reason} for path, reason in checkpoint.left_out
        ],
        "cache_bytes_per_token": {
            "packed": plan.packed_bytes_per_token,
            "float16": plan.sixteen_bit_cache_bytes(1),
        },
        "cache_bytes": {
            str(length): {
                "packed": plan.cache_bytes(length),
                "float16": plan.sixteen_bit_cache_bytes(length),
            }
            for length in CONTEXT_LENGTHS
        },
        "backends": [
            asdict(command)
            for command in backend_commands(settings, cache.head_dim, str(output or "DIR"))
        ],
    }


def _numbers(proof: Proof) -> dict[str, object]:
    return {name: value for name, value in asdict(proof).items() if name != "attention_kinds"}
