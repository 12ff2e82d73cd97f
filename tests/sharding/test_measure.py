"""A miniature keeps the shares of the work, and measuring gives each rank the time of its own work."""

import pytest
import torch

import sfa_functional as sfa
from sharding import MeshShape, TokenSplit, estimate, measure_ranks, miniature, split_tokens
from sharding.measure import _slowest_over_mean
from tests.sharding.products import ProductCounter

V32 = sfa.DEEPSEEK_V32
CLOCKS = 9  # that one rank reads: two around each product, five in a layer
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def over_mean(values):
    return max(values) / (sum(values) / len(values))


def counted(problem):
    """What each rank needs by the small model's sizes, from the large problem's formulas."""
    shape = MeshShape(cp=problem.split.num_ranks)
    one = estimate(problem.config, problem.lengths, shape, split=problem.split, dtype=torch.float32)
    return [rank.flops for rank in one.ranks]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "lengths", [[65536], [65536, *[4096] * 8], [30000, 9, 2000, 50000]], ids=["one", "nine", "four"]
)
def test_a_miniature_keeps_keys_and_runs_some_queries_of_each_rank(layout, lengths):
    split = split_tokens(lengths, 16, layout=layout, config=V32)
    small = miniature(V32, lengths, split)
    assert (small.factor, small.lengths, small.split) == (1, lengths, split)
    assert (small.config.index_topk, small.config.index_n_heads, small.config.key_width) == (2048, 64, 576)
    assert (small.config.num_attention_heads, small.config.hidden_size) == (16, 896)
    for row, sampled in zip(split.index_NC, small.sampled, strict=True):
        places = torch.searchsorted(row[row >= 0], sampled) if layout != "zigzag" else None
        assert 8 <= len(sampled) <= 16
        assert set(sampled.tolist()) <= set(row.tolist())
        assert len(set(sampled.tolist())) == len(sampled)
        if places is not None:  # the first and the third quarter of the rank's tokens are spoken for
            quarter = len(row[row >= 0]) / 4
            assert places[:8].float().mean() == pytest.approx(quarter, abs=8)
            assert places[8:].float().mean() == pytest.approx(3 * quarter, abs=8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[65536], [65536, *[4096] * 8], [500000, 3]], ids=["one", "nine", "long"])
def test_work_is_weighed_as_the_large_model_counts_it(layout, lengths):
    split = split_tokens(lengths, 16, layout=layout, config=V32)
    want = estimate(V32, lengths, MeshShape(cp=16), split=split)
    needed = [sum(parts) for parts in miniature(V32, lengths, split).needed]
    assert needed == pytest.approx([rank.flops.total / 61 for rank in want.ranks])


def test_a_problem_of_too_many_keys_is_thinned_with_k():
    lengths = [400_000, 100_000]
    split = split_tokens(lengths, 16, layout="striped", config=V32)
    small = miniature(V32, lengths, split)
    assert (small.factor, small.config.index_topk) == (4, 512)
    assert small.lengths == pytest.approx([100_000, 25_000], abs=16)
    ranks = [sum(parts) for parts in counted(small)]
    want = [sum(rank.flops) for rank in estimate(V32, lengths, MeshShape(cp=16), split=split).ranks]
    assert over_mean(ranks) == pytest.approx(over_mean(want), rel=0.01)


