"""What a selection keeps of dense attention, as sums that add up over rows, batches, layers and ranks in any order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from . import blockwise_indexer, operators, tiles
from .losses import indexer_kl
from .paged import Rows, num_rows, require_rows_fit
from .precision import require, require_integers, require_rows, wide, without_autocast
from .selection_measures import shared_entries

METRICS = ("mass", "best_mass", "recall", "kl", "kl_selected", "overlap", "entropy", "ties")
"""Names of what is averaged over queries, in the order of `SelectionStats.total_M`. See `selection_stats`."""
DISTANCE_BINS = 32
"""Bins of `SelectionStats.distance_N`: bin 0 holds distance 0, bin n > 0 the distances 2^(n-1) .. 2^n - 1."""


class Mean(NamedTuple):
    """A mean over queries and its standard error: 0 where every query was measured, NaN where that is not known."""

    mean: float
    standard_error: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionStats:
    """Sums over the queries that had a choice: those that see more than k keys. All float64, additive.

    Where only a sample of a batch's N queries was measured, n of them, its sums are scaled by N / n, so that they
    estimate those of all. M counts `METRICS`.
    """

    queries: Float[Tensor, ""]  # that had a choice
    measured: Float[Tensor, ""]  # of these
    without_choice: Float[Tensor, ""]  # queries that see at most k keys, but some
    population_M: Float[Tensor, " M"]  # queries for which a metric is defined
    total_M: Float[Tensor, " M"]  # Σ of the metric over its population
    variance_M: Float[Tensor, " M"]  # of that sum, from sampling alone
    distance_N: Float[Tensor, " bins"]  # selected keys by how far before the query's last visible key they lie

    def merge(self, other: "SelectionStats") -> "SelectionStats":
        """Return the sums over both parts: associative, commutative, and `empty_stats` changes nothing."""
        return SelectionStats(**{name: x + getattr(other, name) for name, x in vars(self).items()})

    def mean(self, metric: str) -> Mean:
        """Return a metric's mean; NaN where no query had a choice or the metric is not defined. Waits for the device.

        Args:
            metric: one of `METRICS`.

        Returns:
            `Mean`; its standard error counts the sampling of rows alone, not the choice of the data.

        Raises:
            ValueError: another name.
        """
        require(metric in METRICS, "SelectionStats.mean", f"metric must be one of {', '.join(METRICS)}", repr(metric))
        i = METRICS.index(metric)
        count = float(self.population_M[i])
        if count == 0:
            return Mean(float("nan"), float("nan"))
        return Mean(float(self.total_M[i]) / count, float(self.variance_M[i]) ** 0.5 / count)

    def means(self) -> dict[str, float]:
        """Return the mean of every metric that is defined, by name."""
        return {name: self.mean(name).mean for name in METRICS if float(self.population_M[METRICS.index(name)]) > 0}


torch.export.register_dataclass(SelectionStats, serialized_type_name="sfa_functional.SelectionStats")


def empty_stats(device: torch.device | str | None = None) -> SelectionStats:
    """Return the sums over no queries."""
    one, many = torch.zeros((), dtype=torch.float64, device=device), torch.zeros(len(METRICS), dtype=torch.float64)
    many = many.to(device=one.device)
    return SelectionStats(
        queries=one,
        measured=one,
        without_choice=one,
        population_M=many,
        total_M=many,
        variance_M=many,
        distance_N=one.new_zeros(DISTANCE_BINS),
    )


def merge_stats(parts: Sequence[SelectionStats]) -> SelectionStats:
    """Return the sums over several parts, over none those of `empty_stats`."""
    return fold(SelectionStats.merge, parts, empty_stats(parts[0].queries.device if parts else None))


def reduce_stats(stats: SelectionStats, reduce: Callable[[Tensor], Tensor]) -> SelectionStats:
    """Add the sums of all ranks.

    Args:
        stats: this rank's.
        reduce: takes one float64 vector and returns its sum over ranks, as ``comm.all_reduce`` does.

    Returns:
        The sums over all ranks, on every one.
    """
    return SelectionStats(**dict(zip(vars(stats), reduce_tensors(list(vars(stats).values()), reduce), strict=True)))


def reduce_tensors(parts: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Add float64 tensors over ranks, all in one vector."""
    vector = reduce(torch.cat([x.flatten() for x in parts]))
    return [y.view(x.shape) for x, y in zip(parts, vector.split([x.numel() for x in parts]), strict=True)]


