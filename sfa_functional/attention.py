"""Attention over selected keys, over all visible keys, and the merge of partial results; chooses the implementation."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from . import blockwise_dense, npu, operators, reference
from .implementation import Implementation, choose
from .paged import Rows, SplitRows, fetch_rows, present_rows, require_rows_fit
from .precision import require, require_integers, require_rows, without_autocast
from .tiles import WORKSPACE, visible


class AttentionOutput(NamedTuple):
    """What attention returns, always: weighted latents in q's dtype, and the natural log-sum-exp of the logits."""

    out_THL: Float[Tensor, "T H L"]
    lse_TH: Float[Tensor, "T H"]


def sparse_attention(
    q_THE: Float[Tensor, "T H E"],
    kv_SE: Rows,
    topk_TK: Int32[Tensor, "T K"],
    *,
    scale: float,
    value_dim: int,
    implementation: Implementation = None,
    workspace_bytes: int = WORKSPACE,
) -> AttentionOutput:
    """Attend from every query to the key rows that it selected.

    ``z[h, s] = scale · q[t, h] · kv[s]``, ``lse = ln Σ_s e^z``, ``out = Σ_s e^(z - lse) · kv[s, :value_dim]``, each
    sum over the selected rows s of query t. The formula in twenty lines: `reference.attend`.

    Args:
        q_THE: absorbed queries.
        kv_SE: key rows, [S, E] or `SplitRows`.
        topk_TK: int32 row numbers in any order; every value outside ``[0, S)`` is an unused entry. A number listed
            twice counts twice: `validate_selection` finds those.
        scale: of the logits; ``config.softmax_scale``, never derived from a width.
        value_dim: how many leading columns of a row are its value (L).
        implementation: "blockwise" gathers tiles of rows, "reference" is the oracle, "npu" is Ascend's operator,
            without gradients; None chooses for the device. A callable has the reference's signature.
        workspace_bytes: how much the steps of "blockwise" may hold beside inputs and results; one query is the least.

    Returns:
        `AttentionOutput`: out in q's dtype; lse float32 (float64 for float64 q). A query without keys has out 0
        and lse -inf.

    Raises:
        ValueError: shapes or dtypes that don't fit, or an implementation that can't run.

    Gradients: of q and kv, through out and lse, once: a second derivative and forward mode are refused. 0 for queries
        without keys. What stands in a row that nobody selects, NaN included, reaches no result and no gradient. A NaN
        or an infinity in a selected row makes the results of the queries that selected it NaN; these carry no
        gradient, and no other query is touched. The gradient of a row is summed in float32, in one order.
    Cost: 2·T·H·K·(E + L) FLOPs, 2·T·H·K·(3·E + 2·L) for gradients, which compute the weights again: inputs and
        selection are all that is kept. Copies T·K rows, a step at a time; on a CPU a step is one query of a published
        model's size.
    Source: DeepSeek-V3.2-Exp report (2025), eq. 2; DeepSeek-V2 (2024), section 2.1.2, for the absorbed form.
    """
    _check("sparse_attention", q_THE, kv_SE, value_dim)
    require_rows("sparse_attention", q_THE.shape[0], topk_TK=topk_TK)
    require(
        topk_TK.ndim == 2 and topk_TK.dtype == torch.int32,
        "sparse_attention",
        "topk must be int32 [T, K]",
        (topk_TK.dtype, tuple(topk_TK.shape)),
    )
    call = {"scale": scale, "value_dim": value_dim}
    match choose("sparse_attention", implementation, q_THE, kv_SE, topk_TK, **call):
        case "blockwise":
            with without_autocast(q_THE):
                result = operators.sparse_attention(
                    q_THE, kv_SE, topk_TK, scale=scale, value_dim=value_dim, workspace_bytes=workspace_bytes
                )
        case "npu":
            result = npu.sparse_attention(q_THE, kv_SE, topk_TK, scale=scale, value_dim=value_dim)
        case "reference":
            with without_autocast(q_THE):
                result = reference.sparse_attention(q_THE, _joined(kv_SE), topk_TK, scale=scale, value_dim=value_dim)
        case custom:
            result = custom(q_THE, _joined(kv_SE), topk_TK, scale=scale, value_dim=value_dim)
    return AttentionOutput(*result)


