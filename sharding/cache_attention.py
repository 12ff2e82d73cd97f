"""Attention to a latent cache that is dealt out over ranks: send queries to the rows, or bring pages to the queries."""

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from sfa_functional import AttentionOutput, SFAConfig, merge_attention, sparse_attention, token_slots
from sfa_functional.implementation import Implementation
from sfa_functional.paged import Cache, JointCache, Rows, SplitRows, cache_rows
from sfa_functional.precision import wide

from .cache_ranges import CacheSplit, compact_block_table
from .collectives import Collectives, gather_rows_start


def attend_by_queries(
    q_tHE: Float[Tensor, "t H E"],
    selection_tK: Int32[Tensor, "t K"],
    cache: Cache,
    table_BU: Int32[Tensor, "B U"],
    request_M: Int[Tensor, " M"],
    comm: Collectives,
    *,
    cache_split: CacheSplit,
    dealt_out: bool,
    config: SFAConfig,
    implementation: Implementation = None,
) -> AttentionOutput:
    """Bring all queries here, attend to the rows that are here, give each rank its parts, and merge them.

    Args:
        q_tHE: this rank's queries.
        selection_tK: positions within their requests that they attend to; negative values are unused.
        cache: this rank's part of the pool.
        table_BU: pages of the sharded pool.
        request_M: request of every rank's queries, one rank after the other; of these queries alone where all have
            the same.
        comm: the ranks that share the cache.
        cache_split: which positions they hold.
        dealt_out: whether each rank has queries of its own; else all have the same.
        config: scale and L.
        implementation: of `sparse_attention`.

    Returns:
        `AttentionOutput` of this rank's queries.

    Gradients: of the queries and the pool.
    Cost: sends C·H·E values and C·K int32, each N - 1 times, then C·H·(L + 1) float32 values as often; where every
        rank has the same T queries only T·H·(L + 1), N - 1 times. The parts travel and are merged in float32.
    Source: the decode context parallelism of vllm-project/vllm-ascend; Dao et al., "FlashAttention" (2022), for the
        merge.
    """
    q_MHE, selection_MK = q_tHE, selection_tK
    if dealt_out:
        q_MHE, selection_MK = comm.all_gather(q_tHE), comm.all_gather(selection_tK)
    mine_MK = cache_split.local_selection(selection_MK, comm.rank)
    part = sparse_attention(
        q_MHE,
        cache_rows(cache),
        _row_numbers(table_BU, request_M, mine_MK, block_size(cache)),
        scale=config.softmax_scale,
        value_dim=config.kv_lora_rank,
        implementation=implementation,
    )
    packed = torch.cat([part.out_THL.to(wide(q_tHE.dtype)), part.lse_TH[..., None]], dim=-1)
    packed = comm.all_to_all(packed) if dealt_out else comm.all_gather(packed)
    by_rank = packed.unflatten(0, (comm.size, q_tHE.shape[0])).unbind(0)
    parts = [AttentionOutput(x[..., :-1], x[..., -1]) for x in by_rank]
    out_tHL, lse_tH = merge_attention(parts)
    return AttentionOutput(out_tHL.to(q_tHE.dtype), lse_tH)


def attend_by_blocks(
    q_tHE: Float[Tensor, "t H E"],
    selection_tK: Int32[Tensor, "t K"],
    cache: Cache,
    table_BU: Int32[Tensor, "B U"],
    request_t: Int[Tensor, " t"],
    comm: Collectives,
    *,
    cache_split: CacheSplit,
    config: SFAConfig,
    implementation: Implementation = None,
) -> AttentionOutput:
    """Bring the pages that a batch refers to here from all ranks, and attend as if there were one.

    Args:
        q_tHE: this rank's queries.
        selection_tK: positions within their requests that they attend to; negative values are unused.
        cache: this rank's part of the pool.
        table_BU: pages of the sharded pool.
        request_t: request of each query, -1 for none.
        comm: the ranks that share the cache.
        cache_split: which positions they hold.
        config: scale and L.
        implementation: of `sparse_attention`.

    Returns:
        `AttentionOutput` of this rank's queries.

    Gradients: of the queries and the pool.
    Cost: sends M pages of ``block_size`` rows of E values, N - 1 times, M being the distinct pages of the table; waits
        for the device to learn them.
    Source: the prefill over a sharded cache of vllm-project/vllm-ascend.
    """
    size = block_size(cache)
    page_M, gathered_BU = compact_block_table(table_BU, cache_split.num_ranks)
    rows = cache_rows(cache)
    parts = (rows.latent_SL, rows.rope_SR) if isinstance(rows, SplitRows) else (rows,)
    pages = [part.unflatten(0, (-1, size)).index_select(0, page_M).flatten(0, 1) for part in parts]
    everyones = gather_rows_start(comm, *pages).wait()
    joined: Rows = everyones[0] if len(everyones) == 1 else SplitRows(latent_SL=everyones[0], rope_SR=everyones[1])
    position_tK = cache_split.gathered_position(selection_tK, block_size=size)
    return sparse_attention(
        q_tHE,
        joined,
        _row_numbers(gathered_BU, request_t, position_tK, size),
        scale=config.softmax_scale,
        value_dim=config.kv_lora_rank,
        implementation=implementation,
    )


def block_size(cache: Cache) -> int:
    """Return how many rows a page of a pool has."""
    return (cache.kv if isinstance(cache, JointCache) else cache.latent).shape[1]


def _row_numbers(table_BU: Tensor, request_T: Tensor, position_TK: Tensor, size: int) -> Int32[Tensor, "T K"]:
    request_TK = request_T[:, None].expand_as(position_TK)
    rows = token_slots(table_BU, request_TK.flatten(), position_TK.flatten(), block_size=size)
    return rows.view(position_TK.shape).to(torch.int32)
