"""The layer on simulated ranks over stand-ins for Ascend's operators: lengths per rank, one result, no waiting."""

import functools
import threading
from dataclasses import fields, replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
import sharding.context_parallel as code
from sfa_functional.operators import PLAIN
from sharding import (
    CacheSplit,
    MeshShape,
    P,
    TokenSplit,
    context_parallel_layer,
    local_lengths,
    replicated_block_table,
    shard_map,
    simulated_mesh,
    split_tokens,
    token_ranges,
)
from tests.sfa_functional.npu_standins import registered

CONFIG = replace(
    sfa.DEEPSEEK_V32,
    hidden_size=1024,
    num_attention_heads=2,
    index_n_heads=8,
    index_topk=4,
    indexer_types=("full", "shared"),
)
BLOCK = 16
BATCHES = {
    "prefill": ([13, 3, 8], None),
    "context": ([5, 0, 9], [21, 4, 17]),
    "decode": ([1, 1, 1], [9, 32, 17]),
    "padding": ([6, 3, 5], [6, 0, 20]),
    "packed padding": ([6, 3, 5], [6, 0, 5]),
}
PACKED = ("prefill", "packed padding")


@pytest.fixture
def ops():
    with registered() as stand_ins:
        yield stand_ins


@functools.cache
def _params(layer=0):
    return sfa.init_params(CONFIG, dtype=torch.bfloat16, layer=layer)


def _problem(name, pool, layer=0):
    """Build weights, hidden states, a batch and a pool of random rows; pages lie in a scrambled order."""
    new, total = BATCHES[name]
    draw = torch.Generator().manual_seed(1)
    table = {"block_table": torch.randperm(6, generator=draw).view(3, 2).to(torch.int32), "block_size": BLOCK}
    batch = sfa.Batch.from_lengths(new, total, **(table if pool else {}))
    x_TD = torch.randn(sum(new), CONFIG.hidden_size, generator=draw).to(torch.bfloat16)
    cache = None
    if pool:
        cache = sfa.init_cache(CONFIG, num_blocks=6, block_size=BLOCK, dtype=torch.bfloat16, layout=pool, layer=layer)
        cache = tree_map(lambda x: torch.randn(x.shape, generator=draw).to(x.dtype), cache)
    return _params(layer), x_TD, batch, cache


def _on_ranks(params, x_TD, batch, cache, split, *, around=None, **named):
    """Run the layer on as many simulated ranks as the split has; rows come back in the batch's order."""

    def body(comm, params, x_tD, cache, selection):
        def run():
            return context_parallel_layer(
                params, x_tD, batch, comm["cp"], config=CONFIG, split=split, cache=cache, selection=selection, **named
            )

        return run() if around is None else around(run)

    selection = named.pop("selection", None)
    ranks = split.num_ranks
    sharded = shard_map(
        body,
        simulated_mesh(MeshShape(cp=ranks)),
        in_specs=(P(), P("cp"), P(), P("cp")),
        out_specs=sfa.LayerOutput(P("cp"), P("cp"), P()),
    )
    scattered = None if selection is None else split.scatter(selection, fill=-1)
    with torch.no_grad():
        out = sharded(params, split.scatter(x_TD), cache, scattered)
    return out._replace(y_TD=split.gather(out.y_TD), selection_TK=split.gather(out.selection_TK))


def _assert_equal_to_one_rank(got, params, x_TD, batch, cache):
    run = {"config": CONFIG, "cache": cache}
    one = sfa.sfa_layer(params, x_TD, batch, implementation="blockwise", **run)
    assert torch.equal((got.selection_TK >= 0).sum(-1), (one.selection_TK >= 0).sum(-1))
    assert sfa.selection_overlap(got.selection_TK, one.selection_TK).mean() >= 0.97
    assert got.selection_TK.equal(sfa.local_selection(sfa.global_selection(got.selection_TK, batch), batch))
    same = sfa.sfa_layer(params, x_TD, batch, selection=got.selection_TK, implementation="blockwise", **run)
    assert sfa.difference(got.y_TD, same.y_TD).max_rel <= 0.03


def _lengths(calls):
    return sorted((call["query_lens"].tolist(), call["key_lens"].tolist()) for call in calls)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "pool"),
    [(name, pool) for name in BATCHES for pool in ("joint", "split") if name != "packed padding"]
    + [(name, None) for name in PACKED],
)
def test_contiguous_ranks_equal_one_and_pass_their_row_of_local_lengths(ops, name, pool, ranks):
    problem = _problem(name, pool)
    batch = problem[2]
    split = split_tokens(BATCHES[name][0], ranks, layout="contiguous")
    got = _on_ranks(*problem, split, implementation="npu")
    _assert_equal_to_one_rank(got, *problem)
    calls = [call for function, call in ops.calls if function == "npu_lightning_indexer"]
    assert len(calls) == ranks
    start_N, end_N, _ = token_ranges(batch.position_T.shape[0], ranks)
    query_end_NB, key_len_NB = local_lengths(batch.query_start_B1, batch.seq_len_B, start_N, end_N)
    want = sorted(zip(query_end_NB.tolist(), key_len_NB.tolist(), strict=True))  # ranks run in any order
    if pool is not None:
        assert _lengths(calls) == want
    attention = [call for function, call in ops.calls if function == "npu_sparse_flash_attention"]
    if pool == "split":
        assert _lengths(attention) == want
        assert {call["layout_kv"] for call in attention} == {"PA_BSND"}


