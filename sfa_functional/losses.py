"""The indexer's training loss: how far its softmax is from the attention that it should predict."""

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from . import operators
from .paged import Rows, map_rows, num_rows, require_rows_fit
from .precision import require, require_float, require_integers, require_rows, without_autocast
from .tiles import WORKSPACE


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
    workspace_bytes: int = WORKSPACE,
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
        workspace_bytes: how much a tile may hold beside inputs and results; one query, H·S values, is the least.

    Returns:
        kl_T, >= 0 up to rounding, in float32 (float64 for float64 q); 0 where A has at most one key. The caller
        averages and weights.

    Raises:
        ValueError: shapes or dtypes that don't fit.

    Gradients: of q_TJI, k_SI and w_TJ: ``d score = (π - p) · d kl``. None reaches q_THE and kv_SE, the target is
        detached here. Rows outside of A, NaN included, reach neither values nor gradients. A NaN inside of A makes
        that query's value NaN and gives no gradient; other queries are left alone.
        Once: a second derivative and forward mode are refused.
    Cost: that of `index_scores` and of dense attention's weights over the same keys, both again for gradients: only
        the inputs are kept. Memory of a tile.
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
    with without_autocast(q_TJI):
        return operators.indexer_kl(
            q_TJI, k_SI, w_TJ, q_THE, kv_SE, start_T, end_T, topk_TK, scale=scale, workspace_bytes=workspace_bytes
        )
