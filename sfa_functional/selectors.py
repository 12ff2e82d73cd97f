"""Other ways to choose keys, for experiments: pass one as ``select=`` wherever the lightning indexer would run.

A selector is called by keyword with ``q_TJI, k_SI, w_TJ`` (what the indexer compares; None in a layer without one),
``q_THE, kv_SE`` (what attention compares; ``kv_SE`` is None where the latents are dealt out over ranks), ``start_T,
end_T, k`` and ``row_S`` (None, or where a pool holds each key
row), and returns int32 ``topk_TK``: visible key rows, unused entries -1.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from . import blockwise_indexer, operators, tiles
from .indexer import lightning_indexer
from .paged import Rows, num_rows
from .precision import require, without_autocast
from .quantize import AMAX_FLOOR, Code, Scales, quantize_index, quantized_index_scores

Selector = Callable[..., Int32[Tensor, "T K"]]


def window(
    *,
    kv_SE: Rows | None = None,
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    k: int,
    row_S: Int[Tensor, " rows"] | None = None,
    **_: Any,
) -> Int32[Tensor, "T K"]:
    """Choose the last k visible keys: a sliding window.

    Args:
        kv_SE: key rows; only their number S matters, which is that of ``row_S`` if it is given. None takes the ranges
            as they are.
        start_T: first visible key row of each query; below 0 is 0.
        end_T: one past the last; above S is S.
        k: keys to choose, >= 1.
        row_S: row of a pool for each key row.

    Returns:
        int32 ``topk_TK``, ascending, then -1.

    Raises:
        ValueError: k < 1.

    Gradients: none (integers).
    Cost: T·K integers; no score is computed.
    Source: Beltagy et al., "Longformer" (2020), section 3.1.
    """
    require(k >= 1, "window", "k must be >= 1", k)
    start_T, end_T = start_T.clamp(min=0), end_T.clamp(min=0)
    if kv_SE is not None:
        end_T = end_T.clamp(max=_num_keys(kv_SE, row_S, "window"))
    first_t1 = torch.maximum(start_T, end_T - k)[:, None]
    rows_TK = first_t1 + torch.arange(k, device=start_T.device)
    return torch.where(rows_TK < end_T[:, None], rows_TK, -1).to(torch.int32)


def random_keys(generator: torch.Generator) -> Selector:
    """Return a selector that chooses k visible keys at random, the same ones for the same ranges.

    Every pair of a query's last visible row and a key row gets a number, the k highest are chosen. So a query gets the
    same keys however a batch is cut or dealt out to ranks.

    Args:
        generator: gives the selector its seed (one number is drawn from it, here); calls draw nothing from it, so a
            second call with the same arguments returns the same keys. Layers get the same keys from one selector:
            make one per layer where that matters.

    Returns:
        A selector.

    Raises:
        ValueError: in the call: k < 1.

    Cost: a hash per query and key of its tile, and the selection.
    Source: Steele et al., "Fast splittable pseudorandom number generators" (2014), for the hash.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))

    def select(
        *, kv_SE: Rows | None, start_T: Tensor, end_T: Tensor, k: int, row_S: Tensor | None = None, **_: Any
    ) -> Tensor:
        def score(queries: slice, low: int, high: int) -> Tensor:
            key_S = torch.arange(low, high, device=start_T.device)
            return _hash(end_T.long()[queries, None] * 0x9E3779B1 + key_S * 0x85EBCA77 + seed)

        return _best("random_keys", score, start_T, end_T, _num_keys(kv_SE, row_S, "random_keys"), k)

    return select


