"""Attention with keys and values per head: which queries take it, and that it is the same attention."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sfa_functional as sfa
from sfa_functional import blockwise_heads, latent, per_head, tiles
from sfa_functional.batch import global_selection
from sfa_functional.per_head import attend_in_both_forms, batch_runs, form_flops, per_head_runs
from tests.sharding.products import ProductCounter

CONFIG = replace(sfa.TINY, index_topk=7)  # compared and summed per head: 44 columns, absorbed: 56
BLOCK = 4


def _causal(*requests):
    """List the visible ranges of requests ``(new, total)``, key rows one request after the other."""
    ranges, first = [], 0
    for new, total in requests:
        ranges += [(first, first + total - new + i + 1) for i in range(new)]
        first += total
    return ranges


# --- which queries -------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_products_that_run():
    """For queries that all see the same rows, so that no tile is rounded."""
    params = sfa.init_params(CONFIG)
    batch = replace(sfa.Batch.from_lengths([12]), end_T=torch.full((12,), 9))
    q_THX, kv_SE = torch.randn(12, 4, 24), torch.randn(12, 32)
    selection_TK = torch.stack([torch.randperm(9)[:7] for _ in range(12)]).to(torch.int32)
    both = []
    for runs in ([], [(0, 12)]):
        with torch.no_grad(), ProductCounter() as counter:
            attend_in_both_forms(params, q_THX, kv_SE, selection_TK, batch, runs, config=CONFIG)
        both.append(counter.flops)
    assert tuple(both) == form_flops([9] * 12, config=CONFIG, k=7)
    assert form_flops([9] * 12, config=CONFIG, k=7) == (
        2 * 4 * (12 * 24 * 36 + 12 * 7 * 56),
        2 * 4 * (9 * 24 * 36 + 12 * 9 * 44),
    )


@pytest.mark.parametrize(
    ("requests", "k", "want"),
    [
        ([(7, 7)], 7, [(0, 7)]),  # a prefill that selects everything
        ([(20, 20)], 14, [(0, 17)]),  # 14 · 56 / 44 = 17.8: the queries that see more rows are cheaper absorbed
        ([(1, 1)], 7, [(0, 1)]),
        ([(1, 7)], 7, []),  # decode: seven rows would be made for one query
        ([(2, 900)], 7, []),
        ([(3, 9), (5, 5), (1, 8), (4, 4)], 9, [(3, 8), (9, 13)]),
        ([], 7, []),
    ],
)
def test_queries_attend_per_head_where_that_takes_fewer_products(requests, k, want):
    assert per_head_runs(_causal(*requests), config=CONFIG, k=k) == want


def test_published_sizes_attend_per_head_up_to_twice_k():
    for config, most in ((sfa.GLM_5, 4352), (sfa.DEEPSEEK_V32, 6963)):
        for tokens in (most - 1, most, most + 1):
            runs = per_head_runs(_causal((tokens, tokens)), config=config, k=2048)
            assert runs == [(0, min(tokens, most))]
        assert per_head_runs(_causal((1, 2048)), config=config, k=2048) == []


def test_queries_without_keys_part_no_run_and_start_none():
    ranges = [(0, 0), *_causal((3, 3)), (0, 0), (0, 0)]
    assert per_head_runs(ranges, config=CONFIG, k=7) == [(0, 6)]
    assert per_head_runs([(0, 0)] * 3, config=CONFIG, k=7) == []


def test_no_query_goes_where_its_keys_exceed_the_workspace():
    """Five rows of 44 columns of 4 bytes, four times."""
    got = per_head_runs(_causal((9, 9)), config=CONFIG, k=7, workspace_bytes=5 * 44 * 4 * 4)
    assert got == [(0, 5)]
    assert per_head_runs(_causal((9, 9)), config=CONFIG, k=7, itemsize=8, workspace_bytes=5 * 44 * 4 * 4) == [(0, 2)]


def test_wide_heads_are_never_cheaper():
    config = replace(CONFIG, v_head_dim=33)  # 16 + 8 + 33 = 57 columns
    assert per_head_runs(_causal((7, 7)), config=config, k=7) == []


def test_ranges_are_read_where_that_costs_nothing_alone():
    batch, x_TD = sfa.Batch.from_lengths([5]), torch.randn(5, CONFIG.hidden_size)
    named = {"config": CONFIG, "k": 7}
    for implementation, want in ((None, [(0, 5)]), ("blockwise", [(0, 5)]), ("reference", []), (min, [])):
        assert batch_runs(batch, x_TD, implementation=implementation, **named) == want
    away = replace(batch, start_T=batch.start_T.to("meta"), end_T=batch.end_T.to("meta"))
    assert batch_runs(away, x_TD, implementation=None, **named) == []


# --- the same attention --------------------------------------------------------------------------------------------


def _plain(params, q_THX, rows_SE, selected):
    """Attend one query and head after the other, with keys and values written out; ``selected`` lists rows."""
    heads_HYL = params.kv_b_proj.view(4, 36, 24)
    out = []
    for t, rows in enumerate(selected):
        for h in range(4):
            c_KL, rope_KR = rows_SE[rows, :24], rows_SE[rows, 24:]
            k_KX = torch.cat([c_KL @ heads_HYL[h, :16].T, rope_KR], dim=1)
            p_K = torch.softmax(CONFIG.softmax_scale * (k_KX @ q_THX[t, h]), dim=0)
            out.append(p_K @ (c_KL @ heads_HYL[h, 16:].T) if rows else torch.zeros(20, dtype=q_THX.dtype))
    return torch.stack(out).view(len(selected), 4, 20)


def _problem(kind):
    """Make a batch, its key rows, a selection in any order with holes and repeats, and the rows that it means."""
    generator = torch.Generator().manual_seed(3)
    lengths, totals = [9, 3, 6, 1], [9, 0, 8, 5]
    if kind == "tokens":
        lengths, totals = [9, 3, 6], [9, 0, 6]
        batch = sfa.Batch.from_lengths(lengths, totals)
        count = 18
    else:
        table = torch.randperm(16, generator=generator)[:12].view(4, 3).to(torch.int32)
        batch = sfa.Batch.from_lengths(lengths, totals, block_table=table, block_size=BLOCK)
        count = 64
    rows_SE = torch.randn(count, 32, dtype=torch.float64, generator=generator)
    q_THX = torch.randn(sum(lengths), 4, 24, dtype=torch.float64, generator=generator)
    selection_TK = torch.randint(-3, 12, (sum(lengths), 7), generator=generator).to(torch.int32)
    selection_TK[2] = -1
    selection_TK[8, :2] = 4  # twice
    selected = []
    for key_K in global_selection(selection_TK, batch).tolist():
        keys = [s for s in key_K if s >= 0]
        selected.append(keys if batch.row_S is None else batch.row_S[keys].tolist())
    assert selected[2] == []
    assert selected[8].count(selected[8][0]) >= 2
    return batch, q_THX, rows_SE, selection_TK, selected


RUNS = {"all": [(0, 12), (12, 18)], "some": [(1, 8), (14, 17)], "none": []}


@pytest.mark.parametrize("workspace", [1, 3000, tiles.WORKSPACE])
@pytest.mark.parametrize("kind", ["tokens", "pages", "split pages"])
@pytest.mark.parametrize("runs", RUNS)
def test_both_forms_equal_attention_written_out_forward_and_backward(kind, runs, workspace):
    params = sfa.init_params(CONFIG, dtype=torch.float64)
    batch, q_THX, rows_SE, selection_TK, selected = _problem(kind)
    results = []
    for form in ("ours", "plain"):
        w = params.kv_b_proj.detach().requires_grad_()
        leaves = q_THX.detach().requires_grad_(), rows_SE.detach().requires_grad_(), w
        if form == "plain":
            value_THV = _plain(replace(params, kv_b_proj=w), *leaves[:2], selected)
        else:
            kv = leaves[1]
            kv = sfa.SplitRows(latent_SL=kv[:, :24], rope_SR=kv[:, 24:]) if kind == "split pages" else kv
            named = {"config": CONFIG, "workspace_bytes": workspace}
            given = leaves[0], kv, selection_TK, batch, RUNS[runs]
            value_THV = attend_in_both_forms(replace(params, kv_b_proj=w), *given, **named)
        results.append([value_THV, *torch.autograd.grad(value_THV.sin().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert not results[0][0][2].any()


@pytest.mark.parametrize("times", [1, 2, 255, 256, 300])
def test_a_key_listed_many_times_weighs_as_often(times):
    """Counts are kept in a byte each where they fit; 256 would be 0 there."""
    q_THX, rows_SE = torch.randn(3, 4, 24, dtype=torch.float64), torch.randn(3, 32, dtype=torch.float64)
    params, batch = sfa.init_params(CONFIG, dtype=torch.float64), sfa.Batch.from_lengths([3])
    listed = [0], [0, *[1] * times], [2, 1, *[0] * times]
    selection_TK = torch.tensor([[*rows, *[-1] * (302 - len(rows))] for rows in listed], dtype=torch.int32)
    got = attend_in_both_forms(params, q_THX, rows_SE, selection_TK, batch, [(0, 3)], config=CONFIG)
    torch.testing.assert_close(got, _plain(params, q_THX, rows_SE, listed), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_spoiled_row_leaves_a_query_without_keys_alone(poison):
    """They share a tile with one that selects the row."""
    params, batch = sfa.init_params(CONFIG, dtype=torch.float64), sfa.Batch.from_lengths([6])
    q_THX, rows_SE = torch.randn(6, 4, 24, dtype=torch.float64), torch.randn(6, 32, dtype=torch.float64)
    rows_SE[2] = poison
    selection_TK = torch.tensor([[0, -1], [0, 1], [2, -1], [-1, -1], [4, 1], [5, 0]], dtype=torch.int32)
    given = params, q_THX, rows_SE, selection_TK, batch
    got, want = (attend_in_both_forms(*given, runs, config=CONFIG) for runs in ([(0, 6)], []))
    assert got[2].isnan().all()
    assert not got[3].any()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("runs", RUNS)
def test_threads_change_how_work_is_cut_and_no_result(runs, threads):
    params = sfa.init_params(CONFIG, dtype=torch.float64)
    batch, q_THX, rows_SE, selection_TK, selected = _problem("pages")
    torch.set_num_threads(threads)
    for workspace in (3000, tiles.WORKSPACE):
        named = {"config": CONFIG, "workspace_bytes": workspace}
        got = attend_in_both_forms(params, q_THX, rows_SE, selection_TK, batch, RUNS[runs], **named)
        torch.testing.assert_close(got, _plain(params, q_THX, rows_SE, selected), rtol=1e-10, atol=1e-10)


def test_the_layer_selects_the_same_and_returns_the_same_in_both_forms(monkeypatch):
    params = sfa.init_params(CONFIG, dtype=torch.float64)
    x_TD, batch = torch.randn(40, CONFIG.hidden_size, dtype=torch.float64), sfa.Batch.from_lengths([26, 14])
    assert batch_runs(batch, x_TD, config=CONFIG, k=7, implementation=None) == [(0, 8), (26, 34)]
    both = sfa.sfa_layer(params, x_TD, batch, config=CONFIG)
    looks = []
    best = sfa.best_keys(CONFIG.softmax_scale)

    def select(*, q_THE, **compared):
        looks.append(q_THE)
        return best(q_THE=q_THE, **compared)

    chosen = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, select=select)
    monkeypatch.setattr(per_head, "per_head_runs", lambda *_, **__: [])
    absorbed = sfa.sfa_layer(params, x_TD, batch, config=CONFIG)
    torch.testing.assert_close(both.y_TD, absorbed.y_TD, rtol=1e-12, atol=1e-12)
    assert torch.equal(both.selection_TK, absorbed.selection_TK)
    again = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, select=select)
    assert torch.equal(chosen.selection_TK, again.selection_TK)
    torch.testing.assert_close(*looks, rtol=1e-12, atol=1e-12)


def test_queries_per_head_absorb_to_latent_queries():
    params, x_TD = sfa.init_params(CONFIG), torch.randn(5, CONFIG.hidden_size)
    rope = sfa.rope_cos_sin(torch.arange(5), CONFIG)
    q_THX, q_latent_TQ = latent.head_queries(params, x_TD, *rope, config=CONFIG)
    got, want = (
        latent.absorb_queries(params, q_THX, config=CONFIG),
        sfa.latent_queries(params, x_TD, *rope, config=CONFIG),
    )
    assert torch.equal(got, want[0])
    assert torch.equal(q_latent_TQ, want[1])
    out_THL = torch.randn(5, 4, 24)
    y_TD = latent.output_of_heads(params, latent.head_values(params, out_THL, config=CONFIG))
    assert torch.equal(y_TD, sfa.latent_output(params, out_THL, config=CONFIG))


# --- what must not reach -------------------------------------------------------------------------------------------


def _alone(rows_SE, selection_TK, d_value=None):
    """Attend per head from six queries that see six rows; return values and gradients."""
    params, batch = sfa.init_params(CONFIG), sfa.Batch.from_lengths([6])
    q_THX = torch.randn(6, 4, 24, generator=torch.Generator().manual_seed(1))
    w = params.kv_b_proj.requires_grad_()
    leaves = q_THX.requires_grad_(), rows_SE.clone().requires_grad_(), w
    value_THV = attend_in_both_forms(params, *leaves[:2], selection_TK, batch, [(0, 6)], config=CONFIG)
    d_value = torch.ones_like(value_THV) if d_value is None else d_value
    return [value_THV.detach(), *torch.autograd.grad(value_THV, leaves, d_value)]


@pytest.mark.parametrize("sentinel", [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30])
@pytest.mark.parametrize("columns", [slice(None), slice(3, 4), slice(30, 31)])
def test_what_stands_in_a_row_that_nobody_selects_reaches_nothing(sentinel, columns):
    selection_TK = torch.tensor([[0, 1, -1]] * 3 + [[3, 0, 1], [4, 3, 0], [5, 4, 0]], dtype=torch.int32)
    rows_SE = torch.randn(6, 32)
    want = _alone(rows_SE, selection_TK)
    rows_SE[2, columns] = sentinel
    for got, clean in zip(_alone(rows_SE, selection_TK), want, strict=True):
        torch.testing.assert_close(got, clean)


@pytest.mark.parametrize("sentinel", [math.nan, math.inf])
def test_a_row_that_is_not_finite_spoils_the_queries_that_select_it_alone(sentinel):
    selection_TK = torch.tensor([[0, -1], [0, 1], [0, 2], [2, 3], [4, 1], [5, 0]], dtype=torch.int32)
    rows_SE = torch.randn(6, 32)
    spoilt = [2, 3]
    unselected_TK = selection_TK.clone()
    unselected_TK[spoilt] = -1
    want = _alone(rows_SE, unselected_TK)
    rows_SE[2, 7] = sentinel
    got = _alone(rows_SE, selection_TK)
    assert got[0][spoilt].isnan().all()
    got[0][spoilt] = 0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_cotangent_of_a_query_without_keys_reaches_nothing():
    selection_TK = torch.tensor([[0], [-1], [2], [1], [4], [0]], dtype=torch.int32)
    d_value = torch.ones(6, 4, 20)
    want = _alone(rows_SE := torch.randn(6, 32), selection_TK, d_value)
    d_value = d_value.clone()
    d_value[1] = math.nan
    for got, clean in zip(_alone(rows_SE, selection_TK, d_value), want, strict=True):
        torch.testing.assert_close(got, clean)


# --- transforms and bounds -----------------------------------------------------------------------------------------


PARAMS = sfa.init_params(CONFIG, dtype=torch.float64)


def _layer_loss(w, x_TD):
    params = replace(PARAMS, kv_b_proj=w)
    return sfa.sfa_layer(params, x_TD, sfa.Batch.from_lengths([6, 5]), config=CONFIG).y_TD.sin().sum()


def test_gradients_of_a_batch_equal_those_of_its_members():
    w, x_BTD = PARAMS.kv_b_proj, torch.randn(3, 11, 64, dtype=torch.float64)
    each = torch.func.vmap(torch.func.grad(_layer_loss, argnums=(0, 1)), in_dims=(None, 0))(w, x_BTD)
    for b in range(3):
        leaves = w.clone().requires_grad_(), x_BTD[b].clone().requires_grad_()
        want = torch.autograd.grad(_layer_loss(*leaves), leaves)
        alone = torch.func.grad(_layer_loss, argnums=(0, 1))(w, x_BTD[b])
        for got, one, other in zip(each, alone, want, strict=True):
            torch.testing.assert_close(got[b], other, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_second_derivative_is_refused_in_one_line():
    w, x_TD = PARAMS.kv_b_proj, torch.randn(11, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^attend_per_head: gradients must be taken once; got a second derivative$"):
        torch.func.grad(lambda x: torch.func.grad(_layer_loss, argnums=1)(w, x).sum())(x_TD)


class LargestTensor(TorchDispatchMode):
    """Note the bytes of the largest tensor that any operation returns; it doesn't look inside of an operator."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("workspace", [1 << 18, 1 << 20])
