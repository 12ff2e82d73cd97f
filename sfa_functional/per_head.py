"""Which queries of a layer attend in the form with keys and values per head, and attention in both forms.

Absorbed, a query is compared with E columns of a latent row and sums L of them, for H heads; that is what a long
context wants, of which K rows are gathered. Per head it is compared with P + R columns and sums V, half as many at
published sizes, of *all* rows that it sees; keys and values of each head must be made first. Queries that see few rows
more than K, of a request that brings most of its rows along, are cheaper that way.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from . import npu, operators
from .attention import sparse_attention
from .batch import Batch, global_selection
from .config import SFAConfig
from .implementation import Implementation
from .latent import absorb_queries, head_values, split_kv_b
from .paged import Rows, map_selection
from .params import LayerParams
from .precision import wide
from .tiles import WORKSPACE, host_ranges

PROJECTIONS = "latent_projections", "sparse_attention", "attend_positions"
"""What a device may have operators for, that take the absorbed form."""

ABSORBED_STEP = 128
"""Queries that are absorbed at a time: E columns of all heads are a multiple of what comes in and goes out, and their
fresh pages took a tenth of the time of a long prefill."""


def form_flops(visible: Sequence[int], *, config: SFAConfig, k: int) -> tuple[int, int]:
    """Count what attention costs some queries of one request, absorbed and per head.

    ``absorbed = 2 H Σ_t (L (P + V) + min(n_t, k) (E + L))``: queries and results go through W_UK and W_UV, selected
    rows are compared and summed. ``per_head = 2 H (S L (P + V) + Σ_t n_t (P + R + V))``: the S rows that any query sees
    go through both, every visible row is compared and summed.

    Args:
        visible: n_t, how many rows each query sees; S is the largest.
        config: sizes.
        k: keys that a query selects.

    Returns:
        FLOPs of the two forms; a multiply-add counts as two.

    Source: DeepSeek-V2 (2024), section 2.1.2.
    """
    through = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    latent, head = config.key_width + config.kv_lora_rank, config.qk_head_dim + config.v_head_dim
    absorbed = len(visible) * through + latent * sum(min(n, k) for n in visible)
    per_head = max(visible, default=0) * through + head * sum(visible)
    return 2 * config.num_attention_heads * absorbed, 2 * config.num_attention_heads * per_head


def per_head_runs(
    ranges: Sequence[tuple[int, int]],
    *,
    config: SFAConfig,
    k: int,
    itemsize: int = 4,
    workspace_bytes: int = WORKSPACE,
) -> list[tuple[int, int]]:
    """Choose the queries that attend per head: runs of one request for which that takes fewer FLOPs.

    A query that sees n rows may: comparing it with n rows per head must cost no more than with min(n, k) latent ones,
    and a quarter of the workspace must hold the keys and values that one head makes of n rows. Of the queries of a
    request that may and stand side by side, all do or none does, by `form_flops`.

    Args:
        ranges: the visible rows of each query, ``(start, end)``, (0, 0) where it sees none.
        config: sizes.
        k: keys that a query selects.
        itemsize: bytes of a number in products.
        workspace_bytes: what the call may hold.

    Returns:
        ``(first, last + 1)`` of each run, ascending. Its queries see rows from one on, or none.

    Cost: host arithmetic on T ranges.
    Source: `form_flops`.
    """
    latent, head = config.key_width + config.kv_lora_rank, config.qk_head_dim + config.v_head_dim
    most = min(max(k, k * latent // head) if head <= latent else 0, workspace_bytes // (4 * head * itemsize))
    runs, first, count = [], 0, len(ranges)
    while first < count:
        visible: list[int] = []
        begin, last = None, first
        while last < count:
            start, end = ranges[last]
            if end - start > most or (end > start and begin not in (None, start)):
                break
            if end > start:
                begin = start
                visible.append(end - start)
            last += 1
        absorbed, per_head = form_flops(visible, config=config, k=k)
        if per_head < absorbed:
            runs.append((first, last))
        first = max(last, first + 1)
    return runs


def batch_runs(
    batch: Batch, x_TD: Float[Tensor, "T D"], *, config: SFAConfig, k: int, implementation: Implementation
) -> list[tuple[int, int]]:
    """Return `per_head_runs` of a batch whose ranges can be read: on a CPU, outside of ``torch.compile``.

    Elsewhere reading them would wait for the device, or can't be done: every query attends absorbed.

    Args:
        batch: what each query sees.
        x_TD: hidden states, for their device and dtype.
        config: sizes.
        k: keys that a query selects.
        implementation: of the layer; only "blockwise", and None where the device has no operators of its own, have
            both forms.

    Returns:
        The runs; none where there is one form.

    Cost: as `per_head_runs`.
    """
    own = implementation == "blockwise"
    if not own and (implementation is not None or any(npu.has_operators(name, x_TD) for name in PROJECTIONS)):
        return []
    num_keys = x_TD.shape[0] if batch.row_S is None else batch.row_S.shape[0]
    ranges = host_ranges(batch.start_T, batch.end_T, num_keys)
    return [] if ranges is None else per_head_runs(ranges, config=config, k=k, itemsize=wide(x_TD.dtype).itemsize)


def attend_in_both_forms(
    params: LayerParams,
    q_THX: Float[Tensor, "T H X"],
    kv_SE: Rows,
    selection_TK: Int32[Tensor, "T K"],
    batch: Batch,
    runs: Sequence[tuple[int, int]],
    *,
    config: SFAConfig,
    workspace_bytes: int = WORKSPACE,
) -> Float[Tensor, "T H V"]:
    """Attend from every query of a batch to positions of its request: some per head, the others absorbed.

    The values of each head, ``value = Σ_s p_s · W_UV c_s``: what `head_values` makes of `sparse_attention`'s result.

    Args:
        params: for ``kv_b_proj``.
        q_THX: queries per head, from `head_queries`.
        kv_SE: latent keys, or those of a pool for a batch with ``row_S``.
        selection_TK: positions; those that the query does not see are unused.
        batch: what each query sees.
        runs: the queries that attend per head, from `per_head_runs`.
        config: sizes and scale.
        workspace_bytes: how much either form may hold beside inputs and results.

    Returns:
        value_THV in q's dtype; 0 for a query without keys.

    Raises:
        ValueError: as `sparse_attention`.

    Gradients: of q, the keys and ``kv_b_proj``, once, as those of `sparse_attention`: inputs and selection are kept.
    Cost: `form_flops` of each run in its form.
    Source: DeepSeek-V2 (2024), section 2.1.2.
    """
    topk_TK = global_selection(selection_TK, batch)

    def absorbed(low: int, high: int) -> Iterator[Tensor]:
        for first in range(low, high, ABSORBED_STEP):
            some = slice(first, min(first + ABSORBED_STEP, high))
            out_tHL, _ = sparse_attention(
                absorb_queries(params, q_THX[some], config=config),
                kv_SE,
                topk_TK[some] if batch.row_S is None else map_selection(topk_TK[some], batch.row_S),
                scale=config.softmax_scale,
                value_dim=config.kv_lora_rank,
                implementation="blockwise",
                workspace_bytes=workspace_bytes,
            )
            yield head_values(params, out_tHL, config=config)

    def of_runs(x_T: Tensor) -> Tensor:
        """Return what belongs to queries of runs; of a single run, the usual case, without a copy."""
        return torch.cat([x_T[low:high] for low, high in runs]) if len(runs) != 1 else x_T[slice(*runs[0])]

    values, done = [], 0
    if runs:
        borders = list(accumulate((high - low for low, high in runs), initial=0))
        per_head_NHV = operators.attend_per_head(
            of_runs(q_THX),
            kv_SE,
            *split_kv_b(params.kv_b_proj, config),
            of_runs(topk_TK),
            of_runs(batch.start_T),
            of_runs(batch.end_T),
            batch.row_S,
            runs=[n for pair in pairwise(borders) for n in pair],
            scale=config.softmax_scale,
            workspace_bytes=workspace_bytes,
        )
        for (low, high), place in zip(runs, borders, strict=False):
            values += [*absorbed(done, low), per_head_NHV[place : place + high - low]]
            done = high
    values += absorbed(done, q_THX.shape[0])
    if not values:
        return q_THX.new_zeros(*q_THX.shape[:2], config.v_head_dim)
    return values[0] if len(values) == 1 else torch.cat(values)