class Scored(NamedTuple):
    """What an indexer compares, for the metrics that judge its scores."""

    q_TJI: Float[Tensor, "T J I"]
    k_SI: Float[Tensor, "S I"]
    w_TJ: Float[Tensor, "T J"]


def selection_stats(
    q_THE: Float[Tensor, "T H E"],
    kv_SE: Rows,
    topk_TK: Int32[Tensor, "T K"],
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    *,
    scale: float,
    k: int,
    scored: Scored | None = None,
    other_TM: Int32[Tensor, "T M"] | None = None,
    rows: int | None = None,
    generator: torch.Generator | None = None,
) -> SelectionStats:
    """Measure a selection against dense attention, on the queries that see more than k keys.

    With ``p[t, s]`` dense attention's weight of key s, averaged over heads, A_t the visible keys of query t, C_t the
    selected ones among them, B_t the k keys of A_t with the largest p, and ``π = softmax_A(score)`` of the indexer:

    - ``mass = Σ_C p``, ``best_mass = Σ_B p``: no selection of k keys keeps more;
    - ``recall = |C ∩ B| / |B|``;
    - ``kl = Σ_A p (ln p - ln π)``, ``kl_selected`` the same over C with both softmaxes taken there: `indexer_kl`;
    - ``overlap = |C ∩ other| / |other|``: `selection_overlap`;
    - ``entropy = -Σ_A p ln p``, in nats;
    - ``ties``: 1 where the indexer's k-th best score and the next one are equal, so that the row number decided.

    A NaN or an infinity in a latent row that a query sees makes its mass, best_mass, recall, kl and entropy NaN, and
    kl_selected if the row is selected; one in an index key its kl, and kl_selected likewise; so are the sums then.
    Rows that no measured query sees do not matter.

    Args:
        q_THE: absorbed queries.
        kv_SE: latent key rows.
        topk_TK: selected key rows; those that the query does not see are unused.
        start_T: first visible key row of each query.
        end_T: one past the last.
        scale: of the attention logits, ``config.softmax_scale``.
        k: how many keys the selection was to choose, >= 1.
        scored: what the indexer compared; None leaves kl, kl_selected and ties undefined.
        other_TM: another selection, likewise, for ``overlap``; None leaves that undefined.
        rows: queries to measure, >= 1, drawn without replacement; None is all.
        generator: draws them, on the CPU; None is a new one with seed 0.

    Returns:
        `SelectionStats`.

    Raises:
        ValueError: k < 1, rows < 1, or tensors that don't fit.

    Gradients: none.
    Cost: dense attention's weights and the index scores of the rows measured, a tile at a time; never T·S values.
        Waits for the device.
    Source: the definitions; numerics of the divergence: DeepSeek-V3.2-Exp report (2025), eq. 3 and 4.
    """
    require(k >= 1, "selection_stats", "k must be >= 1", k)
    require(rows is None or rows >= 1, "selection_stats", "rows must be >= 1 or None", rows)
    _check(q_THE, kv_SE, topk_TK, start_T, end_T, scored, other_TM)
    num_keys = num_rows(kv_SE)
    start_T, end_T = start_T.clamp(0, num_keys), end_T.clamp(0, num_keys)
    drawn = draw_rows(start_T, end_T, k=k, rows=rows, generator=generator)
    index = drawn.row_n
    return measure_rows(
        drawn,
        q_THE[index],
        kv_SE,
        topk_TK[index],
        start_T[index],
        end_T[index],
        scale=scale,
        k=k,
        scored=None if scored is None else Scored(scored.q_TJI[index], scored.k_SI, scored.w_TJ[index]),
        other_nM=None if other_TM is None else other_TM[index],
    )


