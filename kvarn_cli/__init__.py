"""Convert checkpoints for the KVarN KV cache, prove the conversion, and measure its error."""

__version__ = "0.1.0"
