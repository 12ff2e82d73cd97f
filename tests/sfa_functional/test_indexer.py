"""The indexer: scores equal a plain loop, and the k best visible keys are chosen by an exact rule."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import sfa_functional as sfa
from sfa_functional import reference

NAN, INF = math.nan, math.inf
IMPLEMENTATIONS = ["reference", "blockwise"]


def _oracle(scores, start, end, k):
    """Choose keys with Python's stable sort."""
    chosen = [s for s in range(len(scores)) if start <= s < end]
    if len(chosen) > k:
        numbers = [s for s in chosen if not math.isnan(scores[s])]
        chosen = sorted(sorted(numbers, key=lambda s: -scores[s])[:k])
    return chosen + [-1] * (k - len(chosen))


def _indexed(tokens=9, keys=30, dtype=torch.float32, heads=16, width=8):
    q_TJI, k_SI = torch.randn(tokens, heads, width, dtype=dtype), torch.randn(keys, width, dtype=dtype)
    return q_TJI, k_SI, torch.randn(tokens, heads, dtype=torch.promote_types(dtype, torch.float32))


def _eighths(*shape):
    """Small multiples of 1/8, whose products and sums are exact in float32 in any order."""
    return torch.randint(-8, 9, shape) / 8


# --- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_index_scores_equal_a_triple_loop(dtype):
    q_TJI, k_SI, w_TJ = _indexed(3, 4, dtype, heads=5, width=2)
    got_TS = sfa.index_scores(q_TJI, k_SI, w_TJ)
    for t, s in itertools.product(range(3), range(4)):
        want = 0.0
        for j in range(5):
            product = sum(float(q_TJI[t, j, i]) * float(k_SI[s, i]) for i in range(2))
            want += float(w_TJ[t, j]) * max(product, 0.0)
        assert float(got_TS[t, s]) == pytest.approx(want, rel=1e-5 if dtype == torch.float32 else 1e-13)
    assert got_TS.dtype == dtype


def test_scores_of_bfloat16_are_taken_in_float32():
    q_TJI, k_SI, w_TJ = _indexed(dtype=torch.bfloat16)
    got_TS = sfa.index_scores(q_TJI, k_SI, w_TJ)
    want_TS = sfa.index_scores(q_TJI.double(), k_SI.double(), w_TJ.double())
    assert got_TS.dtype == torch.float32
    torch.testing.assert_close(got_TS.double(), want_TS, rtol=1e-5, atol=1e-5)


def test_index_scores_differentiate_and_the_slope_of_relu_at_zero_is_zero():
    inputs = [x.requires_grad_() for x in _indexed(3, 4, torch.float64, heads=2, width=2)]
    assert torch.autograd.gradcheck(sfa.index_scores, inputs)
    flat = torch.zeros(1, 1, 2, requires_grad=True)
    sfa.index_scores(flat, torch.ones(1, 2), torch.ones(1, 1)).sum().backward()
    assert not flat.grad.any()


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_spoiled_key_scores_nan_and_leaves_the_others_alone(poison):
    inputs = [x.requires_grad_() for x in _indexed()]
    spoiled = [inputs[0], inputs[1].detach().clone(), inputs[2]]
    spoiled[1][5, 3] = poison
    spoiled[1].requires_grad_()
    others = [s for s in range(30) if s != 5]
    want, got = sfa.index_scores(*inputs), sfa.index_scores(*spoiled)
    assert got[:, 5].isnan().all()
    torch.testing.assert_close(got[:, others], want[:, others])
    want_grads = torch.autograd.grad(want[:, others].square().sum(), inputs)
    got_grads = torch.autograd.grad(got[:, others].square().sum(), spoiled)
    torch.testing.assert_close(got_grads, want_grads)


