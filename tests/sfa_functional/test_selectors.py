"""Selectors: each chooses only what is visible, as many keys as it may, in order; and means what its name says."""

import itertools
import math

import pytest
import torch

import sfa_functional as sfa
from sfa_functional import tiles

T, S = 12, 20
SCALE = 0.5
STARTS, ENDS = [0, 0, 3, 3, 7, 19, 5, 9, -4, 0, 2, 30], [20, 4, 9, 20, 8, 20, 5, 2, 6, 99, -1, 40]
SELECTORS = {
    "window": lambda: sfa.window,
    "random_keys": lambda: sfa.random_keys(torch.Generator().manual_seed(1)),
    "block_topk": lambda: sfa.block_topk(3),
    "best_keys": lambda: sfa.best_keys(SCALE),
    "lightning_indexer": lambda: _lightning,
}
every = pytest.mark.parametrize("name", SELECTORS)


def _lightning(*, q_THE, kv_SE, **compared):
    return sfa.lightning_indexer(**compared)


def _compared(pool=False):
    """Build the arguments of a selector; with a pool, 20 key rows lie scattered in 50."""
    rows = 50 if pool else S
    shapes = {"q_TJI": (T, 16, 4), "k_SI": (rows, 4), "w_TJ": (T, 16), "q_THE": (T, 3, 6), "kv_SE": (rows, 6)}
    compared = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    ranges = {"start_T": torch.tensor(STARTS), "end_T": torch.tensor(ENDS)}
    return compared | ranges | {"row_S": torch.randperm(rows)[:S] if pool else None}


def _packed(compared):
    """Read the key rows out of their pool."""
    row_S = compared["row_S"]
    return compared | {"k_SI": compared["k_SI"][row_S], "kv_SE": compared["kv_SE"][row_S], "row_S": None}


def _visible():
    return [range(max(start, 0), min(end, S)) for start, end in zip(STARTS, ENDS, strict=True)]


def _padded(rows, k):
    return sorted(rows) + [-1] * (k - len(rows))


@every
@pytest.mark.parametrize("k", [1, 4, 6, 19, 25])
@pytest.mark.parametrize("pool", [False, True])
def test_a_selector_fills_k_with_visible_keys_in_order_then_minus_one(name, k, pool):
    topk_TK = SELECTORS[name]()(**_compared(pool), k=k)
    assert (topk_TK.dtype, topk_TK.shape) == (torch.int32, (T, k))
    for topk, seen in zip(topk_TK.tolist(), _visible(), strict=True):
        chosen = [s for s in topk if s >= 0]
        assert topk == _padded(set(chosen), k)
        assert set(chosen) <= set(seen)
        assert len(chosen) == min(k, len(seen))


@every
def test_keys_in_a_pool_are_chosen_like_packed_keys(name):
    compared = _compared(pool=True)
    assert torch.equal(SELECTORS[name]()(**compared, k=4), SELECTORS[name]()(**_packed(compared), k=4))


@every
def test_no_queries_make_an_empty_selection(name):
    compared = {k: None if x is None else x[:0] for k, x in _compared().items()}
    assert SELECTORS[name]()(**compared, k=4).shape == (0, 4)


@every
def test_k_below_one_is_refused(name):
    with pytest.raises(ValueError, match="k must be"):
        SELECTORS[name]()(**_compared(), k=0)


def test_window_chooses_the_last_visible_keys():
    want = [_padded(list(seen)[-4:], 4) for seen in _visible()]
    assert sfa.window(**_compared(), k=4).tolist() == want


def test_random_keys_repeat_themselves_and_leave_random_states_alone():
    compared, generator = _compared(), torch.Generator().manual_seed(1)
    before = torch.get_rng_state()
    select = sfa.random_keys(generator)
    own = generator.get_state()
    first_TK, second_TK = (select(**compared, k=4) for _ in range(2))
    assert torch.equal(first_TK, second_TK)
    assert torch.equal(generator.get_state(), own)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(sfa.random_keys(generator)(**compared, k=4), first_TK)


def test_random_keys_choose_every_visible_key_equally_often():
    tokens, keys, k = 4000, 10, 3
    start_T = torch.arange(tokens)
    select = sfa.random_keys(torch.Generator().manual_seed(5))
    topk_TK = select(kv_SE=torch.zeros(tokens + keys, 1), start_T=start_T, end_T=start_T + keys, k=k, row_S=None)
    share = k / keys
    five_sigma = 5 * (tokens * share * (1 - share)) ** 0.5
    counts = (topk_TK - start_T[:, None]).flatten().bincount(minlength=keys)
    assert (counts - tokens * share).abs().max() < five_sigma


def test_random_keys_do_not_depend_on_how_queries_are_dealt_out():
    compared = _compared()
    whole_TK = sfa.random_keys(torch.Generator().manual_seed(1))(**compared, k=4)
    order = torch.randperm(T)
    dealt = {
        name: x[order] if name in ("q_TJI", "w_TJ", "q_THE", "start_T", "end_T") else x for name, x in compared.items()
    }
    assert torch.equal(sfa.random_keys(torch.Generator().manual_seed(1))(**dealt, k=4), whole_TK[order])


