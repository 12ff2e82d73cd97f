"""The layer over a latent cache dealt out to ranks equals one rank over an ordinary cache, step by step and row by row.

One rank runs `sfa_layer` over an ordinary pool; what the ranks' pools must hold is copied out of it, position by
position, by a plain loop over the rule of the specification. Rows that nobody wrote are NaN on both sides.

Every number of ranks (1 to 8) meets every run of positions (1, 2, 3 and a block) and both exchanges; for each, a layout
of the tokens is drawn, or none at all, the kind of pool, the dtype and ``donate``; 8 ranks go without the first decode
step. ``SFA_ALL=1`` runs every layout and every step.
"""

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sfa_functional as sfa
import sharding
from sfa_functional.paged import Cache
from sfa_functional.params import named_fields, params_from_fields
from sharding import CacheSplit, MeshShape, P, TokenSplit, Transfer

CONFIG = replace(sfa.TINY, num_attention_heads=8, index_topk=5, indexer_types=("full", "shared"))
BLOCK = 4
E, L, H, I, D = CONFIG.key_width, CONFIG.kv_lora_rank, 8, CONFIG.index_head_dim, CONFIG.hidden_size  # noqa: E741

PREFILL = [5, 2, 1, 11, 2], [5, 0, 1, 11, 2]  # request 1 is padding; 2 and 4 have no rows on some ranks
STEPS = [1, 1, 1, 1, 1], [3, 0, 0, 1, 2]
LONGEST = [9, 0, 2, 13, 5]  # after these

RANKS, INTERLEAVES = (1, 2, 3, 4, 8), (1, 2, 3, BLOCK)
LAYOUTS = (None, "contiguous", "zigzag", "striped", "balanced")
ALL = os.environ.get("SFA_ALL") == "1"

exchanges = pytest.mark.parametrize("exchange", ["queries", "blocks"])
two_layouts = pytest.mark.parametrize("layout", [None, "zigzag"])

Pools = dict[str, Tensor | None]  # the fields of a cache, by name


def owned(cut: CacheSplit, length: int) -> list[list[int]]:
    """List each rank's positions of a request in their order there: runs dealt out like cards."""
    runs = [range(p, min(p + cut.interleave, length)) for p in range(0, length, cut.interleave)]
    return [[p for run in runs[rank :: cut.num_ranks] for p in run] for rank in range(cut.num_ranks)]


