"""Every rank's local maths run for real, one rank after the other: where imbalance is measured and not counted."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from sfa_functional import (
    Batch,
    LayerParams,
    SFAConfig,
    index_keys,
    index_queries,
    index_weights,
    init_params,
    latent_output,
    latent_projections,
    lightning_indexer,
    rope_cos_sin,
    sparse_attention,
)
from sfa_functional.precision import require, require_lengths

from .costs import flop_parts, needed_pairs, token_flops, visible_keys
from .token_ranges import TokenSplit

BUDGET = 1e11
"""Operations of all ranks together in a problem that is scaled down to be measured: a few seconds of one core."""

LEAST_HEADS = 16
"""Attention heads that a problem keeps which is scaled down: fewer would make products thin."""

MOST_TOKENS = 2**17
"""Tokens that are kept: their keys are held in float32, 2.8 KB each at V3.2's sizes."""

RUN = 8
"""Tokens of a rank that are scored together; single ones would make products thin."""


class PartValues(NamedTuple):
    """One number for each part of a layer: operations, seconds, or operations a second."""

    projections: float  # those of the output too
    scoring: float  # with the selection
    attention: float


class Miniature(NamedTuple):
    """A part of a problem that is small enough to be run."""

    config: SFAConfig
    lengths: list[int]
    split: TokenSplit
    factor: int  # one in so many tokens is left, and one in so many of the k keys
    sampled: list[Tensor]  # of each rank: the tokens that are run, evenly spread runs of `RUN`
    needed: list[PartValues]  # of each rank: operations of the whole problem, as the large model would count them


