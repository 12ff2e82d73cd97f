"""A miniature keeps the shares of the work, and measuring gives each rank the time of its own work."""

import pytest
import torch

import sfa_functional as sfa
from sharding import MeshShape, TokenSplit, estimate, measure_ranks, miniature, split_tokens
from sharding.costs import layer_flops
from sharding.measure import _slowest_over_mean
from tests.sharding.products import ProductCounter

V32 = sfa.DEEPSEEK_V32
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def over_mean(values):
    return max(values) / (sum(values) / len(values))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "lengths", [[65536], [65536, *[4096] * 8], [30000, 9, 2000, 50000]], ids=["one", "nine", "four"]
)
def test_a_miniature_is_shared_out_as_the_large_problem(layout, lengths):
    split = split_tokens(lengths, 16, layout=layout, config=V32)
    small = miniature(V32, lengths, split, budget=1e11)
    want = estimate(V32, lengths, MeshShape(cp=16), split=split)
    got = estimate(small.config, small.lengths, MeshShape(cp=16), split=small.split)
    assert 5 <= small.factor <= 20
    assert sum(rank.flops.total for rank in got.ranks) < 1.1e11
    assert got.max_over_mean == pytest.approx(want.max_over_mean, rel=0.03)
    parts = [sum(rank.flops[part] for rank in want.ranks) / 61 for part in (0, 1, 3, 4)]
    small_parts = [sum(rank.flops[part] for rank in got.ranks) for part in (0, 1, 3, 4)]
    shares, small_shares = ([sum(x[::3]), *x[1:3]] for x in (parts, small_parts))
    assert [x / sum(small_shares) for x in small_shares] == pytest.approx([x / sum(shares) for x in shares], abs=0.03)


def test_a_miniature_keeps_every_s_th_token_of_each_rank_in_order():
    """Runs of eight, factor 2: every other token of each rank, from the second on."""
    owner_T = torch.arange(64) // 8 % 2
    small = miniature(sfa.TINY, [24, 40], TokenSplit.from_owner(owner_T, 2), budget=1.3e6)
    assert small.factor == 2
    assert small.lengths == [12, 20]
    rows = [row.tolist() for row in small.split.index_NC]
    assert rows == [[t for t in range(32) if t // 4 % 2 == r] for r in (0, 1)]
    odd = miniature(sfa.TINY, [64], TokenSplit.from_owner(torch.arange(64) // 33, 2), budget=1.3e6)
    assert [len(row[row >= 0]) for row in odd.split.index_NC] == [16, 15]


def test_a_problem_that_fits_stays_as_it_is():
    split = split_tokens([40, 3], 3, layout="zigzag")
    small = miniature(sfa.GLM_52, [40, 3], split, budget=1e12)
    assert (small.factor, small.lengths, small.split) == (1, [40, 3], split)
    assert small.config.index_topk == 2048


@pytest.mark.parametrize("config", [V32, sfa.GLM_5], ids=["v3.2", "glm-5"])
@pytest.mark.parametrize("budget", [1e9, 1e10, 1e12])
def test_projections_of_a_miniature_cost_a_part_of_those_of_the_model(config, budget):
    small = miniature(config, [65536], split_tokens([65536], 4, layout="zigzag"), budget=budget)
    want, got = layer_flops(config), layer_flops(small.config)
    assert got.projections == pytest.approx(want.projections / small.factor / 8, rel=0.01)
    assert [8 * x for x in got[1:]] == list(want[1:])


def test_each_rank_is_given_the_time_of_its_own_work():
    """The clock counts operations instead of seconds, so the answer is exact but for the tiles of the kernels."""
    lengths, ranks = [1200, 150], 4
    names = ("contiguous", "striped")
    problems = {name: miniature(sfa.TINY, lengths, split_tokens(lengths, ranks, layout=name)) for name in names}
    with ProductCounter() as counter:
        measured, rates = measure_ranks(problems, repeats=1, clock=lambda: float(counter.flops))
    assert problems["striped"].factor == 1
    assert list(rates) == pytest.approx([1, 1, 1], rel=0.1)
    for name, seen in measured.items():
        counted = estimate(sfa.TINY, lengths, MeshShape(cp=ranks), layout=name).max_over_mean
        assert seen.max_over_mean == pytest.approx(counted, rel=0.1)
        assert seen.seconds == pytest.approx(seen.predicted, rel=0.1)
    assert measured["contiguous"].max_over_mean > 1.4 > 1.1 > measured["striped"].max_over_mean


def test_a_part_that_runs_at_another_rate_counts_by_its_operations():
    lengths = [900]
    problems = {"contiguous": miniature(sfa.TINY, lengths, split_tokens(lengths, 3, layout="contiguous"))}
    spent = {"seconds": 0.0}

    with ProductCounter() as counter:

        def clock():
            spent["seconds"] += counter.flops / 7
            counter.flops = 0
            return spent["seconds"]

        measured, rates = measure_ranks(problems, repeats=1, clock=clock)
    assert list(rates) == pytest.approx([7, 7, 7], rel=0.1)
    seen = measured["contiguous"]
    counted = estimate(problems["contiguous"].config, lengths, MeshShape(cp=3), layout="contiguous")
    assert sum(seen.work) == pytest.approx(sum(rank.flops.total for rank in counted.ranks))
    assert seen.work == pytest.approx([rank.flops.total for rank in counted.ranks], rel=0.1)
    assert sum(seen.seconds) == pytest.approx(sum(seen.predicted))


def test_the_slowest_rank_is_not_the_one_that_noise_chose():
    """Sixteen ranks that are alike but for a tenth of noise: the largest time is 1.2 of the mean, the answer 1."""
    generator = torch.Generator().manual_seed(0)
    naive, got = [], []
    for _ in range(200):
        one, other = (1 + 0.1 * torch.randn(2, 16, generator=generator)).tolist()
        naive.append(over_mean(one))
        got.append(_slowest_over_mean(one, other))
    assert sum(naive) / 200 > 1.15
    assert sum(got) / 200 == pytest.approx(1, abs=0.01)
    assert _slowest_over_mean([1.0, 1.0, 2.2], [1.1, 1.0, 2.0]) == pytest.approx((2 * 3 / 4.1 + 2.2 * 3 / 4.2) / 2)


def test_threads_of_the_caller_and_random_numbers_are_left_alone():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    measure_ranks({"x": miniature(sfa.TINY, [40], split_tokens([40], 2, layout="zigzag"))}, repeats=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


@pytest.mark.everything  # takes the time of a machine that should be at rest
def test_seconds_measured_agree_with_the_imbalance_predicted_to_a_tenth():
    lengths = [65536, *[4096] * 8]
    problems = {name: miniature(V32, lengths, split_tokens(lengths, 16, layout=name, config=V32)) for name in LAYOUTS}
    for _ in range(3):
        measured, _ = measure_ranks(problems)
        ratios = [
            seen.max_over_mean / estimate(V32, lengths, MeshShape(cp=16), layout=name).max_over_mean
            for name, seen in measured.items()
        ]
        print(ratios)
        if all(0.9 < ratio < 1.1 for ratio in ratios):
            return
    raise AssertionError(ratios)
