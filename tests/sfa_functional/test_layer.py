"""The layer: however a sequence is cut, cached and laid out, every token gets the same result."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa

CONFIG = replace(sfa.TINY, index_topk=5, indexer_types=("full", "shared"))
IMPLEMENTATIONS = ["reference", "blockwise"]
BLOCK = 4


def _params(layer=0, dtype=torch.float64):
    return sfa.init_params(CONFIG, layer=layer, dtype=dtype)


def _x(tokens, dtype=torch.float64):
    return torch.randn(tokens, CONFIG.hidden_size, dtype=dtype)


def _cache(num_blocks=8, layout="joint", layer=0):
    cache = sfa.init_cache(
        CONFIG, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.float64, layout=layout, layer=layer
    )
    return tree_map(lambda x: torch.full_like(x, math.nan), cache)


def _table(requests, columns):
    return torch.randperm(requests * columns).view(requests, columns).to(torch.int32)


def _assert_same(got, want):
    torch.testing.assert_close(got.y_TD, want.y_TD, rtol=1e-10, atol=1e-10)
    assert torch.equal(got.selection_TK, want.selection_TK)


def test_the_layer_is_the_composition_of_its_parts():
    params, x_TD, batch = _params(), _x(9), sfa.Batch.from_lengths([9])
    rope = sfa.rope_cos_sin(torch.arange(9), CONFIG)
    q_THE, c_TQ = sfa.latent_queries(params, x_TD, *rope, config=CONFIG)
    kv_SE = sfa.latent_keys(params, x_TD, *rope, config=CONFIG)
    score_TS = sfa.index_scores(
        sfa.index_queries(params.indexer, c_TQ, *rope, config=CONFIG),
        sfa.index_keys(params.indexer, x_TD, *rope, config=CONFIG),
        sfa.index_weights(params.indexer, x_TD, config=CONFIG),
    )
    topk_TK = sfa.select_topk(score_TS, torch.zeros(9).long(), torch.arange(1, 10), k=5)
    out_THL, _ = sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=CONFIG.softmax_scale, value_dim=24)
    want = sfa.LayerOutput(sfa.latent_output(params, out_THL, config=CONFIG), topk_TK, None)
    got = sfa.sfa_layer(params, x_TD, batch, config=CONFIG)
    _assert_same(got, want)
    assert got.cache is None


@pytest.mark.parametrize("paged", [False, True])
def test_reference_and_blockwise_agree_forward_and_backward(paged):
    params, x_TD = _params(), _x(12).requires_grad_()
    table = {"block_table": _table(3, 2), "block_size": BLOCK} if paged else {}
    batch = sfa.Batch.from_lengths([7, 2, 3], [7, 0, 3], **table)
    cache = _cache() if paged else None
    grads = []
    results = []
    for implementation in IMPLEMENTATIONS:
        got = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache, implementation=implementation)
        results.append(got)
        grads.append(torch.autograd.grad(got.y_TD.sin().sum(), x_TD)[0])
    _assert_same(*results)
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_with_at_most_k_tokens_the_layer_is_dense_attention():
    params, x_TD, batch = _params(), _x(5), sfa.Batch.from_lengths([5])
    rope = sfa.rope_cos_sin(batch.position_T, CONFIG)
    q_THE, _, kv_SE = sfa.latent_projections(params, x_TD, *rope, config=CONFIG)
    dense = sfa.dense_attention(q_THE, kv_SE, batch.start_T, batch.end_T, scale=CONFIG.softmax_scale, value_dim=24)
    want_TD = sfa.latent_output(params, dense.out_THL, config=CONFIG)
    torch.testing.assert_close(sfa.sfa_layer(params, x_TD, batch, config=CONFIG).y_TD, want_TD)


@pytest.mark.parametrize("layout", ["joint", "split"])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("steps", [[15], [6, 9], [4, 4, 4, 3], [1] * 15, [12, 1, 1, 1]])
def test_any_sequence_of_steps_through_a_cache_equals_one_prefill(layout, donate, steps):
    params, x_TD = _params(), _x(15)
    want = sfa.sfa_layer(params, x_TD, sfa.Batch.from_lengths([15]), config=CONFIG)
    cache, batch, done, parts = _cache(layout=layout), None, 0, []
    for new in steps:
        named = {"block_table": _table(1, 4) if batch is None else batch.block_table_BU, "block_size": BLOCK}
        batch = sfa.Batch.from_lengths([new], [new], **named) if batch is None else batch.next([new])
        part = sfa.sfa_layer(params, x_TD[done : done + new], batch, config=CONFIG, cache=cache, donate=donate)
        cache, done = part.cache, done + new
        parts.append(part)
    y_TD, selection_TK = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    _assert_same(sfa.LayerOutput(y_TD, selection_TK, None), want)


def test_requests_in_one_batch_do_not_see_each_other():
    params, lengths = _params(), [7, 1, 4]
    x_TD = _x(12)
    together = sfa.sfa_layer(params, x_TD, sfa.Batch.from_lengths(lengths), config=CONFIG)
    alone = [sfa.sfa_layer(params, x, sfa.Batch.from_lengths([len(x)]), config=CONFIG) for x in x_TD.split(lengths)]
    y_TD, selection_TK = (torch.cat([part[i] for part in alone]) for i in (0, 1))
    _assert_same(together, sfa.LayerOutput(y_TD, selection_TK, None))


def test_joint_and_split_caches_hold_the_same_rows():
    params, x_TD = _params(), _x(9)
    batch = sfa.Batch.from_lengths([6, 3], block_table=_table(2, 2), block_size=BLOCK)
    joint, split = (
        sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=_cache(layout=layout)) for layout in ("joint", "split")
    )
    _assert_same(joint, split)
    kv = torch.cat([split.cache.latent, split.cache.rope], -1)
    torch.testing.assert_close(joint.cache.kv, kv, equal_nan=True)
    torch.testing.assert_close(joint.cache.index_k, split.cache.index_k, equal_nan=True)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_padding_reaches_no_result_no_cache_and_no_gradient(paged, implementation):
    params, clean_TD = _params(), _x(9)
    table = {"block_table": _table(3, 2), "block_size": BLOCK} if paged else {}
    batch = sfa.Batch.from_lengths([4, 3, 2], [4, 0, 2], **table)
    spoiled_TD = clean_TD.clone()
    spoiled_TD[4:7] = math.nan
    results, grads = [], []
    for x_TD in (spoiled_TD, clean_TD):
        leaves = [x_TD.requires_grad_(), *(x.requires_grad_() for x in tree_leaves(params))]
        cache = _cache() if paged else None
        named = {"config": CONFIG, "cache": cache, "implementation": implementation}
        results.append(sfa.sfa_layer(params, x_TD, batch, **named))
        grads.append(torch.autograd.grad(results[-1].y_TD.sin().sum(), leaves, allow_unused=True))
    _assert_same(*results)
    for got, want in zip(*(tree_leaves(result.cache) for result in results), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)
    assert not results[0].y_TD[4:7].any()
    assert (results[0].selection_TK[4:7] == -1).all()


def test_a_given_selection_replaces_scoring_and_comes_back():
    x_TD, batch = _x(9), sfa.Batch.from_lengths([5, 4])
    full = sfa.sfa_layer(_params(), x_TD, batch, config=CONFIG)
    again = sfa.sfa_layer(_params(), x_TD, batch, config=CONFIG, selection=full.selection_TK)
    _assert_same(again, full)
    assert again.selection_TK is full.selection_TK
    itself_TK = batch.position_T[:, None].to(torch.int32)
    alone = sfa.sfa_layer(_params(), x_TD, batch, config=CONFIG, selection=itself_TK)
    one_by_one = sfa.sfa_layer(
        _params(), x_TD, sfa.Batch.from_lengths([1] * 9), config=CONFIG, rope=sfa.rope_cos_sin(batch.position_T, CONFIG)
    )
    torch.testing.assert_close(alone.y_TD, one_by_one.y_TD)


def test_positions_that_a_query_does_not_see_are_unused():
    params, x_TD, batch = _params(), _x(6), sfa.Batch.from_lengths([6])
    selection_TK = torch.tensor([[0, 5, 3, -1, 77]] * 6, dtype=torch.int32)
    seen_TK = selection_TK.where((selection_TK <= batch.position_T[:, None]) & (selection_TK >= 0), -1)
    got, want = (sfa.sfa_layer(params, x_TD, batch, config=CONFIG, selection=s) for s in (selection_TK, seen_TK))
    assert torch.equal(got.y_TD, want.y_TD)


@pytest.mark.parametrize("paged", [False, True])
def test_a_shared_layer_uses_the_selection_of_an_earlier_one_with_or_without_a_cache(paged):
    x_TD, plain = _x(7), sfa.Batch.from_lengths([4, 3])
    selection_TK = sfa.sfa_layer(_params(), x_TD, plain, config=CONFIG).selection_TK
    want = sfa.sfa_layer(_params(layer=1), x_TD, plain, config=CONFIG, selection=selection_TK)
    table = {"block_table": _table(2, 2), "block_size": BLOCK} if paged else {}
    batch, cache = sfa.Batch.from_lengths([4, 3], **table), _cache(layer=1) if paged else None
    got = sfa.sfa_layer(_params(layer=1), x_TD, batch, config=CONFIG, selection=selection_TK, cache=cache)
    _assert_same(got, want)
    if paged:
        written = sfa.fetch_rows(sfa.cache_rows(got.cache), batch.slot_T)
        rope = sfa.rope_cos_sin(batch.position_T, CONFIG)
        torch.testing.assert_close(written, sfa.latent_keys(_params(layer=1), x_TD, *rope, config=CONFIG))


def test_the_cache_is_written_even_where_a_selection_is_given():
    batch = sfa.Batch.from_lengths([5], block_table=_table(1, 2), block_size=BLOCK)
    x_TD = _x(5)
    scored = sfa.sfa_layer(_params(), x_TD, batch, config=CONFIG, cache=_cache())
    given = sfa.sfa_layer(_params(), x_TD, batch, config=CONFIG, cache=_cache(), selection=scored.selection_TK)
    for got, want in zip(tree_leaves(given.cache), tree_leaves(scored.cache), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("paged", [False, True])
def test_a_selector_chooses_instead_of_the_indexer(paged):
    params, x_TD = _params(), _x(9)
    table = {"block_table": _table(2, 2), "block_size": BLOCK} if paged else {}
    batch, cache = sfa.Batch.from_lengths([6, 3], **table), _cache() if paged else None
    got = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache, select=sfa.window)
    want = [[max(0, p - 4) + i if max(0, p - 4) + i <= p else -1 for i in range(5)] for p in batch.position_T.tolist()]
    assert got.selection_TK.tolist() == want
    again = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache, select=sfa.block_topk(1))
    _assert_same(again, sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache))


def test_rope_may_be_given():
    params, x_TD, batch = _params(), _x(4), sfa.Batch.from_lengths([4])
    moved = sfa.rope_cos_sin(batch.position_T + 100, CONFIG)
    want = sfa.sfa_layer(params, x_TD, batch, config=CONFIG)
    got = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, rope=moved)
    torch.testing.assert_close(got.y_TD, want.y_TD, rtol=1e-5, atol=1e-5)  # scores depend on distances alone
    still = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, rope=(torch.ones(4, 4), torch.zeros(4, 4)))
    assert (still.y_TD[1:] - want.y_TD[1:]).abs().max() > 1e-3


def test_a_callable_replaces_sparse_attention_alone():
    params, x_TD, batch = _params(), _x(9), sfa.Batch.from_lengths([6, 3])
    calls = []

    def kernel(q, kv, topk, *, scale, value_dim):
        calls.append((tuple(q.shape), tuple(kv.shape), scale, value_dim))
        return sfa.sparse_attention(q, kv, topk, scale=scale, value_dim=value_dim, implementation="reference")

    got = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, implementation=kernel)
    _assert_same(got, sfa.sfa_layer(params, x_TD, batch, config=CONFIG))
    assert calls == [((9, 4, 32), (9, 32), CONFIG.softmax_scale, 24)]


def test_gradients_reach_x_the_projections_and_the_cache_but_no_indexer():
    params = tree_map(lambda x: x.requires_grad_(), _params())
    cache = tree_map(lambda x: torch.randn_like(x).requires_grad_(), _cache())
    x_TD = _x(3).requires_grad_()
    batch = sfa.Batch.from_lengths([3], [7], block_table=_table(1, 2), block_size=BLOCK)
    sfa.sfa_layer(params, x_TD, batch, config=CONFIG, cache=cache).y_TD.sum().backward()
    for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
        assert getattr(params, name).grad.any(), name
    assert x_TD.grad.any()
    assert cache.kv.grad.any()
    assert all(x.grad is None for x in tree_leaves(params.indexer))
    assert cache.index_k.grad is None


def test_func_grad_over_the_parameters_equals_autograd():
    params, x_TD, batch = _params(), _x(7), sfa.Batch.from_lengths([7])

    def loss(params):
        return sfa.sfa_layer(params, x_TD, batch, config=CONFIG).y_TD.square().sum()

    got = torch.func.grad(loss)(params)
    leaf = tree_map(lambda x: x.requires_grad_(), params)
    loss(leaf).backward()
    torch.testing.assert_close(got.kv_b_proj, leaf.kv_b_proj.grad)
    torch.testing.assert_close(got.q_a_proj, leaf.q_a_proj.grad)


def test_vmap_over_hidden_states_equals_a_loop():
    params, batch = _params(), sfa.Batch.from_lengths([5, 2])
    x_BTD = torch.stack([_x(7) for _ in range(3)])

    def run(x_TD):
        return sfa.sfa_layer(params, x_TD, batch, config=CONFIG)[:2]

    y_BTD, selection_BTK = torch.func.vmap(run)(x_BTD)
    for x_TD, y_TD, selection_TK in zip(x_BTD, y_BTD, selection_BTK, strict=True):
        _assert_same(sfa.LayerOutput(y_TD, selection_TK, None), sfa.LayerOutput(*run(x_TD), None))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_give_an_empty_result(implementation):
    got = sfa.sfa_layer(_params(), _x(0), sfa.Batch.from_lengths([]), config=CONFIG, implementation=implementation)
    assert (got.y_TD.shape, got.selection_TK.shape) == ((0, 64), (0, 5))


def test_misfits_are_refused(unchecked):
    params, x_TD, batch = _params(), _x(4), sfa.Batch.from_lengths([4])
    paged = sfa.Batch.from_lengths([4], block_table=_table(1, 2), block_size=BLOCK)
    context = sfa.Batch.from_lengths([4], [6])
    selection_TK = torch.zeros(3, 2, dtype=torch.int32)
    cases = [
        ("position_T must have 5 rows; got (4,)", (params, _x(5), batch), {}),
        ("selection must have 4 rows; got (3, 2)", (params, x_TD, batch), {"selection": selection_TK}),
        ("a batch with cached context or a block table needs a cache; got None", (params, x_TD, paged), {}),
        ("a batch with cached context or a block table needs a cache; got None", (params, x_TD, context), {}),
        ("a cache needs a batch with a block table; got none", (params, x_TD, batch), {"cache": _cache()}),
        ("a layer without an indexer needs selection= or select=; got neither", (_params(1), x_TD, batch), {}),
    ]
    for message, arguments, named in cases:
        with pytest.raises(ValueError) as error:
            sfa.sfa_layer(*arguments, config=CONFIG, **named)
        assert str(error.value) == f"sfa_layer: {message}"
    with pytest.raises(ValueError, match=r"implementation 'npu' can't run: "):
        sfa.sfa_layer(params, x_TD, batch, config=CONFIG, implementation="npu")


def test_autocast_changes_neither_the_layer_nor_its_parts():
    config = sfa.TINY
    params, batch = sfa.init_params(config), sfa.Batch.from_lengths([7, 5])
    x_TD = torch.randn(12, config.hidden_size)

    def parts():
        rope = sfa.rope_cos_sin(batch.position_T, config)
        q_THE, q_latent_TQ, kv_TE = sfa.latent_projections(params, x_TD, *rope, config=config)
        yield from (q_THE, q_latent_TQ, kv_TE)
        yield sfa.index_queries(params.indexer, q_latent_TQ, *rope, config=config)
        yield sfa.index_keys(params.indexer, x_TD, *rope, config=config)
        yield sfa.index_weights(params.indexer, x_TD, config=config)
        yield sfa.latent_output(params, q_THE[..., : config.kv_lora_rank], config=config)
        yield sfa.sfa_layer(params, x_TD, batch, config=config).y_TD

    plain = list(parts())
    with torch.autocast("cpu", torch.bfloat16):
        for got, want in zip(parts(), plain, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got, want)
