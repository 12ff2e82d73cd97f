"""The indexer: scores in tiles of queries and keys, and the k best of them by an exact rule."""

import torch
from torch import Tensor

from .precision import product, product_dtype, wide
from .tiles import (
    KEY_TILE,
    all_finite,
    finite_rows,
    key_tile,
    key_tiles,
    keys_per_run,
    queries_per_step,
    query_tiles,
    visible,
)

FEW_ROWS = 64
"""Queries and heads up to which keys are the left side of their product: of one query, 64K keys take a third less."""


def lightning_indexer(
    q_TJI: Tensor,
    k_SI: Tensor,
    w_TJ: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    row_S: Tensor | None,
    *,
    k: int,
    workspace_bytes: int,
) -> Tensor:
    """Score and select, a tile of queries at a time. See `indexer.lightning_indexer`."""
    num_keys = k_SI.shape[0] if row_S is None else row_S.shape[0]
    start_T, end_T = start_T.clamp(0, num_keys), end_T.clamp(0, num_keys)
    topk_TK = torch.full((q_TJI.shape[0], k), -1, dtype=torch.int32, device=q_TJI.device)
    itemsize = wide(q_TJI.dtype).itemsize
    limit = queries_per_step(q_TJI.shape[1] * KEY_TILE * itemsize, q_TJI.device, workspace_bytes)
    limit = max(1, min(limit, workspace_bytes // max(1, 8 * num_keys * itemsize)))  # scores, and what selecting takes
    for queries, (low, high) in query_tiles(start_T, end_T, num_keys, limit):
        start_t, end_t = start_T[queries] - low, end_T[queries] - low
        if high - low <= k:  # every visible key is chosen, whatever it scores
            column_tK = start_t[:, None] + torch.arange(k, device=start_t.device)
            chosen_tK = torch.where(column_tK < end_t[:, None], column_tK, -1)
        else:
            score_ts = tile_scores(q_TJI[queries], k_SI, w_TJ[queries], (low, high), row_S)
            chosen_tK = choose(score_ts, start_t, end_t, k=k)
        topk_TK[queries] = torch.where(chosen_tK >= 0, chosen_tK + low, -1)
    return topk_TK


def tile_scores(q_tJI: Tensor, k_SI: Tensor, w_tJ: Tensor, span: tuple[int, int], row_S: Tensor | None) -> Tensor:
    """Score a span of keys for a tile of queries: `index_scores`, a run of keys at a time. NaN: not there, not finite.

    One product for all heads of all queries, relu in place, then a product of each query's weights with its heads:
    an einsum over all three takes six times as long.
    """
    queries, heads, _ = q_tJI.shape
    score_ts = torch.empty(queries, span[1] - span[0], dtype=wide(q_tJI.dtype), device=q_tJI.device)
    q_nI, w_t1J = q_tJI.flatten(0, 1).to(product_dtype(q_tJI)), w_tJ[:, None].to(score_ts.dtype)
    run = keys_per_run(queries * heads, k_SI.shape[1], score_ts.dtype.itemsize)
    for keys in key_tiles(span, run):
        k_kI, known_k = key_tile(k_SI, keys, row_S)
        heads_nk = product(q_nI, k_kI.mT) if len(q_nI) > FEW_ROWS else product(k_kI, q_nI.mT).mT
        lost_k = None if known_k is None else ~known_k
        if heads_nk.device.type != "cpu" or not all_finite(heads_nk[0]):  # a key that isn't finite shows here
            lost_k = ~finite_rows(k_kI) if lost_k is None else lost_k | ~finite_rows(k_kI)
        score_tk = (w_t1J @ heads_nk.relu_().unflatten(0, (queries, heads)))[:, 0]
        score_tk = score_tk if lost_k is None else score_tk.masked_fill_(lost_k, torch.nan)
        score_ts[:, keys.start - span[0] : keys.stop - span[0]] = score_tk
        del heads_nk  # the next run finds its memory still in the cache
    return score_ts


def choose(score_ts: Tensor, start_t: Tensor, end_t: Tensor, *, k: int) -> Tensor:
    """Choose as `select_topk` does, for ranges within the tile; quickly on a CPU where no tie has to be broken.

    That is where all queries see more than k keys and exactly k scores reach the k-th highest. A NaN ranks first in
    ``topk``, so its smallest value tells of one. Scores of keys that not all queries see are overwritten.
    """
    if score_ts.device.type == "cpu" and score_ts.numel() and bool((end_t - start_t > k).all()):
        low, high = int(start_t.amax()), int(end_t.amin())
        for edge in (slice(0, low), slice(high, None)):  # the rest is visible to all
            seen_ts = visible(torch.arange(score_ts.shape[1])[edge], start_t, end_t)
            score_ts[:, edge].masked_fill_(~seen_ts, -torch.inf)
        kth_t1 = score_ts.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        best_n2 = (score_ts >= kth_t1).nonzero()
        if len(best_n2) == k * len(score_ts) and bool((kth_t1 > -torch.inf).all()):
            return best_n2[:, 1].unflatten(0, (-1, k))
    return select_topk(score_ts, start_t, end_t, k=k)


def index_scores(q_TJI: Tensor, k_SI: Tensor, w_TJ: Tensor) -> Tensor:
    """Score keys for a tile of queries, [S, I] of all or [t, K, I] of each. See `indexer.index_scores`.

    Rows that are not finite are taken out of the shared product and put back as NaN: in the backward of a product
    their zero gradients would still meet a NaN.
    """
    dtype = wide(q_TJI.dtype)
    finite_S = finite_rows(k_SI)
    k_SI = torch.where(finite_S[..., None], k_SI, 0).to(dtype)
    heads_TJS = torch.relu(q_TJI.to(dtype) @ k_SI.mT)
    score_TS = (w_TJ.to(dtype)[:, None] @ heads_TJS)[:, 0]
    return torch.where(finite_S, score_TS, torch.nan)


def select_topk(score_TS: Tensor, start_T: Tensor, end_T: Tensor, *, k: int) -> Tensor:
    """Choose the k best visible keys by the k-th value. See `indexer.select_topk`."""
    num_keys = score_TS.shape[1]
    s_S = torch.arange(num_keys, device=score_TS.device)
    visible_TS = visible(s_S, start_T, end_T)
    if num_keys <= k:
        return compact(visible_TS, k)
    eligible_TS = visible_TS & ~score_TS.isnan()
    rank_TS = torch.where(eligible_TS, score_TS, -torch.inf)
    kth_T1 = rank_TS.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_TS = eligible_TS & (rank_TS > kth_T1)
    level_TS = eligible_TS & (rank_TS == kth_T1)
    room_T1 = k - above_TS.sum(-1, keepdim=True)
    best_TS = above_TS | (level_TS & (level_TS.cumsum(-1) <= room_T1))
    few_T1 = visible_TS.sum(-1, keepdim=True) <= k
    return compact(torch.where(few_T1, visible_TS, best_TS), k)


def compact(chosen_TS: Tensor, k: int) -> Tensor:
    """List the true columns of every row (at most k) in ascending order, then -1, as int32."""
    place_TS = torch.where(chosen_TS, chosen_TS.cumsum(-1) - 1, k)
    column_TS = torch.arange(chosen_TS.shape[1], device=chosen_TS.device, dtype=torch.int32).expand_as(place_TS)
    return column_TS.new_full((chosen_TS.shape[0], k + 1), -1).scatter(1, place_TS, column_TS)[:, :k]
