"""On real processes, joined by gloo over loopback, collectives and rings do what they do on simulated ranks.

Processes are forked, so that they have what the test has made. All of them are waited for, with a limit.
"""

import itertools
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sfa_functional as sfa
from sfa_functional.params import NORM_FIELDS, named_fields, param_shapes, params_from_fields
from sharding import (
    Collectives,
    MeshShape,
    P,
    context_parallel_layer,
    distributed_collectives,
    shard_map,
    simulated_mesh,
    split_tokens,
)
from weights import (
    checkpoint_layer,
    close_ring,
    from_owners,
    from_shards,
    open_ring,
    owned_layers,
    shard_layer,
    start_next,
    stream_layers,
    take,
)

pytestmark = pytest.mark.usefixtures("unchecked")

CONFIG = replace(sfa.TINY, indexer_types=("full", "shared", "full", "full", "shared"))
LARGE = ("q_b_proj", "o_proj")
LIMIT = 120.0
"""Seconds after which processes that have not answered are ended and the test fails; a loaded machine needs ten."""

SIZES = (2, 4)


def on_processes(
    size: int, scratch: Path, body: Callable[[int], Any], *, dies: frozenset[int] = frozenset()
) -> list[Any]:
    """Run ``body(rank)`` in forked processes of one gloo group and return what each returned.

    Args:
        size: how many.
        scratch: a directory in which they find each other.
        body: returns plain values.
        dies: ranks that are to end without an answer.
    """
    context = get_context("fork")
    ends = [context.Pipe() for _ in range(size)]
    store = scratch / f"store-{time.monotonic_ns()}"
    processes = [
        context.Process(target=_be_rank, args=(rank, size, store, body, ends), daemon=True) for rank in range(size)
    ]
    answers: dict[int, Any] = {}
    patience = 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking beside other threads
            for process in processes:
                process.start()
        for _, theirs in ends:
            theirs.close()
        waiting = {mine: rank for rank, (mine, _) in enumerate(ends)}
        deadline = time.monotonic() + LIMIT
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} have not answered for {LIMIT} s"
            for mine in ready:
                rank = waiting.pop(mine)
                try:
                    answers[rank] = mine.recv()
                except EOFError:
                    assert rank in dies, f"rank {rank} died"
                    continue
                assert not isinstance(answers[rank], str), f"rank {rank}:\n{answers[rank]}"
        for mine, _ in ends:
            mine.close()  # they wait for it, so that no connection breaks before all are done
        patience = 10.0
        return [answers[rank][0] if rank in answers else None for rank in range(size)]
    finally:
        for process in processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()


def _be_rank(rank: int, size: int, store: Path, body: Callable[[int], Any], ends: list[Any]) -> None:
    for other, (parents, childs) in enumerate(ends):
        parents.close()
        if other != rank:
            childs.close()
    end = ends[rank][1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # torch makes its thread pool anew after a fork, at the first use, and not safely where two threads are first
    # ("Invalid thread pool!"); here no other thread runs yet
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=LIMIT / 2)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
        end.send((body(rank),))
    except BaseException:
        end.send(traceback.format_exc())
    try:
        end.recv()
    except EOFError:
        os._exit(0)


def on_simulated(size: int, body: Callable[[Collectives], Any]) -> list[Any]:
    """Run a function of one axis's collectives on simulated ranks and return what each returned."""
    results: list[Any] = [None] * size

    def run(comm: Any) -> None:
        results[comm["cp"].rank] = body(comm["cp"])

    shard_map(run, simulated_mesh(MeshShape(cp=size)), in_specs=(), out_specs=P())()
    return results


