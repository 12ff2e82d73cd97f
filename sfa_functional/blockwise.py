"""The maths in tiles, so that nothing of T·S·heads is ever held: the default implementation.

Tensors are cut into tiles of queries; keys are read tile by tile, through ``row_S`` where they live in a pool. A tile
holds queries whose visible ranges start at the same row (one request, one document), and reads no key outside the
span that they see. Spans are read from the ranges where that costs nothing (a CPU tensor outside of torch.func
transforms and torch.compile); elsewhere a tile reads all keys, other requests' too, with the same result for more work.

Backward is autograd's through these tiles.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .paged import SplitRows, fetch_rows, map_rows, num_rows
from .precision import wide

TILE_VALUES = 2**20
"""Values of the largest float tensor that a tile makes (4 MiB in float32); a tile has at least one query."""
KEY_TILE = 1024
"""Keys read at a time."""


def sparse_attention(
    q_THE: Tensor, kv: Tensor | SplitRows, topk_TK: Tensor, *, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend to selected rows: gather a tile's rows, then two batched products. See `attention.sparse_attention`."""
    rows = max(1, TILE_VALUES // max(1, topk_TK.shape[1] * max(q_THE.shape[1:])))
    kv = map_rows(kv, summed_wide)
    outs, lses = [], []
    for q_tHE, topk_tK in zip(q_THE.split(rows), topk_TK.split(rows), strict=True):
        valid_tK = (topk_tK >= 0) & (topk_tK < num_rows(kv))
        kv_tKE, spoiled_t = take_out(fetch_rows(kv, topk_tK).to(wide(q_THE.dtype)), valid_tK)
        p_tHK, lse_tH = softmax_weights(q_tHE, kv_tKE, valid_tK, scale=scale)
        out_tHL = p_tHK @ kv_tKE[..., :value_dim]
        outs.append(torch.where(spoiled_t[:, None, None], torch.nan, out_tHL).to(q_THE.dtype))
        lses.append(torch.where(spoiled_t[:, None], torch.nan, lse_tH))
    return torch.cat(outs), torch.cat(lses)


def take_out(rows: Tensor, valid_tK: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the rows that are not finite, and say which queries of the tile hold one among their valid rows.

    Their results are to be NaN, written over at the end: a NaN inside a product would reach, in backward, the rows
    of every other query, as would a zero gradient that meets it.
    """
    finite = finite_rows(rows)
    return torch.where(finite[..., None], rows, 0), (valid_tK & ~finite).any(-1)


def finite_rows(rows: Tensor) -> Tensor:
    """Say which rows hold no NaN and no infinity; eight times as fast as ``isfinite().all(-1)`` on a CPU."""
    return rows.detach().abs().amax(-1) < torch.inf


def summed_wide(rows: Tensor) -> Tensor:
    """Cast key rows whose gradient is wanted to the dtype of sums, once for all tiles and queries.

    A row's gradient is a sum over all queries that use it; in bfloat16 that sum would stop growing at 256 ones.
    Without a gradient nothing is cast here: a pool may be large, and a tile is cast when it is read.
    """
    return rows.to(wide(rows.dtype)) if torch.is_grad_enabled() and rows.requires_grad else rows


def softmax_weights(q_tHE: Tensor, kv: Tensor, valid_tK: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Return the weights ``exp(z - lse)`` and lse of a tile; rows [t, K, E] of each query or [K, E] of all.

    A query without a valid row gets weights 0 and lse -inf. Its lse is patched before ``exp``: patching the result
    would leave NaN in the gradient.
    """
    valid_t1K, any_t1 = valid_tK[:, None], valid_tK.any(-1)[:, None]
    q_tHE = torch.where(any_t1[..., None], q_tHE, 0)  # its zero gradient would meet a NaN in the shared product
    z_tHK = (q_tHE.to(kv.dtype) * scale) @ kv.mT
    z_tHK = torch.where(valid_t1K, z_tHK, -torch.inf)
    lse_tH = torch.logsumexp(torch.where(any_t1[..., None], z_tHK, 0.0), dim=-1)
    return torch.exp(z_tHK - lse_tH[..., None]), torch.where(any_t1, lse_tH, -torch.inf)


def dense_attention(
    q_THE: Tensor,
    kv: Tensor | SplitRows,
    start_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
    row_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to visible rows, a tile of keys after the other. See `attention.dense_attention`."""
    num_keys = num_rows(kv) if row_S is None else row_S.shape[0]
    limit = max(1, TILE_VALUES // max(1, q_THE.shape[1] * KEY_TILE))
    kv = map_rows(kv, summed_wide)
    outs, lses = [], []
    for queries, span in query_tiles(start_T, end_T, num_keys, limit):
        q_tHE = q_THE[queries].to(wide(q_THE.dtype))
        out_tHL = q_tHE.new_zeros(*q_tHE.shape[:2], value_dim)
        lse_tH = torch.full_like(out_tHL[..., 0], -torch.inf)
        spoiled_t = torch.zeros_like(start_T[queries], dtype=torch.bool)
        for keys in key_tiles(span):
            kv_kE, visible_tk = visible_rows(kv, start_T[queries], end_T[queries], keys, row_S)
            kv_kE, spoiled_here_t = take_out(kv_kE.to(out_tHL.dtype), visible_tk)
            p_tHk, part_lse_tH = softmax_weights(q_tHE, kv_kE, visible_tk, scale=scale)
            out_tHL, lse_tH = merge([(out_tHL, lse_tH), (p_tHk @ kv_kE[:, :value_dim], part_lse_tH)])
            spoiled_t = spoiled_t | spoiled_here_t
        outs.append(torch.where(spoiled_t[:, None, None], torch.nan, out_tHL).to(q_THE.dtype))
        lses.append(torch.where(spoiled_t[:, None], torch.nan, lse_tH))
    return torch.cat(outs), torch.cat(lses)


def mean_weights(
    q_tHE: Tensor,
    kv: Tensor | SplitRows,
    start_t: Tensor,
    end_t: Tensor,
    span: tuple[int, int],
    *,
    scale: float,
    row_S: Tensor | None = None,
) -> Tensor:
    """Return the attention weights of a tile over its span of keys, averaged over heads: [t, span].

    Rows that are not finite make the weights of the queries that see them NaN, and no others.
    """
    kv_kE, visible_tk = visible_rows(kv, start_t, end_t, slice(*span), row_S)
    kv_kE, spoiled_t = take_out(kv_kE.to(wide(q_tHE.dtype)), visible_tk)
    p_tHk, _ = softmax_weights(q_tHE, kv_kE, visible_tk, scale=scale)
    return torch.where(spoiled_t[:, None], torch.nan, p_tHk.mean(1))


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


def index_scores(q_TJI: Tensor, k_SI: Tensor, w_TJ: Tensor) -> Tensor:
    """Score keys for a tile of queries, [S, I] of all or [t, K, I] of each. See `indexer.index_scores`.

    Rows that are not finite are taken out of the shared product and put back as NaN: in the backward of a product
    their zero gradients would still meet a NaN.
    """
    dtype = wide(q_TJI.dtype)
    finite_S = finite_rows(k_SI)
    k_SI = torch.where(finite_S[..., None], k_SI, 0).to(dtype)
    heads_TJS = torch.relu(q_TJI.to(dtype) @ k_SI.mT)
    score_TS = (w_TJ.to(dtype)[:, None] @ heads_TJS)[:, 0]
    return torch.where(finite_S, score_TS, torch.nan)


def select_topk(score_TS: Tensor, start_T: Tensor, end_T: Tensor, *, k: int) -> Tensor:
    """Choose the k best visible keys by the k-th value. See `indexer.select_topk`."""
    num_keys = score_TS.shape[1]
    s_S = torch.arange(num_keys, device=score_TS.device)
    visible_TS = visible(s_S, start_T, end_T)
    if num_keys <= k:
        return compact(visible_TS, k)
    eligible_TS = visible_TS & ~score_TS.isnan()
    rank_TS = torch.where(eligible_TS, score_TS, -torch.inf)
    kth_T1 = rank_TS.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_TS = eligible_TS & (rank_TS > kth_T1)
    level_TS = eligible_TS & (rank_TS == kth_T1)
    room_T1 = k - above_TS.sum(-1, keepdim=True)
    best_TS = above_TS | (level_TS & (level_TS.cumsum(-1) <= room_T1))
    few_T1 = visible_TS.sum(-1, keepdim=True) <= k
    return compact(torch.where(few_T1, visible_TS, best_TS), k)


def compact(chosen_TS: Tensor, k: int) -> Tensor:
    """List the true columns of every row (at most k) in ascending order, then -1, as int32."""
    place_TS = torch.where(chosen_TS, chosen_TS.cumsum(-1) - 1, k)
    column_TS = torch.arange(chosen_TS.shape[1], device=chosen_TS.device, dtype=torch.int32).expand_as(place_TS)
    return column_TS.new_full((chosen_TS.shape[0], k + 1), -1).scatter(1, place_TS, column_TS)[:, :k]


def lightning_indexer(
    q_TJI: Tensor,
    k_SI: Tensor,
    w_TJ: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    *,
    k: int,
    row_S: Tensor | None = None,
) -> Tensor:
    """Score and select, a tile of queries at a time. See `indexer.lightning_indexer`."""
    num_keys = k_SI.shape[0] if row_S is None else row_S.shape[0]
    start_T, end_T = start_T.clamp(0, num_keys), end_T.clamp(0, num_keys)
    limit = max(1, TILE_VALUES // max(1, q_TJI.shape[1] * KEY_TILE, num_keys))
    selections = []
    for queries, (low, high) in query_tiles(start_T, end_T, num_keys, limit):
        start_t, end_t = start_T[queries] - low, end_T[queries] - low
        if high - low <= k:  # every visible key is chosen, whatever it scores
            score_ts = torch.zeros(start_t.shape[0], high - low, device=k_SI.device)
        else:
            tiles = []
            for keys in key_tiles((low, high)):
                k_kI, known_k = key_tile(k_SI, keys, row_S)
                score_tk = index_scores(q_TJI[queries], k_kI, w_TJ[queries])
                tiles.append(score_tk if known_k is None else torch.where(known_k, score_tk, torch.nan))
            score_ts = torch.cat(tiles, dim=-1)
        topk_tK = select_topk(score_ts, start_t, end_t, k=k)
        selections.append(torch.where(topk_tK >= 0, topk_tK + low, -1))
    return torch.cat(selections).to(torch.int32)


def visible(s_S: Tensor, start_T: Tensor, end_T: Tensor) -> Tensor:
    """Return the mask [T, S] of ``start <= s < end``."""
    return (s_S >= start_T[:, None]) & (s_S < end_T[:, None])


def key_tile(rows: Tensor | SplitRows, keys: slice, row_S: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Read a run of key rows, and which of them a pool holds (None: all)."""
    if row_S is None:
        return fetch_rows(rows, keys), None
    index_k = row_S[keys]
    return fetch_rows(rows, index_k), (index_k >= 0) & (index_k < num_rows(rows))


def visible_rows(
    rows: Tensor | SplitRows, start_t: Tensor, end_t: Tensor, keys: slice, row_S: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Read a run of key rows and the mask of which query sees which; rows that nobody sees are zero."""
    rows_kE, known_k = key_tile(rows, keys, row_S)
    visible_tk = visible(torch.arange(keys.start, keys.stop, device=start_t.device), start_t, end_t)
    visible_tk = visible_tk if known_k is None else visible_tk & known_k
    return torch.where(visible_tk.any(0)[:, None], rows_kE, 0), visible_tk


def key_tiles(span: tuple[int, int]) -> Iterator[slice]:
    """Cut a span of key rows into runs of at most `KEY_TILE`; no rows make one empty run, so that graphs stay whole."""
    for low in range(span[0], max(span[1], span[0] + 1), KEY_TILE):
        yield slice(low, min(low + KEY_TILE, span[1]))


def query_tiles(start_T: Tensor, end_T: Tensor, num_keys: int, limit: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Cut queries into tiles of at most ``limit`` and yield each with the span of key rows that it sees.

    Where the ranges can be read, a tile also ends where the first visible row changes. No queries make one empty
    tile, so that results keep their shapes.
    """
    count = start_T.shape[0]
    ranges = _host_ranges(start_T, end_T, num_keys)
    if ranges is None or count == 0:
        for first in range(0, max(count, 1), limit):
            yield slice(first, min(first + limit, count)), (0, num_keys if count else 0)
        return
    first = 0
    while first < count:
        low, high = ranges[first]
        last = first + 1
        while last < count and last - first < limit:
            start, end = ranges[last]
            if start < end and low < high and start != low:
                break
            if start < end:
                low, high = (start, max(high, end)) if low < high else (start, end)
            last += 1
        yield slice(first, last), (low, high)
        first = last


def _host_ranges(start_T: Tensor, end_T: Tensor, num_keys: int) -> list[tuple[int, int]] | None:
    """Return the visible ranges as numbers, (0, 0) where empty; None where reading them would wait or can't be done."""
    if torch.compiler.is_compiling() or start_T.device.type != "cpu" or end_T.device.type != "cpu":
        return None
    try:
        ranges = zip(start_T.tolist(), end_T.tolist(), strict=True)
    except RuntimeError:  # inside vmap the ranges are not numbers
        return None
    clipped = [(max(start, 0), min(end, num_keys)) for start, end in ranges]
    return [(start, end) if start < end else (0, 0) for start, end in clipped]
