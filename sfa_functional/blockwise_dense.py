"""Attention to visible rows: tiles of queries times runs of keys, with a running softmax; and the merge of results."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .blockwise_sparse import add_rows
from .paged import SplitRows, num_rows
from .precision import product, product_dtype, wide
from .tiles import KEY_TILE, key_tiles, may_hold, queries_per_step, query_tiles, visible_tile


def dense_attention(
    q_THE: Tensor,
    kv: Tensor | SplitRows,
    start_T: Tensor,
    end_T: Tensor,
    row_S: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Attend to visible rows, a run of keys after the other. See `attention.dense_attention`."""
    out_THL = q_THE.new_zeros(*q_THE.shape[:2], value_dim)
    lse_TH = q_THE.new_full(q_THE.shape[:2], -torch.inf, dtype=wide(q_THE.dtype))
    for queries, span in _tiles(q_THE, kv, start_T, end_T, row_S, workspace_bytes):
        q_tHE = q_THE[queries].to(product_dtype(q_THE))
        sum_tHL = out_THL.new_zeros(out_THL[queries].shape, dtype=lse_TH.dtype)
        total_tH, highest_tH = torch.zeros_like(lse_TH[queries]), lse_TH[queries]
        for keys in key_tiles(span):
            kv_kE, hidden_tk, spoiled_t = visible_tile(kv, start_T[queries], end_T[queries], keys, row_S)
            kv_kE = kv_kE.to(q_tHE.dtype)
            z_tHk = product(q_tHE, kv_kE.mT).mul_(scale)
            if hidden_tk is not None:
                z_tHk.masked_fill_(hidden_tk[:, None], -torch.inf)
            before_tH, highest_tH = highest_tH, torch.maximum(highest_tH, z_tHk.amax(-1))
            level_tH = highest_tH.masked_fill(highest_tH == -torch.inf, 0)
            shrink_tH = torch.exp(before_tH - level_tH)
            p_tHk = z_tHk.sub_(level_tH[..., None]).exp_()
            total_tH = total_tH * shrink_tH + p_tHk.sum(-1)
            sum_tHL.mul_(shrink_tH[..., None]).add_(product(p_tHk, kv_kE[:, :value_dim]))
            if spoiled_t is not None:  # a NaN stays one through all that follows
                sum_tHL.masked_fill_(spoiled_t[:, None, None], torch.nan)
                total_tH.masked_fill_(spoiled_t[:, None], torch.nan)
        out_THL[queries] = sum_tHL.div_(total_tH.masked_fill(total_tH == 0, 1)[..., None])
        lse_TH[queries] = total_tH.log_().add_(highest_tH)
    return out_THL, lse_TH