def test_more_ranks_than_tokens_and_spare_rows(ops):
    problem = _problem("decode", "split")
    for split in (split_tokens([1, 1, 1], 4, layout="contiguous"), split_tokens([3], 2, layout="contiguous", rows=3)):
        _assert_equal_to_one_rank(_on_ranks(*problem, split, implementation="npu"), *problem)


def test_a_shared_layer_replays_a_selection_on_every_rank(ops):
    problem = _problem("context", "split", layer=1)
    selection = torch.stack([torch.randperm(20)[:4] for _ in range(14)]).to(torch.int32)
    split = split_tokens([5, 0, 9], 2, layout="contiguous")
    got = _on_ranks(*problem, split, implementation="npu", selection=selection)
    run = {"config": CONFIG, "cache": problem[3], "selection": selection}
    want = sfa.sfa_layer(*problem[:3], implementation="blockwise", **run)
    assert sfa.difference(got.y_TD, want.y_TD).max_rel <= 0.03
    assert {name for name, _ in ops.calls} == {"npu_scatter_pa_kv_cache", "npu_sparse_flash_attention"}


def test_where_every_rank_has_all_tokens_the_batchs_own_lengths_are_passed(ops):
    params, x_TD, batch, cache = _problem("decode", "split")

    def body(comm, params, x_TD, cache):
        named = {"config": CONFIG, "split": None, "cache": cache, "implementation": "npu"}
        return context_parallel_layer(params, x_TD, batch, comm["cp"], **named)

    mesh = simulated_mesh(MeshShape(cp=2))
    sharded = shard_map(body, mesh, in_specs=(P(), P(), P()), out_specs=sfa.LayerOutput(P(), P(), P()))
    with torch.no_grad():
        got = sharded(params, x_TD, cache)
    _assert_equal_to_one_rank(got, params, x_TD, batch, cache)
    lengths = [call["key_lens"].tolist() for name, call in ops.calls if name == "npu_lightning_indexer"]
    assert lengths == [batch.seq_len_B.tolist()] * 2


@pytest.mark.parametrize("exchange", ["queries", "blocks"])
@pytest.mark.parametrize("pool", ["joint", "split"])
def test_over_a_cache_that_is_dealt_out_prefill_and_decode_equal_one_rank(ops, pool, exchange):
    """Rows that a rank does not hold are attended to elsewhere, by the flat form, which gives the lse to merge by."""
    params, lengths = _params(), [[37], [1], [2]]
    x_TD = torch.randn(40, CONFIG.hidden_size).to(torch.bfloat16)
    table_BU, cut = torch.tensor([[1, 0]], dtype=torch.int32), CacheSplit(2, BLOCK)
    pages = {"dtype": torch.bfloat16, "block_size": BLOCK, "layout": pool}
    cache = sfa.init_cache(CONFIG, num_blocks=4, **pages)  # two pages of latents a rank, four of index keys
    kind, pools = type(cache), {field.name: getattr(cache, field.name) for field in fields(cache)}
    specs = {name: P() if name == "index_k" else P("cp") for name in pools}
    batch, done, parts = None, 0, []
    for new in lengths:
        table = {"block_table": replicated_block_table(table_BU, 2), "block_size": BLOCK}
        batch = sfa.Batch.from_lengths(new, **table) if batch is None else batch.next(new)
        split = split_tokens(new, 2, layout="contiguous")

        def body(comm, params, x_tD, pools, batch=batch, split=split):
            named = {"config": CONFIG, "split": split, "cache_split": cut, "cache_exchange": exchange}
            named |= {"cache": kind(**pools), "implementation": "npu"}
            out = context_parallel_layer(params, x_tD, batch, comm["cp"], **named)
            return out.y_TD, out.selection_TK, {name: getattr(out.cache, name) for name in pools}

        mesh = simulated_mesh(MeshShape(cp=2))
        sharded = shard_map(body, mesh, in_specs=(P(), P("cp"), specs), out_specs=(P("cp"), P("cp"), specs))
        with torch.no_grad():
            *rows, pools = sharded(params, split.scatter(x_TD[done : done + new[0]]), pools)
        parts.append([split.gather(x) for x in rows])
        done += new[0]
    y_TD, selection_TK = (torch.cat(part) for part in zip(*parts, strict=True))
    whole = sfa.Batch.from_lengths([40])
    _assert_equal_to_one_rank(sfa.LayerOutput(y_TD, selection_TK, None), params, x_TD, whole, None)