def _block_scores(score_S, seen, block):
    """Give every visible key the best score of its block, blocks counted from the first visible key."""
    return {s: max(float(score_S[r]) for r in seen if (r - seen[0]) // block == (s - seen[0]) // block) for s in seen}


@pytest.mark.parametrize("block", [2, 3, 5])
@pytest.mark.parametrize("k", [3, 6, 7])
def test_block_topk_chooses_the_blocks_with_the_best_keys(block, k):
    compared = _compared()
    score_TS = sfa.index_scores(compared["q_TJI"], compared["k_SI"], compared["w_TJ"])
    want = []
    for score_S, seen in zip(score_TS, _visible(), strict=True):
        best = _block_scores(score_S, seen, block)
        want.append(_padded(sorted(seen, key=lambda s, best=best: (-best[s], s))[:k], k))
    assert sfa.block_topk(block)(**compared, k=k).tolist() == want


def test_block_topk_of_one_is_the_lightning_indexer():
    compared = _compared()
    assert torch.equal(sfa.block_topk(1)(**compared, k=4), _lightning(**compared, k=4))


def test_a_block_keeps_its_place_beside_a_key_that_is_not_a_number():
    compared = _compared()
    compared["k_SI"][5] = math.nan
    got = sfa.block_topk(3)(**compared, k=6)
    assert not (got[[0, 3, 9]] == 5).any()
    assert (got[[0, 3, 9]] >= 0).all()


def test_block_topk_needs_an_indexer_and_a_block():
    with pytest.raises(ValueError, match=r"^block_topk: block must be >= 1; got 0$"):
        sfa.block_topk(0)
    with pytest.raises(ValueError, match=r"^block_topk: the layer must have an indexer; got none$"):
        sfa.block_topk(2)(**_compared() | {"k_SI": None}, k=4)


@pytest.mark.parametrize("name", ["window", "random_keys", "best_keys"])
def test_the_other_selectors_need_no_indexer(name):
    compared = _compared()
    without = compared | {"q_TJI": None, "k_SI": None, "w_TJ": None}
    assert torch.equal(SELECTORS[name]()(**without, k=4), SELECTORS[name]()(**compared, k=4))


def test_best_keys_keep_at_least_the_mass_of_any_other_selection():
    source = _compared()
    compared = source | {"kv_SE": source["kv_SE"][:6], "k_SI": source["k_SI"][:6]}
    ranges = compared["start_T"], compared["end_T"]
    for k in (1, 2, 3):
        best_TK = sfa.best_keys(SCALE)(**compared, k=k)

        def mass(topk_TK):
            return sfa.attention_mass(compared["q_THE"], compared["kv_SE"], topk_TK, *ranges, scale=SCALE)

        best_T = mass(best_TK)
        for rows in itertools.combinations(range(6), k):
            topk_TK = torch.tensor([rows] * T, dtype=torch.int32)
            seen_TK = (topk_TK >= ranges[0][:, None]) & (topk_TK < ranges[1][:, None])
            other_T = mass(torch.where(seen_TK, topk_TK, -1))
            assert (best_T.isnan() | (best_T >= other_T - 1e-12)).all()


def test_selectors_carry_no_gradient():
    compared = {k: x.requires_grad_() if k[0] in "qkw" else x for k, x in _compared().items()}
    assert not any(make()(**compared, k=4).requires_grad for make in SELECTORS.values())


def test_random_keys_do_not_depend_on_tiles_or_on_where_a_request_begins_in_a_tile(monkeypatch):
    select = sfa.random_keys(torch.Generator().manual_seed(3))
    start_T, end_T = torch.tensor([0, 0, 0, 7, 7]), torch.tensor([5, 6, 7, 12, 20])
    named = {"kv_SE": torch.zeros(20, 1), "start_T": start_T, "end_T": end_T, "k": 4, "row_S": None}
    whole = select(**named)
    monkeypatch.setattr(tiles, "TILE_VALUES", 1)
    assert torch.equal(select(**named), whole)
    batched = torch.func.vmap(lambda start, end: select(**(named | {"start_T": start, "end_T": end})))
    assert torch.equal(batched(start_T[None], end_T[None])[0], whole)


def test_random_keys_are_spread_evenly():
    """2000 queries choose 5 of their 50 keys: every place about 200 times, 7 deviations at most."""
    select = sfa.random_keys(torch.Generator().manual_seed(3))
    start_T = torch.arange(2000) * 50
    topk_TK = select(kv_SE=torch.zeros(100000, 1), start_T=start_T, end_T=start_T + 50, k=5, row_S=None)
    counts = (topk_TK - start_T[:, None]).flatten().bincount(minlength=50)
    assert counts.sum() == 10000
    assert ((counts - 200).abs() < 7 * 13.5).all()
