"""A ring of layers as a value: take the next layer, start the fetch of a later one."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from sfa_functional import LayerParams
from sfa_functional.precision import require

from .ring_buffer import make_slots, mark_written, slot_bytes, slot_views, spoil
from .ring_schedule import num_slots
from .sources import Fetch, Source


@dataclass(frozen=True, eq=False)
class Ring:
    """Layers that pass through a few slots; made by `open_ring`, used once: each function returns the next value."""

    state: "_State"
    generation: int

    @property
    def layer(self) -> int:
        """The layer that `take` returns next."""
        state = self.state
        return state.source.layers[state.step % len(state.source.layers)]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.state.slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots; what the source itself keeps is not counted."""
        return sum(slot.numel() for slot in self.state.slots)


def open_ring(
    source: Source, *, prefetch: int = 1, copy: bool = False, debug: bool = False, passes: int | None = None
) -> Ring:
    """Allocate the slots of a ring and start fetching its first layers.

    The plan is `ring_schedule`'s: ``min(prefetch + 1, n)`` slots, the first ``min(prefetch, n)`` layers fetched here.

    Args:
        source: where layers come from. On many ranks, all open it alike, take alike and start alike.
        prefetch: how many steps ahead a layer is fetched, >= 0.
        copy: `take` returns tensors of their own, which stay valid.
        debug: fill a slot with NaN as soon as its layer is no longer valid. One that is refilled at once (prefetch 0,
            or `start_next` right after `take`) may hold the next layer instead.
        passes: how often all layers will be taken; None is without end: the last steps fetch the first layers again.

    Returns:
        The ring, to be closed with `close_ring` (`stream_layers` does it itself).

    Raises:
        ValueError: no source, or a prefetch or a number of passes out of range.

    Cost: the slots' memory; returns without waiting for the layers.
    Source: the layer-sharded weights of vllm-project/vllm-ascend.
    """
    _require_openable(source, prefetch)
    known = passes is None or (type(passes) is int and passes >= 1)
    require(known, "open_ring", "passes must be an integer >= 1 or None", repr(passes))
    count = len(source.layers)
    size = max(slot_bytes(source.layout(layer), multiple=source.slot_multiple) for layer in source.layers)
    slots = make_slots(num_slots(count, prefetch) if size else 0, size, source.device)
    state = _State(source, slots, prefetch, copy, debug, None if passes is None else passes * count)
    for _ in range(min(prefetch, count)):
        state.start()
    return Ring(state, state.generation)


def take(ring: Ring, layer: int) -> tuple[LayerParams, Ring]:
    """Wait for the next layer and return its parameters.

    Args:
        ring: must not be used again.
        layer: global number; must be the next one of the series, so that a loop which lost count is found out.

    Returns:
        ``(params, ring)``. The parameters are views of a slot, valid until the next `take`; later, autograd raises
        where it still needs them, in torch's words: "modified by an inplace operation". Then run the layer by
        `checkpoint_layer`, or open the ring with ``copy=True``: copies stay valid.

    Raises:
        ValueError: a ring that was used already or is closed, another layer than the next, one that is past the last
            pass, or what a source refuses.
        RuntimeError: the fetch failed; the message names the layer. The ring can then only be closed.

    Gradients: none to the source: training takes layers through `checkpoint_layer`.
    """
    state = ring.state
    state.require_newest(ring, "take")
    state.require_next(layer)
    state.generation += 1
    params = state.take(layer)
    return params, Ring(state, state.generation)


def start_next(ring: Ring) -> Ring:
    """Start the next fetch, that of the layer ``prefetch`` steps after the one taken last.

    To be called while that layer is at work, once the link is free: after its key gather has started. `take` makes up
    for it where it was left out; a second call in one step does nothing.

    Args:
        ring: must not be used again.

    Returns:
        The ring.

    Raises:
        ValueError: a ring that was used already or is closed.
    """
    state = ring.state
    state.require_newest(ring, "start_next")
    state.generation += 1
    state.start_due()
    return Ring(state, state.generation)


def close_ring(ring: Ring) -> None:
    """Drop reads that have not begun, wait for one that has, stop threads and free the slots.

    May be called twice, and on any value of the ring; a second call does what one that was interrupted has left.
    Collectives under way are not waited for: after an error of this rank alone, others may never join them.
    """
    ring.state.close()


def stream_layers(
    source: Source, *, prefetch: int = 1, copy: bool = False, debug: bool = False, progress: bool = False
) -> Iterator[tuple[int, LayerParams]]:
    """Iterate once over a source's layers, fetching ahead.

    Args:
        source: where layers come from.
        prefetch: how many layers ahead.
        copy: yield tensors of their own.
        debug: fill freed slots with NaN.
        progress: show a bar in the terminal.

    Returns:
        An iterator of ``(layer, params)``; the parameters are valid until the next step.

    Raises:
        ValueError, RuntimeError: as `open_ring`, at the call, and `take`.

    Leaving the loop early, also by an exception, ends threads and pending reads. Nothing is fetched before the first
    step.
    """
    _require_openable(source, prefetch)
    return _streamed(source, prefetch, copy, debug, progress)


