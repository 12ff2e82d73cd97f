"""Attention to selected rows, a few queries per step: gather their rows, two products forward, five backward.

On a CPU a step takes one query of a published model's size for each thread: its 2048 rows of 576 columns fit the cache,
and two thirds to nine tenths of the time are the products. Larger groups were slower; small queries are grouped.

Logits lie as [K, H]: the gathered rows are the left side of every product. A query's heads are few, and two threads
that share such a product take 2.1 ms for 64 heads instead of 2.6 with the rows on the right; one thread takes as long.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .paged import SplitRows, gather_rows, num_rows
from .precision import product, product_dtype, wide
from .tiles import all_finite, finite_rows, products_per_step


def sparse_attention(
    q_THE: Tensor, kv: Tensor | SplitRows, topk_TK: Tensor, *, scale: float, value_dim: int, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Attend to selected rows. See `attention.sparse_attention`."""
    out_THL = q_THE.new_zeros(*q_THE.shape[:2], value_dim)
    lse_TH = q_THE.new_full(q_THE.shape[:2], -torch.inf, dtype=wide(q_THE.dtype))
    for queries, topk_tK, unused_tK in _steps(q_THE, kv, topk_TK, workspace_bytes):
        out_THL[queries], lse_TH[queries] = _attend(q_THE[queries], kv, topk_tK, unused_tK, scale, value_dim)
    return out_THL, lse_TH


