"""The indexer's loss in tiles of queries, forward and backward: over all visible keys, or over a selection of them.

A tile's keys are a span of rows that its queries share, read a run at a time, or rows of each query's own. Rows that
are not finite enter no product; they mark the queries that see them with NaN, one value per query and key.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .blockwise_sparse import add_rows
from .paged import SplitRows, fetch_rows, num_rows
from .precision import product, product_dtype, wide
from .tiles import KEY_TILE, finite_rows, key_tile, key_tiles, may_hold, queries_per_step, query_tiles, visible

Keys = tuple[int, int] | Tensor
"""A span of key rows, or the numbers [t, K] of each query's own, -1 where there is none."""


def indexer_kl(
    q_TJI: Tensor,
    k_SI: Tensor,
    w_TJ: Tensor,
    q_THE: Tensor,
    kv: Tensor | SplitRows,
    start_T: Tensor,
    end_T: Tensor,
    topk_TK: Tensor | None,
    *,
    scale: float,
    workspace_bytes: int,
) -> Tensor:
    """Return each query's divergence. See `losses.indexer_kl`."""
    kl_T = torch.zeros(q_TJI.shape[0], dtype=wide(q_TJI.dtype), device=q_TJI.device)
    for queries, keys, member_tK in _tiles(q_TJI, k_SI, q_THE, start_T, end_T, topk_TK, workspace_bytes):
        p_tK = _mean_weights(q_THE[queries], kv, keys, member_tK, scale=scale)
        score_tK = _scores(q_TJI[queries], k_SI, w_TJ[queries], keys, member_tK)
        kl_T[queries], _ = _divergence(p_tK.to(score_tK.dtype), score_tK, member_tK)
    return kl_T