def miniature(
    config: SFAConfig, lengths: Sequence[int] | Tensor, split: TokenSplit, *, budget: float = BUDGET
) -> Miniature:
    """Take the part of a problem that fits: some queries of each rank, against all keys that they see.

    How fast a rank works depends on how many keys its queries see: tiles and selections have costs of their own. So
    keys, k and indexer heads stay, queries are left out, and the hidden width and the attention heads, whose share of
    the time is known, are cut to 1/w, at most an eighth. Beyond `MOST_TOKENS` the lengths and k shrink too, by one
    factor s: of each rank's tokens every s-th is left, so that any layout keeps its pattern.

    Args:
        config: the model's sizes.
        lengths: new tokens of each request.
        split: who holds which.
        budget: operations of one layer that all ranks together may have; each has at least two runs of tokens.

    Returns:
        The part, of one layer; all of the problem where it fits.

    Raises:
        ValueError: lengths of other tokens than the split's.
    """
    counts = require_lengths("miniature", lengths=lengths)
    require(sum(counts) == split.num_tokens, "miniature", f"lengths must add up to {split.num_tokens}", sum(counts))
    small = replace(config, indexer_types=("full",))
    needed = [_groups(small, seen_t) for seen_t in _seen(counts, split)]
    factor = max(1, math.ceil(sum(counts) / MOST_TOKENS))
    if factor > 1:
        counts, split = _thinned(counts, split, factor)
        small = replace(small, index_topk=max(1, round(config.index_topk / factor)))
    if _flops(small, counts) > budget:
        heads = config.num_attention_heads
        fewer = next(w for w in (8, 4, 2, 1) if w == 1 or (heads % w == 0 and heads // w >= LEAST_HEADS))
        small = replace(small, num_attention_heads=heads // fewer, hidden_size=max(1, config.hidden_size // fewer))
    part = max(1.0, _flops(small, counts) / budget)
    sampled = [_spread(row[row >= 0], part) for row in split.index_NC.cpu()]
    return Miniature(small, counts, split, factor, sampled, needed)


def _flops(config: SFAConfig, counts: Sequence[int]) -> float:
    return float(token_flops(config, visible_keys(counts, counts)).sum())


def _seen(counts: Sequence[int], split: TokenSplit) -> list[Tensor]:
    """Return the keys that each rank's tokens see."""
    visible_T = visible_keys(counts, counts)
    return [visible_T[row[row >= 0]] for row in split.index_NC.cpu()]


def _groups(config: SFAConfig, seen_t: Tensor) -> PartValues:
    """Count the operations of tokens that see so many keys."""
    parts = flop_parts(config, needed_pairs(seen_t, k=config.index_topk))
    groups = parts.projections + parts.output, parts.scoring + parts.selection, parts.attention
    return PartValues(*map(float, groups))


def _spread(row_t: Tensor, part: float) -> Tensor:
    """Return evenly spread runs of a rank's tokens, about one in ``part`` and at least two."""
    runs = row_t.split(RUN)
    wanted = max(2, round(len(runs) / part))
    if wanted >= len(runs):
        return row_t
    return torch.cat([runs[int((i + 0.5) * len(runs) / wanted)] for i in range(wanted)])


def _thinned(counts: Sequence[int], split: TokenSplit, factor: int) -> tuple[list[int], TokenSplit]:
    """Leave every s-th of each rank's tokens."""
    rows = [row[row >= 0][factor // 2 :: factor] for row in split.index_NC.cpu()]
    kept_T = torch.cat(rows)
    owner_T = torch.arange(len(rows)).repeat_interleave(torch.tensor([row.shape[0] for row in rows]))
    order_T = kept_T.argsort()
    ends_B = torch.tensor(counts, dtype=torch.int64).cumsum(0)
    request_T = torch.searchsorted(ends_B, kept_T[order_T], right=True)
    lengths = torch.bincount(request_T, minlength=len(counts)).tolist()
    return lengths, TokenSplit.from_owner(owner_T[order_T], split.num_ranks)


class Measured(NamedTuple):
    """One layout on this machine: one layer of the miniature, on one core, each rank by itself."""

    seconds: list[float]  # of each rank
    work: list[float]  # of each rank: its seconds of each part, weighed as operations of the large problem
    max_over_mean: float  # of the work


def measure_ranks(
    problems: Mapping[str, Miniature],
    *,
    repeats: int = 6,
    clock: Callable[[], float] = time.thread_time,
    tick: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Measured], PartValues]:
    """Run a layer of every rank of several layouts, rank by rank on one core, and take the time.

    Each rank runs what `context_parallel_layer` computes on its rows, without the gather; the keys that others would
    send it are random numbers. Seconds of its sampled rows are extrapolated to all of them, part by part, by their
    operations. Time is the thread's own, the median of several rounds in which layouts and ranks alternate. A machine
    that others use too is now faster and now slower, for some tenths of a second at a time: before and after each rank
    a fixed product is timed, and the rank's seconds are scaled to that product's usual speed.

    A processor that runs products of one part at another rate than those of another shows another imbalance than a
    machine with one rate. So ``work`` weighs each part's seconds, so that in all ranks of a layout together every part
    has the share that its operations have: what is measured is who has how much of it.
    The slowest rank is timed in each round, and found in all others.

    Args:
        problems: by name; `miniature` makes them.
        repeats: rounds.
        clock: seconds that this thread has worked.
        tick: called after each round.

    Returns:
        By name, `Measured`; and the operations a second of all layouts together.

    Cost: a few seconds for each layout and round, at the default budget.
    """
    shared = _shared(problems)
    runs = {(name, rank): _Rank(one, rank, shared[name]) for name, one in problems.items() for rank in _ranks(one)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = []
        for _ in range(repeats):
            rounds.append({key: _paced(run, clock) for key, run in runs.items()})
            tick()
    finally:
        torch.set_num_threads(threads)
    usual = median(pace for one in rounds for _, pace in one.values())
    at_pace = [{key: [x * usual / (pace or 1) for x in parts] for key, (parts, pace) in one.items()} for one in rounds]
    spent = {key: _typical([one[key] for one in at_pace]) for key in runs}
    results = {}
    for name, problem in problems.items():
        keys = [(name, rank) for rank in _ranks(problem)]
        weight = _rates(problem.needed, [spent[key] for key in keys])
        work = [_weigh(spent[key], weight) for key in keys]
        by_round = [[_weigh(one[key], weight) for key in keys] for one in at_pace]
        results[name] = Measured([sum(spent[key]) for key in keys], work, _slowest_over_mean(by_round))
    return results, _rates([run.needed for run in runs.values()], list(spent.values()))


def _rates(counts: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> PartValues:
    """Divide the sums over ranks."""
    sums = [[sum(part) for part in zip(*values, strict=True)] for values in (counts, seconds)]
    return PartValues(*(count / max(time, 1e-9) for count, time in zip(*sums, strict=True)))


def _typical(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each part over rounds."""
    return [median(part) for part in zip(*times, strict=True)]


def _weigh(seconds: Sequence[float], rates: PartValues) -> float:
    return sum(time * rate for time, rate in zip(seconds, rates, strict=True))


def _slowest_over_mean(rounds: Sequence[Sequence[float]]) -> float:
    """Time the slowest rank in each round, found in all others, over that round's mean; return the median.

    The largest of sixteen times that are alike but for noise is the noise of one of them; timed again it is like all.
    """
    ratios = []
    for i, timed in enumerate(rounds):
        found = _typical([*rounds[:i], *rounds[i + 1 :]] or rounds)
        slowest = max(range(len(found)), key=found.__getitem__)
        ratios.append(timed[slowest] * len(timed) / sum(timed) if sum(timed) else 1.0)
    return median(ratios)


def _ranks(problem: Miniature) -> range:
    return range(problem.split.num_ranks)


def _paced(run: Callable[[Callable[[], float]], list[float]], clock: Callable[[], float]) -> tuple[list[float], float]:
    """Run, and return with the result the seconds that a fixed product takes around it."""
    square = torch.ones(512, 512)

    def product() -> float:
        begin = clock()
        torch.mm(square, square)
        return clock() - begin

    before, result, after = product(), run(clock), product()
    return result, before + after


class _Shared(NamedTuple):
    """What all ranks of a layout have."""

    params: LayerParams
    kv_SE: Tensor
    k_SI: Tensor


def _shared(problems: Mapping[str, Miniature]) -> dict[str, _Shared]:
    """Make weights, and keys in the place of those that a gather would bring; layouts of the same sizes share them."""
    made: dict[tuple[SFAConfig, int], _Shared] = {}
    for problem in problems.values():
        config, num_keys = problem.config, sum(problem.lengths)
        if (config, num_keys) not in made:
            random = torch.Generator().manual_seed(0)
            keys = [
                torch.randn(num_keys, width, generator=random) for width in (config.key_width, config.index_head_dim)
            ]
            made[config, num_keys] = _Shared(init_params(config, generator=random), *keys)
    return {name: made[problem.config, sum(problem.lengths)] for name, problem in problems.items()}


class _Rank:
    """One rank's layer, ready to be run again and again; returns the seconds that its parts would take on all rows."""

    def __init__(self, problem: Miniature, rank: int, shared: _Shared) -> None:
        config, row_t, batch = problem.config, problem.sampled[rank], Batch.from_lengths(problem.lengths)
        self._config, self._shared = config, shared
        self._start_t, self._end_t = batch.start_T[row_t], batch.end_T[row_t]
        self._rope = rope_cos_sin(batch.position_T[row_t], config)
        random = torch.Generator().manual_seed(rank)
        self._x_tD = torch.randn(len(row_t), config.hidden_size, generator=random)
        self.needed = _groups(config, _seen(problem.lengths, problem.split)[rank])
        sampled = _groups(config, self._end_t - self._start_t)
        self._times = [whole / part if part else 1.0 for whole, part in zip(self.needed, sampled, strict=True)]

    @torch.no_grad()
    def __call__(self, clock: Callable[[], float]) -> list[float]:
        config, (params, kv_SE, k_SI), indexer = self._config, self._shared, self._shared.params.indexer
        assert indexer is not None  # a miniature's one layer is "full"
        times = [clock()]
        q_tHE, q_latent_tQ, _ = latent_projections(params, self._x_tD, *self._rope, config=config)
        q_tJI = index_queries(indexer, q_latent_tQ, *self._rope, config=config)
        index_keys(indexer, self._x_tD, *self._rope, config=config)
        w_tJ = index_weights(indexer, self._x_tD, config=config)
        times.append(clock())
        runs = zip(*(x.split(RUN) for x in (q_tJI, w_tJ, self._start_t, self._end_t)), strict=True)
        topk = [lightning_indexer(q, k_SI, w, *ends, k=config.index_topk) for q, w, *ends in runs]
        times.append(clock())
        scale, width = config.softmax_scale, config.kv_lora_rank
        out = sparse_attention(q_tHE, kv_SE, torch.cat(topk), scale=scale, value_dim=width)
        times.append(clock())
        latent_output(params, out.out_THL, config=config)
        times.append(clock())
        before, scoring, attention, after = (end - begin for begin, end in pairwise(times))
        return [time * more for time, more in zip((before + after, scoring, attention), self._times, strict=True)]
