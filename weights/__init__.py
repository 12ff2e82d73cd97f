"""Bringing a layer's parameters to where they are needed, in time. The public names, in reading order."""

from sfa_functional.quantize import dequantize_blocks

from .checkpoint import (
    Checkpoint,
    check_layers,
    load_layer,
    open_checkpoint,
    save_checkpoint,
)
from .manager import Ring, close_ring, open_ring, start_next, stream_layers, take
from .recompute import checkpoint_layer
from .ring_schedule import RingStep, ring_schedule
from .selections import load_selections, save_selections
from .show import show_ring
from .sources import (
    Fetch,
    LayerShard,
    Source,
    from_checkpoint,
    from_owners,
    from_shards,
    owned_layers,
    resident,
    shard_layer,
)

__all__ = [
    "Checkpoint",
    "open_checkpoint",
    "check_layers",
    "load_layer",
    "save_checkpoint",
    "dequantize_blocks",
    "RingStep",
    "ring_schedule",
    "Source",
    "Fetch",
    "resident",
    "from_checkpoint",
    "from_owners",
    "owned_layers",
    "from_shards",
    "LayerShard",
    "shard_layer",
    "Ring",
    "open_ring",
    "take",
    "start_next",
    "close_ring",
    "stream_layers",
    "checkpoint_layer",
    "show_ring",
    "save_selections",
    "load_selections",
]
