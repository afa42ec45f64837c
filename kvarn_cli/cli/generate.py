"""`kvarn generate`."""

from dataclasses import asdict
from typing import Annotated

import typer

from kvarn_cli.cli import options
from kvarn_cli.cli.console import Console

_LARGEST_SEED = 2**32 - 1


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Local folder or Hub id, converted; with --preset, any supported model.",
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to say to the model.")],
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Cache settings, e.g. k2v2_g128; else those of the conversion."
        ),
    ] = None,
    encoder: Annotated[
        options.EncoderName | None,
        typer.Option(
            help="How tiles are packed; else as the conversion says, or reference.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-n", metavar="N", min=1, help="Stop here at the latest."),
    ] = 256,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=_LARGEST_SEED, help="Sample, with this seed; else greedy."
        ),
    ] = None,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Continue the prompt as plain text.")
    ] = False,
    device: options.Device = "auto",
    dtype: options.ComputeDtype = "auto",
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Generate text with the KV cache packed."""
    with Console(as_json=as_json, quiet=quiet) as console:
        console.reading(model)

        from kvarn_cli.generation import generate_text
        from kvarn_cli.quantization.saturation import saturation_sentence

        generation = generate_text(
            model,
            prompt,
            preset=preset,
            encoder=encoder.value if encoder else None,
            max_new_tokens=max_new_tokens,
            chat_template=not ignore_chat_template,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            on_text=lambda text: console.result(text, end=""),
        )
        console.result()
        share = generation.cache_bytes / generation.sixteen_bit_cache_bytes
        console.note(
            f"{generation.new_tokens} tokens after {generation.prompt_tokens} of prompt, "
            f"{generation.tokens_per_second:.1f} tokens/s; cache {generation.cache_dtype}, "
            f"{generation.encoder} encoder: "
            f"{generation.cache_bytes:,} bytes, {share:.0%} of a 16-bit cache "
            f"({generation.sixteen_bit_cache_bytes:,})"
        )
        if generation.saturated_scales:
            console.note(f"warning: {saturation_sentence(generation.saturated_scales)}")
        console.document(asdict(generation) | {"tokens_per_second": generation.tokens_per_second})
