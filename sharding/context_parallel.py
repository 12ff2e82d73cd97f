"""The attention layer on many ranks: tokens dealt out, small keys gathered, everything else local.

Under context parallelism every rank runs all heads on its own tokens. What it needs of the others' tokens has no heads:
the latent key and the index key, a tenth of the hidden state. One gather brings both, packed; it is started as soon as
they exist and waited for just before the selection, so that the query projections hide it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.functional import pad

from sfa_functional import (
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
    npu,
    npu_rules,
    rope_cos_sin,
    split_kv_b,
    validate_block_table,
    write_cache,
)
from sfa_functional.implementation import Implementation, choose, refuse
from sfa_functional.layer import attend_positions, check_layer, choose_keys
from sfa_functional.paged import Cache, JointCache, Rows, cache_rows, index_rows, require_donatable
from sfa_functional.params import NORM_FIELDS, named_fields, param_shapes
from sfa_functional.precision import linear, matmul, require, without_autocast
from sfa_functional.selectors import Selector

from .cache_attention import attend_by_blocks, attend_by_queries, block_size
from .cache_ranges import CacheSplit
from .collectives import Collectives, gather_rows_start
from .rules import LARGE_FIELDS, Weights
from .tensor_parallel import heads_of_rank, require_params, with_all_heads
from .token_ranges import TokenSplit, local_lengths


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
    heads_comm: Collectives | None = None,
    while_gathering: Callable[[], object] | None = None,
) -> LayerOutput:
    """Run one attention layer on this rank's tokens: `sfa_layer` with the tokens dealt out over a mesh axis.

    `latent_keys`, `index_keys` -> one gather, started -> `latent_queries`, `index_queries` -> the gather waited for,
    keys put into global order -> `write_cache` -> `lightning_indexer` -> `sparse_attention` -> `latent_output`.

    Every query attends in the absorbed form, also where `sfa_layer` makes keys and values per head: a rank's queries
    of a prefill are few beside the keys of all ranks. Results differ from one rank's by rounding.

    Args:
        params: the layer's weights, in the form that ``weights`` names.
        x_tD: this rank's hidden states, C rows in the order of ``split``; padding rows may hold anything.
        batch: all tokens, the same on every rank.
        comm: the mesh axis.
        config: sizes and constants.
        split: who holds which tokens, from `split_tokens`. None: every rank holds all of them, in the batch's order
            (decode over a sharded cache).
        cache: the pool of pages, a copy on each rank; or, with ``cache_split``, this rank's part of the latents.
        selection: C rows of positions to attend to instead of scoring, from ``split.scatter(selection, fill=-1)``.
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
        heads_comm: the mesh axis over which heads are dealt out besides, ``Rules(tokens="cp", heads="tp")``; the
            weights are then those of this rank's heads, as `tensor_parallel_layer` takes them.
        while_gathering: called once, as soon as the gather of keys has started: the place to start fetching the next
            layer's weights, so that they do not compete with it for the link.

    Returns:
        `LayerOutput` of this rank's rows; padding rows hold zeros and select nothing. A given selection is returned as
        it came. The cache is this rank's.

    Raises:
        ValueError: what doesn't fit: rows, ranks, shapes of weights, heads that N does not divide, or as `sfa_layer`;
            before any collective starts, and the same on every rank. (What a selector itself refuses, it refuses
            when it is called.)

    Gradients: of x, the weights and the cache, summed over ranks as `collectives` says; none to the indexer, as in
        `sfa_layer`.
    Cost: per rank C of T tokens. Sends C·(E + I)·(N - 1) values in one gather (without I where there are no index keys;
        nothing where ``split`` is None). "gathered" sends each large matrix's shard N - 1 times; "exchanged"
        C·H·V·(N - 1)/N values by all_to_all and C·D·(N - 1) by reduce_scatter. A sharded cache adds what
        `attend_by_queries` or `attend_by_blocks` sends, a ``heads_comm`` an all_reduce of C·D values. The backward
        pass sends the transposed collectives, as much again.
    Source: the prefill context parallelism of vllm-project/vllm-ascend; merging by log-sum-exp as in Liu et al.,
        "Ring Attention" (2023).
    """
    if heads_comm is not None:
        config = heads_of_rank(config, heads_comm.size)
        select = None if select is None else with_all_heads(select, heads_comm)
        rule = "heads are dealt out over one axis: weights must be 'local' with a heads_comm"
        require(weights == "local", "context_parallel_layer", rule, repr(weights))
    local, table_BU = _check(
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
    with without_autocast(x_tD):
        named: Implementation = implementation if implementation is None or isinstance(implementation, str) else None
        local, implementation, named = _on_device(local, batch, comm, split, x_tD, implementation, named)
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
            slot_T = batch.slot_T
            if cache_split is not None and table_BU is not None:
                slot_T = cache_split.local_slots(
                    table_BU, batch.request_T, batch.position_T, comm.rank, block_size=block_size(cache)
                )
            cache = write_cache(
                cache, kv_TE, k_TI, slot_T, index_slot_T=batch.slot_T, donate=donate, implementation=named
            )
            kv_SE, k_SI = cache_rows(cache), index_rows(cache)

        if selection is None:
            rows = None if cache_split is not None else kv_SE
            selection = choose_keys(
                q_tJI, k_SI, w_tJ, q_tHE, rows, local, k=config.index_topk, select=select, implementation=named
            )
        if cache_split is None or cache is None or table_BU is None:
            result = attend_positions(q_tHE, kv_SE, selection, local, config=config, implementation=implementation)
        else:
            seen_tK = local_selection(global_selection(selection, local), local)
            shared: dict[str, Any] = {"cache_split": cache_split, "config": config, "implementation": implementation}
            if cache_exchange == "blocks":
                result = attend_by_blocks(q_tHE, seen_tK, cache, table_BU, local.request_T, comm, **shared)
            else:
                dealt_out = split is not None
                request_M = batch.request_T if split is None else split.scatter(batch.request_T, fill=-1)
                result = attend_by_queries(
                    q_tHE, seen_tK, cache, table_BU, request_M, comm, dealt_out=dealt_out, **shared
                )

        if weights == "exchanged":
            y_tD = _exchanged_output(whole, result.out_THL, comm, config)
        else:
            if large:
                whole = replace(whole, o_proj=large["o_proj"].wait())
            y_tD = latent_output(whole, result.out_THL, config=config)
        if heads_comm is not None:
            y_tD = heads_comm.all_reduce(y_tD)
        return LayerOutput(y_tD, selection, cache)


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
    Cost: a copy of the matrices that need padding.
    Source: the flat parameters of Zhao et al., "PyTorch FSDP" (2023), section 3.2.
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


def _on_device(
    local: Batch,
    batch: Batch,
    comm: Collectives,
    split: TokenSplit | None,
    x_tD: Tensor,
    implementation: Implementation,
    named: Implementation,
) -> tuple[Batch, Implementation, Implementation]:
    """Give Ascend's operators, which know requests but no ranges, the lengths of this rank's piece of them.

    A contiguous piece has them: row r of `local_lengths`. For any other layout None becomes "blockwise", where it
    would otherwise be tried; "npu" has been refused by now. Nothing waits for the device.
    """
    if split is None or not (named == "npu" or (named is None and npu.has_operators("choose_positions", x_tD))):
        return local, implementation, named
    ranges = split.contiguous_ranges()
    if ranges is None:
        return local, "blockwise" if implementation is None else implementation, "blockwise"
    start_N, end_N = (x.to(batch.seq_len_B.device) for x in ranges)
    query_end_NB, key_len_NB = local_lengths(batch.query_start_B1, batch.seq_len_B, start_N, end_N)
    query_start_B1 = pad(query_end_NB[comm.rank], (1, 0))
    return replace(local, query_start_B1=query_start_B1, seq_len_B=key_len_NB[comm.rank]), implementation, named


def _gather_large(params: LayerParams, comm: Collectives, config: SFAConfig) -> Mapping[str, _PendingMatrix]:
    shapes = param_shapes(config)
    return {name: _PendingMatrix(comm, getattr(params, name), shapes[name]) for name in LARGE_FIELDS}


def _exchanged_output(
    params: LayerParams, out_tHL: Tensor, comm: Collectives, config: SFAConfig
) -> Float[Tensor, "t D"]:
    """`latent_output` where each rank has the columns of its heads: values go there, sums of products come back."""
    _, w_uv_HVL = split_kv_b(params.kv_b_proj, config)
    value_tHV = matmul(out_tHL.transpose(0, 1), w_uv_HVL.mT).transpose(0, 1)
    mine_TX = comm.all_to_all(rearrange(value_tHV, "t (n h) v -> (n t) (h v)", n=comm.size))
    return comm.reduce_scatter(linear(mine_TX, params.o_proj))


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
) -> tuple[Batch, Int32[Tensor, "B U"] | None]:
    """Refuse what does not fit; return this rank's batch, and the pages of a sharded pool."""
    function = "context_parallel_layer"
    local = batch
    if implementation != "npu":
        choose(function, implementation)
    require(split is None or isinstance(split, TokenSplit), function, "split must be a TokenSplit or None", repr(split))
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
    require_params(function, params, shapes)
    for name, tensor in named_fields(params):
        if name not in NORM_FIELDS and name != "indexer.weights_proj":  # these are read in float32
            require(tensor.dtype == x_tD.dtype, function, f"{name} must have x's dtype", tensor.dtype)
    known = cache_exchange in ("queries", "blocks")
    require(known, function, "cache_exchange must be 'queries' or 'blocks'", repr(cache_exchange))
    if cache_split is not None:
        require(cache is not None, function, "a cache_split needs a cache", None)
        ranks = cache_split.num_ranks
        require(ranks == comm.size, function, f"cache_split must be for {comm.size} ranks", ranks)
    if implementation == "npu":
        reasons = npu_rules.explain_layer(
            params,
            x_tD,
            local,
            config=config,
            cache=cache,
            selection=selection,
            select=select,
            num_keys=batch.position_T.shape[0],
            fused=False,
        )
        if split is not None and split.contiguous_ranges() is None:
            rule = "only the 'contiguous' layout has lengths per rank, others run as 'blockwise'"
            reasons.append(f"{rule}; got another, or a split that is not on the CPU")
        if reasons:
            raise refuse(function, implementation, reasons)
    if cache is None:
        return local, None
    return local, _check_cache(function, params, x_tD, batch, config, cache, cache_split, donate)


def _check_cache(
    function: str,
    params: LayerParams,
    x_tD: Tensor,
    batch: Batch,
    config: SFAConfig,
    cache: Cache,
    cache_split: CacheSplit | None,
    donate: bool,
) -> Int32[Tensor, "B U"] | None:
    """Refuse pools and pages that the batch's tokens do not fit; return the table of the latents' pages."""
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
        return table_BU
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
    return latent_BU
