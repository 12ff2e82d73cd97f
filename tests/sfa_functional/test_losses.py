"""The indexer's loss: values equal a plain loop, gradients equal the written-out formulas, and nothing leaks."""

import math

import pytest
import torch

import sfa_functional as sfa

SCALE = 0.4
T, S, J, H, E = 6, 9, 4, 3, 5  # H is odd: a mean over heads must not assume a power of two
START_T, END_T = torch.tensor([0, 0, 2, 5, -3, 4]), torch.tensor([9, 4, 7, 5, 99, 5])
TOPK_TK = torch.tensor(
    [[8, 0, -1, 3], [5, 1, 2, 0], [6, 9, 3, -5], [1, 2, 3, 4], [7, 0, 4, 2], [4, 3, -1, 5]], dtype=torch.int32
)
"""Some entries are unused, and some stand outside of what their query sees."""


def _inputs(dtype=torch.float64):
    shapes = (T, J, 3), (S, 3), (T, J), (T, H, E), (S, E)
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


def _members(topk_TK):
    """Return A_t for every query."""
    sets = [range(max(a, 0), min(b, S)) for a, b in zip(START_T.tolist(), END_T.tolist(), strict=True)]
    return [[s for s in seen if topk_TK is None or s in topk_TK[t].tolist()] for t, seen in enumerate(sets)]


def _distributions(q_TJI, k_SI, w_TJ, q_THE, kv_SE, topk_TK):
    """Return p and π, [T, S], zero outside A, computed query by query."""
    p_TS, pi_TS = torch.zeros(2, T, S, dtype=torch.float64)
    for t, rows in enumerate(_members(topk_TK)):
        if rows:
            heads = [torch.softmax(SCALE * kv_SE[rows] @ q_THE[t, h], 0) for h in range(H)]
            p_TS[t, rows] = sum(heads) / H
            score = sum(w_TJ[t, j] * (k_SI[rows] @ q_TJI[t, j]).clamp(min=0) for j in range(J))
            pi_TS[t, rows] = torch.softmax(score, 0)
    return p_TS, pi_TS


def _loop_kl(*inputs, topk_TK):
    p_TS, pi_TS = _distributions(*inputs, topk_TK)
    return torch.stack(
        [
            sum((p[s] * (p[s].log() - pi[s].log()) for s in rows if p[s] > 0), torch.zeros(()).double())
            for p, pi, rows in zip(p_TS, pi_TS, _members(topk_TK), strict=True)
        ]
    )


def _kl(*inputs, topk_TK):
    return sfa.indexer_kl(*inputs, START_T, END_T, scale=SCALE, topk_TK=topk_TK)


both = pytest.mark.parametrize("topk_TK", [None, TOPK_TK], ids=["visible", "selected"])


@both
def test_the_loss_equals_a_loop(topk_TK):
    inputs = _inputs()
    got_T = _kl(*inputs, topk_TK=topk_TK)
    torch.testing.assert_close(got_T, _loop_kl(*inputs, topk_TK=topk_TK), rtol=1e-12, atol=1e-12)
    assert (got_T >= 0).all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_give_a_float32_loss(topk_TK, dtype):
    inputs = _inputs(dtype)
    got_T = _kl(*inputs, topk_TK=topk_TK)
    assert got_T.dtype == torch.float32
    want_T = _loop_kl(*(x.double() for x in inputs), topk_TK=topk_TK)
    torch.testing.assert_close(got_T.double(), want_T, rtol=1e-5, atol=1e-6)


@both
def test_gradients_equal_the_written_out_formulas(topk_TK):
    inputs = _inputs()
    u_T = torch.randn(T, dtype=torch.float64)
    trained = [x.requires_grad_() for x in inputs[:3]]
    got = torch.autograd.grad(_kl(*inputs, topk_TK=topk_TK), trained, u_T)
    q_TJI, k_SI, w_TJ = (x.detach() for x in trained)
    p_TS, pi_TS = _distributions(q_TJI, k_SI, w_TJ, *inputs[3:], topk_TK)
    g_TS = u_T[:, None] * (pi_TS - p_TS)
    z_TJS = q_TJI @ k_SI.T
    dz_TJS = g_TS[:, None] * w_TJ[..., None] * (z_TJS > 0)
    want = dz_TJS @ k_SI, torch.einsum("tjs,tji->si", dz_TJS, q_TJI), (g_TS[:, None] * z_TJS.relu()).sum(-1)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@both