def assert_as_simulated(
    size: int, scratch: Path, work: Callable[[Collectives], Mapping[str, torch.Tensor]], groups: Any = None
) -> None:
    """Compare what a function of collectives returns on processes and on simulated ranks, bit for bit."""
    want = on_simulated(size, work)

    def body(rank: int) -> list[str]:
        got = work(distributed_collectives(groups() if groups else None))
        assert got.keys() == want[rank].keys()
        return [name for name, x in got.items() if not _same_bits(x, want[rank][name])]

    assert on_processes(size, scratch, body) == [[]] * size


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    same = (x.dtype, x.shape) == (y.dtype, y.shape)
    return same and bool(
        (x.contiguous().flatten().view(torch.uint8) == y.contiguous().flatten().view(torch.uint8)).all()
    )


MOVES = ("all_gather", "all_to_all", "broadcast")
SUMS = ("reduce_scatter", "all_reduce")
MOVED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
ADDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


def call(comm: Collectives, name: str, x: torch.Tensor, source: int = 1) -> torch.Tensor:
    return comm.broadcast(x, source) if name == "broadcast" else getattr(comm, name)(x)


def whole_numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Draw small whole numbers: their sums are exact in every dtype, in any order."""
    drawn = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(rank))
    return drawn.to(torch.float32).to(dtype)


class TestCollectives:
    """`distributed_collectives` has the values and gradients of the simulated ones."""

    @pytest.mark.parametrize("size", SIZES)
    def test_values(self, size, tmp_path):
        def work(comm: Collectives) -> dict[str, torch.Tensor]:
            found = {}
            for shape in ((size * 3, 2), (size,), (size, 2, 3), (0, 2), (size, 0)):
                for dtype, name in (*itertools.product(MOVED, MOVES), *itertools.product(ADDED, SUMS)):
                    x = whole_numbers(comm.rank, shape, dtype)
                    before = x.clone()
                    found[f"{name} {dtype} {shape}"] = call(comm, name, x)
                    found[f"after {name} {dtype} {shape}"] = x
                    assert _same_bits(x, before)  # what was brought is not written to
            return found

        assert_as_simulated(size, tmp_path, work)

    @pytest.mark.parametrize("size", SIZES)
    def test_every_bit_pattern_of_fp8_and_bfloat16_travels(self, size, tmp_path):
        bits = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(torch.uint8)

        def work(comm: Collectives) -> dict[str, torch.Tensor]:
            dtypes = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
            mine = bits.roll(comm.rank)
            return {f"{name} {dtype}": call(comm, name, mine.view(dtype)) for name in MOVES for dtype in dtypes}

        assert_as_simulated(size, tmp_path, work)

    @pytest.mark.parametrize("size", SIZES)
    def test_scalars_rows_that_are_not_contiguous_and_every_source(self, size, tmp_path):
        def work(comm: Collectives) -> dict[str, torch.Tensor]:
            x = whole_numbers(comm.rank, (3, size * 2), torch.float32).T
            found = {name: call(comm, name, x) for name in (*MOVES, *SUMS)}
            for source in range(size):
                found[f"broadcast from {source}"] = comm.broadcast(x, source)
                scalar = torch.tensor(comm.rank + 1.0)
                found[f"scalar from {source}"] = comm.broadcast(scalar, source)
                found[f"fp8 scalar from {source}"] = comm.broadcast(scalar.to(torch.float8_e4m3fn), source)
            return found | {"sum of scalars": comm.all_reduce(torch.tensor(comm.rank + 1.0))}

        assert_as_simulated(size, tmp_path, work)

    @pytest.mark.parametrize("size", SIZES)
    def test_results_have_memory_of_their_own(self, size, tmp_path):
        def work(comm: Collectives) -> dict[str, torch.Tensor]:
            found = {}
            for name in (*MOVES, *SUMS):
                x = whole_numbers(comm.rank, (size, 2), torch.float32)
                result = call(comm, name, x)
                x.fill_(-1)
                found[name] = result.clone()
                result.fill_(-2)
                found[f"after {name}"] = x
            return found

        assert_as_simulated(size, tmp_path, work)

    @pytest.mark.parametrize("size", SIZES)
    def test_started_collectives_and_what_is_given_to_write_to(self, size, tmp_path):
        """Several under way at once, waited for in another order; x itself may be written to."""

        def work(comm: Collectives) -> dict[str, torch.Tensor]:
            found = {}
            for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
                x = [whole_numbers(comm.rank + 10 * i, (size, 3), dtype) for i in range(4)]
                room = torch.zeros(size * size, 3).to(dtype), torch.zeros(size, 3).to(dtype)
                in_place = x[3].clone()
                pending = [
                    comm.all_gather_start(x[0]),
                    comm.broadcast_start(x[1], 0),
                    comm.all_gather_start(x[2], out=room[0]),
                    comm.broadcast_start(x[2], size - 1, out=room[1]),
                    comm.broadcast_start(in_place, 1, out=in_place),
                ]
                results = {i: pending[i].wait() for i in (4, 2, 0, 3, 1)}
                places = [results[i].data_ptr() for i in (2, 3, 4)]
                assert places == [y.data_ptr() for y in (*room, in_place)]
                found |= {f"{dtype} {i}": y for i, y in results.items()}
            return found

        assert_as_simulated(size, tmp_path, work)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_gradients(self, size, dtype, tmp_path):
        """Each rank differentiates its own sum, with weights of its own; whole numbers make every sum exact."""

        def work(comm: Collectives) -> dict[str, torch.Tensor]:
            found = {}
            for name in (*MOVES, *SUMS):
                x = whole_numbers(comm.rank, (size * 2, 3), dtype)
                weight = whole_numbers(100 + comm.rank, tuple(call(comm, name, x).shape), dtype)

                def total(x: torch.Tensor, name: str = name, weight: torch.Tensor = weight) -> torch.Tensor:
                    return (call(comm, name, 2 * x) * weight).sum()

                leaf = x.clone().requires_grad_()
                total(leaf).backward()
                found[f"{name} by backward"] = leaf.grad
                found[f"{name} by func.grad"] = torch.func.grad(total)(x)
                batch = torch.stack([x, x + 1])
                found[f"{name} by vmap"] = torch.func.vmap(torch.func.grad(total))(batch)
            return found

        assert_as_simulated(size, tmp_path, work)

    def test_a_started_gather_has_its_gradient_too(self, tmp_path):
        def work(comm: Collectives) -> dict[str, torch.Tensor]:
            x, z = (whole_numbers(comm.rank + i, (3, 2), torch.float64).requires_grad_() for i in (0, 5))
            pending = comm.all_gather_start(x * 2), comm.broadcast_start(z * 3, 1)
            arrived = [handle.wait() for handle in pending]
            (arrived[0].square().sum() * (comm.rank + 1) + (arrived[1] * (comm.rank + 2)).sum()).backward()
            return {"x": x.grad, "z": z.grad}

        assert_as_simulated(2, tmp_path, work)

    def test_a_group_of_some_of_the_processes_counts_its_own_ranks(self, tmp_path):
        """Sources are the group's ranks, not the world's."""
        pairs = ([3, 1], [0, 2])

        def body(rank: int) -> list[Any]:
            groups = [dist.new_group(pair) for pair in pairs]
            mine = next(i for i, pair in enumerate(pairs) if rank in pair)
            comm = distributed_collectives(groups[mine])
            x = torch.tensor([float(rank)])
            sent = [comm.broadcast(x, source).item() for source in range(2)]
            return [comm.rank, comm.size, comm.all_gather(x).tolist(), sent, comm.all_reduce(x).item()]

        for rank, (place, size, gathered, sent, total) in enumerate(on_processes(4, tmp_path, body)):
            members = next(pair for pair in pairs if rank in pair)
            assert size == 2
            assert gathered[place] == rank
            assert sorted(gathered) == sorted(members)
            assert sent == gathered
            assert total == sum(members)

    def test_what_gloo_cannot_add_is_refused(self, tmp_path):
        """Nothing is cast without a word."""

        def body(rank: int) -> bool:
            x = torch.ones(2).to(torch.float8_e4m3fn)
            try:
                distributed_collectives().all_reduce(x)
            except RuntimeError:
                return True
            return False

        assert on_processes(2, tmp_path, body) == [True, True]


def random_layers(dtype: torch.dtype, config: sfa.SFAConfig = CONFIG) -> list[dict[str, torch.Tensor]]:
    """Draw layers by field, norms included."""
    generator = torch.Generator().manual_seed(3)
    layers = []
    for layer in range(config.num_layers):
        norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        layers.append(
            {
                name: torch.randn(shape, generator=generator).to(norm_dtype if name in NORM_FIELDS else dtype)
                for name, shape in param_shapes(config, layer=layer).items()
            }
        )
    return layers


def same(params: sfa.LayerParams, want: Mapping[str, torch.Tensor]) -> bool:
    got = dict(named_fields(params))
    return got.keys() == want.keys() and all(_same_bits(x, want[name]) for name, x in got.items())


def make_sources(rank: int, size: int, layers: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Make every source that moves weights between ranks, in a group of its own."""
    comm = distributed_collectives(dist.new_group())
    found = {
        str(fields): from_owners(comm, owned_layers(layers, rank, size, fields=fields), fields=fields)
        for fields in (None, LARGE, ("indexer.wq_b",), ())
    }
    return found | {"shards": from_shards(comm, {i: shard_layer(x, rank, size) for i, x in enumerate(layers)})}


