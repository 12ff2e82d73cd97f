"""A ring follows its plan, is used once, fails where it must and never hands out a layer that is not there.

``SFA_ALL=1`` also streams eight layers of GLM-5 size from disk.
"""

import ctypes
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sfa_functional as sfa
import weights.sources
from sfa_functional.params import named_fields, params_from_fields
from tests.benchmarks.ring import GLM_5_LAYERS, anonymous_growth, stream, write_layers
from weights import close_ring, from_checkpoint, open_ring, resident, ring_schedule, start_next, stream_layers, take
from weights.ring_buffer import layout_of, slot_views

CONFIG = replace(sfa.TINY, indexer_types=("full", "shared", "full", "full", "shared"))
WIDE = replace(
    sfa.TINY, hidden_size=1024, num_attention_heads=32, v_head_dim=64, indexer_types=("full",) * 6, index_n_heads=4
)
"""Layers of 9 MB in float32."""

PATTERNS: Mapping[str, Callable[[int], bool]] = {
    "called": lambda step: True,
    "never called": lambda step: False,
    "called now and then": lambda step: step % 3 == 1,
}
"""In which steps `start_next` is called."""


class Late:
    """A source whose layer arrives at ``wait()``: until then its slot reads NaN.

    It writes behind autograd's back, as collectives and file reads do. ``log`` has what was asked of it, in order;
    slots are numbered as they come.
    """

    slot_multiple, device = 1, None

    def __init__(self, layers: Sequence[sfa.LayerParams], *, start_layer: int = 0) -> None:
        self.layers = range(start_layer, start_layer + len(layers))
        self.tensors = {start_layer + i: dict(named_fields(params)) for i, params in enumerate(layers)}
        self.log: list[tuple[Any, ...]] = []
        self.slots: list[int] = []
        self.under_way: set[int] = set()  # addresses of slots
        self.broken: dict[tuple[str, int], BaseException] = {}

    def layout(self, layer: int) -> Any:
        return layout_of(self.tensors[layer])

    def start(self, layer: int, slot: torch.Tensor) -> "Arrival":
        address = slot.data_ptr()
        assert address not in self.under_way, f"a slot was refilled with layer {layer} while its fetch is open"
        if address not in self.slots:
            self.slots.append(address)
        self.log.append(("start", layer, self.slots.index(address)))
        ctypes.memset(address, 0xFF, slot.numel())
        if ("start", layer) in self.broken:
            raise self.broken["start", layer]
        self.under_way.add(address)
        return Arrival(self, layer, slot)

    def params(self, layer: int, views: Mapping[str, torch.Tensor]) -> sfa.LayerParams:
        self.log.append(("use", layer))
        if ("params", layer) in self.broken:
            raise self.broken["params", layer]
        return params_from_fields(views)

    def trained(self, layer: int) -> Mapping[str, torch.Tensor]:
        return {}

    def retake(self, layer: int, trained: Any) -> Any:
        return params_from_fields({name: x.clone() for name, x in self.tensors[layer].items()}), []

    def close(self) -> None:
        self.log.append(("close",))


class Arrival:
    """A fetch of `Late`; refuses to be waited for twice."""

    def __init__(self, source: Late, layer: int, slot: torch.Tensor) -> None:
        self.source, self.layer, self.slot, self.waited = source, layer, slot, False

    def wait(self) -> None:
        self.source.log.append(("wait", self.layer))  # first: what is raised while a ring closes nobody sees
        assert not self.waited, f"the fetch of layer {self.layer} was waited for twice"
        self.waited = True
        self.source.under_way.discard(self.slot.data_ptr())
        if ("wait", self.layer) in self.source.broken:
            raise self.source.broken["wait", self.layer]
        for name, view in slot_views(self.slot, self.source.layout(self.layer)).items():
            x = self.source.tensors[self.layer][name]
            ctypes.memmove(view.data_ptr(), x.data_ptr(), x.numel() * x.element_size())


def factor(value: float) -> sfa.LayerParams:
    """Make a layer of 1×1 matrices, all of one value."""
    fields = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj")
    norms = {name: torch.ones(1) for name in ("q_a_layernorm", "kv_a_layernorm")}
    return params_from_fields({name: torch.full((1, 1), value) for name in fields} | norms)


def value_of(params: sfa.LayerParams) -> float:
    """Return the value of a layer that `factor` made."""
    (value,) = {x.item() for name, x in named_fields(params) if "norm" not in name}
    return value


def late(n: int, *, start_layer: int = 0) -> Late:
    """Make a source whose layer number i holds i + 1."""
    return Late([factor(start_layer + i + 1.0) for i in range(n)], start_layer=start_layer)