def _check(
    q_THE: Tensor,
    kv_SE: Rows,
    topk_TK: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    scored: Scored | None,
    other_TM: Tensor | None,
) -> None:
    """Refuse tensors that don't fit, before rows of them are taken."""
    function, count = "selection_stats", q_THE.shape[0]
    require_rows_fit(function, q_THE, kv_SE)
    require_rows(function, count, topk=topk_TK, other=other_TM)
    for name, x, dims in (("topk", topk_TK, "[T, K]"), ("other", other_TM, "[T, M]")):
        whole = x is None or (x.ndim == 2 and x.dtype == torch.int32)
        require(whole, function, f"{name} must be int32 {dims}", None if x is None else (x.dtype, tuple(x.shape)))
    require_integers(function, count, start_T=start_T, end_T=end_T)
    if scored is not None:
        q_TJI, k_SI, w_TJ = scored
        require_rows(function, count, q_TJI=q_TJI, w_TJ=w_TJ)
        require_rows(function, num_rows(kv_SE), k_SI=k_SI)
        shapes = tuple(q_TJI.shape), tuple(k_SI.shape), tuple(w_TJ.shape)
        fits = q_TJI.ndim == 3 and shapes[0][:2] == shapes[2] and shapes[0][2:] == shapes[1][1:]
        require(fits, function, "q, k, w must be [T, J, I], [S, I], [T, J]", shapes)


class Drawn(NamedTuple):
    """Rows drawn from the queries that have a choice."""

    row_n: Int[Tensor, " n"]  # ascending
    queries: int  # that have a choice
    without_choice: int  # that see some keys, but at most k


def draw_rows(
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    *,
    k: int,
    rows: int | None = None,
    generator: torch.Generator | None = None,
) -> Drawn:
    """Draw rows from the queries that see more than k keys, without replacement; None draws all of them.

    Args:
        start_T: first visible key row of each query, >= 0.
        end_T: one past the last, at most S.
        k: keys that a query may choose.
        rows: how many.
        generator: a CPU generator; None is a new one with seed 0.

    Returns:
        `Drawn`.

    Cost: waits for the device.
    """
    visible_T = end_T - start_T
    choosing = torch.nonzero(visible_T > k)[:, 0]
    count = len(choosing)
    few = int(((visible_T > 0) & (visible_T <= k)).sum())
    if rows is not None and rows < count:
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        drawn = torch.randperm(count, generator=generator, device=generator.device)[:rows].sort().values
        choosing = choosing[drawn.to(choosing.device)]
    return Drawn(choosing, count, few)


def measure_rows(
    drawn: Drawn,
    q_nHE: Float[Tensor, "n H E"],
    kv_SE: Rows,
    topk_nK: Int32[Tensor, "n K"],
    start_n: Int[Tensor, " n"],
    end_n: Int[Tensor, " n"],
    *,
    scale: float,
    k: int,
    scored: Scored | None = None,
    other_nM: Int32[Tensor, "n M"] | None = None,
) -> SelectionStats:
    """Measure rows that were drawn already: `selection_stats` for callers who make queries of these rows alone."""
    topk_nK = _seen(topk_nK, start_n, end_n)
    values = {}
    with torch.no_grad(), without_autocast(q_nHE):
        if len(drawn.row_n) > 0:
            values = _values(q_nHE, kv_SE, topk_nK, start_n, end_n, scale=scale, k=k, scored=scored)
            if other_nM is not None:
                hits_n, count_n = shared_entries(topk_nK, _seen(other_nM, start_n, end_n))
                values["overlap"] = torch.where(count_n > 0, hits_n.double() / count_n.clamp(min=1), 1.0)
        return _sums(drawn, values, topk_nK, end_n)


