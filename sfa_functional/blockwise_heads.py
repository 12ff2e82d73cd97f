"""Attention with keys and values of each head, made from the latent rows a few heads at a time.

A run of queries reads all rows that any of them sees, in order, and adds to each logit the logarithm of how often its
query selected the key: -inf where it did not. So nothing is gathered, a selection counts as in `blockwise_sparse`, and
products of 256 queries and thousands of keys run at nine tenths of a square one's rate. Whole rows of logits are held,
with no running softmax: `per_head.per_head_runs` sends only queries here whose keys fit the workspace.

Of the workspace, keys and values of a group of heads are given a half; the counts of a run, a byte each (four where one
exceeds 255, or may on a device), which serve all groups, a quarter; and the logits of a step a quarter. Temporaries
that make these come on top.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .blockwise_sparse import add_rows
from .paged import SplitRows, num_rows
from .precision import product, product_dtype, wide
from .tiles import finite_rows, key_tile, may_hold, products_per_step, queries_per_step, query_tiles

QUERY_TILE = 256
"""Queries of a step at most. The product of 128 with their keys runs at 0.8 of a square one's rate, of 256 at 0.9."""


class Tile(NamedTuple):
    """Queries that are worked on together."""

    queries: slice
    count_ts: Tensor  # how often each lists each key of the run that any of them sees
    empty_t: Tensor | None  # which list none; None: no query
    repeats: bool  # whether a count may exceed 1


class Run(NamedTuple):
    """Queries that see keys from one row on, and those keys."""

    first: int  # key row of the first key
    rows_sE: Tensor
    tiles: list[Tile]


class HeadKeys(NamedTuple):
    """Keys and values of some heads."""

    keys_hXs: Tensor
    values_hsV: Tensor
    lost_s: Tensor | None  # keys that are not finite, zeroed: what selects one becomes NaN; None: no key


class Weighing(NamedTuple):
    """What is added to the logits of a tile, for all heads alike: ``ln n`` of a key that a query lists n times."""

    bias_ts: Tensor
    empty_t: Tensor | None  # queries without keys; None: no query
    spoiled_t: Tensor | None  # queries that selected a key that is not finite; None: no query

    def cover(self, x_htX: Tensor, spoiled: float) -> Tensor:
        """Write 0 over what belongs to queries without keys, and a number over what belongs to spoiled ones."""
        if self.empty_t is not None:
            x_htX = x_htX.masked_fill(self.empty_t[:, None], 0)
        return x_htX if self.spoiled_t is None else x_htX.masked_fill(self.spoiled_t[:, None], spoiled)