def tiny_layers(dtype: torch.dtype = torch.float32) -> list[sfa.LayerParams]:
    generator = torch.Generator().manual_seed(1)
    return [sfa.init_params(CONFIG, layer=i, generator=generator, dtype=dtype) for i in range(CONFIG.num_layers)]


def same(got: sfa.LayerParams, want: sfa.LayerParams) -> bool:
    """Say whether two layers have the same fields, bit for bit."""
    mine, theirs = dict(named_fields(got)), dict(named_fields(want))
    return mine.keys() == theirs.keys() and all(
        x.dtype == theirs[name].dtype and torch.equal(x, theirs[name]) for name, x in mine.items()
    )


def reads_nan(params: sfa.LayerParams) -> bool:
    return all(x.isnan().all().item() for _, x in named_fields(params))


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint on disk and its layers."""
    layers = tiny_layers()
    weights.save_checkpoint(tmp_path / "model", layers, CONFIG)
    return tmp_path / "model", layers


@pytest.fixture
def slow_reads(monkeypatch):
    """Hold back every read of a file until the test opens the gate; list the reads that began."""
    gate, begun, read = threading.Event(), [], weights.sources.read_stored

    def held_back(stored: Any, into: Any) -> None:
        begun.append(stored)
        assert gate.wait(20)
        read(stored, into)

    monkeypatch.setattr(weights.sources, "read_stored", held_back)
    yield gate, begun
    gate.set()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until something holds; say whether it does."""
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.001)
    return condition()


class TestOrder:
    """Starts and waits come in the order of the plan, step by step (H3, H5)."""

    pytestmark = pytest.mark.usefixtures("unchecked")

    @staticmethod
    def planned(
        n: int, *, start_layer: int, prefetch: int, passes: int, endless: bool, called: Callable[[int], bool]
    ) -> list[tuple[Any, ...]]:
        """Spell out what a source is asked for, from the schedule alone.

        A fetch belongs to its step: it starts when `start_next` is called there, at the latest in the next `take`, and
        in its own step's `take` where prefetch is 0.
        """
        schedule = ring_schedule(n, start_layer=start_layer, prefetch=prefetch, passes=passes, wrap=endless)
        under_way = [start_layer + i for i in range(min(prefetch, n))]
        log: list[tuple[Any, ...]] = [("start", layer, slot) for slot, layer in enumerate(under_way)]
        due: list[tuple[Any, ...]] = []

        def start_due() -> None:
            log.extend(due)
            under_way.extend(layer for _, layer, _ in due)
            due.clear()

        for i, step in enumerate(schedule):
            fetch = [] if step.fetch_layer is None else [("start", step.fetch_layer, step.fetch_slot)]
            if prefetch == 0:
                due += fetch
            start_due()
            if step.layer in under_way:
                under_way.remove(step.layer)
                log.append(("wait", step.layer))
            log.append(("use", step.layer))
            if prefetch > 0:
                due += fetch
            if called(i):
                start_due()
        return [*log, *(("wait", layer) for layer in under_way), ("close",)]

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
    def test_a_source_is_asked_as_the_schedule_says(self, n, pattern):
        called = PATTERNS[pattern]
        for prefetch, passes, endless, start_layer in itertools.product(
            [*range(n + 2), 3 * n], (1, 3), (True, False), (0, 4)
        ):
            source = late(n, start_layer=start_layer)
            ring = open_ring(source, prefetch=prefetch, passes=None if endless else passes)
            for step in range(n * passes):
                layer = start_layer + step % n
                assert ring.layer == layer
                params, ring = take(ring, layer)
                assert value_of(params) == layer + 1
                if called(step):
                    ring = start_next(ring)
            close_ring(ring)
            plan = {"start_layer": start_layer, "prefetch": prefetch, "passes": passes, "endless": endless}
            assert source.log == self.planned(n, **plan, called=called), plan

    @pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4, 9])
    def test_each_fetch_is_waited_for_once_before_its_use_and_no_open_slot_is_refilled(self, prefetch):
        """H3 and H5 by the source's own checks: an arrival refuses a second wait, a slot one that is under way."""
        source, dice = late(4), random.Random(prefetch)
        ring = open_ring(source, prefetch=prefetch)
        for step in range(4 * 5):
            params, ring = take(ring, step % 4)
            assert value_of(params) == step % 4 + 1
            for _ in range(dice.randrange(3)):
                ring = start_next(ring)
        close_ring(ring)
        kinds = [event[0] for event in source.log]
        assert kinds.count("start") == kinds.count("wait")
        assert not source.under_way

    @pytest.mark.parametrize("prefetch", [1, 2, 3])
    def test_a_fetch_starts_before_the_compute_in_front_and_is_waited_for_after_it(self, prefetch):
        source = late(6)
        for layer, _ in stream_layers(source, prefetch=prefetch):
            source.log.append(("compute", layer))
        for layer in range(1, 6):
            in_front, ahead = ("compute", layer - 1), ("compute", max(layer - prefetch, 0))
            (started,) = (i for i, event in enumerate(source.log) if event[:2] == ("start", layer))
            assert started < source.log.index(ahead) <= source.log.index(in_front)
            assert source.log.index(in_front) < source.log.index(("wait", layer)) < source.log.index(("use", layer))

    def test_without_prefetch_a_layer_is_fetched_when_it_is_needed(self):
        source = late(3)
        for layer, _ in stream_layers(source, prefetch=0):
            source.log.append(("compute", layer))
        steps = [[("start", i, 0), ("wait", i), ("use", i), ("compute", i)] for i in range(3)]
        assert source.log == [*itertools.chain(*steps), ("close",)]

    def test_start_next_starts_one_fetch_a_step(self):
        source = late(5)
        ring = open_ring(source, prefetch=2)
        _, ring = take(ring, 0)
        for _ in range(4):
            ring = start_next(ring)
        assert [event for event in source.log if event[0] == "start"] == [("start", i, i) for i in range(3)]
        close_ring(ring)

    def test_the_first_fetches_start_when_a_ring_opens(self):
        for n, prefetch in itertools.product((1, 2, 5), (0, 1, 2, 5, 9)):
            source = late(n)
            ring = open_ring(source, prefetch=prefetch)
            assert source.log == [("start", i, i) for i in range(min(prefetch, n))]
            ring = start_next(ring)
            assert len(source.log) == min(prefetch, n)  # nothing is free yet
            close_ring(ring)

    @pytest.mark.parametrize(("n", "prefetch"), [(1, 0), (2, 1), (3, 2), (3, 5)])
    def test_layers_that_all_have_a_slot_are_fetched_once_in_three_passes(self, n, prefetch):
        """H7."""
        source = late(n)
        ring = open_ring(source, prefetch=prefetch)
        for step in range(3 * n):
            _, ring = take(ring, step % n)
            ring = start_next(ring)
        close_ring(ring)
        assert sum(event[0] == "start" for event in source.log) == n


