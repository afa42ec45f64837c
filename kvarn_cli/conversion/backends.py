"""How public engines are told to use a KVarN cache, as far as their sources say.

Read in their public repositories in summer and autumn 2026; none of them was run here. Every one
rotates V itself, whether the checkpoint is fused or not, which a fused checkpoint allows.
"""

from dataclasses import dataclass

from kvarn_cli.settings import KVarNSettings

_WIDE = (128, 256, 512)
_LATENT = 512
_LAB_FORKS = "vLLM forks of local-inference-lab and JMPSequeira"


@dataclass(frozen=True)
class BackendCommand:
    """One engine.

    Attributes:
        backend: its name.
        command: what to run, or the switches to pass; None where it does not take these settings.
        note: what else to know, or why it does not take them.
    """

    backend: str
    command: str | None
    note: str


def backend_commands(
    settings: KVarNSettings, head_dim: int, folder: str
) -> tuple[BackendCommand, ...]:
    """What each known engine needs to run a converted folder.

    Args:
        settings: of the quantizer.
        head_dim: channels of a head, or of the latent.
        folder: the converted model, as the user calls it.
    """
    if settings.latent:
        return _latent_commands(settings, head_dim, folder)
    key, value, group = settings.key_bits, settings.value_bits, settings.group_size
    bits = (key, value)
    serve = f"vllm serve {folder} --kv-cache-dtype {settings.cache_dtype}"
    vllm = f"{serve} --block-size {group} --dtype float16"
    return (
        BackendCommand("kvarn", f'kvarn generate {folder} "…"', "this tool's own packed cache"),
        _if(
            "vLLM fork huawei-csl/KVarN",
            vllm,
            "--dtype bfloat16 works too",
            {
                "takes k4v2 and k4v4": bits in ((4, 2), (4, 4)),
                "takes groups of 64 and 128": group in (64, 128),
                "takes head_dim 128, 256, 512": head_dim in _WIDE,
            },
        ),
        _if(
            "vLLM fork ytwang13/KVarN-FP",
            vllm,
            "the fork above with k2v2 besides",
            {
                "takes k2v2, k4v2 and k4v4": bits in ((2, 2), (4, 2), (4, 4)),
                "takes groups of 64 and 128": group in (64, 128),
                "takes head_dim 128, 256, 512": head_dim in _WIDE,
            },
        ),
        _if(
            _LAB_FORKS,
            serve,
            "the newest 1,024 tokens stay exact; which head_dim they take was not read",
            {
                "take k4v2 and k4v4": bits in ((4, 2), (4, 4)),
                "take groups of 64 and 128": group in (64, 128),
            },
        ),
        _if(
            "BeeLlama.cpp",
            f"--cache-type-k kvarn{key} --cache-type-v kvarn{value}",
            "convert the folder to GGUF first; ordinary llama.cpp builds do not know these types",
            {
                "takes groups of 128": group == 128,
                "takes head_dim 128, 256, 512": head_dim in _WIDE,
            },
        ),
        _if(
            "gmlx",
            f"GMLX_KVARN_BITS=k{key}v{value} and --kv-quant-scheme kvarn",
            "convert the folder to MLX first; its own default is 6 bits",
            {
                "takes groups of 128": group == 128,
                "takes head_dim 128, 256, 512": head_dim in _WIDE,
            },
        ),
        _if(
            "ninfer",
            "--kv-dtype kvarn",
            "its record is k4v2",
            {
                "takes k4v2_g128": (*bits, group) == (4, 2, 128),
                "takes head_dim 256": head_dim == 256,
            },
        ),
    )


def _latent_commands(
    settings: KVarNSettings, latent_dim: int, folder: str
) -> tuple[BackendCommand, ...]:
    """The same for models that cache a latent."""
    command = f"vllm serve {folder} --kv-cache-dtype {settings.cache_dtype}"
    return (
        BackendCommand("kvarn", f'kvarn generate {folder} "…"', "this tool's own packed cache"),
        _if(
            "vLLM fork huawei-csl/KVarN",
            f"{command} --block-size {settings.group_size} --dtype bfloat16",
            "16 iterations; --dtype float16 works too",
            {
                "takes mla_k4": settings.key_bits == 4,
                "takes groups of 128": settings.group_size == 128,
                "takes latents of 512 channels": latent_dim == _LATENT,
            },
        ),
        _if(
            _LAB_FORKS,
            command,
            "listed by their backend for sparse attention; the newest 1,024 tokens stay exact; "
            "which latents they take was not read",
            {"take groups of 64 and 128": settings.group_size in (64, 128)},
        ),
    )


def _if(backend: str, command: str, note: str, needs: dict[str, bool]) -> BackendCommand:
    unmet = [need for need, met in needs.items() if not met]
    if unmet:
        return BackendCommand(backend, None, "; ".join(unmet))
    return BackendCommand(backend, command, note)