def attend_per_head(
    q_THX: Tensor,
    kv: Tensor | SplitRows,
    w_uk_HPL: Tensor,
    w_uv_HVL: Tensor,
    topk_TK: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    row_S: Tensor | None,
    *,
    runs: list[tuple[int, int]],
    scale: float,
    workspace_bytes: int,
) -> Tensor:
    """Attend from the queries of some runs to the key rows that they selected; the other queries' results are 0.

    ``z[h, s] = scale · q[t, h] · [W_UK[h] c_s ; k_s]``, ``value[t, h] = Σ_s softmax(z)[h, s] · W_UV[h] c_s``, where row
    s is ``[c_s ; k_s]``.
    """
    value_THV = q_THX.new_zeros(*q_THX.shape[:2], w_uv_HVL.shape[1])
    for run in _runs(q_THX, kv, topk_TK, start_T, end_T, row_S, runs, workspace_bytes):
        for group in _groups(q_THX, value_THV.shape[2] + q_THX.shape[2], len(run.rows_sE), workspace_bytes // 2):
            made = _make(run.rows_sE, w_uk_HPL[group], w_uv_HVL[group])
            for tile in run.tiles:
                weighing, queries = _weigh(tile, made), tile.queries
                for heads in _steps(weighing.bias_ts, group, 2, workspace_bytes // 4):
                    value_THV[queries, heads] = _attend(q_THX[queries, heads], made, heads, group, weighing, scale)
            del made  # before the next group's are made
        del run
    return value_THV


def _attend(q_thX: Tensor, made: HeadKeys, heads: slice, group: slice, weighing: Weighing, scale: float) -> Tensor:
    """Take one step. Its tensors go when it ends, so that the next finds their memory still in the cache."""
    keys_hXs, values_hsV = _of_step(made, heads, group, weighing)
    value_htV = product(_weights(q_thX.transpose(0, 1), keys_hXs, weighing.bias_ts, scale), values_hsV)
    return weighing.cover(value_htV, torch.nan).transpose(0, 1)


def attend_per_head_backward(
    q_THX: Tensor,
    kv: Tensor | SplitRows,
    w_uk_HPL: Tensor,
    w_uv_HVL: Tensor,
    topk_TK: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    row_S: Tensor | None,
    d_value_THV: Tensor,
    *,
    runs: list[tuple[int, int]],
    scale: float,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, of the joint key rows, of W_UK and of W_UV, all but the first summed wide.

    Keys, values and weights p are made again. ``dz = scale · p · (d_value·v - Σ p (d_value·v))``, ``dq = dz k``,
    ``dk = dzᵀ q``, ``dv = pᵀ d_value``; ``dc = dk W_UK + dv W_UV``, ``dW_UK = dkᵀ c``, ``dW_UV = dvᵀ c``.
    """
    dtype, (_, nope, latent) = wide(q_THX.dtype), w_uk_HPL.shape
    dq_THX = q_THX.new_zeros(q_THX.shape)
    dkv_SE = q_THX.new_zeros(num_rows(kv), q_THX.shape[2] - nope + latent, dtype=dtype)
    dw_uk_HPL, dw_uv_HVL = (x.new_zeros(x.shape, dtype=dtype) for x in (w_uk_HPL, w_uv_HVL))
    for run in _runs(q_THX, kv, topk_TK, start_T, end_T, row_S, runs, workspace_bytes):
        drows_sE = torch.zeros_like(run.rows_sE, dtype=dtype)
        columns = 2 * (d_value_THV.shape[2] + q_THX.shape[2])  # keys and values, and their gradients
        for group in _groups(q_THX, columns, len(run.rows_sE), workspace_bytes // 2):
            made = _make(run.rows_sE, w_uk_HPL[group], w_uv_HVL[group])
            dk_hsX = torch.zeros_like(made.keys_hXs.mT, dtype=dtype, memory_format=torch.contiguous_format)
            dv_hsV = torch.zeros_like(made.values_hsV, dtype=dtype)
            for tile in run.tiles:
                (weighing, queries), seen = (_weigh(tile, made), tile.queries), tile.count_ts.shape[1]
                for heads in _steps(weighing.bias_ts, group, 3, workspace_bytes // 4):
                    step = q_THX[queries, heads], d_value_THV[queries, heads], made, heads, group, weighing, scale
                    dq_THX[queries, heads], dk_hkX, dv_hkV = _attend_backward(*step)
                    inside = slice(heads.start - group.start, heads.stop - group.start)
                    dk_hsX[inside, :seen] += dk_hkX
                    dv_hsV[inside, :seen] += dv_hkV
            latent_sL = run.rows_sE[:, :latent]
            if made.lost_s is not None:  # their gradients are 0, and 0 · NaN is NaN
                latent_sL = latent_sL.masked_fill(made.lost_s[:, None], 0)
            for dmade_hsX, w_HXL, dw_HXL in ((dk_hsX[..., :nope], w_uk_HPL, dw_uk_HPL), (dv_hsV, w_uv_HVL, dw_uv_HVL)):
                dw_HXL[group] += product(dmade_hsX.mT, latent_sL.expand(len(dmade_hsX), -1, -1))
                for dmade_sX, w_XL in zip(dmade_hsX, w_HXL[group], strict=True):
                    drows_sE[:, :latent] += product(dmade_sX, w_XL)
            drows_sE[:, latent:] += dk_hsX[..., nope:].sum(0)
        if row_S is None:
            dkv_SE[run.first : run.first + len(drows_sE)] += drows_sE
        else:
            add_rows(dkv_SE, row_S[run.first : run.first + len(drows_sE)], drows_sE)
    return dq_THX, dkv_SE, dw_uk_HPL, dw_uv_HVL


def _attend_backward(
    q_thX: Tensor, d_value_thV: Tensor, made: HeadKeys, heads: slice, group: slice, weighing: Weighing, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one step's gradients: of its queries, and of the keys and values that they see."""
    keys_hXs, values_hsV = _of_step(made, heads, group, weighing)
    q_htX, d_value_htV = (weighing.cover(x.transpose(0, 1), 0.0) for x in (q_thX, d_value_thV))
    p_hts = _weights(q_htX, keys_hXs, weighing.bias_ts, scale)
    dz_hts = product(d_value_htV, values_hsV.mT)
    dot_ht1 = (p_hts * dz_hts).sum(-1, keepdim=True)
    overflows = may_hold(~dot_ht1.isfinite())
    if overflows:  # in a key that its query didn't select, or in what came in
        dz_hts.masked_fill_(weighing.bias_ts == -torch.inf, 0)
        dot_ht1 = (p_hts * dz_hts).sum(-1, keepdim=True)
    dz_hts.sub_(dot_ht1).mul_(p_hts).mul_(scale)
    if overflows:
        dz_hts.masked_fill_(weighing.bias_ts == -torch.inf, 0)
    dq_thX = product(dz_hts, keys_hXs.mT).transpose(0, 1)
    return dq_thX, product(dz_hts.mT, q_htX), product(p_hts.mT, d_value_htV)


def _runs(
    q_THX: Tensor,
    kv: Tensor | SplitRows,
    topk_TK: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    row_S: Tensor | None,
    runs: list[tuple[int, int]],
    workspace_bytes: int,
) -> Iterator[Run]:
    """Read the rows of each run that sees any, cut its queries into tiles and count what they list.

    A run whose counts exceed a quarter of the workspace comes in parts, each with the rows that its queries see.
    """
    num_keys = num_rows(kv) if row_S is None else row_S.shape[0]
    itemsize = wide(q_THX.dtype).itemsize
    for low, high in runs:
        ranges = start_T[low:high], end_T[low:high]
        spans = [span for _, span in query_tiles(*ranges, num_keys, high - low) if span[0] < span[1]]
        if not spans:
            continue
        first, last = min(span[0] for span in spans), max(span[1] for span in spans)
        rows_sE, known_s = key_tile(kv, slice(first, last), row_S)
        limit = min(QUERY_TILE, queries_per_step(2 * (last - first) * itemsize, q_THX.device, 2 * workspace_bytes))
        tiles: list[Tile] = []
        for queries, span in query_tiles(*ranges, num_keys, limit):
            if span[0] == span[1]:
                continue
            queries = slice(low + queries.start, low + queries.stop)
            tile = _count(topk_TK[queries], queries, first, known_s, span[1] - first)
            if tiles and sum(t.count_ts.nbytes for t in [*tiles, tile]) > workspace_bytes // 4:
                yield _part(first, rows_sE, tiles)
                tiles = []
            tiles.append(tile)
        yield _part(first, rows_sE, tiles)


def _part(first: int, rows_sE: Tensor, tiles: list[Tile]) -> Run:
    return Run(first, rows_sE[: max(tile.count_ts.shape[1] for tile in tiles)], tiles)


def _count(topk_tK: Tensor, queries: slice, first: int, known_s: Tensor | None, seen: int) -> Tile:
    """Count how often each query lists each of so many keys from a row on."""
    used_tK = (topk_tK >= first) & (topk_tK < first + seen)
    column_tK = torch.where(used_tK, topk_tK - first, seen).long()
    one_tK = torch.ones_like(topk_tK)
    count_ts = one_tK.new_zeros(len(topk_tK), seen + 1).scatter_add_(1, column_tK, one_tK)[:, :seen]
    if known_s is not None:
        count_ts = count_ts.masked_fill(~known_s[:seen], 0)
    empty_t, most = count_ts.amax(-1) == 0, count_ts.amax()
    fits = topk_tK.shape[1] <= 255 or not may_hold(most > 255)
    return Tile(
        queries,
        count_ts.to(torch.uint8) if fits else count_ts,
        empty_t if may_hold(empty_t) else None,
        may_hold(most > 1),
    )


def _groups(q_THX: Tensor, columns: int, keys: int, workspace_bytes: int) -> Iterator[slice]:
    """Cut heads into groups of which so many columns for each key fit, so that threads share them evenly."""
    heads, size = q_THX.shape[1], workspace_bytes // (columns * keys * wide(q_THX.dtype).itemsize)
    threads = torch.get_num_threads()
    size = max(1, size - size % threads if size > threads else size)
    for low in range(0, heads, size):
        yield slice(low, min(low + size, heads))


def _steps(bias_ts: Tensor, group: slice, copies: int, workspace_bytes: int) -> Iterator[slice]:
    """Cut a group of heads into those whose logits, some copies of them, are worked on in one step."""
    bytes_per_head = bias_ts.numel() * bias_ts.element_size()
    size = products_per_step(bytes_per_head, bias_ts.device, workspace_bytes // copies)
    for low in range(group.start, group.stop, size):
        yield slice(low, min(low + size, group.stop))


def _make(rows_sE: Tensor, w_uk_hPL: Tensor, w_uv_hVL: Tensor) -> HeadKeys:
    """Make keys and values of some heads. Keys lie as the product with queries reads them fastest."""
    dtype, latent = product_dtype(rows_sE), w_uk_hPL.shape[2]
    latent_sL, rope_sR = rows_sE.to(dtype).tensor_split([latent], dim=1)
    # expanded, because a product of all heads with one tensor is rounded differently where that requires grad
    latent_hsL = latent_sL.expand(len(w_uk_hPL), -1, -1)
    keys_hPs = product(w_uk_hPL.to(dtype), latent_hsL.mT).to(dtype)
    keys_hXs = torch.cat([keys_hPs, rope_sR.mT.contiguous().expand(len(keys_hPs), -1, -1)], dim=1)
    values_hsV = product(latent_hsL, w_uv_hVL.to(dtype).mT).to(dtype)
    if not may_hold(~(keys_hXs.sum() + values_hsV.sum()).isfinite()):
        return HeadKeys(keys_hXs, values_hsV, None)
    lost_s = ~(finite_rows(keys_hXs.mT) & finite_rows(values_hsV)).all(0)
    return HeadKeys(keys_hXs.masked_fill_(lost_s, 0), values_hsV.masked_fill_(lost_s[:, None], 0), lost_s)


def _weigh(tile: Tile, made: HeadKeys) -> Weighing:
    """Turn counts into what is added to logits.

    Queries that have no key, or one that is not finite, weigh all keys alike: nothing of theirs is used.
    """
    bias_ts, spoiled_t = tile.count_ts.to(wide(made.values_hsV.dtype)), None
    if made.lost_s is not None:
        spoiled_t = ((tile.count_ts > 0) & made.lost_s[: bias_ts.shape[1]]).any(-1)
        bias_ts.masked_fill_(spoiled_t[:, None], 1)
    if tile.empty_t is not None:
        bias_ts.masked_fill_(tile.empty_t[:, None], 1)
    if tile.repeats:
        bias_ts.log_()
    else:  # ln n = 1 - 1/n for 0 and 1, in a fifth of the time
        bias_ts.reciprocal_().neg_().add_(1)
    return Weighing(bias_ts, tile.empty_t, spoiled_t)


def _of_step(made: HeadKeys, heads: slice, group: slice, weighing: Weighing) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a step's heads that its queries see."""
    inside, seen = slice(heads.start - group.start, heads.stop - group.start), weighing.bias_ts.shape[1]
    return made.keys_hXs[inside, :, :seen], made.values_hsV[inside, :seen]


def _weights(q_htX: Tensor, keys_hXs: Tensor, bias_ts: Tensor, scale: float) -> Tensor:
    """Return the softmax of ``scale · q k + bias``; a NaN, from ``inf - inf`` of a key not selected, is looked into."""
    z_hts = product(q_htX, keys_hXs)
    p_hts = torch.softmax(torch.add(bias_ts, z_hts, alpha=scale, out=z_hts), dim=-1, out=z_hts)
    if may_hold(p_hts[..., 0].isnan()):
        z_hts = product(q_htX, keys_hXs).mul_(scale)
        p_hts = torch.softmax(torch.where(bias_ts == -torch.inf, -torch.inf, z_hts + bias_ts), dim=-1)
    return p_hts
