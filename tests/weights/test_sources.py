"""Layers come out of every source as they went in, bit for bit; what does not fit is refused on every rank alike."""

import itertools
import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sfa_functional as sfa
import weights
from sfa_functional import HF_NAMES
from sfa_functional.params import NORM_FIELDS, named_fields, param_shapes, params_from_fields
from sharding import MeshShape, P, shard_map, simulated_mesh
from weights import (
    LayerShard,
    close_ring,
    from_checkpoint,
    from_owners,
    from_shards,
    open_ring,
    owned_layers,
    resident,
    shard_layer,
    start_next,
    stream_layers,
    take,
)

pytestmark = pytest.mark.usefixtures("unchecked")  # checks at every call of every rank would take most of the time

CONFIG = replace(sfa.TINY, indexer_types=("full", "shared", "full", "full", "shared"))
PARTIAL = replace(
    CONFIG, hidden_size=160, q_lora_rank=144, num_attention_heads=8, indexer_types=("full", "shared", "full")
)
"""Matrices of more than one block of 128, the last of them partial."""

LARGE = ("q_b_proj", "o_proj")
INDEXER = ("indexer.wq_b",)
"""A field that only some layers have: of the others nothing is moved."""

PATTERNS: Mapping[str, Callable[[int], bool]] = {
    "called": lambda step: True,
    "never called": lambda step: False,
    "called now and then": lambda step: step % 3 == 1,
}
"""In which steps `start_next` is called; where it is not, the next `take` makes up for it."""