def test_a_miniature_keeps_every_s_th_token_of_each_rank_in_order(monkeypatch):
    """Runs of eight, factor 2: every other token of each rank, from the second on."""
    monkeypatch.setattr("sharding.measure.MOST_TOKENS", 32)
    small = miniature(sfa.TINY, [24, 40], TokenSplit.from_owner(torch.arange(64) // 8 % 2, 2))
    assert small.factor == 2
    assert small.lengths == [12, 20]
    rows = [row.tolist() for row in small.split.index_NC]
    assert rows == [[t for t in range(32) if t // 4 % 2 == r] for r in (0, 1)]
    odd = miniature(sfa.TINY, [64], TokenSplit.from_owner(torch.arange(64) // 33, 2))
    assert [len(row[row >= 0]) for row in odd.split.index_NC] == [16, 15]


def test_a_problem_that_fits_stays_as_it_is():
    split = split_tokens([40, 3], 3, layout="zigzag")
    small = miniature(sfa.GLM_52, [40, 3], split, budget=1e12)
    assert (small.factor, small.lengths, small.split) == (1, [40, 3], split)
    assert (small.config.index_topk, small.config.hidden_size) == (2048, 6144)
    assert [rows.tolist() for rows in small.sampled] == [row[row >= 0].tolist() for row in split.index_NC]


def test_a_rank_whose_rows_are_sampled_is_given_the_time_of_all():
    """The clock counts operations, of which a rank's rows need the more the later they are."""
    lengths = [2400]
    split = split_tokens(lengths, 4, layout="contiguous")
    whole = miniature(sfa.TINY, lengths, split)
    part = miniature(sfa.TINY, lengths, split, budget=2e8)
    assert [len(rows) for rows in whole.sampled] == [600] * 4
    assert all(len(rows) < 200 for rows in part.sampled)
    with ProductCounter() as counter:
        measured, _ = measure_ranks({"whole": whole, "part": part}, repeats=1, clock=lambda: float(counter.flops))
    assert measured["part"].seconds == pytest.approx(measured["whole"].seconds, rel=0.05)
    assert measured["part"].max_over_mean == pytest.approx(measured["whole"].max_over_mean, rel=0.03)


def test_a_machine_that_slows_down_for_a_while_is_seen_in_the_product_beside():
    """Every third rank runs at half speed, and so does the product that is timed around it."""
    lengths = [900]
    problems = {"striped": miniature(sfa.TINY, lengths, split_tokens(lengths, 6, layout="striped"))}
    spent = {"calls": 0, "seconds": 0.0}

    with ProductCounter() as counter:

        def clock():
            spent["seconds"] += counter.flops * (2 if spent["calls"] // CLOCKS % 3 == 0 else 1)
            counter.flops = 0
            spent["calls"] += 1
            return spent["seconds"]

        measured, _ = measure_ranks(problems, repeats=1, clock=clock)
    assert measured["striped"].max_over_mean == pytest.approx(1, abs=0.02)


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
        want = estimate(sfa.TINY, lengths, MeshShape(cp=ranks), layout=name).max_over_mean
        assert seen.max_over_mean == pytest.approx(want, rel=0.1)
        assert seen.seconds == pytest.approx([sum(parts) for parts in counted(problems[name])], rel=0.1)
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
    want = [sum(parts) for parts in counted(problems["contiguous"])]
    layers = sfa.TINY.num_layers
    assert problems["contiguous"].config.num_layers == 1 < layers
    assert sum(seen.work) == pytest.approx(sum(want))
    assert seen.work == pytest.approx(want, rel=0.1)


def test_the_slowest_rank_is_not_the_one_that_noise_chose():
    """Sixteen ranks that are alike but for a tenth of noise: the largest time is 1.2 of the mean, the answer 1."""
    generator = torch.Generator().manual_seed(0)
    naive, got = [], []
    for _ in range(200):
        rounds = (1 + 0.1 * torch.randn(6, 16, generator=generator)).tolist()
        naive.append(over_mean(rounds[0]))
        got.append(_slowest_over_mean(rounds))
    assert sum(naive) / 200 > 1.15
    assert sum(got) / 200 == pytest.approx(1, abs=0.02)  # a mean would give 1; the median of six leans 0.01 upwards


def test_the_slowest_rank_is_found_in_the_other_rounds():
    assert _slowest_over_mean([[1.0, 3.0]]) == 1.5
    assert _slowest_over_mean([[2.0, 1.0, 3.0], [1.0, 2.0, 1.0]]) == pytest.approx((1 * 3 / 6 + 1 * 3 / 4) / 2)
    assert _slowest_over_mean([[1.0, 1.0, 4.0], [1.0, 1.0, 2.0], [5.0, 1.0, 2.0]]) == pytest.approx(3 * 2 / 8)


def test_threads_of_the_caller_and_random_numbers_are_left_alone():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    measure_ranks({"x": miniature(sfa.TINY, [40], split_tokens([40], 2, layout="zigzag"))}, repeats=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


@pytest.mark.everything  # takes the time of a machine that should be at rest
def test_seconds_measured_agree_with_the_imbalance_predicted_to_a_tenth():
    lengths = [65536, *[4096] * 8]
    problems = {name: miniature(V32, lengths, split_tokens(lengths, 16, layout=name, config=V32)) for name in LAYOUTS}
    measured, _ = measure_ranks(problems)
    for name, seen in measured.items():
        predicted = estimate(V32, lengths, MeshShape(cp=16), layout=name).max_over_mean
        assert seen.max_over_mean == pytest.approx(predicted, rel=0.1), name
