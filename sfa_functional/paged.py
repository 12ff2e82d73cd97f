"""Key rows and where they live: split rows, block tables, slots, caches. The only file that knows a row's address."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from .config import SFAConfig
from .implementation import Implementation, choose
from .precision import require, require_float, require_integers, require_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitRows:
    """Key rows whose latent and rope columns lie in two tensors; stands for the joint [S, E] tensor anywhere."""

    latent_SL: Float[Tensor, "S L"]
    rope_SR: Float[Tensor, "S R"]


@dataclass(frozen=True, kw_only=True, eq=False)
class JointCache:
    """A pool of pages with latent and rope columns side by side; ``index_k`` is None for a shared layer.

    It has as many pages of index keys as of latents, unless those are shared out over ranks and these are not.
    """

    kv: Float[Tensor, "blocks block_size E"]
    index_k: Float[Tensor, "index_blocks block_size I"] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitCache:
    """A pool of pages with latent and rope columns apart, as the Ascend operators want them."""

    latent: Float[Tensor, "blocks block_size L"]
    rope: Float[Tensor, "blocks block_size R"]
    index_k: Float[Tensor, "index_blocks block_size I"] | None = None


Cache = JointCache | SplitCache
Rows = Float[Tensor, "S E"] | SplitRows

for _cls in (SplitRows, JointCache, SplitCache):
    torch.export.register_dataclass(_cls, serialized_type_name=f"sfa_functional.{_cls.__name__}")


def num_rows(rows: Tensor | SplitRows) -> int:
    """Return how many key rows there are."""
    return (rows.latent_SL if isinstance(rows, SplitRows) else rows).shape[0]


def require_rows_fit(function: str, q_THE: Tensor, rows: Rows) -> None:
    """Refuse queries and key rows that are not [T, H, E] and [S, E] of one floating dtype, split rows likewise."""
    parts = [rows.latent_SL, rows.rope_SR] if isinstance(rows, SplitRows) else [rows]
    shapes = (tuple(q_THE.shape), *(tuple(part.shape) for part in parts))
    fits = q_THE.ndim == 3 and all(part.ndim == 2 and part.shape[0] == parts[0].shape[0] for part in parts)
    fits = fits and sum(part.shape[-1] for part in parts) == q_THE.shape[-1]
    require(fits, function, "q and kv must be [T, H, E] and [S, E]", shapes)
    require_float(function, q=q_THE, kv=parts[0], rope=None if len(parts) == 1 else parts[1])


def map_rows(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    """Apply a function of one tensor to key rows, to each part where they are split."""
    if isinstance(rows, SplitRows):
        return SplitRows(latent_SL=change(rows.latent_SL), rope_SR=change(rows.rope_SR))
    return change(rows)


def fetch_rows(rows: Tensor | SplitRows, index: Int[Tensor, "*shape"] | slice) -> Float[Tensor, "*shape E"]:
    """Read key rows by number; a number outside ``[0, S)`` reads a row of zeros.

    The rows are zeroed rather than weighted with zero, because 0 · NaN is NaN: what stands in a row that nobody
    asked for never reaches a result or a gradient.

    Args:
        rows: [S, E], or `SplitRows`, whose columns are joined here and nowhere else.
        index: row numbers of any shape, or a slice (which reads a joint tensor without a copy).

    Returns:
        One row per number.

    Gradients: of rows: a sum over the numbers that read a row.
    Cost: the copied rows.
    """
    if isinstance(rows, SplitRows):
        return torch.cat([fetch_rows(rows.latent_SL, index), fetch_rows(rows.rope_SR, index)], dim=-1)
    if isinstance(index, slice):
        return rows[index]
    if rows.shape[0] == 0:  # a row to read, so that the graph stays whole
        rows, index = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), torch.full_like(index, -1)
    valid = (index >= 0) & (index < rows.shape[0])
    return torch.where(valid[..., None], rows[torch.where(valid, index, 0).long()], 0)


def gather_rows(rows: Tensor | SplitRows, index: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape E"]:
    """Read key rows by numbers that all lie in ``[0, S)``: a plain copy, a fifth of the time of `fetch_rows`."""
    if isinstance(rows, SplitRows):
        return torch.cat([gather_rows(rows.latent_SL, index), gather_rows(rows.rope_SR, index)], dim=-1)
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)


def present_rows(rows: Tensor | SplitRows, row_S: Int[Tensor, " S"]) -> Float[Tensor, "S E"]:
    """Read the row of a pool for each key row; a key that the pool does not hold is a row of NaN."""
    held_S = (row_S >= 0) & (row_S < num_rows(rows))
    return torch.where(held_S[:, None], fetch_rows(rows, row_S), torch.nan)


def map_selection(topk_TK: Int32[Tensor, "T K"], row_S: Int[Tensor, " S"]) -> Int32[Tensor, "T K"]:
    """Translate a selection of key rows into rows of a pool; unused entries stay -1.

    ``result[t, i] = row_S[topk[t, i]]`` where ``0 <= topk < S``, else -1.

    Args:
        topk_TK: key rows, with any value outside ``[0, S)`` unused.
        row_S: which row of the pool holds each key row; -1 where none does.

    Returns:
        int32 rows of the pool, in the order given. Only -1 is unused in it.

    Gradients: none (integers).
    Cost: T·K reads of ``row_S``.
    Source: the block tables of PagedAttention (Kwon et al., 2023), one indirection for all.
    """
    if row_S.shape[0] == 0:
        return torch.full_like(topk_TK, -1)
    valid = (topk_TK >= 0) & (topk_TK < row_S.shape[0])
    mapped = row_S[torch.where(valid, topk_TK, 0).long()]
    return torch.where(valid & (mapped >= 0), mapped, -1).to(torch.int32)


def allocate_blocks(seq_lens: Sequence[int], block_size: int) -> Int32[Tensor, "B U"]:
    """Hand out pages in order, enough for each request's length; for notebooks and tests.

    Args:
        seq_lens: rows that each request will need.
        block_size: rows of a page.

    Returns:
        int32 block table; unused entries are -1, at least one column.

    Raises:
        ValueError: a negative length or a block size below 1.

    Source: the block tables of PagedAttention (Kwon et al., 2023).
    """
    require(block_size >= 1, "allocate_blocks", "block_size must be >= 1", block_size)
    require(all(n >= 0 for n in seq_lens), "allocate_blocks", "lengths must be >= 0", list(seq_lens))
    counts = [-(-n // block_size) for n in seq_lens]
    table = torch.full((len(counts), max([1, *counts])), -1, dtype=torch.int32)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return table


def token_slots(
    block_table_BU: Int32[Tensor, "B U"],
    request_T: Int[Tensor, " T"],
    position_T: Int[Tensor, " T"],
    *,
    block_size: int,
) -> Int[Tensor, " T"]:
    """Return the row of the pool where each token is written.

    ``slot = block_table[request, position // block_size] * block_size + position % block_size``, in int64.

    Args:
        block_table_BU: page numbers of each request, -1 where there is none.
        request_T: request of each token, -1 for padding.
        position_T: position of each token within its request, -1 for padding.
        block_size: rows of a page.

    Returns:
        int64 slots; -1 for padding, for a position past the table, and on a -1 entry of the table.

    Raises:
        ValueError: block_size < 1, or token vectors of different lengths.

    Gradients: none (integers).
    Source: the slot mapping of PagedAttention (Kwon et al., 2023).
    """
    require(block_size >= 1, "token_slots", "block_size must be >= 1", block_size)
    require_integers("token_slots", request_T.numel(), request_T=request_T, position_T=position_T)
    requests, columns = block_table_BU.shape
    if requests == 0 or columns == 0:
        return torch.full_like(position_T, -1, dtype=torch.int64)
    position, request = position_T.long(), request_T.long()
    known = (position >= 0) & (position < columns * block_size) & (request >= 0) & (request < requests)
    position, request = torch.where(known, position, 0), torch.where(known, request, 0)
    block = block_table_BU[request, position // block_size].long()
    return torch.where(known & (block >= 0), block * block_size + position % block_size, -1)


def table_rows(block_table_BU: Int32[Tensor, "B U"], *, block_size: int) -> Int[Tensor, " S"]:
    """Return the pool row of every key row ``b·U·block_size + position`` of a block table; -1 without a page."""
    offset = torch.arange(block_size, device=block_table_BU.device)
    block = block_table_BU.long()[:, :, None]
    return torch.where(block >= 0, block * block_size + offset, -1).flatten()


def validate_block_table(
    block_table_BU: Int32[Tensor, "B U"],
    seq_len_B: Int[Tensor, " B"],
    *,
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    """Refuse a block table in which a request's tokens have no page of the pool; waits for the device.

    Without it, such tokens are written nowhere and attended to by nobody, in silence.

    Args:
        block_table_BU: page numbers of each request.
        seq_len_B: tokens of each request.
        block_size: rows of a page.
        num_blocks: pages of the pool; None leaves the upper bound unchecked.

    Raises:
        ValueError: naming the first request and position at fault, and its page.
    """
    first_U = torch.arange(block_table_BU.shape[1], device=block_table_BU.device) * block_size
    held_BU = block_table_BU >= 0
    if num_blocks is not None:
        held_BU = held_BU & (block_table_BU < num_blocks)
    lacking_BU = (first_U < seq_len_B.to(block_table_BU.device)[:, None]) & ~held_BU
    room = block_table_BU.shape[1] * block_size
    if bool((seq_len_B > room).any()):
        raise ValueError(f"validate_block_table: a sequence must fit its {room} rows; got {int(seq_len_B.max())}")
    for b, u in lacking_BU.nonzero()[:1].tolist():
        pool = "" if num_blocks is None else f" in 0..{num_blocks - 1}"
        rule = f"position {u * block_size} of request {b} must have a page{pool}"
        raise ValueError(f"validate_block_table: {rule}; got {int(block_table_BU[b, u])}")


def init_cache(
    config: SFAConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    layer: int = 0,
    layout: Literal["joint", "split"] = "joint",
    index_blocks: int | None = None,
) -> Cache:
    """Allocate a pool of zeroed pages for one layer.

    Args:
        config: gives L, R and I, and whether the layer has index keys.
        num_blocks: pages of the pool.
        block_size: rows of a page.
        dtype: of all tensors.
        device: where to put them.
        layer: 0-based number; a shared layer has no index keys.
        layout: "joint" (one tensor of E columns) or "split" (L and R columns apart).
        index_blocks: pages of index keys, where they differ in number (`sharding.CacheSplit`); None is num_blocks.

    Returns:
        `JointCache` or `SplitCache`.

    Raises:
        ValueError: a count below 1, an unknown layout or layer.

    Cost: block_size · (num_blocks · E + index_blocks · I) values.
    """
    require(num_blocks >= 1 and block_size >= 1, "init_cache", "counts must be >= 1", (num_blocks, block_size))
    require(layout in ("joint", "split"), "init_cache", "layout must be 'joint' or 'split'", repr(layout))
    require(0 <= layer < config.num_layers, "init_cache", f"layer must be in 0..{config.num_layers - 1}", layer)

    index_blocks = num_blocks if index_blocks is None else index_blocks
    require(index_blocks >= 1, "init_cache", "index_blocks must be >= 1", index_blocks)

    def pages(width: int, count: int = num_blocks) -> Tensor:
        return torch.zeros(count, block_size, width, dtype=dtype, device=device)

    full = config.indexer_types[layer] == "full"
    index_k = pages(config.index_head_dim, index_blocks) if full else None
    if layout == "joint":
        return JointCache(kv=pages(config.key_width), index_k=index_k)
    return SplitCache(latent=pages(config.kv_lora_rank), rope=pages(config.qk_rope_head_dim), index_k=index_k)


def cache_rows(cache: Cache) -> Tensor | SplitRows:
    """View a pool's pages as key rows, numbered by slot; no copy of a contiguous pool.

    Args:
        cache: the pool.

    Returns:
        [blocks · block_size, E], or `SplitRows` of a split pool.

    Gradients: of the pool.
    """
    if isinstance(cache, JointCache):
        return cache.kv.flatten(0, 1)
    return SplitRows(latent_SL=cache.latent.flatten(0, 1), rope_SR=cache.rope.flatten(0, 1))


def index_rows(cache: Cache) -> Float[Tensor, "S I"] | None:
    """View a pool's index keys as rows, numbered by slot; None for a shared layer's pool."""
    return None if cache.index_k is None else cache.index_k.flatten(0, 1)


def write_cache(
    cache: Cache,
    kv_TE: Float[Tensor, "T E"],
    k_TI: Float[Tensor, "T I"] | None,
    slot_T: Int[Tensor, " T"],
    *,
    index_slot_T: Int[Tensor, " T"] | None = None,
    donate: bool = False,
    implementation: Implementation = None,
) -> Cache:
    """Write new rows into a pool; a slot of -1 writes nothing.

    ``result.kv[slot[t]] = kv[t]`` and ``result.index_k[slot[t]] = k[t]`` for every t with ``slot[t] >= 0``.

    Args:
        cache: the pool.
        kv_TE: latent keys of the new tokens.
        k_TI: their index keys; None leaves ``index_k`` as it is.
        slot_T: row of the pool for each token; -1 writes nothing. Slots must differ from each other.
        index_slot_T: other slots for the index keys, where those live apart; None takes ``slot_T``.
        donate: write in place and give the argument away. The old value must not be used again. Without it the
            whole pool is copied (milliseconds per 64K rows), so loops donate.
        implementation: "reference" and "blockwise" are the same plain code, "npu" is Ascend's operators; None chooses
            for the device. A callable takes the same arguments but this one.

    Returns:
        The pool after the write, of the class given.

    Raises:
        ValueError: row counts, widths or dtypes that don't fit, index keys for a pool without them, a donated pool
            that can't be written in place, or an implementation that can't run; nothing is written then.
        IndexError: a slot past the pool (found by the device).

    Gradients: of the pool (without donate) and of the new rows.
    Cost: T rows, plus the pool without ``donate``.
    Source: the slot mapping of PagedAttention (Kwon et al., 2023); skipping -1 and ``donate`` are this library's.
    """
    if callable(implementation):
        return implementation(cache, kv_TE, k_TI, slot_T, index_slot_T=index_slot_T, donate=donate)
    require_rows("write_cache", kv_TE.shape[0], k_TI=k_TI)
    require_integers("write_cache", kv_TE.shape[0], slot_T=slot_T, index_slot_T=index_slot_T)
    if k_TI is not None:
        rule = "k_TI must be None for a pool without index keys"
        require(cache.index_k is not None, "write_cache", rule, tuple(k_TI.shape))
    index_slot_T = slot_T if index_slot_T is None else index_slot_T
    pools = [cache.kv] if isinstance(cache, JointCache) else [cache.latent, cache.rope]
    require(_fits(kv_TE, *pools), "write_cache", "kv must have the pool's width and dtype", _kinds(kv_TE, *pools))
    index_k = cache.index_k
    if k_TI is not None and index_k is not None:
        require(_fits(k_TI, index_k), "write_cache", "k must have index_k's width and dtype", _kinds(k_TI, index_k))
    if donate:
        require_donatable("write_cache", *pools, *([] if index_k is None or k_TI is None else [index_k]))
    named = choose("write_cache", implementation, cache, kv_TE, k_TI, slot_T, index_slot_T=index_slot_T, donate=donate)
    if named == "npu":
        from . import npu  # which reads this file

        return npu.write_cache(cache, kv_TE, k_TI, slot_T, index_slot_T=index_slot_T, donate=donate)
    if k_TI is not None and index_k is not None:
        index_k = _put(index_k, k_TI, index_slot_T, donate)
    parts = kv_TE.split([pages.shape[-1] for pages in pools], dim=-1)
    written = [_put(pages, rows, slot_T, donate) for pages, rows in zip(pools, parts, strict=True)]
    if isinstance(cache, JointCache):
        return JointCache(kv=written[0], index_k=index_k)
    return SplitCache(latent=written[0], rope=written[1], index_k=index_k)


def require_donatable(function: str, *pools: Tensor) -> None:
    """Refuse pools that can't be written in place."""
    for pages in pools:
        require(pages.is_contiguous(), function, "a donated pool must be contiguous", pages.stride())
        needed = pages.is_leaf and pages.requires_grad and torch.is_grad_enabled()
        require(not needed, function, "a donated pool must not be a leaf that requires grad", pages.shape)


def _fits(rows: Tensor, *pools: Tensor) -> bool:
    return rows.shape[-1] == sum(p.shape[-1] for p in pools) and all(p.dtype == rows.dtype for p in pools)


def _kinds(*tensors: Tensor) -> list[tuple[int, torch.dtype]]:
    return [(x.shape[-1], x.dtype) for x in tensors]


def _put(pages: Tensor, rows: Tensor, slot_T: Tensor, donate: bool) -> Tensor:
    if slot_T.shape[0] == 0:
        return pages
    pool = pages.flatten(0, 1)
    slots, values = writes(pool, rows, slot_T)
    written = pool.index_copy_(0, slots, values) if donate else pool.index_copy(0, slots, values)
    return written.unflatten(0, pages.shape[:2])


def writes(pool: Tensor, rows: Tensor, slot_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return slots and rows of which every slot is in the pool, without waiting for the device.

    Rows with slot -1 repeat the write of the first valid row; where there is none they write back what row 0 holds.
    Repeated values are detached, so that every gradient counts once.
    """
    valid = slot_T >= 0
    first = valid.to(torch.int8).argmax(0, keepdim=True)
    any_valid = valid.any()
    spare_slot = torch.where(any_valid, slot_T.index_select(0, first), 0)
    spare_row = torch.where(any_valid, rows.index_select(0, first), pool[:1]).detach()
    slots = torch.where(valid, slot_T, spare_slot).long()
    values = torch.where(valid[:, None], rows, spare_row)
    values[:1] = torch.where(any_valid, values[:1], pool[:1])
    return slots, values
