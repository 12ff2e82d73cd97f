"""Attention: every implementation equals a plain loop, forward and backward, on hostile cases; nothing leaks."""

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa

NAN, INF = math.nan, math.inf
IMPLEMENTATIONS = ["reference", "blockwise"]
NAMED = {"scale": 0.7, "value_dim": 4}
H, E, L = 3, 6, 4
SENTINELS = [-1, -7, 12, 17, 2**31 - 1, -(2**31)]
"""Unused entries of a selection of 12 rows."""


def _q(tokens, dtype=torch.float64):
    return torch.randn(tokens, H, E, dtype=dtype)


def _kv(keys, dtype=torch.float64):
    return torch.randn(keys, E, dtype=dtype)


def _split(kv_SE):
    return sfa.SplitRows(latent_SL=kv_SE[:, :L].clone(), rope_SR=kv_SE[:, L:].clone())


def _joined(rows):
    return torch.cat([rows.latent_SL, rows.rope_SR], -1) if isinstance(rows, sfa.SplitRows) else rows


def _int32(rows):
    return torch.tensor(rows, dtype=torch.int32)


def _selection(tokens=8, keys=12, used=5):
    """Select different rows in random order, with unused entries of every kind between them."""
    rows = []
    for _ in range(tokens):
        mixed = torch.tensor([*torch.randperm(keys)[:used].tolist(), *SENTINELS])
        rows.append(mixed[torch.randperm(len(mixed))].tolist())
    return _int32(rows)


def _loop(q_THE, kv_SE, rows_of, scale=NAMED["scale"]):
    """Attend query by query and head by head to lists of rows, as the formula says."""
    outs, lses = [q_THE[:0, :, :L]], [q_THE[:0].sum(-1)]
    for q_HE, rows in zip(q_THE, rows_of, strict=True):
        if rows:
            z_HK = scale * q_HE @ kv_SE[rows].T
            outs.append((z_HK.exp() @ kv_SE[rows, :L] / z_HK.exp().sum(-1, keepdim=True))[None])
            lses.append(z_HK.exp().sum(-1).log()[None])
        else:
            outs.append(0 * q_HE[None, :, :L])
            lses.append(0 * q_HE[None].sum(-1) - INF)
    return torch.cat(outs), torch.cat(lses)


def _values_and_gradients(function, q_THE, rows, cotangents):
    """Return out and lse, and the gradients of q and of the rows through both."""
    q_THE, rows = tree_map(lambda x: x.detach().requires_grad_(), (q_THE, rows))
    result = function(q_THE, rows)
    leaves = [q_THE, *tree_leaves(rows)]
    grads = torch.autograd.grad(result, leaves, cotangents, allow_unused=True, materialize_grads=True)
    return [*result, grads[0], torch.cat(grads[1:], -1)]


def _assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def _cotangents(tokens):
    return torch.randn(tokens, H, L, dtype=torch.float64), torch.randn(tokens, H, dtype=torch.float64)


# --- equal to the loop ---------------------------------------------------------------------------------------------

