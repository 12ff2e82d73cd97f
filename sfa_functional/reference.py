"""The oracle: one query at a time, written like the paper, mapped over all queries with ``torch.func.vmap``.

Nothing here is fast, and nothing here is shared with the code that it judges. A function of this file takes key rows
as one [S, E] tensor; memory is bounded by mapping as many queries at once as keep the copied rows below 2^24 values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap


def attend(q_HE: Tensor, kv_KE: Tensor, valid_K: Tensor, *, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    """Attend from one query to the valid rows.

    z = scale · q kvᵀ;  lse = ln Σ e^z;  out = Σ e^(z - lse) · kv[:, :value_dim]  (DeepSeek-V2, 2024, eq. 10).
    No valid row: out 0, lse -inf. A valid row that is not finite: NaN.
    """
    finite_K, any_valid = kv_KE.isfinite().all(-1), valid_K.any()
    rows_KE = torch.where((valid_K & finite_K)[:, None], kv_KE, 0)
    z_HK = scale * (_wide(torch.where(any_valid, q_HE, 0)) @ rows_KE.T)
    z_HK = torch.where(valid_K | ~any_valid, z_HK, -torch.inf)
    lse_H = torch.logsumexp(z_HK, dim=-1)
    p_HK = torch.where(valid_K, torch.exp(z_HK - lse_H[:, None]), 0)
    out_HL = (p_HK @ rows_KE[:, :value_dim]).to(q_HE.dtype)
    spoiled = (valid_K & ~finite_K).any()
    lse_H = torch.where(any_valid, lse_H, -torch.inf)
    return torch.where(spoiled, torch.nan, out_HL), torch.where(spoiled, torch.nan, lse_H)


def sparse_attention(
    q_THE: Tensor, kv_SE: Tensor, topk_TK: Tensor, *, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend from every query to the rows it selected; any number outside [0, S) is unused."""
    num_rows, kv_SE = kv_SE.shape[0], _wide(kv_SE)
    if num_rows == 0:
        kv_SE, topk_TK = torch.cat([kv_SE, kv_SE.new_zeros(1, kv_SE.shape[1])]), torch.full_like(topk_TK, -1)

    def one(q_HE: Tensor, topk_K: Tensor) -> tuple[Tensor, Tensor]:
        valid_K = (topk_K >= 0) & (topk_K < num_rows)
        rows_KE = kv_SE[torch.where(valid_K, topk_K, 0).long()]
        return attend(q_HE, rows_KE, valid_K, scale=scale, value_dim=value_dim)

    return _map(one, topk_TK.shape[1] * kv_SE.shape[1], q_THE, topk_TK)


def dense_attention(
    q_THE: Tensor, kv_SE: Tensor, start_T: Tensor, end_T: Tensor, *, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend from every query to all rows that it sees, start <= row < end."""
    s_S, kv_SE = torch.arange(kv_SE.shape[0], device=kv_SE.device), _wide(kv_SE)

    def one(q_HE: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q_HE, kv_SE, (s_S >= start) & (s_S < end), scale=scale, value_dim=value_dim)

    return _map(one, kv_SE.numel(), q_THE, start_T, end_T)


def index_score(q_JI: Tensor, k_SI: Tensor, w_J: Tensor) -> Tensor:
    """Score all keys for one query: Σ_j w_j · relu(q_j · k_s)  (DeepSeek-V3.2-Exp report, 2025, eq. 1).

    A key that is not finite scores NaN.
    """
    heads_JS = torch.relu(_wide(q_JI) @ _wide(k_SI).T)
    return torch.where(k_SI.isfinite().all(-1), w_J.to(heads_JS.dtype) @ heads_JS, torch.nan)


def select(score_S: Tensor, start: Tensor, end: Tensor, *, k: int) -> Tensor:
    """Choose k visible keys for one query: highest score, then lowest row; all of them where there are at most k."""
    num_rows = score_S.shape[0]
    row_S = torch.arange(num_rows, device=score_S.device)
    visible_S = (row_S >= start) & (row_S < end)
    few = visible_S.sum() <= k
    eligible_S = visible_S & (few | ~score_S.isnan())
    by_score_S = torch.where(few | ~eligible_S, 0, score_S).argsort(descending=True, stable=True)
    eligible_first_S = eligible_S[by_score_S].to(torch.int8).argsort(descending=True, stable=True)
    best_K = by_score_S[eligible_first_S][:k]
    best_K = torch.where(eligible_S[best_K], best_K, num_rows).sort().values
    best_K = torch.where(best_K < num_rows, best_K, -1)
    return torch.nn.functional.pad(best_K, (0, k - best_K.shape[0]), value=-1).to(torch.int32)


def select_topk(score_TS: Tensor, start_T: Tensor, end_T: Tensor, *, k: int) -> Tensor:
    """Choose k visible keys for every query."""
    return _map(lambda score, start, end: select(score, start, end, k=k), score_TS.shape[1], score_TS, start_T, end_T)


def lightning_indexer(q_TJI: Tensor, k_SI: Tensor, w_TJ: Tensor, start_T: Tensor, end_T: Tensor, *, k: int) -> Tensor:
    """Score all keys and choose k visible ones, for every query."""

    def one(q_JI: Tensor, w_J: Tensor, start: Tensor, end: Tensor) -> Tensor:
        return select(index_score(q_JI, k_SI, w_J), start, end, k=k)

    return _map(one, k_SI.shape[0] * q_TJI.shape[1], q_TJI, w_TJ, start_T, end_T)


def _wide(x: Tensor) -> Tensor:
    """Cast to the dtype of sums. Keys are cast once for all queries, so that their gradients are summed in it too."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _map(one: Any, size: int, *per_query: Tensor) -> Any:
    """Apply a function of one query to all, at most 2^24 / size at once.

    No queries are one blank query, of zeros that see and select nothing, whose result is cut off.
    """
    if per_query[0].shape[0] == 0:
        blank = (x.new_full((1, *x.shape[1:]), 0 if x.is_floating_point() else -1) for x in per_query)
        result = _map(one, size, *(torch.cat([x, row]) for x, row in zip(per_query, blank, strict=True)))
        return tuple(x[:0] for x in result) if isinstance(result, tuple) else result[:0]
    return vmap(one, chunk_size=max(1, 2**24 // max(size, 1)))(*per_query)
