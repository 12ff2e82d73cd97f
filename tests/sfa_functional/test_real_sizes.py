"""Layers of the published sizes: float32 equals the reference, bfloat16 stays close, with and without sparsity."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

import sfa_functional as sfa

LENGTHS = [120, 90]


@pytest.fixture(scope="module", params=["DEEPSEEK_V32", "GLM_5"])
def layer(request):
    """Give a model's config, one layer in float32 and hidden states; one model at a time is in memory."""
    config = getattr(sfa, request.param)
    x_TD = torch.randn(sum(LENGTHS), config.hidden_size, generator=torch.Generator().manual_seed(1))
    return config, sfa.init_params(config), x_TD


def _few_rows_by_reference(config, params, x_TD, batch, rows, selection_TK):
    """Attend for some query rows with the oracle, from keys of all."""
    rope = sfa.rope_cos_sin(batch.position_T, config)
    kv_SE = sfa.latent_keys(params, x_TD, *rope, config=config)
    q_THE, _ = sfa.latent_queries(params, x_TD[rows], *(x[rows] for x in rope), config=config)
    out_THL, _ = sfa.sparse_attention(
        q_THE,
        kv_SE,
        sfa.global_selection(selection_TK, batch)[rows],
        scale=config.softmax_scale,
        value_dim=config.kv_lora_rank,
        implementation="reference",
    )
    return sfa.latent_output(params, out_THL, config=config)


def _chosen_by_reference(config, params, x_TD, batch, rows):
    """Select keys for some query rows with the oracle."""
    rope = sfa.rope_cos_sin(batch.position_T, config)
    some = [x[rows] for x in rope]
    _, q_latent_TQ = sfa.latent_queries(params, x_TD[rows], *some, config=config)
    topk_TK = sfa.lightning_indexer(
        sfa.index_queries(params.indexer, q_latent_TQ, *some, config=config),
        sfa.index_keys(params.indexer, x_TD, *rope, config=config),
        sfa.index_weights(params.indexer, x_TD[rows], config=config),
        batch.start_T[rows],
        batch.end_T[rows],
        k=config.index_topk,
        implementation="reference",
    )
    return torch.where(topk_TK >= 0, topk_TK - batch.start_T[rows, None], -1)


@pytest.mark.parametrize("k", [48, 256])
def test_a_real_layer_equals_the_reference_in_float32(layer, k):
    config, params, x_TD = layer
    config, batch, rows = (
        replace(config, index_topk=k),
        sfa.Batch.from_lengths(LENGTHS),
        torch.tensor([0, 70, 119, 209]),
    )
    got = sfa.sfa_layer(params, x_TD, batch, config=config)
    assert got.y_TD.isfinite().all()
    assert (got.selection_TK >= 0).sum(-1).tolist() == (batch.position_T + 1).clamp(max=k).tolist()
    want_TD = _few_rows_by_reference(config, params, x_TD, batch, rows, got.selection_TK)
    assert sfa.difference(got.y_TD[rows], want_TD).max_rel < 1e-5
    chosen_TK = _chosen_by_reference(config, params, x_TD, batch, rows)
    overlap_T = sfa.selection_overlap(got.selection_TK[rows], chosen_TK.to(torch.int32))
    assert (overlap_T >= 1 - 1 / k).all()  # one near-tie at the cut may fall either way


def test_a_real_layer_in_bfloat16_stays_close_to_float32(layer):
    config, params, x_TD = layer
    config, batch = replace(config, index_topk=48), sfa.Batch.from_lengths(LENGTHS)
    exact = sfa.sfa_layer(params, x_TD, batch, config=config)
    narrow = tree_map(lambda x: x.bfloat16() if x.ndim == 2 else x, params)
    chosen = sfa.sfa_layer(narrow, x_TD.bfloat16(), batch, config=config)
    # float32, many times as fast here, replays what bfloat16 has chosen; the other way round proves no more
    replayed = sfa.sfa_layer(params, x_TD, batch, config=config, selection=chosen.selection_TK)
    assert chosen.y_TD.isfinite().all()
    assert (chosen.y_TD.float() - replayed.y_TD).norm() < 0.02 * replayed.y_TD.norm()
    assert sfa.selection_overlap(chosen.selection_TK, exact.selection_TK).mean() > 0.97
