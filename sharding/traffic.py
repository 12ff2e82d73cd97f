"""What a rank sends and receives in one layer, collective by collective: arithmetic on sizes."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from sfa_functional import SFAConfig
from sfa_functional.params import NORM_FIELDS, param_shapes
from sfa_functional.precision import wide

from .rules import LARGE_FIELDS

WeightStrategy = Literal["replicated", "layer-sharded", "gathered", "exchanged"]

ALIGNMENT = 64
"""Bytes between the starts of tensors in a ring's slot (`weights.ring_buffer`)."""


class Traffic(NamedTuple):
    """One rank's part in one collective."""

    what: str  # "keys", a matrix, "layer", "values", "sums" or "heads"
    collective: str
    axis: str
    bytes_sent: int
    bytes_received: int


def collective_traffic(
    what: str, collective: str, axis: str, size: int, count: int, itemsize: int, *, is_source: bool = False
) -> Traffic:
    """Count what a rank sends and receives at least: each byte once to each rank that needs it and does not have it.

    Args:
        what: the name it is to have.
        collective: one of `Collectives`, but "broadcast" is one-sided.
        axis: over which mesh axis.
        size: N, ranks of the axis.
        count: values that the rank brings.
        itemsize: bytes of a value.
        is_source: of a broadcast.

    Returns:
        `Traffic`. An all_gather sends what the rank brings N - 1 times; reduce_scatter and all_to_all send the other
        ranks' parts of it; an all_reduce is a reduce_scatter and an all_gather of its N-th part, rounded up; a
        broadcast sends from its source alone.

    Source: the least that each of them can move; Thakur et al., "Optimization of Collective Communication Operations
        in MPICH" (2005).
    """
    match collective:
        case "all_gather":
            sent = received = count * itemsize * (size - 1)
        case "reduce_scatter" | "all_to_all":
            sent = received = count * itemsize // size * (size - 1)
        case "all_reduce":
            sent = received = 2 * -(-count // size) * itemsize * (size - 1)
        case "broadcast":
            sent = count * itemsize * (size - 1) if is_source else 0
            received = 0 if is_source or size == 1 else count * itemsize
        case _:
            raise ValueError(f"collective_traffic: there is no collective {collective!r}")
    return Traffic(what, collective, axis, sent, received)


def token_axis_traffic(
    config: SFAConfig,
    *,
    axis: str,
    size: int,
    rows: int,
    indexer: bool,
    weights: WeightStrategy,
    dtype: torch.dtype,
    is_owner: bool,
) -> list[Traffic]:
    """List what `context_parallel_layer`, and the fetch of one layer, move over the tokens' axis.

    Args:
        config: the model's sizes; heads of this rank, where they are dealt out over another axis.
        axis: the tokens'.
        size: N.
        rows: C, rows of each rank, padding included.
        indexer: whether the layer has one: its keys then travel too.
        weights: how the layer's matrices come here.
        dtype: of activations and matrices.
        is_owner: whether this rank is the one that keeps the layer, and sends it, for "layer-sharded".

    Returns:
        In the order in which they start: keys, then weights, then what happens to results.
    """
    itemsize = dtype.itemsize
    shapes = param_shapes(config, layer=config.indexer_types.index("full" if indexer else "shared"))
    heads_width = config.num_attention_heads * config.v_head_dim
    moved = [("keys", "all_gather", rows * (config.key_width + (config.index_head_dim if indexer else 0)), itemsize)]
    match weights:
        case "layer-sharded":
            moved.append(("layer", "broadcast", layer_bytes(shapes, dtype, aligned=True), 1))
        case "gathered":
            flat = {name: -(-math.prod(shapes[name]) // size) for name in LARGE_FIELDS}
            moved += [(name, "all_gather", count, itemsize) for name, count in flat.items()]
        case "exchanged":
            moved.append(("values", "all_to_all", rows * heads_width, itemsize))
            moved.append(("sums", "reduce_scatter", size * rows * config.hidden_size, itemsize))
    return [
        collective_traffic(what, how, axis, size, count, item, is_source=is_owner) for what, how, count, item in moved
    ]


def layer_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, aligned: bool = False) -> int:
    """Return the bytes of a layer's parameters; with ``aligned``, as they lie in a ring's slot."""
    count = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * (wide(dtype) if name in NORM_FIELDS else dtype).itemsize
        count += -(-size // ALIGNMENT) * ALIGNMENT if aligned else size
    return count
