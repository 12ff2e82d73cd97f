"""Purity: calling any public function twice gives the same bits and changes nothing outside of its result."""

import types
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa

CONFIG = replace(sfa.TINY, index_topk=3)
RANGES = {"start_T": torch.tensor([0, 0, 1, 2, 5, 5]), "end_T": torch.tensor([1, 2, 6, 4, 5, 6])}
TOPK_TK = torch.tensor([[0, -1], [1, 0], [4, 2], [3, -1], [-1, -1], [5, 9]], dtype=torch.int32)
TYPES = {
    "SFAConfig",
    "Yarn",
    "LayerParams",
    "IndexerParams",
    "AttentionOutput",
    "LayerOutput",
    "Difference",
    "Quantized",
    "Compared",
    "Scored",
    "SelectionStats",
    "Recording",
    "Step",
} | {
    "JointCache",
    "SplitCache",
    "SplitRows",
    "Batch",
}
"""Classes that are public as containers: to build one is to call nothing."""
LIVE = {
    "layer_params",
    "load_params",
    "use_sfa",
    "ModelStats",
    "evaluate_model",
    "IndexerLosses",
    "train_indexer",
    "sfa_callback",
}
"""Names for a live transformers model: tests of their own hold them to the same."""


def _arguments():
    """Return name -> (function, positional arguments, keyword arguments) for every public function."""
    params = sfa.init_params(CONFIG)
    draw = torch.Generator().manual_seed(1)
    x_TD, q_latent_TQ, q_THE, kv_SE, q_TJI, k_SI, w_TJ = (
        torch.randn(*shape, generator=draw)
        for shape in ((6, 64), (6, 32), (6, 4, 32), (6, 32), (6, 16, 16), (6, 16), (6, 16))
    )
    table = sfa.allocate_blocks([4, 2], 4)
    batch = sfa.Batch.from_lengths([4, 2])
    paged = sfa.Batch.from_lengths([4, 2], block_table=table, block_size=4)
    cache = sfa.init_cache(CONFIG, num_blocks=2, block_size=4, dtype=torch.float32)
    rope = sfa.rope_cos_sin(batch.position_T, CONFIG)
    out = sfa.AttentionOutput(torch.randn(6, 4, 24, generator=draw), torch.randn(6, 4, generator=draw))
    state = {sfa.HF_NAMES[name]: torch.ones(shape) for name, shape in sfa.param_shapes(CONFIG).items()}
    config, attend = {"config": CONFIG}, {"scale": 0.3, "value_dim": 24}
    index = q_TJI, k_SI, w_TJ
    packed, pages = sfa.pack_rows(kv_SE, value_dim=24, order="ascend"), sfa.pack_index_pages(k_SI[None])
    stats = sfa.selection_stats(q_THE, kv_SE, TOPK_TK, **RANGES, scale=0.3, k=1)
    step = sfa.Step(1, batch, TOPK_TK.clamp(max=3))
    compared = {"q_TJI": q_TJI, "k_SI": k_SI, "w_TJ": w_TJ, "q_THE": q_THE, "kv_SE": kv_SE} | RANGES
    compared |= {"k": 2, "row_S": None}

    def selector(make):
        return lambda *arguments: make(*arguments)(**compared)

    return {
        "init_params": (sfa.init_params, (CONFIG,), {}),
        "param_shapes": (sfa.param_shapes, (CONFIG,), {}),
        "params_from_state": (sfa.params_from_state, (state,), config),
        "hadamard": (sfa.hadamard, (k_SI,), {}),
        "layer_norm": (sfa.layer_norm, (k_SI, k_SI[0], k_SI[1], 1e-6), {}),
        "rms_norm": (sfa.rms_norm, (k_SI, k_SI[0], 1e-6), {}),
        "rope_cos_sin": (sfa.rope_cos_sin, (batch.position_T, CONFIG), {}),
        "rotate": (sfa.rotate, (q_TJI[..., :8], *rope), {"pairing": "half"}),
        "latent_keys": (sfa.latent_keys, (params, x_TD, *rope), config),
        "latent_output": (sfa.latent_output, (params, out.out_THL), config),
        "latent_projections": (sfa.latent_projections, (params, x_TD, *rope), config),
        "latent_queries": (sfa.latent_queries, (params, x_TD, *rope), config),
        "split_kv_b": (sfa.split_kv_b, (params.kv_b_proj, CONFIG), {}),
        "index_keys": (sfa.index_keys, (params.indexer, x_TD, *rope), config),
        "index_queries": (sfa.index_queries, (params.indexer, q_latent_TQ, *rope), config),
        "index_scores": (sfa.index_scores, index, {}),
        "index_weights": (sfa.index_weights, (params.indexer, x_TD), config),
        "lightning_indexer": (sfa.lightning_indexer, index, RANGES | {"k": 2}),
        "select_topk": (sfa.select_topk, (w_TJ,), RANGES | {"k": 2}),
        "best_keys": (selector(sfa.best_keys), (0.3,), {}),
        "block_topk": (selector(sfa.block_topk), (2,), {}),
        "random_keys": (lambda seed: selector(sfa.random_keys)(torch.Generator().manual_seed(seed)), (3,), {}),
        "window": (sfa.window, (), compared),
        "explain_implementation": (sfa.explain_implementation, ("npu",), {}),
        "dense_attention": (sfa.dense_attention, (q_THE, kv_SE), RANGES | attend),
        "merge_attention": (sfa.merge_attention, ([out, out],), {}),
        "sparse_attention": (sfa.sparse_attention, (q_THE, kv_SE, TOPK_TK), attend),
        "validate_selection": (sfa.validate_selection, (TOPK_TK[:4],), {k: x[:4] for k, x in RANGES.items()}),
        "allocate_blocks": (sfa.allocate_blocks, ([4, 2], 4), {}),
        "cache_rows": (sfa.cache_rows, (cache,), {}),
        "fetch_rows": (sfa.fetch_rows, (kv_SE, TOPK_TK), {}),
        "init_cache": (sfa.init_cache, (CONFIG,), {"num_blocks": 2, "block_size": 4, "dtype": torch.float32}),
        "map_selection": (sfa.map_selection, (TOPK_TK, RANGES["end_T"]), {}),
        "token_slots": (sfa.token_slots, (table, paged.request_T, paged.position_T), {"block_size": 4}),
        "validate_block_table": (sfa.validate_block_table, (table, batch.seq_len_B), {"block_size": 4}),
        "write_cache": (sfa.write_cache, (cache, kv_SE, k_SI, paged.slot_T), {}),
        "global_selection": (sfa.global_selection, (TOPK_TK, batch), {}),
        "local_selection": (sfa.local_selection, (TOPK_TK, batch), {}),
        "sfa_layer": (sfa.sfa_layer, (params, x_TD, paged), config | {"cache": cache}),
        "quantized_indexer": (selector(sfa.quantized_indexer), ("fp8",), {}),
        "quantize_fp8": (sfa.quantize_fp8, (k_SI,), {}),
        "quantize_int8": (sfa.quantize_int8, (k_SI,), {}),
        "quantize_index": (sfa.quantize_index, (k_SI,), {"dtype": "int8", "hadamard": True}),
        "dequantize": (sfa.dequantize, (sfa.quantize_int8(k_SI),), {}),
        "quantized_index_scores": (sfa.quantized_index_scores, (*(sfa.quantize_int8(x) for x in index[:2]), w_TJ), {}),
        "cache_bytes": (sfa.cache_bytes, (CONFIG,), {"kv": "fp8"}),
        "pack_rows": (sfa.pack_rows, (kv_SE,), {"value_dim": 24, "order": "ascend"}),
        "unpack_rows": (sfa.unpack_rows, (packed,), {"value_dim": 24, "rope_dim": 8, "order": "ascend"}),
        "pack_index_pages": (sfa.pack_index_pages, (k_SI[None],), {}),
        "unpack_index_pages": (sfa.unpack_index_pages, (pages,), {"block_size": 6, "width": 16}),
        "indexer_kl": (sfa.indexer_kl, (*index, q_THE, kv_SE), RANGES | {"scale": 0.3, "topk_TK": TOPK_TK}),
        "attention_mass": (sfa.attention_mass, (q_THE, kv_SE, TOPK_TK), RANGES | {"scale": 0.3}),
        "difference": (sfa.difference, (k_SI, w_TJ), {}),
        "selection_stats": (
            sfa.selection_stats,
            (q_THE, kv_SE, TOPK_TK),
            RANGES | {"scale": 0.3, "k": 1, "scored": sfa.Scored(*index), "rows": 2},
        ),
        "empty_stats": (sfa.empty_stats, (), {}),
        "merge_stats": (sfa.merge_stats, ([stats, stats],), {}),
        "reduce_stats": (sfa.reduce_stats, (stats, lambda x: 2 * x), {}),
        "evaluate_layer": (sfa.evaluate_layer, (params, x_TD, batch), config | {"k": 2, "rows": 1}),
        "index_vectors": (sfa.index_vectors, (params, x_TD, batch), config),
        "indexer_loss": (sfa.indexer_loss, (params, x_TD, batch), config),
        "record_selections": (lambda steps: sfa.record_selections(steps).selections, ([step],), {}),
        "replay_selection": (lambda steps: sfa.replay_selection(sfa.record_selections(steps), 2, batch), ([step],), {}),
        "selection_overlap": (sfa.selection_overlap, (TOPK_TK, TOPK_TK.flip(1)), {}),
    }


