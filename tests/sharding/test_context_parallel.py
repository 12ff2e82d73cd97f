"""The layer on many ranks equals the layer on one: outputs, selections, caches and gradients, however tokens are dealt.

``SFA_ALL=1`` runs every combination of the main factors below; else each pair of values occurs at least once.
"""

import contextvars
import functools
import itertools
import math
import os
import random
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
from sfa_functional import reference
from sfa_functional.params import named_fields
from sharding import (
    LARGE_FIELDS,
    CacheSplit,
    MeshShape,
    P,
    Rules,
    TokenSplit,
    context_parallel,
    context_parallel_layer,
    gather_rows_start,
    heads_of_rank,
    param_specs,
    shard_flat,
    shard_map,
    simulated_mesh,
    split_tokens,
    tensor_parallel_layer,
)
from tests.sharding.layers import (
    BATCHES,
    BLOCK,
    CONFIG,
    LAYOUTS,
    RANKS,
    TOLERANCE,
    Requests,
    Result,
    apart,
    assert_near,
    drawn,
    index_scores_of,
    loss,
    make_split,
    misplaced,
    on_ranks,
    one_rank,
    one_rank_of,
    pairwise,
    problem,
    product,
    scattered_table,
    with_gradients,
)

WEIGHTS = ("local", "gathered", "exchanged")
FACTORS = {
    "batch": tuple(name for name in BATCHES if name != "none"),
    "ranks": RANKS,
    "layout": LAYOUTS,
    "weights": WEIGHTS,
    "dtype": (torch.float64, torch.float32),
    "implementation": ("blockwise", "reference"),
    "spare": (0, 3),
    "pool": ("joint", "split"),
    "way": ("backward", "func.grad"),
}
DRAWN = ("dtype", "spare", "pool", "way")
"""Factors that the full product draws for each case."""


def _allowed(case):
    """The ranks must divide the heads where weights are exchanged; func.grad is slow, so it gets few ranks."""
    ranks, way = case.get("ranks", 1), case.get("way")
    return (case.get("weights") != "exchanged" or 16 % ranks == 0) and (way != "func.grad" or ranks <= 4)


def _cases():
    if os.environ.get("SFA_ALL") != "1":
        return pairwise(FACTORS, _allowed)
    main = product({name: values for name, values in FACTORS.items() if name not in DRAWN}, _allowed)
    others, dice = product({name: FACTORS[name] for name in DRAWN}), random.Random(0)
    return [case | dice.choice([other for other in others if _allowed(case | other)]) for case in main]


def _name(case):
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


@pytest.mark.parametrize("case", _cases(), ids=_name)
def test_many_ranks_equal_one(case):
    given = problem(case["batch"], case["dtype"], pool=case["pool"])
    split = make_split(given.requests, case["ranks"], case["layout"], spare=case["spare"])
    run = on_ranks(given.batch, split, weights=case["weights"], implementation=case["implementation"])
    got = with_gradients(run, *given[2:], split=split, way=case["way"])
    want = one_rank_of(case["batch"], case["dtype"], case["pool"])
    selections = got.output.selection_TK, want.output.selection_TK
    if not torch.equal(*selections):
        assert case["dtype"] == torch.float32
        global_TK = (sfa.global_selection(selection_TK, given.batch) for selection_TK in selections)
        assert misplaced(*global_TK, index_scores_of(given), slack=1e-5) == []
        want = one_rank(given, selection=selections[0])
    assert_near(got, want, TOLERANCE[case["dtype"]])
    padding = split.index_NC.flatten() < 0
    y, selection = (x[padding] for x in got.rows[:2])
    assert y.isfinite().all()
    assert (selection == -1).all()
    assert not any(got.gradients[name].any() for name in got.gradients if "indexer" in name and given.cache is None)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_tokens_on_many_ranks_give_no_rows_and_zero_gradients(weights):
    given, split = problem("none"), make_split(BATCHES["none"], 4, "zigzag")
    got = with_gradients(on_ranks(given.batch, split, weights=weights), *given[2:], split=split)
    assert (got.output.y_TD.shape, got.output.selection_TK.shape) == ((0, 64), (0, 5))
    assert_near(got, one_rank_of("none", torch.float64), 0)


def test_the_sample_meets_every_pair_that_may_go_together_and_no_other():
    for factors in (FACTORS, {"weights": WEIGHTS, "ranks": RANKS}, {"a": (1, 2), "b": (3,)}):
        sample = pairwise(factors, _allowed)
        assert all(case.keys() == factors.keys() and _allowed(case) for case in sample)
        for one, two in itertools.combinations(factors, 2):
            met = {(case[one], case[two]) for case in sample}
            assert met == {(a, b) for a in factors[one] for b in factors[two] if _allowed({one: a, two: b})}
        assert len(sample) <= 1.5 * max(len(a) * len(b) for a, b in itertools.combinations(factors.values(), 2))


def test_selections_are_told_apart_by_more_than_a_near_tie():
    score_TS = torch.tensor([[4.0, 3.0, 3.0 - 1e-6, 1.0]])
    near, far, short = [0, 2], [0, 3], [0, -1]
    rows = [torch.tensor([row], dtype=torch.int32) for row in ([1, 0], near, far, short)]
    assert [misplaced(rows[0], row, score_TS, slack=1e-5) for row in rows] == [[], [], [0], [0]]
    assert misplaced(rows[0], rows[1], score_TS, slack=1e-8) == [0]


@pytest.mark.parametrize("weights", ["local", "gathered"])
def test_without_a_split_every_rank_computes_all_tokens_and_sends_no_keys(weights):
    given, record = problem("mixed"), []

    def body(comm, params, x_TD, cache):
        named = {"config": CONFIG, "split": None, "cache": cache, "weights": weights}
        return context_parallel_layer(params, x_TD, given.batch, comm["cp"], **named)

    specs = param_specs(CONFIG, Rules(tokens="cp"), weights=weights)
    layer = shard_map(body, simulated_mesh(MeshShape(cp=3), record=record), in_specs=(specs, P(), P()), out_specs=P())

    def run(params, x_TD, cache):
        return layer(shard_flat(params, 3) if weights == "gathered" else params, x_TD, cache)

    got, want = with_gradients(run, *given[2:]), one_rank_of("mixed", torch.float64)
    assert_near(got, want, 1e-12)
    assert torch.equal(got.output.selection_TK, want.output.selection_TK)
    assert len([one for one in record if one.phase == "forward"]) == (0 if weights == "local" else 9)


