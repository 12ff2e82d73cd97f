"""Heads dealt out, alone and beside tokens: selectors that look at queries, exact sums, shards that don't match."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

import sfa_functional as sfa
import sharding
from sharding import MeshShape, P, Rules, shard_map, simulated_mesh, split_tokens

CONFIG = replace(sfa.TINY, num_attention_heads=8, index_topk=5)
LENGTHS = [9, 4, 6]
SELECTORS = {
    "indexer": None,
    "window": sfa.window,
    "best keys": sfa.best_keys(CONFIG.softmax_scale),
    "blocks": sfa.block_topk(2),
}


def both(shape, params, x_TD, split, *, config=CONFIG, select=None, weights="local", rules=None):
    """Run the layer with tokens over cp and heads over tp."""
    batch = sfa.Batch.from_lengths(LENGTHS)

    def body(comm, params, x):
        out = sharding.context_parallel_layer(
            params,
            x,
            batch,
            comm["cp"],
            config=config,
            split=split,
            select=select,
            weights=weights,
            heads_comm=comm["tp"],
        )
        return out.y_TD, out.selection_TK

    rules = Rules(tokens="cp", heads="tp") if rules is None else rules
    specs = sharding.param_specs(config, rules, mesh_shape=shape)
    run = shard_map(body, simulated_mesh(shape), in_specs=(specs, P("cp")), out_specs=P("cp"))
    y, selection = run(params, split.scatter(x_TD))
    return split.gather(y), split.gather(selection)


@pytest.mark.parametrize("select", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_of_the_heads_chooses_what_one_rank_chooses(ranks, select):
    params = sfa.init_params(CONFIG, dtype=torch.float64)
    batch, x_TD = sfa.Batch.from_lengths(LENGTHS), torch.randn(19, 64, dtype=torch.float64)
    want = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, select=select)
    run = shard_map(
        lambda comm, params, x: sharding.tensor_parallel_layer(
            params, x, batch, comm["tp"], config=CONFIG, select=select
        )[:2],
        simulated_mesh(MeshShape(tp=ranks)),
        in_specs=(sharding.param_specs(CONFIG, Rules(heads="tp")), P()),
        out_specs=P(),
    )
    y_TD, selection_TK = run(params, x_TD)
    assert torch.equal(selection_TK, want.selection_TK)
    torch.testing.assert_close(y_TD, want.y_TD, atol=1e-12, rtol=0)


@pytest.mark.parametrize("select", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("shape", [MeshShape(cp=2, tp=2), MeshShape(tp=4, cp=3)], ids=str)
def test_tokens_and_heads_dealt_out_equal_one_rank(shape, layout, select):
    params = tree_map(torch.Tensor.requires_grad_, sfa.init_params(CONFIG, dtype=torch.float64))
    batch = sfa.Batch.from_lengths(LENGTHS)
    x_TD = torch.randn(19, 64, dtype=torch.float64, requires_grad=True)
    want = sfa.sfa_layer(params, x_TD, batch, config=CONFIG, select=select)
    split = split_tokens(LENGTHS, shape.axis_size("cp"), layout=layout)
    y_TD, selection_TK = both(shape, params, x_TD, split, select=select)
    assert torch.equal(selection_TK, want.selection_TK)
    torch.testing.assert_close(y_TD, want.y_TD, atol=1e-12, rtol=0)
    wanted = x_TD, params.q_b_proj, params.kv_b_proj, params.o_proj, params.q_a_proj, params.kv_a_proj
    ours, theirs = (torch.autograd.grad(y.square().sum(), wanted) for y in (y_TD, want.y_TD))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def summable():
    """Return parameters and hidden states whose layer is exact in float32: signs, small integers and halves.

    Hidden states are ±2^20, so that their norm is 1 exactly and latents are ±1 times a small gain. Queries are zero:
    each of at most two selected keys gets weight 1 or 1/2. All sums after that are of halves.
    """
    config = replace(CONFIG, index_topk=2, latent_norm_eps=1e-6)
    generator = torch.Generator().manual_seed(3)

    def signs(*shape):
        return torch.randint(0, 2, shape, generator=generator).float() * 2 - 1

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float()

    x_TD = signs(19, 64) * 2.0**20
    params = sfa.init_params(config)
    kv_a_proj = torch.zeros_like(params.kv_a_proj)
    kv_a_proj[range(24), torch.randperm(64, generator=generator)[:24]] = 1
    params = replace(
        params,
        q_b_proj=torch.zeros_like(params.q_b_proj),
        kv_a_proj=kv_a_proj,
        kv_a_layernorm=torch.randint(1, 4, (24,), generator=generator).float(),
        kv_b_proj=whole(*params.kv_b_proj.shape),
        o_proj=whole(*params.o_proj.shape),
        indexer=replace(params.indexer, weights_proj=torch.zeros_like(params.indexer.weights_proj)),
    )
    return config, params, x_TD, whole(19, 64)


@pytest.mark.parametrize("select", [None, sfa.window], ids=["all scores tie", "window"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
def test_exactly_summable_inputs_give_the_bits_of_one_rank(ranks, layout, select):
    """Values, selections and the gradients that are sums of exact products."""
    config, params, x_TD, seed_TD = summable()
    batch = sfa.Batch.from_lengths(LENGTHS)
    params = replace(params, o_proj=params.o_proj.requires_grad_(), kv_b_proj=params.kv_b_proj.requires_grad_())
    want = sfa.sfa_layer(params, x_TD, batch, config=config, select=select)
    assert want.y_TD.abs().max() > 10
    assert torch.equal(want.y_TD, (2 * want.y_TD).round() / 2)

    split = split_tokens(LENGTHS, ranks, layout=layout)
    run = shard_map(
        lambda comm, params, x: sharding.context_parallel_layer(
            params, x, batch, comm["cp"], config=config, split=split, select=select
        )[:2],
        simulated_mesh(MeshShape(cp=ranks)),
        in_specs=(P(), P("cp")),
        out_specs=P("cp"),
    )
    y, selection = map(split.gather, run(params, split.scatter(x_TD)))
    assert torch.equal(selection, want.selection_TK)
    assert torch.equal(y, want.y_TD)
    leaves = params.o_proj, params.kv_b_proj
    ours, theirs = (torch.autograd.grad(out, leaves, seed_TD) for out in (y, want.y_TD))
    assert all(map(torch.equal, ours, theirs))
    assert all(g.any() for g in theirs)


@pytest.mark.parametrize("field", ["q_b_proj", "kv_b_proj", "o_proj"])
def test_heads_that_are_not_one_ranks_are_refused_before_anything_is_sent(field):
    params, record = sfa.init_params(CONFIG), []
    batch = sfa.Batch.from_lengths(LENGTHS)
    specs = sharding.param_specs(CONFIG, Rules(heads="tp"))
    object.__setattr__(specs, field, P())
    run = shard_map(
        lambda comm, params, x: sharding.tensor_parallel_layer(params, x, batch, comm["tp"], config=CONFIG).y_TD,
        simulated_mesh(MeshShape(tp=2), record=record),
        in_specs=(specs, P()),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=rf"^tensor_parallel_layer: {field} must be \[.*\] on each rank; got \["):
        run(params, torch.randn(19, 64))
    assert record == []


def test_weights_that_move_are_refused_beside_heads_that_are_dealt_out():
    params, split = sfa.init_params(CONFIG), split_tokens(LENGTHS, 2, layout="striped")
    rule = r"^context_parallel_layer: heads are dealt out over one axis: .* with a heads_comm; got 'gathered'"
    with pytest.raises(ValueError, match=rule):
        both(MeshShape(cp=2, tp=2), params, torch.randn(19, 64), split, weights="gathered")


@pytest.mark.parametrize("selection", [torch.zeros(19, dtype=torch.int32), torch.zeros(19, 2, 2, dtype=torch.int32)])
def test_a_selection_that_is_no_matrix_is_refused(selection, unchecked):
    params, batch = sfa.init_params(CONFIG), sfa.Batch.from_lengths(LENGTHS)
    with pytest.raises(ValueError, match=r"^sfa_layer: selection must be \[T, K\]; got \(19,"):
        sfa.sfa_layer(params, torch.randn(19, 64), batch, config=CONFIG, selection=selection)


@pytest.mark.parametrize(
    "made", [torch.zeros(1, 5, dtype=torch.int32), torch.zeros(19, 5), torch.zeros(19, dtype=torch.int32)]
)
def test_what_a_selector_returns_is_looked_at(made, unchecked):
    params, batch = sfa.init_params(CONFIG), sfa.Batch.from_lengths(LENGTHS)
    with pytest.raises(ValueError, match=r"^choose_keys: select must return int32 \[19, K\]; got"):
        sfa.sfa_layer(params, torch.randn(19, 64), batch, config=CONFIG, select=lambda **_: made)