FUNCTIONS = _arguments()


def _world():
    """Return what no call may change."""
    return (
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _same(a, b):
    same = torch.equal if isinstance(a, torch.Tensor) else lambda x, y: x == y
    return type(a) is type(b) and (same(a, b) or (isinstance(a, torch.Tensor) and _bits(a).equal(_bits(b))))


def _bits(x):
    return x.contiguous().flatten().view(torch.uint8)


def test_every_public_function_is_in_the_table():
    public = {name for name in sfa.__all__ if callable(getattr(sfa, name))}
    assert public == FUNCTIONS.keys() | TYPES | LIVE
    assert not any(isinstance(getattr(sfa, name), types.ModuleType) for name in sfa.__all__)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_repeats_itself_and_changes_nothing(name, grad):
    function, *arguments = tree_map(
        lambda x: (
            x.detach().clone().requires_grad_(grad and x.is_floating_point()) if isinstance(x, torch.Tensor) else x
        ),
        _arguments()[name],
    )
    given = _tensors(arguments)
    before, copies, world = [x._version for x in given], [x.detach().clone() for x in given], _world()
    first = function(*arguments[0], **arguments[1])
    frozen = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, first)
    second = function(*arguments[0], **arguments[1])
    assert all(_same(a, b) for a, b in zip(tree_leaves(frozen), tree_leaves(second), strict=True))
    assert [x._version for x in given] == before
    assert all(_bits(a.detach()).equal(_bits(b)) for a, b in zip(given, copies, strict=True))
    assert _world() == world


@pytest.mark.parametrize("name", ["write_cache", "sfa_layer"])
def test_donate_is_the_one_exception_and_spares_all_but_the_cache(name):
    function, positional, named = _arguments()[name]
    cache = named.get("cache", positional[0])
    others = [x for x in _tensors((positional, named)) if not any(x is y for y in _tensors(cache))]
    before = [x._version for x in others]
    copies = [x.clone() for x in _tensors(cache)]
    function(*positional, **named, donate=True)
    assert [x._version for x in others] == before
    assert not any(torch.equal(a, b) for a, b in zip(_tensors(cache), copies, strict=True))
