"""DeepSeek Sparse Attention as pure PyTorch functions. The public names, in reading order."""

from .config import DEEPSEEK_V32, GLM_5, GLM_52, TINY, SFAConfig, Yarn
from .params import DEEPSEEK_NAMES, HF_NAMES, IndexerParams, LayerParams, init_params, param_shapes, params_from_state
from .norm import hadamard, layer_norm, rms_norm
from .rotary import rope_cos_sin, rotate
from .latent import latent_keys, latent_output, latent_projections, latent_queries, split_kv_b
from .indexer import index_keys, index_queries, index_scores, index_weights, lightning_indexer, select_topk
from .selectors import best_keys, block_topk, quantized_indexer, random_keys, window
from .implementation import explain_implementation
from .attention import AttentionOutput, dense_attention, merge_attention, sparse_attention, validate_selection
from .paged import (
    JointCache,
    SplitCache,
    SplitRows,
    allocate_blocks,
    cache_rows,
    fetch_rows,
    init_cache,
    map_selection,
    token_slots,
    validate_block_table,
    write_cache,
)
from .batch import Batch, global_selection, local_selection
from .layer import LayerOutput, sfa_layer
from .quantize import Quantized, dequantize, quantize_fp8, quantize_index, quantize_int8, quantized_index_scores
from .packed import cache_bytes, pack_index_pages, pack_rows, unpack_index_pages, unpack_rows
from .losses import indexer_kl
from .training import Compared, index_vectors, indexer_loss
from .replay import Recording, Step, record_selections, replay_selection
from .selection_measures import attention_mass, selection_overlap
from .selection_stats import Scored, SelectionStats, empty_stats, merge_stats, reduce_stats, selection_stats
from .evaluate import Difference, difference, evaluate_layer

from .hf import layer_params, load_params, use_sfa
from .evaluate_model import ModelStats, evaluate_model
from .hf_train import IndexerLosses, train_indexer
from .hf_trainer import sfa_callback
from .version import __version__

__all__ = [
    "DEEPSEEK_V32",
    "GLM_5",
    "GLM_52",
    "TINY",
    "SFAConfig",
    "Yarn",
    "DEEPSEEK_NAMES",
    "HF_NAMES",
    "IndexerParams",
    "LayerParams",
    "init_params",
    "param_shapes",
    "params_from_state",
    "hadamard",
    "layer_norm",
    "rms_norm",
    "rope_cos_sin",
    "rotate",
    "latent_keys",
    "latent_output",
    "latent_projections",
    "latent_queries",
    "split_kv_b",
    "index_keys",
    "index_queries",
    "index_scores",
    "index_weights",
    "lightning_indexer",
    "select_topk",
    "best_keys",
    "block_topk",
    "quantized_indexer",
    "random_keys",
    "window",
    "explain_implementation",
    "AttentionOutput",
    "dense_attention",
    "merge_attention",
    "sparse_attention",
    "validate_selection",
    "JointCache",
    "SplitCache",
    "SplitRows",
    "allocate_blocks",
    "cache_rows",
    "fetch_rows",
    "init_cache",
    "map_selection",
    "token_slots",
    "validate_block_table",
    "write_cache",
    "Batch",
    "global_selection",
    "local_selection",
    "LayerOutput",
    "sfa_layer",
    "Quantized",
    "dequantize",
    "quantize_fp8",
    "quantize_index",
    "quantize_int8",
    "quantized_index_scores",
    "cache_bytes",
    "pack_index_pages",
    "pack_rows",
    "unpack_index_pages",
    "unpack_rows",
    "indexer_kl",
    "Compared",
    "index_vectors",
    "indexer_loss",
    "Recording",
    "Step",
    "record_selections",
    "replay_selection",
    "attention_mass",
    "selection_overlap",
    "Scored",
    "SelectionStats",
    "empty_stats",
    "merge_stats",
    "reduce_stats",
    "selection_stats",
    "Difference",
    "difference",
    "evaluate_layer",
    "layer_params",
    "load_params",
    "use_sfa",
    "ModelStats",
    "evaluate_model",
    "IndexerLosses",
    "train_indexer",
    "sfa_callback",
    "__version__",
]