def random_layers(config: sfa.SFAConfig = CONFIG, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    """Draw layers by field; norms are random too, so that no two tensors are equal."""
    generator = torch.Generator().manual_seed(3)
    layers = []
    for layer in range(config.num_layers):
        tensors = {}
        for name, shape in param_shapes(config, layer=layer).items():
            norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            tensors[name] = drawn.to(norm_dtype if name in NORM_FIELDS else dtype)
        layers.append(tensors)
    return layers


def quantised(layers: Sequence[Mapping[str, torch.Tensor]]) -> tuple[list[dict], list[dict]]:
    """Store projections as fp8 with a factor per block of 128, all but ``kv_a_proj``, which stays as it is.

    Returns:
        Layers as stored, with ``"<field>_scale_inv"``; and in bfloat16, multiplied out number by number.
    """
    stored, want = [], []
    for tensors in layers:
        held, plain = dict(tensors), dict(tensors)
        for name in tensors.keys() - NORM_FIELDS - {"kv_a_proj"}:
            codes = tensors[name].to(torch.float8_e4m3fn)
            rows, columns = codes.shape
            factors = 0.5 + torch.rand(-(-rows // 128), -(-columns // 128))
            held |= {name: codes, f"{name}_scale_inv": factors}
            i, j = torch.arange(rows)[:, None] // 128, torch.arange(columns) // 128
            plain[name] = (codes.float() * factors[i, j]).bfloat16()
        stored.append(held)
        want.append(plain)
    return stored, want


def same(params: sfa.LayerParams, want: Mapping[str, torch.Tensor]) -> bool:
    """Say whether a layer has exactly these fields, bit for bit."""
    got = dict(named_fields(params))
    return got.keys() == want.keys() and all(
        x.dtype == want[name].dtype
        and torch.equal(x.contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8))
        for name, x in got.items()
    )


def on_ranks(size: int, body: Callable[[Any], Any], *, record: list[Any] | None = None) -> list[Any]:
    """Run a function of one axis's collectives on simulated ranks; return what each rank's returned."""
    results: list[Any] = [None] * size

    def run(comm: Any) -> None:
        results[comm["cp"].rank] = body(comm["cp"])

    shard_map(run, simulated_mesh(MeshShape(cp=size), record=record), in_specs=(), out_specs=P())()
    return results


def assert_passes(source: Any, want: Sequence[Mapping[str, torch.Tensor]], *, passes: int = 3, **named: Any) -> None:
    """Take all layers several times, at every kind of prefetch and of calling `start_next`, and compare each one."""
    n, first = len(want), source.layers.start
    assert source.layers == range(first, first + n)
    prefetches = sorted({0, 1, 2, n - 1, n, n + 3})
    for prefetch, pattern in itertools.product(prefetches, PATTERNS):
        ring = open_ring(source, prefetch=prefetch, debug=pattern != "called", **named)
        for step in range(n * passes):
            params, ring = take(ring, first + step % n)
            if PATTERNS[pattern](step):
                ring = start_next(ring)
            assert same(params, want[step % n]), (prefetch, pattern, step)
        close_ring(ring)


def by_owners(comm: Any, layers: Sequence[Any], fields: Any = None, start_layer: int = 0) -> Any:
    kept = owned_layers(layers, comm.rank, comm.size, fields=fields, start_layer=start_layer)
    return from_owners(comm, kept, fields=fields)


def by_shards(comm: Any, layers: Sequence[Any], start_layer: int = 0) -> Any:
    return from_shards(comm, {start_layer + i: shard_layer(x, comm.rank, comm.size) for i, x in enumerate(layers)})


def write_files(path: Path, layers: Sequence[Mapping[str, torch.Tensor]], config: sfa.SFAConfig = CONFIG) -> Path:
    """Write a checkpoint of one file per layer, fp8 with its factors included."""
    path.mkdir()
    weight_map = {}
    for layer, tensors in enumerate(layers):
        keys = {}
        for name, x in tensors.items():
            field = name.removesuffix("_scale_inv")
            suffix = name.removeprefix(field)
            keys[f"model.layers.{layer}.self_attn.{HF_NAMES[field]}{suffix}"] = x
        save_file(keys, path / f"{layer}.safetensors")
        weight_map |= dict.fromkeys(keys, f"{layer}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config.to_hf()))
    return path


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
STACKS = {
    "layers that differ in shape": (CONFIG, 0),
    "a stage from the middle": (replace(CONFIG, indexer_types=("full", "full", "shared", "full")), 7),
    "one layer": (replace(CONFIG, indexer_types=("full",)), 0),
    "one layer of a stage": (replace(CONFIG, indexer_types=("full",)), 3),
    "two layers": (sfa.TINY, 0),
}


class TestBitEqual:
    """Through a ring, every source gives what is resident."""

    @pytest.mark.parametrize("stack", STACKS)
    def test_resident(self, stack):
        config, start_layer = STACKS[stack]
        layers = random_layers(config)
        params = [params_from_fields(tensors) for tensors in layers]
        source = resident(params, start_layer=start_layer)
        assert_passes(source, layers)
        assert_passes(source, layers, copy=True)
        for layer, got in stream_layers(source):
            assert got is params[layer - start_layer]

    @pytest.mark.parametrize(
        ("dtype", "layers"),
        [*((dtype, None) for dtype in DTYPES), *((torch.float32, x) for x in (range(5), range(1, 4), range(4, 5)))],
    )
    def test_from_checkpoint(self, tmp_path, dtype, layers):
        tensors = random_layers(dtype=dtype)
        path = write_files(tmp_path / "model", tensors)
        named = {} if layers is None else {"layers": layers}
        source = from_checkpoint(path, config=CONFIG, dtype=dtype, **named)
        assert_passes(source, tensors[slice(0, 5) if layers is None else slice(layers.start, layers.stop)])

    def test_from_checkpoint_that_is_open_already_or_named_by_text(self, tmp_path):
        tensors = random_layers()
        path = write_files(tmp_path / "model", tensors)
        for checkpoint in (weights.open_checkpoint(path), str(path)):
            source = from_checkpoint(checkpoint, config=CONFIG, device="cpu")
            assert all(same(params, tensors[layer]) for layer, params in stream_layers(source))

    @pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
    def test_from_checkpoint_casts(self, tmp_path, stored, dtype):
        tensors = random_layers(dtype=stored)
        source = from_checkpoint(write_files(tmp_path / "model", tensors), config=CONFIG, dtype=dtype)
        cast = [{name: x if name in NORM_FIELDS else x.to(dtype) for name, x in layer.items()} for layer in tensors]
        assert_passes(source, cast, passes=2)

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("fields", [None, LARGE, INDEXER, ()])
    def test_from_owners(self, size, fields):
        layers = random_layers()
        on_ranks(size, lambda comm: assert_passes(by_owners(comm, layers, fields), layers, passes=2))

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_from_shards(self, size):
        layers = random_layers()
        on_ranks(size, lambda comm: assert_passes(by_shards(comm, layers), layers, passes=2))

    @pytest.mark.parametrize("stack", STACKS)
    @pytest.mark.parametrize("size", [3, 8])
    def test_other_stacks_on_fewer_and_more_ranks_than_layers(self, stack, size):
        config, start_layer = STACKS[stack]
        layers = random_layers(config)

        def body(comm: Any) -> None:
            sources = [by_owners(comm, layers, fields, start_layer) for fields in (None, LARGE)]
            for source in (*sources, by_shards(comm, layers, start_layer)):
                assert source.layers == range(start_layer, start_layer + len(layers))
                for prefetch in (0, 1, 2, len(layers), 9):
                    ring = open_ring(source, prefetch=prefetch, debug=True)
                    for step in range(2 * len(layers)):
                        params, ring = take(ring, start_layer + step % len(layers))
                        ring = start_next(ring)
                        assert same(params, layers[step % len(layers)])
                    close_ring(ring)

        on_ranks(size, body)

    @pytest.mark.parametrize("dtype", DTYPES[1:])
    def test_other_dtypes_on_ranks(self, dtype):
        layers = random_layers(dtype=dtype)

        def body(comm: Any) -> None:
            for source in (by_owners(comm, layers), by_owners(comm, layers, LARGE), by_shards(comm, layers)):
                assert all(same(params, layers[layer]) for layer, params in stream_layers(source, debug=True))

        on_ranks(3, body)

    @pytest.mark.parametrize("fields", [None, LARGE])
    @pytest.mark.parametrize("learns", [False, True])
    def test_an_owner_sends_and_takes_its_own_tensors_and_leaves_them_as_they_are(self, fields, learns):
        layers = random_layers()
        if learns:
            layers = [{name: x.requires_grad_() for name, x in tensors.items()} for tensors in layers]
        moved = set(HF_NAMES) if fields is None else set(fields)

        def body(comm: Any) -> None:
            kept = owned_layers(layers, comm.rank, 2, fields=fields)
            versions = {(i, name): x._version for i, tensors in kept.items() for name, x in tensors.items()}
            ring = open_ring(from_owners(comm, kept, fields=fields), prefetch=1, passes=2, debug=True)
            slots = [(slot.data_ptr(), slot.data_ptr() + slot.numel()) for slot in ring.state.slots]
            for layer in (*range(5), *range(5)):
                params, ring = take(ring, layer)
                mine = layer % 2 == comm.rank
                for name, x in named_fields(params):
                    through = any(start <= x.data_ptr() < stop for start, stop in slots)
                    assert through == (name in moved and not mine)
                    assert through or x.data_ptr() == kept[layer][name].data_ptr()
            close_ring(ring)
            assert versions == {(i, name): x._version for i, tensors in kept.items() for name, x in tensors.items()}

        on_ranks(2, body)

    def test_what_an_owner_changes_between_two_passes_arrives(self):
        """Where its tensors are sent from, and where a slot is filled with them."""
        layers = random_layers()

        def body(comm: Any) -> None:
            kept = owned_layers(layers, comm.rank, 2)
            for tensors in kept.values():
                for x in tensors.values():
                    x.requires_grad_()  # leaves, though they lie side by side
            apart = {i: {name: x.detach().clone() for name, x in tensors.items()} for i, tensors in kept.items()}
            for mine in (kept, apart):
                source = from_owners(comm, mine)
                for add in (0, 1):
                    with torch.no_grad():
                        for tensors in mine.values():
                            for x in tensors.values():
                                x.add_(add)
                    for layer, params in stream_layers(source):
                        assert same(params, {name: x + add for name, x in layers[layer].items()})

        on_ranks(2, body)

    def test_copies_stay_valid_on_ranks(self):
        layers = random_layers()

        def body(comm: Any) -> None:
            for source in (by_owners(comm, layers), by_owners(comm, layers, LARGE), by_shards(comm, layers)):
                kept = [params for _, params in stream_layers(source, copy=True, debug=True)]
                assert all(map(same, kept, layers))

        on_ranks(3, body)

    def test_layers_given_as_params_are_layers_given_by_field(self):
        layers = random_layers()
        params = [params_from_fields(tensors) for tensors in layers]

        def body(comm: Any) -> None:
            mine = {layer: params[layer] if layer % comm.size == comm.rank else {} for layer in range(5)}
            for source in (from_owners(comm, mine), by_owners(comm, params, LARGE), by_shards(comm, params)):
                assert all(same(got, layers[layer]) for layer, got in stream_layers(source))

        on_ranks(2, body)

    def test_ranks_need_not_name_the_layers_they_have_nothing_of(self):
        layers = random_layers()

        def body(comm: Any) -> None:
            source = from_owners(comm, {i: layers[i] for i in range(comm.rank, 5, comm.size)})
            assert all(same(got, layers[layer]) for layer, got in stream_layers(source))

        on_ranks(2, body)
        on_ranks(7, body)

    def test_weights_that_are_not_contiguous_or_require_grad_travel_alike(self):
        layers = random_layers()
        views = [{**x, "o_proj": x["o_proj"].T.contiguous().T, "kv_b_proj": x["kv_b_proj"].clone()} for x in layers]
        for tensors in views:
            tensors["kv_b_proj"].requires_grad_()
            assert not tensors["o_proj"].is_contiguous()

        def body(comm: Any) -> None:
            for source in (by_owners(comm, views), by_owners(comm, views, LARGE), by_shards(comm, views)):
                with torch.no_grad():
                    assert all(same(params, layers[layer]) for layer, params in stream_layers(source))

        on_ranks(3, body)

    @pytest.mark.parametrize("fields", [None, LARGE])
    def test_what_others_hold_of_a_broadcast_field_is_not_used(self, fields):
        """Neither its values nor its shape: all ranks compute with the owner's, the second time too."""
        layers = random_layers()

        def body(comm: Any) -> None:
            wrong = [{name: x + 1 for name, x in tensors.items()} for tensors in layers]
            for tensors in wrong:
                tensors["o_proj"] = tensors["o_proj"][:3].clone().requires_grad_()
            mine = {i: layers[i] if i % comm.size == comm.rank else {**layers[i], **wrong[i]} for i in range(5)}
            if fields is not None:
                mine = {i: {**layers[i], **{name: mine[i][name] for name in fields}} for i in range(5)}
            source = from_owners(comm, mine, fields=fields)
            assert_passes(source, layers, passes=2)
            for layer in range(5):
                assert not any(x.requires_grad for x in source.trained(layer).values())
                params, further = source.retake(layer, {})
                assert same(params, layers[layer])
                assert not further

        on_ranks(3, body)

    def test_func_grad_of_a_rank_s_function_may_open_a_ring(self):
        """Slots made inside of it are wrapped and have no address."""
        layers = random_layers(dtype=torch.float64)
        x = torch.ones(2, CONFIG.hidden_size, dtype=torch.float64)
        y = leaf = x.clone().requires_grad_()
        for tensors in layers:
            y = y @ tensors["q_a_proj"].T @ tensors["q_a_proj"]
        (want,) = torch.autograd.grad(y.sum(), leaf)

        def body(comm: Any) -> None:
            apart = from_owners(comm, {i: layers[i] for i in range(comm.rank, 5, comm.size)})
            for source in (by_owners(comm, layers), apart, by_shards(comm, layers)):

                def total(x: torch.Tensor, source: Any = source) -> torch.Tensor:
                    for _, params in stream_layers(source, prefetch=9):
                        x = x @ params.q_a_proj.T @ params.q_a_proj
                    return x.sum()

                assert torch.equal(torch.func.grad(total)(x), want)

        on_ranks(2, body)

    def test_layers_travel_in_inference_mode(self):
        layers = random_layers()

        def body(comm: Any) -> None:
            for source in (by_owners(comm, layers), by_owners(comm, layers, LARGE), by_shards(comm, layers)):
                assert all(same(params, layers[layer]) for layer, params in stream_layers(source, debug=True))

        with torch.inference_mode():
            on_ranks(2, body)

    @pytest.mark.parametrize("prefetch", [1, 2])
    def test_debug_makes_a_parameter_kept_too_long_nan_on_ranks(self, prefetch):
        """An owner's are its own tensors and stay what they are."""
        layers = random_layers()

        def body(comm: Any) -> None:
            for source, moved, owned in (
                (by_owners(comm, layers), set(HF_NAMES), True),
                (by_owners(comm, layers, LARGE), set(LARGE), True),
                (by_shards(comm, layers), set(HF_NAMES), False),
            ):
                ring, kept = open_ring(source, prefetch=prefetch, debug=True), None
                for layer in range(5):
                    params, ring = take(ring, layer)
                    for name, x in named_fields(kept) if kept is not None else ():
                        gone = name in moved and not (owned and (layer - 1) % 2 == comm.rank)
                        assert x.isnan().all() if gone else torch.equal(x, layers[layer - 1][name]), name
                    kept = params
                close_ring(ring)

        on_ranks(2, body)


class TestFp8:
    """Codes travel as bytes, with their factors; they are multiplied out where they are used."""

    @staticmethod
    def assert_streams(source: Any, want: Sequence[Mapping[str, torch.Tensor]]) -> None:
        for prefetch in (0, 1, 3):
            kept = [params for _, params in stream_layers(source, prefetch=prefetch, copy=True, debug=True)]
            assert all(map(same, kept, want))
            for layer, params in stream_layers(source, prefetch=prefetch, debug=True):
                assert same(params, want[layer])

    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize("fields", [None, LARGE, ("kv_b_proj", "kv_a_proj", "indexer.wk")])
    def test_from_owners_multiplies_out(self, size, fields):
        stored, want = quantised(random_layers(PARTIAL, torch.bfloat16))
        on_ranks(size, lambda comm: self.assert_streams(by_owners(comm, stored, fields), want))

    @pytest.mark.parametrize("size", [1, 3])
    def test_from_shards_multiplies_out(self, size):
        stored, want = quantised(random_layers(PARTIAL, torch.bfloat16))
        on_ranks(size, lambda comm: self.assert_streams(by_shards(comm, stored), want))

    def test_from_checkpoint_multiplies_out(self, tmp_path):
        stored, want = quantised(random_layers(PARTIAL, torch.bfloat16))
        path = write_files(tmp_path / "model", stored, PARTIAL)
        self.assert_streams(from_checkpoint(path, config=PARTIAL, dtype=torch.bfloat16), want)

    def test_factors_stay_with_their_codes(self):
        stored, _ = quantised(random_layers(PARTIAL, torch.bfloat16))
        for rank, layer in itertools.product(range(2), range(3)):
            kept = owned_layers(stored, rank, 2, fields=LARGE)[layer]
            gone = stored[layer].keys() - kept.keys()
            assert gone == (set() if layer % 2 == rank else {*LARGE, *(f"{name}_scale_inv" for name in LARGE)})

    def test_codes_take_their_own_bytes_in_a_slot(self):
        """Not those of what they stand for: a ring of fp8 layers is half as large as one of bfloat16."""
        stored, _ = quantised(random_layers(PARTIAL, torch.bfloat16))
        want = max(sum(-(-x.numel() * x.element_size() // 64) * 64 for x in tensors.values()) for tensors in stored)

        def body(comm: Any) -> int:
            ring = open_ring(by_owners(comm, stored), prefetch=0)
            count = ring.num_bytes
            close_ring(ring)
            return count

        assert on_ranks(2, body) == [want] * 2

    def test_every_code_travels_bit_for_bit_without_factors(self):
        """NaN codes and the two zeros included."""
        codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
        layers = [{**tensors, "q_a_proj": codes} for tensors in random_layers()]

        def body(comm: Any) -> None:
            for source in (by_owners(comm, layers), by_owners(comm, layers, ("q_a_proj",)), by_shards(comm, layers)):
                assert all(same(params, layers[layer]) for layer, params in stream_layers(source))

        on_ranks(2, body)

    def test_a_float32_projection_beside_codes_stays_as_it_is(self):
        """Only what is stored as fp8 is multiplied out to bfloat16; ``indexer.weights_proj`` is read in float32."""
        stored, want = quantised(random_layers(PARTIAL))

        def body(comm: Any) -> None:
            for source in (by_owners(comm, stored), by_owners(comm, stored, LARGE), by_shards(comm, stored)):
                got = [params for _, params in stream_layers(source, copy=True)]
                assert {params.kv_a_proj.dtype for params in got} == {torch.float32}
                assert all(map(same, got, want))

        on_ranks(2, body)


class TestBytes:
    """What a rank keeps is what the formula says."""

    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    @pytest.mark.parametrize("fields", [None, LARGE, ()])
    def test_an_owner_keeps_its_share_of_what_is_moved_and_all_of_the_rest(self, size, fields):
        layers = random_layers()
        moved = set(HF_NAMES) if fields is None else set(fields)
        for rank in range(size):
            kept = owned_layers(layers, rank, size, start_layer=4, fields=fields)
            assert list(kept) == [4, 5, 6, 7, 8]
            for layer, tensors in kept.items():
                mine = layer % size == rank
                want = {name: x for name, x in layers[layer - 4].items() if mine or name not in moved}
                assert list(tensors) == list(want)
                assert all(torch.equal(tensors[name], x) for name, x in want.items())
                assert all(tensors[name] is x for name, x in want.items() if name not in moved)  # shared, not copied
                places = {x.untyped_storage().data_ptr(): x for name, x in tensors.items() if name in moved}
                assert len(places) == (mine and bool(moved))  # one piece of memory, to be sent as it is
                want_bytes = sum(-(-x.numel() * 4 // 64) * 64 for name, x in want.items() if name in moved)
                assert all(x.untyped_storage().nbytes() == want_bytes for x in places.values())

    def test_what_learns_stays_the_callers_own(self):
        layers = random_layers()
        layers[2]["o_proj"].requires_grad_()
        kept = owned_layers(layers, 0, 2, fields=LARGE)
        assert all(kept[2][name] is x for name, x in layers[2].items())
        assert kept[0]["o_proj"] is not layers[0]["o_proj"]

    def test_owners_together_keep_each_moved_field_once(self):
        layers = random_layers()
        for size in (1, 2, 3, 8):
            everyones = [owned_layers(layers, rank, size, fields=LARGE) for rank in range(size)]
            for layer, name in itertools.product(range(5), LARGE):
                assert sum(name in kept[layer] for kept in everyones) == 1

    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    @pytest.mark.parametrize("prefetch", [0, 1, 3, 9])
    def test_slots_are_prefetch_and_one_times_the_largest_layer(self, size, prefetch):
        layers = random_layers()

        def spanned(tensors: Mapping[str, torch.Tensor], multiple: int = 64) -> int:
            count = sum(-(-x.numel() * x.element_size() // 64) * 64 for x in tensors.values())
            return -(-count // multiple) * multiple

        moved = [{name: x for name, x in tensors.items() if name in LARGE} for tensors in layers]
        want = [max(map(spanned, layers)), max(map(spanned, moved)), max(spanned(x, 64 * size) for x in layers), 0]

        def body(comm: Any) -> list[int]:
            sources = [by_owners(comm, layers), by_owners(comm, layers, LARGE), by_shards(comm, layers)]
            rings = [open_ring(source, prefetch=prefetch) for source in (*sources, by_owners(comm, layers, ()))]
            counts = [ring.num_bytes for ring in rings]
            for ring in rings:
                close_ring(ring)
            return counts

        slots = min(prefetch + 1, 5)
        assert on_ranks(size, body) == [[slots * count for count in want]] * size

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
    def test_shards_are_equal_runs_of_a_layer_s_bytes(self, size):
        """Each tensor begins at a multiple of 64 bytes; zeros fill up to a whole share of such pieces."""
        (tensors,) = random_layers(replace(CONFIG, indexer_types=("full",)))
        whole = b""
        for x in tensors.values():
            whole += x.numpy().tobytes()
            whole += bytes(-len(whole) % 64)
        whole += bytes(-len(whole) % (64 * size))
        shards = [shard_layer(tensors, rank, size) for rank in range(size)]
        assert b"".join(shard.data.numpy().tobytes() for shard in shards) == whole
        assert {shard.data.numel() for shard in shards} == {len(whole) // size}
        for shard in shards:
            assert shard.data.dtype == torch.uint8
            assert shard.data.untyped_storage().nbytes() == len(whole) // size  # memory of its own
            spelled = {name: (spec.dtype, tuple(spec.shape)) for name, spec in shard.layout.items()}
            assert spelled == {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}

    def test_a_broadcast_moves_the_layer_and_a_gather_each_rank_s_part(self):
        layers, size = random_layers(), 3
        moved = [
            sum(-(-x.numel() * 4 // 64) * 64 for name, x in tensors.items() if name in LARGE) for tensors in layers
        ]
        record: list[Any] = []
        on_ranks(size, lambda comm: list(stream_layers(by_owners(comm, layers, LARGE))), record=record)
        for rank in range(size):
            sent = sum(t.bytes_sent for t in record if t.collective == "broadcast" and t.rank == rank)
            assert sent == sum(moved[rank::size]) * (size - 1)
        record.clear()
        on_ranks(size, lambda comm: list(stream_layers(by_shards(comm, layers))), record=record)
        parts = [shard_layer(tensors, 0, size).data.numel() for tensors in layers]
        for rank in range(size):
            sent = [t.bytes_sent for t in record if t.rank == rank][2:]  # after the description: its length, its text
            assert sent == [part * (size - 1) for part in parts]


class TestOwnersThatChange:
    """The others have what was sent: an owner that has changed since must not go on as if they had it."""

    @staticmethod
    def refused(change: Callable[[dict[str, torch.Tensor]], Any], *, prefetch: int, layer: int, laid: bool) -> str:
        """Change layer 2 of rank 0 after one pass; return how ``layer`` is refused, its first take or the second."""
        layers = random_layers()

        def body(comm: Any) -> None:
            kept = owned_layers(layers, comm.rank, 2)
            if not laid:
                kept = {i: {name: x.clone() for name, x in tensors.items()} for i, tensors in kept.items()}
            ring = open_ring(from_owners(comm, kept), prefetch=prefetch, passes=2)
            for i in range(5):
                _, ring = take(ring, i)
                ring = start_next(ring)
            if comm.rank == 0:
                change(kept[layer])
            for i in range(layer + 1):
                params, ring = take(ring, i)
                assert same(params, layers[i])

        with pytest.raises(ValueError) as refusal:
            on_ranks(2, body)
        (note,) = refusal.value.__notes__
        assert note.startswith("raised on rank 0 ")
        return str(refusal.value)

    @pytest.mark.parametrize("laid", [True, False])
    @pytest.mark.parametrize(("prefetch", "layer"), [(4, 0), (4, 2), (9, 2), (1, 0), (3, 2)])
    def test_a_layer_in_its_slot_or_on_its_way_fails_the_owner_s_take(self, prefetch, layer, laid):
        """At prefetch 4 all five layers lie in their slots; else the fetch of the next pass has started."""
        rule = f"layer {layer} must be as it was sent; to change it, close the ring and open a new one"
        line = f"take: layer {layer} could not be fetched: from_owners: {rule}; got tensors changed since"
        add = lambda tensors: tensors["kv_b_proj"].add_(1)  # noqa: E731
        assert self.refused(add, prefetch=prefetch, layer=layer, laid=laid) == line

    @pytest.mark.parametrize("prefetch", [0, 1, 4])
    @pytest.mark.parametrize("learned", [True, False])
    def test_weights_that_are_frozen_or_thawed_fail_the_owner_s_take(self, prefetch, learned):
        """All ranks have agreed on who sends gradients to whom when the source was made."""

        def body(comm: Any) -> None:
            layers = [{name: x.requires_grad_(learned) for name, x in t.items()} for t in random_layers()]
            kept = owned_layers(layers, comm.rank, 2)
            source = from_owners(comm, kept)
            ring = open_ring(source, prefetch=prefetch, passes=1)
            _, ring = take(ring, 0)
            if comm.rank == 1:
                kept[1]["o_proj"].requires_grad_(not learned)
                with pytest.raises(ValueError, match=r"^from_owners: o_proj of layer 1 must"):
                    source.trained(1)
            take(ring, 1)

        must = "must require grad" if learned else "must not require grad"
        rule = f"o_proj of layer 1 {must}, as when the source was made; to switch it, make a new source"
        line = f"take: layer 1 could not be fetched: from_owners: {rule}; got requires_grad={not learned}"
        with pytest.raises(ValueError) as refusal:
            on_ranks(2, body)
        assert str(refusal.value) == line

    def test_what_each_rank_keeps_may_be_frozen_and_changed(self):
        layers = random_layers()

        def body(comm: Any) -> None:
            kept = owned_layers(
                [{name: x.clone() for name, x in t.items()} for t in layers], comm.rank, 2, fields=LARGE
            )
            source = from_owners(comm, kept, fields=LARGE)
            ring = open_ring(source, prefetch=9)
            for add in (0, 1):
                for i in range(5):
                    params, ring = take(ring, i)
                    assert torch.equal(params.q_a_proj, layers[i]["q_a_proj"] + add)
                for tensors in kept.values():
                    tensors["q_a_proj"].detach().add_(1)
                    tensors["q_a_proj"].requires_grad_()

        on_ranks(2, body)


class TestDevices:
    """Slots lie where the source says, and None is the CPU, whatever the caller's default device is."""

    def test_a_rank_that_holds_nothing_takes_the_device_that_is_named(self):
        layers = random_layers()

        def body(comm: Any) -> str:
            mine = {i: layers[i] for i in range(comm.rank, 5, comm.size)}
            source = from_owners(comm, mine, device="cpu:0")
            assert all(same(params, layers[layer]) for layer, params in stream_layers(source))
            return str(source.device)

        assert on_ranks(7, body) == ["cpu"] * 5 + ["cpu:0"] * 2

    def test_the_default_device_is_not_asked(self, tmp_path):
        layers = random_layers()
        params = [params_from_fields(tensors) for tensors in layers]
        path = write_files(tmp_path / "model", layers)

        def run(comm: Any) -> None:
            sources = [
                from_checkpoint(path, config=CONFIG),
                from_owners(comm, {i: layers[i] for i in range(comm.rank, 5, comm.size)}),
                from_owners(comm, owned_layers(layers, comm.rank, comm.size, fields=LARGE), fields=LARGE),
                by_shards(comm, layers),
                resident(params),
            ]
            for source in sources:
                assert all(same(got, layers[layer]) for layer, got in stream_layers(source))
                assert all(same(source.retake(layer, {})[0], layers[layer]) for layer in range(5))

        with torch.device("meta"):
            on_ranks(6, run)  # one of them holds nothing
            checkpoint = weights.open_checkpoint(path)
            assert same(weights.load_layer(checkpoint, 3, config=CONFIG), layers[3])

    def test_on_an_accelerator_a_slot_is_refilled_once_the_work_queued_before_is_done(self, tmp_path, monkeypatch):
        """A stand-in for the accelerator: tensors without memory, and an event that notes who uses it."""
        log: list[tuple[str, bool]] = []
        caller = threading.current_thread()

        class Event:
            def __init__(self, device: torch.device) -> None:
                assert device.type == "meta"

            def record(self, stream: str) -> None:
                assert stream == "current"
                log.append(("record", threading.current_thread() is caller))

            def synchronize(self) -> None:
                log.append(("synchronize", threading.current_thread() is caller))

        path = write_files(tmp_path / "model", random_layers())
        source = from_checkpoint(path, config=CONFIG, device="meta")
        copy = torch.Tensor.copy_
        note = lambda *args: log.append(("copy", False)) or copy(*args)  # noqa: E731
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "current")
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "copy_", note)
        layers = list(stream_layers(source, prefetch=0))
        assert {params.o_proj.device.type for _, params in layers} == {"meta"}
        assert log == [("record", True), ("synchronize", False), ("copy", False)] * 5


class TestFailingRanks:
    """An error in a loop over layers on simulated ranks is told as it is, and nothing else with it."""

    @pytest.fixture
    def ignored(self, monkeypatch):
        """What Python could tell nobody: exceptions of a generator that is thrown away."""
        told: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", told.append)
        return told

    @pytest.mark.parametrize("failing", [{0}, {1}, {2}, {0, 1, 2}])
    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    @pytest.mark.parametrize("make", [by_owners, by_shards])
    def test_an_error_in_the_loop_s_body_ends_all_ranks(self, ignored, failing, prefetch, make):
        layers = random_layers()

        def body(comm: Any) -> None:
            for layer, _ in stream_layers(make(comm, layers), prefetch=prefetch):
                comm.all_gather(torch.zeros(1))
                if layer == 1 and comm.rank in failing:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            on_ranks(3, body)
        assert not ignored

    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_a_ring_closed_by_the_body_does_not_hide_its_error(self, ignored, prefetch):
        layers = random_layers()

        def body(comm: Any) -> None:
            ring = open_ring(by_owners(comm, layers), prefetch=prefetch)
            try:
                _, ring = take(ring, 0)
                ring = start_next(ring)
                if comm.rank == 1:
                    raise ZeroDivisionError
                comm.all_gather(torch.zeros(1))
            finally:
                close_ring(ring)

        with pytest.raises(ZeroDivisionError):
            on_ranks(3, body)
        assert not ignored


class TestMisuse:
    """What does not fit is refused in one line, the same one on every rank, before any weight travels."""

    @staticmethod
    def refusal(size: int, make: Callable[[Any], Any]) -> str:
        """Return the one line with which all ranks refuse to make a source."""
        record: list[Any] = []

        def body(comm: Any) -> str | None:
            try:
                make(comm)
            except ValueError as error:
                return str(error)
            return None

        lines = on_ranks(size, body, record=record)
        assert len(set(lines)) == 1, lines
        assert lines[0] is not None, "not refused"
        assert "\n" not in lines[0]
        told = [t.collective for t in record if t.rank == 0]
        assert told == ["all_gather"] * len(told)
        assert len(told) <= 2  # a description's length and its text
        return lines[0]

    def owners(self, change: Callable[[int, dict[int, dict]], Any], *, size: int = 3, fields: Any = LARGE) -> str:
        """Return the refusal of layers that ``change(rank, kept)`` has spoilt in place."""
        layers = random_layers()

        def make(comm: Any) -> Any:
            kept = owned_layers(layers, comm.rank, size, fields=fields)
            change(comm.rank, kept)
            return from_owners(comm, kept, fields=fields)

        return self.refusal(size, make)

    def shards(self, change: Callable[[int, dict[int, LayerShard]], Any], *, size: int = 3) -> str:
        """Return the refusal of shards that ``change(rank, shards)`` has spoilt in place."""
        layers = random_layers()

        def make(comm: Any) -> Any:
            held = {layer: shard_layer(tensors, comm.rank, size) for layer, tensors in enumerate(layers)}
            change(comm.rank, held)
            return from_shards(comm, held)

        return self.refusal(size, make)

    @pytest.mark.parametrize("fields", [("q_b",), ("o_proj", "indexer.wq"), ("o_proj_scale_inv",)])
    def test_an_unknown_field(self, fields):
        layers = random_layers()
        line = self.refusal(2, lambda comm: from_owners(comm, dict(enumerate(layers)), fields=fields))
        assert line.startswith("from_owners: a field must be of [")
        assert line.endswith(f"got {next(f for f in fields if f not in HF_NAMES)!r}")

    def test_fields_that_are_one_text(self):
        """Its letters are no names, and `in` would find parts of it."""
        layers = random_layers()
        line = self.refusal(2, lambda comm: from_owners(comm, dict(enumerate(layers)), fields="q_b_proj"))
        rule = "fields must be a sequence of names, or None; got 'q_b_proj'"
        assert line == f"from_owners: {rule}"
        with pytest.raises(ValueError, match=f"^owned_layers: {rule}$"):
            owned_layers(layers, 0, 2, fields="q_b_proj")

    @pytest.mark.parametrize("make", [by_owners, by_shards])
    @pytest.mark.parametrize("factors", [(1, 1), (3, 3), (2,), ()])
    def test_another_number_of_factors_than_blocks(self, make, factors):
        stored, _ = quantised(random_layers(PARTIAL, torch.bfloat16))
        stored[1]["o_proj_scale_inv"] = torch.ones(factors)  # o_proj is [160, 160]
        rule = "o_proj_scale_inv of layer 1 must be [2, 2], one factor per block of 128"
        name = "from_owners" if make is by_owners else "from_shards"
        assert self.refusal(2, lambda comm: make(comm, stored)) == f"{name}: {rule}; got {list(factors)}"

    @pytest.mark.parametrize("device", ["nonsense", "cpu:x", 1.5])
    def test_a_device_that_torch_does_not_know(self, tmp_path, device):
        layers = random_layers()
        rule = f"device must be one that torch knows; got {device!r}"
        path = write_files(tmp_path / "model", layers)
        with pytest.raises(ValueError, match=f"^from_checkpoint: {rule}$"):
            from_checkpoint(path, config=CONFIG, device=device)
        line = self.refusal(1, lambda comm: from_owners(comm, dict(enumerate(layers)), device=device))
        assert line == f"from_owners: {rule}"

    def test_factors_are_no_field(self):
        """They travel with their codes; named alone, nothing would move and nothing would be said."""
        stored, _ = quantised(random_layers(PARTIAL, torch.bfloat16))
        line = self.refusal(2, lambda comm: from_owners(comm, dict(enumerate(stored)), fields=("o_proj_scale_inv",)))
        assert line.startswith("from_owners: a field must be of [")

    @pytest.mark.parametrize("others", [None, ("q_b_proj",), ("o_proj", "q_b_proj")])
    def test_other_fields_on_a_rank(self, others):
        layers = dict(enumerate(random_layers()))
        line = self.refusal(3, lambda comm: from_owners(comm, layers, fields=others if comm.rank == 1 else LARGE))
        assert line == "from_owners: fields must be the same on every rank; got others on rank 1"

    def test_layers_that_are_not_consecutive(self):
        def drop(rank: int, kept: dict[int, Any]) -> None:
            del kept[2]

        rule = "layers must be consecutive, at least one; got [0, 1, 3, 4]"
        assert self.owners(drop) == f"from_owners: {rule}"
        assert self.shards(drop) == f"from_shards: {rule}"

    def test_no_layers(self):
        rule = "layers must be consecutive, at least one; got []"
        assert self.owners(lambda rank, kept: kept.clear()) == f"from_owners: {rule}"
        assert self.shards(lambda rank, held: held.clear()) == f"from_shards: {rule}"
        with pytest.raises(ValueError, match=r"^resident: there must be at least one layer; got 0$"):
            resident([])

    @pytest.mark.parametrize("layer", range(5))
    @pytest.mark.parametrize("rest", ["no entry", "an empty one"])
    def test_an_owner_without_its_layer(self, layer, rest):
        owner = layer % 3

        def drop(rank: int, kept: dict[int, Any]) -> None:
            if rank == owner and rest == "no entry":
                del kept[layer]
            elif rank == owner:
                kept[layer] = {}

        line = f"from_owners: rank {owner} must have layer {layer}, which it owns; got no field of it"
        assert self.owners(drop) == line

    @pytest.mark.parametrize("rank", [0, 1, 2])
    @pytest.mark.parametrize(
        ("value", "found"),
        [
            (None, "missing"),
            (torch.zeros(32, 63), "float32 [32, 63]"),
            (torch.zeros(32, 64, dtype=torch.bfloat16), "bfloat16 [32, 64]"),
        ],
    )
    def test_a_resident_field_that_differs_on_a_rank(self, rank, value, found):
        """Layer 1 belongs to rank 1: if that one is spoilt, it is the others' field that differs from it."""

        def spoil(mine: int, kept: dict[int, Any]) -> None:
            if mine == rank:
                if value is None:
                    del kept[1]["q_a_proj"]
                else:
                    kept[1]["q_a_proj"] = value

        line = self.owners(spoil)
        right, wrong = ("float32 [32, 64]", found) if rank != 1 else (found, "float32 [32, 64]")
        other = 0 if rank == 1 else rank
        if rank == 1 and value is None:  # the owner does not know of it
            assert line.startswith("from_owners: q_a_proj of layer 1, not broadcast, must be ")
        else:
            rule = f"q_a_proj of layer 1, not broadcast, must be {right} on rank {other}"
            assert line == f"from_owners: {rule}; got {wrong}"

    @pytest.mark.parametrize("fields", [None, LARGE])
    def test_a_field_of_a_rank_that_the_owner_has_not(self, fields):
        """That rank alone would have an indexer."""
        extra = random_layers()[0]

        def add(rank: int, kept: dict[int, Any]) -> None:
            if rank == 0:
                kept[1] |= {name: x for name, x in extra.items() if name.startswith("indexer.")}

        line = self.owners(add, fields=fields)
        assert line.startswith("from_owners: indexer.")
        assert "layer 1" in line

    def test_shards_of_another_model_on_a_rank(self):
        other = random_layers(replace(CONFIG, q_lora_rank=40))

        def exchange(rank: int, held: dict[int, Any]) -> None:
            if rank == 2:
                held[3] = shard_layer(other[3], rank, 3)

        assert self.shards(exchange) == "from_shards: shards must be of one model; got others on rank 2"

    def test_other_layers_on_a_rank(self):
        def drop(rank: int, held: dict[int, Any]) -> None:
            if rank == 1:
                del held[4]

        assert self.shards(drop) == "from_shards: shards must be of one model; got others on rank 1"

    def test_shards_cut_for_another_number_of_ranks(self):
        layers = random_layers()
        line = self.refusal(
            2, lambda comm: from_shards(comm, {i: shard_layer(x, comm.rank, 4) for i, x in enumerate(layers)})
        )
        assert line == "from_shards: the shard of layer 0 on rank 0 must be cut for rank 0 of 2; got rank 0 of 4"

    @pytest.mark.parametrize("spoil", [lambda data: data[:-64], lambda data: data.view(torch.int8)])
    def test_a_shard_of_another_size_or_dtype_on_one_rank(self, spoil):
        """The other ranks must not go on alone: they would wait for it for ever."""

        def change(rank: int, held: dict[int, Any]) -> None:
            if rank == 1:
                held[2] = replace(held[2], data=spoil(held[2].data))

        assert self.shards(change).startswith("from_shards: ")

    def test_another_ranks_shard(self):
        """It has the right size: its bytes would lie in the wrong place without a word."""
        layers = random_layers()

        def change(rank: int, held: dict[int, Any]) -> None:
            if rank == 1:
                held[2] = shard_layer(layers[2], 2, 3)

        told = self.shards(change)
        rule = "the shard of layer 2 on rank 1 must be cut for rank 1 of 3; got rank 2 of 3"
        assert told == f"from_shards: {rule}"

    def test_shards_whose_fields_lie_in_another_order_on_a_rank(self):
        """Their bytes would be put together to wrong weights without a word."""
        layers = random_layers()

        def make(comm: Any) -> Any:
            order = reversed if comm.rank == 1 else list
            mine = [{name: tensors[name] for name in order(list(tensors))} for tensors in layers]
            return by_shards(comm, mine)

        assert self.refusal(2, make).startswith("from_shards: shards must be of one model")

    def test_tensors_that_make_no_layer_fail_at_their_take(self):
        layers = random_layers()

        def body(comm: Any) -> None:
            kept = owned_layers(layers, comm.rank, comm.size)
            if comm.rank == 0:
                del kept[2]["o_proj"]
            ring = open_ring(from_owners(comm, kept))
            for layer in range(2):
                _, ring = take(ring, layer)
            with pytest.raises(RuntimeError, match=r"^take: layer 2 could not be fetched: .*o_proj"):
                take(ring, 2)
            close_ring(ring)

        on_ranks(2, body)

    @pytest.mark.parametrize("rank", [-1, 3, True, 1.0, None])
    def test_a_rank_that_is_none(self, rank):
        layers = random_layers()
        rule = r"rank must be in 0\.\.num_ranks - 1; got .*$"
        with pytest.raises(ValueError, match=f"^owned_layers: {rule}"):
            owned_layers(layers, rank, 3)
        with pytest.raises(ValueError, match=f"^shard_layer: {rule}"):
            shard_layer(layers[0], rank, 3)

    def test_a_number_of_ranks_or_a_first_layer_that_is_no_count(self):
        layers = random_layers()
        for size in (0, -1, 1.0, True):
            with pytest.raises(ValueError, match="num_ranks must be"):
                owned_layers(layers, 0, size)
        for size in (0, -1, 1.0):
            with pytest.raises(ValueError, match="num_ranks"):
                shard_layer(layers[0], 0, size)
        for start_layer in (-1, 1.0):
            with pytest.raises(ValueError, match="start_layer must be an integer >= 0"):
                owned_layers(layers, 0, 2, start_layer=start_layer)
            with pytest.raises(ValueError, match=r"^resident: start_layer must be an integer >= 0"):
                resident([params_from_fields(layers[0])], start_layer=start_layer)


def cut(path: Path, layer: int) -> None:
    file = path / f"{layer}.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def replaced(path: Path, layer: int, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {f"model.layers.{layer}.self_attn.{HF_NAMES[name]}": x for name, x in random_layers()[layer].items()}
    change(tensors)
    save_file(tensors, path / f"{layer}.safetensors")


DAMAGE: Mapping[str, Callable[[Path, int], Any]] = {
    "gone": lambda path, layer: (path / f"{layer}.safetensors").unlink(),
    "truncated": cut,
    "empty": lambda path, layer: (path / f"{layer}.safetensors").write_bytes(b""),
    "no safetensors": lambda path, layer: (path / f"{layer}.safetensors").write_bytes(b"x" * 4000),
    "of another shape": lambda path, layer: replaced(
        path, layer, lambda x: x.update({f"model.layers.{layer}.self_attn.o_proj.weight": torch.zeros(64, 81)})
    ),
    "of another dtype": lambda path, layer: replaced(
        path, layer, lambda x: x.update({f"model.layers.{layer}.self_attn.o_proj.weight": torch.zeros(64, 80).half()})
    ),
    "without a key": lambda path, layer: replaced(
        path, layer, lambda x: x.pop(f"model.layers.{layer}.self_attn.q_a_proj.weight")
    ),
}
"""What can become of a layer's file after it was opened."""


class TestFiles:
    """Files that change or go are found out at the take that needs them."""

    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize("prefetch", [0, 1, 4, 9])
    def test_a_damaged_file_fails_the_take_of_its_layer(self, tmp_path, damage, prefetch):
        layers = random_layers()
        path, before = write_files(tmp_path / "model", layers), threading.enumerate()
        source = from_checkpoint(path, config=CONFIG)
        DAMAGE[damage](path, 3)
        ring = open_ring(source, prefetch=prefetch)
        for layer in range(3):
            params, ring = take(ring, layer)
            ring = start_next(ring)
            assert same(params, layers[layer])
        rule = r"^take: layer 3 could not be fetched: load_layer: .*3\.safetensors: .*; got .*$"
        with pytest.raises(ValueError, match=rule) as failure:
            take(ring, 3)
        assert "\n" not in str(failure.value)
        for layer in (3, 4):
            with pytest.raises(ValueError, match="a ring must be used once"):
                take(ring, layer)
        close_ring(ring)
        assert threading.enumerate() == before

    @pytest.mark.parametrize("damage", ["gone", "truncated"])
    def test_a_file_damaged_between_two_passes_fails_the_second(self, tmp_path, damage):
        layers = random_layers()
        path, before = write_files(tmp_path / "model", layers), threading.enumerate()
        ring = open_ring(from_checkpoint(path, config=CONFIG))
        for step in range(6):
            params, ring = take(ring, step % 5)
            assert same(params, layers[step % 5])
            if step == 1:
                DAMAGE[damage](path, 1)
        with pytest.raises(ValueError, match=r"^take: layer 1 could not be fetched"):
            take(ring, 1)
        close_ring(ring)
        assert threading.enumerate() == before

    def test_a_failed_source_can_be_used_again_once_the_file_is_back(self, tmp_path):
        layers = random_layers()
        path = write_files(tmp_path / "model", layers)
        source = from_checkpoint(path, config=CONFIG)
        held = (path / "2.safetensors").read_bytes()
        DAMAGE["gone"](path, 2)
        with pytest.raises(ValueError, match="layer 2"):
            list(stream_layers(source))
        (path / "2.safetensors").write_bytes(held)
        assert all(same(params, layers[layer]) for layer, params in stream_layers(source))

    def test_only_files_of_the_layers_asked_for_are_opened(self, tmp_path):
        layers = random_layers()
        path = write_files(tmp_path / "model", layers)
        for layer in (0, 3, 4):
            (path / f"{layer}.safetensors").unlink()
        source = from_checkpoint(path, config=CONFIG, layers=range(1, 3))
        assert [layer for layer, params in stream_layers(source) if same(params, layers[layer])] == [1, 2]
        with pytest.raises(ValueError, match=r"0\.safetensors"):
            from_checkpoint(path, config=CONFIG)

    def test_parameters_do_not_need_their_file_any_more(self, tmp_path):
        layers = random_layers()
        path = write_files(tmp_path / "model", layers)
        for layer, params in stream_layers(from_checkpoint(path, config=CONFIG)):
            (path / f"{layer}.safetensors").write_bytes(b"x" * math.ceil(1e5))
            assert same(params, layers[layer])

    @pytest.mark.parametrize(
        "layers", [range(0), range(6), range(-1, 2), range(0, 4, 2), range(3, 1), range(5, 6), [0, 1], 3]
    )
    def test_layers_that_are_no_run_of_the_model_s_are_refused(self, tmp_path, layers):
        path = write_files(tmp_path / "model", random_layers())
        with pytest.raises(
            ValueError, match=r"^from_checkpoint: layers must be a range of consecutive layers, of 0\.\.4; got .*$"
        ):
            from_checkpoint(path, config=CONFIG, layers=layers)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, None])
    def test_another_dtype_is_refused(self, tmp_path, dtype):
        path = write_files(tmp_path / "model", random_layers())
        with pytest.raises(ValueError, match=r"^from_checkpoint: dtype must be one of .*; got .*$"):
            from_checkpoint(path, config=CONFIG, dtype=dtype)

    def test_a_checkpoint_that_the_config_contradicts_is_refused_at_once(self, tmp_path):
        path = write_files(tmp_path / "model", random_layers())
        for config in (replace(CONFIG, hidden_size=65), replace(CONFIG, indexer_types=("full",) * 5)):
            with pytest.raises(ValueError, match=r"^load_layer: .* must .*; got .*$"):
                from_checkpoint(path, config=config)