LAYOUTS = {
    "zigzag": lambda lengths: split_tokens(lengths, 2, layout="zigzag"),
    "striped": lambda lengths: split_tokens(lengths, 2, layout="striped"),
    "own": lambda lengths: TokenSplit.from_owner([0] + [1] * (sum(lengths) - 1), 2),
}
RULE = "only the 'contiguous' layout has lengths per rank, others run as 'blockwise'"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_refused_by_name_and_none_takes_blockwise(ops, layout):
    problem = _problem("context", "split")
    split = LAYOUTS[layout](BATCHES["context"][0])
    with pytest.raises(ValueError, match=rf"^context_parallel_layer: implementation 'npu' can't run: {RULE}; got"):
        _on_ranks(*problem, split, implementation="npu")
    assert ops.calls == []
    got = _on_ranks(*problem, split)
    _assert_equal_to_one_rank(got, *problem)
    blockwise = _on_ranks(*problem, split, implementation="blockwise")
    assert torch.equal(got.selection_TK, blockwise.selection_TK)
    assert torch.equal(got.y_TD, blockwise.y_TD)
    assert ops.calls == []


def test_none_takes_the_operators_on_contiguous_ranks(ops):
    problem = _problem("context", "split")
    split = split_tokens(BATCHES["context"][0], 2, layout="contiguous")
    got = _on_ranks(*problem, split)
    _assert_equal_to_one_rank(got, *problem)
    assert [name for name, _ in ops.calls].count("npu_lightning_indexer") == 2


def test_all_reasons_stand_in_one_error_before_anything_is_sent(ops):
    params, x_TD, batch, cache = _problem("prefill", "split")
    record = []
    split = LAYOUTS["striped"](BATCHES["prefill"][0])
    config = replace(CONFIG, index_topk=2049)

    def body(comm, params, x_tD, cache):
        named = {"config": config, "split": split, "cache": cache, "implementation": "npu"}
        return context_parallel_layer(params, x_tD, batch, comm["cp"], **named)

    mesh = simulated_mesh(MeshShape(cp=2), record=record)
    sharded = shard_map(body, mesh, in_specs=(P(), P("cp"), P()), out_specs=sfa.LayerOutput(P("cp"), P("cp"), P()))
    with pytest.raises(ValueError, match="context_parallel_layer") as error:
        sharded(params, split.scatter(x_TD).requires_grad_(), cache)
    message = str(error.value)
    assert "it gives no gradients: inputs must not require grad; k must be in 1..2048 or " in message
    assert f"; {RULE}; got" in message
    assert record == []


WAITING = {"tolist", "item", "__bool__", "__int__", "__index__", "__float__", "__contains__", "cpu", "numpy"}
WAITING |= {"nonzero", "argwhere", "unique", "masked_select", "equal", "allclose"}


class _NoWaiting(TorchFunctionMode):
    """Refuse calls that would wait for a device, but inside of operators and of the checks of what is on the host."""

    paused = threading.local()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PLAIN:
            with _NoWaiting():  # a mode is off while it handles a call: another one sees what is inside
                return PLAIN[function](*args, **(kwargs or {}))
        if function.__name__ in WAITING and not getattr(self.paused, "on", False):
            raise AssertionError(f"{function.__name__} waits for the device")
        masks = [x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        assert not (masks and function.__name__ in ("__getitem__", "__setitem__")), "a mask waits for the device"
        return function(*args, **(kwargs or {}))


def _paused(function):
    def run(*arguments, **named):
        before = getattr(_NoWaiting.paused, "on", False)
        _NoWaiting.paused.on = True
        try:
            return function(*arguments, **named)
        finally:
            _NoWaiting.paused.on = before

    return run


@pytest.mark.parametrize("pool", ["split", "joint"])
def test_nothing_waits_for_the_device(ops, pool, monkeypatch):
    """The first checks may look, at a table and a split on the CPU, on which this whole test runs."""
    monkeypatch.setattr(code, "_check", _paused(code._check))
    monkeypatch.setattr(TokenSplit, "contiguous_ranges", _paused(TokenSplit.contiguous_ranges))

    def around(run):
        with _NoWaiting():
            return run()

    problem = _problem("context", pool)
    split = split_tokens(BATCHES["context"][0], 2, layout="contiguous")
    got = _on_ranks(*problem, split, implementation="npu", around=around)
    _assert_equal_to_one_rank(got, *problem)
    with pytest.raises(AssertionError, match="waits for the device"):  # which looks at ranges on a CPU
        _on_ranks(*problem, split, implementation="blockwise", around=around)
