"""A latent cache dealt out over ranks: which rank holds a position, in which row, and what of a selection is mine.

Positions of a request are dealt out in runs of ``interleave``. Index keys stay on every rank, because the selection is
over all keys. So a request has pages in two pools: U of them in the sharded pool, where a page of ``block_size`` rows
holds a rank's part of ``N · block_size`` positions, and N·U in the replicated one (`replicated_block_table`). A `Batch`
is built over the replicated table; `CacheSplit` derives the sharded side.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from sfa_functional import token_slots
from sfa_functional.precision import require


@dataclass(frozen=True)
class CacheSplit:
    """Positions of each request dealt out over N ranks in runs of ``interleave``; plain numbers.

    ``owner(p) = (p // interleave) mod N``, ``local(p) = p // (N · interleave) · interleave + p mod interleave``.

    Raises:
        ValueError: a number that is not an integer >= 1.

    Source: the decode context parallelism of vLLM and vllm-project/vllm-ascend.
    """

    num_ranks: int
    interleave: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_ranks", self.num_ranks), ("interleave", self.interleave)):
            require(type(value) is int and value >= 1, "CacheSplit", f"{name} must be an integer >= 1", repr(value))

    def owner(self, position: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the rank that holds each position, ``(p // interleave) mod N``.

        Args:
            position: positions within a request, of any shape; negative ones are nobody's.

        Returns:
            int64 ranks; -1 for a negative position.
        """
        position = position.long()
        return torch.where(position >= 0, position // self.interleave % self.num_ranks, -1)

    def local_position(self, position: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return each position's row on its owner, ``p // (N · interleave) · interleave + p mod interleave``.

        Args:
            position: positions within a request, of any shape; negative ones are nobody's.

        Returns:
            int64 rows, counted within the request; -1 for a negative position.
        """
        position = position.long()
        local = position // (self.num_ranks * self.interleave) * self.interleave + position % self.interleave
        return torch.where(position >= 0, local, -1)

    def local_lengths(self, seq_len_B: Int[Tensor, " B"]) -> Int[Tensor, "N B"]:
        """Return how many positions of each request every rank holds.

        ``base + clamp(rest - r · interleave, 0, interleave)`` with ``base = len // (interleave · N) · interleave`` and
        ``rest = len - base · N``.

        Args:
            seq_len_B: lengths, >= 0; nothing looks at them, that would wait.

        Returns:
            int64, one row per rank; a column sums to the length.

        Cost: N·B integers on the lengths' device.
        """
        base_B = seq_len_B.long() // (self.interleave * self.num_ranks) * self.interleave
        first_N1 = torch.arange(self.num_ranks, device=seq_len_B.device)[:, None] * self.interleave
        return base_B + (seq_len_B.long() - base_B * self.num_ranks - first_N1).clamp(0, self.interleave)

    def local_block_table(self, block_table_BU: Int32[Tensor, "B NU"]) -> Int32[Tensor, "B U"]:
        """Return the sharded pool's pages from the replicated block table; the inverse of `replicated_block_table`.

        Args:
            block_table_BU: [B, N·U], where entries ``u·N .. u·N + N - 1`` are pages ``b·N .. b·N + N - 1``, or -1.

        Returns:
            int32 [B, U], the pages b; -1 where there is none. Like a view, it waits for nothing.

        Raises:
            ValueError: a width that N does not divide or, of a table on the CPU, entries of another form.
        """
        columns = block_table_BU.shape[1]
        rule = f"the block table must have a multiple of {self.num_ranks} columns"
        require(columns % self.num_ranks == 0, "CacheSplit.local_block_table", rule, columns)
        table_BU = torch.div(block_table_BU[:, :: self.num_ranks], self.num_ranks, rounding_mode="floor")
        if block_table_BU.device.type == "cpu":
            wrong = (replicated_block_table(table_BU, self.num_ranks) != block_table_BU).nonzero()[:1].tolist()
            for b, u in wrong:
                rule = f"the table must be that of replicated_block_table for {self.num_ranks} ranks"
                got = f"page {int(block_table_BU[b, u])} at request {b}, column {u}"
                raise ValueError(f"CacheSplit.local_block_table: {rule}; got {got}")
        return table_BU

    def local_slots(
        self,
        block_table_BU: Int32[Tensor, "B U"],
        request: Int[Tensor, "*#shape"],
        position: Int[Tensor, "*shape"],
        rank: int,
        *,
        block_size: int,
    ) -> Int[Tensor, "*shape"]:
        """Return the row of one rank's pool for each position that it holds, -1 for the others.

        `token_slots` of `local_position` over the sharded table.

        Args:
            block_table_BU: pages of the sharded pool, U per request.
            request: request of each position, -1 for none; broadcast to the positions.
            position: positions within the request; negative ones are nobody's.
            rank: whose pool.
            block_size: rows of a page.

        Returns:
            int64 rows of the pool.

        Raises:
            ValueError: a rank out of range, or as `token_slots`.
        """
        self._require_rank("local_slots", rank)
        mine = torch.where(self.owner(position) == rank, self.local_position(position), -1)
        request = request.broadcast_to(position.shape)
        flat = token_slots(block_table_BU, request.flatten(), mine.flatten(), block_size=block_size)
        return flat.view(position.shape)

    def gathered_position(self, position: Int[Tensor, "*shape"], *, block_size: int) -> Int[Tensor, "*shape"]:
        """Return where each position stands once the logical blocks of all ranks are in order; -1 for a negative one.

        Logical block ``u·N + c`` is page u of rank c, so this is ``((local // size) · N + owner) · size + local mod
        size``: the position itself where ``interleave`` is the block size. `token_slots` over a table of gathered
        blocks (`gathered_block_table`, `compact_block_table`) then says in which row it lies.

        Args:
            position: positions within a request, of any shape.
            block_size: rows of a page.

        Returns:
            int64, of the same shape.

        Raises:
            ValueError: block_size < 1.
        """
        require(block_size >= 1, "CacheSplit.gathered_position", "block_size must be >= 1", block_size)
        local = self.local_position(position)
        block = local // block_size * self.num_ranks + self.owner(position)
        return torch.where(local >= 0, block * block_size + local % block_size, -1)

    def local_selection(self, selection_TK: Int32[Tensor, "T K"], rank: int) -> Int32[Tensor, "T K"]:
        """Keep what one rank holds of a selection, as its own positions, moved to the front.

        Args:
            selection_TK: positions within each query's request; negative values are unused.
            rank: whose part.

        Returns:
            int32 `local_position` of the rank's entries in the order given (ascending stays ascending), then -1.

        Raises:
            ValueError: a rank out of range.

        Gradients: none (integers).
        Cost: a stable sort of K flags per query.
        """
        self._require_rank("local_selection", rank)
        mine_TK = self.owner(selection_TK) == rank
        order_TK = mine_TK.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
        local_TK = torch.where(mine_TK, self.local_position(selection_TK), -1)
        return local_TK.gather(-1, order_TK).to(torch.int32)

    def _require_rank(self, function: str, rank: int) -> None:
        known = type(rank) is int and 0 <= rank < self.num_ranks
        require(known, f"CacheSplit.{function}", f"rank must be in 0..{self.num_ranks - 1}", repr(rank))


def replicated_block_table(block_table_BU: Int32[Tensor, "B U"], num_ranks: int) -> Int32[Tensor, "B NU"]:
    """Return the pages of a pool in which every rank holds all positions, from those of the sharded pool.

    Page b becomes the pages ``b·N .. b·N + N - 1``.

    Args:
        block_table_BU: pages of the sharded pool; -1 where there is none.
        num_ranks: N.

    Returns:
        int32 [B, N·U]; -1 where there is none.

    Raises:
        ValueError: N < 1.

    Source: the decode context parallelism of vllm-project/vllm-ascend.
    """
    _require_ranks("replicated_block_table", num_ranks)
    pages_BUN = block_table_BU[..., None] * num_ranks + torch.arange(num_ranks, device=block_table_BU.device)
    return torch.where(block_table_BU[..., None] >= 0, pages_BUN, -1).flatten(1).to(torch.int32)


def gathered_block_table(num_requests: int, num_blocks: int, num_ranks: int) -> Int32[Tensor, "B NU"]:
    """Return where each logical block lies after every rank's blocks of every request were gathered.

    Each rank brings ``B · U`` pages, request after request; they arrive rank after rank. Rank c holds the logical
    blocks ``u·N + c`` of a request; block ``u·N + c`` of request b then lies at ``c·B·U + b·U + u``.

    Args:
        num_requests: B.
        num_blocks: U, pages of a request on each rank.
        num_ranks: N.

    Returns:
        int32 [B, N·U].

    Raises:
        ValueError: N < 1, or a negative count.

    Source: the decode context parallelism of vllm-project/vllm-ascend.
    """
    _require_ranks("gathered_block_table", num_ranks)
    for name, value in (("num_requests", num_requests), ("num_blocks", num_blocks)):
        whole = type(value) is int and value >= 0
        require(whole, "gathered_block_table", f"{name} must be an integer >= 0", repr(value))
    place_CBU = torch.arange(num_ranks * num_requests * num_blocks).view(num_ranks, num_requests, num_blocks)
    return place_CBU.permute(1, 2, 0).flatten(1).to(torch.int32)


def compact_block_table(
    block_table_BU: Int32[Tensor, "B U"], num_ranks: int
) -> tuple[Int[Tensor, " pages"], Int32[Tensor, "B NU"]]:
    """Return the pages that a batch refers to, and where each logical block lies once every rank's were gathered.

    Each rank brings ``page_M``, the M distinct pages in ascending order; they arrive rank after rank. Logical block
    ``u·N + c`` of request b then lies at ``place of table[b, u] in page_M + c·M``.

    Args:
        block_table_BU: pages of the sharded pool; -1 where there is none.
        num_ranks: N.

    Returns:
        ``(page_M, table_BNU)``: int64, and int32 [B, N·U] with -1 where there is none.

    Raises:
        ValueError: N < 1.

    Cost: a sort of B·U integers, and a wait for the device: M depends on the data.
    Source: the prefill over a sharded cache of vllm-project/vllm-ascend.
    """
    _require_ranks("compact_block_table", num_ranks)
    page_M = block_table_BU[block_table_BU >= 0].unique().long()
    place_BU = torch.searchsorted(page_M, block_table_BU.long())
    rank_C = torch.arange(num_ranks, device=block_table_BU.device)
    place_BUC = place_BU[..., None] + rank_C * page_M.shape[0]
    return page_M, torch.where(block_table_BU[..., None] >= 0, place_BUC, -1).flatten(1).to(torch.int32)


def _require_ranks(function: str, num_ranks: int) -> None:
    require(type(num_ranks) is int and num_ranks >= 1, function, "num_ranks must be an integer >= 1", repr(num_ranks))