SPARSE = {
    "all rows in order": lambda: (_q(5), _kv(7), torch.arange(7, dtype=torch.int32).expand(5, 7)),
    "unsorted, holes and sentinels": lambda: (_q(8), _kv(12), _selection()),
    "rows apart": lambda: (_q(8), _split(_kv(12)), _selection()),
    "empty queries": lambda: (_q(4), _kv(12), _int32([[-1, -1], [3, 12], [99, -5], [-1, 0]])),
    "only empty queries": lambda: (_q(2), _kv(12), _int32([[-1, 12], [99, -5]])),
    "no entries": lambda: (_q(4), _kv(12), torch.zeros(4, 0, dtype=torch.int32)),
    "no queries": lambda: (_q(0), _kv(12), torch.zeros(0, 3, dtype=torch.int32)),
    "no keys": lambda: (_q(4), _kv(0), _selection(4)),
    "no keys, rows apart": lambda: (_q(4), _split(_kv(0)), _selection(4)),
    "no keys and no entries": lambda: (_q(4), _kv(0), torch.zeros(4, 0, dtype=torch.int32)),
    "a single key": lambda: (_q(3), _kv(1), _int32([[0], [-1], [1]])),
    "large logits": lambda: (30 * _q(4), _kv(12), _selection(4)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", SPARSE)
def test_sparse_attention_equals_the_loop_forward_and_backward(case, implementation):
    q_THE, rows, topk_TK = SPARSE[case]()
    keys = len(_joined(rows))
    rows_of = [[s for s in topk_K if 0 <= s < keys] for topk_K in topk_TK.tolist()]
    cotangents = _cotangents(len(q_THE))
    got = _values_and_gradients(
        lambda q, kv: sfa.sparse_attention(q, kv, topk_TK, implementation=implementation, **NAMED),
        q_THE,
        rows,
        cotangents,
    )
    want = _values_and_gradients(lambda q, kv: _loop(q, _joined(kv), rows_of), q_THE, rows, cotangents)
    _assert_same(got, want)


def _ranges(*pairs):
    return tuple(torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1))


HOLED = torch.tensor([7, -1, 2, 11, 12, 0, -9, 5, 40, 3])
"""Ten key rows in a pool of 12; the pool holds six of them."""
DENSE = {
    "causal": lambda: (_q(5), _kv(5), _ranges(*((0, t + 1) for t in range(5))), None),
    "empty, inverted and clipped": lambda: (
        _q(8),
        _kv(6),
        _ranges((0, 0), (3, 3), (5, 2), (-4, 2), (4, 99), (-9, -1), (6, 9), (-5, 50)),
        None,
    ),
    "packed documents": lambda: (_q(6), _kv(6), _ranges((0, 1), (0, 2), (2, 3), (2, 4), (2, 5), (5, 6)), None),
    "requests in mixed order": lambda: (_q(5), _kv(6), _ranges((3, 5), (0, 2), (3, 6), (0, 0), (0, 1)), None),
    "rows apart": lambda: (_q(4), _split(_kv(6)), _ranges((0, 2), (1, 9), (2, 2), (4, 6)), None),
    "a pool": lambda: (_q(4), _kv(12), _ranges((0, 5), (2, 9), (0, 99), (8, 3)), torch.randperm(12)[:9]),
    "a pool with holes": lambda: (_q(5), _kv(12), _ranges((0, 10), (1, 2), (3, 6), (1, 7), (4, 5)), HOLED),
    "a pool with rows apart": lambda: (_q(3), _split(_kv(12)), _ranges((0, 10), (1, 2), (3, 6)), HOLED),
    "an empty pool": lambda: (_q(2), _kv(0), _ranges((0, 2), (1, 3)), torch.tensor([-1, 0, 5])),
    "a pool without key rows": lambda: (_q(2), _kv(12), _ranges((0, 2), (1, 3)), HOLED[:0]),
    "no queries": lambda: (_q(0), _kv(6), _ranges(), None),
    "only empty queries": lambda: (_q(3), _kv(6), _ranges((0, 0), (4, 2), (6, 9)), None),
    "only empty queries of a pool": lambda: (_q(3), _kv(12), _ranges((0, 0), (4, 2), (10, 12)), HOLED),
    "no keys": lambda: (_q(3), _kv(0), _ranges((0, 0), (0, 2), (1, 0)), None),
    "a single key": lambda: (_q(3), _kv(1), _ranges((0, 1), (1, 2), (-1, 1)), None),
    "large logits": lambda: (30 * _q(3), _kv(6), _ranges((0, 6), (2, 6), (0, 3)), None),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", DENSE)
def test_dense_attention_equals_the_loop_forward_and_backward(case, implementation):
    q_THE, rows, (start_T, end_T), row_S = DENSE[case]()
    held = range(len(_joined(rows)))
    where = list(held) if row_S is None else row_S.tolist()
    rows_of = [
        [where[s] for s in range(max(start, 0), min(end, len(where))) if where[s] in held]
        for start, end in zip(start_T.tolist(), end_T.tolist(), strict=True)
    ]
    cotangents = _cotangents(len(q_THE))
    got = _values_and_gradients(
        lambda q, kv: sfa.dense_attention(q, kv, start_T, end_T, row_S=row_S, implementation=implementation, **NAMED),
        q_THE,
        rows,
        cotangents,
    )
    want = _values_and_gradients(lambda q, kv: _loop(q, _joined(kv), rows_of), q_THE, rows, cotangents)
    _assert_same(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_has_the_dtype_of_q_and_lse_is_wide(dtype, implementation):
    q_THE, kv_SE, topk_TK = _q(8, dtype), _kv(12, dtype), _selection()
    exact = sfa.sparse_attention(q_THE.double(), kv_SE.double(), topk_TK, **NAMED)
    got = sfa.sparse_attention(q_THE, kv_SE, topk_TK, implementation=implementation, **NAMED)
    assert (got.out_THL.dtype, got.lse_TH.dtype) == (dtype, torch.float32)
    assert (exact.out_THL.dtype, exact.lse_TH.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(got.lse_TH.double(), exact.lse_TH, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.out_THL.double(), exact.out_THL, rtol=eps, atol=1e-6)


# --- constants -----------------------------------------------------------------------------------------------------


def test_what_overflows_in_one_query_does_not_depend_on_another_ones_holes():
    q_THE, kv_SE = torch.randn(2, 3, 6), torch.randn(5, 6)
    q_THE[1, 1], kv_SE[2:] = 1e38, -kv_SE[2:].abs() * 100
    results = []
    for hole in (-1, 1):
        topk_TK = torch.tensor([[0, 1, hole], [2, 3, 4]], dtype=torch.int32)
        results.append(sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.1, value_dim=4))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got[1], want[1], equal_nan=True)


def test_float32_is_rounded_as_sums_in_pairs_are():
    """2048 numbers added one after the other err by 12 roundings here, in the results and in both gradients."""
    q_THE, kv_SE = torch.randn(6, 16, 576) / 50, torch.randn(4096, 576)
    topk_TK = torch.stack([torch.randperm(4096)[:2048] for _ in range(6)]).to(torch.int32)
    d_out = torch.randn(6, 16, 512)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = q_THE.to(dtype).requires_grad_(), kv_SE.to(dtype).requires_grad_()
        out_THL, _ = sfa.sparse_attention(*leaves, topk_TK, scale=0.1, value_dim=512)
        results.append([out_THL, *torch.autograd.grad(out_THL, leaves, d_out.to(dtype))])
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).norm() < 8 * 2**-24 * want.norm()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lse_is_a_natural_logarithm(implementation):
    kv_SE = torch.tensor([[math.log(2)], [math.log(3)]])
    q_THE, topk_TK = torch.ones(1, 1, 1), _int32([[0, 1]])
    got = sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=1.0, value_dim=1, implementation=implementation)
    assert got.lse_TH.item() == pytest.approx(math.log(5))
    assert got.out_THL.item() == pytest.approx((2 * math.log(2) + 3 * math.log(3)) / 5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_scale_is_an_argument_and_no_width_enters(implementation):
    q_THE, kv_SE, topk_TK = _q(8), _kv(12), _selection()

    def run(q, kv, scale):
        return sfa.sparse_attention(q, kv, topk_TK, scale=scale, value_dim=L, implementation=implementation)

    want = run(q_THE, kv_SE, 0.6)
    _assert_same(run(2 * q_THE, kv_SE, 0.3), want)
    pad = torch.nn.functional.pad
    _assert_same(run(pad(q_THE, (0, 10)), pad(kv_SE, (0, 10)), 0.6), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_listed_twice_counts_twice(implementation):
    q_THE, kv_SE = _q(1), _kv(3)
    got = sfa.sparse_attention(q_THE, kv_SE, _int32([[2, 0, 2]]), implementation=implementation, **NAMED)
    _assert_same(got, _loop(q_THE, kv_SE, [[2, 0, 2]]))


# --- gradients -----------------------------------------------------------------------------------------------------


def _finite(result):
    """Replace the -inf of queries without keys, of which no difference can be taken."""
    return result.out_THL, torch.where(result.lse_TH == -INF, 0.0, result.lse_TH)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_equal_finite_differences_with_empty_queries_among_them(implementation):
    q_THE, kv_SE = _q(3)[:, :1].requires_grad_(), _kv(4).requires_grad_()
    topk_TK, ranges = _int32([[3, -1, 0], [-1, -1, 4], [1, 2, 3]]), _ranges((0, 2), (2, 2), (-1, 9))
    named = NAMED | {"implementation": implementation}
    assert gradcheck(lambda q, kv: _finite(sfa.sparse_attention(q, kv, topk_TK, **named)), (q_THE, kv_SE))
    assert gradcheck(lambda q, kv: _finite(sfa.dense_attention(q, kv, *ranges, **named)), (q_THE, kv_SE))


def test_merge_differentiates_with_an_empty_part_and_an_empty_query():
    outs = [torch.randn(2, H, L, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(2, H, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def merge(*tensors):
        parts = [sfa.AttentionOutput(out, lse) for out, lse in zip(tensors[:3], tensors[3:], strict=True)]
        parts[1] = parts[1]._replace(lse_TH=torch.full((2, H), -INF, dtype=torch.float64))
        nothing_TH = torch.tensor([[False], [True]]).expand(2, H)
        parts = [part._replace(lse_TH=torch.where(nothing_TH, -INF, part.lse_TH)) for part in parts]
        return _finite(sfa.merge_attention(parts))

    assert gradcheck(merge, (*outs, *lses))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_func_grad_equals_autograd(implementation):
    q_THE, kv_SE, topk_TK, ranges = _q(8), _kv(12), _selection(), _ranges(*((0, t) for t in range(8)))
    named = NAMED | {"implementation": implementation}

    def loss(q, kv):
        sparse, dense = sfa.sparse_attention(q, kv, topk_TK, **named), sfa.dense_attention(q, kv, *ranges, **named)
        return sum((x.sin().sum() for x in (*_finite(sparse), *_finite(dense))), torch.zeros(()))

    got = torch.func.grad(loss, argnums=(0, 1))(q_THE, kv_SE)
    inputs = q_THE.requires_grad_(), kv_SE.requires_grad_()
    _assert_same(got, torch.autograd.grad(loss(*inputs), inputs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pool", [False, True])
def test_vmap_over_a_batch_equals_a_loop(implementation, pool):
    q_BTHE, kv_BSE = torch.randn(3, 8, H, E, dtype=torch.float64), torch.randn(3, 12, E, dtype=torch.float64)
    topk_BTK = torch.stack([_selection() for _ in range(3)])
    start_BT, end_BT = torch.randint(-2, 8, (3, 8)), torch.randint(0, 15, (3, 8))
    row_S = HOLED if pool else None
    named = NAMED | {"implementation": implementation}

    def both(q, kv, topk, start, end):
        dense = sfa.dense_attention(q, kv, start, end, row_S=row_S, **named)
        return *sfa.sparse_attention(q, kv, topk, **named), *dense

    batched = q_BTHE, kv_BSE, topk_BTK, start_BT, end_BT
    got = torch.func.vmap(both)(*batched)
    for b in range(3):
        _assert_same([x[b] for x in got], both(*(x[b] for x in batched)))


def test_per_sample_gradients_compose_grad_and_vmap():
    q_BTHE, kv_SE, topk_TK = torch.randn(3, 8, H, E, dtype=torch.float64), _kv(12), _selection()

    def loss(q, kv):
        return sfa.sparse_attention(q, kv, topk_TK, **NAMED).out_THL.square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None))(q_BTHE, kv_SE)
    _assert_same(got, [torch.func.grad(loss, argnums=1)(q_THE, kv_SE) for q_THE in q_BTHE])


# --- nothing leaks -------------------------------------------------------------------------------------------------


def _attend(kind, topk_TK, implementation):
    """Return attention to rows 1..4 of 6, sparse or dense, as a function of q and rows."""
    if kind == "sparse":
        return lambda q, kv: sfa.sparse_attention(q, kv, topk_TK, implementation=implementation, **NAMED)
    return lambda q, kv: sfa.dense_attention(
        q, kv, *_ranges((1, 3), (2, 2), (1, 5)), implementation=implementation, **NAMED
    )


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("apart", [False, True])
def test_rows_that_nobody_selects_reach_no_result_and_no_gradient(poison, kind, implementation, apart):
    q_THE, clean_SE, cotangents = _q(3), _kv(6), _cotangents(3)
    spoiled_SE = clean_SE.clone()
    spoiled_SE[[0, 5]] = poison
    attend = _attend(kind, _int32([[2, -1, 1], [-1, 6, -9], [3, 4, 1]]), implementation)
    results = [
        _values_and_gradients(attend, q_THE, _split(kv) if apart else kv, cotangents) for kv in (spoiled_SE, clean_SE)
    ]
    _assert_same(*results)
    assert not results[0][3][[0, 5]].any()


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_spoiled_row_reaches_only_the_queries_that_attend_to_it(poison, kind, implementation):
    q_THE, clean_SE = _q(3), _kv(6)
    spoiled_SE = clean_SE.clone()
    spoiled_SE[4, 0] = poison
    attend = _attend(kind, _int32([[2, -1, 1], [-1, 6, -9], [3, 4, 1]]), implementation)
    got, want = (
        _values_and_gradients(lambda q, kv: [x[:2] for x in attend(q, kv)], q_THE, kv, _cotangents(2))
        for kv in (spoiled_SE, clean_SE)
    )
    assert attend(q_THE, spoiled_SE).out_THL[2, :, 0].isnan().all()
    _assert_same(got[:2], want[:2])
    assert got[2][:2].isfinite().all()


# --- merge ---------------------------------------------------------------------------------------------------------


def _parts(q_THE, kv_SE, edges):
    zero_T = torch.zeros(len(q_THE), dtype=torch.int64)
    return [sfa.dense_attention(q_THE, kv_SE, zero_T + a, zero_T + b, **NAMED) for a, b in itertools.pairwise(edges)]


def test_merging_parts_equals_attention_over_their_union_in_any_order():
    q_THE, kv_SE = _q(4), _kv(12)
    whole = _loop(q_THE, kv_SE, [list(range(12))] * 4)
    parts = _parts(q_THE, kv_SE, [0, 3, 3, 4, 12])
    for order in itertools.permutations(parts):
        _assert_same(sfa.merge_attention(order), whole)
    _assert_same(sfa.merge_attention([sfa.merge_attention(parts[:2]), sfa.merge_attention(parts[2:])]), whole)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_part_is_neutral_in_any_place_even_if_its_out_is_nan(place):
    q_THE, kv_SE = _q(4), _kv(12)
    parts = _parts(q_THE, kv_SE, [0, 5, 12])
    want = sfa.merge_attention(parts)
    parts.insert(place, sfa.AttentionOutput(torch.full_like(want.out_THL, NAN), torch.full_like(want.lse_TH, -INF)))
    _assert_same(sfa.merge_attention(parts), want)


def test_nothing_but_empty_parts_merge_to_an_empty_result():
    empty = sfa.AttentionOutput(torch.full((2, H, L), NAN), torch.full((2, H), -INF))
    got = sfa.merge_attention([empty, empty])
    assert torch.equal(got.out_THL, torch.zeros(2, H, L))
    assert torch.equal(got.lse_TH, torch.full((2, H), -INF))


def test_merging_one_part_returns_it_and_the_dtype_stays():
    part = sfa.AttentionOutput(torch.randn(2, H, L).bfloat16(), torch.randn(2, H))
    got = sfa.merge_attention([part])
    assert torch.equal(got.out_THL, part.out_THL)
    torch.testing.assert_close(got.lse_TH, part.lse_TH)


def test_merge_survives_very_large_and_very_different_lse():
    parts = [sfa.AttentionOutput(torch.full((1, 1, 1), v), torch.full((1, 1), z)) for v, z in ((1.0, 1e4), (2.0, -1e4))]
    got = sfa.merge_attention(parts)
    assert (got.out_THL.item(), got.lse_TH.item()) == (1.0, 1e4)


# --- implementations and errors ------------------------------------------------------------------------------------


def test_a_callable_is_an_implementation_of_sparse_attention():
    q_THE, kv_SE, topk_TK = _q(8), _kv(12), _selection()

    def kernel(q, kv, topk, *, scale, value_dim):
        assert q is q_THE
        assert topk is topk_TK
        assert torch.equal(kv, kv_SE)
        assert (scale, value_dim) == (0.7, 4)
        return torch.ones(8, H, L, dtype=q.dtype), torch.zeros(8, H, dtype=q.dtype)

    got = sfa.sparse_attention(q_THE, _split(kv_SE), topk_TK, implementation=kernel, **NAMED)
    assert isinstance(got, sfa.AttentionOutput)
    assert torch.equal(got.out_THL, torch.ones_like(got.out_THL))


def test_a_callable_is_given_the_key_rows_of_a_pool_nan_where_it_holds_none():
    def kernel(q, kv, start, end, *, scale, value_dim):
        held = [0, 2, 3, 5, 7, 9]
        assert torch.equal(kv[held], pool_SE[HOLED[held]])
        assert kv[[1, 4, 6, 8]].isnan().all()
        return torch.ones(2, H, L, dtype=q.dtype), torch.zeros(2, H, dtype=q.dtype)

    pool_SE = _kv(12)
    got = sfa.dense_attention(_q(2), pool_SE, *_ranges((0, 1), (0, 2)), row_S=HOLED, implementation=kernel, **NAMED)
    assert isinstance(got, sfa.AttentionOutput)


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [
        ("flash", "it is unknown; 'reference', 'blockwise', 'npu', a callable or None are"),
        (7, "it is not callable"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused_with_its_reasons(implementation, reason, unchecked):
    message = f"implementation {implementation!r} can't run: {reason}"
    named = NAMED | {"implementation": implementation}
    with pytest.raises(ValueError) as error:
        sfa.sparse_attention(_q(8), _kv(12), _selection(), **named)
    assert str(error.value) == f"sparse_attention: {message}"
    with pytest.raises(ValueError) as error:
        sfa.dense_attention(_q(1), _kv(12), *_ranges((0, 1)), **named)
    assert str(error.value) == f"dense_attention: {message}"


def test_explain_implementation_lists_no_reason_for_what_runs():
    assert [sfa.explain_implementation(name) for name in IMPLEMENTATIONS] == [[], []]
    assert len(sfa.explain_implementation("npu")) == len(sfa.explain_implementation("flash")) == 1


def test_wrong_arguments_are_refused(unchecked):
    q_THE, kv_SE, topk_TK = _q(8), _kv(12), _selection()
    cases = [
        ("q and kv must be [T, H, E] and [S, E]; got ((8, 3, 6), (12, 5))", (q_THE, kv_SE[:, :5], topk_TK), {}),
        ("q and kv must be [T, H, E] and [S, E]; got ((8, 6), (12, 6))", (q_THE[:, 0], kv_SE, topk_TK), {}),
        ("value_dim must be in 1..6; got 0", (q_THE, kv_SE, topk_TK), {"value_dim": 0}),
        ("value_dim must be in 1..6; got 7", (q_THE, kv_SE, topk_TK), {"value_dim": 7}),
        ("q, kv must have one dtype; got [torch.float64, torch.float32]", (q_THE, kv_SE.float(), topk_TK), {}),
        ("q must be floating point; got torch.int64", (q_THE.long(), kv_SE.long(), topk_TK), {}),
        ("topk_TK must have 8 rows; got (7, 11)", (q_THE, kv_SE, topk_TK[1:]), {}),
        ("topk must be int32 [T, K]; got (torch.int64, (8, 11))", (q_THE, kv_SE, topk_TK.long()), {}),
        ("topk must be int32 [T, K]; got (torch.int32, (8,))", (q_THE, kv_SE, topk_TK[:, 0]), {}),
    ]
    for message, arguments, changes in cases:
        with pytest.raises(ValueError) as error:
            sfa.sparse_attention(*arguments, **(NAMED | changes))
        assert str(error.value) == f"sparse_attention: {message}"
    with pytest.raises(ValueError, match=r"^dense_attention: end_T must be 8 integers; got \(torch.int64, \(2,\)\)$"):
        sfa.dense_attention(q_THE, kv_SE, torch.zeros(8).long(), torch.zeros(2).long(), **NAMED)
    with pytest.raises(ValueError, match=r"^merge_attention: parts must hold at least one result; got 0$"):
        sfa.merge_attention([])
    part = sfa.AttentionOutput(torch.zeros(2, H, L), torch.zeros(2, H))
    for other in (part.out_THL[:1], part.out_THL.bfloat16()):
        with pytest.raises(ValueError, match=r"^merge_attention: parts must have one dtype and the shapes"):
            sfa.merge_attention([part, part._replace(out_THL=other)])


def test_validate_selection_accepts_what_is_visible_and_distinct():
    assert sfa.validate_selection(_int32([[2, -1, 1, -1], [-1] * 4]), *_ranges((1, 3), (0, 0))) is None


def test_validate_selection_names_the_first_query_at_fault():
    ranges = _ranges((1, 3), (0, 4))
    with pytest.raises(ValueError, match=r"^validate_selection: query 1 sees rows \[0, 4\); got 4$"):
        sfa.validate_selection(_int32([[1, 2], [0, 4]]), *ranges)
    with pytest.raises(ValueError, match=r"^validate_selection: query 0 sees rows \[1, 3\); got 0$"):
        sfa.validate_selection(_int32([[-1, 0], [0, 4]]), *ranges)
    with pytest.raises(ValueError, match=r"^validate_selection: rows of a query must differ; got 2 twice at 1$"):
        sfa.validate_selection(_int32([[1, 2, -1], [2, 0, 2]]), *ranges)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_nan_in_a_query_without_keys_reaches_no_result_and_no_gradient(implementation):
    q_THE, kv_SE = torch.randn(4, 2, 6), torch.randn(5, 6)
    q_THE[1] = torch.nan
    start_T, end_T = torch.tensor([0, 2, 0, 1]), torch.tensor([2, 2, 5, 4])
    topk_TK = torch.tensor([[0, 1], [-1, 9], [4, 0], [2, 3]], dtype=torch.int32)
    for call, arguments in ((sfa.dense_attention, (start_T, end_T)), (sfa.sparse_attention, (topk_TK,))):
        q, kv = q_THE.clone().requires_grad_(), kv_SE.clone().requires_grad_()
        out = call(q, kv, *arguments, scale=0.5, value_dim=4, implementation=implementation)
        assert out.out_THL[1].eq(0).all()
        assert out.lse_TH[1].eq(-torch.inf).all()
        (out.out_THL.square().sum() + out.lse_TH[[0, 2, 3]].sum()).backward()
        assert q.grad.isfinite().all()
        assert q.grad[1].eq(0).all()
        assert kv.grad.isfinite().all()


def test_split_rows_of_different_lengths_or_dtypes_are_refused(unchecked):
    q_THE, topk_TK = torch.randn(2, 1, 6), torch.zeros(2, 1, dtype=torch.int32)
    latent_SL = torch.randn(5, 4)
    for rope_SR, message in (
        (torch.randn(3, 2), "q and kv must be [T, H, E] and [S, E]; got ((2, 1, 6), (5, 4), (3, 2))"),
        (torch.randn(5, 2).double(), "q, kv, rope must have one dtype"),
    ):
        rows = sfa.SplitRows(latent_SL=latent_SL, rope_SR=rope_SR)
        with pytest.raises(ValueError) as error:
            sfa.sparse_attention(q_THE, rows, topk_TK, scale=1.0, value_dim=4)
        assert str(error.value).startswith(f"sparse_attention: {message}")


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_autocast_changes_no_result(implementation):
    """torch.autocast would take the products in bfloat16, which these functions promise in float32."""
    q_THE, kv_SE, topk_TK = torch.randn(4, 2, 6), torch.randn(5, 6), torch.tensor([[0, 3]] * 4, dtype=torch.int32)
    ranges = torch.zeros(4).long(), torch.full((4,), 5)
    index = torch.randn(4, 3, 8), torch.randn(5, 8), torch.randn(4, 3)

    def results():
        named = {"implementation": implementation}
        yield from sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.5, value_dim=4, **named)
        yield from sfa.dense_attention(q_THE, kv_SE, *ranges, scale=0.5, value_dim=4, **named)
        yield sfa.lightning_indexer(*index, *ranges, k=2, **named)
        yield sfa.index_scores(*index)
        yield sfa.indexer_kl(*index, q_THE, kv_SE, *ranges, scale=0.5)

    plain = list(results())
    with torch.autocast("cpu", torch.bfloat16):
        assert (q_THE[:, 0] @ kv_SE.T).dtype == torch.bfloat16
        for got, want in zip(results(), plain, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_spoiled_query_gives_no_gradient_to_what_others_share_with_it(implementation, poison):
    """Queries 0 and 1 share row 2; row 1 is spoiled, and only query 0 attends to it. The loss holds both."""
    kv_SE = torch.randn(4, 5)
    kv_SE[1, 4] = poison
    topk_TK = torch.tensor([[1, 2], [2, 3]], dtype=torch.int32)
    ranges = torch.tensor([1, 2]), torch.tensor([3, 4])
    for call, arguments in ((sfa.sparse_attention, (topk_TK,)), (sfa.dense_attention, ranges)):
        q_THE, kv = torch.randn(2, 3, 5, requires_grad=True), kv_SE.clone().requires_grad_()
        out = call(q_THE, kv, *arguments, scale=0.5, value_dim=3, implementation=implementation)
        assert out.out_THL[0].isnan().all()
        assert out.lse_TH[0].isnan().all()
        (out.out_THL.square().sum() + out.lse_TH.sum()).backward()
        clean = kv_SE.clone()
        clean[1] = 0
        q_alone, kv_alone = q_THE.detach()[1:].requires_grad_(), clean.requires_grad_()
        alone = call(q_alone, kv_alone, *(x[1:] for x in arguments), scale=0.5, value_dim=3)
        (alone.out_THL.square().sum() + alone.lse_TH.sum()).backward()
        torch.testing.assert_close(kv.grad, kv_alone.grad)
        torch.testing.assert_close(q_THE.grad[1:], q_alone.grad)
        assert q_THE.grad[0].eq(0).all()


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("rows", [0, 4])
def test_no_queries_give_zero_gradients_whatever_the_rows_hold(implementation, rows):
    none = torch.zeros(0).long()
    for call, arguments in ((sfa.sparse_attention, (torch.zeros(0, 2).int(),)), (sfa.dense_attention, (none, none))):
        q_THE, kv_SE = torch.zeros(0, 2, 5, requires_grad=True), torch.full((rows, 5), torch.nan, requires_grad=True)
        out = call(q_THE, kv_SE, *arguments, scale=0.5, value_dim=3, implementation=implementation)
        (out.out_THL.sum() + out.lse_TH.sum()).backward()
        assert q_THE.grad.shape == (0, 2, 5)
        assert kv_SE.grad is None or kv_SE.grad.eq(0).all()
