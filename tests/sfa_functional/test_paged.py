"""Pages: slots, reads and writes equal plain loops; a write touches what it should and counts each gradient once."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa

SHARED = replace(sfa.TINY, indexer_types=("full", "shared"))
TABLE = torch.tensor([[4, 0, -1], [2, -1, 1]], dtype=torch.int32)
SLOTS = {
    "all new": [3, 0, 7, 5],
    "nothing first": [-1, 3, 7, 0],
    "nothing last": [3, 7, 0, -1],
    "nothing between": [3, -1, -1, 0],
    "nothing at all": [-1, -1, -1, -1],
    "row 0 not first": [-1, 0, -1, 2],
}


def _cache(layout="joint", config=sfa.TINY, layer=0, dtype=torch.float64):
    blank = sfa.init_cache(config, num_blocks=2, block_size=4, dtype=dtype, layer=layer, layout=layout)
    return tree_map(torch.randn_like, blank)


def _new(tokens=4, dtype=torch.float64):
    return torch.randn(tokens, 32, dtype=dtype), torch.randn(tokens, 16, dtype=dtype)


def _flat(cache):
    rows = sfa.cache_rows(cache)
    kv_SE = torch.cat([rows.latent_SL, rows.rope_SR], -1) if isinstance(rows, sfa.SplitRows) else rows
    return kv_SE, cache.index_k.flatten(0, 1)


# --- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_token_slots_follow_the_table_and_are_minus_one_elsewhere(block_size):
    cases = list(itertools.product(range(-1, 4), range(-2, 3 * block_size + 2)))
    request_T, position_T = (torch.tensor([case[i] for case in cases]) for i in (0, 1))
    got_T = sfa.token_slots(TABLE, request_T, position_T, block_size=block_size)
    assert got_T.dtype == torch.int64
    for slot, (request, position) in zip(got_T.tolist(), cases, strict=True):
        inside = request in (0, 1) and 0 <= position < 3 * block_size
        page = int(TABLE[request, position // block_size]) if inside else -1
        assert slot == (page * block_size + position % block_size if page >= 0 else -1), (request, position)


def test_token_slots_are_computed_in_int64():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    one_T = torch.tensor([0], dtype=torch.int32)
    assert sfa.token_slots(table, one_T, one_T + 5, block_size=64).tolist() == [(2**31 - 1) * 64 + 5]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_an_empty_table_has_no_slots(shape):
    table = torch.zeros(shape, dtype=torch.int32)
    assert sfa.token_slots(table, torch.zeros(2).long(), torch.zeros(2).long(), block_size=4).tolist() == [-1, -1]


def test_validate_block_table_names_the_first_token_without_a_page():
    lengths = torch.tensor([6, 2])
    assert sfa.validate_block_table(TABLE, lengths, block_size=3) is None
    assert sfa.validate_block_table(TABLE, lengths, block_size=3, num_blocks=5) is None
    with pytest.raises(ValueError, match=r"^validate_block_table: position 6 of request 0 must have a page; got -1$"):
        sfa.validate_block_table(TABLE, lengths + 1, block_size=3)
    with pytest.raises(ValueError, match=r"^validate_block_table: position 3 of request 1 must have a page; got -1$"):
        sfa.validate_block_table(TABLE, torch.tensor([6, 7]), block_size=3)
    with pytest.raises(
        ValueError, match=r"^validate_block_table: position 0 of request 0 must have a page in 0\.\.3; got 4$"
    ):
        sfa.validate_block_table(TABLE, lengths, block_size=3, num_blocks=4)
    with pytest.raises(ValueError, match=r"^validate_block_table: a sequence must fit its \d+ rows; got 99$"):
        sfa.validate_block_table(TABLE, torch.tensor([99, 1]), block_size=3)


def test_map_selection_translates_key_rows_and_keeps_unused_entries():
    row_S = torch.tensor([7, -1, 300, 0])
    topk_TK = torch.tensor([[3, 0, -1, 2], [1, 4, 2**31 - 1, -9]], dtype=torch.int32)
    got_TK = sfa.map_selection(topk_TK, row_S)
    assert got_TK.tolist() == [[0, 7, -1, 300], [-1, -1, -1, -1]]
    assert got_TK.dtype == torch.int32
    assert sfa.map_selection(topk_TK, row_S[:0]).tolist() == [[-1] * 4] * 2


def test_allocate_blocks_gives_every_request_its_own_pages():
    assert sfa.allocate_blocks([5, 0, 4, 1], 4).tolist() == [[0, 1], [-1, -1], [2, -1], [3, -1]]
    assert sfa.allocate_blocks([0, 0], 4).tolist() == [[-1], [-1]]
    assert sfa.allocate_blocks([], 4).shape == (0, 1)
    for lengths in itertools.product(range(8), repeat=3):
        table = sfa.allocate_blocks(lengths, 3)
        used = table[table >= 0].tolist()
        assert used == list(range(sum(-(-n // 3) for n in lengths)))
        assert (table >= 0).sum(1).tolist() == [-(-n // 3) for n in lengths]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("apart", [False, True])
def test_fetch_rows_reads_zeros_outside_and_keeps_poison_where_it_is(poison, apart):
    kv_SE = torch.randn(5, 4)
    kv_SE[0] = poison
    kv_SE.requires_grad_()
    rows = sfa.SplitRows(latent_SL=kv_SE[:, :3], rope_SR=kv_SE[:, 3:]) if apart else kv_SE
    index = torch.tensor([[3, -1, 5], [3, 2**40, -(2**40)]])
    got = sfa.fetch_rows(rows, index)
    want = torch.zeros(2, 3, 4)
    want[:, 0] = kv_SE[3].detach()
    assert torch.equal(got, want)
    (grad_SE,) = torch.autograd.grad(got.sum(), kv_SE)
    assert torch.equal(grad_SE, torch.tensor([0.0, 0, 0, 2, 0])[:, None].expand(5, 4))


def test_fetch_rows_takes_slices_and_empty_pools():
    kv_SE = torch.randn(5, 4)
    rows = sfa.SplitRows(latent_SL=kv_SE[:, :3], rope_SR=kv_SE[:, 3:])
    assert torch.equal(sfa.fetch_rows(rows, slice(1, 3)), kv_SE[1:3])
    assert sfa.fetch_rows(kv_SE, slice(1, 3)).data_ptr() == kv_SE[1:3].data_ptr()
    assert torch.equal(sfa.fetch_rows(kv_SE[:0], torch.tensor([[0, -1]])), torch.zeros(1, 2, 4))


# --- caches --------------------------------------------------------------------------------------------------------


def test_init_cache_allocates_zeroed_pages_of_the_models_widths():
    named = {"num_blocks": 3, "block_size": 5, "dtype": torch.bfloat16}
    joint, split = (sfa.init_cache(sfa.TINY, layout=layout, **named) for layout in ("joint", "split"))
    assert [tuple(x.shape) for x in tree_leaves(joint)] == [(3, 5, 32), (3, 5, 16)]
    assert [tuple(x.shape) for x in tree_leaves(split)] == [(3, 5, 24), (3, 5, 8), (3, 5, 16)]
    assert not any(x.any() for x in tree_leaves((joint, split)))
    assert {x.dtype for x in tree_leaves((joint, split))} == {torch.bfloat16}
    for layout in ("joint", "split"):
        assert sfa.init_cache(SHARED, layer=1, layout=layout, **named).index_k is None


@pytest.mark.parametrize("layout", ["joint", "split"])
def test_cache_rows_are_a_view_numbered_by_slot(layout):
    cache = _cache(layout)
    viewed = tree_leaves(sfa.cache_rows(cache))
    pages = [cache.kv] if layout == "joint" else [cache.latent, cache.rope]
    for rows, page in zip(viewed, pages, strict=True):
        assert rows.data_ptr() == page.data_ptr()
        assert torch.equal(rows[4 + 3], page[1, 3])


@pytest.mark.parametrize("layout", ["joint", "split"])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("index_slots", [None, "nothing first"])
def test_write_cache_equals_a_loop(layout, donate, slots, index_slots):
    cache, (kv_TE, k_TI) = _cache(layout), _new()
    want = [x.clone() for x in _flat(cache)]
    slot_T = torch.tensor(SLOTS[slots])
    index_slot_T = None if index_slots is None else torch.tensor(SLOTS[index_slots])
    for t in range(4):
        for pool, rows, chosen in ((want[0], kv_TE, slot_T), (want[1], k_TI, index_slot_T)):
            chosen = slot_T if chosen is None else chosen
            if chosen[t] >= 0:
                pool[chosen[t]] = rows[t]
    got = sfa.write_cache(cache, kv_TE, k_TI, slot_T, index_slot_T=index_slot_T, donate=donate)
    assert type(got) is type(cache)
    assert all(torch.equal(a, b) for a, b in zip(_flat(got), want, strict=True))


def test_a_donated_cache_is_written_in_place_and_another_is_left_alone():
    slot_T, rows = torch.tensor(SLOTS["nothing between"]), _new()
    for layout in ("joint", "split"):
        cache = _cache(layout)
        before = [x.clone() for x in tree_leaves(cache)]
        kept = sfa.write_cache(cache, *rows, slot_T)
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(cache), before, strict=True))
        given = sfa.write_cache(cache, *rows, slot_T, donate=True)
        pointers = [[x.data_ptr() for x in tree_leaves(c)] for c in (cache, given, kept)]
        assert pointers[0] == pointers[1]
        assert not set(pointers[0]) & set(pointers[2])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("slots", SLOTS)
def test_poison_in_rows_that_are_not_written_reaches_nothing(poison, slots):
    slot_T = torch.tensor(SLOTS[slots])
    cache, rows = _cache(), _new()
    want = sfa.write_cache(cache, *rows, slot_T)
    spoiled = [torch.where(slot_T[:, None] < 0, poison, x).requires_grad_() for x in rows]
    got = sfa.write_cache(cache, *spoiled, slot_T)
    assert all(torch.equal(a, b) for a, b in zip(_flat(got), _flat(want), strict=True))
    grads = torch.autograd.grad(sum(x.square().sum() for x in _flat(got)), spoiled)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("layout", ["joint", "split"])
@pytest.mark.parametrize("slots", SLOTS)
def test_gradients_of_pool_and_rows_count_once(layout, slots):
    slot_T = torch.tensor(SLOTS[slots])
    valid_T = slot_T >= 0
    cache, rows = tree_map(lambda x: x.requires_grad_(), (_cache(layout), _new()))
    leaves = [*tree_leaves(cache), *rows]
    cotangents = torch.randn(8, 32, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
    got = torch.autograd.grad(_flat(sfa.write_cache(cache, *rows, slot_T)), leaves, cotangents)
    put = [pool.index_put((slot_T[valid_T],), new[valid_T]) for pool, new in zip(_flat(cache), rows, strict=True)]
    want = torch.autograd.grad(put, leaves, cotangents)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_tokens_write_nothing():
    cache, none_T = _cache(), torch.zeros(0, dtype=torch.int64)
    got = sfa.write_cache(cache, *_new(0), none_T)
    assert all(torch.equal(a, b) for a, b in zip(_flat(got), _flat(cache), strict=True))


def test_no_index_keys_leave_the_index_pool_as_it_is():
    cache, shared = _cache(), _cache(config=SHARED, layer=1)
    kv_TE, slot_T = _new()[0], torch.tensor([0, 1, 2, 3])
    assert sfa.write_cache(cache, kv_TE, None, slot_T).index_k is cache.index_k
    got = sfa.write_cache(shared, kv_TE, None, slot_T)
    assert got.index_k is None
    assert torch.equal(got.kv[0], kv_TE)


def test_vmap_over_a_batch_of_caches_equals_a_loop(unchecked):
    caches = [_cache() for _ in range(3)]
    rows = [_new() for _ in range(3)]
    slot_BT = torch.tensor([SLOTS["nothing first"], SLOTS["nothing at all"], SLOTS["all new"]])
    stacked = [tree_map(lambda *xs: torch.stack(xs), *trees) for trees in (caches, rows)]
    got = torch.func.vmap(sfa.write_cache)(stacked[0], *stacked[1], slot_BT)
    for b in range(3):
        want = sfa.write_cache(caches[b], *rows[b], slot_BT[b])
        assert torch.equal(got.kv[b], want.kv)
        assert torch.equal(got.index_k[b], want.index_k)


@pytest.mark.parametrize("layout", ["joint", "split"])
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(layout, unchecked):
    cache, (kv_TE, k_TI) = _cache(layout), _new()
    before = [x.clone() for x in tree_leaves(cache)]
    slot_T = torch.tensor(SLOTS["all new"])
    cases = [
        ("kv must have the pool's width and dtype; got", (kv_TE[:, 1:], k_TI, slot_T)),
        ("kv must have the pool's width and dtype; got", (kv_TE.float(), k_TI, slot_T)),
        ("k must have index_k's width and dtype; got", (kv_TE, k_TI[:, 1:], slot_T)),
        ("k must have index_k's width and dtype; got", (kv_TE, k_TI.float(), slot_T)),
        ("slot_T must be 4 integers; got (torch.int64, (3,))", (kv_TE, k_TI, slot_T[1:])),
        ("k_TI must have 4 rows; got (3, 16)", (kv_TE, k_TI[1:], slot_T)),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError) as error:
            sfa.write_cache(cache, *arguments, donate=True)
        assert str(error.value).startswith(f"write_cache: {message}")
    with pytest.raises(ValueError, match=r"^write_cache: k_TI must be None for a pool without index keys; got"):
        sfa.write_cache(replace(cache, index_k=None), kv_TE, k_TI, slot_T, donate=True)
    with pytest.raises(ValueError, match=r"^write_cache: implementation 'npu' can't run: "):
        sfa.write_cache(cache, kv_TE, k_TI, slot_T, donate=True, implementation="npu")
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(cache), before, strict=True))


def test_a_slot_past_the_pool_is_an_index_error():
    with pytest.raises(IndexError):
        sfa.write_cache(_cache(), *_new(), torch.tensor([0, 1, 2, 8]))


def test_a_callable_replaces_the_write():
    cache, (kv_TE, k_TI), slot_T = _cache(), _new(), torch.tensor(SLOTS["all new"])

    def kernel(pool, kv, k, slots, *, index_slot_T, donate):
        assert (pool, kv, k, slots, index_slot_T, donate) == (cache, kv_TE, k_TI, slot_T, None, True)
        return pool

    assert sfa.write_cache(cache, kv_TE, k_TI, slot_T, donate=True, implementation=kernel) is cache


def test_wrong_counts_and_layouts_are_refused(unchecked):
    named = {"num_blocks": 1, "block_size": 4, "dtype": torch.float32}
    for change, message in (
        ({"num_blocks": 0}, "counts must be >= 1; got (0, 4)"),
        ({"block_size": 0}, "counts must be >= 1; got (1, 0)"),
        ({"layout": "ragged"}, "layout must be 'joint' or 'split'; got 'ragged'"),
        ({"layer": 2}, "layer must be in 0..1; got 2"),
    ):
        with pytest.raises(ValueError) as error:
            sfa.init_cache(sfa.TINY, **(named | change))
        assert str(error.value) == f"init_cache: {message}"
    with pytest.raises(ValueError, match=r"^allocate_blocks: block_size must be >= 1; got 0$"):
        sfa.allocate_blocks([1], 0)
    with pytest.raises(ValueError, match=r"^allocate_blocks: lengths must be >= 0; got \[1, -1\]$"):
        sfa.allocate_blocks([1, -1], 4)
    with pytest.raises(ValueError, match=r"^token_slots: block_size must be >= 1; got 0$"):
        sfa.token_slots(TABLE, torch.zeros(2).long(), torch.zeros(2).long(), block_size=0)
    with pytest.raises(ValueError, match=r"^token_slots: position_T must be 2 integers; got \(torch.int64, \(3,\)\)$"):
        sfa.token_slots(TABLE, torch.zeros(2).long(), torch.zeros(3).long(), block_size=4)


def test_a_donated_pool_that_can_not_be_written_in_place_is_refused_before_anything_is_written(unchecked):
    rows, slots = torch.ones(1, 6), torch.tensor([2])
    keys = torch.ones(1, 5)
    leaf = sfa.JointCache(kv=torch.zeros(2, 4, 6).requires_grad_(), index_k=torch.zeros(2, 4, 5))
    strided = sfa.JointCache(kv=torch.zeros(2, 8, 6)[:, :4], index_k=torch.zeros(2, 4, 5))
    for cache, message in ((leaf, "a donated pool must not be a leaf"), (strided, "a donated pool must be contiguous")):
        with pytest.raises(ValueError, match=f"^write_cache: {message}"):
            sfa.write_cache(cache, rows, keys, slots, donate=True)
        assert cache.index_k.eq(0).all()
        assert sfa.write_cache(cache, rows, keys, slots).kv.flatten(0, 1)[2].eq(1).all()


def test_index_keys_for_a_pool_without_them_are_refused_in_one_line(unchecked):
    cache = sfa.JointCache(kv=torch.zeros(2, 4, 6))
    message = r"^write_cache: k_TI must be None for a pool without index keys; got \(1, 5\)$"
    with pytest.raises(ValueError, match=message):
        sfa.write_cache(cache, torch.ones(1, 6), torch.ones(1, 5), torch.tensor([2]))
