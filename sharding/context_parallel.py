"""The attention layer on many ranks: tokens dealt out, small keys gathered, everything else local.

Under context parallelism every rank runs all heads on its own tokens. What it needs of the others' tokens has no heads:
the latent key and the index key, a tenth of the hidden state. One gather brings both, packed; it is started as soon as
they exist and waited for just before the selection, so that the query projections hide it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.functional import linear, pad

from sfa_functional import (
    AttentionOutput,
    Batch,
    LayerOutput,
    LayerParams,
    SFAConfig,
    global_selection,
    index_keys,
    index_queries,
    index_weights,
    latent_keys,
    latent_output,
    latent_queries,
    local_selection,
    merge_attention,
    rope_cos_sin,
    sfa_layer,
    sparse_attention,
    split_kv_b,
    token_slots,
    validate_block_table,
    write_cache,
)
from sfa_functional.implementation import Implementation, explain_implementation, refuse
from sfa_functional.layer import attend_positions, check_layer, choose_keys
from sfa_functional.paged import Cache, JointCache, Rows, SplitRows, cache_rows, index_rows, require_donatable
from sfa_functional.params import NORM_FIELDS, named_fields, param_shapes
from sfa_functional.precision import require, wide, without_autocast
from sfa_functional.selectors import Selector

from .cache_ranges import CacheSplit, compact_block_table
from .collectives import Collectives, gather_rows_start
from .rules import LARGE_FIELDS, Weights
from .token_ranges import TokenSplit


def context_parallel_layer(
    params: LayerParams,
    x_tD: Float[Tensor, "t D"],
    batch: Batch,
    comm: Collectives,
    *,
    config: SFAConfig,
    split: TokenSplit | None,
    cache: Cache | None = None,
    selection: Int32[Tensor, "t K"] | None = None,
    select: Selector | None = None,
    rope: tuple[Float[Tensor, "t F"], Float[Tensor, "t F"]] | None = None,
    weights: Weights = "local",
    implementation: Implementation = None,
    donate: bool = False,
    cache_split: CacheSplit | None = None,
    cache_exchange: Literal["queries", "blocks"] = "queries",
    while_gathering: Callable[[], object] | None = None,
) -> LayerOutput:
    """Run one attention layer on this rank's tokens: `sfa_layer` with the tokens dealt out over a mesh axis.

    `latent_keys`, `index_keys` -> one gather, started -> `latent_queries`, `index_queries` -> the gather waited for,
    keys put into global order -> `write_cache` -> `lightning_indexer` -> `sparse_attention` -> `latent_output`.

    Args:
        params: the layer's weights, in the form that ``weights`` names.
        x_tD: this rank's hidden states, C rows in the order of ``split``; padding rows may hold anything.
        batch: all tokens, the same on every rank.
        comm: the mesh axis.
        config: sizes and constants.
        split: who holds which tokens, from `split_tokens`. None: every rank holds all of them, in the batch's order
            (decode over a sharded cache).
        cache: the pool of pages, a copy on each rank; or, with ``cache_split``, this rank's part of the latents.
        selection: C rows of positions to attend to instead of scoring.
        select: another way to choose keys. Over a sharded cache it is given no ``kv_SE``.
        rope: cos and sin of this rank's tokens, instead of `rope_cos_sin`.
        weights: "local": all matrices are here. "gathered": ``q_b_proj``, ``kv_b_proj`` and ``o_proj`` are this
            rank's flat shards (`shard_flat`), gathered after the keys' gather has started. "exchanged": ``o_proj`` has
            the columns of this rank's H/N heads; values travel to it (all_to_all) and sums come back
            (reduce_scatter).
        implementation: as `sfa_layer` takes it.
        donate: write into the cache given, which must not be used again.
        cache_split: deals the latents out over this axis: ``cache.kv`` then has the pages of
            `CacheSplit.local_block_table`, index keys have all pages of the batch's table.
        cache_exchange: with ``cache_split``: "queries" sends queries and selections to the rows and merges the
            partial results by their log-sum-exp; "blocks" gathers the pages that the batch refers to.
        while_gathering: called once, as soon as the gather of keys has started: the place to start fetching the next
            layer's weights, so that they do not compete with it for the link.

    Returns:
        `LayerOutput` of this rank's rows; padding rows hold finite numbers and an empty selection. The cache is this
        rank's.

    Raises:
        ValueError: what doesn't fit: rows, ranks, shapes of weights, heads that N does not divide, or as `sfa_layer`;
            before any collective starts, and the same on every rank. (What a selector itself refuses, it refuses
            when it is called.)

    Gradients: of x, the weights and the cache, summed over ranks as `collectives` says; none to the indexer, as in
        `sfa_layer`.
    Cost: per rank C of T tokens. Sends C·(E + I)·(N - 1) values, one gather; "gathered" (N - 1)/N of the large
        matrices; "exchanged" C·H·V·(N - 1)/N + C·D·(N - 1) values. Over a sharded cache also C·(H·E + K)·(N - 1) and
        C·H·(L + 1)·(N - 1) float32 values (the latter with T for C where every rank holds all tokens), or the pages.
    Source: the prefill context parallelism of vllm-project/vllm-ascend; merging by log-sum-exp as in Liu et al.,
        "Ring Attention" (2023).
    """
    _check(
        params,
        x_tD,
        batch,
        comm,
        config=config,
        split=split,
        cache=cache,
        selection=selection,
        select=select,
        weights=weights,
        cache_split=cache_split,
        cache_exchange=cache_exchange,
        implementation=implementation,
        donate=donate,
    )
    local = batch if split is None else split.local_batch(batch, comm.rank)
    with without_autocast(x_tD):
        named = implementation if implementation is None or isinstance(implementation, str) else None
        x_tD = torch.where(local.request_T[:, None] >= 0, x_tD, 0)
        cos, sin = rope_cos_sin(local.position_T.clamp(min=0), config) if rope is None else rope

        kv_tE = latent_keys(params, x_tD, cos, sin, config=config)
        k_tI = None
        if params.indexer is not None and (cache is not None or selection is None):
            k_tI = index_keys(params.indexer, x_tD, cos, sin, config=config)
        mine = [x for x in (kv_tE, k_tI) if x is not None]
        keys = None if split is None else gather_rows_start(comm, *mine)
        if while_gathering is not None:
            while_gathering()
        large = {} if weights != "gathered" else _gather_large(params, comm, config)

        whole = _with_matrices(params, {name: large[name].wait() for name in ("q_b_proj", "kv_b_proj") if large})
        q_tHE, q_latent_tQ = latent_queries(whole, x_tD, cos, sin, config=config)
        q_tJI = w_tJ = None
        if params.indexer is not None and selection is None:
            q_tJI = index_queries(params.indexer, q_latent_tQ, cos, sin, config=config)
            w_tJ = index_weights(params.indexer, x_tD, config=config)

        everyones = mine if keys is None or split is None else [split.gather(rows) for rows in keys.wait()]
        kv_TE, k_TI = everyones[0], everyones[1] if k_tI is not None else None
        kv_SE: Rows = kv_TE
        k_SI = k_TI
        if cache is not None and batch.slot_T is not None:
            slot_T = batch.slot_T if cache_split is None else _cache_slots(cache, cache_split, batch, comm.rank)
            cache = write_cache(
                cache, kv_TE, k_TI, slot_T, index_slot_T=batch.slot_T, donate=donate, implementation=named
            )
            kv_SE, k_SI = cache_rows(cache), index_rows(cache)

        if selection is None:
            rows = None if cache_split is not None else kv_SE
            selection = choose_keys(
                q_tJI, k_SI, w_tJ, q_tHE, rows, local, k=config.index_topk, select=select, implementation=named
            )
        if cache_split is None or cache is None:
            result = attend_positions(q_tHE, kv_SE, selection, local, config=config, implementation=implementation)
        else:
            seen_tK = local_selection(global_selection(selection, local), local)
            attend = _attend_by_queries if cache_exchange == "queries" else _attend_by_blocks
            result = attend(q_tHE, seen_tK, local, batch, comm, split, cache, cache_split, config, implementation)

        if weights == "exchanged":
            y_tD = _exchanged_output(whole, result.out_THL, comm, config)
        else:
            if large:
                whole = replace(whole, o_proj=large["o_proj"].wait())
            y_tD = latent_output(whole, result.out_THL, config=config)
        return LayerOutput(y_tD, selection, cache)


def tensor_parallel_layer(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    batch: Batch,
    comm: Collectives,
    *,
    config: SFAConfig,
    **named: Any,
) -> LayerOutput:
    """Run one attention layer with its heads dealt out: the baseline that context parallelism replaces.

    Every rank runs the low-rank projections, the whole indexer and the selection for all tokens, and H/N heads:
    ``y = Σ_ranks sfa_layer(its heads)``.

    Args:
        params: this rank's heads of ``q_b_proj``, ``kv_b_proj`` and ``o_proj``, all of the rest: the shards of
            ``param_specs(config, Rules(heads="tp"))``.
        x_TD: hidden states of all tokens, the same on every rank.
        batch: all tokens.
        comm: the mesh axis of the heads.
        config: sizes of the whole model.
        named: further arguments of `sfa_layer`.

    Returns:
        `LayerOutput`, the same on every rank.

    Raises:
        ValueError: N does not divide H, or as `sfa_layer`.

    Gradients: as `sfa_layer`; a replicated input's are summed over ranks.
    Cost: 1/N of the heads' work, all of the indexer's. Sends 2·T·D·(N - 1)/N values: an all_reduce.
    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    out = sfa_layer(params, x_TD, batch, config=heads_of_rank(config, comm.size), **named)
    return out._replace(y_TD=comm.all_reduce(out.y_TD))


