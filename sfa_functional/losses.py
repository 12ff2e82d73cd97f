"""The indexer's training loss: how far its softmax is from the attention that it should predict."""

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from . import blockwise
from .paged import Rows, fetch_rows, map_rows, num_rows, require_rows_fit
from .precision import require, require_float, require_integers, require_rows, wide, without_autocast


def indexer_kl(
    q_TJI: Float[Tensor, "T J I"],
    k_SI: Float[Tensor, "S I"],
    w_TJ: Float[Tensor, "T J"],
    q_THE: Float[Tensor, "T H E"],
    kv_SE: Rows,
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    *,
    scale: float,
    topk_TK: Int32[Tensor, "T K"] | None = None,
) -> Float[Tensor, " T"]:
    """Return each query's divergence of the indexer's softmax from the attention's mean over heads.

    Over the set A_t of keys that query t sees, or of the entries of ``topk_TK[t]`` that it sees:
    ``p[s] = mean_h softmax_{s in A}(scale · q[t, h] · kv[s])`` (a constant),
    ``π[s] = softmax_{s in A}(score[t, s])`` with the scores of `index_scores`,
    ``kl[t] = Σ_{s in A} p (ln p - ln π)``, ``0 ln 0 = 0``; no epsilon and no clipping.

    Args:
        q_TJI: indexer queries; detach what enters `index_queries`, so that only the indexer learns.
        k_SI: index keys, likewise.
        w_TJ: weights from `index_weights`, constants included.
        q_THE: absorbed queries of attention.
        kv_SE: latent key rows.
        start_T: first visible key row of each query.
        end_T: one past the last.
        scale: of the attention logits, ``config.softmax_scale``.
        topk_TK: a selection of key rows (the sparse stage), or None for all visible keys (the warm-up). With a
            selection the softmax of each head is taken over A and then averaged.

    Returns:
        kl_T, >= 0 up to rounding, in float32 (float64 for float64 q); 0 where A has at most one key. The caller
        averages and weights.

    Raises:
        ValueError: shapes or dtypes that don't fit.

    Gradients: of q_TJI, k_SI and w_TJ: ``d score = (π - p) · d kl``. None reaches q_THE and kv_SE, the target is
        detached here. Rows outside of A, NaN included, reach neither values nor gradients. A NaN inside of A makes
        that query's value NaN and gives no gradient; other queries are left alone.
    Cost: that of `index_scores` and of dense attention's weights over the same keys; holds them for backward.
    Source: DeepSeek-V3.2-Exp report (2025), eq. 3 and 4.
    """
    count = q_TJI.shape[0]
    require_rows("indexer_kl", count, w_TJ=w_TJ, q_THE=q_THE, topk_TK=topk_TK)
    require_integers("indexer_kl", count, start_T=start_T, end_T=end_T)
    require_float("indexer_kl", q=q_TJI, k=k_SI)
    shapes = (tuple(q_TJI.shape), tuple(k_SI.shape), tuple(w_TJ.shape))
    fits = q_TJI.ndim == 3 and k_SI.ndim == 2 and q_TJI.shape[2] == k_SI.shape[1] and q_TJI.shape[:2] == w_TJ.shape
    require(fits, "indexer_kl", "q, k, w must be [T, J, I], [S, I], [T, J]", shapes)
    require_rows_fit("indexer_kl", q_THE, kv_SE)
    require(num_rows(kv_SE) == k_SI.shape[0], "indexer_kl", "kv and k must have the same rows", num_rows(kv_SE))
    whole = topk_TK is None or (topk_TK.ndim == 2 and topk_TK.dtype == torch.int32)
    require(whole, "indexer_kl", "topk must be int32 [T, K]", None if topk_TK is None else topk_TK.dtype)
    q_THE, kv_SE = q_THE.detach(), map_rows(kv_SE, Tensor.detach)
    k_SI = blockwise.summed_wide(k_SI)
    heads = max(q_TJI.shape[1], q_THE.shape[1])
    widest = max(heads, q_THE.shape[2], q_TJI.shape[2])
    size = k_SI.shape[0] * heads if topk_TK is None else topk_TK.shape[1] * widest
    tiles = []
    with without_autocast(q_TJI):
        limit = max(1, blockwise.TILE_VALUES // max(1, size))
        for queries, span in blockwise.query_tiles(start_T, end_T, k_SI.shape[0], limit):
            start_t, end_t, q_tHE = start_T[queries], end_T[queries], q_THE[queries]
            if topk_TK is None:
                p_tK = blockwise.mean_weights(q_tHE, kv_SE, start_t, end_t, span, scale=scale)
                k, member_tK = blockwise.visible_rows(k_SI, start_t, end_t, slice(*span), None)
            else:
                topk_tK = topk_TK[queries]
                member_tK = (topk_tK >= start_t[:, None]) & (topk_tK < end_t[:, None])
                member_tK = member_tK & (topk_tK >= 0) & (topk_tK < k_SI.shape[0])
                topk_tK = torch.where(member_tK, topk_tK, -1)
                kv_tKE = fetch_rows(kv_SE, topk_tK).to(wide(q_tHE.dtype))
                p_tK = blockwise.softmax_weights(q_tHE, kv_tKE, member_tK, scale=scale)[0].mean(1)
                k = fetch_rows(k_SI, topk_tK)
            trained_t1 = member_tK.sum(-1, keepdim=True) > 1
            q_tJI = torch.where(trained_t1[..., None], q_TJI[queries], 0)
            score_tK = blockwise.index_scores(q_tJI, k, torch.where(trained_t1, w_TJ[queries], 0))
            tiles.append(_divergence(p_tK, score_tK, member_tK & trained_t1))
    return torch.cat(tiles)


def _divergence(p_tK: Tensor, score_tK: Tensor, member_tK: Tensor) -> Tensor:
    """Return Σ p (ln p - ln π) over the members; 0, with zero gradients, where there are none.

    NaN among a query's members makes its result NaN, written over at the end as in `blockwise.take_out`.
    """
    spoiled_t1 = (member_tK & (p_tK.isnan() | score_tK.isnan())).any(-1, keepdim=True)
    member_tK = member_tK & ~spoiled_t1
    score_tK = torch.where(member_tK, score_tK, -torch.inf)
    log_pi_tK = torch.log_softmax(torch.where(member_tK.any(-1, keepdim=True), score_tK, 0.0), dim=-1)
    p_tK = torch.where(member_tK, p_tK.to(score_tK.dtype), 0)
    log_pi_tK = torch.where(member_tK, log_pi_tK, 0)
    kl_t = (torch.xlogy(p_tK, p_tK) - p_tK * log_pi_tK).sum(-1)
    return torch.where(spoiled_t1[:, 0], torch.nan, kl_t)