def _values(
    q_nHE: Tensor,
    kv_SE: Rows,
    topk_nK: Tensor,
    start_n: Tensor,
    end_n: Tensor,
    *,
    scale: float,
    k: int,
    scored: Scored | None,
) -> dict[str, Tensor]:
    """Return every metric but the overlap, one value per query."""
    num_keys = num_rows(kv_SE)
    heads = max(q_nHE.shape[1], 1 if scored is None else scored.q_TJI.shape[1])
    limit = max(1, tiles.TILE_VALUES // max(1, num_keys * heads))
    parts: dict[str, list[Tensor]] = {}
    for queries, (low, high) in tiles.query_tiles(start_n, end_n, num_keys, limit):
        start_t, end_t, topk_tK = start_n[queries], end_n[queries], topk_nK[queries]
        p_ts = operators.mean_weights(q_nHE[queries], kv_SE, start_t, end_t, (low, high), scale=scale)
        selected_ts = _member(topk_tK, low, high)
        best_ts = _member(blockwise_indexer.select_topk(p_ts, start_t - low, end_t - low, k=k), 0, high - low)
        found = {
            "mass": torch.where(selected_ts, p_ts, 0).sum(-1),
            "best_mass": torch.where(best_ts, p_ts, 0).sum(-1),
            "recall": (selected_ts & best_ts).sum(-1).double() / best_ts.sum(-1),
            "entropy": -torch.xlogy(p_ts, p_ts).sum(-1),
        }
        spoiled_t = p_ts.isnan().any(-1)  # keys with NaN are never among the best, and may not be selected
        found = {name: torch.where(spoiled_t, torch.nan, value) for name, value in found.items()}
        if scored is not None:
            seen_ts = tiles.visible(torch.arange(low, high, device=start_t.device), start_t, end_t)
            score_ts = blockwise_indexer.index_scores(
                scored.q_TJI[queries], scored.k_SI[low:high], scored.w_TJ[queries]
            )
            score_ts = torch.where(seen_ts, score_ts.to(wide(p_ts.dtype)), -torch.inf)
            log_pi_ts = torch.where(seen_ts, torch.log_softmax(score_ts, dim=-1), 0)
            found["kl"] = (torch.xlogy(p_ts, p_ts) - p_ts * log_pi_ts).sum(-1)
            found["ties"] = _tied(score_ts, k)
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    values = {name: torch.cat(some) for name, some in parts.items()}
    if scored is not None:
        ranges = start_n, end_n
        values["kl_selected"] = indexer_kl(*scored, q_nHE, kv_SE, *ranges, scale=scale, topk_TK=topk_nK)
    return values


def _seen(topk_nK: Tensor, start_n: Tensor, end_n: Tensor) -> Tensor:
    """Return a selection of key rows with -1 for those that the query does not see."""
    return torch.where((topk_nK >= start_n[:, None]) & (topk_nK < end_n[:, None]), topk_nK, -1)


def _member(topk_tK: Tensor, low: int, high: int) -> Tensor:
    """Return the mask [t, high - low] of the rows selected."""
    place_tK = torch.where((topk_tK >= low) & (topk_tK < high), topk_tK - low, high - low).long()
    mask = torch.zeros(topk_tK.shape[0], high - low + 1, dtype=torch.bool, device=topk_tK.device)
    return mask.scatter_(1, place_tK, True)[:, :-1]


def _tied(score_ts: Tensor, k: int) -> Tensor:
    """Say where a score equal to the k-th best one is left out; NaN scores are never drawn."""
    score_ts = torch.where(score_ts.isnan(), -torch.inf, score_ts)
    kth_t1 = score_ts.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return ((score_ts >= kth_t1).sum(-1) > k) & (kth_t1[:, 0] > -torch.inf)


def _sums(drawn: Drawn, values: dict[str, Tensor], topk_nK: Tensor, end_n: Tensor) -> SelectionStats:
    """Add up over rows, scaled from the rows drawn to all that they were drawn from.

    The variance of a total estimated from n of N rows is ``N² (1 - n/N) s² / n`` (Cochran, "Sampling Techniques",
    section 2.5), s² the variance of the rows drawn.
    """
    device, measured = drawn.row_n.device, len(drawn.row_n)
    empty = empty_stats(device)
    counts = {
        "queries": float(drawn.queries),
        "measured": float(measured),
        "without_choice": float(drawn.without_choice),
    }
    state = {name: torch.tensor(x, dtype=torch.float64, device=device) for name, x in counts.items()}
    if measured == 0:
        return SelectionStats(**(vars(empty) | state))
    factor = drawn.queries / measured
    population_M, total_M, variance_M = (torch.zeros_like(empty.total_M) for _ in range(3))
    for name, value in values.items():
        i, value = METRICS.index(name), value.double()
        population_M[i] = drawn.queries
        total_M[i] = value.sum() * factor
        if measured < drawn.queries:
            spread = value.var() if measured > 1 else torch.nan  # not known of one row alone
            variance_M[i] = spread * drawn.queries * (factor - 1)
    used_nK = topk_nK >= 0
    distance_nK = (end_n[:, None] - 1 - topk_nK).clamp(min=0)
    edges = 2 ** torch.arange(DISTANCE_BINS - 1, device=device)
    bin_nK = torch.bucketize(distance_nK, edges, right=True)
    counted = torch.bincount(bin_nK[used_nK], minlength=DISTANCE_BINS).double() * factor
    sums = {"population_M": population_M, "total_M": total_M, "variance_M": variance_M, "distance_N": counted}
    return SelectionStats(**state, **sums)
