"""Bytes on disk: resolve a source, read headers and the index, copy and patch. No mathematics."""