def _attend(
    q_tHE: Tensor,
    kv: Tensor | SplitRows,
    topk_tK: Tensor,
    unused_tK: Tensor | None,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """Take one step. Its tensors go when it ends, so that the next finds their memory still in the cache."""
    kv_tKE = _gather(kv, topk_tK, unused_tK, product_dtype(q_tHE))
    z_tKH, hidden_tK, spoiled_t = _logits(q_tHE, kv_tKE, unused_tK, scale)
    p_tKH, lse_tH = _weights(z_tKH, hidden_tK)
    out_tLH = product(kv_tKE[..., :value_dim].mT, p_tKH)
    if spoiled_t is not None:
        out_tLH.masked_fill_(spoiled_t[:, None, None], torch.nan)
        lse_tH.masked_fill_(spoiled_t[:, None], torch.nan)
    return out_tLH.mT, lse_tH


def sparse_attention_backward(
    q_THE: Tensor,
    kv: Tensor | SplitRows,
    topk_TK: Tensor,
    d_out_THL: Tensor,
    d_lse_TH: Tensor,
    *,
    scale: float,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and of the joint key rows, the latter summed wide; weights p are computed again.

    ``dz = p · (d_out·v - Σ p (d_out·v) + d_lse)``, ``dq = scale · dz kv``, ``dkv = scale · dzᵀ q``, plus ``pᵀ d_out``
    in the value's columns.
    """
    dq_THE = q_THE.new_zeros(q_THE.shape)
    dkv_SE = q_THE.new_zeros(num_rows(kv), q_THE.shape[-1], dtype=wide(q_THE.dtype))
    for queries, topk_tK, unused_tK in _steps(q_THE, kv, topk_TK, workspace_bytes):
        cotangents = d_out_THL[queries], d_lse_TH[queries]
        dq_THE[queries], dkv_tKE = _attend_backward(q_THE[queries], kv, topk_tK, unused_tK, *cotangents, scale)
        add_rows(dkv_SE, topk_tK, dkv_tKE)
        del dkv_tKE  # as in `_attend`
    return dq_THE, dkv_SE


def _attend_backward(
    q_tHE: Tensor,
    kv: Tensor | SplitRows,
    topk_tK: Tensor,
    unused_tK: Tensor | None,
    d_out_tHL: Tensor,
    d_lse_tH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return one step's gradients, of its queries and of each row that each of them used."""
    value_dim = d_out_tHL.shape[-1]
    kv_tKE = _gather(kv, topk_tK, unused_tK, product_dtype(q_tHE))
    z_tKH, hidden_tK, _ = _logits(q_tHE, kv_tKE, unused_tK, scale)
    p_tKH, _ = _weights(z_tKH, hidden_tK)
    dz_tKH = product(kv_tKE[..., :value_dim], d_out_tHL.mT)
    dz_tKH.sub_((p_tKH * dz_tKH).sum(1, keepdim=True).sub_(d_lse_tH[:, None])).mul_(p_tKH).mul_(scale)
    if hidden_tK is not None:
        dz_tKH.masked_fill_(hidden_tK[..., None], 0)  # 0 · NaN of a cotangent is NaN
    dq_tEH, dkv_tKE = product(kv_tKE.mT, dz_tKH), product(dz_tKH, q_tHE)
    dkv_tKE[..., :value_dim] += product(p_tKH, d_out_tHL)
    if hidden_tK is not None:
        dkv_tKE.masked_fill_(hidden_tK[..., None], 0)
    return dq_tEH.mT, dkv_tKE


def add_rows(total_SE: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows to those that an index of the same shape names, in one order always; outside ``[0, S)``: zeros, dropped.

    On a CPU ``index_add_`` goes row by row. Elsewhere it adds in any order, and ``index_put_`` sorts first.
    """
    index = torch.where((index >= 0) & (index < total_SE.shape[0]), index, 0).flatten().long()
    rows = rows.flatten(0, -2)
    if total_SE.device.type == "cpu":
        total_SE.index_add_(0, index, rows)
    else:
        total_SE.index_put_((index,), rows, accumulate=True)


def _steps(
    q_THE: Tensor, kv: Tensor | SplitRows, topk_TK: Tensor, workspace_bytes: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Cut queries into steps, each with its part of the selection and which of its entries are unused (None: none).

    On a CPU the selection is looked at, some steps at once, and columns that a step doesn't use are left out.
    """
    (count, heads, width), columns = q_THE.shape, topk_TK.shape[1]
    step = products_per_step(columns * 2 * (heads + width) * wide(q_THE.dtype).itemsize, q_THE.device, workspace_bytes)
    looked_at = step * max(1, 64 // step)
    for first in range(0, count if num_rows(kv) and columns else 0, looked_at):
        some_TK = topk_TK[first : first + looked_at]
        unused_TK = (some_TK < 0) | (some_TK >= num_rows(kv))
        looks = topk_TK.device.type == "cpu"
        last_T = (~unused_TK * torch.arange(1, columns + 1)).amax(-1).tolist() if looks else []
        holes_T = unused_TK.sum(-1).tolist() if looks else []
        for low in range(0, some_TK.shape[0], step):
            high = min(low + step, some_TK.shape[0])
            used = max(last_T[low:high], default=columns)
            whole = looks and max(holes_T[low:high]) + used == columns
            if used:
                queries = slice(first + low, first + high)
                yield queries, some_TK[low:high, :used], None if whole else unused_TK[low:high, :used]


def _gather(kv: Tensor | SplitRows, topk_tK: Tensor, unused_tK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Read the selected rows; unused entries read zeros."""
    if unused_tK is None:
        return gather_rows(kv, topk_tK).to(dtype)
    kv_tKE = gather_rows(kv, topk_tK.masked_fill(unused_tK, 0)).to(dtype)
    return kv_tKE.masked_fill_(unused_tK[..., None], 0)


def _logits(
    q_tHE: Tensor, kv_tKE: Tensor, unused_tK: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``scale · kv qᵀ``, the entries that count for nothing, and the queries with rows that are not finite.

    Such rows are zeroed, and no entry of their queries counts; what doesn't count has the logit -inf. A row with a NaN
    or an infinity anywhere has no finite logit in any head, so on a CPU one head tells, at a hundredth of what looking
    at the rows costs.
    """
    hidden_tK, spoiled_t = unused_tK, None
    z_tKH = product(kv_tKE, q_tHE.mT) if kv_tKE.device.type == "cpu" else None
    if z_tKH is None or not all_finite(z_tKH[..., 0]):
        spoiled_tK = ~finite_rows(kv_tKE)
        kv_tKE.masked_fill_(spoiled_tK[..., None], 0)
        spoiled_t = spoiled_tK.any(-1)
        hidden_tK = spoiled_t[:, None].expand_as(spoiled_tK)
        hidden_tK = hidden_tK if unused_tK is None else hidden_tK | unused_tK
        z_tKH = product(kv_tKE, q_tHE.mT)
    z_tKH.mul_(scale)
    return z_tKH if hidden_tK is None else z_tKH.masked_fill_(hidden_tK[..., None], -torch.inf), hidden_tK, spoiled_t


def _weights(z_tKH: Tensor, hidden_tK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn logits into their softmax and its lse: 0 and -inf for a query whose entries are all hidden.

    Written out, because ``softmax`` over a dim that isn't the last adds K numbers one after the other: of 2048 its
    rounding error was two to five times that of ``sum``, which adds in pairs.
    """
    highest_tH = z_tKH.amax(1)
    empty_t1 = None if hidden_tK is None else hidden_tK.all(-1, keepdim=True)
    if empty_t1 is not None:
        highest_tH.masked_fill_(empty_t1, 0)
    p_tKH = z_tKH.sub_(highest_tH[:, None]).exp_()
    total_tH = p_tKH.sum(1)
    lse_tH = highest_tH.add_(total_tH.log())
    if empty_t1 is not None:
        total_tH.masked_fill_(empty_t1, 1)
    return p_tKH.div_(total_tH[:, None]), lse_tH