def test_hadamard_on_queries_and_keys_leaves_the_scores_alone():
    q_TJI, k_SI, w_TJ = _indexed(dtype=torch.float64)
    rotated = sfa.index_scores(sfa.hadamard(q_TJI), sfa.hadamard(k_SI), w_TJ)
    torch.testing.assert_close(rotated, sfa.index_scores(q_TJI, k_SI, w_TJ))


# --- projections ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_queries_and_keys_rotate_their_first_columns_after_the_norm(pairing):
    config = replace(sfa.TINY, index_rope_pairing=pairing)
    indexer = sfa.init_params(config, dtype=torch.float64).indexer
    indexer = replace(indexer, k_norm_bias=torch.randn(16).double(), k_norm_weight=torch.randn(16).double())
    rope = sfa.rope_cos_sin(torch.arange(5), config)
    x_TD, q_latent_TQ = torch.randn(5, 64, dtype=torch.float64), torch.randn(5, 32, dtype=torch.float64)
    flat_TI = x_TD @ indexer.wk.T
    flat_TI = torch.nn.functional.layer_norm(flat_TI, (16,), indexer.k_norm_weight, indexer.k_norm_bias, 1e-6)
    flat_TJI = (q_latent_TQ @ indexer.wq_b.T).view(5, 16, 16)
    for flat, got in (
        (flat_TI, sfa.index_keys(indexer, x_TD, *rope, config=config)),
        (flat_TJI, sfa.index_queries(indexer, q_latent_TQ, *rope, config=config)),
    ):
        torch.testing.assert_close(got[..., 8:], flat[..., 8:])
        torch.testing.assert_close(got[..., :8], sfa.rotate(flat[..., :8], *rope, pairing=pairing))


def test_index_weights_carry_both_constants_and_stay_in_float32():
    indexer = sfa.init_params(sfa.TINY, dtype=torch.bfloat16).indexer
    x_TD = torch.randn(5, 64).bfloat16()
    got_TJ = sfa.index_weights(indexer, x_TD, config=sfa.TINY)
    want_TJ = x_TD.double() @ indexer.weights_proj.double().T * 16**-0.5 * 16**-0.5
    assert got_TJ.dtype == torch.float32
    torch.testing.assert_close(got_TJ.double(), want_TJ, rtol=1e-5, atol=1e-6)


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choose", [sfa.select_topk, reference.select_topk], ids=["blockwise", "reference"])
@pytest.mark.parametrize("keys", [0, 1, 2, 3, 4])
def test_select_topk_follows_the_rule_on_every_small_case(keys, choose):
    patterns = itertools.product([NAN, -INF, -0.0, 0.0, 1.0], repeat=keys)
    edges = range(-1, keys + 2)
    cases = [(scores, start, end) for scores in patterns for start in edges for end in edges]
    score_TS = torch.tensor([scores for scores, _, _ in cases]).view(len(cases), keys)
    start_T, end_T = (torch.tensor([case[i] for case in cases]) for i in (1, 2))
    for k in range(1, keys + 2):
        got = choose(score_TS, start_T, end_T, k=k).tolist()
        wrong = [(case, k, row) for case, row in zip(cases, got, strict=True) if row != _oracle(*case, k)]
        assert not wrong, wrong[:3]


def test_select_topk_breaks_ties_by_row():
    got_TK = sfa.select_topk(torch.zeros(1, 10), torch.tensor([1]), torch.tensor([10]), k=4)
    assert got_TK.tolist() == [[1, 2, 3, 4]]
    assert got_TK.dtype == torch.int32