def indexer_kl_backward(
    q_TJI: Tensor,
    k_SI: Tensor,
    w_TJ: Tensor,
    q_THE: Tensor,
    kv: Tensor | SplitRows,
    start_T: Tensor,
    end_T: Tensor,
    topk_TK: Tensor | None,
    d_kl_T: Tensor,
    *,
    scale: float,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k (summed wide) and w: ``g = d_kl · (π - p)``, both computed again, then

    ``dw = relu(q·k) g``, ``dz = g w`` where ``q·k > 0``, ``dq = dz k``, ``dk = dzᵀ q``.
    """
    dq_TJI, dw_TJ = q_TJI.new_zeros(q_TJI.shape), w_TJ.new_zeros(w_TJ.shape)
    dk_SI = k_SI.new_zeros(k_SI.shape, dtype=wide(k_SI.dtype))
    for queries, keys, member_tK in _tiles(q_TJI, k_SI, q_THE, start_T, end_T, topk_TK, workspace_bytes):
        p_tK = _mean_weights(q_THE[queries], kv, keys, member_tK, scale=scale)
        score_tK = _scores(q_TJI[queries], k_SI, w_TJ[queries], keys, member_tK)
        _, g_tK = _divergence(p_tK.to(score_tK.dtype), score_tK, member_tK)
        g_tK *= torch.where(g_tK.any(-1), d_kl_T[queries], 0)[:, None]
        idle_t = ~g_tK.any(-1)  # gives no gradient, and what stands in it must not meet the zeros of a product
        q_tJI, w_tJ1 = q_TJI[queries].masked_fill(idle_t[:, None, None], 0), w_TJ[queries, :, None].to(g_tK.dtype)
        w_tJ1 = w_tJ1.masked_fill(idle_t[:, None, None], 0)
        dq_tJI, dw_tJ1 = torch.zeros_like(q_tJI, dtype=g_tK.dtype), torch.zeros_like(w_tJ1)
        for columns, index, k, _ in _runs(k_SI, keys, product_dtype(q_TJI)):
            heads_tJk, g_tk1 = product(q_tJI, k.mT).relu_(), g_tK[:, columns, None]
            dw_tJ1 += heads_tJk @ g_tk1
            dz_tJk = torch.sign(heads_tJk, out=heads_tJk).mul_(w_tJ1).mul_(g_tk1.mT)
            dq_tJI += product(dz_tJk, k)
            if isinstance(index, slice):
                dk_SI[index] += product(dz_tJk.flatten(0, 1).mT, q_tJI.flatten(0, 1))
            else:
                add_rows(dk_SI, index, product(dz_tJk.mT, q_tJI))
        dq_TJI[queries], dw_TJ[queries] = dq_tJI, dw_tJ1[..., 0]
    return dq_TJI, dk_SI, dw_TJ


def mean_weights(
    q_tHE: Tensor,
    kv: Tensor | SplitRows,
    start_t: Tensor,
    end_t: Tensor,
    row_S: Tensor | None,
    *,
    low: int,
    high: int,
    scale: float,
) -> Tensor:
    """Return the attention weights of a tile over its span of keys, averaged over heads: [t, span].

    Rows that are not finite make the weights of the queries that see them NaN, and no others.
    """
    member_ts = visible(torch.arange(low, high, device=start_t.device), start_t, end_t)
    if row_S is not None:
        member_ts &= (row_S[low:high] >= 0) & (row_S[low:high] < num_rows(kv))
    p_ts = _mean_weights(q_tHE, kv, (low, high), member_ts, scale=scale, row_S=row_S)
    return p_ts.masked_fill_(p_ts.isnan().any(-1, keepdim=True), torch.nan)


def _tiles(
    q_TJI: Tensor,
    k_SI: Tensor,
    q_THE: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    topk_TK: Tensor | None,
    workspace_bytes: int,
) -> Iterator[tuple[slice, Keys, Tensor]]:
    """Cut queries into tiles, each with its keys and which of these count for which query."""
    heads, itemsize, num_keys = q_TJI.shape[1] + q_THE.shape[1], wide(q_TJI.dtype).itemsize, k_SI.shape[0]
    if topk_TK is None:
        limit = max(1, workspace_bytes // max(1, itemsize * heads * max(num_keys, KEY_TILE)))
        for queries, span in query_tiles(start_T, end_T, num_keys, limit):
            yield queries, span, visible(torch.arange(*span, device=k_SI.device), start_T[queries], end_T[queries])
        return
    width = heads + q_THE.shape[2] + 2 * q_TJI.shape[2]
    step = queries_per_step(2 * itemsize * topk_TK.shape[1] * width, q_TJI.device, workspace_bytes)
    for first in range(0, q_TJI.shape[0], step):
        queries = slice(first, min(first + step, q_TJI.shape[0]))
        topk_tK = topk_TK[queries]
        member_tK = (topk_tK >= start_T[queries, None]) & (topk_tK < end_T[queries, None])
        member_tK &= (topk_tK >= 0) & (topk_tK < num_keys)
        yield queries, topk_tK.masked_fill(~member_tK, -1), member_tK


def _runs(
    rows: Tensor | SplitRows, keys: Keys, dtype: torch.dtype, row_S: Tensor | None = None
) -> Iterator[tuple[slice, slice | Tensor, Tensor, Tensor | None]]:
    """Read a tile's keys: columns of the tile, where their rows are, the rows, and which are not finite (None: none).

    Those are zeros here.
    """
    parts: Iterable[tuple[slice, slice | Tensor, Tensor]]
    if isinstance(keys, Tensor):
        parts = [(slice(0, keys.shape[1]), keys, fetch_rows(rows, keys))] if keys.shape[1] else []
    else:
        low, runs = keys[0], key_tiles(keys)
        parts = ((slice(k.start - low, k.stop - low), k, key_tile(rows, k, row_S)[0]) for k in runs)
    for columns, index, part in parts:
        spoiled = ~finite_rows(part)
        if may_hold(spoiled):
            yield columns, index, part.masked_fill(spoiled[..., None], 0).to(dtype), spoiled
        else:
            yield columns, index, part.to(dtype), None


def _mean_weights(
    q_tHE: Tensor,
    kv: Tensor | SplitRows,
    keys: Keys,
    member_tK: Tensor,
    *,
    scale: float,
    row_S: Tensor | None = None,
) -> Tensor:
    """Return the softmax over the members, averaged over heads; NaN where a member's row is not finite."""
    spoiled_tK = None
    z_tHK = torch.empty(*q_tHE.shape[:2], member_tK.shape[1], dtype=wide(q_tHE.dtype), device=q_tHE.device)
    for columns, _, rows, spoiled in _runs(kv, keys, product_dtype(q_tHE), row_S):
        z_tHK[..., columns] = product(q_tHE, rows.mT)
        if spoiled is not None:
            spoiled_tK = torch.zeros_like(member_tK) if spoiled_tK is None else spoiled_tK
            spoiled_tK[:, columns] = spoiled & member_tK[:, columns]
    z_tHK.mul_(scale).masked_fill_(~member_tK[:, None], -torch.inf)
    p_tK = torch.softmax(z_tHK, dim=-1, out=z_tHK).mean(1).masked_fill_(~member_tK, 0)
    return p_tK if spoiled_tK is None else p_tK.masked_fill_(spoiled_tK, torch.nan)


def _scores(q_tJI: Tensor, k_SI: Tensor, w_tJ: Tensor, keys: Keys, member_tK: Tensor) -> Tensor:
    """Score a tile's keys; NaN where a key is not finite."""
    score_tK = torch.empty(member_tK.shape, dtype=wide(q_tJI.dtype), device=q_tJI.device)
    w_t1J = w_tJ[:, None].to(score_tK.dtype)
    for columns, _, rows, spoiled in _runs(k_SI, keys, product_dtype(q_tJI)):
        score_tK[:, columns] = (w_t1J @ product(q_tJI, rows.mT).relu_())[:, 0]
        if spoiled is not None:
            score_tK[:, columns].masked_fill_(spoiled, torch.nan)
    return score_tK


def _divergence(p_tK: Tensor, score_tK: Tensor, member_tK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``Σ p (ln p - ln π)`` over the members and its derivative ``π - p`` by the scores.

    Zero where there is at most one member. NaN among a query's members makes its value NaN and its derivative zero.
    """
    trained_t1 = member_tK.sum(-1, keepdim=True) > 1
    spoiled_t1 = trained_t1 & (member_tK & (p_tK.isnan() | score_tK.isnan())).any(-1, keepdim=True)
    aside_tK = ~(member_tK & trained_t1 & ~spoiled_t1)
    p_tK = p_tK.masked_fill(aside_tK, 0)
    log_pi_tK = torch.log_softmax(score_tK.masked_fill(aside_tK, -torch.inf), dim=-1).masked_fill_(aside_tK, 0)
    kl_t = (torch.xlogy(p_tK, p_tK) - p_tK * log_pi_tK).sum(-1)
    return kl_t.masked_fill_(spoiled_t1[:, 0], torch.nan), log_pi_tK.exp_().sub_(p_tK).masked_fill_(aside_tK, 0)
