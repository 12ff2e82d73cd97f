"""Bringing a layer's parameters to where they are needed: checkpoints today."""

from .checkpoint import Checkpoint, check_layers, load_layer, open_checkpoint, save_checkpoint

__all__ = [
    "Checkpoint",
    "open_checkpoint",
    "check_layers",
    "load_layer",
    "save_checkpoint",
]