def test_no_tensor_of_all_heads_and_all_keys_is_made(workspace):
    """Keys and values of all heads take 7.5 MiB here, logits of all heads 32 MiB; inputs and results 1.5 MiB and less.

    Half of the smaller workspace holds the keys and values of three heads.
    """
    heads, tokens = 64, 512
    q_THX, d_value = torch.randn(tokens, heads, 12), torch.randn(tokens, heads, 8)
    rows_SE, w_uk_HPL, w_uv_HVL = torch.randn(tokens, 12), torch.randn(heads, 8, 8), torch.randn(heads, 8, 8)
    topk_TK = torch.stack([torch.randperm(tokens)[:64] for _ in range(tokens)]).to(torch.int32)
    ranges = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens) + 1, None
    given = q_THX, rows_SE, w_uk_HPL, w_uv_HVL, topk_TK, *ranges
    named = {"runs": [(0, tokens)], "scale": 0.3, "workspace_bytes": workspace}
    with LargestTensor() as seen:
        blockwise_heads.attend_per_head(*given, **named)
        blockwise_heads.attend_per_head_backward(*given, d_value, **named)
    assert q_THX.numel() * 4 <= seen.largest <= 2 << 20


def test_backward_keeps_inputs_and_selection_alone():
    params = sfa.init_params(CONFIG)
    q_THX, kv_SE = torch.randn(7, 4, 24, requires_grad=True), torch.randn(7, 32, requires_grad=True)
    batch = sfa.Batch.from_lengths([7])
    selection_TK = torch.arange(7).expand(7, 7).to(torch.int32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        attend_in_both_forms(params, q_THX, kv_SE, selection_TK, batch, [(0, 7)], config=CONFIG)
    assert sorted(saved) == sorted([7 * 4 * 24, 7 * 32, 4 * 16 * 24, 4 * 20 * 24, 7 * 7, 7, 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_the_same_run_after_run(dtype):
    params = sfa.init_params(CONFIG, dtype=dtype)
    x_TD, batch = torch.randn(40, 64).to(dtype), sfa.Batch.from_lengths([26, 14])

    def run():
        leaf = x_TD.clone().requires_grad_()
        y_TD = sfa.sfa_layer(params, leaf, batch, config=CONFIG).y_TD
        return y_TD, torch.autograd.grad(y_TD.float().sin().sum(), leaf)[0]

    for again in (run(), run()):
        assert all(torch.equal(a, b) for a, b in zip(again, run(), strict=True))


def test_results_do_not_depend_on_whether_gradients_are_recorded():
    """``torch.matmul`` of a batch with one matrix takes another way where that requires grad."""
    params, x_TD, batch = PARAMS, torch.randn(13, 64).double(), sfa.Batch.from_lengths([5, 8])
    with_grad = sfa.sfa_layer(params, x_TD.clone().requires_grad_(), batch, config=CONFIG).y_TD
    assert torch.equal(with_grad, sfa.sfa_layer(params, x_TD, batch, config=CONFIG).y_TD)


def test_bfloat16_stays_within_its_rounding():
    params = sfa.init_params(CONFIG, dtype=torch.float64)
    batch, q_THX, rows_SE, selection_TK, _ = _problem("tokens")
    exact = attend_in_both_forms(params, q_THX, rows_SE, selection_TK, batch, RUNS["all"], config=CONFIG)
    narrow = torch.utils._pytree.tree_map(torch.Tensor.bfloat16, params)
    given = q_THX.bfloat16(), rows_SE.bfloat16(), selection_TK, batch, RUNS["all"]
    got = attend_in_both_forms(narrow, *given, config=CONFIG)
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).norm() < 0.01 * exact.norm()