@pytest.mark.parametrize("way", ["backward", "func.grad"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradients_taken_on_each_rank_add_up_to_those_of_one(weights, way):
    """Each rank differentiates its own rows' loss; its x gets all ranks' gradients, shared weights a part of theirs."""
    given, ranks = problem("padded"), 4
    split, shape = make_split(given.requests, ranks, "zigzag"), MeshShape(cp=ranks)
    weight_MD = split.scatter(drawn(given.x_TD.shape, torch.float64, 7))

    def body(comm, params, x_tD, weight_tD):
        def local_loss(params, x_tD):
            named = {"config": CONFIG, "split": split, "weights": weights}
            return (context_parallel_layer(params, x_tD, given.batch, comm["cp"], **named).y_TD * weight_tD).sum()

        if way == "func.grad":
            found = torch.func.grad(local_loss, argnums=(0, 1))(params, x_tD)
        else:
            leaves = tree_map(lambda x: x.detach().requires_grad_(), (params, x_tD))
            local_loss(*leaves).backward()
            found = tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, leaves)
        return {name: x[None] for name, x in named_fields(found[0])}, found[1]

    specs = param_specs(CONFIG, Rules(tokens="cp"), weights=weights)
    sharded = shard_map(body, simulated_mesh(shape), in_specs=(specs, P("cp"), P("cp")), out_specs=P("cp"))
    params = shard_flat(given.params, ranks) if weights == "gathered" else given.params
    by_rank, x_MD = sharded(params, split.scatter(given.x_TD), weight_MD)
    want = one_rank_of("padded", torch.float64).gradients
    assert apart(split.gather(x_MD), want["x"]) <= 1e-12
    for name, parts in by_rank.items():
        if weights == "gathered" and name in LARGE_FIELDS:
            got = parts.flatten()[: want[name].numel()].view(want[name].shape)
        elif weights == "exchanged" and name == "o_proj":
            got = torch.cat(list(parts), dim=1)
        else:
            got = parts.sum(0)
        assert apart(got, want[name]) <= 1e-12, name


def test_a_callable_replaces_sparse_attention_on_each_rank():
    given, shapes = problem("mixed"), []
    split = make_split(given.requests, 4, "zigzag")

    def kernel(q, kv, topk, *, scale, value_dim):
        shapes.append((q.shape[0], kv.shape[0], topk.shape[0]))
        return sfa.sparse_attention(q, kv, topk, scale=scale, value_dim=value_dim, implementation="reference")

    got = with_gradients(on_ranks(given.batch, split, implementation=kernel), *given[2:], split=split)
    assert_near(got, one_rank_of("mixed", torch.float64), 1e-12)
    assert shapes == [(split.rows, given.cache.kv.shape[0] * BLOCK, split.rows)] * 4


def test_a_named_implementation_scores_and_attends_on_each_rank(monkeypatch):
    given, called = problem("mixed"), []

    def count(name):
        function = getattr(reference, name)

        def call(*arguments, **named):
            called.append(name)
            return function(*arguments, **named)

        monkeypatch.setattr(reference, name, call)

    count("lightning_indexer")
    count("sparse_attention")
    on_ranks(given.batch, make_split(given.requests, 4, "zigzag"), implementation="reference")(*given[2:])
    assert sorted(called) == ["lightning_indexer"] * 4 + ["sparse_attention"] * 4


def test_autocast_changes_nothing():
    given = problem("mixed", torch.float32)
    split = make_split(given.requests, 4, "zigzag")
    for weights in WEIGHTS:
        run = on_ranks(given.batch, split, weights=weights)
        want = run(*given[2:])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = run(*given[2:])
        assert all(map(torch.equal, tree_leaves(got), tree_leaves(want)))


# --- exactly summable inputs ---


def _best(score, seen, k):
    """Choose the k best keys, ties to the lower row."""
    chosen = sorted(sorted(seen, key=lambda s: (-score[s], s))[:k])
    return chosen + [-1] * (k - len(chosen))


def _selected_over_ranks(split, batch, q_TJI, k_TI, w_TJ, k, order):
    """Score on ranks that gather each other's keys; ``order`` puts them in their places."""

    def body(comm, q_tJI, k_tI, w_tJ):
        local = split.local_batch(batch, comm["cp"].rank)
        k_SI = order(gather_rows_start(comm["cp"], k_tI).wait()[0])
        return sfa.lightning_indexer(q_tJI, k_SI, w_tJ, local.start_T, local.end_T, k=k)

    ranks = shard_map(body, simulated_mesh(MeshShape(cp=split.num_ranks)), in_specs=P("cp"), out_specs=P("cp"))
    return split.gather(ranks(*(split.scatter(x) for x in (q_TJI, k_TI, w_TJ))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 4])
def test_ties_go_to_the_lower_global_row_on_any_number_of_ranks(layout, k):
    requests = Requests((19, 1, 8, 0, 4), (19, 1, 8, 0, 0))
    batch, tokens = sfa.Batch.from_lengths(*requests[:2]), 32
    q_TJI, k_TI = torch.randint(-1, 2, (tokens, 2, 3)).float(), torch.randint(-1, 2, (tokens, 3)).float()
    w_TJ = torch.randint(-1, 3, (tokens, 2)).float()
    want, tied = [], 0
    for t, (first, last) in enumerate(zip(batch.start_T.tolist(), batch.end_T.tolist(), strict=True)):
        score = {
            s: sum(float(w) * max(0.0, float(q @ k_TI[s])) for w, q in zip(w_TJ[t], q_TJI[t], strict=True))
            for s in range(first, last)
        }
        want.append(_best(score, score, k))
        tied += len(score) > k and sorted(score.values())[-k] == sorted(score.values())[-k - 1]
    assert tied > 10
    one = sfa.lightning_indexer(q_TJI, k_TI, w_TJ, batch.start_T, batch.end_T, k=k)
    assert one.tolist() == want
    for ranks in (2, 7, 16):
        split = make_split(requests, ranks, layout)
        assert _selected_over_ranks(split, batch, q_TJI, k_TI, w_TJ, k, split.gather).tolist() == want
    split = make_split(requests, 4, layout)
    left = _selected_over_ranks(split, batch, q_TJI, k_TI, w_TJ, k, lambda k_MI: k_MI)
    assert (left.tolist() == want) == (layout == "contiguous")


def test_the_best_keys_are_chosen_among_those_of_all_ranks():
    """Keys 0, 1 on rank 0 and 2, 3 on rank 1 score 5, 4, 1, 0: not one key of each rank."""
    split = TokenSplit.from_owner([0, 0, 1, 1], 2)
    batch = replace(sfa.Batch.from_lengths([4]), end_T=torch.full((4,), 4))
    q_TJI, k_TI, w_TJ = torch.ones(4, 1, 1), torch.tensor([[5.0], [4.0], [1.0], [0.0]]), torch.ones(4, 1)
    assert _selected_over_ranks(split, batch, q_TJI, k_TI, w_TJ, 2, split.gather).tolist() == [[0, 1]] * 4


# --- done wrong on purpose: what the comparisons above would see ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_that_stay_behind_are_seen(layout):
    given = problem("single")
    split = make_split(given.requests, 4, layout)
    here = sfa.rope_cos_sin(split.index_NC.new_tensor(range(split.rows)), CONFIG)

    def body(comm, params, x_tD):
        return context_parallel_layer(params, x_tD, given.batch, comm["cp"], config=CONFIG, split=split, rope=here).y_TD

    ranks = shard_map(body, simulated_mesh(MeshShape(cp=4)), in_specs=(P(), P("cp")), out_specs=P("cp"))
    y_TD = split.gather(ranks(given.params, split.scatter(given.x_TD)))
    assert apart(y_TD, one_rank_of("single", torch.float64).output.y_TD) > 0.1


@pytest.mark.parametrize("name", ["single", "ragged", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_left_in_the_order_of_ranks_are_seen_unless_the_layout_is_contiguous(name, layout):
    given = problem(name)
    split = make_split(given.requests, 4, layout)
    unordered = replace(split, inverse_T=(split.index_NC.flatten() >= 0).nonzero().flatten())

    def body(comm, params, x_tD, cache):
        named = {"config": CONFIG, "split": unordered, "cache": cache}
        return context_parallel_layer(params, x_tD, given.batch, comm["cp"], **named).y_TD

    ranks = shard_map(body, simulated_mesh(MeshShape(cp=4)), in_specs=(P(), P("cp"), P()), out_specs=P("cp"))
    y_TD = split.gather(ranks(given.params, split.scatter(given.x_TD), given.cache))
    error = apart(y_TD, one_rank_of(name, torch.float64).output.y_TD)
    assert error <= 1e-12 if layout == "contiguous" else error > 0.1


def test_padding_that_reads_or_writes_the_last_row_is_seen():
    """``x[index]`` and ``y[index] = row`` take -1 for the last row: a sum counts it again, a result overwrites it."""
    given, want = problem("ragged"), one_rank_of("ragged", torch.float64).output
    split = split_tokens(given.requests.query_lens, 4, layout="striped", rows=8)
    run, last = on_ranks(given.batch, split), split.num_tokens - 1
    rows = run(*given[2:]).y_TD
    assert abs(float(rows.square().sum() / want.y_TD.square().sum()) - 1) <= 1e-12
    y_TD = torch.empty_like(want.y_TD)
    for t, row in zip(split.index_NC.flatten().tolist(), rows, strict=True):
        y_TD[t] = row
    assert apart(y_TD[:last], want.y_TD[:last]) <= 1e-12
    assert apart(y_TD[last:], want.y_TD[last:]) > 0.1
    again = replace(split, index_NC=torch.where(split.index_NC >= 0, split.index_NC, last))
    out = on_ranks(given.batch, again)(*given[2:])
    assert apart(again.gather(out.y_TD), want.y_TD) <= 1e-12
    assert float(out.y_TD.square().sum() / want.y_TD.square().sum()) > 1.1
    assert (out.selection_TK[split.index_NC.flatten() < 0] >= 0).any()


def _held(given):
    """Say which rows of the pool hold a token of the batch."""
    held = torch.zeros(given.cache.kv.shape[0] * BLOCK, dtype=torch.bool)
    for b, length in enumerate(given.batch.seq_len_B.tolist()):
        position_M = torch.arange(length)
        request_M = torch.full_like(position_M, b)
        held[sfa.token_slots(given.batch.block_table_BU, request_M, position_M, block_size=BLOCK)] = True
    return held.view(-1, BLOCK, 1)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["padded", "padded_pages"])
def test_what_padding_holds_reaches_no_output_no_cache_and_no_gradient(name, weights):
    """Padding rows of ranks, requests that are padding, and rows of the pool that hold no token of the batch."""
    given = problem(name)
    held = None if given.cache is None else _held(given)
    assert held is None or not held.all()

    def fill_unheld(cache, fill):
        return None if cache is None else tree_map(lambda x: torch.where(held, x, fill), cache)

    for ranks, layout, value in ((4, "striped", math.nan), (2, "own", math.inf)):
        split = make_split(given.requests, ranks, layout, spare=1)
        padding = split.scatter(given.batch.request_T, fill=-1) < 0
        assert padding.sum() > ranks
        layer = on_ranks(given.batch, split, weights=weights, spread=lambda x: x)

        def run(*arguments, layer=layer):
            out = layer(*arguments)
            return out._replace(cache=fill_unheld(out.cache, 0.0))

        results = []
        for fill in (value, 0.0):
            x = torch.where(padding[:, None], fill, split.scatter(given.x_TD))
            cache = fill_unheld(given.cache, fill)
            results.append(with_gradients(run, given.params, x, cache, split=split))
        assert_near(*results, 0)
        assert all(map(torch.equal, results[0].rows[:2], results[1].rows[:2]))
        assert not results[0].gradients["x"][padding].any()
        assert results[0].gradients["x"][~padding].any()


# --- what is sent ---


def _brought(record, phase):
    """Say of every rank what it brought to which collective, and how many bytes it sent."""
    by_rank = {one.rank: [] for one in record}
    for one in record:
        assert one.axes == ("cp",)
        if one.phase == phase:
            by_rank[one.rank].append((one.collective, one.shape, one.bytes_sent))
    return by_rank


@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.float32), (7, torch.float64), (4, torch.bfloat16)])
@pytest.mark.parametrize("name", ["ragged", "mixed"])
@pytest.mark.parametrize(("layer", "chosen"), [(0, False), (0, True), (1, True)])
def test_one_gather_of_the_keys_and_in_backward_one_reduce_scatter(dtype, name, layer, chosen, ranks):
    """C·(E + I)·(N - 1) values each way; C·E·(N - 1) where nobody scores and no cache wants the index keys."""
    given, record = problem(name, dtype, layer=layer), []
    split = make_split(given.requests, ranks, "zigzag")
    selection_TK = given.batch.position_T[:, None].to(torch.int32) if chosen else None
    run = on_ranks(given.batch, split, layer=layer, record=record, selection_TK=selection_TK)
    with_gradients(run, *given[2:], split=split)
    width = 24 + 8 + (16 if layer == 0 and (not chosen or given.cache is not None) else 0)
    sent = split.rows * width * dtype.itemsize * (ranks - 1)
    forward = [("all_gather", (split.rows, width), sent)]
    backward = [("reduce_scatter", (ranks * split.rows, width), sent)]
    assert _brought(record, "forward") == dict.fromkeys(range(ranks), forward)
    assert _brought(record, "backward") == dict.fromkeys(range(ranks), backward)


