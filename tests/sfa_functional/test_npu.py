"""The Ascend adapter over stand-ins for the operators: equal to the oracle, every rule refused by name, no copies.

Nothing here shows that the adapter runs on the device; it shows that the adapter keeps to the operators' documentation.
"""

import itertools
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
from sfa_functional import npu
from sfa_functional.params import named_fields
from tests.sfa_functional.npu_standins import SCHEMAS, Broken, StandIns, registered

V32 = replace(sfa.DEEPSEEK_V32, hidden_size=1024, num_attention_heads=8, index_n_heads=16, index_topk=8)
"""The operators' widths with few heads."""
CONFIG = replace(V32, indexer_types=("full", "shared"))
BLOCK = 16
ATTEND = {"scale": 0.07, "value_dim": 512}


@pytest.fixture
def ops():
    with registered() as stand_ins:
        yield stand_ins


@pytest.fixture
def declared():
    """Operators that are declared, as after an import, but have no kernel for the CPU."""
    with registered(kernels=False) as stand_ins:
        yield stand_ins


def _bf16(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def _near(got, want, tolerance=0.02):
    assert got.dtype == want.dtype
    assert sfa.difference(got, want).max_rel <= tolerance


# attention -----------------------------------------------------------------------------------------------------------


def _selection(tokens, keys, k):
    """Choose rows in any order, with holes, numbers out of range, and one query that has none."""
    topk_TK = torch.stack([torch.randperm(keys + 6)[:k] - 3 for _ in range(tokens)]).to(torch.int32)
    topk_TK = torch.where(torch.rand(tokens, k) < 0.2, -1, topk_TK)
    topk_TK[tokens // 2] = -7
    topk_TK[0, :2] = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    return topk_TK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("keys", [20, 300])
@pytest.mark.parametrize("split", [False, True])
def test_attention_equals_the_reference(ops, split, keys, heads, dtype, monkeypatch):
    monkeypatch.setattr(npu, "GATHERED_VALUES", 2 * 9 * 576)  # two queries a tile
    q_THE, kv_SE, topk_TK = _bf16(5, heads, 576).to(dtype), _bf16(keys, 576).to(dtype), _selection(5, keys, 9)
    used = torch.where((topk_TK >= 0) & (topk_TK < keys), topk_TK, 0).unique()
    kv_SE[[s for s in range(keys) if s not in used]] = torch.nan  # rows that nobody selects
    rows = sfa.SplitRows(latent_SL=kv_SE[:, :512].clone(), rope_SR=kv_SE[:, 512:].clone()) if split else kv_SE
    want = sfa.sparse_attention(q_THE, kv_SE, topk_TK, implementation="reference", **ATTEND)
    got = sfa.sparse_attention(q_THE, rows, topk_TK, implementation="npu", **ATTEND)
    _near(got.out_THL, want.out_THL)
    _near(got.lse_TH, want.lse_TH, 1e-5)
    assert got.lse_TH[2].eq(-torch.inf).all()
    assert got.out_THL[2].eq(0).all()
    assert len(ops.calls) == (3 if keys == 300 and not split else 1)
    key = ops.calls[0][1]["key"]
    assert (key.data_ptr() == rows.latent_SL.data_ptr()) if split else True


def test_of_joint_rows_the_smaller_thing_is_copied(ops):
    q_THE, topk_TK = _bf16(4, 2, 576), _selection(4, 40, 8)
    for keys in (20, 33):
        sfa.sparse_attention(q_THE, _bf16(keys, 576), topk_TK, implementation="npu", **ATTEND)
    assert [call["key"].shape[0] for _, call in ops.calls] == [20, 4 * 8]
    rows = sfa.SplitRows(latent_SL=_bf16(500, 512), rope_SR=_bf16(500, 64))
    sfa.sparse_attention(q_THE, rows, topk_TK, implementation="npu", **ATTEND)
    assert ops.calls[-1][1]["key_rope"].data_ptr() == rows.rope_SR.data_ptr()


@pytest.mark.parametrize(("tokens", "keys", "k"), [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_nothing_to_attend_to_calls_no_operator(ops, tokens, keys, k):
    topk_TK = torch.zeros(tokens, k, dtype=torch.int32)
    out = sfa.sparse_attention(_bf16(tokens, 2, 576), _bf16(keys, 576), topk_TK, implementation="npu", **ATTEND)
    assert out.out_THL.shape == (tokens, 2, 512)
    assert out.out_THL.eq(0).all()
    assert out.lse_TH.eq(-torch.inf).all()
    assert ops.calls == []


# the indexer ---------------------------------------------------------------------------------------------------------


def _index(tokens, keys, heads=16):
    return _bf16(tokens, heads, 128), _bf16(keys, 128), torch.randn(tokens, heads)


def _assert_selected(got_TK, index, start_T, end_T, k):
    """Compare with the oracle: exactly, but for keys whose scores are equal up to float32's rounding."""
    q_TJI, k_SI, w_TJ = index
    want_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=k, implementation="reference")
    score_TS = sfa.index_scores(q_TJI, k_SI, w_TJ)
    assert got_TK.dtype == torch.int32
    for got, want, score_S in zip(got_TK.tolist(), want_TK.tolist(), score_TS, strict=True):
        count = sum(s >= 0 for s in want)
        assert got[:count] == sorted(got[:count])
        assert got[count:] == [-1] * (k - count)
        only = sorted(set(got) ^ set(want))
        if only:
            assert score_S[only].max() - score_S[only].min() <= 1e-5 * score_S.abs().max()


RANGES = {
    "one request": ([0] * 30, [*range(1, 31)], 30, "TND"),
    "requests back to back": ([0, 0, 0, 3, 3, 5], [1, 2, 3, 4, 5, 6], 6, "TND"),
    "rows without keys between": ([0, 0, 9, 0, 2, 2], [1, 2, 9, 0, 3, 4], 4, "TND"),
    "context at page borders": ([0, 0, 64, 64, 64], [21, 22, 69, 70, 71], 100, "PA_BSND"),
    "one key on a last page": ([0, 64], [65, 70], 70, "PA_BSND"),
    "one prefix, two requests": ([0, 0, 0], [10, 11, 7], 12, "PA_BSND"),
    "a window": ([16, 32, 48], [40, 41, 50], 50, "PA_BSND"),
    "all see all": ([0, 0], [25, 25], 25, "PA_BSND"),
    "beyond the keys": ([-3, 0], [50, 50], 20, "PA_BSND"),
    "nobody sees a key": ([3, 0], [3, 0], 20, "PA_BSND"),
}


@pytest.mark.parametrize("k", [1, 5, 64])
@pytest.mark.parametrize("name", RANGES)
def test_the_indexer_equals_the_reference_on_every_kind_of_range(ops, name, k):
    start, end, keys, layout = RANGES[name]
    start_T, end_T, index = torch.tensor(start), torch.tensor(end), _index(len(start), keys)
    got = sfa.lightning_indexer(*index, start_T, end_T, k=k, implementation="npu")
    _assert_selected(got, index, start_T, end_T, k)
    assert [call["layout_key"] for _, call in ops.calls] == [layout]


def test_the_indexer_equals_the_reference_on_ragged_batches(ops):
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 12, (int(torch.randint(1, 6, (), generator=draw)),), generator=draw).tolist()
        if sum(lengths) == 0:
            continue
        seen = [n if int(torch.randint(4, (), generator=draw)) else 0 for n in lengths]
        batch, index = sfa.Batch.from_lengths(lengths, seen), _index(sum(lengths), sum(lengths), heads=8)
        reasons = sfa.explain_implementation("npu", sfa.lightning_indexer, *index, batch.start_T, batch.end_T, k=4)
        if reasons:  # padding leaves a gap between requests
            assert 0 in seen
            continue
        got = sfa.lightning_indexer(*index, batch.start_T, batch.end_T, k=4, implementation="npu")
        _assert_selected(got, index, batch.start_T, batch.end_T, 4)


@pytest.mark.parametrize(("tokens", "keys"), [(0, 5), (3, 0)])
def test_nothing_to_score_calls_no_operator(ops, tokens, keys):
    ranges = torch.zeros(tokens).long(), torch.full((tokens,), keys)
    got = sfa.lightning_indexer(*_index(tokens, keys), *ranges, k=3, implementation="npu")
    assert torch.equal(got, torch.full((tokens, 3), -1, dtype=torch.int32))
    assert ops.calls == []


@pytest.mark.parametrize(("version", "narrow"), [(None, False), (220, False), (250, False), (260, True)])
def test_weights_are_cast_only_where_the_part_wants_it(ops, version, narrow, monkeypatch):
    if version is not None:
        package = types.SimpleNamespace(npu=types.SimpleNamespace(get_soc_version=lambda: version))
        monkeypatch.setitem(sys.modules, "torch_npu", package)
    ops.narrow_weights = narrow  # the stand-in refuses the other dtype
    index, ranges = _index(4, 4), (torch.zeros(4).long(), torch.arange(1, 5))
    assert sfa.lightning_indexer(*index, *ranges, k=2, implementation="npu").shape == (4, 2)


# projections ---------------------------------------------------------------------------------------------------------


def _layer(tokens, layer=0, config=CONFIG):
    params = sfa.init_params(config, layer=layer, dtype=torch.bfloat16)
    gains = (torch.rand(n) + 0.5 for n in (config.q_lora_rank, config.kv_lora_rank))
    params = replace(params, q_a_layernorm=next(gains), kv_a_layernorm=next(gains))
    return params, _bf16(tokens, config.hidden_size)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_fused_projections_equal_the_plain_ones_in_our_order_of_rope_columns(ops, eps):
    config = replace(CONFIG, latent_norm_eps=eps)
    params, x_TD = _layer(7)
    rope = sfa.rope_cos_sin(torch.arange(7) * 5 + 3, config)
    want = sfa.latent_projections(params, x_TD, *rope, config=config, implementation="blockwise")
    prepared = npu.prepare_params(params, config=config)
    got = sfa.latent_projections(prepared, x_TD, *rope, config=config, implementation="npu")
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        _near(x, y)
    assert ops.names() == ["npu_format_cast"] * 3 + ["npu_mla_prolog_v3"]
    _near(got[2][:, 512:], want[2][:, 512:])  # the rope columns alone


def test_weights_are_laid_out_once_and_held_once(ops):
    params, x_TD = _layer(5)
    prepared = npu.prepare_params(params, config=CONFIG)
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj"):
        assert torch.equal(getattr(prepared, name), getattr(params, name))
    assert prepared.q_b_proj.data_ptr() == prepared.prolog.weight_uq_qr.data_ptr()
    assert [name for name, _ in named_fields(prepared)] == [name for name, _ in named_fields(params)]
    rope = sfa.rope_cos_sin(torch.arange(5), CONFIG)
    for _ in range(3):
        sfa.latent_projections(prepared, x_TD, *rope, config=CONFIG, implementation="npu")
    assert ops.names().count("npu_format_cast") == 3
    plain = (
        sfa.latent_projections(p, x_TD, *rope, config=CONFIG, implementation="blockwise") for p in (params, prepared)
    )
    for x, y in zip(*plain, strict=True):
        _near(x, y, 1e-2)


def test_no_tokens_call_no_operator(ops):
    params, x_TD = _layer(0)
    prepared = npu.prepare_params(params, config=CONFIG)
    rope = sfa.rope_cos_sin(torch.arange(0), CONFIG)
    got = sfa.latent_projections(prepared, x_TD, *rope, config=CONFIG, implementation="npu")
    assert [x.shape for x in got] == [(0, 8, 576), (0, 1536), (0, 576)]
    assert "npu_mla_prolog_v3" not in ops.names()


# cache writes --------------------------------------------------------------------------------------------------------


def _pool(layout, blocks=4, config=CONFIG, dtype=torch.bfloat16):
    cache = sfa.init_cache(config, num_blocks=blocks, block_size=BLOCK, dtype=dtype, layout=layout)
    return tree_map(lambda x: torch.randn_like(x, dtype=torch.float32).to(dtype), cache)


@pytest.mark.parametrize("slots", [[3, 9, 0, 63, 17], [-1, 9, -1, 62, -1], [-1] * 5, [4, -1, -1, -1, -1]])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("index", ["same", "other", "none"])
@pytest.mark.parametrize("layout", ["joint", "split"])
def test_writes_equal_the_plain_ones_and_slot_minus_one_writes_nothing(ops, layout, index, donate, slots):
    cache, kv_TE, k_TI = _pool(layout), _bf16(5, 576), None if index == "none" else _bf16(5, 128)
    other = torch.tensor([60, -1, 2, 1, -1]) if index == "other" else None
    before = tree_map(torch.clone, cache)
    call = {"index_slot_T": other}
    want = sfa.write_cache(before, kv_TE, k_TI, torch.tensor(slots), implementation="blockwise", **call)
    got = sfa.write_cache(cache, kv_TE, k_TI, torch.tensor(slots), donate=donate, implementation="npu", **call)
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert torch.equal(x, y)
    for x, y, z in zip(tree_leaves(cache), tree_leaves(before), tree_leaves(got), strict=True):
        assert donate or torch.equal(x, y)
        assert not donate or x.data_ptr() == z.data_ptr()
    rows = "npu_scatter_nd_update" + ("_" if donate else "")
    assert ops.names() == [rows] * (index != "none") + [rows if layout == "joint" else "npu_scatter_pa_kv_cache"]


# a layer -------------------------------------------------------------------------------------------------------------


def _table(requests, columns):
    return torch.randperm(requests * columns).view(requests, columns).to(torch.int32)


BATCHES = {
    "prefill": ([20, 3, 11], None),
    "context": ([5, 0, 12], [25, 0, 12]),
    "decode": ([1, 1, 1], [32, 7, 17]),
    "padding": ([4, 2, 1], [9, 0, 30]),
}


def _batch(name, paged):
    new, total = BATCHES[name]
    table = {"block_table": _table(3, 2), "block_size": BLOCK} if paged else {}
    return sfa.Batch.from_lengths(new, total, **table)


def _assert_layers_agree(got, want, params, x_TD, batch, cache, config=CONFIG):
    """Selections equal up to near-ties of bfloat16 keys; outputs within bfloat16 of the same selections."""
    overlap_T = sfa.selection_overlap(got.selection_TK, want.selection_TK)
    assert overlap_T.mean() >= 0.97
    counts = [(x.selection_TK >= 0).sum(-1) for x in (got, want)]
    assert torch.equal(*counts)
    same = sfa.sfa_layer(
        params, x_TD, batch, config=config, cache=cache, selection=got.selection_TK, implementation="reference"
    )
    _near(got.y_TD, same.y_TD, 0.03)


@pytest.mark.parametrize(
    ("layout", "name", "donate"),
    [(None, "prefill", False), *itertools.product(("joint", "split"), BATCHES, (False, True))],
)
def test_a_layer_equals_the_reference(ops, layout, name, donate):
    batch, cache = _batch(name, layout is not None), None if layout is None else _pool(layout, 6)
    params, x_TD = _layer(batch.position_T.shape[0])
    given = tree_map(lambda x: x.clone(), cache) if cache is not None else None
    want = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=given, implementation="reference")
    prepared = npu.prepare_params(params, config=CONFIG)
    got = sfa.sfa_layer(prepared, x_TD, batch, config=CONFIG, cache=cache, implementation="npu", donate=donate)
    _assert_layers_agree(got, want, params, x_TD, batch, given)
    nothing_T = batch.request_T < 0
    assert got.y_TD[nothing_T].eq(0).all()
    assert got.selection_TK[nothing_T].eq(-1).all()
    if cache is not None:
        for x, y in zip(tree_leaves(got.cache), tree_leaves(want.cache), strict=True):
            _near(x, y)


class _Reads(TorchDispatchMode):
    """Count what every operation other than a view and the vendor's own takes out of some memory."""

    def __init__(self, *pools):
        super().__init__()
        self.homes = {pool.untyped_storage().data_ptr() for pool in pools}
        self.read = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        touched = any(x.untyped_storage().data_ptr() in self.homes for x in inputs)
        views = all(x.untyped_storage().data_ptr() in self.homes for x in outputs)
        if touched and not views and function.namespace != "npu":
            self.read.append((str(function), sum(x.numel() for x in outputs)))
        return result


@pytest.mark.parametrize("name", BATCHES)
def test_over_a_split_pool_a_layer_copies_no_rows_and_writes_each_pool_once(ops, name):
    batch, cache = _batch(name, True), _pool("split", 6)
    params, x_TD = _layer(batch.position_T.shape[0])
    prepared, pools = npu.prepare_params(params, config=CONFIG), tree_leaves(cache)
    ops.calls.clear()
    with _Reads(*pools) as reads:
        sfa.sfa_layer(prepared, x_TD, batch, config=CONFIG, cache=cache, implementation="npu", donate=True)
    # row 0 of each pool alone, twice: it is written back where no token has a slot
    assert sum(count for _, count in reads.read) <= 2 * (512 + 64 + 128)
    order = ["npu_mla_prolog_v3", "npu_scatter_nd_update_", "npu_scatter_pa_kv_cache"]
    assert ops.names() == [*order, "npu_lightning_indexer", "npu_sparse_flash_attention"]
    calls = dict(ops.calls)
    assert calls["npu_scatter_pa_kv_cache"]["pool"].data_ptr() == cache.latent.data_ptr()
    assert calls["npu_scatter_pa_kv_cache"]["rope"].data_ptr() == cache.rope.data_ptr()
    assert calls["npu_scatter_nd_update_"]["pool"].data_ptr() == cache.index_k.data_ptr()
    for call in ("npu_lightning_indexer", "npu_sparse_flash_attention"):
        assert calls[call]["query_lens"].tolist() == batch.query_start_B1[1:].tolist()
        assert calls[call]["key_lens"].tolist() == batch.seq_len_B.tolist()
    attention = calls["npu_sparse_flash_attention"]
    assert attention["layout_kv"] == calls["npu_lightning_indexer"]["layout_key"] == "PA_BSND"
    assert attention["key"].data_ptr() == cache.latent.data_ptr()
    assert attention["key_rope"].data_ptr() == cache.rope.data_ptr()
    assert calls["npu_lightning_indexer"]["key"].data_ptr() == cache.index_k.data_ptr()


def test_a_shared_layer_replays_a_selection_and_writes_no_index_keys(ops):
    batch, cache = _batch("context", True), _pool("split", 6)
    cache = replace(cache, index_k=None)
    params, x_TD = _layer(17, layer=1)
    selection = torch.stack([torch.randperm(30)[:8] for _ in range(17)]).to(torch.int32)
    run = {"config": CONFIG, "selection": selection}
    want = sfa.sfa_layer(params, x_TD, batch, cache=cache, implementation="reference", **run)
    prepared = npu.prepare_params(params, config=CONFIG)
    ops.calls.clear()
    got = sfa.sfa_layer(prepared, x_TD, batch, cache=cache, implementation="npu", donate=True, **run)
    _near(got.y_TD, want.y_TD, 0.03)
    assert ops.names() == ["npu_mla_prolog_v3", "npu_scatter_pa_kv_cache", "npu_sparse_flash_attention"]


def test_prefill_then_decode_through_a_cache_equals_one_prefill(ops):
    params, x_TD = _layer(24)
    prepared = npu.prepare_params(params, config=CONFIG)
    want = sfa.sfa_layer(prepared, x_TD, sfa.Batch.from_lengths([24]), config=CONFIG, implementation="npu")
    cache, batch, done = _pool("split"), None, 0
    for new in (20, 1, 3):
        table = {"block_table": _table(1, 4), "block_size": BLOCK}
        batch = sfa.Batch.from_lengths([new], **table) if batch is None else batch.next([new])
        x = x_TD[done : done + new]
        part = sfa.sfa_layer(prepared, x, batch, config=CONFIG, cache=cache, implementation="npu", donate=True)
        assert torch.equal(part.selection_TK, want.selection_TK[done : done + new])
        _near(part.y_TD, want.y_TD[done : done + new])
        cache, done = part.cache, done + new


# which implementation runs -------------------------------------------------------------------------------------------


def test_none_takes_the_operators_where_the_device_has_them_and_no_rule_is_broken(ops):
    q_THE, kv_SE, topk_TK = _bf16(4, 2, 576), _bf16(9, 576), _selection(4, 9, 3)
    sfa.sparse_attention(q_THE, kv_SE, topk_TK, **ATTEND)
    assert ops.names() == ["npu_sparse_flash_attention"]
    sfa.sparse_attention(q_THE.float(), kv_SE.float(), topk_TK, **ATTEND)
    sfa.sparse_attention(q_THE, kv_SE, topk_TK, implementation="blockwise", **ATTEND)
    sfa.dense_attention(q_THE, kv_SE, torch.zeros(4).long(), torch.arange(4), **ATTEND)
    assert len(ops.calls) == 1
    params, x_TD = _layer(12)
    batch = sfa.Batch.from_lengths([12], block_table=_table(1, 1), block_size=BLOCK)
    prepared = npu.prepare_params(params, config=CONFIG)
    ops.calls.clear()
    sfa.sfa_layer(prepared, x_TD, batch, config=CONFIG, cache=_pool("split"))
    assert len(ops.calls) == 5
    ops.calls.clear()
    sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=_pool("split"))
    assert ops.names() == ["npu_scatter_nd_update", "npu_scatter_pa_kv_cache", *ops.names()[2:]]
    assert len(ops.calls) == 4  # weights that are not prepared: plain projections