def test_slots_are_one_more_than_prefetch_and_never_more_than_layers():
    layers = tiny_layers()
    # each tensor begins at a multiple of 64 bytes
    sizes = [sum(-(-x.numel() * 4 // 64) * 64 for _, x in named_fields(params)) for params in layers]
    assert sizes[0] > sizes[1]
    for prefetch, slots in ((0, 1), (1, 2), (3, 4), (4, 5), (5, 5), (9, 5)):
        ring = open_ring(Late(layers), prefetch=prefetch)
        assert (ring.slots, ring.num_bytes) == (slots, slots * max(sizes))
        close_ring(ring)


class TestUsedOnce:
    """A ring is a value that is used up, its layers come in order, and mistakes are told in one line."""

    @staticmethod
    def take_next(ring: Any) -> Any:
        return take(ring, ring.layer)[1]

    @pytest.mark.parametrize("first", ["take", "start_next"])
    @pytest.mark.parametrize("second", ["take", "start_next"])
    def test_a_ring_used_twice_is_refused(self, first, second):
        use = {"take": self.take_next, "start_next": start_next}
        old = open_ring(late(3))
        new = use[first](old)
        with pytest.raises(ValueError, match=f"^{second}: a ring must be used once; .*$") as refusal:
            use[second](old)
        assert "\n" not in str(refusal.value)
        newest = use[second](new)  # the newest value is none the worse
        with pytest.raises(ValueError, match="a ring must be used once"):
            use[second](new)
        close_ring(newest)

    def test_two_rings_of_one_source_are_values_of_their_own(self):
        one, other = open_ring(late(3)), open_ring(late(3))
        one, other = self.take_next(one), self.take_next(self.take_next(other))
        assert (one.layer, other.layer) == (1, 2)
        close_ring(one)
        params, other = take(other, 2)
        assert value_of(params) == 3
        close_ring(other)

    @pytest.mark.parametrize("name", ["take", "start_next"])
    def test_a_closed_ring_is_refused(self, name):
        use = {"take": self.take_next, "start_next": start_next}[name]
        old = open_ring(late(3))
        ring = self.take_next(old)
        close_ring(ring)
        for value in (ring, old):
            with pytest.raises(ValueError, match=f"^{name}: the ring must be open; got a closed one$"):
                use(value)

    def test_closing_twice_or_by_an_old_value_closes_once(self):
        source = late(3)
        old = open_ring(source, prefetch=2)
        ring = self.take_next(old)
        for value in (old, ring, old):
            close_ring(value)
        assert source.log.count(("close",)) == 1
        assert not source.under_way

    @pytest.mark.parametrize(
        ("layer", "rule"),
        [
            (6, "layers must be taken in order, 5 is next; got 6"),
            (7, "layers must be taken in order, 5 is next; got 7"),
            (4, r"layer must be in 5\.\.7; got 4"),
            (8, r"layer must be in 5\.\.7; got 8"),
            (-1, r"layer must be in 5\.\.7; got -1"),
            (0, r"layer must be in 5\.\.7; got 0"),
        ],
    )
    def test_another_layer_than_the_next_is_refused_and_does_not_use_the_ring_up(self, layer, rule):
        source = late(3, start_layer=5)
        ring = open_ring(source, prefetch=0)
        with pytest.raises(ValueError, match=f"^take: {rule}$"):
            take(ring, layer)
        assert source.log == []
        params, ring = take(ring, 5)
        assert value_of(params) == 6
        close_ring(ring)

    def test_a_layer_taken_twice_is_refused(self):
        ring = open_ring(late(3))
        _, ring = take(ring, 0)
        with pytest.raises(ValueError, match=r"^take: layers must be taken in order, 1 is next; got 0$"):
            take(ring, 0)
        close_ring(ring)

    @pytest.mark.parametrize(("n", "passes"), [(1, 1), (3, 1), (3, 2)])
    def test_a_take_past_the_last_pass_is_refused(self, n, passes):
        source = late(n)
        ring = open_ring(source, passes=passes)
        for step in range(n * passes):
            _, ring = take(ring, step % n)
            ring = start_next(ring)
        for layer in (0, n - 1, n):
            rule = f"all {n * passes} layers of the passes were taken; got {layer}"
            with pytest.raises(ValueError, match=f"^take: {rule}$"):
                take(ring, layer)
        close_ring(ring)
        assert not source.under_way

    @pytest.mark.parametrize("prefetch", [-1, 1.0, True, None, "1"])
    @pytest.mark.usefixtures("unchecked")
    def test_a_prefetch_that_is_no_count_is_refused(self, prefetch):
        source = late(3)
        with pytest.raises(ValueError, match=r"^open_ring: prefetch must be an integer >= 0; got .*$"):
            open_ring(source, prefetch=prefetch)
        with pytest.raises(ValueError, match=r"^open_ring: prefetch must be an integer >= 0; got .*$"):
            stream_layers(source, prefetch=prefetch)  # here, not in the first step
        assert source.log == []

    @pytest.mark.parametrize("source", [[factor(1.0)], factor(1.0), Path("model"), None])
    @pytest.mark.usefixtures("unchecked")
    def test_what_is_no_source_is_refused_by_its_kind(self, source):
        rule = f"source must be one that .* makes, or alike; got a {type(source).__name__}"
        for use in (open_ring, stream_layers):
            with pytest.raises(ValueError, match=f"^open_ring: {rule}$"):
                use(source)

    def test_a_stream_that_is_never_stepped_fetches_nothing(self):
        source = late(3)
        stream_layers(source)
        assert source.log == []

    @pytest.mark.parametrize("passes", [0, -1, 1.0, True])
    @pytest.mark.usefixtures("unchecked")
    def test_a_number_of_passes_that_is_no_count_is_refused(self, passes):
        with pytest.raises(ValueError, match=r"^open_ring: passes must be an integer >= 1 or None; got .*$"):
            open_ring(late(3), passes=passes)


class TestFailingFetch:
    """A fetch that fails is told where its layer is needed, by name, and nothing stale comes after it."""

    pytestmark = pytest.mark.usefixtures("unchecked")

    @pytest.mark.parametrize("where", ["start", "wait", "params"])
    @pytest.mark.parametrize("error", [OSError("gone"), ValueError("a rule; got 3"), RuntimeError("peer closed")])
    @pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4])
    def test_the_take_that_needs_it_raises_and_names_the_layer(self, where, error, prefetch):
        for layer in range(10, 14):
            source = late(4, start_layer=10)
            source.broken[where, layer] = error
            ring = open_ring(source, prefetch=prefetch)
            values = [ring]
            for earlier in range(10, layer):
                params, ring = take(ring, earlier)
                ring = start_next(ring)
                assert value_of(params) == earlier + 1
                values.append(ring)
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            with pytest.raises(kind, match=f"^take: layer {layer} could not be fetched: {error}$") as failure:
                take(ring, layer)
            assert failure.value.__cause__ is error
            for value in values:
                for again in (10, layer, 10 + (layer - 9) % 4):
                    with pytest.raises(ValueError, match="a ring must be used once"):
                        take(value, again)
            close_ring(ring)
            assert source.log[-1] == ("close",)
            assert not source.under_way
            close_ring(ring)

    def test_a_later_pass_can_fail(self):
        source = late(3)
        ring = open_ring(source, prefetch=1)
        for step in range(4):
            params, ring = take(ring, step % 3)
            ring = start_next(ring)
            assert value_of(params) == step % 3 + 1
        source.broken["wait", 1] = OSError("gone")
        with pytest.raises(RuntimeError, match="layer 1"):
            take(ring, 1)
        close_ring(ring)

    def test_a_failing_fetch_that_nobody_needs_does_not_keep_a_ring_from_closing(self):
        source = late(4)
        source.broken["wait", 2] = source.broken["start", 1] = OSError("gone")
        _, ring = take(open_ring(source, prefetch=3), 0)
        close_ring(ring)
        assert source.log[-2:] == [("wait", 2), ("close",)]

    def test_an_interrupted_wait_leaves_a_ring_that_can_only_be_closed(self):
        source = late(3)
        source.broken["wait", 0] = KeyboardInterrupt()
        ring = open_ring(source, prefetch=2)
        with pytest.raises(KeyboardInterrupt):
            take(ring, 0)
        with pytest.raises(ValueError, match="a ring must be used once"):
            take(ring, 0)
        close_ring(ring)
        assert source.log[-2:] == [("wait", 1), ("close",)]

    def test_stream_layers_closes_after_a_failure(self):
        source, seen = late(4), []
        source.broken["wait", 2] = OSError("gone")
        layers = stream_layers(source)
        with pytest.raises(RuntimeError, match=r"^take: layer 2 could not be fetched: gone$"):
            seen.extend((layer, value_of(params)) for layer, params in layers)
        assert seen == [(0, 1.0), (1, 2.0)]
        assert source.log[-1] == ("close",)


class TestClosingEarly:
    """Leaving a loop ends threads and pending work, however it is left."""

    @staticmethod
    def leave(way: str, make: Callable[[], Any], at: int) -> None:
        """Leave a loop over layers in its step ``at``."""
        if way == "exception":
            with suppress(ZeroDivisionError):
                for layer, _ in make():
                    _ = 1 // (at - layer)
        elif way == "break":
            for layer, _ in make():
                if layer == at:
                    break
        else:
            layers = make()
            while next(layers)[0] < at:
                pass
            if way == "close":
                layers.close()

    @pytest.mark.parametrize("way", ["break", "exception", "close", "collected"])
    @pytest.mark.parametrize("prefetch", [0, 1, 3, 7])
    def test_a_loop_left_early_ends_threads_and_reads(self, checkpoint, way, prefetch):
        path, _ = checkpoint
        before = threading.enumerate()
        self.leave(way, lambda: stream_layers(from_checkpoint(path, config=CONFIG), prefetch=prefetch), at=1)
        assert threading.enumerate() == before

    @pytest.mark.parametrize("way", ["break", "exception", "close", "collected"])
    def test_a_loop_left_early_waits_for_every_fetch_under_way(self, way):
        source = late(6)
        self.leave(way, lambda: stream_layers(source, prefetch=3), at=1)
        assert source.log[-1] == ("close",)
        assert not source.under_way
        assert {event[1] for event in source.log if event[0] == "wait"} == {0, 1, 2, 3, 4}

    @pytest.mark.parametrize("prefetch", [0, 2, 7])
    def test_a_whole_loop_ends_its_thread(self, checkpoint, prefetch):
        path, layers = checkpoint
        before = threading.enumerate()
        source = from_checkpoint(path, config=CONFIG)
        for _ in range(2):  # and the source can be used again
            seen = [layer for layer, params in stream_layers(source, prefetch=prefetch) if same(params, layers[layer])]
            assert seen == [0, 1, 2, 3, 4]
            assert threading.enumerate() == before

    def test_a_fetch_that_can_be_cancelled_is_not_waited_for(self, monkeypatch):
        """The last one first, so that none begins meanwhile."""
        cancel = lambda arrival: arrival.source.log.append(("cancel", arrival.layer))  # noqa: E731
        monkeypatch.setattr(Arrival, "cancel", cancel, raising=False)
        source = late(6)
        _, ring = take(open_ring(source, prefetch=3), 0)
        close_ring(start_next(ring))
        assert source.log[-4:] == [("cancel", 3), ("cancel", 2), ("cancel", 1), ("close",)]
        assert [event for event in source.log if event[0] == "wait"] == [("wait", 0)]

    def test_reads_that_have_not_begun_are_dropped(self, checkpoint, slow_reads):
        path, _ = checkpoint
        gate, begun = slow_reads
        ring = open_ring(from_checkpoint(path, config=CONFIG), prefetch=4)
        assert wait_for(lambda: len(begun) == 1)
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        close_ring(ring)
        opener.join()
        assert len(begun) == 1

    def test_closing_one_ring_leaves_another_of_the_same_source_alone(self, checkpoint, slow_reads):
        path, layers = checkpoint
        gate, begun = slow_reads
        source = from_checkpoint(path, config=CONFIG)
        one, ring = open_ring(source, prefetch=1), open_ring(source, prefetch=3)
        assert wait_for(lambda: len(begun) == 1)
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        close_ring(one)
        for layer in range(5):
            params, ring = take(ring, layer)
            assert same(params, layers[layer])
        close_ring(ring)
        opener.join()

    @pytest.mark.parametrize("cancels", [False, True])
    @pytest.mark.parametrize("interrupted", [1, 2, 3])
    def test_a_second_close_does_what_an_interrupted_one_has_left(self, monkeypatch, cancels, interrupted):
        source = late(6)
        left = [interrupted]

        def end(arrival: Arrival) -> None:
            source.log.append(("end", arrival.layer))
            if arrival.layer in left:
                left.clear()
                raise KeyboardInterrupt
            source.under_way.discard(arrival.slot.data_ptr())

        monkeypatch.setattr(Arrival, "cancel" if cancels else "wait", end, raising=False)
        ring = open_ring(source, prefetch=4)
        source.log.clear()
        with pytest.raises(KeyboardInterrupt):
            close_ring(ring)
        assert (ring.slots, source.log[-1]) == (0, ("close",))
        with pytest.raises(ValueError, match="the ring must be open"):
            take(ring, 0)
        close_ring(ring)
        close_ring(ring)
        ended = [event[1] for event in source.log if event[0] == "end"]
        again = [interrupted] if cancels else []  # who waits twice, breaks the protocol
        assert sorted(ended) == sorted([0, 1, 2, 3, *again])
        assert source.log.count(("close",)) == 2

    @pytest.mark.parametrize("where", ["take", "close_ring"])
    def test_a_close_after_an_interrupt_ends_the_thread_that_still_read(self, checkpoint, slow_reads, where):
        path, _ = checkpoint
        before = threading.enumerate()
        gate, begun = slow_reads
        ring = open_ring(from_checkpoint(path, config=CONFIG), prefetch=2)
        assert wait_for(lambda: len(begun) == 1)
        reading = ring.state.pending[0]._future
        result, interrupts = reading.result, iter([True])

        def interrupt_once(*args: Any) -> Any:
            if next(interrupts, False):
                raise KeyboardInterrupt
            return result(*args)

        reading.result = interrupt_once
        with pytest.raises(KeyboardInterrupt):
            close_ring(ring) if where == "close_ring" else take(ring, 0)
        threading.Timer(0.05, gate.set).start()
        close_ring(ring)
        assert wait_for(lambda: threading.enumerate() == before)

    def test_a_ring_that_was_never_taken_from_can_be_closed(self, checkpoint):
        path, _ = checkpoint
        before = threading.enumerate()
        close_ring(open_ring(from_checkpoint(path, config=CONFIG), prefetch=2))
        close_ring(open_ring(resident([factor(1.0)])))
        assert threading.enumerate() == before


class TestValidity:
    """Parameters are right until the next take; debug shows a later use, copies stay."""

    pytestmark = pytest.mark.usefixtures("unchecked")

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4])
    def test_parameters_are_right_until_the_next_take(self, prefetch, pattern):
        """A fetch that starts meanwhile goes into another slot."""
        ring = open_ring(late(4), prefetch=prefetch, debug=True)
        for step in range(12):
            params, ring = take(ring, step % 4)
            if PATTERNS[pattern](step):
                ring = start_next(ring)
            assert value_of(params) == step % 4 + 1
        close_ring(ring)

    @pytest.mark.parametrize("prefetch", [1, 2, 3])
    def test_debug_makes_a_parameter_kept_too_long_nan(self, prefetch):
        """Until the next fetch, which may start at once, brings another layer there."""
        ring, kept = open_ring(Late(tiny_layers()), prefetch=prefetch, debug=True), None
        for step in range(10):
            params, ring = take(ring, step % 5)
            assert kept is None or reads_nan(kept)
            kept = params
        close_ring(ring)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_debug_shows_in_every_dtype_of_a_checkpoint(self, tmp_path, dtype):
        layers = tiny_layers(dtype)
        weights.save_checkpoint(tmp_path / "model", layers, CONFIG)
        ring = open_ring(from_checkpoint(tmp_path / "model", config=CONFIG, dtype=dtype), debug=True)
        kept = None
        for layer in range(5):
            params, ring = take(ring, layer)
            assert same(params, layers[layer])
            assert kept is None or reads_nan(kept)
            kept = params
        close_ring(ring)

    @pytest.mark.parametrize("debug", [False, True])
    @pytest.mark.parametrize("prefetch", [3, 4, 9])
    def test_layers_that_all_have_a_slot_stay_valid(self, prefetch, debug):
        ring, kept = open_ring(late(4), prefetch=prefetch, debug=debug), {}
        for step in range(8):
            kept[step % 4], ring = take(ring, step % 4)
            ring = start_next(ring)
        assert {layer: value_of(params) for layer, params in kept.items()} == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
        close_ring(ring)

    @pytest.mark.parametrize("debug", [False, True])
    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_copies_stay_valid(self, checkpoint, prefetch, debug):
        path, layers = checkpoint
        source = from_checkpoint(path, config=CONFIG)
        kept = [params for _, params in stream_layers(source, prefetch=prefetch, copy=True, debug=debug)]
        assert all(map(same, kept, layers))

    def test_copies_of_resident_layers_are_not_the_layers(self):
        layers = tiny_layers()
        for layer, params in stream_layers(resident(layers), copy=True):
            for (name, x), (_, y) in zip(named_fields(params), named_fields(layers[layer]), strict=True):
                assert x.data_ptr() != y.data_ptr(), name

    def test_debug_leaves_resident_layers_alone(self):
        layers = tiny_layers()
        kept = [params for _, params in stream_layers(resident(layers), debug=True)]
        assert all(map(same, kept, tiny_layers()))

    @pytest.mark.parametrize("debug", [False, True])
    def test_layers_pass_in_inference_mode(self, checkpoint, debug):
        path, layers = checkpoint
        with torch.inference_mode():
            for source in (Late(layers), from_checkpoint(path, config=CONFIG)):
                for layer, params in stream_layers(source, debug=debug):
                    assert same(params, layers[layer])

    def test_progress_shows_a_bar_and_changes_no_layer(self, capsys):
        seen = [value_of(params) for _, params in stream_layers(late(3), progress=True)]
        assert seen == [1.0, 2.0, 3.0]
        assert "layers" in capsys.readouterr().out