@dataclass
class World:
    """How a cache is dealt out, and the pages of both pools."""

    cut: CacheSplit
    table_BU: Tensor  # of the sharded pool
    blocks: int  # of the sharded pool, on each rank

    @property
    def replicated_BU(self) -> Tensor:
        return sharding.replicated_block_table(self.table_BU, self.cut.num_ranks)

    def prefill(self) -> sfa.Batch:
        return sfa.Batch.from_lengths(*PREFILL, block_table=self.replicated_BU, block_size=BLOCK)

    def split(self, batch: sfa.Batch, layout: Any) -> TokenSplit | None:
        if layout is None:
            return None
        lengths = batch.query_start_B1.diff()
        return sharding.split_tokens(
            lengths, self.cut.num_ranks, layout=layout, seq_lens=batch.seq_len_B, config=CONFIG
        )

    def deal(self, pool: Tensor, lengths: list[int]) -> Tensor:
        """Copy each position's row from an ordinary pool to the pool of its owner, one by one; all else is NaN.

        Ranks' pools lie one after the other, so that ``P("cp")`` cuts them.
        """
        dealt, table, replicated = torch.full_like(pool, torch.nan), self.table_BU.tolist(), self.replicated_BU.tolist()
        for b, length in enumerate(lengths):
            for rank, positions in enumerate(owned(self.cut, length)):
                for i, p in enumerate(positions):
                    page = rank * self.blocks + table[b][i // BLOCK]
                    dealt[page, i % BLOCK] = pool[replicated[b][p // BLOCK], p % BLOCK]
        return dealt


def make_world(num_ranks: int, interleave: int) -> World:
    """Give every request the pages that its fullest rank needs, in a scrambled order, and one page to nobody."""
    cut = CacheSplit(num_ranks, interleave)
    counts = [-(-max(map(len, owned(cut, length))) // BLOCK) for length in LONGEST]
    page = iter(torch.randperm(sum(counts) + 1).tolist())
    table = [[next(page) for _ in range(count)] + [-1] * (max(counts) - count) for count in counts]
    return World(cut, torch.tensor(table, dtype=torch.int32), sum(counts) + 1)


def ordinary_cache(world: World, dtype: torch.dtype, *, kind: str = "joint", shared: bool = False) -> Cache:
    """Allocate one rank's pool, of NaN."""
    pool = sfa.init_cache(
        CONFIG,
        layer=int(shared),
        num_blocks=world.cut.num_ranks * world.blocks,
        block_size=BLOCK,
        dtype=dtype,
        layout=kind,
    )
    return type(pool)(**{name: None if x is None else torch.full_like(x, torch.nan) for name, x in pools(pool).items()})


def pools(cache: Cache) -> Pools:
    return {field.name: getattr(cache, field.name) for field in fields(cache)}


def sharded_pools(world: World, cache: Cache, lengths: list[int]) -> Pools:
    """Deal the latents of an ordinary cache out; index keys stay as they are."""
    deal = {name: x for name, x in pools(cache).items() if name != "index_k" and x is not None}
    return pools(cache) | {name: world.deal(x, lengths) for name, x in deal.items()}


def make_params(dtype: torch.dtype, *, shared: bool = False) -> sfa.LayerParams:
    return sfa.init_params(CONFIG, layer=int(shared), dtype=dtype)


def hidden_states(batch: sfa.Batch, dtype: torch.dtype) -> Tensor:
    """Draw hidden states; rows that belong to no request are NaN."""
    x_TD = torch.randn(len(batch.position_T), D, dtype=dtype)
    return torch.where(batch.request_T[:, None] >= 0, x_TD, torch.nan)


@dataclass
class Step:
    """What ranks return together: rows in global order, pools one after the other."""

    y_TD: Tensor
    selection_TK: Tensor
    pools: Pools


def run_layer(
    world: World,
    params: sfa.LayerParams,
    x_TD: Tensor,
    batch: sfa.Batch,
    given: Pools,
    *,
    layout: str | None = None,
    selection: Tensor | None = None,
    record: list[Transfer] | None = None,
    index_spec: P | None = None,
    params_spec: Any = None,
    **named: Any,
) -> Step:
    """Run the layer on all ranks: whole values in, whole values out. Padding rows of dealt tokens come as NaN."""
    split = world.split(batch, layout)
    cache_class = sfa.JointCache if "kv" in given else sfa.SplitCache
    rows = P() if split is None else P("cp")
    pool_specs = {name: (index_spec or P()) if name == "index_k" else P("cp") for name in given}

    def body(comm: Any, params: Any, x_tD: Tensor, selection: Tensor | None, local: Pools) -> tuple[Any, ...]:
        out = sharding.context_parallel_layer(
            params,
            x_tD,
            batch,
            comm["cp"],
            config=CONFIG,
            split=split,
            cache=cache_class(**local),
            selection=selection,
            cache_split=world.cut,
            **named,
        )
        return out.y_TD, out.selection_TK, pools(out.cache)

    mesh = sharding.simulated_mesh(MeshShape(cp=world.cut.num_ranks), record=record)
    specs = (P() if params_spec is None else params_spec, rows, rows, pool_specs)
    run = sharding.shard_map(body, mesh, in_specs=specs, out_specs=(rows, rows, pool_specs))
    if split is None:
        return Step(*run(params, x_TD, selection, given))
    selection = None if selection is None else split.scatter(selection, fill=-1)
    y_MD, selection_MK, returned = run(params, split.scatter(x_TD, fill=torch.nan), selection, given)
    padding_M = split.index_NC.flatten() < 0
    assert bool(y_MD[padding_M].isfinite().all())
    assert bool((selection_MK[padding_M] == -1).all())
    return Step(split.gather(y_MD), split.gather(selection_MK), returned)


def assert_equals_one_rank(world: World, step: Step, one: sfa.LayerOutput, lengths: list[int]) -> None:
    """Compare outputs, selections and what the pools hold, row by row."""
    tolerance = 1e-12 if one.y_TD.dtype == torch.float64 else 1e-5
    assert sfa.difference(step.y_TD, one.y_TD).max_rel < tolerance
    assert torch.equal(step.selection_TK, one.selection_TK)
    for name, expected in sharded_pools(world, one.cache, lengths).items():
        assert (expected is None) == (step.pools[name] is None)
        if expected is not None:
            assert sfa.difference(step.pools[name], expected).max_rel < tolerance, name


def after_prefill(world: World, params: sfa.LayerParams, **named: Any) -> tuple[sfa.Batch, Cache, list[int]]:
    """Return the step after a prefill, one rank's cache before it, and its lengths then."""
    batch = world.prefill()
    x_TD = hidden_states(batch, params.q_a_proj.dtype)
    cache = ordinary_cache(world, params.q_a_proj.dtype, **named)
    selection = None if params.indexer is not None else positions_of(batch)
    cache = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache, selection=selection, donate=True).cache
    assert cache is not None
    return batch.next(STEPS[0]), cache, batch.seq_len_B.tolist()


def positions_of(batch: sfa.Batch) -> Tensor:
    """Make a selection in random order, with holes, twice no position, and positions that a query does not see."""
    selection_TK = torch.stack([torch.randperm(14) for _ in batch.position_T.tolist()])[:, :7]
    return torch.where(torch.rand(selection_TK.shape) < 0.3, -1, selection_TK).to(torch.int32)


# Several steps


def combinations() -> list[tuple[int, int, str, str | None, str, torch.dtype, bool]]:
    """List ranks, interleave, exchange, layout, kind of pool, dtype and donate."""
    found, draw = [], random.Random(1)
    for ranks, interleave, exchange in itertools.product(RANKS, INTERLEAVES, ["queries", "blocks"]):
        some = [None, draw.choice(LAYOUTS[1:])] if ranks == 3 else [draw.choice(LAYOUTS)]
        for layout in LAYOUTS if ALL else some:
            others = draw.choice(["joint", "split"]), draw.choice([torch.float32, torch.float64]), draw.random() < 0.5
            found.append((ranks, interleave, exchange, layout, *others))
    return found


@pytest.mark.parametrize(
    ("ranks", "interleave", "exchange", "layout", "kind", "dtype", "donate"), combinations(), ids=str
)
def test_prefill_and_decode_over_a_sharded_cache_equal_one_rank(
    ranks: int, interleave: int, exchange: str, layout: str | None, kind: str, dtype: torch.dtype, donate: bool
) -> None:
    world, params = make_world(ranks, interleave), make_params(dtype)
    cache = ordinary_cache(world, dtype, kind=kind)
    batch, given = world.prefill(), sharded_pools(world, cache, [0] * 5)
    steps = STEPS if ALL or ranks < 8 else STEPS[1:]
    for new_lens in (None, *steps):
        batch = batch if new_lens is None else batch.next(new_lens)
        x_TD = hidden_states(batch, dtype)
        one = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache)
        before = {name: x.clone() for name, x in given.items()}
        step = run_layer(world, params, x_TD, batch, given, layout=layout, cache_exchange=exchange, donate=donate)
        assert_equals_one_rank(world, step, one, batch.seq_len_B.tolist())
        for name, x in given.items():  # donated pools are written in place, others not at all
            assert torch.equal(x.nan_to_num(nan=9.0), (step.pools if donate else before)[name].nan_to_num(nan=9.0))
        cache, given = one.cache, step.pools


@exchanges
@two_layouts
def test_a_step_without_new_tokens_changes_nothing(exchange: str, layout: str | None) -> None:
    world, params = make_world(3, 2), make_params(torch.float64)
    batch, cache, lengths = after_prefill(world, params)
    batch = sfa.Batch.from_lengths([0] * 5, lengths, block_table=world.replicated_BU, block_size=BLOCK)
    one = sfa.sfa_layer(params, torch.zeros(0, D, dtype=torch.float64), batch, config=CONFIG, cache=cache)
    given = sharded_pools(world, cache, lengths)
    step = run_layer(world, params, one.y_TD, batch, given, layout=layout, cache_exchange=exchange)
    assert_equals_one_rank(world, step, one, lengths)


@exchanges
@two_layouts
def test_a_batch_of_padding_alone_is_all_zeros(exchange: str, layout: str | None) -> None:
    world, params = make_world(3, 1), make_params(torch.float64)
    table_BU = torch.full((2, 3), -1, dtype=torch.int32)
    batch = sfa.Batch.from_lengths([2, 1], [0, 0], block_table=table_BU, block_size=BLOCK)
    given = sharded_pools(world, ordinary_cache(world, torch.float64), [0] * 5)
    x_TD = hidden_states(batch, torch.float64)
    step = run_layer(world, params, x_TD, batch, given, layout=layout, cache_exchange=exchange)
    assert step.y_TD.tolist() == [[0.0] * D] * 3
    assert step.selection_TK.tolist() == [[-1] * 5] * 3
    assert all(bool(x.isnan().all()) for x in step.pools.values())


# Ways to choose keys


@exchanges
@two_layouts
@pytest.mark.parametrize("interleave", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_given_selections_over_a_sharded_cache_equal_one_rank(
    exchange: str, layout: str | None, interleave: int, shared: bool
) -> None:
    """In any order, with holes and positions that are not seen; a shared layer has neither indexer nor index keys."""
    world, params = make_world(3, interleave), make_params(torch.float64, shared=shared)
    batch, cache, lengths = after_prefill(world, params, shared=shared)
    x_TD, selection = hidden_states(batch, torch.float64), positions_of(batch)
    one = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache, selection=selection)
    given = sharded_pools(world, cache, lengths)
    step = run_layer(world, params, x_TD, batch, given, layout=layout, selection=selection, cache_exchange=exchange)
    assert torch.equal(step.selection_TK, selection)
    assert_equals_one_rank(world, step, one, batch.seq_len_B.tolist())


SELECTORS: dict[str, Callable[[], Any]] = {
    "window": lambda: sfa.window,
    "block_topk": lambda: sfa.block_topk(2),
    "random_keys": lambda: sfa.random_keys(torch.Generator().manual_seed(3)),
}


@two_layouts
@pytest.mark.parametrize("selector", SELECTORS)
def test_selectors_without_latent_keys_choose_over_a_sharded_cache_what_one_rank_chooses(
    layout: str | None, selector: str
) -> None:
    world, params = make_world(3, 2), make_params(torch.float64)
    batch, cache, lengths = after_prefill(world, params)
    x_TD, select = hidden_states(batch, torch.float64), SELECTORS[selector]()
    one = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache, select=select)
    step = run_layer(world, params, x_TD, batch, sharded_pools(world, cache, lengths), layout=layout, select=select)
    assert_equals_one_rank(world, step, one, batch.seq_len_B.tolist())


@two_layouts
def test_a_selector_gets_every_index_key_and_no_latent_keys(layout: str | None) -> None:
    world, params = make_world(2, 1), make_params(torch.float64)
    batch, cache, lengths = after_prefill(world, params)
    seen = []

    def select(**compared: Any) -> Tensor:
        seen.append({name: None if x is None else x.shape[0] for name, x in compared.items() if name != "k"})
        return sfa.window(**compared)

    run_layer(
        world,
        params,
        hidden_states(batch, torch.float64),
        batch,
        sharded_pools(world, cache, lengths),
        layout=layout,
        select=select,
    )
    assert [call["kv_SE"] for call in seen] == [None, None]
    assert [call["k_SI"] for call in seen] == [2 * world.blocks * BLOCK] * 2


def test_best_keys_are_refused_over_a_sharded_cache_in_one_line(unchecked: None) -> None:
    """It compares queries with every latent key, which no rank has."""
    world, params = make_world(2, 1), make_params(torch.float64)
    batch, cache, lengths = after_prefill(world, params)
    given = sharded_pools(world, cache, lengths)
    with pytest.raises(ValueError, match=r"(?m)^best_keys: .*kv.*; got None$"):
        run_layer(world, params, hidden_states(batch, torch.float64), batch, given, select=sfa.best_keys(0.1))


# What else the layer takes


@exchanges
@pytest.mark.parametrize(("weights", "layout"), [("gathered", None), ("gathered", "striped"), ("exchanged", "striped")])
def test_weights_may_be_spread_out_too(exchange: str, weights: str, layout: str | None) -> None:
    world, params = make_world(2, 2), make_params(torch.float64)
    batch, cache, lengths = after_prefill(world, params)
    x_TD, given = hidden_states(batch, torch.float64), sharded_pools(world, cache, lengths)
    one = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache)
    specs = sharding.param_specs(CONFIG, sharding.Rules(tokens="cp"), weights=weights)
    step = run_layer(
        world,
        sharding.shard_flat(params, 2) if weights == "gathered" else params,
        x_TD,
        batch,
        given,
        layout=layout,
        cache_exchange=exchange,
        weights=weights,
        params_spec=specs,
    )
    assert_equals_one_rank(world, step, one, batch.seq_len_B.tolist())


@exchanges
@two_layouts
@pytest.mark.parametrize("name", ["reference", "callable"])
def test_implementations_may_be_named_or_given(exchange: str, layout: str | None, name: str) -> None:
    calls = []

    def counted(*args: Any, **named: Any) -> sfa.AttentionOutput:
        calls.append(args[2].shape)
        return sfa.sparse_attention(*args, **named, implementation="reference")

    world, params = make_world(2, 2), make_params(torch.float64)
    batch, cache, lengths = after_prefill(world, params)
    x_TD, given = hidden_states(batch, torch.float64), sharded_pools(world, cache, lengths)
    implementation = counted if name == "callable" else name
    one = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache)
    step = run_layer(
        world, params, x_TD, batch, given, layout=layout, cache_exchange=exchange, implementation=implementation
    )
    assert_equals_one_rank(world, step, one, batch.seq_len_B.tolist())
    assert len(calls) == (2 if name == "callable" else 0)


