"""Every rank's local maths run for real, one rank after the other: where imbalance is measured and not counted."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfa_functional import (
    AttentionOutput,
    Batch,
    SFAConfig,
    init_params,
    lightning_indexer,
    sparse_attention,
)
from sfa_functional.precision import require, require_lengths

from .collectives import DifferentiableCollectives, Pending
from .context_parallel import context_parallel_layer
from .costs import FlopParts, layer_flops, token_flops, visible_keys
from .estimate import Estimate, estimate
from .mesh import MeshShape
from .token_ranges import TokenSplit

BUDGET = 2e10
"""Operations of all ranks together in a problem that is scaled down to be measured: about a second of one core."""

LEAST_HEADS = 4
"""Heads that a problem keeps which is scaled down: fewer would make products thin."""


class Miniature(NamedTuple):
    """A smaller problem whose work is shared out as that of the large one."""

    config: SFAConfig
    lengths: list[int]
    split: TokenSplit
    factor: int


def miniature(
    config: SFAConfig, lengths: Sequence[int] | Tensor, split: TokenSplit, *, budget: float = BUDGET
) -> Miniature:
    """Shrink lengths, k and projections by one factor s, which leaves the parts' shares of the work as they are.

    Every rank keeps each s-th of its tokens, so that any layout keeps its pattern; a query then sees 1/s of the keys
    and selects 1/s of them, and hidden, low-rank and head widths are cut until a row's projections cost 1/s. Besides,
    heads of attention and indexer, and the projections with them, are cut to 1/w, at most an eighth: a smaller s
    leaves longer requests, and what a tile costs whatever is in it weighs less.

    Args:
        config: the model's sizes.
        lengths: new tokens of each request.
        split: who holds which.
        budget: operations of one layer that all ranks together may have; s is the least that keeps them.

    Returns:
        The problem, with one layer; as it came where s is 1.

    Raises:
        ValueError: lengths of other tokens than the split's.
    """
    counts = require_lengths("miniature", lengths=lengths)
    require(sum(counts) == split.num_tokens, "miniature", f"lengths must add up to {split.num_tokens}", sum(counts))
    one = replace(config, indexer_types=("full",))
    flops = float(token_flops(config, visible_keys(counts, counts)).sum())
    if flops <= budget:
        return Miniature(one, counts, split, 1)
    fewer = next(w for w in (8, 4, 2, 1) if config.num_attention_heads % w == config.index_n_heads % w == 0)
    fewer = fewer if min(config.num_attention_heads, config.index_n_heads) >= LEAST_HEADS * fewer else 1
    factor = max(1, math.ceil((flops / fewer / budget) ** 0.5))
    rows = [row[row >= 0][factor // 2 :: factor] for row in split.index_NC.cpu()]
    kept_T = torch.cat(rows)
    owner_T = torch.arange(len(rows)).repeat_interleave(torch.tensor([row.shape[0] for row in rows]))
    order_T = kept_T.argsort()
    ends_B = torch.tensor(counts, dtype=torch.int64).cumsum(0)
    request_T = torch.searchsorted(ends_B, kept_T[order_T], right=True)
    scaled = torch.bincount(request_T, minlength=len(counts)).tolist()
    small = TokenSplit.from_owner(owner_T[order_T], split.num_ranks)
    return Miniature(_narrower(one, factor, fewer), scaled, small, factor)


def _narrower(config: SFAConfig, factor: int, fewer: int) -> SFAConfig:
    """Cut k, heads, and the widths that only projections have; the hidden width makes up for what rounding leaves."""
    widths = ("index_topk", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")
    cut: dict[str, Any] = {name: max(1, round(getattr(config, name) / factor)) for name in widths}
    cut |= {name: getattr(config, name) // fewer for name in ("num_attention_heads", "index_n_heads")}
    at_1, at_2 = (layer_flops(replace(config, **cut, hidden_size=d)).projections for d in (1, 2))
    wanted = layer_flops(config).projections / (factor * fewer)
    return replace(config, **cut, hidden_size=max(1, 1 + round((wanted - at_1) / (at_2 - at_1))))


class Measured(NamedTuple):
    """One layout on this machine: one layer, one core, each rank by itself."""

    seconds: list[float]  # of each rank
    predicted: list[float]  # of each rank, from its counts and the rates at which all ranks together ran each part
    work: list[float]  # of each rank: its seconds of each part, weighed as operations
    max_over_mean: float  # of the work


class PartRates(NamedTuple):
    """Operations a second at which this machine ran the parts."""

    projections: float  # those of the output too
    scoring: float  # with the selection
    attention: float


def measure_ranks(
    problems: Mapping[str, Miniature],
    *,
    repeats: int = 6,
    clock: Callable[[], float] = time.thread_time,
    tick: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Measured], PartRates]:
    """Run the layer of every rank of several layouts, rank by rank on one core, and take the time.

    Each rank runs `context_parallel_layer` on its rows; what the others would send it is random numbers. Time is the
    thread's own, the lower quartile of several rounds in which layouts and ranks alternate: on a machine that others
    use too the least is luck, and the mean is theirs.

    A processor that runs products of one part at another rate than those of another shows another imbalance than a
    machine with one rate. So ``work`` weighs each part's seconds, so that in all ranks of a layout together every part
    has the share that its operations have: what is measured is who has how much of it.
    The slowest rank is found in one half of the rounds and timed in the other.

    Args:
        problems: by name; `miniature` makes them.
        repeats: rounds.
        clock: seconds that this thread has worked.
        tick: called after each round.

    Returns:
        By name, `Measured`; and the rates of all layouts together.

    Cost: about a second for each layout and round, at the default budget.
    """
    runs = {(name, rank): _Rank(problem, rank) for name, problem in problems.items() for rank in _ranks(problem)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = []
        for _ in range(repeats):
            rounds.append({key: run(clock) for key, run in runs.items()})
            tick()
    finally:
        torch.set_num_threads(threads)
    spent = {key: _typical([one[key] for one in rounds]) for key in runs}
    found = {name: _estimated(problem) for name, problem in problems.items()}
    computed = {name: [_groups(rank.layers[0].computed) for rank in one.ranks] for name, one in found.items()}
    results = {}
    for name, problem in problems.items():
        keys = [(name, rank) for rank in _ranks(problem)]
        times = [spent[key] for key in keys]
        needed = [_groups(rank.layers[0].flops) for rank in found[name].ranks]
        weight = _rates(needed, times)
        expected = [_over(counts, _rates(computed[name], times)) for counts in computed[name]]
        halves = [[_weigh(_typical([one[key] for one in half]), weight) for key in keys] for half in _halves(rounds)]
        work = [_weigh(parts, weight) for parts in times]
        results[name] = Measured([sum(parts) for parts in times], expected, work, _slowest_over_mean(*halves))
    return results, _rates([counts for ranks in computed.values() for counts in ranks], list(spent.values()))


def _rates(counts: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> PartRates:
    """Divide the sums over ranks."""
    sums = [[sum(part) for part in zip(*values, strict=True)] for values in (counts, seconds)]
    return PartRates(*(count / max(time, 1e-9) for count, time in zip(*sums, strict=True)))


def _over(counts: Sequence[float], rates: PartRates) -> float:
    return sum(count / rate for count, rate in zip(counts, rates, strict=True) if count)


def _typical(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the lower quartile of each part over rounds."""
    return [sorted(part)[len(part) // 4] for part in zip(*times, strict=True)]


def _weigh(seconds: Sequence[float], rates: PartRates) -> float:
    return sum(time * rate for time, rate in zip(seconds, rates, strict=True))


def _halves(rounds: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return (rounds[::2], rounds[1::2]) if len(rounds) > 1 else (rounds, rounds)


def _slowest_over_mean(one: Sequence[float], other: Sequence[float]) -> float:
    """Find the slowest rank in one half of the rounds and time it in the other, both ways.

    The largest of sixteen times that are alike but for noise is the noise of one of them; timed again it is like all.
    """
    ratios = []
    for found, timed in ((one, other), (other, one)):
        slowest = max(range(len(found)), key=found.__getitem__)
        ratios.append(timed[slowest] * len(timed) / sum(timed) if sum(timed) else 1.0)
    return sum(ratios) / 2


def _ranks(problem: Miniature) -> range:
    return range(problem.split.num_ranks)


def _estimated(problem: Miniature) -> Estimate:
    shape = MeshShape(cp=problem.split.num_ranks)
    return estimate(problem.config, problem.lengths, shape, split=problem.split, dtype=torch.float32)


def _groups(flops: FlopParts) -> list[float]:
    """Return the operations of projections, scoring and attention."""
    parts = (flops.projections + flops.output, flops.scoring + flops.selection, flops.attention)
    return list(map(float, parts))


class _Rank:
    """One rank's layer, ready to be run again and again; returns the seconds of projections, scoring, attention."""

    def __init__(self, problem: Miniature, rank: int) -> None:
        config, split = problem.config, problem.split
        generator = torch.Generator().manual_seed(rank)
        self._x_tD = torch.randn(split.rows, config.hidden_size, generator=generator)
        self._params, self._batch = init_params(config), Batch.from_lengths(problem.lengths)
        self._comm = DifferentiableCollectives(_Imagined(rank, split.num_ranks))
        self._named: dict[str, Any] = {"config": config, "split": split}

    def __call__(self, clock: Callable[[], float]) -> list[float]:
        scoring, attention = _Timed(_score, clock), _Timed(_attend, clock)
        begin = clock()
        with torch.no_grad():
            context_parallel_layer(
                self._params,
                self._x_tD,
                self._batch,
                self._comm,
                select=scoring,
                implementation=attention,
                **self._named,
            )
        whole = clock() - begin
        return [whole - scoring.seconds - attention.seconds, scoring.seconds, attention.seconds]


class _Timed:
    """A function that adds up the seconds of its calls."""

    def __init__(self, function: Callable[..., Any], clock: Callable[[], float]) -> None:
        self._function, self._clock, self.seconds = function, clock, 0.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        begin = self._clock()
        result = self._function(*args, **named)
        self.seconds += self._clock() - begin
        return result


def _score(*, q_TJI: Tensor, k_SI: Tensor, w_TJ: Tensor, start_T: Tensor, end_T: Tensor, k: int, **_: Any) -> Tensor:
    return lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=k)


def _attend(q_THE: Tensor, kv_SE: Tensor, topk_TK: Tensor, *, scale: float, value_dim: int) -> AttentionOutput:
    return sparse_attention(q_THE, kv_SE, topk_TK, scale=scale, value_dim=value_dim)


class _Imagined:
    """A transport to neighbours that are not there: what they would send is random numbers."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def start(self, collective: str, x: Tensor, source: int, out: Tensor | None) -> Pending:
        shape = (self.size * x.shape[0], *x.shape[1:]) if collective == "all_gather" else x.shape
        return _Arrived(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype))


class _Arrived:
    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x
