"""How much of dense attention a selection keeps, and what two selections share: one value per query."""

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from .attention import dense_attention, sparse_attention
from .implementation import Implementation
from .paged import SplitRows, map_selection
from .precision import require


def attention_mass(
    q_THE: Float[Tensor, "T H E"],
    kv_SE: Float[Tensor, "rows E"] | SplitRows,
    topk_TK: Int32[Tensor, "T K"],
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    *,
    scale: float,
    row_S: Int[Tensor, " S"] | None = None,
    dense_lse_TH: Float[Tensor, "T H"] | None = None,
    implementation: Implementation = None,
) -> Float[Tensor, " T"]:
    """Return the share of dense attention's weight that falls on the selected keys, averaged over heads.

    ``mass[t] = mean_h exp(lse_selected[t, h] - lse_visible[t, h])``: 1 where everything visible is selected.

    Args:
        q_THE: absorbed queries.
        kv_SE: key rows, or the rows of a pool if ``row_S`` is given.
        topk_TK: selected key rows, all visible.
        start_T: first visible key row of each query.
        end_T: one past the last.
        scale: of the logits, ``config.softmax_scale``.
        row_S: row of the pool for each key row.
        dense_lse_TH: lse of `dense_attention` over the same keys, where it is known already.
        implementation: of both attentions.

    Returns:
        mass_T between 0 and 1 up to rounding, float32 (float64 for float64 q); NaN for a query that sees no key.

    Raises:
        ValueError: as the two attentions.

    Gradients: as `sparse_attention` and `dense_attention`.
    Cost: one dense and one sparse attention; never T·S values.
    Source: follows from the definition of lse; the quantity is the recall of attention mass that papers on sparse
        attention report.
    """
    row_TK = topk_TK if row_S is None else map_selection(topk_TK, row_S)
    kept = sparse_attention(q_THE, kv_SE, row_TK, scale=scale, value_dim=1, implementation=implementation)
    if dense_lse_TH is None:
        dense_lse_TH = dense_attention(
            q_THE, kv_SE, start_T, end_T, scale=scale, value_dim=1, row_S=row_S, implementation=implementation
        ).lse_TH
    return torch.exp(kept.lse_TH - dense_lse_TH).mean(-1)


def selection_overlap(a_TK: Int32[Tensor, "T K"], b_TM: Int32[Tensor, "T M"]) -> Float[Tensor, " T"]:
    """Return the share of b's entries that a has too, for every query; entries below 0 are unused.

    ``overlap[t] = |a_t ∩ b_t| / |b_t|``, 1 where b_t is empty.

    Args:
        a_TK: a selection, without repeats.
        b_TM: another one of the same queries, M entries wide.

    Returns:
        overlap_T between 0 and 1, float32.

    Raises:
        ValueError: different numbers of queries.

    Cost: T·K·log K (a binary search for every entry).
    """
    require(a_TK.shape[0] == b_TM.shape[0], "selection_overlap", "a and b must have one length", len(b_TM))
    hits_T, count_T = shared_entries(a_TK, b_TM)
    return torch.where(count_T > 0, hits_T / count_T.clamp(min=1), 1.0)


def shared_entries(a_TK: Int32[Tensor, "T K"], b_TM: Int32[Tensor, "T M"]) -> tuple[Tensor, Tensor]:
    """Count the entries of b that a has too, and those of b; entries below 0 are unused. See `selection_overlap`."""
    ordered_TK = torch.where(a_TK >= 0, a_TK, -1).sort(dim=-1).values
    used_TM = b_TM >= 0
    if ordered_TK.shape[1] == 0:
        return torch.zeros_like(used_TM.sum(-1)), used_TM.sum(-1)
    place_TM = torch.searchsorted(ordered_TK, b_TM.contiguous()).clamp(max=ordered_TK.shape[1] - 1)
    hit_TM = used_TM & (ordered_TK.gather(1, place_TM) == b_TM)
    return hit_TM.sum(-1), used_TM.sum(-1)