@exchanges
@two_layouts
def test_bfloat16_parts_are_merged_in_float32(exchange: str, layout: str | None) -> None:
    """Given the selection, the outputs are as near to float64's as those of one rank."""
    world, params = make_world(4, 1), make_params(torch.bfloat16)
    batch, cache, lengths = after_prefill(world, params)
    x_TD, selection = hidden_states(batch, torch.bfloat16), positions_of(batch)
    wide = params_from_fields({name: x.double() for name, x in named_fields(params)})
    wide_cache = sfa.JointCache(kv=cache.kv.double(), index_k=cache.index_k.double())
    exact = sfa.sfa_layer(wide, x_TD.double(), batch, config=CONFIG, cache=wide_cache, selection=selection)
    given = sharded_pools(world, cache, lengths)
    step = run_layer(world, params, x_TD, batch, given, layout=layout, selection=selection, cache_exchange=exchange)
    assert step.y_TD.dtype == torch.bfloat16
    assert sfa.difference(step.y_TD, exact.y_TD).max_rel < 2e-2
    one = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache, selection=selection)
    error, one_error = ((out.double() - exact.y_TD).norm() for out in (step.y_TD, one.y_TD))
    assert error < 1.25 * one_error


def test_a_pool_with_more_pages_of_index_keys_than_of_latents_passes_the_annotations() -> None:
    cache = sfa.init_cache(CONFIG, num_blocks=2, block_size=BLOCK, dtype=torch.float32, index_blocks=6)
    assert (cache.kv.shape, cache.index_k.shape) == ((2, BLOCK, E), (6, BLOCK, I))
    kv_TE, k_TI = torch.randn(3, E), torch.randn(3, I)
    slot_T, index_slot_T = torch.tensor([7, -1, 0]), torch.tensor([23, 8, -1])
    cache = sfa.write_cache(cache, kv_TE, k_TI, slot_T, index_slot_T=index_slot_T)
    assert torch.equal(cache.kv.flatten(0, 1)[[7, 0]], kv_TE[[0, 2]])
    assert torch.equal(cache.index_k.flatten(0, 1)[[23, 8]], k_TI[[0, 1]])
    assert (int(cache.kv.any(-1).sum()), int(cache.index_k.any(-1).sum())) == (2, 2)


