"""Pure tensor mathematics of KV-cache quantizers: no files, no models.

A K tile is `[head_dim, group_size]` (rows are channels), a V tile `[group_size, head_dim]` (rows
are tokens): each row has a scale and a zero point of its own.
"""
