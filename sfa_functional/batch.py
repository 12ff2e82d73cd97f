"""A ragged batch as plain vectors: positions, requests, visible ranges and slots of packed query tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from .paged import table_rows, token_slots, validate_block_table
from .precision import require, require_lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Where each query token stands and what it sees. A pytree of tensors; build it with `from_lengths`.

    Query token t belongs to request ``request_T[t]``, stands at ``position_T[t]`` of it and sees the key rows
    ``start_T[t] <= s < end_T[t]``. Key row s of request b holds position ``s - key_start_B[b]``.
    """

    position_T: Int[Tensor, " T"]
    request_T: Int[Tensor, " T"]  # -1: padding, belongs to no request
    start_T: Int[Tensor, " T"]
    end_T: Int[Tensor, " T"]
    query_start_B1: Int[Tensor, " B1"]  # prefix sums of the query lengths, with the leading 0
    seq_len_B: Int[Tensor, " B"]  # context + new tokens; 0: padding
    key_start_B: Int[Tensor, " B"]
    block_table_BU: Int32[Tensor, "B U"] | None = None
    slot_T: Int[Tensor, " T"] | None = None  # row of the pool where a new token is written; -1: nowhere
    row_S: Int[Tensor, " S"] | None = None  # row of the pool (or of the packed keys) that holds each key row

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int] | Tensor,
        seq_lens: Sequence[int] | Tensor | None = None,
        *,
        block_table: Int32[Tensor, "B U"] | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> "Batch":
        """Lay out requests one after the other, each causal, each behind its cached context.

        Query i of request b stands at position ``seq_len[b] - query_len[b] + i`` and sees the positions up to and
        including its own. Key rows are numbered

        - without a block table: request by request, ``max(seq_len, query_len)`` rows each. Without context these are
          the query tokens themselves; with context they are keys that the caller packs (``row_S`` is then the
          identity), and the layer functions refuse.
        - with a block table [B, U]: ``b·U·block_size + position``; ``row_S`` says which row of the pool that is.

        Args:
            query_lens: new tokens of each request, >= 0.
            seq_lens: context + new tokens of each request; None is ``query_lens``. 0 marks padding: the request's
                rows have request, position and slot -1 and see nothing.
            block_table: int32 pages of each request, -1 where there is none.
            block_size: rows of a page; given iff a block table is.
            device: where to put the vectors; None is the block table's device, else the CPU.

        Returns:
            The batch; all vectors int64, the block table as given.

        Raises:
            ValueError: lengths that are negative or not integers, ``0 < seq_len < query_len``, different numbers
                of requests, a sequence longer than its row of the table or, in a table on the CPU, without a page
                for each of its tokens, or a block size without a table.

        Cost: host arithmetic on B lengths, then vector operations on T tokens.
        Source: the block tables of PagedAttention (Kwon et al., 2023); ranges instead of masks are this library's.
        """
        new = require_lengths("Batch.from_lengths", query_lens=query_lens)
        total = new if seq_lens is None else require_lengths("Batch.from_lengths", seq_lens=seq_lens)
        _require(len(new) == len(total), "query_lens and seq_lens must have one length", (len(new), len(total)))
        for b, (n, s) in enumerate(zip(new, total, strict=True)):
            _require(s == 0 or s >= n, f"seq_len must be 0 or >= query_len {n} of request {b}", s)
        _require((block_table is None) == (block_size is None), "block_table and block_size go together", block_size)
        if block_table is not None and block_size is not None:
            _require(
                block_table.ndim == 2 and block_table.shape[0] == len(new) and block_table.dtype == torch.int32,
                f"block_table must be int32 [{len(new)}, U]",
                (block_table.dtype, tuple(block_table.shape)),
            )
            _require(block_size >= 1, "block_size must be >= 1", block_size)
            room = block_table.shape[1] * block_size
            _require(max([0, *total]) <= room, f"a sequence must fit its {room} rows of the table", max([0, *total]))
            if block_table.device.type == "cpu":  # elsewhere it would wait: call validate_block_table yourself
                validate_block_table(block_table, torch.tensor(total, dtype=torch.int64), block_size=block_size)
            device = block_table.device if device is None else device
            block_table = block_table.to(device)

        new_B = torch.tensor(new, dtype=torch.int64, device=device)
        seq_len_B = torch.tensor(total, dtype=torch.int64, device=device)
        query_start_B1 = torch.nn.functional.pad(new_B.cumsum(0), (1, 0))
        owner_T = torch.arange(len(new), device=device).repeat_interleave(new_B, output_size=sum(new))
        index_T = torch.arange(sum(new), device=device) - query_start_B1[owner_T]
        real_T = seq_len_B[owner_T] > 0
        position_T = torch.where(real_T, seq_len_B[owner_T] - new_B[owner_T] + index_T, -1)
        request_T = torch.where(real_T, owner_T, -1)
        row_S = slot_T = None
        if block_table is not None and block_size is not None:
            key_start_B = torch.arange(len(new), device=device) * (block_table.shape[1] * block_size)
            slot_T = token_slots(block_table, request_T, position_T, block_size=block_size)
            row_S = table_rows(block_table, block_size=block_size)
        else:
            width_B = torch.maximum(seq_len_B, new_B)
            key_start_B = width_B.cumsum(0) - width_B
            if any(s > n for n, s in zip(new, total, strict=True)):
                row_S = torch.arange(sum(map(max, new, total)), device=device)
        start_T = torch.where(real_T, key_start_B[owner_T], 0)
        return cls(
            position_T=position_T,
            request_T=request_T,
            start_T=start_T,
            end_T=torch.where(real_T, start_T + position_T + 1, 0),
            query_start_B1=query_start_B1,
            seq_len_B=seq_len_B,
            key_start_B=key_start_B,
            block_table_BU=block_table,
            slot_T=slot_T,
            row_S=row_S,
        )

    def next(self, new_lens: Sequence[int] | Tensor) -> "Batch":
        """Return the following step over the same block table: every sequence grows by its new tokens.

        Args:
            new_lens: new tokens of each request, >= 0. A padding request (seq_len 0) stays padding.

        Returns:
            A batch whose ``seq_len_B`` is larger by ``new_lens``; shapes of the key side stay the same.

        Raises:
            ValueError: no block table (the earlier keys would be lost), or as `from_lengths`.
        """
        if self.block_table_BU is None or self.row_S is None:
            raise ValueError("Batch.next: the batch must have a block table; got none")
        new = require_lengths("Batch.next", new_lens=new_lens)
        lengths = self.seq_len_B.tolist()
        if len(new) != len(lengths):
            raise ValueError(f"Batch.next: new_lens must have {len(lengths)} entries; got {len(new)}")
        return Batch.from_lengths(
            new,
            [s + n if s > 0 else 0 for s, n in zip(lengths, new, strict=True)],
            block_table=self.block_table_BU,
            block_size=max(1, self.row_S.shape[0] // max(1, self.block_table_BU.numel())),
            device=self.seq_len_B.device,
        )


torch.export.register_dataclass(Batch, serialized_type_name="sfa_functional.Batch")


def local_selection(topk_TK: Int32[Tensor, "T K"], batch: Batch) -> Int32[Tensor, "T K"]:
    """Translate key rows into positions within each query's request.

    ``position = row - key_start_B[request_T]`` where the query sees the row, else -1.

    Args:
        topk_TK: selection of key rows.
        batch: the queries.

    Returns:
        int32 positions, in the order given; unused entries -1.

    Gradients: none (integers).
    """
    return _shift(topk_TK, batch, sign=-1)


def global_selection(position_TK: Int32[Tensor, "T K"], batch: Batch) -> Int32[Tensor, "T K"]:
    """Translate positions within each query's request into key rows.

    ``row = key_start_B[request_T] + position`` where the query sees that row, else -1: a later position, or one of a
    query that belongs to no request, is unused.

    Args:
        position_TK: selection as the layer functions take and return it.
        batch: the queries.

    Returns:
        int32 key rows, in the order given; unused entries -1.

    Gradients: none (integers).
    """
    return _shift(position_TK, batch, sign=1)


def _shift(topk_TK: Tensor, batch: Batch, *, sign: int) -> Tensor:
    if batch.key_start_B.shape[0] == 0:
        return torch.full_like(topk_TK, -1)
    first_T1 = batch.key_start_B[batch.request_T.clamp(min=0)][:, None]
    key_TK = topk_TK.long() + (first_T1 if sign > 0 else 0)
    seen_TK = (topk_TK >= 0) & (key_TK >= batch.start_T[:, None]) & (key_TK < batch.end_T[:, None])
    return torch.where(seen_TK, key_TK - (first_T1 if sign < 0 else 0), -1).to(torch.int32)


def _require(ok: bool, rule: str, got: object) -> None:
    require(ok, "Batch.from_lengths", rule, got)
