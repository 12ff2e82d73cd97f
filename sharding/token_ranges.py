"""Who owns which tokens: the contiguous rule with its vectorised lengths, and four layouts as one permutation."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from sfa_functional import DEEPSEEK_V32, Batch, SFAConfig
from sfa_functional.precision import require, require_integers, require_lengths

from .costs import token_flops, visible_keys

Layout = Literal["contiguous", "zigzag", "striped", "balanced"]

BLOCK = 128
"""Tokens that the balanced layout keeps together, where ranks have at least two blocks each."""


def token_ranges(
    num_tokens: int, num_ranks: int, *, device: torch.device | str | None = None
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Cut a token stream into equal contiguous shares, the last ones padded.

    ``share = ceil(T / N)``, ``start = r · share``, ``padded_end = start + share``,
    ``end = max(start, min(padded_end, T))`` for every rank r.

    Args:
        num_tokens: T, rows of the stream; the padded count where a batch is padded, not that of its real tokens.
        num_ranks: N, >= 1.
        device: where to put the results.

    Returns:
        ``(start_N, end_N, padded_end_N)``, int64. Every rank holds ``share`` rows, ``end - start`` of them tokens.

    Raises:
        ValueError: a count out of range.

    Source: the prefill context parallelism of vllm-project/vllm-ascend.
    """
    _require_count("token_ranges", "num_tokens", num_tokens, 0)
    _require_count("token_ranges", "num_ranks", num_ranks, 1)
    share = -(-num_tokens // num_ranks)
    start_N = torch.arange(num_ranks, device=device) * share
    padded_end_N = start_N + share
    return start_N, torch.maximum(start_N, padded_end_N.clamp(max=num_tokens)), padded_end_N


def local_lengths(
    query_start_B1: Int[Tensor, " B1"],
    seq_len_B: Int[Tensor, " B"],
    start_N: Int[Tensor, " N"],
    end_N: Int[Tensor, " N"],
) -> tuple[Int[Tensor, "N B"], Int[Tensor, "N B"]]:
    """Return each rank's query ends and key lengths of every request, for contiguous ranges of the token stream.

    ``m[n, b] = max(min(query_start[b + 1], end[n]) - max(query_start[b], start[n]), 0)`` local queries,
    ``query_end[n] = cumsum(m[n])``,
    ``key_len[n, b] = max(seq_len[b] - (query_start[b + 1] - min(query_start[b + 1], end[n])), 0)`` where m > 0, else 0:
    the request's later tokens are taken off, so that masks aligned to the right stay exact where it is cut.

    Args:
        query_start_B1: prefix sums of the requests' query counts, with the leading 0.
        seq_len_B: context + new tokens of each request; 0 for padding.
        start_N: first token of each rank's range.
        end_N: one past its last; whether padding is counted makes no difference.

    Returns:
        ``(query_end_NB, key_len_NB)``, int64. Local query starts are the ends with a 0 in front.

    Raises:
        ValueError: vectors whose lengths don't fit or that are not integers. Values are not looked at, that would
            wait: `split_tokens` and `Batch.from_lengths` refuse negative lengths.

    Gradients: none (integers).
    Cost: N·B integers on the vectors' device; nothing waits for it.
    Source: the prefill context parallelism of vllm-project/vllm-ascend; the two clamps and the mask are corrections.
    """
    shapes = [tuple(x.shape) for x in (query_start_B1, seq_len_B, start_N, end_N)]
    fits = all(len(shape) == 1 for shape in shapes) and shapes[2] == shapes[3]
    fits = fits and query_start_B1.shape[0] == seq_len_B.shape[0] + 1
    require(fits, "local_lengths", "query_start, seq_len, start, end must be [B + 1], [B], [N], [N]", shapes)
    require_integers("local_lengths", seq_len_B.shape[0], seq_len_B=seq_len_B)
    require_integers("local_lengths", seq_len_B.shape[0] + 1, query_start_B1=query_start_B1)
    require_integers("local_lengths", start_N.shape[0], start_N=start_N, end_N=end_N)
    first_B, last_B = query_start_B1[:-1].long(), query_start_B1[1:].long()
    start_NB = torch.maximum(first_B, start_N.long()[:, None])
    end_NB = torch.minimum(last_B, end_N.long()[:, None])
    count_NB = (end_NB - start_NB).clamp(min=0)
    seen_NB = (seq_len_B.long() - (last_B - end_NB)).clamp(min=0)
    return count_NB.cumsum(1), torch.where(count_NB > 0, seen_NB, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSplit:
    """Which tokens each rank holds, in which row. A pytree of index vectors; build it with `split_tokens`.

    Rank r's row c is the global token ``index_NC[r, c]``, -1 where the row is padding. A rank's tokens are in ascending
    order, its padding is last. ``inverse_T`` says where each token lies in ``index_NC.flatten()``.
    """

    index_NC: Int[Tensor, "N C"]
    inverse_T: Int[Tensor, " T"]

    @classmethod
    def from_owner(
        cls, owner_T: Sequence[int] | Int[Tensor, " T"], num_ranks: int, *, rows: int | None = None
    ) -> "TokenSplit":
        """Build the split in which token t is on rank ``owner_T[t]``: bring your own layout.

        Args:
            owner_T: a rank for each token of the packed stream.
            num_ranks: N, >= 1.
            rows: rows of every rank; None is as many as the fullest rank has tokens.

        Returns:
            The split, on the device of ``owner_T``.

        Raises:
            ValueError: an owner that is not an integer in 0..N-1, or fewer rows than a rank has tokens.

        Cost: a sort of T integers.
        """
        _require_count("TokenSplit.from_owner", "num_ranks", num_ranks, 1)
        rule = "owner must be one integer per token"
        if not isinstance(owner_T, Tensor):
            require(isinstance(owner_T, Iterable), "TokenSplit.from_owner", rule, repr(owner_T))
            listed = list(owner_T)
            for owner in listed:
                whole = hasattr(owner, "__index__") and not isinstance(owner, bool | Tensor)
                require(whole, "TokenSplit.from_owner", rule, repr(owner))
            owner_T = torch.tensor(listed, dtype=torch.int64)
        whole = owner_T.ndim == 1 and owner_T.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        require(whole, "TokenSplit.from_owner", rule, (owner_T.dtype, tuple(owner_T.shape)))
        owner_T = owner_T.long()
        rule = f"owner must be in 0..{num_ranks - 1}"
        for t in ((owner_T < 0) | (owner_T >= num_ranks)).nonzero()[:1].flatten().tolist():
            raise ValueError(f"TokenSplit.from_owner: {rule}; got {int(owner_T[t])} for token {t}")
        count_N = torch.bincount(owner_T, minlength=num_ranks)
        fullest = int(count_N.max())
        if rows is None:
            rows = fullest
        enough = type(rows) is int and rows >= fullest
        require(enough, "TokenSplit.from_owner", f"rows must be an integer >= {fullest}", repr(rows))
        order_T = owner_T.argsort(stable=True)
        first_N = count_N.cumsum(0) - count_N
        place_T = torch.arange(owner_T.shape[0], device=owner_T.device) - first_N[owner_T[order_T]]
        flat_T = owner_T[order_T] * rows + place_T
        index_M = torch.full((num_ranks * rows,), -1, dtype=torch.int64, device=owner_T.device)
        index_M[flat_T] = order_T
        inverse_T = torch.empty_like(owner_T)
        inverse_T[order_T] = flat_T
        return cls(index_NC=index_M.view(num_ranks, rows), inverse_T=inverse_T)

    @property
    def num_ranks(self) -> int:
        """N."""
        return self.index_NC.shape[0]

    @property
    def rows(self) -> int:
        """C, rows of every rank, padding included."""
        return self.index_NC.shape[1]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.inverse_T.shape[0]

    def contiguous_ranges(self) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]] | None:
        """Return each rank's first token and one past its last, where ranks hold the stream piece by piece.

        Returns:
            ``(start_N, end_N)`` as `local_lengths` takes them; None for any other layout, and for a split that is not
            on the CPU, where looking would wait.
        """
        if self.index_NC.device.type != "cpu":
            return None
        start_N = torch.arange(self.num_ranks) * self.rows
        token_NC = start_N[:, None] + torch.arange(self.rows)
        if not torch.equal(self.index_NC, torch.where(token_NC < self.num_tokens, token_NC, -1)):
            return None
        return start_N, torch.maximum(start_N, (start_N + self.rows).clamp(max=self.num_tokens))

    def scatter(self, x_TD: Shaped[Tensor, "T *dims"], *, fill: int | float = 0) -> Shaped[Tensor, "rows *dims"]:
        """Put global rows into rank order, [N·C, ...]: rank r's rows are ``r·C .. (r+1)·C``.

        Args:
            x_TD: one row per token, of any further dims and dtype.
            fill: what padding rows hold; -1 for a selection.

        Returns:
            The rows, for ``in_specs=P("cp")``.

        Raises:
            ValueError: another number of rows than T.

        Gradients: of x: the inverse. Padding has none.
        """
        self._require_rows("scatter", x_TD, self.num_tokens)
        return _take(x_TD, self.index_NC.flatten(), fill)

    def gather(self, x: Shaped[Tensor, "rows *dims"]) -> Shaped[Tensor, "T *dims"]:
        """Put rows in rank order, [N·C, ...], back into global order; padding rows are dropped.

        Args:
            x: all ranks' rows, one rank after the other.

        Returns:
            One row per token.

        Raises:
            ValueError: another number of rows than N·C.

        Gradients: of x: the inverse; exactly 0 for padding rows, whatever they hold.
        """
        self._require_rows("gather", x, self.index_NC.numel())
        return x.index_select(0, self.inverse_T.to(x.device))

    def local_batch(self, batch: Batch, rank: int) -> Batch:
        """Return a batch whose query tokens are one rank's rows; the key side stays global.

        Positions, requests, visible ranges and slots travel with the tokens. A padding row has request, position
        and slot -1 and sees nothing. ``query_start_B1`` counts this rank's tokens of each request (its rows are in
        global order, so a request's are together); ``seq_len_B``, ``key_start_B``, the block table and ``row_S`` are
        those of the whole batch.

        Args:
            batch: all tokens.
            rank: whose rows.

        Returns:
            The rank's batch, with C query rows.

        Raises:
            ValueError: a batch of another number of tokens, or a rank out of range.

        Cost: C integers per field; nothing waits for the device.
        """
        known = type(rank) is int and 0 <= rank < self.num_ranks
        require(known, "TokenSplit.local_batch", f"rank must be in 0..{self.num_ranks - 1}", repr(rank))
        self._require_rows("local_batch", batch.position_T, self.num_tokens)
        index_C = self.index_NC[rank].to(batch.position_T.device)
        ordered_C = torch.where(index_C >= 0, index_C, self.num_tokens)
        return replace(
            batch,
            position_T=_take(batch.position_T, index_C, -1),
            request_T=_take(batch.request_T, index_C, -1),
            start_T=_take(batch.start_T, index_C, 0),
            end_T=_take(batch.end_T, index_C, 0),
            query_start_B1=torch.searchsorted(ordered_C, batch.query_start_B1),
            slot_T=None if batch.slot_T is None else _take(batch.slot_T, index_C, -1),
        )

    def _require_rows(self, function: str, x: Tensor, count: int) -> None:
        known = isinstance(x, Tensor)
        require(known, f"TokenSplit.{function}", "rows must be a tensor", type(x).__name__)
        fits = x.ndim >= 1 and x.shape[0] == count
        require(fits, f"TokenSplit.{function}", f"there must be {count} rows", tuple(x.shape))