def test_select_topk_equals_the_oracle_on_long_rows_full_of_ties():
    score_TS = torch.randint(-2, 3, (40, 200)).float()
    score_TS[torch.rand(40, 200) < 0.2] = NAN
    start_T, end_T = torch.randint(-5, 100, (40,)), torch.randint(50, 210, (40,))
    want = [_oracle(*row, 17) for row in zip(score_TS.tolist(), start_T.tolist(), end_T.tolist(), strict=True)]
    assert sfa.select_topk(score_TS, start_T, end_T, k=17).tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_select_topk_takes_scores_of_every_float_dtype(dtype):
    score_TS = torch.randn(5, 20).to(dtype)
    start_T, end_T = torch.zeros(5, dtype=torch.int32), torch.full((5,), 20, dtype=torch.int32)
    want = [_oracle(scores, 0, 20, 6) for scores in score_TS.tolist()]
    assert sfa.select_topk(score_TS, start_T, end_T, k=6).tolist() == want


# --- score and choose ----------------------------------------------------------------------------------------------


def _ranges(tokens, keys):
    start_T = torch.randint(-3, keys // 2, (tokens,))
    end_T = torch.randint(0, keys + 4, (tokens,))
    return start_T, end_T


def _assert_best(topk_TK, score_TS, start_T, end_T, k, eps):
    """Check a selection against float64 scores without asking for an order among near-ties."""
    keys = score_TS.shape[1]
    for topk_K, score_S, start, end in zip(topk_TK.tolist(), score_TS, start_T.tolist(), end_T.tolist(), strict=True):
        chosen = [s for s in topk_K if s >= 0]
        seen = range(max(start, 0), min(end, keys))
        assert topk_K == sorted(set(chosen)) + [-1] * (k - len(chosen))
        assert set(chosen) <= set(seen)
        assert len(chosen) == min(k, len(seen))
        rest = [float(score_S[s]) for s in seen if s not in chosen]
        if rest:
            assert min(float(score_S[s]) for s in chosen) >= max(rest) - eps


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lightning_indexer_chooses_the_best_scores(implementation):
    q_TJI, k_SI, w_TJ = _indexed(30, 50)
    ranges = _ranges(30, 50)
    score_TS = sfa.index_scores(q_TJI.double(), k_SI.double(), w_TJ.double())
    topk_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, *ranges, k=7, implementation=implementation)
    _assert_best(topk_TK, score_TS, *ranges, 7, eps=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_a_selection_does_not_depend_on_the_chunk_that_computes_it(implementation, chunk):
    q_TJI, k_SI, w_TJ = _eighths(20, 4, 6), _eighths(40, 6), _eighths(20, 4)
    start_T, end_T = torch.zeros(20, dtype=torch.int64), torch.arange(21, 41)

    def run(rows, keys):
        return sfa.lightning_indexer(
            q_TJI[rows], k_SI[:keys], w_TJ[rows], start_T[rows], end_T[rows], k=5, implementation=implementation
        )

    whole_TK = run(slice(0, 20), 40)
    chunks = [run(slice(first, first + chunk), min(21 + first + chunk, 40)) for first in range(0, 20, chunk)]
    assert torch.equal(torch.cat(chunks), whole_TK)
    score_TS = sfa.index_scores(q_TJI, k_SI, w_TJ)
    rows = zip(score_TS.tolist(), end_T.tolist(), strict=True)
    assert whole_TK.tolist() == [_oracle(scores, 0, end, 5) for scores, end in rows]


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_chunks_of_random_queries_choose_equally_good_keys(chunk):
    q_TJI, k_SI, w_TJ = _indexed(20, 40)
    ranges = _ranges(20, 40)
    parts = zip(q_TJI.split(chunk), w_TJ.split(chunk), *(x.split(chunk) for x in ranges), strict=True)
    topk_TK = torch.cat([sfa.lightning_indexer(q, k_SI, w, start, end, k=5) for q, w, start, end in parts])
    score_TS = sfa.index_scores(q_TJI.double(), k_SI.double(), w_TJ.double())
    _assert_best(topk_TK, score_TS, *ranges, 5, eps=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_read_through_a_pool_are_chosen_like_packed_keys(implementation):
    q_TJI, pool_SI, w_TJ = _eighths(20, 4, 6), _eighths(90, 6), _eighths(20, 4)
    row_S = torch.randperm(90)[:40]
    unused = [s for s in range(90) if s not in row_S.tolist()]
    packed_SI = pool_SI[row_S]
    pool_SI[unused] = NAN
    ranges = _ranges(20, 40)
    want_TK = sfa.lightning_indexer(q_TJI, packed_SI, w_TJ, *ranges, k=5)
    got_TK = sfa.lightning_indexer(q_TJI, pool_SI, w_TJ, *ranges, k=5, row_S=row_S, implementation=implementation)
    assert torch.equal(got_TK, want_TK)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("hole", [-1, 90])
def test_a_key_that_no_pool_row_holds_is_chosen_only_where_everything_is(implementation, hole):
    q_TJI, pool_SI, w_TJ = _eighths(20, 4, 6), _eighths(90, 6), _eighths(20, 4)
    row_S = torch.randperm(90)[:40]
    row_S[::3] = hole
    start_T, end_T = _ranges(20, 40)
    score_TS = sfa.index_scores(q_TJI, pool_SI[row_S.where(row_S < 90, 0)], w_TJ)
    score_TS[:, ::3] = NAN
    rows = zip(score_TS.tolist(), start_T.tolist(), end_T.tolist(), strict=True)
    got_TK = sfa.lightning_indexer(
        q_TJI, pool_SI, w_TJ, start_T, end_T, k=5, row_S=row_S, implementation=implementation
    )
    assert got_TK.tolist() == [_oracle(*row, 5) for row in rows]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("tokens", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_no_queries_and_no_keys_keep_their_shapes(implementation, tokens, keys):
    ranges = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), 9)
    got_TK = sfa.lightning_indexer(*_indexed(tokens, keys), *ranges, k=4, implementation=implementation)
    assert torch.equal(got_TK, torch.full((tokens, 4), -1, dtype=torch.int32))


def test_a_selection_carries_no_gradient():
    inputs = [x.requires_grad_() for x in _indexed()]
    assert not sfa.lightning_indexer(*inputs, *_ranges(9, 30), k=4).requires_grad


def test_a_callable_replaces_the_indexer_and_is_given_the_key_rows():
    q_TJI, pool_SI, w_TJ = _indexed()
    start_T, end_T = _ranges(9, 4)
    row_S = torch.tensor([7, -1, 3, 30])

    def choose(q, keys_SI, w, start, end, *, k):
        assert torch.equal(keys_SI[[0, 2]], pool_SI[[7, 3]])
        assert keys_SI[[1, 3]].isnan().all()
        return torch.full((9, k), 2, dtype=torch.int32)

    got_TK = sfa.lightning_indexer(q_TJI, pool_SI, w_TJ, start_T, end_T, k=3, row_S=row_S, implementation=choose)
    assert got_TK.tolist() == [[2, 2, 2]] * 9


def test_wrong_arguments_are_refused(unchecked):
    q_TJI, k_SI, w_TJ = _indexed()
    start_T, end_T = _ranges(9, 30)
    cases = [
        ("k must be an integer >= 1; got 0", (q_TJI, k_SI, w_TJ, start_T, end_T), 0),
        ("start_T must be 9 integers; got (torch.int64, (8,))", (q_TJI, k_SI, w_TJ, start_T[1:], end_T), 1),
        (
            "q, k must have one dtype; got [torch.float32, torch.float64]",
            (q_TJI, k_SI.double(), w_TJ, start_T, end_T),
            1,
        ),
        ("w must be floating point; got torch.int64", (q_TJI, k_SI, w_TJ.long(), start_T, end_T), 1),
        (
            "q, k, w must be [T, J, I], [S, I], [T, J]; got ((9, 16, 8), (30, 7), (9, 16))",
            (q_TJI, k_SI[:, 1:], w_TJ, start_T, end_T),
            1,
        ),
    ]
    for message, arguments, k in cases:
        with pytest.raises(ValueError) as error:
            sfa.lightning_indexer(*arguments, k=k)
        assert str(error.value) == f"lightning_indexer: {message}"
    with pytest.raises(ValueError, match=r"^select_topk: k must be an integer >= 1; got 0$"):
        sfa.select_topk(torch.zeros(9, 30), start_T, end_T, k=0)
    with pytest.raises(
        ValueError, match=r"^select_topk: scores must be floating point \[T, S\]; got \(torch.int64, \(9, 30\)\)$"
    ):
        sfa.select_topk(torch.zeros(9, 30, dtype=torch.int64), start_T, end_T, k=1)
    with pytest.raises(ValueError, match=r"^lightning_indexer: implementation 'npu' can't run: "):
        sfa.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=1, implementation="npu")
    with pytest.raises(ValueError, match=r"^index_queries: q_latent must be \[T, 32\]; got \(9, 31\)$"):
        sfa.index_queries(sfa.init_params(sfa.TINY).indexer, torch.zeros(9, 31), None, None, config=sfa.TINY)
    with pytest.raises(ValueError, match=r"^index_keys: x, projection must have one dtype"):
        sfa.index_keys(sfa.init_params(sfa.TINY).indexer, torch.zeros(9, 64).double(), None, None, config=sfa.TINY)
    with pytest.raises(ValueError, match=r"^index_weights: x must be \[T, 64\]; got \(9, 63\)$"):
        sfa.index_weights(sfa.init_params(sfa.TINY).indexer, torch.zeros(9, 63), config=sfa.TINY)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_key_with_an_infinity_is_never_chosen_among_more_than_k(implementation):
    q_TJI, k_SI, w_TJ = torch.rand(3, 2, 4), torch.rand(6, 4), torch.rand(3, 2)
    k_SI[2, 0] = torch.inf
    ranges = torch.zeros(3).long(), torch.full((3,), 6)
    topk_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, *ranges, k=3, implementation=implementation)
    assert not (topk_TK == 2).any()
    assert (topk_TK >= 0).all()


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_the_lowest_integer_as_an_end_is_an_empty_range(implementation):
    lowest = torch.iinfo(torch.int64).min
    ranges = torch.tensor([5, 5]), torch.tensor([9, lowest])
    index = torch.randn(2, 2, 4), torch.randn(12, 4), torch.randn(2, 2)
    topk_TK = sfa.lightning_indexer(*index, *ranges, k=3, implementation=implementation)
    assert (topk_TK[0] >= 5).all()
    assert (topk_TK[1] == -1).all()


