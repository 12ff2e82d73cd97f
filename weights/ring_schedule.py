"""The plan of a ring: which layer is used, which is fetched, and into which slot, at every step."""

from typing import NamedTuple

from sfa_functional.precision import require
from sharding import layer_owners


class RingStep(NamedTuple):
    """One use of a layer. Layers are global numbers; the fetch is issued before the layer is used."""

    layer: int  # used in this step
    slot: int  # where it lies
    fetch_layer: int | None  # fetched from this step on, for a later one (for this one where prefetch is 0)
    fetch_slot: int | None
    owner: int | None  # rank that sends fetch_layer


def ring_schedule(
    num_layers: int,
    *,
    start_layer: int = 0,
    prefetch: int = 1,
    num_ranks: int = 1,
    passes: int = 1,
    wrap: bool = True,
) -> tuple[RingStep, ...]:
    """Plan a ring of ``min(prefetch + 1, n)`` slots through which n layers pass, again and again.

    In step i layer ``start + i mod n`` is used; the layer of step ``i + prefetch``,
    ``start + (layer - start + prefetch) mod n``, is fetched into the slot that step ``i - 1`` has left. The first
    ``min(prefetch, n)`` layers are there at step 0. A layer that already lies in its slot is not fetched: with
    ``n = prefetch + 1`` each is fetched once, with fewer layers all are there from the start.

    Args:
        num_layers: n, >= 1.
        start_layer: global number of the first layer, >= 0; a stage of a pipeline starts in the middle.
        prefetch: how many steps ahead a layer is fetched, >= 0; 0 fetches it when it is needed.
        num_ranks: ranks among which the layers are dealt out by `layer_owners`.
        passes: how often all layers are used, >= 1.
        wrap: the last steps fetch the first layers again, for another pass; False stops at the last layer.

    Returns:
        One step per use, n · passes in all. Every rank has the same.

    Raises:
        ValueError: a number out of range.

    Source: the layer-sharded weights of vllm-project/vllm-ascend, whose ``(layer + prefetch) mod n + start`` is right
        only where start is a multiple of n.
    """
    counts = (("num_layers", num_layers, 1), ("prefetch", prefetch, 0), ("passes", passes, 1))
    for name, value, least in counts:
        whole = type(value) is int and value >= least
        require(whole, "ring_schedule", f"{name} must be an integer >= {least}", repr(value))
    owners = layer_owners(num_layers, num_ranks, start_layer=start_layer)
    return tuple(
        ring_step(i, num_layers, start_layer, prefetch, owners, last=None if wrap else num_layers * passes)
        for i in range(num_layers * passes)
    )


def num_slots(num_layers: int, prefetch: int) -> int:
    """Return how many slots a ring has: one in use and one per layer ahead, never more than layers."""
    return min(prefetch + 1, num_layers)


def ring_step(
    step: int, num_layers: int, start_layer: int, prefetch: int, owners: tuple[int, ...], *, last: int | None
) -> RingStep:
    """Return one step of a ring that goes on for ever, or to ``last`` steps; `ring_schedule` checks the numbers."""
    slots = num_slots(num_layers, prefetch)
    place, ahead = step % num_layers, step + prefetch
    used = start_layer + place, step % slots
    resident = prefetch >= num_layers or (prefetch == num_layers - 1 and ahead >= num_layers)
    if resident or (last is not None and ahead >= last):
        return RingStep(*used, None, None, None)
    fetched = ahead % num_layers
    return RingStep(*used, start_layer + fetched, ahead % slots, owners[fetched])