def _take(x: Tensor, index_M: Tensor, fill: int | float) -> Tensor:
    """Read rows by number; -1 reads a row of ``fill``, appended for it, never the last one."""
    index_M = index_M.to(x.device)
    filled = torch.cat([x, x.new_full((1, *x.shape[1:]), fill)])
    return filled.index_select(0, torch.where(index_M >= 0, index_M, x.shape[0]))


torch.export.register_dataclass(TokenSplit, serialized_type_name="sharding.TokenSplit")


def split_tokens(
    lengths: Sequence[int] | Tensor,
    num_ranks: int,
    *,
    layout: Layout,
    seq_lens: Sequence[int] | Tensor | None = None,
    config: SFAConfig | None = None,
    rows: int | None = None,
) -> TokenSplit:
    """Deal the tokens of a ragged batch out to ranks.

    ============  ================================================================================================
    contiguous    token i of the packed stream on rank ``i // C``, the rule of `token_ranges`
    zigzag        each request in 2N chunks of ``ceil(length / 2N)``, rank r takes chunks r and 2N - 1 - r
    striped       token i on rank ``i mod N``
    balanced      blocks of 128 tokens, the dearest first, each to the least loaded rank that has room, ties to the
                  lower rank and the earlier block; all ranks have room for ``ceil(T / N)`` tokens, a block that does
                  not fit is cut. Where that is less than 256, blocks have half of it
    ============  ================================================================================================

    Args:
        lengths: new tokens of each request, >= 0.
        num_ranks: N, >= 1.
        layout: one of the four words; for another rule see `TokenSplit.from_owner`.
        seq_lens: context + new tokens of each request, as `Batch.from_lengths` takes them; only "balanced" looks.
        config: sizes for "balanced", which weighs tokens by `token_flops`; None is DeepSeek-V3.2.
        rows: rows of every rank; None is as many as the layout needs. "contiguous" fills ranks up to it: the rule
            for a stream that is padded to N·rows tokens.

    Returns:
        The split, on the CPU.

    Raises:
        ValueError: lengths that are negative or not integers, ``0 < seq_len < length``, N < 1, an unknown layout,
            or fewer rows than the layout needs.

    Cost: vector operations on T tokens; "balanced" a heap over T / 128 blocks.
    Source: contiguous: the prefill context parallelism of vllm-project/vllm-ascend; zigzag: Llama 3 (2024), section
        3.3.2; striped: Brandon et al., "Striped Attention" (2023); balanced: greedy longest-processing-time
        scheduling (Graham, 1969).
    """
    counts = require_lengths("split_tokens", lengths=lengths)
    _require_count("split_tokens", "num_ranks", num_ranks, 1)
    total = counts if seq_lens is None else require_lengths("split_tokens", seq_lens=seq_lens)
    require(len(total) == len(counts), "split_tokens", "lengths and seq_lens must have one length", len(total))
    for b, (n, s) in enumerate(zip(counts, total, strict=True)):
        require(s == 0 or s >= n, "split_tokens", f"seq_len must be 0 or >= length {n} of request {b}", s)
    token_T = torch.arange(sum(counts))
    share = -(-len(token_T) // num_ranks)
    rule = f"layout must be of {', '.join(map(repr, get_args(Layout)))}"
    require(layout in get_args(Layout), "split_tokens", rule, repr(layout))
    match layout:
        case "contiguous":
            if rows is not None:
                enough = type(rows) is int and rows >= share
                require(enough, "split_tokens", f"rows must be an integer >= {share}", repr(rows))
            rows = share if rows is None else rows
            owner_T = token_T // max(1, rows)
        case "zigzag":
            owner_T = _zigzag(counts, num_ranks)
        case "striped":
            owner_T = token_T % num_ranks
        case "balanced":
            flops_T = token_flops(DEEPSEEK_V32 if config is None else config, visible_keys(counts, total))
            owner_T = _balanced(flops_T, num_ranks, share)
    if rows is not None:
        fullest = int(torch.bincount(owner_T, minlength=1).max())
        enough = type(rows) is int and rows >= fullest
        require(enough, "split_tokens", f"rows must be an integer >= {fullest}", repr(rows))
    return TokenSplit.from_owner(owner_T, num_ranks, rows=rows)


def _zigzag(counts: list[int], num_ranks: int) -> Tensor:
    length_B = torch.tensor(counts, dtype=torch.int64)
    request_T = torch.arange(len(counts)).repeat_interleave(length_B)
    place_T = torch.arange(sum(counts)) - (length_B.cumsum(0) - length_B)[request_T]
    chunk_B = (length_B + 2 * num_ranks - 1) // (2 * num_ranks)
    chunk_T = place_T // chunk_B[request_T]
    return torch.minimum(chunk_T, 2 * num_ranks - 1 - chunk_T)


def _balanced(flops_T: Tensor, num_ranks: int, share: int) -> Tensor:
    block = max(1, min(BLOCK, -(-share // 2)))
    pieces = flops_T.split(block)
    order = sorted(range(len(pieces)), key=lambda b: -float(pieces[b].sum()))
    owner_T = torch.empty(flops_T.shape, dtype=torch.int64)
    room = [share] * num_ranks
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap: the least loaded rank is first
    for b in order:
        first, last = b * block, b * block + len(pieces[b])
        while first < last:
            load, rank = heapq.heappop(loads)
            taken = min(room[rank], last - first)
            owner_T[first : first + taken] = rank
            room[rank] -= taken
            if room[rank] > 0:  # a full rank does not come back
                heapq.heappush(loads, (load + float(flops_T[first : first + taken].sum()), rank))
            first += taken
    return owner_T


def _require_count(function: str, name: str, value: int, least: int) -> None:
    require(type(value) is int and value >= least, function, f"{name} must be an integer >= {least}", repr(value))
