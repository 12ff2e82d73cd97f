"""Selection statistics equal a plain loop, add up in any grouping, and say how far a sample may be off."""

import itertools
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
from sfa_functional import tiles
from sfa_functional.selection_stats import METRICS, Drawn, Scored, draw_rows, measure_rows, reduce_stats
from sharding import MeshShape, P, shard_map, simulated_mesh, split_tokens
from tests.sfa_functional import selection_oracle
from tests.sfa_functional.selection_oracle import Problem, assert_sums, plain_queries, plain_sums

S, H, E, J, WIDTH = 23, 3, 6, 4, 3
SCALE = 0.75  # so that logits of small integers are exact, and equal ones tie
RANGES = {
    "ragged": [(0, i + 1) for i in range(9)] + [(9, i + 10) for i in range(3)] + [(12, i + 13) for i in range(11)],
    "context": [(0, 8), (0, 9), (9, 12), (12, 22), (12, 23)],
    "padding": [(0, 7), (0, 0), (0, 0), (9, 9), (12, 20)],
    "odd": [(-4, 6), (0, 99), (5, 5), (9, 2), (30, 40), (-9, -3), (18, 23), (2, 3), (22, 60)],
    "whole": [(0, S)] * 5,
    "none": [],
}
"""What queries see: of packed requests, behind cached context, of padding, beyond the rows that there are, of all."""
SENTINELS = (-1, -7, S, 2**31 - 1, -(2**31))