def _hash(counter: Tensor) -> Tensor:
    """Mix 64-bit counters to numbers in [0, 1): the same on every device, whatever the tiles and transforms.

    The mixing steps are those of SplitMix64 (Steele et al., 2014); shifts of negative numbers are made unsigned.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        counter = (counter ^ ((counter >> shift) & (2 ** (64 - shift) - 1))) * factor
    return ((counter >> 11) & (2**53 - 1)).double() * 2.0**-53


def block_topk(block: int) -> Selector:
    """Return a selector that chooses whole blocks of neighbouring keys by their best index score.

    Every key gets the highest score among the visible keys of its block, blocks being runs of ``block`` rows from
    the query's first visible row; then the k best keys are chosen, ties to the lower row. Where k is a multiple of
    ``block``, these are whole blocks, unless the last visible one is chosen and is short: then the block that comes
    last in rank is cut too.

    Args:
        block: rows of a block, >= 1; 1 is the lightning indexer.

    Returns:
        A selector; it needs the layer's indexer.

    Raises:
        ValueError: block < 1; in the call: k < 1, or a layer without an indexer.

    Cost: the scores of `lightning_indexer`, a tile of queries at a time with all keys of its span, and one pass more.
    Source: the block selection of Yuan et al., "Native Sparse Attention" (2025), section 3.3.2, with index scores.
    """
    require(block >= 1, "block_topk", "block must be >= 1", block)

    def select(
        *,
        q_TJI: Tensor | None,
        k_SI: Tensor | None,
        w_TJ: Tensor | None,
        start_T: Tensor,
        end_T: Tensor,
        k: int,
        row_S: Tensor | None,
        **_: Any,
    ) -> Tensor:
        if q_TJI is None or k_SI is None or w_TJ is None:
            raise ValueError("block_topk: the layer must have an indexer; got none")
        if block == 1:
            return lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=k, row_S=row_S)

        def score(queries: slice, low: int, high: int) -> Tensor:
            k_sI, held_s = tiles.key_tile(k_SI, slice(low, high), row_S)
            score_ts = blockwise_indexer.index_scores(q_TJI[queries], k_sI, w_TJ[queries])
            score_ts = score_ts if held_s is None else torch.where(held_s, score_ts, torch.nan)
            s_s = torch.arange(low, high, device=start_T.device)
            seen_ts = tiles.visible(s_s, start_T[queries], end_T[queries]) & ~score_ts.isnan()
            block_ts = (s_s - start_T[queries].clamp(min=0)[:, None]).clamp(0, max(0, high - low - 1)) // block
            lowest_ts = torch.full_like(score_ts, -torch.inf)
            best_ts = lowest_ts.scatter_reduce(1, block_ts, torch.where(seen_ts, score_ts, lowest_ts), "amax")
            return torch.where(seen_ts, best_ts.gather(1, block_ts), torch.nan)

        return _best("block_topk", score, start_T, end_T, _num_keys(k_SI, row_S, "block_topk"), k, heads=q_TJI.shape[1])

    return select


def quantized_indexer(
    dtype: Code, *, hadamard: bool = False, scales: Scales = "power_of_two", floor: float = AMAX_FLOOR
) -> Selector:
    """Return the lightning indexer on queries and keys rounded to eight bits.

    `quantize_index` of both, `quantized_index_scores`, `select_topk`: what an eight-bit index cache selects.

    Args:
        dtype: "fp8" or "int8".
        hadamard: rotate both sides first (`norm.hadamard`); it helps where a few columns of both are outliers.
        scales: "power_of_two" or "plain".
        floor: as `quantize_fp8`.

    Returns:
        A selector; it needs the layer's indexer.

    Raises:
        ValueError: an unknown word; in the call: k < 1, a layer without an indexer, or as `quantize_index`.

    Cost: the scores of `lightning_indexer` in float32, and the rounding of every tile of keys again for each tile of
        queries.
    Source: DeepSeek-V3.2-Exp, inference/model.py, class Indexer.
    """
    require(dtype in ("fp8", "int8"), "quantized_indexer", "dtype must be 'fp8' or 'int8'", repr(dtype))
    known = scales in ("power_of_two", "plain")
    require(known, "quantized_indexer", "scales must be 'power_of_two' or 'plain'", repr(scales))

    def select(
        *,
        q_TJI: Tensor | None,
        k_SI: Tensor | None,
        w_TJ: Tensor | None,
        start_T: Tensor,
        end_T: Tensor,
        k: int,
        row_S: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if q_TJI is None or k_SI is None or w_TJ is None:
            raise ValueError("quantized_indexer: the layer must have an indexer; got none")
        index_q, index_k, weight_TJ = q_TJI.detach(), k_SI.detach(), w_TJ.detach()

        def score(queries: slice, low: int, high: int) -> Tensor:
            q = quantize_index(index_q[queries], dtype=dtype, hadamard=hadamard, scales=scales, floor=floor)
            scores = []
            for keys in tiles.key_tiles((low, high)):
                k_kI, known_k = tiles.key_tile(index_k, keys, row_S)
                k_tile = quantize_index(k_kI, dtype=dtype, hadamard=hadamard, scales=scales, floor=floor)
                score_tk = quantized_index_scores(q, k_tile, weight_TJ[queries])
                scores.append(score_tk if known_k is None else torch.where(known_k, score_tk, torch.nan))
            return torch.cat(scores, dim=-1)

        num_keys = index_k.shape[0] if row_S is None else row_S.shape[0]
        heads = -(-index_q.shape[1] * tiles.KEY_TILE // max(1, num_keys))  # a tile of keys is held per head
        return _best("quantized_indexer", score, start_T, end_T, num_keys, k, heads=heads)

    return select


def best_keys(scale: float) -> Selector:
    """Return a selector that chooses the k keys with the most attention mass, summed over heads: the upper bound.

    ``p[t, s] = mean over heads of softmax_s(scale · q[t, h] · kv[s])`` over the visible keys, then the k largest.
    No selection of k keys for all heads keeps more of the dense attention's mass.

    Args:
        scale: of the logits, ``config.softmax_scale``.

    Returns:
        A selector.

    Raises:
        ValueError: in the call: k < 1, or no latent keys (no rank has them all over a sharded cache).

    Cost: dense attention's weights, a tile of queries at a time with all keys of its span.
    Source: the definition of attention mass; the oracle that published selections are measured against.
    """

    def select(
        *,
        q_THE: Tensor,
        kv_SE: Rows | None,
        start_T: Tensor,
        end_T: Tensor,
        k: int,
        row_S: Tensor | None,
        **_: Any,
    ) -> Tensor:
        if kv_SE is None:
            raise ValueError("best_keys: kv_SE must be the latent keys, all of them on this rank; got None")
        rows = kv_SE

        def score(queries: slice, low: int, high: int) -> Tensor:
            ranges = start_T[queries], end_T[queries], (low, high)
            return operators.mean_weights(q_THE[queries].detach(), rows, *ranges, scale=scale, row_S=row_S)

        return _best("best_keys", score, start_T, end_T, _num_keys(rows, row_S, "best_keys"), k, heads=q_THE.shape[1])

    return select


def _best(
    name: str,
    score: Callable[[slice, int, int], Tensor],
    start_T: Tensor,
    end_T: Tensor,
    num_keys: int,
    k: int,
    *,
    heads: int = 1,
) -> Tensor:
    """Choose the k best visible keys by scores that ``score(queries, low, high)`` gives for a tile."""
    require(k >= 1, name, "k must be >= 1", k)
    start_T, end_T = start_T.clamp(0, num_keys), end_T.clamp(0, num_keys)
    limit = max(1, tiles.TILE_VALUES // max(1, num_keys * heads))
    selections = []
    for queries, (low, high) in tiles.query_tiles(start_T, end_T, num_keys, limit):
        with torch.no_grad(), without_autocast(start_T):
            score_ts = score(queries, low, high)
        topk_tK = blockwise_indexer.select_topk(score_ts, start_T[queries] - low, end_T[queries] - low, k=k)
        selections.append(torch.where(topk_tK >= 0, topk_tK + low, -1))
    return torch.cat(selections).to(torch.int32)


def _num_keys(kv_SE: Rows | None, row_S: Tensor | None, function: str) -> int:
    if row_S is not None:
        return row_S.shape[0]
    if kv_SE is None:
        raise ValueError(f"{function}: kv_SE or row_S must say how many keys there are; got neither")
    return num_rows(kv_SE)