def test_gradients_equal_finite_differences_with_empty_queries_among_them(topk_TK):
    inputs = _inputs()
    trained = [x.requires_grad_() for x in (inputs[0][:, :2], inputs[1], inputs[2][:, :2])]
    assert torch.autograd.gradcheck(lambda q, k, w: _kl(q, k, w, *inputs[3:], topk_TK=topk_TK), trained)


@both
@pytest.mark.parametrize("apart", [False, True])
def test_no_gradient_reaches_the_target(topk_TK, apart):
    inputs = _inputs()
    target = [x.requires_grad_() for x in inputs[3:]]
    trained = inputs[0].requires_grad_()
    if apart:
        inputs[4] = sfa.SplitRows(latent_SL=inputs[4][:, :3], rope_SR=inputs[4][:, 3:])
    kl_T = _kl(*inputs, topk_TK=topk_TK)
    grads = torch.autograd.grad(kl_T.sum(), [*target, trained], allow_unused=True)
    assert grads[:2] == (None, None)
    assert grads[2].any()


@both
def test_at_most_one_key_gives_zero_loss_and_zero_gradients(topk_TK):
    inputs = _inputs()
    trained = [x.requires_grad_() for x in inputs[:3]]
    kl_T = _kl(*inputs, topk_TK=topk_TK)
    assert [len(rows) <= 1 for rows in _members(topk_TK)] == [False, False, False, True, False, True]
    assert kl_T[[3, 5]].tolist() == [0, 0]
    assert not any(x.any() for x in torch.autograd.grad(kl_T[[3, 5]].sum(), trained))


@both
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_outside_of_the_keys_in_question_reaches_nothing(topk_TK, poison):
    """No query sees rows 0 and 8."""
    ranges = torch.tensor([1, 1, 2, 5, 1, 4]), torch.tensor([8, 4, 7, 5, 8, 5])
    clean, u_T = _inputs(), torch.randn(T, dtype=torch.float64)
    spoiled = [x.clone() for x in clean]
    spoiled[1][[0, 8]] = spoiled[4][[0, 8]] = poison
    results = []
    for inputs in (spoiled, clean):
        trained = [x.requires_grad_() for x in inputs[:3]]
        kl_T = sfa.indexer_kl(*inputs, *ranges, scale=SCALE, topk_TK=topk_TK)
        results.append([kl_T, *torch.autograd.grad(kl_T, trained, u_T)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_softmax_of_each_head_is_taken_over_the_selection():
    """Renormalising the dense mean of heads is another number: heads that look elsewhere would count less."""
    q_THE = torch.tensor([[[9.0, 0.0], [0.0, 1.0]]]).double()
    kv_SE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).double()
    zero = torch.zeros(1, 1, 1).double(), torch.zeros(3, 1).double(), torch.zeros(1, 1).double()
    ranges = torch.tensor([0]), torch.tensor([3])
    topk_TK = torch.tensor([[1, 2]], dtype=torch.int32)
    got = sfa.indexer_kl(*zero, q_THE, kv_SE, *ranges, scale=1.0, topk_TK=topk_TK).item()
    p = (0.5 + math.e / (math.e + 1)) / 2
    assert got == pytest.approx(p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)), rel=1e-12)


def test_an_indexer_that_predicts_the_attention_has_no_loss():
    q_THE, kv_SE = torch.rand(T, 1, 4, dtype=torch.float64), torch.rand(S, 4, dtype=torch.float64)
    w_TJ = torch.full((T, 1), SCALE, dtype=torch.float64)
    got_T = sfa.indexer_kl(q_THE, kv_SE, w_TJ, q_THE, kv_SE, START_T, END_T, scale=SCALE)
    torch.testing.assert_close(got_T, torch.zeros_like(got_T), rtol=0, atol=1e-14)


@both
def test_a_target_that_underflows_to_zero_counts_nothing(topk_TK):
    inputs = _inputs(torch.float32)
    inputs[3] = inputs[3] * 1e4
    trained = inputs[0].requires_grad_()
    kl_T = _kl(*inputs, topk_TK=topk_TK)
    assert kl_T.isfinite().all()
    assert torch.autograd.grad(kl_T.sum(), trained)[0].isfinite().all()


def test_no_queries_have_no_loss():
    inputs = [x[:0] if x.shape[0] == T else x for x in _inputs()]
    got_T = sfa.indexer_kl(*inputs, START_T[:0], END_T[:0], scale=SCALE)
    assert got_T.shape == (0,)


def test_vmap_over_a_batch_equals_a_loop():
    batched = [torch.stack(xs) for xs in zip(_inputs(), _inputs(), strict=True)]
    for topk_TK in (None, TOPK_TK):
        got_BT = torch.func.vmap(lambda *xs, topk=topk_TK: _kl(*xs, topk_TK=topk))(*batched)
        for b in range(2):
            torch.testing.assert_close(got_BT[b], _kl(*(x[b] for x in batched), topk_TK=topk_TK))


