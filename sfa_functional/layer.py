"""The whole attention layer as one composition of public functions."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from . import npu
from .attention import AttentionOutput, sparse_attention
from .batch import Batch, global_selection, local_selection
from .config import SFAConfig
from .implementation import Implementation, choose
from .indexer import index_keys, index_queries, index_weights, lightning_indexer
from .latent import absorb_queries, head_queries, latent_keys, latent_output, latent_projections, output_of_heads
from .paged import Cache, Rows, SplitRows, cache_rows, index_rows, map_selection, write_cache
from .params import LayerParams
from .per_head import attend_in_both_forms, batch_runs
from .precision import require, require_rows, without_autocast
from .rotary import rope_cos_sin
from .selectors import Selector


class LayerOutput(NamedTuple):
    """What a layer returns: hidden states, what each query attended to, and the cache after the write."""

    y_TD: Float[Tensor, "T D"]
    selection_TK: Int32[Tensor, "T K"]  # positions within each query's request
    cache: Cache | None


def sfa_layer(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    batch: Batch,
    *,
    config: SFAConfig,
    cache: Cache | None = None,
    selection: Int32[Tensor, "T K"] | None = None,
    select: Selector | None = None,
    rope: tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]] | None = None,
    implementation: Implementation = None,
    donate: bool = False,
) -> LayerOutput:
    """Run one attention layer: project, write the cache, select keys, attend to them, project back.

    `latent_projections` -> `write_cache` -> `lightning_indexer` -> `sparse_attention` -> `latent_output`.

    Queries that see few rows more than they select, in a batch that brings most of these along (a prefill), attend with
    keys and values of each head instead, to the same selection: `per_head.form_flops` counts both forms, and the
    ranges of a batch on the CPU say which queries these are. Elsewhere (on a device, whose ranges are not waited for;
    under ``torch.compile``; in another implementation than "blockwise") there is one form.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm. Rows that belong to no request are zeroed first.
        batch: where each token stands and what it sees.
        config: sizes and constants; ``index_topk`` is how many keys are selected.
        cache: pool of pages holding the earlier tokens, for a batch with a block table.
        selection: positions within each query's request to attend to instead of scoring, as an earlier layer
            returned them; positions that the query does not see are unused. The cache is written all the same.
        select: another way to choose keys; None is the lightning indexer.
        rope: cos and sin to use instead of ``rope_cos_sin(batch.position_T, config)``.
        implementation: passed on to the functions that have one, if it is a name; a callable replaces
            `sparse_attention` alone. "npu" goes to Ascend's operators with every step, or is refused before the first.
        donate: write into the cache given, which must not be used again.

    Returns:
        `LayerOutput`. A given selection is returned as it came.

    Raises:
        ValueError: x and batch of different lengths; cached context or a block table without a cache, or a cache
            without a block table; a selection that is not int32, or beside ``select``; a layer without an indexer
            and without either.

    Gradients: of x, the projections, and the cache unless donated. A selection has none: the indexer learns from
        `indexer_kl` alone, its weights get no gradient here.
    Cost: the sum of its parts; of a prefill of 4096 tokens at GLM-5's sizes, attention takes 0.67e12 FLOPs instead of
        1.00e12, and all between the projections 8 s on two cores.
    Source: DeepSeek-V3.2-Exp report (2025), section 2.1; DeepSeek-V3.2-Exp, inference/model.py, class MLA.
    """
    check_layer("sfa_layer", params, x_TD, batch, cache=cache, selection=selection, select=select)
    if implementation == "npu":
        given: dict[str, Any] = {"config": config, "cache": cache, "selection": selection, "select": select}
        choose("sfa_layer", implementation, params, x_TD, batch, **given)
    with without_autocast(x_TD):
        named = implementation if implementation is None or isinstance(implementation, str) else None
        belongs_T1 = batch.request_T[:, None] >= 0
        x_TD = torch.where(belongs_T1, x_TD, 0)
        cos, sin = rope_cos_sin(batch.position_T.clamp(min=0), config) if rope is None else rope

        k = config.index_topk if selection is None else selection.shape[1]
        runs = batch_runs(batch, x_TD, config=config, k=k, implementation=implementation)
        q_THX = q_THE = None
        if runs:
            q_THX, q_latent_TQ = head_queries(params, x_TD, cos, sin, config=config)
            q_THE = None if select is None else absorb_queries(params, q_THX, config=config)
            kv_TE = latent_keys(params, x_TD, cos, sin, config=config)
        else:
            q_THE, q_latent_TQ, kv_TE = latent_projections(params, x_TD, cos, sin, config=config, implementation=named)
        k_TI = None
        if params.indexer is not None and (cache is not None or selection is None):
            k_TI = index_keys(params.indexer, x_TD, cos, sin, config=config)
        q_TJI = w_TJ = None
        if params.indexer is not None and selection is None:
            q_TJI = index_queries(params.indexer, q_latent_TQ, cos, sin, config=config)
            w_TJ = index_weights(params.indexer, x_TD, config=config)
        kv_SE: Rows = kv_TE
        k_SI = k_TI
        if cache is not None and batch.slot_T is not None:
            cache = write_cache(cache, kv_TE, k_TI, batch.slot_T, donate=donate, implementation=named)
            kv_SE, k_SI = cache_rows(cache), index_rows(cache)
        if selection is None:
            selection = choose_keys(
                q_TJI, k_SI, w_TJ, q_THE, kv_SE, batch, k=config.index_topk, select=select, implementation=named
            )
        if q_THX is not None:
            value_THV = attend_in_both_forms(params, q_THX, kv_SE, selection, batch, runs, config=config)
            return LayerOutput(output_of_heads(params, value_THV), selection, cache)
        assert q_THE is not None  # there is one of the two
        out_THL, _ = attend_positions(q_THE, kv_SE, selection, batch, config=config, implementation=implementation)
        return LayerOutput(latent_output(params, out_THL, config=config), selection, cache)


def choose_keys(
    q_TJI: Float[Tensor, "T J I"] | None,
    k_SI: Float[Tensor, "S I"] | None,
    w_TJ: Float[Tensor, "T J"] | None,
    q_THE: Float[Tensor, "T H E"] | None,
    kv_SE: Rows | None,
    batch: Batch,
    *,
    k: int,
    select: Selector | None = None,
    implementation: Implementation = None,
) -> Int32[Tensor, "T K"]:
    """Choose k keys for every query of a batch, as positions within its request.

    Args:
        q_TJI: indexer queries; None in a layer without an indexer, as are ``k_SI`` and ``w_TJ``.
        k_SI: index keys, or those of a pool for a batch with ``row_S``.
        w_TJ: weights of the indexer's heads.
        q_THE: absorbed queries, for selectors that look at them; None where there is no selector.
        kv_SE: latent keys, likewise; None where no rank has them all.
        batch: what each query sees.
        k: keys to choose.
        select: another way to choose; None is `lightning_indexer`.
        implementation: of `lightning_indexer`.

    Returns:
        int32 positions, unused entries -1.

    Raises:
        ValueError: neither an indexer's tensors nor ``select``, or a selector that returns something else.

    Gradients: none (integers).
    Cost: that of the selector.
    Source: DeepSeek-V3.2-Exp report (2025), section 2.1.
    """
    start_T, end_T, row_S = batch.start_T, batch.end_T, batch.row_S
    if select is not None:
        compared = {"q_TJI": q_TJI, "k_SI": k_SI, "w_TJ": w_TJ, "q_THE": q_THE, "kv_SE": kv_SE}
        topk_TK = select(**compared, start_T=start_T, end_T=end_T, k=k, row_S=row_S)
        fits = topk_TK.ndim == 2 and topk_TK.shape[0] == start_T.shape[0] and topk_TK.dtype == torch.int32
        got = (topk_TK.dtype, tuple(topk_TK.shape))
        require(fits, "choose_keys", f"select must return int32 [{start_T.shape[0]}, K]", got)
    elif q_TJI is None or k_SI is None or w_TJ is None:
        raise ValueError("choose_keys: a layer without an indexer needs selection= or select=; got neither")
    else:
        if (name := _on_device("choose_positions", implementation, q_TJI, k_SI, w_TJ, batch, k=k)) == "npu":
            return npu.choose_positions(q_TJI.detach(), k_SI.detach(), w_TJ.detach(), batch, k=k)
        topk_TK = lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=k, row_S=row_S, implementation=name)
    return local_selection(topk_TK, batch)


def attend_positions(
    q_THE: Float[Tensor, "T H E"],
    kv_SE: Rows,
    selection_TK: Int32[Tensor, "T K"],
    batch: Batch,
    *,
    config: SFAConfig,
    implementation: Implementation = None,
) -> AttentionOutput:
    """Attend from every query of a batch to positions of its request: `sparse_attention` through the batch's rows.

    Args:
        q_THE: absorbed queries.
        kv_SE: latent keys, or those of a pool for a batch with ``row_S``.
        selection_TK: positions; those that the query does not see are unused.
        batch: what each query sees.
        config: scale and L.
        implementation: of `sparse_attention`.

    Returns:
        `AttentionOutput`. Through Ascend's operator over a split pool, which gives none, lse is NaN.

    Raises:
        ValueError: as `sparse_attention`.

    Gradients: as `sparse_attention`.
    Cost: as `sparse_attention`.
    Source: as `sparse_attention`.
    """
    if isinstance(kv_SE, SplitRows):
        call: dict[str, Any] = {"scale": config.softmax_scale, "value_dim": config.kv_lora_rank}
        implementation = _on_device("attend_positions", implementation, q_THE, kv_SE, selection_TK, batch, **call)
        if implementation == "npu":
            out_THL = npu.attend_positions(q_THE, kv_SE, selection_TK, batch, **call)
            return AttentionOutput(out_THL, torch.full_like(out_THL[..., 0], torch.nan, dtype=torch.float32))
    topk_TK = global_selection(selection_TK, batch)
    row_TK = topk_TK if batch.row_S is None else map_selection(topk_TK, batch.row_S)
    return sparse_attention(
        q_THE,
        kv_SE,
        row_TK,
        scale=config.softmax_scale,
        value_dim=config.kv_lora_rank,
        implementation=implementation,
    )


def _on_device(function: str, implementation: Implementation, *arguments: Any, **named: Any) -> Implementation:
    """Decide between the device's form for whole batches and the functions of plain tensors, which None leaves None."""
    if implementation not in (None, "npu"):
        return implementation
    chosen = choose(function, implementation, *arguments, **named)
    return "npu" if chosen == "npu" else implementation


def check_layer(
    function: str,
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    batch: Batch,
    *,
    cache: Cache | None,
    selection: Int32[Tensor, "T K"] | None,
    select: Selector | None,
) -> None:
    """Refuse arguments of a layer function that don't go together, before anything is computed, sent or written."""
    require_rows(function, x_TD.shape[0], position_T=batch.position_T, selection=selection)
    if selection is not None:
        require(selection.dtype == torch.int32, function, "selection must be int32", selection.dtype)
        require(selection.ndim == 2, function, "selection must be [T, K]", tuple(selection.shape))
    require(selection is None or select is None, function, "selection= and select= exclude each other", "both")
    if cache is None:
        require(batch.row_S is None, function, "a batch with cached context or a block table needs a cache", None)
    else:
        require(batch.slot_T is not None, function, "a cache needs a batch with a block table", "none")
    chosen = selection is not None or select is not None
    rule = "a layer without an indexer needs selection= or select="
    require(chosen or params.indexer is not None, function, rule, "neither")
    if cache is not None and params.indexer is not None:
        require(cache.index_k is not None, function, "a layer with an indexer needs a pool with index keys", None)