@pytest.mark.parametrize("ranks", [2, 7, 16])
def test_gathered_weights_send_each_shard_to_all_others_and_its_gradient_back(ranks):
    given, record = problem("mixed", torch.float32), []
    split = make_split(given.requests, ranks, "striped")
    with_gradients(on_ranks(given.batch, split, weights="gathered", record=record), *given[2:], split=split)
    sizes = {"q_b_proj": 16 * 24 * 32, "kv_b_proj": 16 * 36 * 24, "o_proj": 64 * 16 * 20}
    shards = [-(-size // ranks) for size in sizes.values()]
    keys = split.rows * 48
    forward = [("all_gather", (split.rows, 48), 4 * keys * (ranks - 1))]
    forward += [("all_gather", (shard,), 4 * shard * (ranks - 1)) for shard in shards]
    backward = [("reduce_scatter", (ranks * split.rows, 48), 4 * keys * (ranks - 1))]
    backward += [("reduce_scatter", (ranks * shard,), 4 * shard * (ranks - 1)) for shard in shards]
    for phase, want in (("forward", forward), ("backward", backward)):
        for brought in _brought(record, phase).values():
            assert sorted(brought) == sorted(want)
            others = sum(sent for _, _, sent in brought) - 4 * keys * (ranks - 1)
            assert 0 <= others - 4 * sum(sizes.values()) * (ranks - 1) / ranks < 3 * 4 * ranks  # (N - 1)/N of them


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_exchanged_weights_send_values_to_the_heads_and_sums_back(ranks):
    """C·H·V·(N - 1)/N + C·D·(N - 1) values, each way."""
    given, record = problem("mixed", torch.float32), []
    split = make_split(given.requests, ranks, "striped")
    with_gradients(on_ranks(given.batch, split, weights="exchanged", record=record), *given[2:], split=split)
    rows, others = split.rows, ranks - 1
    values = ("all_to_all", (ranks * rows, 16 // ranks * 20), 4 * rows * 16 * 20 * others // ranks)
    one_way = [("all_gather", (rows, 48), 4 * rows * 48 * others), values]
    one_way.append(("reduce_scatter", (ranks * rows, 64), 4 * rows * 64 * others))
    back = [("reduce_scatter", (ranks * rows, 48), 4 * rows * 48 * others), values]
    back.append(("all_gather", (rows, 64), 4 * rows * 64 * others))
    for phase, want in (("forward", one_way), ("backward", back)):
        assert all(sorted(brought) == sorted(want) for brought in _brought(record, phase).values())


RANK = contextvars.ContextVar("rank")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_writes_the_row_of_each_new_token_once(monkeypatch, layout):
    """All T rows, not those of its own C; no row twice, none for padding."""
    written = []

    def seated(comm):
        RANK.set(comm.rank)
        return comm

    def write(cache, kv_TE, k_TI, slot_T, *, index_slot_T=None, **named):
        index_slot_T = slot_T if index_slot_T is None else index_slot_T
        written.append((RANK.get(), sorted(s for s in slot_T.tolist() if s >= 0), index_slot_T.tolist()))
        return sfa.write_cache(cache, kv_TE, k_TI, slot_T, index_slot_T=index_slot_T, **named)

    monkeypatch.setattr(context_parallel, "write_cache", write)
    for name, tokens in (("mixed", 17), ("padded_pages", 7), ("decode", 3)):
        written.clear()
        given = problem(name)
        split = make_split(given.requests, 4, layout, spare=1)
        run = on_ranks(given.batch, split, donate=name == "mixed", wrap=seated)
        run(given.params, given.x_TD, tree_map(torch.clone, given.cache))
        slots = sorted(s for s in given.batch.slot_T.tolist() if s >= 0)
        assert len(slots) == tokens
        assert sorted(written) == [(rank, slots, given.batch.slot_T.tolist()) for rank in range(4)]


# --- in which order ---


class Watched:
    """`Collectives` that log what they are asked for, and whose handles have nothing to show before ``wait()``."""

    def __init__(self, comm, log):
        self._comm, self._log = comm, log
        self.rank, self.size = comm.rank, comm.size

    def all_gather_start(self, x):
        self._log.append(f"start {list(x.shape)}")
        return _Late(self._comm, self._log, x)

    def all_gather(self, x):
        self._log.append("all_gather")
        return self._comm.all_gather(x)

    def all_to_all(self, x):
        self._log.append("all_to_all")
        return self._comm.all_to_all(x)

    def reduce_scatter(self, x):
        self._log.append("reduce_scatter")
        return self._comm.reduce_scatter(x)

    def all_reduce(self, x):
        self._log.append("all_reduce")
        return self._comm.all_reduce(x)

    def broadcast(self, x, source):
        self._log.append("broadcast")
        return self._comm.broadcast(x, source)

    def broadcast_start(self, x, source):
        self._log.append("broadcast")
        return self._comm.broadcast_start(x, source)


class _Late:
    """Reads what it was given when it is waited for, and refuses what has changed by then."""

    def __init__(self, comm, log, x):
        self._comm, self._log, self._x, self._copy = comm, log, x, x.detach().clone()

    def wait(self):
        self._log.append(f"wait {list(self._x.shape)}")
        assert torch.equal(self._x.detach(), self._copy)
        return self._comm.all_gather(self._x)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_keys_travel_while_queries_are_computed_and_weights_are_fetched_after_them(monkeypatch, weights):
    given, ranks = problem("mixed"), 4
    split = make_split(given.requests, ranks, "zigzag")
    logs = [[] for _ in range(ranks)]

    def logged(name):
        function = getattr(context_parallel, name)

        def call(*arguments, **named):
            logs[RANK.get()].append(name)
            return function(*arguments, **named)

        monkeypatch.setattr(context_parallel, name, call)

    for name in ("latent_keys", "index_keys", "latent_queries", "index_queries", "index_weights", "write_cache"):
        logged(name)
    for name in ("choose_keys", "attend_positions", "latent_output"):
        logged(name)

    def wrap(comm):
        RANK.set(comm.rank)
        return Watched(comm, logs[comm.rank])

    run = on_ranks(
        given.batch,
        split,
        weights=weights,
        wrap=wrap,
        while_gathering=lambda: logs[RANK.get()].append("while_gathering"),
    )
    got = with_gradients(run, *given[2:], split=split)
    assert_near(got, one_rank_of("mixed", torch.float64), 1e-12)
    assert torch.equal(got.output.selection_TK, one_rank_of("mixed", torch.float64).output.selection_TK)
    keys, q_b, kv_b, o = (f"[{split.rows}, 48]", *(f"[{size // ranks}]" for size in (12288, 13824, 20480)))
    gathered, exchanged = weights == "gathered", weights == "exchanged"
    want = [
        "latent_keys",
        "index_keys",
        f"start {keys}",
        "while_gathering",
        *((f"start {q_b}", f"start {kv_b}", f"start {o}", f"wait {q_b}", f"wait {kv_b}") if gathered else ()),
        "latent_queries",
        "index_queries",
        "index_weights",
        f"wait {keys}",
        "write_cache",
        "choose_keys",
        "attend_positions",
        *((f"wait {o}",) if gathered else ()),
        *(("all_to_all", "reduce_scatter") if exchanged else ("latent_output",)),
    ]
    assert logs == [want] * ranks


# --- what else a layer takes ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["padded", "mixed"])
def test_a_given_selection_is_attended_to_and_comes_back(name, layout):
    given = problem(name)
    selection_TK = torch.randint(-2, 24, (given.x_TD.shape[0], 3), generator=torch.Generator().manual_seed(4))
    selection_TK = selection_TK.sort(dim=1).values.to(torch.int32)
    selection_TK[:, 1] = torch.where(selection_TK[:, 1] == selection_TK[:, 0], -1, selection_TK[:, 1])
    selection_TK[:, 2] = torch.where((selection_TK[:, 2, None] == selection_TK[:, :2]).any(1), -1, selection_TK[:, 2])
    split = make_split(given.requests, 4, layout, spare=1)
    got = with_gradients(on_ranks(given.batch, split, selection_TK=selection_TK), *given[2:], split=split)
    want = one_rank(given, selection=selection_TK)
    assert_near(got, want, 1e-12)
    assert torch.equal(got.output.selection_TK, selection_TK)
    assert apart(got.output.y_TD, one_rank_of(name, torch.float64).output.y_TD) > 0.1


SELECTORS = {
    "window": lambda: sfa.window,
    "block_topk": lambda: sfa.block_topk(2),
    "best_keys": lambda: sfa.best_keys(CONFIG.softmax_scale),
    "random_keys": lambda: sfa.random_keys(torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", ["mixed", "padded"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_selector_chooses_the_same_keys_on_any_number_of_ranks(selector, name):
    given = problem(name)
    want = sfa.sfa_layer(*given[2:4], given.batch, config=CONFIG, cache=given.cache, select=SELECTORS[selector]())
    assert not torch.equal(want.selection_TK, one_rank_of(name, torch.float64).output.selection_TK)
    for ranks, layout in ((2, "zigzag"), (4, "own"), (7, "striped")):
        split = make_split(given.requests, ranks, layout)
        rows = on_ranks(given.batch, split, select=SELECTORS[selector]())(*given[2:])
        assert apart(split.gather(rows.y_TD), want.y_TD) <= 1e-12
        assert torch.equal(split.gather(rows.selection_TK), want.selection_TK)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["ragged", "mixed"])
def test_a_layer_without_an_indexer_uses_the_selection_of_an_earlier_one(name, weights):
    given, selection_TK = problem(name, layer=1), one_rank_of(name, torch.float64).output.selection_TK
    assert given.params.indexer is None
    want = one_rank(given, selection=selection_TK)
    split = make_split(given.requests, 4, "balanced")
    run = on_ranks(given.batch, split, layer=1, weights=weights, selection_TK=selection_TK)
    assert_near(with_gradients(run, *given[2:], split=split), want, 1e-12)


@pytest.mark.parametrize("selector", [name for name in SELECTORS if name != "block_topk"])
def test_a_layer_without_an_indexer_takes_a_selector(selector):
    for name in ("ragged", "mixed"):
        given = problem(name, layer=1)
        split, named = make_split(given.requests, 4, "zigzag"), {"select": SELECTORS[selector]()}
        got = with_gradients(on_ranks(given.batch, split, layer=1, **named), *given[2:], split=split)
        want = one_rank(given, **named)
        assert_near(got, want, 1e-12)
        assert torch.equal(got.output.selection_TK, want.output.selection_TK)


@pytest.mark.parametrize("name", ["ragged", "mixed"])
def test_rope_may_be_given_for_the_tokens_of_each_rank(name):
    given = problem(name)
    rope = sfa.rope_cos_sin(3 * given.batch.position_T.clamp(min=0) + 100, CONFIG)
    want = one_rank(given, rope=rope)
    assert apart(want.output.y_TD, one_rank_of(name, torch.float64).output.y_TD) > 1e-2
    for ranks, layout in ((3, "zigzag"), (4, "own")):
        split = make_split(given.requests, ranks, layout)
        assert_near(with_gradients(on_ranks(given.batch, split, rope=rope), *given[2:], split=split), want, 1e-12)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("layout", ["zigzag", "own"])
def test_hidden_states_stay_dealt_out_from_layer_to_layer(layout, together):
    """Three layers, the last one without an indexer, in one body or in one each; nothing is sent but their keys."""
    given, record = problem("ragged"), []
    layers = [
        sfa.init_params(CONFIG, layer=i // 2, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i in range(3)
    ]
    split = make_split(given.requests, 4, layout)
    mesh = simulated_mesh(MeshShape(cp=4), record=record)

    def chain(layer, layers, x):
        selection = None
        for params in layers:
            out = layer(params, torch.tanh(x), selection if params.indexer is None else None)
            x, selection = x + out.y_TD, out.selection_TK
        return x, selection

    def one(layers, x_TD):
        named = {"config": CONFIG}
        return chain(lambda p, x, s: sfa.sfa_layer(p, x, given.batch, selection=s, **named), layers, x_TD)

    def on_rank(comm, params, x, selection):
        named = {"config": CONFIG, "split": split, "selection": selection}
        return context_parallel_layer(params, x, given.batch, comm["cp"], **named)

    def chain_on_rank(comm, layers, x):
        return chain(functools.partial(on_rank, comm), layers, x)

    def many(layers, x_TD):
        if together:
            ranks = shard_map(chain_on_rank, mesh, in_specs=(P(), P("cp")), out_specs=P("cp"))
            x, selection = ranks(layers, split.scatter(x_TD))
        else:
            layer = shard_map(on_rank, mesh, in_specs=(P(), P("cp"), P("cp")), out_specs=P("cp"))
            x, selection = chain(layer, layers, split.scatter(x_TD))
        return split.gather(x), split.gather(selection)

    results = []
    for run in (one, many):
        leaves = tree_map(lambda x: x.detach().requires_grad_(), (layers, given.x_TD))
        x_TD, selection_TK = run(*leaves)
        loss(x_TD).backward()
        known = [x for x in tree_leaves(leaves) if x is not None]
        gradients = {str(i): torch.zeros_like(x) if x.grad is None else x.grad for i, x in enumerate(known)}
        out = sfa.LayerOutput(x_TD.detach(), selection_TK, None)
        results.append(Result(out, gradients, out))
    assert_near(*results[::-1], 1e-12)
    assert torch.equal(results[0].output.selection_TK, results[1].output.selection_TK)
    sent = [(x.rank, x.collective, x.shape[1]) for x in record if x.phase == "forward"]
    assert sorted(sent) == [(rank, "all_gather", width) for rank in range(4) for width in (32, 48, 48)]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("layout", ["zigzag", "own"])
def test_steps_on_a_donated_cache_of_each_rank_equal_one_rank(layout, inside):
    """A prefill and four steps, in one body with a cache made there, or with all ranks' caches side by side."""
    ranks, params = 3, problem("mixed").params
    steps = [[6, 3, 0, 4], [1, 1, 1, 2], [2, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]]
    table = scattered_table([11, 6, 5, 9], torch.Generator().manual_seed(6))
    batches = [sfa.Batch.from_lengths(steps[0], [*steps[0][:2], 2, 4], block_table=table, block_size=BLOCK)]
    for new in steps[1:]:
        batches.append(batches[-1].next(new))
    assert batches[-1].seq_len_B.tolist() == [11, 6, 5, 9]
    xs = [drawn((sum(new), CONFIG.hidden_size), torch.float64, 20 + i) for i, new in enumerate(steps)]
    splits = [
        make_split(Requests(tuple(new), tuple(batch.seq_len_B.tolist())), ranks, layout)
        for new, batch in zip(steps, batches, strict=True)
    ]
    pool = sfa.init_cache(CONFIG, num_blocks=int(table.max()) + 3, block_size=BLOCK, dtype=torch.float64)
    pool = tree_map(lambda x: drawn(x.shape, x.dtype, 2), pool)

    want, want_cache = [], tree_map(torch.clone, pool)
    for x, batch in zip(xs, batches, strict=True):
        out = sfa.sfa_layer(params, x, batch, config=CONFIG, cache=want_cache, donate=True)
        want_cache = out.cache
        want.append(out)

    def step(comm, params, x, cache, i):
        named = {"config": CONFIG, "split": splits[i], "cache": cache, "donate": True}
        out = context_parallel_layer(params, x, batches[i], comm["cp"], **named)
        assert [x.data_ptr() for x in tree_leaves(out.cache)] == [x.data_ptr() for x in tree_leaves(cache)]
        return out

    def all_steps(comm, params, xs):
        rows, cache = [], tree_map(torch.clone, pool)
        for i, x in enumerate(xs):
            out = step(comm, params, x, cache, i)
            cache = out.cache
            rows.append(out[:2])
        return rows, cache

    mesh, rows = simulated_mesh(MeshShape(cp=ranks)), []
    dealt = [split.scatter(x) for split, x in zip(splits, xs, strict=True)]
    if inside:
        many = shard_map(all_steps, mesh, in_specs=(P(), P("cp")), out_specs=(P("cp"), P()))
        rows, cache = many(params, dealt)
        caches = [cache]
    else:
        cache = tree_map(lambda x: torch.cat([x] * ranks), pool)
        for i, x in enumerate(dealt):
            out = shard_map(step, mesh, in_specs=(P(), P("cp"), P("cp"), P()), out_specs=P("cp"))(params, x, cache, i)
            cache = out.cache
            rows.append(out[:2])
        caches = [tree_map(lambda x, r=r: x.chunk(ranks)[r], cache) for r in range(ranks)]
    for split, (y, selection), out in zip(splits, rows, want, strict=True):
        assert apart(split.gather(y), out.y_TD) <= 1e-12
        assert torch.equal(split.gather(selection), out.selection_TK)
    for cache in caches:
        for got, wanted in zip(tree_leaves(cache), tree_leaves(want_cache), strict=True):
            assert apart(got, wanted) <= 1e-12


# --- heads dealt out ---


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*(("mixed", ranks) for ranks in (1, 2, 4, 8, 16)), ("ragged", 16), ("padded_pages", 4), ("none", 8)],
)
def test_heads_on_many_ranks_equal_one(name, ranks):
    given, record, shape = problem(name), [], MeshShape(tp=ranks)

    def body(comm, params, x_TD, cache):
        return tensor_parallel_layer(params, x_TD, given.batch, comm["tp"], config=CONFIG, cache=cache)

    specs = param_specs(CONFIG, Rules(heads="tp"), mesh_shape=shape)
    run = shard_map(body, simulated_mesh(shape, record=record), in_specs=(specs, P(), P()), out_specs=P())
    got, want = with_gradients(run, *given[2:]), one_rank_of(name, torch.float64)
    assert_near(got, want, 1e-12)
    assert torch.equal(got.output.selection_TK, want.output.selection_TK)
    tokens = given.x_TD.shape[0]
    assert {(x.collective, x.shape) for x in record} == {("all_reduce", (tokens, 64))}
    assert len(record) == 2 * ranks
    assert {x.bytes_sent for x in record} == {2 * -(-tokens * 64 // ranks) * 8 * (ranks - 1)}


def test_the_layer_of_heads_takes_what_sfa_layer_takes():
    given, selection_TK = problem("mixed"), problem("mixed").batch.position_T[:, None].to(torch.int32)
    named = {
        "selection": selection_TK,
        "implementation": "reference",
        "rope": sfa.rope_cos_sin(torch.arange(17), CONFIG),
    }

    def body(comm, params, x_TD, cache):
        return tensor_parallel_layer(params, x_TD, given.batch, comm["tp"], config=CONFIG, cache=cache, **named)

    specs = param_specs(CONFIG, Rules(heads="tp"))
    run = shard_map(body, simulated_mesh(MeshShape(tp=4)), in_specs=(specs, P(), P()), out_specs=P())
    assert_near(with_gradients(run, *given[2:]), one_rank(given, **named), 1e-12)


@pytest.mark.parametrize("axes", [{"cp": 2, "tp": 2}, {"tp": 2, "cp": 4}, {"cp": 3, "tp": 4}])
def test_tokens_and_heads_dealt_out_together_equal_one_rank(axes):
    shape, record = MeshShape(**axes), []
    for name, layout in (("ragged", "zigzag"), ("mixed", "own")):
        given = problem(name)
        record.clear()
        split = make_split(given.requests, axes["cp"], layout)

        def body(comm, params, x_tD, cache, split=split, batch=given.batch):
            config = heads_of_rank(CONFIG, comm["tp"].size)
            named = {"config": config, "split": split, "cache": cache}
            out = context_parallel_layer(params, x_tD, batch, comm["cp"], **named)
            return out._replace(y_TD=comm["tp"].all_reduce(out.y_TD))

        specs = param_specs(CONFIG, Rules(tokens="cp", heads="tp"), mesh_shape=shape)
        ranks = shard_map(
            body,
            simulated_mesh(shape, record=record),
            in_specs=(specs, P("cp"), P()),
            out_specs=sfa.LayerOutput(P("cp"), P("cp"), P()),
        )

        def run(params, x_TD, cache, ranks=ranks, split=split):
            return ranks(params, split.scatter(x_TD), cache)

        got, want = with_gradients(run, *given[2:], split=split), one_rank_of(name, torch.float64)
        assert_near(got, want, 1e-12)
        assert torch.equal(got.output.selection_TK, want.output.selection_TK)
        sent = {(x.axes, x.collective) for x in record if x.phase == "forward"}
        assert sent == {(("cp",), "all_gather"), (("tp",), "all_reduce")}


def test_a_share_of_the_heads_changes_their_number_alone():
    for config in (CONFIG, sfa.DEEPSEEK_V32):
        heads = config.num_attention_heads
        for ranks in (r for r in range(1, heads + 1) if heads % r == 0):
            got = heads_of_rank(config, ranks)
            assert got == replace(config, num_attention_heads=heads // ranks)
            assert got.softmax_scale == config.softmax_scale


@pytest.mark.parametrize("ranks", [3, 0, -1, 32, True, 2.0])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks, unchecked):
    with pytest.raises(ValueError) as error:
        heads_of_rank(CONFIG, ranks)
    assert str(error.value) == f"heads_of_rank: num_ranks must divide 16 heads; got {ranks!r}"


def test_the_layer_of_heads_refuses_ranks_before_anything_is_sent():
    given, record = problem("ragged"), []

    def body(comm, params, x_TD):
        return tensor_parallel_layer(params, x_TD, given.batch, comm["tp"], config=CONFIG).y_TD

    with pytest.raises(ValueError, match=r"^heads_of_rank: num_ranks must divide 16 heads; got 3"):
        shard_map(body, simulated_mesh(MeshShape(tp=3), record=record), in_specs=P(), out_specs=P())(*given[2:4])
    assert record == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_flat_shards_hold_the_rows_of_a_matrix_and_then_zeros(ranks):
    params = tree_map(lambda x: x.requires_grad_(), sfa.init_params(CONFIG))
    flat = shard_flat(params, ranks)
    for name, x in named_fields(params):
        if name not in LARGE_FIELDS:
            assert dict(named_fields(flat))[name] is x
            continue
        values = [v for row in x.tolist() for v in row]
        values += [0.0] * (-len(values) % ranks)
        assert getattr(flat, name).tolist() == values
        weight_M = drawn((len(values),), x.dtype, 3)
        (getattr(flat, name) * weight_M).sum().backward()
        assert torch.equal(x.grad, weight_M[: x.numel()].view(x.shape))


@pytest.mark.parametrize("ranks", [0, -2, 1.0, True])
def test_flat_shards_need_ranks(ranks, unchecked):
    with pytest.raises(ValueError) as error:
        shard_flat(problem("ragged").params, ranks)
    assert str(error.value) == f"shard_flat: num_ranks must be an integer >= 1; got {ranks!r}"


# --- the indexer's loss ---


def _indexer_loss(params, x_TD, batch, gather, *, k):
    """Return the loss of some queries against the keys that ``gather`` brings together."""
    rope = sfa.rope_cos_sin(batch.position_T.clamp(min=0), CONFIG)
    x_TD = torch.where(batch.request_T[:, None] >= 0, x_TD, 0)
    q_THE, q_latent_TQ = sfa.latent_queries(params, x_TD, *rope, config=CONFIG)
    kv_TE = sfa.latent_keys(params, x_TD, *rope, config=CONFIG)
    kv_SE, k_SI = gather(kv_TE, sfa.index_keys(params.indexer, x_TD.detach(), *rope, config=CONFIG))
    q_TJI = sfa.index_queries(params.indexer, q_latent_TQ.detach(), *rope, config=CONFIG)
    w_TJ, ranges = sfa.index_weights(params.indexer, x_TD.detach(), config=CONFIG), (batch.start_T, batch.end_T)
    topk_TK = None if k is None else sfa.lightning_indexer(q_TJI, k_SI, w_TJ, *ranges, k=k)
    return sfa.indexer_kl(q_TJI, k_SI, w_TJ, q_THE, kv_SE, *ranges, scale=CONFIG.softmax_scale, topk_TK=topk_TK)


@pytest.mark.parametrize(("name", "k"), [("ragged", None), ("padded", 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_indexers_loss_and_gradients_do_not_depend_on_ranks(name, layout, k):
    """Summed over ranks by all_reduce inside, or over the gathered rows outside."""
    given = problem(name)

    def value_and_gradients(run):
        leaves = tree_map(lambda x: x.detach().requires_grad_(), (given.params, given.x_TD))
        total = run(*leaves)
        total.backward()
        found = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in named_fields(leaves[0])}
        assert all("indexer" in n or not found[n].any() for n in found)
        return [total.detach(), *(found[n] for n in found if "indexer" in n)]

    want = value_and_gradients(
        lambda params, x_TD: _indexer_loss(params, x_TD, given.batch, lambda *keys: keys, k=k).sum()
    )
    assert all(x.any() for x in want)
    for ranks, inside in ((1, False), (2, True), (4, False)):
        split = make_split(given.requests, ranks, layout, spare=1)

        def body(comm, params, x_tD, split=split, inside=inside):
            local = split.local_batch(given.batch, comm["cp"].rank)

            def gather(*mine):
                return [split.gather(x) for x in gather_rows_start(comm["cp"], *mine).wait()]

            kl_t = _indexer_loss(params, x_tD, local, gather, k=k)
            return comm["cp"].all_reduce(kl_t.sum()) if inside else kl_t

        out = P() if inside else P("cp")
        run = shard_map(body, simulated_mesh(MeshShape(cp=ranks)), in_specs=(P(), P("cp")), out_specs=out)
        got = value_and_gradients(lambda params, x_TD, run=run, split=split: run(params, split.scatter(x_TD)).sum())
        assert all(apart(*pair) <= 1e-12 for pair in zip(got, want, strict=True))


# --- what is refused ---


class Alone:
    """One rank of many, for whom any collective is a mistake."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called")


def _cache(dtype=torch.float32, width=8, index_width=16, layer=0):
    config = replace(CONFIG, qk_rope_head_dim=width, index_head_dim=index_width)
    return sfa.init_cache(config, num_blocks=4, block_size=BLOCK, dtype=dtype, layer=layer)


def _misfits():
    """Yield ``(message, ranks, arguments)`` for six tokens, three on each of two ranks where nothing else is said."""
    params = sfa.init_params(CONFIG)
    paged = sfa.Batch.from_lengths([4, 2], block_table=torch.tensor([[2], [0]], dtype=torch.int32), block_size=BLOCK)
    shared = replace(params, indexer=None)
    selection = torch.zeros(3, 2, dtype=torch.int32)
    three = split_tokens([4, 2], 3, layout="striped")
    large = {"q_b_proj": [384, 32], "kv_b_proj": [576, 24], "o_proj": [64, 320]}
    chosen = "a layer without an indexer needs selection= or select="
    needs = "a batch with cached context or a block table needs a cache"
    flat = shard_flat(params, 2)
    yield "position_T must have 4 rows; got (3,)", 2, {"x_tD": torch.zeros(4, 64)}
    yield "split must be for 2 ranks; got 3", 2, {"split": three}
    yield "split must be for 3 ranks; got 2", 3, {}
    yield "split must be of the batch's 6 tokens; got 5", 2, {"split": split_tokens([5], 2, layout="striped")}
    yield "weights must be 'local', 'gathered' or 'exchanged'; got 'sharded'", 2, {"weights": "sharded"}
    named = {"weights": "exchanged", "split": three, "x_tD": torch.zeros(2, 64)}
    yield "weights='exchanged' needs ranks that divide 16 heads; got 3", 3, named
    named = {"weights": "exchanged", "split": None, "x_tD": torch.zeros(6, 64)}
    yield "weights='exchanged' needs tokens that are dealt out; got None", 2, named
    yield "o_proj must be [64, 160] on each rank; got [64, 320]", 2, {"weights": "exchanged"}
    for name, shape in large.items():
        size = shape[0] * shape[1]
        ready = {other: getattr(flat, other)[: x.numel() // 2] for other, x in _large(params) if other != name}
        misfit = {name: getattr(params, name)}
        message = f"{name} must be [{size // 2}] on each rank; got {shape}"
        yield message, 2, {"weights": "gathered", "params": replace(params, **ready, **misfit)}
        misfit = {name: getattr(flat, name)[: size // 2 - 1]}
        message = f"{name} must be [{size // 2}] on each rank; got [{size // 2 - 1}]"
        yield message, 2, {"weights": "gathered", "params": replace(params, **ready, **misfit)}
        message = f"{name} must be {shape} on each rank; got [{size}]"
        yield message, 2, {"params": replace(params, **{name: getattr(flat, name)})}
    fewer = replace(CONFIG, index_n_heads=15)
    yield "indexer.wq_b must be [240, 32] on each rank; got [256, 32]", 2, {"config": fewer}
    for name in ("q_a_proj", "o_proj"):
        wrong = replace(params, **{name: getattr(params, name).double()})
        yield f"{name} must have x's dtype; got torch.float64", 2, {"params": wrong}
    yield "cache_exchange must be 'queries' or 'blocks'; got 'rows'", 2, {"cache_exchange": "rows"}
    yield f"{needs}; got None", 2, {"batch": paged}
    yield f"{needs}; got None", 2, {"batch": sfa.Batch.from_lengths([4, 2], [9, 2])}
    yield "a cache needs a batch with a block table; got none", 2, {"cache": _cache()}
    yield "selection must have 3 rows; got (2, 2)", 2, {"selection": selection[:2]}
    yield "selection must be int32; got torch.int64", 2, {"selection": selection.long()}
    yield "selection= and select= exclude each other; got both", 2, {"selection": selection, "select": sfa.window}
    yield f"{chosen}; got neither", 2, {"params": shared}
    bare = _cache(layer=1)
    yield "a layer with an indexer needs a pool with index keys; got None", 2, {"batch": paged, "cache": bare}
    got = [(34, torch.float32)]
    named = {"batch": paged, "cache": _cache(width=10)}
    yield f"the pool must hold 32 columns of torch.float32; got {got}", 2, named
    got = [(32, torch.bfloat16)]
    named = {"batch": paged, "cache": _cache(torch.bfloat16)}
    yield f"the pool must hold 32 columns of torch.float32; got {got}", 2, named
    halves = CacheSplit(num_ranks=2)
    yield "a cache_split needs a cache; got None", 2, {"cache_split": halves}
    named = {"batch": paged, "cache": _cache(), "cache_split": halves, "split": three, "x_tD": torch.zeros(2, 64)}
    yield "cache_split must be for 3 ranks; got 2", 3, named


def _large(params):
    return [(name, getattr(params, name)) for name in LARGE_FIELDS]


MISFITS = list(_misfits())


def _refusals(ranks, arguments):
    """Return what each rank says, alone, and what a mesh of them says, with what had been sent by then."""
    given = {
        "params": sfa.init_params(CONFIG),
        "x_tD": torch.zeros(3, 64),
        "batch": sfa.Batch.from_lengths([4, 2]),
        "config": CONFIG,
        "split": split_tokens([4, 2], 2, layout="striped"),
    } | arguments
    first = [given.pop(name) for name in ("params", "x_tD", "batch")]
    said, record = [], []
    for rank in range(ranks):
        with pytest.raises(ValueError) as error:
            context_parallel_layer(*first, Alone(rank, ranks), **given)
        said.append(str(error.value))
    mesh = simulated_mesh(MeshShape(cp=ranks), record=record)
    with pytest.raises(ValueError) as error:
        shard_map(lambda comm: context_parallel_layer(*first, comm["cp"], **given), mesh, in_specs=P(), out_specs=P())()
    return [*said, str(error.value)], record


@pytest.mark.parametrize(("message", "ranks", "arguments"), MISFITS, ids=[message for message, *_ in MISFITS])
def test_a_misfit_is_refused_alike_on_every_rank_before_anything_is_sent(message, ranks, arguments, unchecked):
    said, record = _refusals(ranks, arguments)
    assert set(said) == {f"context_parallel_layer: {message}"}
    assert record == []


def _late_misfits():
    paged = sfa.Batch.from_lengths([4, 2], block_table=torch.tensor([[2], [0]], dtype=torch.int32), block_size=BLOCK)
    pool = _cache()
    strided = replace(pool, kv=torch.zeros(4, 32, BLOCK).mT)
    learning = replace(pool, kv=torch.zeros(4, BLOCK, 32, requires_grad=True))
    rope = sfa.rope_cos_sin(torch.arange(2), CONFIG)
    return {
        "hidden states of another width": {"x_tD": torch.zeros(3, 63)},
        "hidden states of integers": {"x_tD": torch.zeros(3, 64, dtype=torch.int64)},
        "index keys of another width": {"batch": paged, "cache": _cache(index_width=18)},
        "index keys of another dtype": {"batch": paged, "cache": replace(pool, index_k=pool.index_k.double())},
        "a donated pool that is not contiguous": {"batch": paged, "cache": strided, "donate": True},
        "a donated pool that requires grad": {"batch": paged, "cache": learning, "donate": True},
        "an implementation that can't run": {"implementation": "npu"},
        "an implementation that can't run, with a cache": {"batch": paged, "cache": pool, "implementation": "npu"},
        "an implementation that is none": {"implementation": 3},
        "rope of another number of tokens": {"rope": rope},
    }


@pytest.mark.parametrize("name", _late_misfits())
def test_what_the_parts_of_the_layer_refuse_is_refused_before_anything_is_sent(name, unchecked):
    said, record = _refusals(2, _late_misfits()[name])
    assert len(set(said)) == 1
    assert record == []


# --- narrow numbers ---


@pytest.mark.parametrize("name", ["ragged", "mixed"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_in_bfloat16_ranks_differ_from_one_by_rounding_alone(name, weights):
    """With one rank's selection replayed; a rounding is 2^-9 of a value, the largest gap between two 2^-7."""
    given = problem(name, torch.bfloat16)
    want = one_rank(given)
    replayed = one_rank(given, selection=want.output.selection_TK)
    for ranks, layout in ((2, "zigzag"), (8, "own")):
        split = make_split(given.requests, ranks, layout)
        run = on_ranks(given.batch, split, weights=weights, selection_TK=want.output.selection_TK)
        got = with_gradients(run, *given[2:], split=split)
        assert got.output.y_TD.dtype == torch.bfloat16
        assert apart(got.output.y_TD.double(), want.output.y_TD.double()) <= 2**-7
        for field, x in got.gradients.items():
            assert x.isfinite().all()
            assert apart(x.double(), replayed.gradients[field].double()) <= 2**-7, field