def draw_selection(ranges, width):
    """Choose rows without repeats: half of those seen, some unseen, in any order, holes of every kind between them."""
    rows = []
    for start, end in ranges:
        seen = list(range(max(start, 0), min(end, S)))
        unseen = [s for s in range(S) if s not in seen]
        chosen = [seen[i] for i in torch.randperm(len(seen))[: width // 2]]
        chosen += [unseen[i] for i in torch.randperm(len(unseen))[: width // 4]]
        chosen += [SENTINELS[i % len(SENTINELS)] for i in range(width - len(chosen))]
        rows.append([chosen[i] for i in torch.randperm(width)])
    return torch.tensor(rows, dtype=torch.int32).view(len(ranges), width)


def make(ranges="ragged", *, width=8, dtype=torch.float64, integers=False, index=True, other=5):
    """Build a problem; with integers many scores and many attention weights are equal."""
    ranges = RANGES[ranges] if isinstance(ranges, str) else ranges
    count = len(ranges)

    def numbers(*shape):
        drawn = torch.randint(-1, 2, shape) if integers else torch.randn(*shape, dtype=torch.float64)
        return drawn.to(dtype)

    return Problem(
        numbers(count, H, E),
        numbers(S, E),
        draw_selection(ranges, width),
        torch.tensor([start for start, _ in ranges], dtype=torch.int64),
        torch.tensor([end for _, end in ranges], dtype=torch.int64),
        (numbers(count, J, WIDTH), numbers(S, WIDTH), numbers(count, J)) if index else None,
        draw_selection(ranges, other) if other is not None else None,
    )


def measure(problem, *, k=3, rows=None, generator=None):
    """Call the function under test."""
    scored = None if problem.index is None else Scored(*problem.index)
    given = {"scored": scored, "other_TM": problem.other_TM, "rows": rows, "generator": generator}
    return sfa.selection_stats(*problem[:5], scale=SCALE, k=k, **given)


def take(problem, rows):
    """Return the problem of some of the queries, in the order given."""
    index = problem.index
    return problem._replace(
        **{name: getattr(problem, name)[rows] for name in ("q_THE", "topk_TK", "start_T", "end_T")},
        index=None if index is None else (index[0][rows], index[1], index[2][rows]),
        other_TM=None if problem.other_TM is None else problem.other_TM[rows],
    )


def exact(problem, k=3):
    return plain_sums(problem, scale=SCALE, k=k)


def test_metrics_stand_in_the_order_that_is_documented():
    assert METRICS == selection_oracle.METRICS


class TestOracle:
    """Every number equals the loop over queries, heads and keys."""

    @pytest.mark.parametrize("ranges", RANGES)
    @pytest.mark.parametrize(("k", "width"), [(1, 1), (3, 3), (3, 8), (6, 2), (4, 0), (22, 30), (23, 8), (40, 8)])
    def test_every_range_and_width(self, ranges, k, width):
        problem = make(ranges, width=width)
        assert_sums(measure(problem, k=k), exact(problem, k))

    @pytest.mark.parametrize("ranges", ["ragged", "whole", "odd"])
    @pytest.mark.parametrize("k", [1, 2, 5])
    def test_ties_in_scores_and_in_attention_go_to_the_lower_row(self, ranges, k):
        problem = make(ranges, integers=True)
        problem.kv_SE[S // 2 :] = problem.kv_SE[: S - S // 2].clone()
        problem.q_THE[:] = problem.q_THE[:, :1].clone()  # else rounding decides between keys whose heads are swapped
        want = exact(problem, k)
        assert want["total_M"][METRICS.index("ties")] > 0
        assert_sums(measure(problem, k=k), want)

    def test_a_tie_counts_only_at_the_cut(self):
        """Scores 3, 2, 2, 1: with k = 2 the row number decides, with 1 and 3 it does not."""
        score_S = torch.tensor([2.0, 3.0, 1.0, 2.0])
        problem = make([(0, 4)], index=False)._replace(kv_SE=torch.randn(4, E).double())
        problem = problem._replace(index=(torch.ones(1, 1, 1), score_S[:, None], torch.ones(1, 1)))
        assert [measure(problem, k=k).mean("ties").mean for k in (1, 2, 3)] == [0.0, 1.0, 0.0]

    @pytest.mark.parametrize("index", [False, True])
    @pytest.mark.parametrize("other", [None, 0, 7])
    def test_what_is_not_given_is_not_defined(self, index, other):
        problem = make("ragged", index=index, other=other)
        stats = measure(problem)
        assert_sums(stats, exact(problem))
        there = set(METRICS) - (set() if index else {"kl", "kl_selected", "ties"})
        there -= {"overlap"} if other is None else set()
        assert set(stats.means()) == there
        for name in set(METRICS) - there:
            assert all(math.isnan(x) for x in stats.mean(name))

    def test_split_keys(self):
        problem = make("ragged")
        split = sfa.SplitRows(latent_SL=problem.kv_SE[:, :4].clone(), rope_SR=problem.kv_SE[:, 4:].clone())
        assert_sums(measure(problem._replace(kv_SE=split)), exact(problem))

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-6)])
    def test_narrow_inputs_are_summed_wide(self, dtype, tolerance):
        """The loop is given the rounded inputs: only sums may differ, and those are taken in float32."""
        problem = make("ragged", dtype=dtype)
        problem = problem._replace(index=(*problem.index[:2], problem.index[2].float()))
        assert_sums(measure(problem), exact(problem), tolerance)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_sums(measure(problem), exact(problem), tolerance)

    def test_queries_in_any_order(self):
        problem = make("ragged")
        assert_sums(measure(take(problem, torch.randperm(len(problem.q_THE)))), exact(problem))

    @pytest.mark.parametrize("tile", [1, 60, 200, 1000])
    def test_tiles_of_any_size(self, monkeypatch, tile):
        problem = make("ragged")
        monkeypatch.setattr(tiles, "TILE_VALUES", tile)
        assert_sums(measure(problem), exact(problem))

    def test_a_distance_counts_from_the_last_visible_key(self):
        """Rows 0, 4, 8 and 15 of 16 visible ones lie 15, 11, 7 and 0 before the last: bins 4, 4, 3 and 0."""
        problem = make([(0, 16)], index=False, other=None)
        problem = problem._replace(topk_TK=torch.tensor([[15, 8, -1, 4, 16, 0]], dtype=torch.int32))
        assert measure(problem).distance_N.tolist() == [1, 0, 0, 1, 2] + [0] * 27

    def test_bins_of_distances_double(self):
        count = 70
        problem = Problem(
            torch.randn(1, 1, 2),
            torch.randn(count, 2),
            torch.arange(count, dtype=torch.int32)[None],
            torch.tensor([0]),
            torch.tensor([count]),
        )
        assert measure(problem).distance_N.tolist()[:8] == [1, 1, 2, 4, 8, 16, 32, 6]

    def test_no_keys_at_all(self):
        problem = make([(0, 5), (3, 9)], index=False, other=None)
        assert_sums(measure(problem._replace(kv_SE=torch.zeros(0, E).double())), sfa.empty_stats())


class TestSpecialValues:
    """NaN matters where it is seen and nowhere else."""

    def test_rows_that_no_query_sees_do_not_matter(self):
        problem = make([(0, 7), (9, 15), (9, 9), (16, 20)])
        want = exact(problem)
        unseen = [7, 8, 15, 20, 21, 22]
        for rows in (problem.kv_SE, problem.index[1]):
            rows[unseen] = torch.tensor([math.nan, math.inf, -math.inf, math.nan, math.inf, math.nan])[:, None].double()
        for x in (problem.q_THE, problem.index[0], problem.index[2]):
            x[2] = math.nan  # a query that sees nothing
        assert_sums(measure(problem), want)

    def test_rows_that_only_queries_without_a_choice_see_do_not_matter(self):
        problem = make([(0, 7), (9, 12), (12, 20)])
        want = exact(problem)
        problem.kv_SE[9:12] = math.nan
        problem.index[1][9:12] = math.nan
        assert_sums(measure(problem), want)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("where", ["key", "query"])
    def test_what_a_query_compares_makes_all_that_attention_decides_nan_for_it_alone(self, value, where):
        """Query 1 of three in one tile; the other two see no bad row."""
        problem = make([(0, 7), (0, 9), (0, 8)])
        clean = take(problem, [0, 2])
        if where == "key":
            problem.kv_SE[8, 0] = value
        else:
            problem.q_THE[1, 0] = value
        stats = measure(problem)
        for name in METRICS:
            finite = name in ("overlap", "ties")
            assert math.isfinite(stats.mean(name).mean) == (finite or (name == "kl_selected" and self._spared(problem)))
        assert_sums(measure(take(problem, [0, 2])), exact(clean))
        bad = measure(take(problem, [1]))
        assert [math.isnan(x) for x in bad.total_M.tolist()] == [math.isnan(x) for x in stats.total_M.tolist()]

    @staticmethod
    def _spared(problem):
        """The restricted divergence looks at selected rows alone; a query that is NaN spares none."""
        return bool(problem.q_THE[1].isfinite().all()) and 8 not in problem.topk_TK[1].tolist()

    def test_a_nan_row_gives_no_best_mass_even_where_nothing_is_selected(self):
        problem = make([(0, 7)], width=0)
        problem.kv_SE[3] = math.nan
        stats = measure(problem)
        assert all(math.isnan(stats.mean(name).mean) for name in ("mass", "best_mass", "recall", "kl", "entropy"))
        assert stats.mean("kl_selected").mean == 0.0

    @pytest.mark.parametrize("selected", [False, True])
    def test_a_score_that_is_nan_spoils_divergences_and_leaves_attention_alone(self, selected):
        problem = make([(0, 9)], other=None)
        problem = problem._replace(topk_TK=torch.tensor([[1, 4 if selected else 5, 6]], dtype=torch.int32))
        want = exact(problem)
        problem.index[1][4, 1] = math.nan
        stats = measure(problem)
        for i, name in enumerate(METRICS):
            spoiled = name == "kl" or (name == "kl_selected" and selected)
            if spoiled:
                assert math.isnan(stats.total_M[i])
            elif name != "ties":
                assert float(stats.total_M[i]) == pytest.approx(want["total_M"][i], abs=1e-12)

    def test_scores_that_are_nan_are_never_at_the_cut(self):
        """Of scores 2, NaN, NaN, 2, 1 the cut of k = 1 is a tie; that of 2 is not, nor that of 3, nor that of 4."""
        score_S = torch.tensor([2.0, math.nan, math.nan, 2.0, 1.0])
        problem = make([(0, 5)], index=False)._replace(kv_SE=torch.randn(5, E).double())
        problem = problem._replace(index=(torch.ones(1, 1, 1), score_S[:, None], torch.ones(1, 1)))
        assert [measure(problem, k=k).mean("ties").mean for k in (1, 2, 3, 4)] == [1.0, 0.0, 0.0, 0.0]


class TestMerging:
    """Sums add up in any order and grouping."""

    @pytest.fixture
    def problems(self):
        return [
            make(name, width=width, index=name != "odd") for name, width in zip(RANGES, (8, 2, 5, 9, 3, 4), strict=True)
        ]

    def test_any_grouping_and_order_gives_equal_numbers(self, problems):
        parts = [measure(problem) for problem in problems]
        whole = sfa.merge_stats(parts)
        for order in itertools.islice(itertools.permutations(range(len(parts))), 0, 720, 24):
            a, b, c, d, e, f = (parts[i] for i in order)
            assert_sums(a.merge(b).merge(c).merge(d).merge(e).merge(f), whole)
            assert_sums(a.merge(b.merge(c.merge(d))).merge(f.merge(e)), whole)
        wanted = [exact(problem) for problem in problems]
        assert_sums(
            whole, {name: sum(torch.tensor(x[name], dtype=torch.float64) for x in wanted) for name in wanted[0]}
        )

    def test_two_parts_are_merged_exactly_alike_in_both_orders(self, problems):
        a, b = (measure(problem) for problem in problems[:2])
        assert all(torch.equal(x, y) for x, y in zip(tree_leaves(a.merge(b)), tree_leaves(b.merge(a)), strict=True))

    def test_queries_may_be_cut_anywhere(self):
        problem = make("ragged")
        want, count = exact(problem), len(problem.q_THE)
        for size in (1, 2, 3, 5, 8, count):
            pieces = torch.randperm(count).split(size)
            assert_sums(sfa.merge_stats([measure(take(problem, rows)) for rows in pieces]), want)

    def test_sampled_parts_add_their_variances(self):
        problem = make("whole")
        parts = [measure(problem, rows=n) for n in (2, 3, 4)]
        whole = sfa.merge_stats(parts)
        assert torch.equal(whole.variance_M, parts[0].variance_M + parts[1].variance_M + parts[2].variance_M)
        assert (whole.measured, whole.queries) == (9, 15)

    def test_nothing_is_neutral(self):
        stats, none = measure(make("ragged")), sfa.empty_stats()
        for merged in (stats.merge(none), none.merge(stats), sfa.merge_stats([stats])):
            assert all(torch.equal(x, y) for x, y in zip(tree_leaves(merged), tree_leaves(stats), strict=True))
        assert_sums(sfa.merge_stats([]), exact(make("none")))
        assert sfa.empty_stats().means() == {}

    def test_statistics_are_a_pytree(self):
        stats = measure(make("ragged"))
        assert_sums(tree_map(lambda x: 2 * x, stats), stats.merge(stats))

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
    @pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
    def test_the_ranks_of_a_context_parallel_layer_give_the_numbers_of_one(self, layout, ranks):
        """Each rank has some of the queries and of the keys, gathers the keys, and the sums are added over ranks."""
        lengths, seq_lens = [9, 3, 11], [9, 0, 11]
        split = split_tokens(lengths, ranks, layout=layout, seq_lens=seq_lens)
        batch = sfa.Batch.from_lengths(lengths, seq_lens)
        problem = make(list(zip(batch.start_T.tolist(), batch.end_T.tolist(), strict=True)))
        local = [split.local_batch(batch, rank) for rank in range(ranks)]
        ranges = (torch.cat([getattr(x, name) for x in local]) for name in ("start_T", "end_T"))
        parts = []

        def body(comm, q, kv, topk, start, end, index, other):
            kv, index_k = (split.gather(comm["cp"].all_gather(x)) for x in (kv, index[1]))
            stats = measure(Problem(q, kv, topk, start, end, (index[0], index_k, index[2]), other))
            parts.append(stats)
            return reduce_stats(stats, comm["cp"].all_reduce)

        def deal(x):
            return split.scatter(x, fill=0 if x.is_floating_point() else -1)

        q, kv, topk, _, _, index, other = problem
        run = shard_map(body, simulated_mesh(MeshShape(cp=ranks)), in_specs=(P("cp"),) * 7, out_specs=P())
        total = run(deal(q), deal(kv), deal(topk), *ranges, tuple(map(deal, index)), deal(other))
        assert_sums(total, exact(problem))
        assert len(parts) == ranks
        assert_sums(sfa.merge_stats(parts), exact(problem))


class TestSampling:
    """A sample estimates the exact sums without bias, and its standard error is that of its estimates."""

    @pytest.fixture
    def problem(self):
        """Nine queries have a choice of 3 keys, eight of them of a longer request, and two queries have none."""
        return make([(0, 3), (0, 9), *((12, 16 + i) for i in range(8)), (5, 6)])

    @staticmethod
    def _measure_some(problem, rows):
        """Measure given rows as if they had been drawn."""
        some = take(problem, torch.tensor(rows))
        drawn = Drawn(torch.tensor(rows), 9, 2)
        index = Scored(*some.index)
        return measure_rows(drawn, *some[:5], scale=SCALE, k=3, scored=index, other_nM=some.other_TM)

    @pytest.mark.parametrize("count", [2, 7, 8])
    def test_over_all_samples_estimates_and_variances_have_no_bias(self, problem, count):
        """Of all subsets of the nine queries: their mean estimate is the exact sum, the mean of the variances that
        they state is the variance of the estimates. Both hold exactly for sampling without replacement."""
        subsets = list(itertools.combinations(range(1, 10), count))
        found = [self._measure_some(problem, list(rows)) for rows in subsets]
        want = exact(problem)
        total_NM, variance_NM = (torch.stack([getattr(x, name) for x in found]) for name in ("total_M", "variance_M"))
        torch.testing.assert_close(
            total_NM.mean(0), torch.tensor(want["total_M"], dtype=torch.float64), rtol=1e-11, atol=1e-11
        )
        spread_M = (total_NM - total_NM.mean(0)).square().mean(0)
        torch.testing.assert_close(variance_NM.mean(0), spread_M, rtol=1e-10, atol=1e-10)
        distance_N = torch.stack([x.distance_N for x in found]).mean(0)
        torch.testing.assert_close(
            distance_N, torch.tensor(want["distance_N"], dtype=torch.float64), rtol=1e-11, atol=1e-11
        )

    @pytest.mark.parametrize("count", [2, 4, 7])
    def test_a_sample_gives_the_sums_of_the_rows_drawn_scaled_and_their_finite_population_error(self, problem, count):
        drawn = draw_rows(problem.start_T, problem.end_T, k=3, rows=count, generator=torch.Generator().manual_seed(4))
        stats = measure(problem, rows=count, generator=torch.Generator().manual_seed(4))
        metrics = plain_queries(problem, scale=SCALE, k=3)
        assert (drawn.queries, drawn.without_choice, len(drawn.row_n)) == (9, 2, count)
        assert (stats.queries, stats.measured, stats.without_choice) == (9, count, 2)
        for i, name in enumerate(METRICS):
            values = [metrics[t][name] for t in drawn.row_n.tolist()]
            center = sum(values) / count
            square = sum((x - center) ** 2 for x in values) / (count - 1)
            mean = stats.mean(name)
            assert mean.mean == pytest.approx(center, abs=1e-12)
            assert mean.standard_error == pytest.approx(math.sqrt((1 - count / 9) * square / count), abs=1e-12)
            assert stats.population_M[i] == 9

    def test_rows_are_drawn_alike_ascending_and_only_where_there_is_a_choice(self, problem):
        count, draws, generator = 4, 1200, torch.Generator().manual_seed(2)
        times = torch.zeros(len(problem.q_THE))
        for _ in range(draws):
            rows = draw_rows(problem.start_T, problem.end_T, k=3, rows=count, generator=generator).row_n
            assert bool((rows.diff() > 0).all())
            times[rows] += 1
        share = count / 9
        assert times[[0, 10]].tolist() == [0, 0]
        assert (times[1:10] - draws * share).abs().max() < 5 * math.sqrt(draws * share * (1 - share))

    def test_samples_lie_within_three_standard_errors(self):
        """Of 300 queries 60 are measured, 120 times over: the estimates have no bias, and 3 errors cover nearly all."""
        keys = 40
        many = [(0, int(n)) for n in torch.randint(5, keys, (300,))]
        problem = make(many)._replace(kv_SE=torch.randn(keys, E).double())
        problem = problem._replace(index=(problem.index[0], torch.randn(keys, WIDTH).double(), problem.index[2]))
        whole, generator = measure(problem), torch.Generator().manual_seed(0)
        samples = [measure(problem, rows=60, generator=generator) for _ in range(120)]
        for name in METRICS:
            truth = whole.mean(name)
            assert truth.standard_error == 0.0
            found = torch.tensor([tuple(x.mean(name)) for x in samples], dtype=torch.float64)
            off = (found[:, 0] - truth.mean).abs()
            if name == "ties":  # too rare, here, for a normal law
                continue
            assert (off <= 3 * found[:, 1]).double().mean() >= 0.97
            assert abs(found[:, 0].mean() - truth.mean) < 4 * found[:, 1].mean() / math.sqrt(120)
            assert float(found[:, 0].std()) == pytest.approx(float(found[:, 1].square().mean().sqrt()), rel=0.25)

    @pytest.mark.parametrize("rows", [None, 9, 10, 10**6])
    def test_as_many_rows_as_there_are_make_it_exact(self, problem, rows):
        generator = torch.Generator().manual_seed(3)
        before = generator.get_state()
        stats = measure(problem, rows=rows, generator=generator)
        assert_sums(stats, exact(problem))
        assert torch.equal(generator.get_state(), before)
        assert all(stats.mean(name).standard_error == 0.0 for name in METRICS)

    def test_the_error_of_one_row_is_not_known(self, problem):
        stats = measure(problem, rows=1)
        assert all(math.isnan(stats.mean(name).standard_error) for name in METRICS)
        assert all(math.isfinite(stats.mean(name).mean) for name in METRICS)
        assert (stats.queries, stats.measured) == (9, 1)
        alone = measure(make([(0, 9)]), rows=1)
        assert alone.mean("mass").standard_error == 0.0

    def test_a_generator_decides_and_no_global_state_is_touched(self, problem):
        before = torch.get_rng_state()

        def total(seed=None):
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            return measure(problem, rows=4, generator=generator).total_M

        assert torch.equal(total(), total())
        assert torch.equal(total(), total(0))
        assert torch.equal(total(5), total(5))
        assert len({tuple(total(seed).tolist()) for seed in range(10)}) > 5
        assert torch.equal(torch.get_rng_state(), before)
        generator = torch.Generator().manual_seed(5)
        first, second = (measure(problem, rows=4, generator=generator).total_M for _ in range(2))
        assert torch.equal(first, total(5))
        assert not torch.equal(first, second)


SELECTORS = {
    "indexer": sfa.block_topk(1),
    "window": sfa.window,
    "random_keys": sfa.random_keys(torch.Generator().manual_seed(1)),
    "block_topk": sfa.block_topk(3),
    "best_keys": sfa.best_keys(SCALE),
    "own": lambda *, start_T, k, **_: (start_T[:, None] + torch.arange(k)).to(torch.int32),
}


class TestSelectors:
    """Selections measured are the selectors', and none beats the best k."""

    @staticmethod
    def _select(problem, name, k):
        named = dict(zip(Scored._fields, problem.index, strict=True))
        named |= {name: getattr(problem, name) for name in ("q_THE", "kv_SE", "start_T", "end_T")}
        return problem._replace(topk_TK=SELECTORS[name](**named, k=k, row_S=None))

    @pytest.mark.parametrize("name", SELECTORS)
    @pytest.mark.parametrize("k", [1, 4, 9])
    def test_every_selectors_statistics_equal_the_loop(self, name, k):
        problem = self._select(make("ragged"), name, k)
        stats = measure(problem, k=k)
        assert_sums(stats, exact(problem, k))
        mass, best = stats.mean("mass").mean, stats.mean("best_mass").mean
        if name == "best_keys":
            assert (mass, stats.mean("recall").mean) == (pytest.approx(best, rel=1e-14), 1.0)
        else:
            assert mass < best

    def test_no_selection_of_k_keys_keeps_more_than_the_best(self):
        """All selections of k of 6 keys, query by query; the fullest keeps exactly the best mass."""
        ranges = [(0, 6), (0, 5), (1, 6)]
        problem = make(ranges, index=False, other=None)._replace(kv_SE=torch.randn(6, E).double())
        for k, t in itertools.product((1, 2, 3, 4), range(3)):
            subsets = torch.tensor(list(itertools.combinations(range(*ranges[t]), k)), dtype=torch.int32)
            one = take(problem, [t])
            masses = [measure(one._replace(topk_TK=rows[None]), k=k).mean("mass").mean for rows in subsets]
            assert max(masses) == pytest.approx(measure(one, k=k).mean("best_mass").mean, rel=1e-14)


class _Memory(TorchDispatchMode):
    """Records the values of the largest tensor made, and the most bytes that new tensors held at once."""

    def __init__(self):
        super().__init__()
        self.largest = self.live = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):  # what was there before is not new
            if isinstance(x, torch.Tensor):
                self._known.add(x.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                storage = x.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // x.element_size())
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key, size):
        self._known.discard(key)
        self.live -= size


def _long(tokens, keys, *, heads=4, index_heads=4, k=64):
    """Build a causal problem of the given size in float32; the queries stand at the end of the keys."""
    shapes = (tokens, heads, 8), (keys, 8), (tokens, index_heads, 8), (keys, 8), (tokens, index_heads)
    q_THE, kv_SE, q_TJI, k_SI, w_TJ = (torch.randn(shape) for shape in shapes)
    end_T = torch.arange(keys - tokens, keys) + 1
    start_T = torch.zeros_like(end_T)
    topk_TK = sfa.window(start_T=start_T, end_T=end_T, k=k)
    return Problem(q_THE, kv_SE, topk_TK, start_T, end_T, (q_TJI, k_SI, w_TJ), topk_TK)


class TestMemory:
    """Nothing of T·S values is ever held."""

    @pytest.mark.parametrize(("tokens", "heads", "index_heads"), [(2048, 4, 4), (512, 1, 16)])
    def test_the_largest_tensor_is_a_tile(self, tokens, heads, index_heads):
        problem = _long(tokens, 2048, heads=heads, index_heads=index_heads)
        with _Memory() as memory:
            measure(problem, k=64)
        assert memory.largest <= tiles.TILE_VALUES
        assert memory.peak < 2048 * 2048 * 4 * 4 / 2  # half of one float32 tensor [T, S, 4]

    def test_more_queries_need_no_more_memory_than_their_own_values(self, monkeypatch):
        monkeypatch.setattr(tiles, "TILE_VALUES", 2**17)
        peaks = []
        for tokens in (512, 1024):
            problem = _long(tokens, 1024)
            with _Memory() as memory:
                measure(problem, k=64)
            peaks.append(memory.peak)
        own = 512 * (64 * 8 * 4 + 4 * 8 * 2 * 4)  # selections and what they become, queries
        assert peaks[1] - peaks[0] < own < 512 * 1024 * 4

    def test_a_sample_measures_no_other_rows(self):
        problem = _long(1024, 1024)
        with _Memory() as memory:
            measure(problem, k=64, rows=8)
        assert memory.largest <= 1024 * 64
        assert memory.peak < 1024 * 1024

    def test_the_recorder_counts_what_is_held_at_once(self):
        given = torch.zeros(100)
        with _Memory() as memory:
            x = given + 1
            y = x.view(10, 10).expand(5, 10, 10)
            del x, y
            z = given.double()
            given.add_(1)
        assert (memory.largest, memory.peak, memory.live) == (100, 800, 800)
        del z
        assert memory.live == 0


class TestEffects:
    """Nothing but the result comes out."""

    def test_no_gradient_and_no_change_of_what_was_given(self):
        problem = make("ragged")
        for x in tree_leaves(problem):
            if x.is_floating_point():
                x.requires_grad_()
        before = [(x.detach().clone(), x._version) for x in tree_leaves(problem)]
        stats = measure(problem, rows=4)
        assert not any(x.requires_grad for x in tree_leaves(stats))
        for x, (value, version) in zip(tree_leaves(problem), before, strict=True):
            assert torch.equal(x.detach(), value)
            assert x._version == version
            assert x.grad is None

    def test_no_rows_are_measured_as_none(self):
        drawn = Drawn(torch.arange(0), 0, 3)
        problem = make("none", index=False)
        stats = measure_rows(drawn, *problem[:5], scale=SCALE, k=3)
        assert_sums(stats, vars(sfa.empty_stats()) | {"without_choice": 3})

    def test_reduce_is_called_once_with_one_vector(self):
        stats, seen = measure(make("ragged")), []

        def twice(x):
            seen.append((x.dtype, x.ndim))
            return 2 * x

        assert_sums(reduce_stats(stats, twice), stats.merge(stats))
        assert seen == [(torch.float64, 1)]


class TestRefusals:
    """What does not fit is refused in one line that names the argument."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"k": 0}, "k must be >= 1; got 0"),
            ({"k": -3}, "k must be >= 1; got -3"),
            ({"rows": 0}, "rows must be >= 1 or None; got 0"),
            ({"topk_TK": torch.zeros(4, 2, dtype=torch.int32)}, r"topk must have 5 rows; got \(4, 2\)"),
            (
                {"topk_TK": torch.zeros(5, dtype=torch.int32)},
                r"topk must be int32 \[T, K\]; got \(torch.int32, \(5,\)\)",
            ),
            ({"topk_TK": torch.zeros(5, 2)}, r"topk must be int32 \[T, K\]; got \(torch.float32, \(5, 2\)\)"),
            ({"other_TM": torch.zeros(1, 2, dtype=torch.int32)}, r"other must have 5 rows; got \(1, 2\)"),
            ({"other_TM": torch.zeros(5, 2)}, r"other must be int32 \[T, M\]; got \(torch.float32, \(5, 2\)\)"),
            ({"start_T": torch.zeros(4).long()}, r"start_T must be 5 integers; got \(torch.int64, \(4,\)\)"),
            ({"end_T": torch.zeros(5)}, r"end_T must be 5 integers; got \(torch.float32, \(5,\)\)"),
            ({"kv_SE": torch.zeros(S, E + 1)}, r"q and kv must be \[T, H, E\] and \[S, E\]; got .*"),
            ({"kv_SE": torch.zeros(S, E)}, r"q, kv must have one dtype; got .*"),
            ({"q_THE": torch.zeros(5, E)}, r"q and kv must be \[T, H, E\] and \[S, E\]; got .*"),
        ],
    )
    def test_arguments(self, unchecked, change, message):
        problem = make("context")._asdict()
        named = {name: problem[name] for name in ("q_THE", "kv_SE", "topk_TK", "start_T", "end_T", "other_TM")}
        with pytest.raises(ValueError, match=rf"^selection_stats: {message}$"):
            sfa.selection_stats(**{"scale": SCALE, "k": 3} | named | change)

    @pytest.mark.parametrize("part", [0, 1, 2])
    @pytest.mark.parametrize("rows", [2, 300])
    def test_what_an_indexer_compares(self, unchecked, part, rows):
        problem = make("context")
        index = [x[:2] if rows == 2 else x.repeat(rows, *[1] * (x.ndim - 1)) for x in problem.index]
        index = [index[i] if i == part else x for i, x in enumerate(problem.index)]
        name = ("q_TJI must have 5 rows", f"k_SI must have {S} rows", "w_TJ must have 5 rows")[part]
        with pytest.raises(ValueError, match=rf"^selection_stats: {name}; got \([\d, ]+\)$"):
            measure(problem._replace(index=tuple(index)))

    @pytest.mark.parametrize("name", ["", "Mass", "masses"])
    def test_another_metric(self, name):
        with pytest.raises(ValueError, match=rf"^SelectionStats.mean: metric must be one of mass, .*; got '{name}'$"):
            sfa.empty_stats().mean(name)