def test_wrong_arguments_are_refused(unchecked):
    q_TJI, k_SI, w_TJ, q_THE, kv_SE = _inputs()
    cases = [
        ("w_TJ must have 6 rows; got (5, 4)", (q_TJI, k_SI, w_TJ[1:], q_THE, kv_SE)),
        ("q_THE must have 6 rows; got (5, 3, 5)", (q_TJI, k_SI, w_TJ, q_THE[1:], kv_SE)),
        ("q, k must have one dtype; got [torch.float64, torch.float32]", (q_TJI, k_SI.float(), w_TJ, q_THE, kv_SE)),
        (
            "q, k, w must be [T, J, I], [S, I], [T, J]; got ((6, 4, 3), (9, 2), (6, 4))",
            (q_TJI, k_SI[:, 1:], w_TJ, q_THE, kv_SE),
        ),
        ("kv and k must have the same rows; got 8", (q_TJI, k_SI, w_TJ, q_THE, kv_SE[1:])),
    ]
    for message, inputs in cases:
        with pytest.raises(ValueError) as error:
            _kl(*inputs, topk_TK=None)
        assert str(error.value) == f"indexer_kl: {message}"
    with pytest.raises(ValueError, match=r"^indexer_kl: topk_TK must have 6 rows; got \(5, 4\)$"):
        _kl(q_TJI, k_SI, w_TJ, q_THE, kv_SE, topk_TK=TOPK_TK[1:])


@pytest.mark.parametrize("selected", [False, True])
def test_gradient_of_a_key_sums_all_queries_in_float32(selected):
    """2048 queries share two keys: added up in bfloat16, the sum would stop growing long before its value."""
    count = 2048
    inputs = [torch.ones(count, 1, 2), torch.tensor([[1.0, 0.5], [0.5, 1.0]]), torch.ones(count, 1)]
    inputs[0][..., 1] = 0.25
    target = [torch.ones(count, 1, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]])]
    topk_TK = torch.tensor([[0, 1]] * count, dtype=torch.int32) if selected else None
    ranges = torch.zeros(count, dtype=torch.int64), torch.full((count,), 2)
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        q_TJI, k_SI, w_TJ, q_THE, kv_SE = (x.to(dtype) for x in (*inputs, *target))
        k_SI.requires_grad_()
        sfa.indexer_kl(q_TJI, k_SI, w_TJ, q_THE, kv_SE, *ranges, scale=1.0, topk_TK=topk_TK).sum().backward()
        gradients.append(k_SI.grad.double())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2**-8, atol=0)
    assert gradients[0].abs().max() > 512


@pytest.mark.parametrize("topk_TK", [None, TOPK_TK], ids=["visible", "selected"])
def test_nan_in_an_untrained_query_reaches_no_gradient(topk_TK):
    """Query 3 sees nothing; whatever stands in it must not meet a zero gradient in a shared product."""
    inputs = _inputs(torch.float32)
    for x in (inputs[0], inputs[2], inputs[3]):
        x[3] = torch.nan
    trained = [x.requires_grad_() for x in inputs[:3]]
    kl_T = _kl(*inputs, topk_TK=topk_TK)
    assert kl_T[3] == 0
    for gradient in torch.autograd.grad(kl_T.sum(), trained):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("topk_TK", [None, torch.tensor([[0, 1, 2], [0, 2, 3]], dtype=torch.int32)])
@pytest.mark.parametrize("where", ["index key", "latent key"])
def test_a_spoiled_query_gives_no_gradient_to_the_keys_of_others(topk_TK, where):
    """Query 0 sees the spoiled key 1, query 1 does not; the loss holds both."""
    inputs = [torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(2, 3), torch.randn(2, 2, 5), torch.randn(4, 5)]
    inputs[1 if where == "index key" else 4][1, 0] = torch.nan
    ranges = torch.tensor([0, 2]), torch.tensor([3, 4])
    trained = [x.requires_grad_() for x in inputs[:3]]
    kl_T = sfa.indexer_kl(*inputs, *ranges, scale=0.5, topk_TK=topk_TK)
    assert kl_T.isnan().tolist() == [True, False]
    got = torch.autograd.grad(kl_T.sum(), trained)
    want = torch.autograd.grad(sfa.indexer_kl(*inputs, *ranges, scale=0.5, topk_TK=topk_TK)[1], trained)
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)
    assert got[0][1].ne(0).any()