def test_none_is_blockwise_where_nothing_is_registered_and_where_there_is_no_kernel(declared):
    q_THE, kv_SE, topk_TK = _bf16(4, 2, 576), _bf16(9, 576), _selection(4, 9, 3)
    got = sfa.sparse_attention(q_THE, kv_SE, topk_TK, **ATTEND)
    want = sfa.sparse_attention(q_THE, kv_SE, topk_TK, implementation="blockwise", **ATTEND)
    assert torch.equal(got.out_THL, want.out_THL)
    reasons = sfa.explain_implementation("npu", sfa.sparse_attention, q_THE, kv_SE, topk_TK, **ATTEND)
    assert reasons == ["operators have no kernel for cpu: npu_sparse_flash_attention"]


def test_dense_attention_has_no_operator(ops):
    reasons = sfa.explain_implementation("npu", sfa.dense_attention)
    assert reasons == ["there is no operator for dense_attention"]
    ranges = torch.zeros(2).long(), torch.ones(2).long()
    with pytest.raises(ValueError, match=r"^dense_attention: implementation 'npu' can't run: there is no operator"):
        sfa.dense_attention(_bf16(2, 2, 576), _bf16(3, 576), *ranges, implementation="npu", **ATTEND)


def test_asking_without_a_function_tells_whether_the_operators_are_there(ops):
    assert sfa.explain_implementation("npu") == []