# Who holds what, who sends what


@pytest.mark.parametrize(("ranks", "layout"), [(1, None), (2, "zigzag"), (3, None), (4, "striped"), (8, None)], ids=str)
@pytest.mark.parametrize("interleave", INTERLEAVES)
def test_a_latent_row_is_written_on_one_rank_and_an_index_key_on_all(
    ranks: int, interleave: int, layout: str | None
) -> None:
    """Here each rank has a pool of index keys of its own. No row is NaN where it was written."""
    world, params = make_world(ranks, interleave), make_params(torch.float32)
    batch = world.prefill()
    given = sharded_pools(world, ordinary_cache(world, torch.float32), [0] * 5)
    given["index_k"] = torch.cat([given["index_k"]] * ranks)
    x_TD = hidden_states(batch, torch.float32)
    step = run_layer(world, params, x_TD, batch, given, layout=layout, index_spec=P("cp"))
    tokens = sum(PREFILL[1])
    held_by_rank = [int((~part.isnan().any(-1)).sum()) for part in step.pools["kv"].chunk(ranks)]
    assert held_by_rank == [sum(len(owned(world.cut, n)[rank]) for n in PREFILL[1]) for rank in range(ranks)]
    assert sum(held_by_rank) == tokens
    index_parts = step.pools["index_k"].chunk(ranks)
    assert [int((~part.isnan().any(-1)).sum()) for part in index_parts] == [tokens] * ranks
    assert all(torch.equal(part.nan_to_num(nan=9.0), index_parts[0].nan_to_num(nan=9.0)) for part in index_parts)