class TestAutograd:
    """A graph that needs a slot's old values raises instead of using the new ones (H4)."""

    pytestmark = pytest.mark.usefixtures("unchecked")
    message = "modified by an inplace operation"

    def test_two_factors_through_one_slot_raise(self):
        x = torch.ones(1, 1, requires_grad=True)
        y = x
        for _, params in stream_layers(Late([factor(2.0), factor(3.0)]), prefetch=0):
            y = y * params.o_proj
        assert y.item() == 6.0
        with pytest.raises(RuntimeError, match=self.message):
            y.backward()
        assert x.grad is None

    @pytest.mark.parametrize("named", [{"prefetch": 1}, {"prefetch": 0, "copy": True}])
    def test_two_factors_with_memory_of_their_own_have_a_gradient(self, named):
        x = torch.ones(1, 1, requires_grad=True)
        y = x
        for _, params in stream_layers(Late([factor(2.0), factor(3.0)]), **named):
            y = y * params.o_proj
        y.backward()
        assert (y.item(), x.grad.item()) == (6.0, 6.0)

    @pytest.mark.parametrize("debug", [False, True])
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_backward_gives_the_right_gradient_or_raises(self, pattern, debug):
        for n, prefetch, passes in itertools.product((1, 2, 3, 4), (0, 1, 2, 3, 5), (1, 2)):
            x = torch.ones(1, 1, requires_grad=True)
            y, right = x, 1.0
            ring = open_ring(late(n), prefetch=prefetch, debug=debug)
            for step in range(n * passes):
                params, ring = take(ring, step % n)
                y, right = y * params.o_proj, right * (step % n + 1)
                if PATTERNS[pattern](step):
                    ring = start_next(ring)
            close_ring(ring)
            assert y.item() == right
            if n <= prefetch + 1:
                y.backward()
                assert x.grad.item() == right
            else:
                with pytest.raises(RuntimeError, match=self.message):
                    y.backward()

    @pytest.mark.parametrize("prefetch", [1, 2])
    def test_a_fetch_that_has_only_been_started_is_enough(self, prefetch):
        source = late(6)
        x = torch.ones(1, 1, requires_grad=True)
        params, ring = take(open_ring(source, prefetch=prefetch), 0)
        y = x * params.o_proj
        ring = start_next(ring)
        y.backward(retain_graph=True)  # its slot is in use: nothing has touched it
        assert x.grad.item() == 1.0
        _, ring = take(ring, 1)
        y.backward(retain_graph=True)
        assert x.grad.item() == 2.0
        ring = start_next(ring)
        assert source.log[-1] == ("start", prefetch + 1, 0)
        assert ("wait", prefetch + 1) not in source.log
        with pytest.raises(RuntimeError, match=self.message):
            y.backward()
        close_ring(ring)

    @pytest.mark.parametrize("prefetch", [0, 1, 3, 4])
    def test_a_checkpoint_read_into_a_slot_raises_too(self, checkpoint, prefetch):
        path, layers = checkpoint
        x = torch.randn(2, CONFIG.hidden_size, requires_grad=True)
        y = x
        for _, params in stream_layers(from_checkpoint(path, config=CONFIG), prefetch=prefetch):
            y = y @ params.q_a_proj.T @ params.q_a_proj
        if prefetch < 4:
            with pytest.raises(RuntimeError, match=self.message):
                y.sum().backward()
        else:
            y.sum().backward()
            z = x.detach().requires_grad_()
            out = z
            for params in layers:
                out = out @ params.q_a_proj.T @ params.q_a_proj
            out.sum().backward()
            assert torch.equal(x.grad, z.grad)

    def test_a_layer_cast_on_the_way_keeps_its_gradient(self, checkpoint):
        """What is cast has memory of its own."""
        path, layers = checkpoint
        x = torch.randn(2, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)
        y = z = x
        for layer, params in stream_layers(from_checkpoint(path, config=CONFIG, dtype=torch.float64), prefetch=0):
            y = y @ params.q_a_proj.T @ params.q_a_proj
            z = z @ layers[layer].q_a_proj.double().T @ layers[layer].q_a_proj.double()
        got, want = (torch.autograd.grad(out.sum(), x)[0] for out in (y, z))
        assert torch.equal(got, want)