# refusals ------------------------------------------------------------------------------------------------------------


def _attention_call(q=(4, 2, 576), kv=(9, 576), dtype=torch.bfloat16, kv_dtype=None, topk=torch.int32, **changed):
    q_THE, kv_SE = torch.ones(q, dtype=dtype), torch.ones(kv, dtype=kv_dtype or dtype)
    return (q_THE, kv_SE, torch.zeros(q[0], 3, dtype=topk)), ATTEND | changed


def _index_call(tokens=4, heads=16, width=128, dtype=torch.bfloat16, k=3, start=None, end=None, **changed):
    start_T = torch.zeros(tokens).long() if start is None else torch.tensor(start)
    end_T = torch.arange(1, tokens + 1) if end is None else torch.tensor(end)
    keys = max(tokens, int(end_T.max()))
    index = (
        torch.ones(tokens, heads, width, dtype=dtype),
        torch.ones(keys, width, dtype=dtype),
        torch.ones(tokens, heads),
    )
    return (*index, start_T, end_T), {"k": k} | changed


def _projection_call(dtype=torch.bfloat16, **sizes):
    config = replace(CONFIG, **sizes)
    empty = sfa.init_params(replace(CONFIG, hidden_size=64, q_lora_rank=8), dtype=dtype)
    x_TD = torch.ones(3, config.hidden_size, dtype=dtype)
    return (empty, x_TD, *sfa.rope_cos_sin(torch.arange(3), config)), {"config": config}