def dense_attention(
    q_THE: Float[Tensor, "T H E"],
    kv_SE: Float[Tensor, "rows E"] | SplitRows,
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    *,
    scale: float,
    value_dim: int,
    row_S: Int[Tensor, " S"] | None = None,
    implementation: Implementation = None,
    workspace_bytes: int = WORKSPACE,
) -> AttentionOutput:
    """Attend from every query to all key rows that it sees, ``start[t] <= s < end[t]``.

    The formula of `sparse_attention` with the visible rows as the selection.

    Args:
        q_THE: absorbed queries.
        kv_SE: key rows, or the rows of a pool if ``row_S`` is given; [S, E] or `SplitRows`.
        start_T: first visible key row of each query; below 0 is 0.
        end_T: one past the last; above S is S, not above ``start`` is an empty range.
        scale: of the logits; ``config.softmax_scale``.
        value_dim: how many leading columns of a row are its value (L).
        row_S: row of the pool for each key row; a key whose entry is -1 is not there and is not attended to.
        implementation: None and "blockwise" work in tiles, "reference" is the oracle; a callable has the
            reference's signature (no ``row_S``: it is given the key rows, NaN where the pool holds none).
        workspace_bytes: how much a tile of "blockwise" may hold beside inputs and results; one query is the least.

    Returns:
        `AttentionOutput`, as `sparse_attention`.

    Raises:
        ValueError: shapes or dtypes that don't fit, or an implementation that can't run.

    Gradients: of q and kv, through out and lse, once; 0 for queries without keys. A NaN or an infinity in a row makes
        the results of the queries that see the row NaN; these carry no gradient, and no other query is touched. The
        gradient of a row is summed in float32, in one order.
    Cost: 2·T·H·S·(E + L) FLOPs over the span of each tile, 2·T·H·S·(3·E + 2·L) for gradients, which compute the
        weights again from inputs, out and lse; memory of a tile of queries and keys.
    Source: DeepSeek-V2 (2024), eq. 10 and section 2.1.2.
    """
    _check("dense_attention", q_THE, kv_SE, value_dim)
    require_integers("dense_attention", q_THE.shape[0], start_T=start_T, end_T=end_T)
    if row_S is not None:
        require_integers("dense_attention", row_S.numel(), row_S=row_S)
    match choose("dense_attention", implementation, q_THE):
        case "blockwise":
            with without_autocast(q_THE):
                result = operators.dense_attention(
                    q_THE,
                    kv_SE,
                    start_T,
                    end_T,
                    scale=scale,
                    value_dim=value_dim,
                    row_S=row_S,
                    workspace_bytes=workspace_bytes,
                )
        case "reference":
            if row_S is None:
                run = partial(reference.dense_attention, start_T=start_T, end_T=end_T)
            else:
                run = partial(reference.sparse_attention, topk_TK=_visible_rows(start_T, end_T, row_S))
            with without_autocast(q_THE):
                result = run(q_THE, _joined(kv_SE), scale=scale, value_dim=value_dim)
        case custom:
            rows_SE = _joined(kv_SE) if row_S is None else present_rows(kv_SE, row_S)
            result = custom(q_THE, rows_SE, start_T, end_T, scale=scale, value_dim=value_dim)
    return AttentionOutput(*result)


def merge_attention(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """Combine attention over disjoint sets of keys into attention over all of them.

    ``lse = ln Σ_n e^(lse_n)``, ``out = Σ_n e^(lse_n - lse) · out_n``.

    Args:
        parts: results of the same queries, at least one. A part with lse -inf is neutral in any place, whatever its
            out holds.

    Returns:
        `AttentionOutput`; out in the parts' dtype, sums in float32 (float64 for float64 parts).

    Raises:
        ValueError: no parts, or parts of different shapes or dtypes.

    Gradients: of every out and lse, by autograd.
    Source: Dao et al., "FlashAttention" (2022), section 3.1; Milakov & Gimelshein, "Online normalizer calculation
        for softmax" (2018).
    """
    require(len(parts) > 0, "merge_attention", "parts must hold at least one result", 0)
    shapes = [(tuple(out.shape), tuple(lse.shape), out.dtype) for out, lse in parts]
    fits = len(set(shapes)) == 1 and shapes[0][0][:-1] == shapes[0][1]
    require(fits, "merge_attention", "parts must have one dtype and the shapes [T, H, L], [T, H]", shapes)
    out_THL, lse_TH = blockwise_dense.merge([(out, lse) for out, lse in parts])
    return AttentionOutput(out_THL.to(parts[0].out_THL.dtype), lse_TH)


def validate_selection(topk_TK: Int32[Tensor, "T K"], start_T: Int[Tensor, " T"], end_T: Int[Tensor, " T"]) -> None:
    """Refuse a selection with a row listed twice or a row that its query does not see; waits for the device.

    Args:
        topk_TK: selection of key rows; negative values are unused entries.
        start_T: first visible key row of each query.
        end_T: one past the last.

    Raises:
        ValueError: naming the first query at fault, and its row.
    """
    require_integers("validate_selection", topk_TK.shape[0], start_T=start_T, end_T=end_T)
    used_TK = topk_TK >= 0
    unseen_TK = used_TK & ((topk_TK < start_T[:, None]) | (topk_TK >= end_T[:, None]))
    for t, i in unseen_TK.nonzero()[:1].tolist():
        low, high = int(start_T[t]), int(end_T[t])
        raise ValueError(f"validate_selection: query {t} sees rows [{low}, {high}); got {int(topk_TK[t, i])}")
    ordered_TK = topk_TK.sort(dim=-1).values
    twice_TK = (ordered_TK[:, 1:] == ordered_TK[:, :-1]) & (ordered_TK[:, 1:] >= 0)
    for t, i in twice_TK.nonzero()[:1].tolist():
        raise ValueError(f"validate_selection: rows of a query must differ; got {int(ordered_TK[t, i])} twice at {t}")


def _visible_rows(start_T: Tensor, end_T: Tensor, row_S: Tensor) -> Tensor:
    """List every visible key's row of the pool as a selection, -1 where the query does not see the key."""
    seen_TS = visible(torch.arange(row_S.shape[0], device=row_S.device), start_T, end_T)
    return torch.where(seen_TS, row_S, -1).to(torch.int32)


def _joined(kv_SE: Tensor | SplitRows) -> Tensor:
    return fetch_rows(kv_SE, slice(None))


def _check(function: str, q_THE: Tensor, kv_SE: Tensor | SplitRows, value_dim: int) -> None:
    require_rows_fit(function, q_THE, kv_SE)
    require(0 < value_dim <= q_THE.shape[2], function, f"value_dim must be in 1..{q_THE.shape[2]}", value_dim)