class TestRings:
    """Layers that pass through a ring on processes are those that were there, bit for bit."""

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_layers_arrive_bit_for_bit(self, size, dtype, tmp_path):
        layers = random_layers(dtype)

        def body(rank: int) -> list[str]:
            wrong = []
            for (name, source), prefetch in itertools.product(
                make_sources(rank, size, layers).items(), (0, 1, 2, 4, 7)
            ):
                ring = open_ring(source, prefetch=prefetch, debug=True)
                for step in range(10):
                    params, ring = take(ring, step % 5)
                    if step % 3:  # else the next take makes up for it
                        ring = start_next(ring)
                    if not same(params, layers[step % 5]):
                        wrong.append(f"{name} {prefetch} {step}")
                close_ring(ring)
            return wrong

        assert on_processes(size, tmp_path, body) == [[]] * size

    def test_a_loop_left_early_leaves_the_group_in_order(self, tmp_path):
        """What was under way then arrives in memory that nobody looks at; what comes after is right."""
        layers = random_layers(torch.float32)

        def body(rank: int) -> list[str]:
            wrong = []
            for (name, source), prefetch in itertools.product(make_sources(rank, 2, layers).items(), (0, 1, 3)):
                for _ in range(3):
                    for layer, params in stream_layers(source, prefetch=prefetch):
                        if not same(params, layers[layer]):
                            wrong.append(f"{name} {prefetch} {layer}")
                        if layer == 1:
                            break
                kept = [params for _, params in stream_layers(source, prefetch=prefetch, copy=True)]
                wrong += [
                    f"{name} {prefetch}" for params, want in zip(kept, layers, strict=True) if not same(params, want)
                ]
            return wrong

        assert on_processes(2, tmp_path, body) == [[], []]

    @pytest.mark.parametrize("kind", ["None", "shards"])
    def test_a_rank_that_gives_up_alone_does_not_wait_for_the_others(self, kind, tmp_path):
        layers = random_layers(torch.float32)

        def body(rank: int) -> float:
            source = make_sources(rank, 2, layers)[kind]
            begin = time.monotonic()
            _, ring = take(open_ring(source, prefetch=0 if rank == 0 else 3), 0)
            close_ring(ring)
            return time.monotonic() - begin

        assert max(on_processes(2, tmp_path, body)) < 10

    @pytest.mark.parametrize("size", SIZES)
    def test_fp8_layers_arrive_and_are_multiplied_out(self, size, tmp_path):
        layers = random_layers(torch.bfloat16)
        stored, want = [], []
        for tensors in layers:
            codes = {name: tensors[name].to(torch.float8_e4m3fn) for name in LARGE}
            factors = {name: torch.rand(1, -(-tensors[name].shape[1] // 128)) + 0.5 for name in LARGE}
            stored.append({**tensors, **codes, **{f"{name}_scale_inv": x for name, x in factors.items()}})
            out = {
                name: codes[name].float() * factors[name].repeat_interleave(128, 1)[:, : x.shape[1]]
                for name, x in codes.items()
            }
            want.append({**tensors, **{name: x.bfloat16() for name, x in out.items()}})

        def body(rank: int) -> list[str]:
            return [
                f"{name} {layer}"
                for name, source in make_sources(rank, size, stored).items()
                for prefetch in (0, 1, 4)
                for layer, params in stream_layers(source, prefetch=prefetch, debug=True)
                if not same(params, want[layer])
            ]

        assert on_processes(size, tmp_path, body) == [[]] * size

    def test_func_grad_of_a_function_that_opens_a_ring(self, tmp_path):
        """Slots made inside of it are wrapped and have no address."""
        layers = random_layers(torch.float64)
        x = y = torch.ones(2, 64, dtype=torch.float64, requires_grad=True)
        for tensors in layers:
            y = y @ tensors["o_proj"] @ tensors["o_proj"].T
        (want,) = torch.autograd.grad(y.sum(), x)

        def body(rank: int) -> list[bool]:
            def total(x: torch.Tensor, source: Any) -> torch.Tensor:
                for _, params in stream_layers(source, prefetch=9):
                    x = x @ params.o_proj @ params.o_proj.T
                return x.sum()

            sources = make_sources(rank, 2, layers).values()
            return [torch.equal(torch.func.grad(total)(x.detach(), source), want) for source in sources]

        assert on_processes(2, tmp_path, body) == [[True] * 5] * 2

    def test_a_graph_that_needs_a_refilled_slot_raises(self, tmp_path):
        """Gloo writes behind autograd's back."""
        layers = random_layers(torch.float32)

        def body(rank: int) -> list[str]:
            told = []
            for source in make_sources(rank, 2, layers).values():
                for prefetch in (0, 1, 4):
                    x = torch.ones(2, 64, requires_grad=True)
                    y = x
                    for _, params in stream_layers(source, prefetch=prefetch):
                        y = y @ params.o_proj @ params.o_proj.T
                    try:
                        y.sum().backward()
                        told.append("gradient")
                    except RuntimeError as error:
                        told.append("raised" if "modified by an inplace operation" in str(error) else str(error))
            return told

        moving, still = ["raised", "raised", "gradient"], ["gradient"] * 3
        assert on_processes(2, tmp_path, body) == [moving * 2 + still * 2 + moving] * 2

    @pytest.mark.parametrize(
        ("size", "fields", "learns"),
        [(2, None, True), (2, LARGE, True), (2, None, False), (4, None, True), (4, LARGE, True), (4, None, False)],
    )
    def test_training_gives_the_owners_the_gradients_of_one_process(self, size, fields, learns, tmp_path):
        """With four processes, one has no layer; where the input does not learn it has nothing that does."""
        config = replace(sfa.TINY, indexer_types=("full", "shared", "full"))
        lengths, layers = (9, 4), random_layers(torch.float64, config)
        batch, split = sfa.Batch.from_lengths(lengths), split_tokens(lengths, size, layout="zigzag")
        generator = torch.Generator().manual_seed(5)
        x_TD = torch.randn(13, config.hidden_size, generator=generator, dtype=torch.float64)

        def learning() -> list[dict[str, torch.Tensor]]:
            return [{name: x.clone().requires_grad_() for name, x in tensors.items()} for tensors in layers]

        alone, inputs, selection = learning(), x_TD.clone().requires_grad_(learns), None
        y_TD = inputs
        for tensors in alone:
            params = params_from_fields(tensors)
            given = None if params.indexer is not None else selection
            out = sfa.sfa_layer(params, y_TD, batch, config=config, selection=given)
            y_TD, selection = y_TD + out.y_TD, out.selection_TK
        y_TD.square().sum().backward()

        def body(rank: int) -> float:
            keys, moved = distributed_collectives(), distributed_collectives(dist.new_group())
            kept = owned_layers(learning(), rank, size, fields=fields)

            def layer(params: Any, start: Any, x_tD: torch.Tensor, selection: Any) -> Any:
                named = {"config": config, "split": split, "while_gathering": start}
                given = None if params.indexer is not None else selection
                out = context_parallel_layer(params, x_tD, batch, keys, selection=given, **named)
                return x_tD + out.y_TD, out.selection_TK

            mine = split.scatter(x_TD).unflatten(0, (size, -1))[rank].clone().requires_grad_(learns)
            y_tD, selection, ring = mine, None, open_ring(from_owners(moved, kept, fields=fields), passes=1)
            for i in range(3):
                (y_tD, selection), ring = checkpoint_layer(layer, ring, i, y_tD, selection)
            close_ring(ring)
            y_tD.square().sum().backward()
            pairs = [(split.gather(keys.all_gather(mine.grad)), inputs.grad)] if learns else []
            for i, tensors in kept.items():
                for name, x in tensors.items():
                    got = torch.zeros_like(x) if x.grad is None else x.grad
                    if fields is not None and name not in fields:
                        got = keys.all_reduce(got)  # a tensor that all keep: each has its part
                    pairs.append((got, alone[i][name].grad))
            apart = [
                (got - (torch.zeros_like(got) if want is None else want)).abs().max().item() for got, want in pairs
            ]
            return max(apart, default=0.0)

        largest = max(float(x.grad.abs().max()) for tensors in alone for x in tensors.values() if x.grad is not None)
        assert max(on_processes(size, tmp_path, body)) <= 1e-12 * largest


class TestDyingRank:
    """A process that dies fails the others' next take of what it should have sent, and nothing hangs."""

    @pytest.mark.parametrize("kind", ["owners", "shards"])
    @pytest.mark.parametrize(("size", "prefetch"), [(2, 0), (2, 2), (4, 0)])
    def test_the_others_take_raises_and_names_the_layer(self, size, kind, prefetch, tmp_path):
        """Rank 1 ends once layer 1 was taken; it owns layer 1 + N, and has a part of every layer's shards.

        What it had started by then, layer 2 where there is a prefetch, may arrive or not.
        """
        layers = random_layers(torch.float32, replace(CONFIG, indexer_types=("full",) * 8))

        def body(rank: int) -> tuple[int, str, str, float]:
            comm = distributed_collectives(dist.new_group(timeout=timedelta(seconds=3)))
            if kind == "owners":
                source = from_owners(comm, owned_layers(layers, rank, size))
            else:
                source = from_shards(comm, {i: shard_layer(x, rank, size) for i, x in enumerate(layers)})
            ring, right = open_ring(source, prefetch=prefetch), 0
            for layer in range(2):
                params, ring = take(ring, layer)
                right += same(params, layers[layer])
            dist.barrier()
            if rank == 1:
                os._exit(0)
            begin = time.monotonic()
            told = again = "nothing"
            try:
                for layer in range(2, 8):
                    params, ring = take(ring, layer)
                    right += same(params, layers[layer])
            except RuntimeError as error:
                told = str(error)
            try:
                take(ring, layer)
            except ValueError as error:
                again = str(error)
            close_ring(ring)
            return right, told, again, time.monotonic() - begin

        answers = on_processes(size, tmp_path, body, dies=frozenset({1}))
        for rank in set(range(size)) - {1}:
            right, told, again, seconds = answers[rank]
            named = re.match(r"take: layer (\d) could not be fetched: ", told)
            assert named, told
            layer = int(named[1])
            assert right == layer  # all earlier ones were right
            assert 2 <= layer <= (2 + (prefetch > 0) if kind == "shards" else 1 + size)
            assert "a ring must be used once" in again
            assert seconds < 10
