"""Differences of tensors equal their definition; a layer's statistics equal a plain loop over its vectors."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file as read_state
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
from sfa_functional import SFAConfig
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text
from sfa_functional.selection_stats import Scored
from tests.sfa_functional.selection_oracle import Problem, assert_sums, plain_sums
from weights import load_layer, open_checkpoint

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0.0, 0.0, None)),
        ([1.0, 2.5], [1.0, 2.0], (0.5, 0.25, (1,))),
        ([-1.0, 2.0], [3.0, -8.0], (10.0, 1.25, (1,))),
        ([0.0, -0.0], [-0.0, 0.0], (0.0, 0.0, None)),
        ([1.0], [0.0], (1.0, INF, (0,))),
        ([NAN, INF, -INF], [NAN, INF, -INF], (0.0, 0.0, None)),
        ([NAN, 5.0], [NAN, 4.0], (1.0, 0.25, (1,))),
        ([INF, 5.0], [INF, 4.0], (1.0, 0.25, (1,))),
        ([0.0, NAN], [9.0, 1.0], (INF, INF, (1,))),
        ([0.0, 1.0], [9.0, NAN], (INF, INF, (1,))),
        ([0.0, INF], [9.0, -INF], (INF, INF, (1,))),
        ([0.0, 1.0], [9.0, INF], (INF, INF, (1,))),
        ([NAN], [INF], (INF, INF, (0,))),
        ([], [], (0.0, 0.0, None)),
    ],
)
def test_difference_finds_the_largest(a, b, want):
    assert sfa.difference(torch.tensor(a), torch.tensor(b)) == sfa.Difference(*want)


def test_difference_names_the_place_in_every_dim_and_takes_integers():
    a = torch.zeros(2, 3, 4, dtype=torch.int32)
    b = a.clone()
    b[1, 2, 0] = 7
    assert sfa.difference(a, b) == (7.0, 1.0, (1, 2, 0))
    assert sfa.difference(torch.tensor(2.0), torch.tensor(1.0)) == (1.0, 1.0, ())


def test_difference_refuses_different_shapes():
    with pytest.raises(ValueError, match=r"^difference: shapes must be equal; got \(\(2,\), \(1, 2\)\)$"):
        sfa.difference(torch.zeros(2), torch.zeros(1, 2))


CONFIG = replace(sfa.TINY, num_attention_heads=3, index_n_heads=5)
K = 3
BATCHES = {
    "ragged": sfa.Batch.from_lengths([9, 3, 1, 8]),
    "padded": sfa.Batch.from_lengths([7, 4, 6], [7, 0, 6]),
    "single": sfa.Batch.from_lengths([14]),
    "short": sfa.Batch.from_lengths([3, 2, 1]),
    "empty": sfa.Batch.from_lengths([0, 0]),
}


def _first_and_last(*, start_T, end_T, k, **_):
    """Choose the first k - 1 keys and the last, in falling order, with rows between them that nobody has."""
    rows_TK = torch.cat([end_T[:, None] - 1, start_T[:, None] + torch.arange(k - 1).flip(0), start_T[:, None] - 1], 1)
    return rows_TK.to(torch.int32)


SELECTORS = {
    "indexer": None,
    "window": sfa.window,
    "random_keys": sfa.random_keys(torch.Generator().manual_seed(1)),
    "block_topk": sfa.block_topk(2),
    "best_keys": sfa.best_keys(CONFIG.softmax_scale),
    "own": _first_and_last,
}
every = pytest.mark.parametrize("name", SELECTORS)


def make_layer(batch="ragged", *, dtype=torch.float64, indexer=True):
    """Return a layer's weights, hidden states and batch."""
    batch = BATCHES[batch]
    params = sfa.init_params(CONFIG, dtype=dtype, generator=torch.Generator().manual_seed(2))
    params = params if indexer else replace(params, indexer=None)
    draw = torch.Generator().manual_seed(3)
    x_TD = torch.randn(batch.position_T.shape[0], CONFIG.hidden_size, generator=draw, dtype=torch.float64)
    return params, x_TD.to(dtype), batch


def evaluate(layer, *, k=K, **named):
    return sfa.evaluate_layer(*layer, config=CONFIG, k=k, **named)


def chosen_by_the_layer(layer, select, k=K):
    return sfa.sfa_layer(*layer, config=replace(CONFIG, index_topk=k), select=select).selection_TK


