"""The oracle: one query at a time, written like the paper, mapped over all queries with ``torch.func.vmap``.

Nothing here is fast, and nothing here is shared with the code that it judges. A function of this file takes key rows
as one [S, E] tensor; memory is bounded by mapping as many queries at once as keep the copied rows below 2^24 values.
"""

import torch
from torch import Tensor
from torch.func import vmap


def attend(q_HE: Tensor, kv_KE: Tensor, valid_K: Tensor, *, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    """Attend from one query to the valid rows.

    z = scale · q kvᵀ;  lse = ln Σ e^z;  out = Σ e^(z - lse) · kv[:, :value_dim]  (DeepSeek-V2, 2024, eq. 10).
    """
    rows_KE = torch.where(valid_K[:, None], kv_KE, 0)
    z_HK = scale * (_wide(q_HE) @ rows_KE.T)
    any_valid = valid_K.any()
    z_HK = torch.where(valid_K | ~any_valid, z_HK, -torch.inf)
    lse_H = torch.logsumexp(z_HK, dim=-1)
    p_HK = torch.where(valid_K, torch.exp(z_HK - lse_H[:, None]), 0)
    out_HL = p_HK @ rows_KE[:, :value_dim]
    return out_HL.to(q_HE.dtype), torch.where(any_valid, lse_H, -torch.inf)


def sparse_attention(
    q_THE: Tensor, kv_SE: Tensor, topk_TK: Tensor, *, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend from every query to the rows it selected; any number outside [0, S) is unused."""
    num_rows, kv_SE = kv_SE.shape[0], _wide(kv_SE)
    if num_rows == 0:
        kv_SE, topk_TK = kv_SE.new_zeros(1, kv_SE.shape[1]), torch.full_like(topk_TK, -1)

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
    """Score all keys for one query: Σ_j w_j · relu(q_j · k_s)  (DeepSeek-V3.2-Exp report, 2025, eq. 1)."""
    heads_JS = torch.relu(_wide(q_JI) @ _wide(k_SI).T)
    return w_J.to(heads_JS.dtype) @ heads_JS


def select(score_S: Tensor, start: Tensor, end: Tensor, *, k: int) -> Tensor:
    """Choose k visible keys for one query: highest score, then lowest row; all of them where there are at most k."""
    row_S = torch.arange(score_S.shape[0], device=score_S.device)
    visible_S = (row_S >= start) & (row_S < end)
    few = visible_S.sum() <= k
    eligible_S = visible_S & (few | ~score_S.isnan())
    rank_S = torch.where(few | ~eligible_S, 0, score_S)
    by_score = rank_S.argsort(descending=True, stable=True)
    chosen = by_score[eligible_S[by_score].logical_not().to(torch.int8).argsort(stable=True)][:k]
    chosen = torch.where(eligible_S[chosen], chosen, score_S.shape[0]).sort().values
    chosen = torch.where(chosen < score_S.shape[0], chosen, -1)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[0]), value=-1).to(torch.int32)


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


def _map(one, size: int, *per_query: Tensor):  # type: ignore[no-untyped-def]
    """Apply a function of one query to all, at most 2^24 / size at once; no queries are one blank query, cut off."""
    count = per_query[0].shape[0]
    if count == 0:
        blank = [x.new_zeros(1, *x.shape[1:]) for x in per_query]
        return torch.utils._pytree.tree_map(lambda x: x[:0], _map(one, size, *blank))
    return vmap(one, chunk_size=max(1, 2**24 // max(size, 1)))(*per_query)