def test_an_indexer_of_other_sizes_than_the_config_says_is_refused(unchecked):
    """Their constant J^-0.5 I^-0.5 would be silently wrong."""
    params, x_TD = sfa.init_params(sfa.TINY), torch.randn(3, 64)
    rope = sfa.rope_cos_sin(torch.arange(3), sfa.TINY)
    for change in ({"index_n_heads": 8}, {"index_head_dim": 32}):
        config = replace(sfa.TINY, **change)
        for name, call in (
            ("index_queries", lambda c: sfa.index_queries(params.indexer, torch.randn(3, 32), *rope, config=c)),
            ("index_keys", lambda c: sfa.index_keys(params.indexer, x_TD, *rope, config=c)),
            ("index_weights", lambda c: sfa.index_weights(params.indexer, x_TD, config=c)),
        ):
            with pytest.raises(ValueError, match=f"^{name}: wq_b, wk and weights_proj must have"):
                call(config)
    index = torch.randn(3, 2, 4), torch.randn(6, 4), torch.randn(3, 2)
    ranges, message = (torch.zeros(3).long(), torch.ones(3).long()), r"row_S must be 6 integers; got \(torch.float32, "
    with pytest.raises(ValueError, match=f"^lightning_indexer: {message}"):
        sfa.lightning_indexer(*index, *ranges, k=1, row_S=torch.zeros(6))