@exchanges
@pytest.mark.parametrize("layout", [None, "zigzag", "balanced"])
@pytest.mark.parametrize(
    ("ranks", "dtype", "shared"),
    [(1, torch.float32, False), (2, torch.bfloat16, False), (3, torch.float32, False), (3, torch.float32, True)],
    ids=str,
)
def test_a_rank_sends_what_the_cost_says(
    exchange: str, layout: str | None, ranks: int, dtype: torch.dtype, shared: bool
) -> None:
    """Keys where tokens are dealt out; then queries, selections and parts, or the pages that the batch refers to."""
    world, params = make_world(ranks, 2), make_params(dtype, shared=shared)
    batch, cache, lengths = after_prefill(world, params, shared=shared)
    x_TD, given = hidden_states(batch, dtype), sharded_pools(world, cache, lengths)
    selection, record = positions_of(batch) if shared else None, list[Transfer]()
    run_layer(
        world,
        params,
        x_TD,
        batch,
        given,
        layout=layout,
        selection=selection,
        cache_exchange=exchange,
        record=record,
    )
    split, size, others = world.split(batch, layout), dtype.itemsize, ranks - 1
    rows = len(x_TD) if split is None else split.rows
    expected = []
    if split is not None:
        expected.append(("all_gather", rows * (E + (0 if shared else I)) * others * size))
    parts = rows * H * (L + 1) * others * 4
    if exchange == "blocks":
        pages = len({page for request in world.table_BU.tolist() for page in request if page >= 0})
        expected.append(("all_gather", pages * BLOCK * E * others * size))
    elif split is None:
        expected.append(("all_gather", parts))
    else:
        width = 7 if shared else CONFIG.index_topk
        expected.append(("all_gather", rows * H * E * others * size))
        expected.append(("all_gather", rows * width * others * 4))
        expected.append(("all_to_all", parts))
    for rank in range(ranks):
        assert [(x.collective, x.bytes_sent) for x in record if x.rank == rank] == expected
    assert {(x.axes, x.phase) for x in record} == {(("cp",), "forward")}