def _streamed(
    source: Source, prefetch: int, copy: bool, debug: bool, progress: bool
) -> Iterator[tuple[int, LayerParams]]:
    ring = open_ring(source, prefetch=prefetch, copy=copy, debug=debug, passes=1)
    try:
        for layer in _shown(source.layers, progress):
            params, ring = take(ring, layer)
            ring = start_next(ring)
            yield layer, params
    finally:
        close_ring(ring)


def _require_openable(source: Source, prefetch: int) -> None:
    rule = "source must be one that `resident`, `from_checkpoint`, `from_owners` or `from_shards` makes, or alike"
    require(isinstance(source, Source), "open_ring", rule, f"a {type(source).__name__}")
    require(type(prefetch) is int and prefetch >= 0, "open_ring", "prefetch must be an integer >= 0", repr(prefetch))


def _shown(layers: range, progress: bool) -> Iterator[int]:
    if not progress:
        return iter(layers)
    from rich.progress import track

    return iter(track(layers, description="layers"))


class _State:
    """What all values of one ring share. Fetch i is that of the layer used in step i; they start in this order."""

    def __init__(
        self, source: Source, slots: list[Tensor], prefetch: int, copy: bool, debug: bool, last: int | None
    ) -> None:
        self.source, self.slots, self.last = source, slots, last
        self.prefetch = min(prefetch, len(source.layers))
        self.copy, self.debug = copy, debug
        self.generation = 0
        self.step = 0  # the next use
        self.fetch = 0  # the next fetch
        self.held: list[int | None] = [None] * len(slots)
        self.pending: dict[int, Fetch | Exception] = {}  # by fetch
        self.checks: list[Callable[[], object] | None] = [None] * len(slots)  # of what lies in each slot
        self.closed = False  # from the begin of a close
        self.ended = False  # with its end

    def require_newest(self, ring: Ring, function: str) -> None:
        """Refuse a value that was used already."""
        require(not self.closed, function, "the ring must be open", "a closed one")
        rule = "a ring must be used once; take the value that the last call returned"
        require(ring.generation == self.generation, function, rule, f"value {ring.generation} of {self.generation}")

    def require_next(self, layer: int) -> None:
        layers = self.source.layers
        passed = self.last is not None and self.step >= self.last
        require(not passed, "take", f"all {self.last} layers of the passes were taken", layer)
        require(layer in layers, "take", f"layer must be in {layers.start}..{layers.stop - 1}", layer)
        expected = layers[self.step % len(layers)]
        require(layer == expected, "take", f"layers must be taken in order, {expected} is next", layer)

    def start(self) -> None:
        """Start the next fetch, unless its layer lies in its slot already or is past the end."""
        i, self.fetch = self.fetch, self.fetch + 1
        if not self.slots or (self.last is not None and i >= self.last):
            return
        layer, place = self.source.layers[i % len(self.source.layers)], i % len(self.slots)
        if self.held[place] == layer:
            return
        self.held[place], self.checks[place] = layer, None
        mark_written(self.slots[place])  # from now on the old values are not to be counted on
        try:
            self.pending[i] = self.source.start(layer, self.slots[place])
        except Exception as error:  # it is the take of this layer that fails
            self.pending[i] = error

    def start_due(self) -> None:
        while self.fetch < self.step + self.prefetch:
            self.start()

    def take(self, layer: int) -> LayerParams:
        self.start_due()
        while self.fetch <= self.step:
            self.start()
        i, self.step = self.step, self.step + 1
        place = i % max(len(self.slots), 1)
        if self.debug and self.slots and i > 0:
            freed = (i - 1) % len(self.slots)
            if len(self.slots) < len(self.source.layers) and self.pending.get(i - 1 + len(self.slots)) is None:
                spoil(self.slots[freed])
                self.held[freed] = None
        fetch = self.pending.pop(i, None)
        try:
            if isinstance(fetch, Exception):
                raise fetch
            if fetch is not None:
                fetch.wait()
                mark_written(self.slots[place])
                self.checks[place] = getattr(fetch, "check", None)
            if self.slots and (check := self.checks[place]) is not None:
                check()
            views = slot_views(self.slots[place], self.source.layout(layer)) if self.slots else {}
            params = self.source.params(layer, views)
        except Exception as error:
            self.generation += 1  # no value is left to go on with
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"take: layer {layer} could not be fetched: {error}") from error
        except BaseException:  # interrupted while it waited: what can be ended is for `close` to end
            if fetch is not None and hasattr(fetch, "cancel"):
                self.pending[i] = fetch
            raise
        return tree_map(_clone, params) if self.copy else params

    def close(self) -> None:
        if self.ended:
            return
        self.closed = True
        try:  # an interrupt may come while a fetch is waited for
            for i in sorted(self.pending, reverse=True):  # the last one first, before it begins
                if (cancel := getattr(self.pending[i], "cancel", None)) is not None:
                    with suppress(Exception):
                        cancel()
                    del self.pending[i]
            for i in sorted(self.pending):
                fetch = self.pending.pop(i)
                if not isinstance(fetch, Exception):
                    with suppress(Exception):
                        fetch.wait()
        finally:
            self.slots.clear()
            self.checks.clear()
            self.source.close()
        self.ended = True


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