class TestModel:
    """The loop that a ring is for: a model's layers with their caches, whose weights come from a file."""

    def test_prefill_and_decode_through_a_ring_are_those_of_resident_layers(self, tmp_path):
        config = replace(sfa.TINY, indexer_types=("full",) * 4)
        generator = torch.Generator().manual_seed(4)
        layers = [
            sfa.init_params(config, layer=i, generator=generator, dtype=torch.bfloat16)
            for i in range(config.num_layers)
        ]
        path = tmp_path / "model"
        weights.save_checkpoint(path, layers, config)
        table = sfa.allocate_blocks([7, 9], 4)
        x_TD = torch.randn(16, config.hidden_size, generator=generator, dtype=torch.float32).bfloat16()

        def run(taken: Callable[[], Any], *, donate: bool) -> list[torch.Tensor]:
            """Run a prefill and two decode steps; return each one's result, then all caches."""
            caches = [
                sfa.init_cache(config, num_blocks=16, block_size=4, dtype=torch.bfloat16, layer=i)
                for i in range(config.num_layers)
            ]
            results, start = [], 0
            for new, total in (([5, 7], [5, 7]), ([1, 1], [6, 8]), ([1, 1], [7, 9])):
                batch = sfa.Batch.from_lengths(new, total, block_table=table, block_size=4)
                x = x_TD[start : start + sum(new)]
                for layer, params in taken():
                    x, _, caches[layer] = sfa.sfa_layer(
                        params, x, batch, config=config, cache=caches[layer], donate=donate
                    )
                results, start = [*results, x], start + sum(new)
            return [*results, *(x for cache in caches for x in vars(cache).values() if isinstance(x, torch.Tensor))]

        source = from_checkpoint(path, config=config, dtype=torch.bfloat16)
        got = run(lambda: stream_layers(source, prefetch=2), donate=True)
        want = run(lambda: enumerate(layers), donate=False)
        assert len(got) == len(want) >= 3 + config.num_layers
        assert all(map(torch.equal, got, want))
        assert all(x.any() for x in got)


SIZES = {"wide": (WIDE, torch.float32)} | ({"GLM-5": (GLM_5_LAYERS, torch.bfloat16)} if "SFA_ALL" in os.environ else {})


@pytest.mark.parametrize("size", SIZES)
def test_streaming_takes_the_memory_of_its_slots_and_no_more(tmp_path, size):
    config, dtype = SIZES[size]
    directory = Path(tmp_path) / "model"
    layer_bytes = write_layers(directory, config, dtype)
    try:
        source = from_checkpoint(directory, config=config, dtype=dtype)
        stream(source, prefetch=0)  # what is allocated once
        for prefetch in (0, 1, 2):
            with anonymous_growth() as growth:
                stream(source, prefetch=prefetch)
            assert 0.9 < growth.peak / ((prefetch + 1) * layer_bytes) < 1.1, prefetch
        with anonymous_growth() as growth:
            held = [params for _, params in stream_layers(source, copy=True)]
        assert growth.peak > 0.9 * len(held) * layer_bytes  # the measure sees what is held
    finally:
        for file in directory.iterdir():
            file.unlink()