def heads_of_rank(config: SFAConfig, num_ranks: int) -> SFAConfig:
    """Return the sizes of one rank's share of the attention heads.

    Args:
        config: the whole model.
        num_ranks: N.

    Returns:
        The config with H/N heads; the softmax's scale does not depend on H.

    Raises:
        ValueError: N does not divide H.
    """
    heads = config.num_attention_heads
    fits = type(num_ranks) is int and num_ranks >= 1 and heads % num_ranks == 0
    require(fits, "heads_of_rank", f"num_ranks must divide {heads} heads", repr(num_ranks))
    return replace(config, num_attention_heads=heads // num_ranks)


def shard_flat(params: LayerParams, num_ranks: int) -> LayerParams:
    """Lay each large matrix out flat, padded with zeros to a multiple of N, so that any N ranks can hold equal shards.

    Args:
        params: all weights.
        num_ranks: N.

    Returns:
        `LayerParams` whose ``q_b_proj``, ``kv_b_proj`` and ``o_proj`` are vectors; ``P("cp")`` cuts them.

    Raises:
        ValueError: N < 1.

    Gradients: of the matrices; what reaches the padding is dropped.
    """
    known = type(num_ranks) is int and num_ranks >= 1
    require(known, "shard_flat", "num_ranks must be an integer >= 1", repr(num_ranks))
    flat = {name: getattr(params, name).flatten() for name in LARGE_FIELDS}
    return _with_matrices(params, {name: pad(x, (0, -x.shape[0] % num_ranks)) for name, x in flat.items()})


def _with_matrices(params: LayerParams, matrices: Mapping[str, Tensor]) -> LayerParams:
    changed: dict[str, Any] = dict(matrices)
    return replace(params, **changed)


class _PendingMatrix:
    """A matrix whose flat shards are under way."""

    def __init__(self, comm: Collectives, shard: Tensor, shape: tuple[int, ...]) -> None:
        self._pending, self._shape = comm.all_gather_start(shard), torch.Size(shape)

    def wait(self) -> Tensor:
        return self._pending.wait()[: self._shape.numel()].view(self._shape)


def _gather_large(params: LayerParams, comm: Collectives, config: SFAConfig) -> Mapping[str, _PendingMatrix]:
    shapes = param_shapes(config)
    return {name: _PendingMatrix(comm, getattr(params, name), shapes[name]) for name in LARGE_FIELDS}


def _exchanged_output(
    params: LayerParams, out_tHL: Tensor, comm: Collectives, config: SFAConfig
) -> Float[Tensor, "t D"]:
    """`latent_output` where each rank has the columns of its heads: values go there, sums of products come back."""
    _, w_uv_HVL = split_kv_b(params.kv_b_proj, config)
    value_tHV = einsum(out_tHL, w_uv_HVL, "t h l, h v l -> t h v")
    mine_TX = comm.all_to_all(rearrange(value_tHV, "t (n h) v -> (n t) (h v)", n=comm.size))
    return comm.reduce_scatter(linear(mine_TX, params.o_proj))


def _block_size(cache: Cache) -> int:
    return (cache.kv if isinstance(cache, JointCache) else cache.latent).shape[1]


def _cache_slots(cache: Cache, cache_split: CacheSplit, batch: Batch, rank: int) -> Tensor:
    assert batch.block_table_BU is not None
    table_BU = cache_split.local_block_table(batch.block_table_BU)
    size = _block_size(cache)
    return cache_split.local_slots(table_BU, batch.request_T, batch.position_T, rank, block_size=size)


def _row_numbers(table_BU: Tensor, request_T: Tensor, position_TK: Tensor, block_size: int) -> Int32[Tensor, "T K"]:
    request_TK = request_T[:, None].expand_as(position_TK)
    rows = token_slots(table_BU, request_TK.flatten(), position_TK.flatten(), block_size=block_size)
    return rows.view(position_TK.shape).to(torch.int32)


def _attend_by_queries(
    q_tHE: Tensor,
    selection_tK: Tensor,
    local: Batch,
    batch: Batch,
    comm: Collectives,
    split: TokenSplit | None,
    cache: Cache,
    cache_split: CacheSplit,
    config: SFAConfig,
    implementation: Implementation,
) -> AttentionOutput:
    """Bring all queries here, attend to the rows that are here, send each rank its part, merge the parts."""
    assert batch.block_table_BU is not None
    request_M, q_MHE, selection_MK = batch.request_T, q_tHE, selection_tK
    if split is not None:
        request_M = split.scatter(batch.request_T, fill=-1)
        q_MHE, selection_MK = comm.all_gather(q_tHE), comm.all_gather(selection_tK)
    mine_MK = cache_split.local_selection(selection_MK, comm.rank)
    table_BU = cache_split.local_block_table(batch.block_table_BU)
    part = sparse_attention(
        q_MHE,
        cache_rows(cache),
        _row_numbers(table_BU, request_M, mine_MK, _block_size(cache)),
        scale=config.softmax_scale,
        value_dim=config.kv_lora_rank,
        implementation=implementation,
    )
    packed = torch.cat([part.out_THL.to(wide(q_tHE.dtype)), part.lse_TH[..., None]], dim=-1)
    packed = comm.all_gather(packed) if split is None else comm.all_to_all(packed)
    parts = [AttentionOutput(x[..., :-1], x[..., -1]) for x in packed.unflatten(0, (comm.size, -1)).unbind(0)]
    out_tHL, lse_tH = merge_attention(parts)
    return AttentionOutput(out_tHL.to(q_tHE.dtype), lse_tH)


def _attend_by_blocks(
    q_tHE: Tensor,
    selection_tK: Tensor,
    local: Batch,
    batch: Batch,
    comm: Collectives,
    split: TokenSplit | None,
    cache: Cache,
    cache_split: CacheSplit,
    config: SFAConfig,
    implementation: Implementation,
) -> AttentionOutput:
    """Bring the pages of the batch here from all ranks, and attend as if there were one."""
    assert batch.block_table_BU is not None
    size = _block_size(cache)
    page_M, table_BU = compact_block_table(cache_split.local_block_table(batch.block_table_BU), cache_split.num_ranks)
    rows = cache_rows(cache)
    parts = (rows.latent_SL, rows.rope_SR) if isinstance(rows, SplitRows) else (rows,)
    pages = [part.unflatten(0, (-1, size)).index_select(0, page_M).flatten(0, 1) for part in parts]
    gathered = gather_rows_start(comm, *pages).wait()
    joined: Rows = gathered[0] if len(gathered) == 1 else SplitRows(latent_SL=gathered[0], rope_SR=gathered[1])
    position_tK = cache_split.gathered_position(selection_tK, block_size=size)
    return sparse_attention(
        q_tHE,
        joined,
        _row_numbers(table_BU, local.request_T, position_tK, size),
        scale=config.softmax_scale,
        value_dim=config.kv_lora_rank,
        implementation=implementation,
    )


def _check(
    params: LayerParams,
    x_tD: Tensor,
    batch: Batch,
    comm: Collectives,
    *,
    config: SFAConfig,
    split: TokenSplit | None,
    cache: Cache | None,
    selection: Tensor | None,
    select: Selector | None,
    weights: str,
    cache_split: CacheSplit | None,
    cache_exchange: str,
    implementation: Implementation,
    donate: bool,
) -> None:
    function = "context_parallel_layer"
    known = implementation is None or callable(implementation)
    if not known and not (isinstance(implementation, str) and not explain_implementation(implementation)):
        raise refuse(function, implementation)
    local = batch
    if split is not None:
        require(split.num_ranks == comm.size, function, f"split must be for {comm.size} ranks", split.num_ranks)
        tokens = batch.position_T.shape[0]
        require(split.num_tokens == tokens, function, f"split must be of the batch's {tokens} tokens", split.num_tokens)
        local = split.local_batch(batch, comm.rank)
    check_layer(function, params, x_tD, local, cache=cache, selection=selection, select=select)
    known = weights in ("local", "gathered", "exchanged")
    require(known, function, "weights must be 'local', 'gathered' or 'exchanged'", repr(weights))
    heads = config.num_attention_heads
    if weights == "exchanged":
        rule = f"weights='exchanged' needs ranks that divide {heads} heads"
        require(heads % comm.size == 0, function, rule, comm.size)
        require(split is not None, function, "weights='exchanged' needs tokens that are dealt out", None)
    shapes = dict(param_shapes(config))
    if weights == "exchanged":
        shapes["o_proj"] = (config.hidden_size, heads * config.v_head_dim // comm.size)
    if weights == "gathered":
        shapes |= {name: (-(-torch.Size(shapes[name]).numel() // comm.size),) for name in LARGE_FIELDS}
    for name, tensor in named_fields(params):
        fits = tuple(tensor.shape) == shapes[name]
        require(fits, function, f"{name} must be {list(shapes[name])} on each rank", list(tensor.shape))
        if name not in NORM_FIELDS and name != "indexer.weights_proj":  # these are read in float32
            require(tensor.dtype == x_tD.dtype, function, f"{name} must have x's dtype", tensor.dtype)
    known = cache_exchange in ("queries", "blocks")
    require(known, function, "cache_exchange must be 'queries' or 'blocks'", repr(cache_exchange))
    if cache_split is not None:
        require(cache is not None, function, "a cache_split needs a cache", None)
        ranks = cache_split.num_ranks
        require(ranks == comm.size, function, f"cache_split must be for {comm.size} ranks", ranks)
    if cache is not None:
        _check_cache(function, params, x_tD, batch, config, cache, cache_split, donate)


def _check_cache(
    function: str,
    params: LayerParams,
    x_tD: Tensor,
    batch: Batch,
    config: SFAConfig,
    cache: Cache,
    cache_split: CacheSplit | None,
    donate: bool,
) -> None:
    pools = [cache.kv] if isinstance(cache, JointCache) else [cache.latent, cache.rope]
    fits = sum(pool.shape[-1] for pool in pools) == config.key_width and all(p.dtype == x_tD.dtype for p in pools)
    got = [(pool.shape[-1], pool.dtype) for pool in pools]
    require(fits, function, f"the pool must hold {config.key_width} columns of {x_tD.dtype}", got)
    index_k = cache.index_k if params.indexer is not None else None
    if index_k is not None:
        want, found = (config.index_head_dim, x_tD.dtype), (index_k.shape[-1], index_k.dtype)
        require(found == want, function, f"the pool's index_k must hold {want[0]} columns of {want[1]}", found)
        pools.append(index_k)
    if donate:
        require_donatable(function, *pools)
    table_BU = batch.block_table_BU
    if table_BU is None or batch.row_S is None or table_BU.numel() == 0:
        return
    size = batch.row_S.shape[0] // table_BU.numel()
    sizes = [pool.shape[1] for pool in pools]
    require(set(sizes) == {size}, function, f"the pool's pages must have the batch's {size} rows", sizes)
    length_B, latent_BU = batch.seq_len_B, table_BU
    if cache_split is not None:
        latent_BU = cache_split.local_block_table(table_BU)
        length_B = cache_split.local_lengths(length_B).amax(0)
    if table_BU.device.type == "cpu":  # elsewhere it would wait
        validate_block_table(latent_BU, length_B.cpu(), block_size=size, num_blocks=pools[0].shape[0])
        if index_k is not None:
            lengths = batch.seq_len_B.cpu()
            validate_block_table(table_BU, lengths, block_size=size, num_blocks=index_k.shape[0])