def _write_call(layout="split", dtype=torch.bfloat16, strided=False):
    cache = _pool(layout, dtype=dtype)
    if strided:
        cache = tree_map(lambda x: x.repeat(1, 1, 2)[..., : x.shape[-1]], cache)
    return (cache, torch.ones(2, 576, dtype=dtype), torch.ones(2, 128, dtype=dtype), torch.tensor([0, 1])), {}


UNPREPARED = "params must come from npu.prepare_params; got params without prolog"
REFUSALS = {
    "attention dtype": (sfa.sparse_attention, _attention_call(dtype=torch.float32), ["q and kv must be bfloat16 or "]),
    "attention width": (
        sfa.sparse_attention,
        _attention_call(q=(4, 2, 40), kv=(9, 40), value_dim=24),
        ["q must have 512 + 64 columns, rows 512 and 64, value_dim 512; got (40, 24, 16, 24)"],
    ),
    "attention value": (sfa.sparse_attention, _attention_call(value_dim=64), ["q must have 512 + 64 columns, rows 5"]),
    "attention heads": (
        sfa.sparse_attention,
        _attention_call(q=(4, 129, 576)),
        ["there must be 1 to 128 heads; got 129"],
    ),
    "index dtype": (
        sfa.lightning_indexer,
        _index_call(dtype=torch.float32),
        ["q and k must be bfloat16 or float16, a"],
    ),
    "index width": (sfa.lightning_indexer, _index_call(width=64), ["index heads must be 128 wide; got 64"]),
    "index heads": (
        sfa.lightning_indexer,
        _index_call(heads=12),
        ["there must be 8, 16, 24, 32, 64 index heads; got 12"],
    ),
    "k 2049": (sfa.lightning_indexer, _index_call(k=2049), ["k must be in 1..2048 or 3072, 4096, ... 8192; got 2049"]),
    "k 2560": (sfa.lightning_indexer, _index_call(k=2560), ["k must be in 1..2048 or 3072, 4096, ... 8192; got 2560"]),
    "k 9216": (sfa.lightning_indexer, _index_call(k=9216), ["k must be in 1..2048 or 3072, 4096, ... 8192; got 9216"]),
    "index pool": (
        sfa.lightning_indexer,
        _index_call(row_S=torch.arange(4)),
        ["rows of a pool need a batch's block table: use the layer functions; got row_S"],
    ),
    "index ranges": (
        sfa.lightning_indexer,
        _index_call(tokens=2, start=[0, 5], end=[4, 9]),
        ["visible ranges must be requests back to back over all rows, or begin at multiples of 16; got starts [0, 5]"],
    ),
    "hidden": (sfa.latent_projections, _projection_call(hidden_size=96), [UNPREPARED, "hidden states must be 1024, "]),
    "low rank": (
        sfa.latent_projections,
        _projection_call(q_lora_rank=512),
        [UNPREPARED, "low-rank queries must be 15"],
    ),
    "latent": (
        sfa.latent_projections,
        _projection_call(kv_lora_rank=256),
        [UNPREPARED, "latent and rope must be 512 "],
    ),
    "head width": (
        sfa.latent_projections,
        _projection_call(qk_nope_head_dim=64),
        [UNPREPARED, "heads must be 128 or 192 w"],
    ),
    "heads": (
        sfa.latent_projections,
        _projection_call(num_attention_heads=12),
        [UNPREPARED, "there must be 1, 2, 4, 8, "],
    ),
    "pairing": (
        sfa.latent_projections,
        _projection_call(rope_pairing="half"),
        [UNPREPARED, "rope must be interleaved; g"],
    ),
    "projection dtype": (
        sfa.latent_projections,
        _projection_call(dtype=torch.float16),
        [UNPREPARED, "x and weights must be bfloat16; got [torch.float16]"],
    ),
    "split pool dtype": (
        sfa.write_cache,
        _write_call(dtype=torch.float32),
        ["rows and pools must be one of bfloat16, float16; got "],
    ),
    "pool dtype": (
        sfa.write_cache,
        _write_call("joint", dtype=torch.float64),
        ["rows and pools must be one of bfloat16, float16, float32; got "],
    ),
    "pool strides": (sfa.write_cache, _write_call(strided=True), ["pools must be contiguous; got "]),
    "several": (
        sfa.sparse_attention,
        _attention_call(q=(4, 130, 40), kv=(9, 40), value_dim=24, dtype=torch.float32),
        ["q and kv must be bfloat16 or ", "q must have 512 + 64 columns, ", "there must be 1 to 128 heads; got 130"],
    ),
    "several of the indexer": (
        sfa.lightning_indexer,
        _index_call(tokens=2, heads=5, width=64, k=2049, start=[0, 5], end=[4, 9], row_S=torch.arange(9)),
        [
            "index heads must be 128 wide; got 64",
            "there must be 8, 16, ",
            "k must be in 1..2048",
            "rows of a pool need a batch's block table",
            "visible ranges must be requests",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_broken_rule_is_in_the_one_error_and_no_operator_is_called(ops, name, unchecked):
    function, (arguments, named), starts = REFUSALS[name]
    reasons = sfa.explain_implementation("npu", function, *arguments, **named)
    assert len(reasons) == len(starts)
    assert all(reason.startswith(start) for reason, start in zip(reasons, starts, strict=True)), reasons
    with pytest.raises(ValueError) as error:
        function(*arguments, implementation="npu", **named)
    message = f"{function.__name__}: implementation 'npu' can't run: {'; '.join(reasons)}"
    assert str(error.value) == message
    assert ops.calls == []


def test_what_the_public_functions_check_first_is_explained_too(ops, unchecked):
    """Mixed dtypes and indices of another dtype are refused before any implementation is looked at."""
    (arguments, named) = _attention_call(kv_dtype=torch.float16, topk=torch.int64)
    reasons = sfa.explain_implementation("npu", sfa.sparse_attention, *arguments, **named)
    assert [reason.split(";")[0] for reason in reasons] == [
        "q and kv must be bfloat16 or float16, all of them",
        "indices must be int32",
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_inputs_that_require_grad_are_refused(ops, which):
    for function, (arguments, named) in (
        (sfa.sparse_attention, _attention_call()),
        (sfa.lightning_indexer, _index_call()),
    ):
        arguments = [x.clone().requires_grad_() if i == which else x for i, x in enumerate(arguments)]
        reasons = sfa.explain_implementation("npu", function, *arguments, **named)
        assert reasons == ["it gives no gradients: inputs must not require grad"]
        with pytest.raises(ValueError, match=r"it gives no gradients: inputs must not require grad$"):
            function(*arguments, implementation="npu", **named)
        with torch.no_grad():
            assert sfa.explain_implementation("npu", function, *arguments, **named) == []
    (arguments, named) = _attention_call()
    arguments[which].requires_grad_()
    out = sfa.sparse_attention(*arguments, **named)  # None: blockwise, which has them
    out.out_THL.float().sum().backward()
    assert arguments[which].grad is not None


def test_a_layer_is_refused_with_all_reasons_before_anything_is_written(ops):
    config = replace(CONFIG, index_n_heads=12, index_topk=2049, num_attention_heads=12)
    params = sfa.init_params(config, dtype=torch.bfloat16)
    batch = sfa.Batch.from_lengths([3], block_table=torch.zeros(1, 1, dtype=torch.int32), block_size=8)
    cache = sfa.init_cache(config, num_blocks=1, block_size=8, dtype=torch.bfloat16, layout="split")
    run = {"config": config, "cache": cache, "donate": True}
    x_TD = _bf16(3, 1024).requires_grad_()
    reasons = sfa.explain_implementation("npu", sfa.sfa_layer, params, x_TD, batch, **run)
    assert [reason.split(";")[0] for reason in reasons] == [
        "it gives no gradients: inputs must not require grad",
        "params must come from npu.prepare_params",
        "there must be 1, 2, 4, 8, 16, 32, 64, 128 heads",
        "there must be 8, 16, 24, 32, 64 index heads",
        "k must be in 1..2048 or 3072, 4096, ... 8192",
        "pages must have 16, 32, ... 1024 rows",
    ]
    with pytest.raises(ValueError) as error:
        sfa.sfa_layer(params, x_TD, batch, implementation="npu", **run)
    assert str(error.value) == f"sfa_layer: implementation 'npu' can't run: {'; '.join(reasons)}"
    assert all(pool.eq(0).all() for pool in tree_leaves(cache))
    assert ops.calls == []


def test_tensors_on_several_devices_are_refused(ops, unchecked):
    (q_THE, kv_SE, topk_TK), named = _attention_call()
    reasons = sfa.explain_implementation("npu", sfa.sparse_attention, q_THE, kv_SE.to("meta"), topk_TK, **named)
    assert reasons == ["tensors must be on one device; got cpu, meta"]


# the contract itself -------------------------------------------------------------------------------------------------


def test_the_stand_ins_refuse_what_the_documentation_forbids(ops):
    """Each a call that the adapter must never make; a stand-in that took it would prove nothing."""
    q, rope = _bf16(2, 2, 512), _bf16(2, 2, 64)
    key, key_rope = _bf16(8, 1, 512), _bf16(8, 1, 64)
    good = {
        "query_rope": rope,
        "key_rope": key_rope,
        "actual_seq_lengths_query": torch.tensor([2], dtype=torch.int32),
        "actual_seq_lengths_kv": torch.tensor([8], dtype=torch.int32),
        "layout_query": "TND",
        "layout_kv": "TND",
        "sparse_mode": 0,
        "attention_mode": 2,
    }
    indices = torch.tensor([[[0, 3, -1]], [[7, -1, -1]]], dtype=torch.int32)
    call = torch.ops.npu.npu_sparse_flash_attention
    call(q, key, key, indices, 1.0, **good)
    for changed in (
        {"attention_mode": 0},
        {"layout_query": "BSND"},
        {"actual_seq_lengths_query": torch.tensor([2])},
        {"actual_seq_lengths_kv": torch.tensor([9], dtype=torch.int32)},
        {"query_rope": rope.transpose(0, 1).contiguous().transpose(0, 1)},
        {"sinks": torch.zeros(2)},
        {"layout_kv": "PA_BSND"},
    ):
        with pytest.raises(Broken):
            call(q, key, key, indices, 1.0, **(good | changed))
    for bad in ([[[-1, 3, 0]], [[7, -1, -1]]], [[[0, 8, -1]], [[7, -1, -1]]], [[[0, 0, -1]], [[7, -1, -1]]]):
        with pytest.raises(Broken):
            call(q, key, key, torch.tensor(bad, dtype=torch.int32), 1.0, **good)
    with pytest.raises(RuntimeError):  # and the schema itself refuses an unknown keyword
        call(q, key, key, indices, 1.0, softmax_scale=1.0, **good)
    pool = torch.zeros(4, 8)
    torch.ops.npu.npu_scatter_nd_update_(pool, torch.tensor([[-1]]), torch.ones(1, 8))
    assert pool[3].eq(1).all()  # the trap that slot -1 is


def test_operators_pass_opcheck_against_their_schemas(ops):
    index = _index(3, 5, heads=8)
    lengths = {
        "actual_seq_lengths_query": torch.tensor([3], dtype=torch.int32),
        "actual_seq_lengths_key": torch.tensor([5], dtype=torch.int32),
    }
    call = index[0], index[1][:, None], index[2]
    layouts = {"layout_query": "TND", "layout_key": "TND", "sparse_count": 2}
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.npu.npu_lightning_indexer.default, call, lengths | layouts, test_utils=tests)
    pool, rows = torch.zeros(9, 4), torch.ones(2, 4)
    arguments = pool, torch.tensor([[1], [3]]), rows
    torch.library.opcheck(torch.ops.npu.npu_scatter_nd_update_.default, arguments, test_utils=tests)


def test_every_operator_of_the_vectors_is_declared_and_each_that_the_adapter_calls_has_a_kernel(ops):
    for name, entry in SCHEMAS.items():
        schema = torch._C._get_schema(f"npu::{name}", "")
        assert str(schema) == str(torch._C.parse_schema(f"npu::{entry['schema']}"))
    called = {name for names in npu.OPERATORS.values() for name in names} | {"npu_format_cast"}
    assert called <= SCHEMAS.keys()
    assert all(hasattr(StandIns, name) for name in called)


def test_attention_binds_to_the_older_schema_too():
    """Before 2.13 value was no optional tensor, and there were no sinks."""
    schema = SCHEMAS["npu_sparse_flash_attention"]["schema"]
    older = schema.replace("Tensor? value", "Tensor value").replace(", Tensor? sinks=None", "")
    assert older != schema
    lib, seen = torch.library.Library("npu", "FRAGMENT"), []

    def kernel(*arguments, **named):
        seen.append(arguments)
        query = arguments[0]
        return query.clone(), torch.zeros(1, *query.shape[:2]), torch.ones(1, *query.shape[:2])

    try:
        lib.define(older)
        lib.impl("npu_sparse_flash_attention", kernel, "CPU")
        (arguments, named) = _attention_call()
        sfa.sparse_attention(*arguments, implementation="npu", **named)
    finally:
        lib._destroy()
    assert len(seen) == 1


def test_nothing_is_ever_asked_of_the_operators_by_another_name():
    source = Path(npu.__file__).read_text()
    assert "_C_ascend" not in source
    assert "atb" not in source.replace("batb", "")
    package = Path(npu.__file__).parent
    naming = [file.name for file in package.glob("*.py") if "torch_npu" in file.read_text()]
    assert naming == ["npu.py"]


COMPILED = """
import torch, sfa_functional as sfa
from sfa_functional import npu
from sfa_functional.params import named_fields
from dataclasses import replace
from tests.sfa_functional.npu_standins import registered
config = replace(sfa.DEEPSEEK_V32, hidden_size=1024, num_attention_heads=8, index_n_heads=16, index_topk=8)
torch.manual_seed(0)
with registered() as ops, torch.no_grad():
    params = npu.prepare_params(sfa.init_params(config, dtype=torch.bfloat16), config=config)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    batch = sfa.Batch.from_lengths([3, 1], [20, 30], block_table=table, block_size=16)
    cache = sfa.init_cache(config, num_blocks=4, block_size=16, dtype=torch.bfloat16, layout="split")
    x_TD = torch.randn(4, 1024).to(torch.bfloat16)

    def run(params, x_TD, batch, cache):
        return sfa.sfa_layer(params, x_TD, batch, config=config, cache=cache, implementation="npu")

    ops.calls.clear()
    want = run(params, x_TD, batch, cache)
    got = torch.compile(run, backend="aot_eager", fullgraph=True)(params, x_TD, batch, cache)
    for x, y in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        assert torch.equal(x, y)
    assert ops.names()[:5] == ops.names()[5:]
"""


def _run(code, *paths, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    places = os.pathsep.join([*map(str, paths), str(Path(__file__).parents[2])])
    environment = inherited | {"PYTHONPATH": places} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_a_layer_over_a_split_pool_compiles_to_one_graph():
    done = _run(COMPILED, SFA_UNCHECKED="1")
    assert done.returncode == 0, done.stderr


# the package, absent and broken --------------------------------------------------------------------------------------


BROKEN = "libhccl.so: cannot open shared object file: No such file or directory"
ASK = """
import os, torch
import sfa_functional as sfa
before = dict(os.environ)
rows = torch.ones(3, 576, dtype=torch.bfloat16)
topk = torch.zeros(3, 1, dtype=torch.int32)
call = {"scale": 1.0, "value_dim": 512}
print(sfa.explain_implementation("npu"))
try:
    sfa.sparse_attention(rows[:, None], rows, topk, implementation="npu", **call)
except ValueError as error:
    print(error)
print(sfa.sparse_attention(rows[:, None], rows, topk, **call).out_THL.sum().item())
assert dict(os.environ) == before
"""


@pytest.fixture
def broken_wheel(tmp_path):
    """Install a stand-in for the wheel that registers itself with torch and, as without CANN, does not load."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    spoil = "import os\nos.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
    (package / "__init__.py").write_text(f"{spoil}raise ImportError({BROKEN!r})\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def test_with_a_wheel_that_does_not_load_importing_torch_fails_unless_autoload_is_off(broken_wheel):
    done = _run("import torch", broken_wheel)
    assert done.returncode != 0
    assert BROKEN in done.stderr
    done = _run("import sfa_functional", broken_wheel)
    assert done.returncode != 0, "this library must not switch the loading off: it would switch off a user's device"
    done = _run(ASK, broken_wheel, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    listed, refused, total = done.stdout.splitlines()
    assert f"(torch_npu does not load: {BROKEN})" in listed
    assert refused.startswith("sparse_attention: implementation 'npu' can't run: operators are missing: npu_sparse_")
    assert f"(torch_npu does not load: {BROKEN})" in refused
    assert total == str(3.0 * 512)


def test_without_the_wheel_asking_for_it_is_a_value_error_with_the_reason():
    done = _run(ASK)
    assert done.returncode == 0, done.stderr
    assert "(torch_npu is not installed)" in done.stdout.splitlines()[1]


def test_the_environment_is_restored_whatever_a_failed_import_does_to_it(broken_wheel, monkeypatch):
    monkeypatch.syspath_prepend(broken_wheel)
    for before in (None, "1", "0"):
        if before is None:
            monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
        else:
            monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", before)
        (reason,) = sfa.explain_implementation("npu")
        assert reason.endswith(f"(torch_npu does not load: {BROKEN})")
        assert os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == before