def dense_attention_backward(
    q_THE: Tensor,
    kv: Tensor | SplitRows,
    start_T: Tensor,
    end_T: Tensor,
    row_S: Tensor | None,
    out_THL: Tensor,
    lse_TH: Tensor,
    d_out_THL: Tensor,
    d_lse_TH: Tensor,
    *,
    scale: float,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and of the joint key rows, the latter summed wide; weights are computed again.

    The formulas of `blockwise_sparse.sparse_attention_backward`, with ``Σ p (d_out·v) = d_out · out``: no tile of
    keys has all the terms of the left side.
    """
    value_dim = d_out_THL.shape[-1]
    dq_THE = q_THE.new_zeros(q_THE.shape)
    dkv_SE = q_THE.new_zeros(num_rows(kv), q_THE.shape[-1], dtype=wide(q_THE.dtype))
    for queries, span in _tiles(q_THE, kv, start_T, end_T, row_S, workspace_bytes):
        start_t, end_t, lse_tH = start_T[queries], end_T[queries], lse_TH[queries]
        q_tHE, d_out_tHL = (x[queries].to(product_dtype(q_THE)) for x in (q_THE, d_out_THL))
        dot_tH = (d_out_tHL.to(lse_tH.dtype) * out_THL[queries]).sum(-1) - d_lse_TH[queries]
        dead_t = lse_tH[:, 0] == -torch.inf  # has no key, or one that is not finite, and gives no gradient
        if may_hold(lse_tH.isnan()):
            dead_t |= _spoiled(kv, start_t, end_t, span, row_S)
        dead = may_hold(dead_t)
        if dead:  # what stands in it must not meet the zeros of a shared product
            dead_t11 = dead_t[:, None, None]
            q_tHE, d_out_tHL = q_tHE.masked_fill(dead_t11, 0), d_out_tHL.masked_fill(dead_t11, 0)
            lse_tH, dot_tH = lse_tH.masked_fill(dead_t11[..., 0], 0), dot_tH.masked_fill(dead_t11[..., 0], 0)
        dq_tHE = torch.zeros_like(q_tHE, dtype=lse_tH.dtype)
        for keys in key_tiles(span):
            kv_kE, hidden_tk, _ = visible_tile(kv, start_t, end_t, keys, row_S)
            kv_kE = kv_kE.to(q_tHE.dtype)
            if dead:
                hidden_tk = dead_t[:, None] if hidden_tk is None else hidden_tk | dead_t[:, None]
            p_tHk = product(q_tHE, kv_kE.mT).mul_(scale).sub_(lse_tH[..., None]).exp_()
            dz_tHk = product(d_out_tHL, kv_kE[:, :value_dim].mT).sub_(dot_tH[..., None]).mul_(p_tHk).mul_(scale)
            if hidden_tk is not None:
                p_tHk.masked_fill_(hidden_tk[:, None], 0)
                dz_tHk.masked_fill_(hidden_tk[:, None], 0)
            dq_tHE += product(dz_tHk, kv_kE)
            dkv_kE = product(dz_tHk.flatten(0, 1).mT, q_tHE.flatten(0, 1))
            dkv_kE[:, :value_dim] += product(p_tHk.flatten(0, 1).mT, d_out_tHL.flatten(0, 1))
            if row_S is None:
                dkv_SE[keys] += dkv_kE
            else:
                add_rows(dkv_SE, row_S[keys], dkv_kE)
        dq_THE[queries] = dq_tHE
    return dq_THE, dkv_SE


def _tiles(
    q_THE: Tensor, kv: Tensor | SplitRows, start_T: Tensor, end_T: Tensor, row_S: Tensor | None, workspace_bytes: int
) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Cut queries into tiles: a head of a query has two rows of logits, and up to two of results and of queries."""
    heads, width = q_THE.shape[1:]
    bytes_per_query = heads * (2 * KEY_TILE + 2 * width) * wide(q_THE.dtype).itemsize
    limit = queries_per_step(bytes_per_query, q_THE.device, workspace_bytes)
    return query_tiles(start_T, end_T, num_rows(kv) if row_S is None else row_S.shape[0], limit)


def _spoiled(
    kv: Tensor | SplitRows, start_t: Tensor, end_t: Tensor, span: tuple[int, int], row_S: Tensor | None
) -> Tensor:
    """Say which queries of a tile see a row that is not finite."""
    spoiled_t = torch.zeros_like(start_t, dtype=torch.bool)
    for keys in key_tiles(span):
        _, _, here_t = visible_tile(kv, start_t, end_t, keys, row_S)
        spoiled_t = spoiled_t if here_t is None else spoiled_t | here_t
    return spoiled_t


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine results over disjoint keys, in float32. See `attention.merge_attention`."""
    lse_NTH = torch.stack([lse for _, lse in parts])
    highest_TH = lse_NTH.detach().amax(0)
    highest_TH = torch.where(highest_TH == -torch.inf, 0.0, highest_TH)
    weight_NTH = torch.exp(lse_NTH - highest_TH)
    total_TH = weight_NTH.sum(0)
    empty_TH = total_TH == 0
    safe_TH = torch.where(empty_TH, 1.0, total_TH)
    lse_TH = torch.where(empty_TH, -torch.inf, highest_TH + safe_TH.log())
    out_THL = sum(
        torch.where((lse == -torch.inf)[..., None], 0.0, out.to(weight.dtype)) * (weight / safe_TH)[..., None]
        for (out, lse), weight in zip(parts, weight_NTH, strict=True)
    )
    return out_THL, lse_TH
