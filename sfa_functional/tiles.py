"""Tiles: which queries are worked on together, which keys they read, and how much fits a workspace.

A tile holds queries whose visible ranges start at the same row (one request, one document), and reads no key outside
the span that they see. Keys are read in runs, through ``row_S`` where they live in a pool. Spans are read from the
ranges where that costs nothing (a CPU tensor outside of torch.func transforms and torch.compile); elsewhere a tile
reads all keys, other requests' too, with the same result for more work.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .paged import SplitRows, fetch_rows, gather_rows, num_rows

WORKSPACE = 64 << 20
"""Bytes of temporary tensors that a function may hold unless its ``workspace_bytes`` says otherwise."""
CPU_STEP = 4 << 20
"""Bytes that one step works on where these are to stay in a CPU's cache: larger steps wait for memory."""
TILE_VALUES = 2**20
"""Values of the largest float tensor that a selector's tile makes (4 MiB in float32); it has at least one query."""
KEY_TILE = 1024
"""Keys read at a time: a product of so many columns runs at its full rate."""


def queries_per_step(bytes_per_query: int, device: torch.device, workspace_bytes: int) -> int:
    """Return how many queries a step takes: as many as the workspace holds, on a CPU as its cache holds; at least 1."""
    step = min(workspace_bytes, CPU_STEP) if device.type == "cpu" else workspace_bytes
    return max(1, step // max(1, bytes_per_query))


def products_per_step(bytes_each: int, device: torch.device, workspace_bytes: int) -> int:
    """Return how many products a batch of them holds: on a CPU each thread takes a step's worth of its own.

    Threads share a batch better than one product: two take 3.6 ms for a query's attention in pairs, 3.9 one by one.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    count = threads * queries_per_step(bytes_each, device, workspace_bytes // threads)
    return max(1, min(count, workspace_bytes // max(1, bytes_each)))


def keys_per_run(rows: int, width: int, itemsize: int) -> int:
    """Return how many keys a product of ``rows`` queries and heads reads: `KEY_TILE`, more where these are few."""
    return max(KEY_TILE, CPU_STEP // (itemsize * max(1, rows, width)))


def may_hold(mask: Tensor) -> bool:
    """Say whether a mask may hold a True: looked up on a CPU, taken for granted where looking would wait or can't."""
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    try:
        return bool(mask.any())
    except RuntimeError:  # inside vmap
        return True


def all_finite(x: Tensor) -> bool:
    """Say whether numbers on a CPU are finite, by their sum: one pass, where ``isfinite().all()`` takes six.

    Says no of finite numbers whose sum overflows; whoever is told no looks closer.
    """
    return math.isfinite(x.sum().item())


def finite_rows(rows: Tensor) -> Tensor:
    """Say which rows hold no NaN and no infinity; eight times as fast as ``isfinite().all(-1)`` on a CPU."""
    return rows.detach().abs().amax(-1) < torch.inf


def visible(s_S: Tensor, start_T: Tensor, end_T: Tensor) -> Tensor:
    """Return the mask [T, S] of ``start <= s < end``."""
    return (s_S >= start_T[:, None]) & (s_S < end_T[:, None])


def key_tile(rows: Tensor | SplitRows, keys: slice, row_S: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Read a run of key rows, and which of them a pool holds (None: all)."""
    if row_S is None:
        return fetch_rows(rows, keys), None
    index_k = row_S[keys]
    known_k = (index_k >= 0) & (index_k < num_rows(rows))
    if not may_hold(~known_k):
        return gather_rows(rows, index_k), None
    return fetch_rows(rows, index_k), known_k


def visible_tile(
    rows: Tensor | SplitRows, start_t: Tensor, end_t: Tensor, keys: slice, row_S: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Read a run of key rows for a tile of queries.

    Returns:
        The rows, those that are not finite replaced by zeros; which keys are hidden from which query [t, k], None
        where all see all; and which queries see a row that is not finite [t], None where none does. Such a query's
        result is to be NaN, written over at the end: a NaN inside a product would reach the results and gradients
        of other queries.
    """
    rows_kE, known_k = key_tile(rows, keys, row_S)
    seen_tk = visible(torch.arange(keys.start, keys.stop, device=start_t.device), start_t, end_t)
    seen_tk = seen_tk if known_k is None else seen_tk & known_k
    spoiled_t, spoiled_k = None, ~finite_rows(rows_kE)
    if may_hold(spoiled_k):
        rows_kE = rows_kE.masked_fill(spoiled_k[:, None], 0)
        spoiled_t = (seen_tk & spoiled_k).any(-1)
    hidden_tk = ~seen_tk
    return rows_kE, hidden_tk if may_hold(hidden_tk) else None, spoiled_t


def key_tiles(span: tuple[int, int], length: int | None = None) -> Iterator[slice]:
    """Cut a span of key rows into runs of at most ``length``; None is `KEY_TILE`."""
    length = KEY_TILE if length is None else length
    for low in range(*span, length):
        yield slice(low, min(low + length, span[1]))


def query_tiles(start_T: Tensor, end_T: Tensor, num_keys: int, limit: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Cut queries into tiles of at most ``limit`` and yield each with the span of key rows that it sees.

    Where the ranges can be read, a tile also ends where the first visible row changes. No queries make one empty
    tile, so that results keep their shapes.
    """
    count = start_T.shape[0]
    ranges = host_ranges(start_T, end_T, num_keys)
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


def host_ranges(start_T: Tensor, end_T: Tensor, num_keys: int) -> list[tuple[int, int]] | None:
    """Return the visible ranges as numbers, (0, 0) where empty; None where reading them would wait or can't be done."""
    if torch.compiler.is_compiling() or start_T.device.type != "cpu" or end_T.device.type != "cpu":
        return None
    try:
        ranges = zip(start_T.tolist(), end_T.tolist(), strict=True)
    except RuntimeError:  # inside vmap the ranges are not numbers
        return None
    clipped = [(max(start, 0), min(end, num_keys)) for start, end in ranges]
    return [(start, end) if start < end else (0, 0) for start, end in clipped]