# Gradients


@exchanges
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "interleave", "kind"), [(3, 2, "joint"), (2, 1, "split"), (1, 3, "joint")])
def test_gradients_over_a_sharded_cache_equal_one_rank(
    exchange: str, layout: str | None, ranks: int, interleave: int, kind: str
) -> None:
    """Of x, the projections and the rows cached before, through the outputs and the cache that is returned."""
    world, plain = make_world(ranks, interleave), make_params(torch.float64)
    batch, cache, lengths = after_prefill(world, plain, kind=kind)
    y_weight = torch.randn(len(batch.position_T), D, dtype=torch.float64)
    pool_weights = {name: torch.randn_like(x) for name, x in pools(cache).items() if name != "index_k"}

    def leaves(given: Pools) -> tuple[sfa.LayerParams, Tensor, Pools]:
        params = params_from_fields({name: x.clone().requires_grad_() for name, x in named_fields(plain)})
        wanted = {name: x.clone().requires_grad_() for name, x in given.items() if name != "index_k"}
        return params, x_TD.clone().requires_grad_(), given | wanted

    def gradients(loss: Tensor, params: sfa.LayerParams, x_TD: Tensor, given: Pools) -> dict[str, Tensor]:
        wanted = {"x": x_TD, **dict(named_fields(params)), **{name: given[name] for name in pool_weights}}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        zeroed = (torch.zeros_like(x) if g is None else g for x, g in zip(wanted.values(), found, strict=True))
        return dict(zip(wanted, zeroed, strict=True))

    x_TD = hidden_states(batch, torch.float64)
    params, x_leaf, given = leaves(pools(cache))
    one = sfa.sfa_layer(params, x_leaf, batch, config=CONFIG, cache=type(cache)(**given))
    loss = (one.y_TD * y_weight).sum()
    loss = loss + sum((pools(one.cache)[name].nan_to_num() * w).sum() for name, w in pool_weights.items())
    expected = gradients(loss, params, x_leaf, given)
    for name in pool_weights:
        expected[name] = world.deal(expected[name], batch.seq_len_B.tolist()).nan_to_num()

    params, x_leaf, given = leaves(sharded_pools(world, cache, lengths))
    step = run_layer(world, params, x_leaf, batch, given, layout=layout, cache_exchange=exchange)
    dealt = {name: world.deal(w, batch.seq_len_B.tolist()).nan_to_num() for name, w in pool_weights.items()}
    loss = (step.y_TD * y_weight).sum()
    loss = loss + sum((step.pools[name].nan_to_num() * w).sum() for name, w in dealt.items())
    for name, gradient in gradients(loss, params, x_leaf, given).items():
        assert sfa.difference(gradient, expected[name]).max_abs < 1e-11 * max(1.0, float(expected[name].abs().max()))
        learns = not name.startswith("indexer.")
        assert bool(expected[name].any()) == bool(gradient.any()) == learns, name


# Plans and merging


def test_local_lengths_and_positions_are_those_of_dealing_runs_out() -> None:
    for ranks, interleave in itertools.product(range(1, 6), range(1, 6)):
        cut = CacheSplit(ranks, interleave)
        lengths = torch.arange(40)
        dealt = [owned(cut, n) for n in lengths.tolist()]
        local_NB = cut.local_lengths(lengths)
        assert local_NB.tolist() == [[len(of_ranks[rank]) for of_ranks in dealt] for rank in range(ranks)]
        assert torch.equal(local_NB.sum(0), lengths)
        where = {p: (rank, i) for rank, mine in enumerate(dealt[-1]) for i, p in enumerate(mine)}
        position = torch.arange(-2, 39)
        got = zip(cut.owner(position).tolist(), cut.local_position(position).tolist(), strict=True)
        assert list(got) == [(-1, -1), (-1, -1), *(where[p] for p in range(39))]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("interleave", INTERLEAVES)
