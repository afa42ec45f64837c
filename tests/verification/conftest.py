"""The model of the room."""

from sharded_model import model

__all__ = ["model"]
