from kvarn_process import assert_refused, run_kvarn


def test_a_converted_model_continues_a_prompt(converted):
    outcome = run_kvarn("generate", converted, "Why is the sky blue?", "-n", "5")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.strip()
    assert "5 tokens after " in outcome.stderr
    assert "cache kvarn_k4v4_g32, reference encoder: " in outcome.stderr
    assert "of a 16-bit cache" in outcome.stderr


def test_json_tells_the_text_and_the_bytes_of_a_long_prompt(llama):
    options = ["--preset", "k2v2_g32", "--dtype", "bfloat16", "-n", "3", "--ignore-chat-template"]
    options += ["--encoder", "refined"]
    outcome = run_kvarn("generate", llama, "hello " * 250, *options, "--seed", "7", "--json", "-q")
    assert outcome.stderr == ""
    document = outcome.data
    assert document.keys() == {
        "text",
        "prompt_tokens",
        "new_tokens",
        "elapsed_seconds",
        "tokens_per_second",
        "cache_dtype",
        "encoder",
        "saturated_scales",
        "cache_bytes",
        "sixteen_bit_cache_bytes",
    }
    assert document["cache_dtype"] == "kvarn_k2v2_g32"
    assert document["encoder"] == "refined"
    assert document["saturated_scales"] == {}
    assert document["prompt_tokens"] > 700
    assert document["new_tokens"] == 3
    assert document["tokens_per_second"] > 0
    assert document["cache_bytes"] < 0.5 * document["sixteen_bit_cache_bytes"]


def test_an_original_model_needs_a_preset(llama):
    outcome = run_kvarn("generate", llama, "hi")
    assert_refused(outcome, 2, "llama is not converted", "hint: convert it, or pass --preset")