def test_attending_per_rank_and_merging_is_attending_once(ranks: int, interleave: int) -> None:
    """For selections in random order with holes, of some queries to nothing at all."""
    cut, length = CacheSplit(ranks, interleave), 37
    q_THE = torch.randn(20, 3, 6, dtype=torch.float64)
    kv_SE = torch.randn(length, 6, dtype=torch.float64)
    topk_TK = torch.stack([torch.randperm(length)[:16] for _ in range(20)])
    topk_TK = torch.where(torch.rand(20, 16) < torch.linspace(0, 1.1, 20)[:, None], -1, topk_TK).to(torch.int32)
    parts = []
    for rank, positions in enumerate(owned(cut, length)):
        mine_TK = cut.local_selection(topk_TK, rank)
        wanted = [[positions.index(s) for s in row if s in positions] for row in topk_TK.tolist()]
        assert mine_TK.tolist() == [row + [-1] * (16 - len(row)) for row in wanted]
        parts.append(sfa.sparse_attention(q_THE, kv_SE[positions], mine_TK, scale=0.4, value_dim=4))
    once = sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.4, value_dim=4)
    assert int((once.lse_TH[:, 0] == -torch.inf).sum()) > 0
    for result, expected in zip(sfa.merge_attention(parts), once, strict=True):
        assert sfa.difference(result, expected).max_rel < 1e-12


def test_an_empty_part_is_neutral_in_any_place() -> None:
    """Whatever its output holds, and in its gradient."""
    q_THE, kv_SE = torch.randn(4, 2, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    selections = torch.arange(9, dtype=torch.int32).view(3, 1, 3).expand(3, 4, 3)
    parts = [sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.4, value_dim=5) for topk_TK in selections]
    once = sfa.dense_attention(q_THE, kv_SE, torch.zeros(4).long(), torch.full((4,), 9), scale=0.4, value_dim=5)
    for filled, count in itertools.product((0.0, 5.0, torch.nan), (1, 2)):
        nothing_THL = torch.full((4, 2, 5), filled, dtype=torch.float64, requires_grad=True)
        empty = sfa.AttentionOutput(nothing_THL, torch.full((4, 2), -torch.inf, dtype=torch.float64))
        for order in itertools.permutations(parts + [empty] * count):
            merged = sfa.merge_attention(order)
            for result, expected in zip(merged, once, strict=True):
                assert sfa.difference(result, expected).max_rel < 1e-14
        (gradient,) = torch.autograd.grad(merged.out_THL.sum() + merged.lse_TH.sum(), nothing_THL)
        assert not bool(gradient.any())
        alone = sfa.merge_attention([empty] * count)
        assert not bool(alone.out_THL.any())
        assert bool((alone.lse_TH == -torch.inf).all())


# What is refused


def refusal(world: World, cache: Cache | None, batch: sfa.Batch, *, ranks: int = 2, **named: Any) -> str:
    """Return the error that all ranks raise, before anything is sent."""
    record: list[Transfer] = []
    dtype = named.pop("dtype", torch.float32)
    params, x_TD = make_params(dtype), hidden_states(batch, dtype).nan_to_num()
    named = {"config": CONFIG, "split": None, "cache_split": world.cut} | named
    x_tD = x_TD if named["split"] is None else x_TD[: named["split"].rows]

    def body(comm: Any) -> str:
        with pytest.raises(ValueError) as refused:
            sharding.context_parallel_layer(params, x_tD, batch, comm["cp"], cache=cache, **named)
        return str(refused.value)

    mesh = sharding.simulated_mesh(MeshShape(cp=ranks), record=record)
    message = sharding.shard_map(body, mesh, in_specs=(), out_specs=P())()  # of all ranks, or it is refused itself
    assert record == []
    return message


def local_cache(world: World, *, width: int = E, size: int = BLOCK, **changed: Any) -> sfa.JointCache:
    """Allocate one rank's pools of zeros."""
    rows, ranks = world.blocks * BLOCK, world.cut.num_ranks
    made = {"kv": torch.zeros(rows // size, size, width), "index_k": torch.zeros(ranks * rows // size, size, I)}
    return sfa.JointCache(**made | changed)


def test_a_cache_split_for_another_number_of_ranks_is_refused() -> None:
    world = make_world(2, 1)
    message = refusal(world, local_cache(world), world.prefill(), ranks=3)
    assert message == "context_parallel_layer: cache_split must be for 3 ranks; got 2"


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_split_without_a_cache_is_refused(paged: bool) -> None:
    world = make_world(2, 1)
    message = refusal(world, None, world.prefill() if paged else sfa.Batch.from_lengths([3, 2]))
    rule = "a batch with cached context or a block table" if paged else "a cache_split"
    assert message == f"context_parallel_layer: {rule} needs a cache; got None"


def test_an_unknown_exchange_is_refused(unchecked: None) -> None:
    world = make_world(2, 1)
    message = refusal(world, local_cache(world), world.prefill(), cache_exchange="pages")
    assert message == "context_parallel_layer: cache_exchange must be 'queries' or 'blocks'; got 'pages'"


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ([[2, 3, 4], [0, 1, 5]], "must have a multiple of 2 columns; got 3"),
        ([[3, 2], [0, 1]], "replicated_block_table for 2 ranks; got page 3 at request 0, column 0"),
        ([[2, 3], [0, 4]], "replicated_block_table for 2 ranks; got page 4 at request 1, column 1"),
        ([[2, 3], [0, -1]], "replicated_block_table for 2 ranks; got page -1 at request 1, column 1"),
        ([[1, 2], [4, 5]], "replicated_block_table for 2 ranks; got page 1 at request 0, column 0"),
    ],
)
@two_layouts
def test_a_block_table_that_is_not_in_replicated_form_is_refused(
    table: list[list[int]], rule: str, layout: str | None
) -> None:
    world = make_world(2, 1)
    batch = sfa.Batch.from_lengths([3, 2], block_table=torch.tensor(table, dtype=torch.int32), block_size=BLOCK)
    message = refusal(world, local_cache(world), batch, split=world.split(batch, layout))
    assert message.startswith("CacheSplit.local_block_table: ")
    assert message.endswith(rule)