def problem_of(layer, selection_TK, other_TM=None):
    """Project with the layer's public parts and number the positions' key rows, one by one; padding sees nothing."""
    params, x_TD, batch = layer
    x_TD = torch.where((batch.request_T >= 0)[:, None], x_TD, 0)
    rope = sfa.rope_cos_sin(batch.position_T.clamp(min=0), CONFIG)
    q_THE, q_latent_TQ = sfa.latent_queries(params, x_TD, *rope, config=CONFIG)
    kv_SE = sfa.latent_keys(params, x_TD, *rope, config=CONFIG)
    index = None
    if params.indexer is not None:
        index = (
            sfa.index_queries(params.indexer, q_latent_TQ, *rope, config=CONFIG),
            sfa.index_keys(params.indexer, x_TD, *rope, config=CONFIG),
            sfa.index_weights(params.indexer, x_TD, config=CONFIG),
        )

    def rows(positions):
        starts = batch.start_T.tolist()
        listed = [[s + p if p >= 0 else -1 for p in some] for s, some in zip(starts, positions.tolist(), strict=True)]
        return torch.tensor(listed, dtype=torch.int32).view(positions.shape)

    other = None if other_TM is None else rows(other_TM)
    return Problem(q_THE, kv_SE, rows(selection_TK), batch.start_T, batch.end_T, index, other)


def loop(layer, selection_TK, other_TM=None, k=K):
    return plain_sums(problem_of(layer, selection_TK, other_TM), scale=CONFIG.softmax_scale, k=k)


