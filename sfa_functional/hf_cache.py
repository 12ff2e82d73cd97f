"""transformers' cache as the place of key rows: read and written as its own attention does, in our column order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .config import SFAConfig
from .implementation import Implementation
from .indexer import index_keys, index_queries, index_weights
from .latent import latent_output, latent_projections
from .layer import LayerOutput, attend_positions, choose_keys
from .params import LayerParams
from .precision import require
from .rotary import Pairing
from .selectors import Selector

Store = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""``store(kv_TE, k_TI or None) -> (kv_SE, k_SI or None)``: cache the new tokens' keys, return those of all tokens."""


def cached_layer(
    params: LayerParams,
    x_TD: Tensor,
    batch: Batch,
    store: Store,
    *,
    config: SFAConfig,
    selection: Tensor | None,
    select: Selector | None,
    rope: tuple[Tensor, Tensor],
    implementation: Implementation,
) -> LayerOutput:
    """Run one attention layer as `sfa_layer` does, with a foreign store in the place of its pages.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm. Rows that belong to no request are zeroed first.
        batch: where each token stands and which of the store's rows it sees; without a block table.
        store: called once, with the new tokens' keys.
        config: sizes and constants.
        selection: positions within each query's request to attend to instead of choosing; goes before ``select``.
        select: another way to choose keys; None is the lightning indexer.
        rope: cos and sin of the tokens' positions.
        implementation: as in `sfa_layer`.

    Returns:
        `LayerOutput` without a cache.

    Raises:
        ValueError: a layer without an indexer, a selection and ``select``; nothing is stored then.

    Gradients: as `sfa_layer`; of stored rows too, if the store keeps their graph.
    Cost: that of `sfa_layer`, and the store's.
    Source: `sfa_layer`.
    """
    named = implementation if implementation is None or isinstance(implementation, str) else None
    chosen = selection is not None or select is not None or params.indexer is not None
    require(chosen, "use_sfa", "a layer without an indexer needs a selection or select=", "neither")
    x_TD = torch.where(batch.request_T[:, None] >= 0, x_TD, 0)
    q_THE, q_latent_TQ, kv_TE = latent_projections(params, x_TD, *rope, config=config, implementation=named)
    q_TJI = k_TI = w_TJ = None
    if params.indexer is not None:
        k_TI = index_keys(params.indexer, x_TD, *rope, config=config)
    if params.indexer is not None and selection is None:
        q_TJI = index_queries(params.indexer, q_latent_TQ, *rope, config=config)
        w_TJ = index_weights(params.indexer, x_TD, config=config)
    kv_SE, k_SI = store(kv_TE, k_TI)
    if selection is None:
        selection = choose_keys(
            q_TJI, k_SI, w_TJ, q_THE, kv_SE, batch, k=config.index_topk, select=select, implementation=named
        )
    out_THL, _ = attend_positions(q_THE, kv_SE, selection, batch, config=config, implementation=implementation)
    return LayerOutput(latent_output(params, out_THL, config=config), selection, None)


def require_index_cache(cache: Any, layer: int) -> None:
    """Refuse a transformers cache whose layer has no place for index keys, before anything is written."""
    layers = getattr(cache, "layers", [])
    held = layers[layer] if layer < len(layers) else getattr(cache, "layer_class_to_replicate", cache)
    name = held.__name__ if isinstance(held, type) else type(held).__name__
    rule = "the cache must keep index keys, as DynamicCache(config=model.config) and StaticCache do"
    require(hasattr(held, "update_indexer"), "use_sfa", rule, name)


def cache_store(cache: Any, layer: int, batch_size: int, config: SFAConfig) -> Store:
    """Return a function that writes one layer's new keys into a transformers cache and reads all of them.

    transformers keeps latents as ``keys`` [B, 1, S, L], the rotated rope part as ``values`` [B, 1, S, R], and
    ``indexer_keys`` [B, S, I]. What it rotates in neighbouring pairs it stores with all first elements first; both
    ways the columns are put in order here, so that either side can go on with the other's cache.

    Args:
        cache: of a model's cache class, dynamic or static; it is updated as transformers' own attention does.
        layer: 0-based number.
        batch_size: B, sequences of equally many new tokens.
        config: gives L, R and the pairings.

    Returns:
        The function: ``(kv_TE, k_TI or None) -> (kv_SE, k_SI or None)``, sequence by sequence, in the new keys' dtype.

    Gradients: of the new keys and of those cached, unless the cache writes in place (static ones do).
    Cost: copies all rows of the layer, as a dynamic cache does at each update.
    Source: Hugging Face transformers 5.24, cache_utils.py, DynamicIndexedLayer and StaticIndexedLayer.
    """
    rope_width = config.qk_rope_head_dim

    def store(kv_TE: Tensor, k_TI: Tensor | None) -> tuple[Tensor, Tensor | None]:
        latent, rope = kv_TE.split([config.kv_lora_rank, rope_width], dim=-1)
        new = (x.unflatten(0, (batch_size, 1, -1)) for x in (latent, _pairs_apart(rope, config.rope_pairing)))
        latent, rope = (x.to(kv_TE.dtype).flatten(0, 2) for x in cache.update(*new, layer))
        kv_SE = torch.cat([latent, _pairs_together(rope, config.rope_pairing)], dim=-1)
        if k_TI is None:
            return kv_SE, None
        rotated, rest = k_TI.tensor_split([rope_width], dim=-1)
        new_TI = torch.cat([_pairs_apart(rotated, config.index_rope_pairing), rest], dim=-1)
        k_SI = cache.update_indexer(new_TI.unflatten(0, (batch_size, -1)), layer).to(k_TI.dtype).flatten(0, 1)
        rotated, rest = k_SI.tensor_split([rope_width], dim=-1)
        return kv_SE, torch.cat([_pairs_together(rotated, config.index_rope_pairing), rest], dim=-1)

    return store


def _pairs_apart(x: Tensor, pairing: Pairing) -> Tensor:
    """Order columns as first elements, then second elements, of the pairs."""
    return x if pairing == "half" else x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _pairs_together(x: Tensor, pairing: Pairing) -> Tensor:
    """Undo `_pairs_apart`."""
    return x if pairing == "half" else x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
