"""A packed KV cache that transformers' `generate` takes."""