class TestEvaluateLayer:
    """From weights and hidden states to the numbers of a plain loop."""

    @every
    @pytest.mark.parametrize("batch", BATCHES)
    def test_every_selectors_statistics_equal_the_loop(self, name, batch):
        layer, select = make_layer(batch), SELECTORS[name]
        other_TM = chosen_by_the_layer(layer, sfa.window, 4)
        stats = evaluate(layer, select=select, other=other_TM)
        assert_sums(stats, loop(layer, chosen_by_the_layer(layer, select), other_TM))

    @pytest.mark.parametrize("k", [1, 5, 8, 9, 50])
    def test_any_k(self, k):
        layer = make_layer()
        stats = evaluate(layer, k=k)
        assert_sums(stats, loop(layer, chosen_by_the_layer(layer, None, k), k=k))
        if k >= 9:
            assert (float(stats.queries), float(stats.without_choice), stats.means()) == (0.0, 21.0, {})

    @every
    def test_a_selection_that_the_layer_returned_gives_what_its_selector_gives(self, name):
        layer, select = make_layer("padded"), SELECTORS[name]
        given = evaluate(layer, selection=chosen_by_the_layer(layer, select))
        assert_sums(given, evaluate(layer, select=select), 0.0)

    @every
    def test_another_selection_may_be_a_selector_or_its_positions(self, name):
        layer, select = make_layer("padded"), SELECTORS[name] or sfa.block_topk(1)
        by_name, positions = (evaluate(layer, other=x) for x in (select, chosen_by_the_layer(layer, select)))
        assert_sums(by_name, positions, 0.0)
        same = evaluate(layer, select=select, other=select).mean("overlap").mean
        assert same == 1.0
        if name in ("window", "random_keys"):
            assert by_name.mean("overlap").mean < 1.0

    def test_a_layer_without_an_indexer_is_measured_on_what_it_is_given(self):
        layer = make_layer(indexer=False)
        selection_TK = chosen_by_the_layer(make_layer(), None)
        assert_sums(evaluate(layer, selection=selection_TK), loop(layer, selection_TK))
        assert_sums(evaluate(layer, select=sfa.window), loop(layer, chosen_by_the_layer(layer, sfa.window)))
        assert set(evaluate(layer, select=sfa.window).means()) == {"mass", "best_mass", "recall", "entropy"}

    def test_a_selection_of_another_layer_is_judged_by_this_layers_scores(self):
        layer = make_layer()
        selection_TK = chosen_by_the_layer((sfa.init_params(CONFIG, dtype=torch.float64), *layer[1:]), None)
        assert not torch.equal(selection_TK, chosen_by_the_layer(layer, None))
        assert_sums(evaluate(layer, selection=selection_TK), loop(layer, selection_TK))

    def test_positions_that_a_query_does_not_see_are_unused(self):
        layer = make_layer()
        selection_TK = torch.tensor([[0, 99, -5, 2**31 - 1]] * 21, dtype=torch.int32)
        wanted_TK = torch.tensor([[0, -1]] * 21, dtype=torch.int32)
        assert_sums(evaluate(layer, selection=selection_TK, other=wanted_TK), loop(layer, wanted_TK, wanted_TK))
        assert evaluate(layer, selection=wanted_TK, other=selection_TK).mean("overlap").mean == 1.0

    def test_rope_may_be_given(self):
        params, x_TD, batch = layer = make_layer()
        rope = sfa.rope_cos_sin(batch.position_T, CONFIG)
        assert_sums(evaluate(layer, rope=rope), evaluate(layer), 0.0)
        flat = torch.ones_like(rope[0]), torch.zeros_like(rope[1])
        still = replace(batch, position_T=torch.zeros_like(batch.position_T))
        assert_sums(evaluate(layer, rope=flat), evaluate((params, x_TD, still)), 1e-12)
        assert evaluate(layer, rope=flat).mean("mass") != evaluate(layer).mean("mass")

    def test_what_stands_in_padding_does_not_matter(self):
        params, x_TD, batch = layer = make_layer("padded")
        want = evaluate(layer)
        x_TD = torch.where((batch.request_T >= 0)[:, None], x_TD, math.nan)
        assert x_TD.isnan().any()
        assert_sums(evaluate((params, x_TD, batch)), want, 0.0)

    def test_requests_of_a_batch_add_up_as_batches_do(self):
        """A NaN in one request leaves the others' numbers alone."""
        params, x_TD, _ = layer = make_layer()
        parts = [
            evaluate((params, x, sfa.Batch.from_lengths([len(x)])), other=sfa.window) for x in x_TD.split([9, 3, 1, 8])
        ]
        assert_sums(sfa.merge_stats(parts), evaluate(layer, other=sfa.window))
        x_TD = x_TD.clone()
        x_TD[8] = math.nan  # the last token of the first request: one query sees it
        spoiled = evaluate((params, x_TD, layer[2]), other=sfa.window)
        finite = {name for name, mean in spoiled.means().items() if math.isfinite(mean)}
        assert finite == {"overlap", "ties", "kl_selected"}  # it has no score either, so that nothing is selected

    @pytest.mark.parametrize("rows", [1, 4, 11, 10**6])
    def test_a_sample_measures_the_rows_that_its_generator_draws(self, rows):
        layer = make_layer()
        select = {"select": sfa.block_topk(2), "other": sfa.random_keys(torch.Generator().manual_seed(1))}
        stats = evaluate(layer, rows=rows, generator=torch.Generator().manual_seed(7), **select)
        problem = problem_of(layer, *(chosen_by_the_layer(layer, x) for x in select.values()))
        want = sfa.selection_stats(
            *problem[:5],
            scale=CONFIG.softmax_scale,
            k=K,
            scored=Scored(*problem.index),
            other_TM=problem.other_TM,
            rows=rows,
            generator=torch.Generator().manual_seed(7),
        )
        assert float(stats.measured) == min(rows, 11)
        for name, mean in want.means().items():
            assert stats.mean(name) == pytest.approx((mean, want.mean(name).standard_error), abs=1e-12, nan_ok=True)
        assert torch.equal(stats.distance_N, want.distance_N)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_layers_are_measured_near_the_loop_over_their_own_vectors(self, dtype):
        layer = make_layer("padded", dtype=dtype)
        selection_TK = chosen_by_the_layer(layer, None)
        want = loop(layer, selection_TK)
        assert_sums(evaluate(layer), want, 1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_sums(evaluate(layer), want, 1e-5)

    def test_weights_states_and_random_numbers_are_left_alone(self):
        layer = tree_map(lambda x: x.requires_grad_() if x.is_floating_point() else x, make_layer())
        leaves = tree_leaves(layer)
        before = [(x.detach().clone(), x._version) for x in leaves]
        state = torch.get_rng_state()
        stats = evaluate(layer, rows=4, select=SELECTORS["best_keys"], other=sfa.window)
        assert not any(x.requires_grad for x in tree_leaves(stats))
        assert torch.equal(torch.get_rng_state(), state)
        for x, (value, version) in zip(leaves, before, strict=True):
            assert torch.equal(x.detach(), value)
            assert (x._version, x.grad) == (version, None)

    def test_best_keys_are_never_beaten_and_others_are(self):
        """The first layer of the checkpoint that comes along, on text that it never saw; untrained: a fresh indexer."""
        checkpoint = open_checkpoint(TINY_CHECKPOINT)
        config = SFAConfig.from_hf(checkpoint.config)
        params = load_layer(checkpoint, 0, config=config, dtype=torch.float32)
        state = read_state(TINY_CHECKPOINT / "model.safetensors")
        ids = torch.tensor(list(held_out_text().encode()[:800]))
        norm = state["model.layers.0.input_layernorm.weight"].float()
        x_TD = sfa.rms_norm(state["model.embed_tokens.weight"].float()[ids], norm, checkpoint.config["rms_norm_eps"])
        untrained = replace(params, indexer=sfa.init_params(config).indexer)
        ways = {
            "best_keys": (params, sfa.best_keys(config.softmax_scale)),
            "indexer": (params, None),
            "window": (params, sfa.window),
            "random_keys": (params, sfa.random_keys(torch.Generator().manual_seed(1))),
            "untrained": (untrained, None),
        }
        batch = sfa.Batch.from_lengths([400, 400])
        for k in (16, 64):
            stats = {
                name: sfa.evaluate_layer(weights, x_TD, batch, config=config, k=k, select=select)
                for name, (weights, select) in ways.items()
            }
            mass = {name: x.mean("mass").mean for name, x in stats.items()}
            best = {x.mean("best_mass").mean for x in stats.values()}
            assert len(best) == 1
            assert mass["best_keys"] == pytest.approx(best.pop(), rel=1e-6)
            assert max(mass["window"], mass["random_keys"], mass["untrained"]) < mass["indexer"] < mass["best_keys"]


class TestRefusals:
    """What does not go together is refused in one line, before anything is computed."""

    @pytest.mark.parametrize(
        ("named", "message"),
        [
            ({"k": 0}, "k must be >= 1; got 0"),
            ({"rows": 0}, "rows must be >= 1 or None; got 0"),
            ({"rows": -2}, "rows must be >= 1 or None; got -2"),
            ({"selection": torch.zeros(20, 2).int()}, r"selection must have 21 rows; got \(20, 2\)"),
            ({"selection": torch.zeros(21, 2)}, r"selection must be int32; got torch.float32"),
            ({"selection": torch.zeros(21).int()}, r"selection must be \[T, K\]; got \(21,\)"),
            (
                {"selection": torch.zeros(21, 2).int(), "select": sfa.window},
                "selection= and select= exclude each other; got both",
            ),
            (
                {"other": torch.zeros(1, 2).int()},
                r"other must be int32 \[21, M\] or a selector; got \(torch.int32, \(1, 2\)\)",
            ),
            (
                {"other": torch.zeros(21, 2)},
                r"other must be int32 \[21, M\] or a selector; got \(torch.float32, \(21, 2\)\)",
            ),
            (
                {"select": lambda k, **_: torch.zeros(1, k).int()},
                r"a selector must return int32 \[11, K\]; got \(torch.int32, \(1, 3\)\)",
            ),
            (
                {"other": lambda k, start_T, **_: torch.zeros(len(start_T), k).long()},
                r"a selector must return int32 \[11, K\]; got \(torch.int64, \(11, 3\)\)",
            ),
        ],
    )
    def test_arguments(self, unchecked, named, message):
        with pytest.raises(ValueError, match=f"^evaluate_layer: {message}$"):
            evaluate(make_layer(), **named)

    def test_a_batch_with_pages(self):
        params, x_TD, _ = make_layer("single")
        table = sfa.allocate_blocks([14], 4)
        for batch in (
            sfa.Batch.from_lengths([14], block_table=table, block_size=4),
            sfa.Batch.from_lengths([14], [20]),
        ):
            with pytest.raises(ValueError, match=r"^evaluate_layer: the batch must have no block table; got one$"):
                evaluate((params, x_TD, batch))

    def test_states_of_another_length(self, unchecked):
        params, x_TD, batch = make_layer()
        with pytest.raises(ValueError, match=r"^evaluate_layer: position_T must have 20 rows; got \(21,\)$"):
            evaluate((params, x_TD[:20], batch))

    def test_a_layer_without_an_indexer_and_nothing_else(self):
        layer = make_layer(indexer=False)
        rule = r"a layer without an indexer needs selection= or select=; got neither"
        with pytest.raises(ValueError, match=f"^evaluate_layer: {rule}$"):
            evaluate(layer)
        with pytest.raises(ValueError, match=r"^block_topk: the layer must have an indexer; got none$"):
            evaluate(layer, select=sfa.block_topk(2))