WRONG_POOLS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": E + 1}, "the pool must hold 32 columns of torch.float32"),
    "dtype": ({"kv": torch.zeros(40, BLOCK, E).double()}, "the pool must hold 32 columns of torch.float32"),
    "no index keys": ({"index_k": None}, "a layer with an indexer needs a pool with index keys"),
    "width of index keys": ({"index_k": torch.zeros(40, BLOCK, I + 1)}, "index_k"),
    "dtype of index keys": ({"index_k": torch.zeros(40, BLOCK, I).double()}, "index_k"),
    "smaller pages than the batch's": ({"size": BLOCK // 2}, "rows"),
    "too few pages": ({"kv": torch.zeros(2, BLOCK, E)}, "page"),
    "too few pages of index keys": ({"index_k": torch.zeros(7, BLOCK, I)}, "page"),
}


@pytest.mark.parametrize("wrong", WRONG_POOLS)
@two_layouts
def test_pools_that_do_not_fit_are_refused_before_anything_is_sent(wrong: str, layout: str | None) -> None:
    changed, rule = WRONG_POOLS[wrong]
    world = make_world(2, 1)
    batch = world.prefill()
    assert rule in refusal(world, local_cache(world, **changed), batch, split=world.split(batch, layout))


@exchanges
def test_a_page_that_one_rank_alone_lacks_is_refused_on_all(exchange: str) -> None:
    """Of 9 positions in runs of a page, the first of two ranks holds 5: the other would wait for it."""
    world = replace(make_world(2, BLOCK), table_BU=torch.tensor([[0, 1]], dtype=torch.int32))
    batch = sfa.Batch.from_lengths([9], block_table=world.replicated_BU, block_size=BLOCK)
    cache = local_cache(world, kv=torch.zeros(1, BLOCK, E))
    assert "page" in refusal(world, cache, batch, cache_exchange=exchange)


@exchanges
def test_a_table_too_short_for_the_fullest_rank_is_refused(exchange: str) -> None:
    """Runs of 3 in pages of 4: of 8 positions the first of two ranks holds 5, and its only page holds 4."""
    world = replace(make_world(2, 3), table_BU=torch.tensor([[0]], dtype=torch.int32))
    batch = sfa.Batch.from_lengths([8], block_table=world.replicated_BU, block_size=BLOCK)
    assert "rows" in refusal(world, local_cache(world), batch, cache_exchange=exchange)


DONATED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "contiguous": (lambda kv: kv.mT.contiguous().mT, "a donated pool must be contiguous"),
    "leaf": (lambda kv: kv.requires_grad_(), "a donated pool must not be a leaf that requires grad"),
}


@pytest.mark.parametrize("wrong", DONATED)
@two_layouts
def test_donated_pools_that_can_not_be_written_are_refused_before_anything_is_sent(
    wrong: str, layout: str | None
) -> None:
    change, rule = DONATED[wrong]
    world = make_world(2, 1)
    batch, cache = world.prefill(), local_cache(world)
    cache = replace(cache, kv=change(cache.kv))
    assert rule in refusal(world, cache, batch, split=world.split(batch, layout), donate=True)


def test_a_split_pool_is_refused_for_its_width() -> None:
    world = make_world(2, 1)
    cache = sfa.SplitCache(
        latent=torch.zeros(world.blocks, BLOCK, L),
        rope=torch.zeros(world.blocks, BLOCK, E),
        index_k=torch.zeros(2 * world.blocks, BLOCK, I),
    )
    assert "the pool must hold 32 columns" in refusal(world, cache, world.prefill())
