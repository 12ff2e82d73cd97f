"""What went wrong in other projects and must not here: every numeric case of the vectors, and the cases that are
properties. A case's id (A1 ... X1) stands in the test's id or docstring; ``vectors/cases.json`` names the threads.
"""

import inspect
import itertools
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
import sharding
import weights
from sfa_functional import blockwise_indexer, reference, tiles
from tests.vectors import numbers, read_vectors

IMPLEMENTATIONS = ["reference", "blockwise"]


# ---- the numeric cases -----------------------------------------------------------------------------------------------

INT32 = {"topk_TK", "block_table_BU"}
INT64 = {"start_T", "end_T", "slot_T", "request_T", "position_T", "query_start_B1", "seq_len_B", "start_N", "end_N"}
LENGTHS = {"query_lens", "lengths"}

CASES = read_vectors("cases.json")["cases"]
CALLS = [check["call"] for case in CASES for check in case["checks"]]


def checks_of(package: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the checks of one package's functions, each with its name."""
    return [
        (f"{case['id']}.{i}-{check['call'].removeprefix(package + '.')}", check)
        for case in CASES
        for i, check in enumerate(case["checks"])
        if check["call"].startswith(package + ".")
    ]


CHECKS, PLANS, RINGS = checks_of("sfa_functional"), checks_of("sharding"), checks_of("weights")

# Counted while tests are collected: a check that is not run here stops everything.
assert (len(CASES), len(CALLS)) == (37, 63)
assert (len(CHECKS), len(PLANS), len(RINGS)) == (44, 15, 4)
assert len(CHECKS) + len(PLANS) + len(RINGS) == len(CALLS)
assert len({name.split(".")[0] for name, _ in CHECKS + PLANS + RINGS}) == len(CASES)


def argument(name: str, value: Any) -> Any:
    """Turn an argument of a check into what the function takes."""
    if not isinstance(value, list) or name in LENGTHS:
        return value
    dtype = torch.int32 if name in INT32 else torch.int64 if name in INT64 else torch.float32
    x = numbers(value, dtype)
    return x.requires_grad_() if dtype == torch.float32 else x


def write_zeros(*, num_blocks: int, block_size: int, implementation: str, **args: Tensor) -> sfa.JointCache:
    """Write into a pool of zeros of width 1."""
    zeros = torch.zeros(num_blocks, block_size, 1)
    return sfa.write_cache(sfa.JointCache(kv=zeros, index_k=zeros.clone()), **args, implementation=implementation)


def variants(call: str) -> dict[str, Any]:
    """Return the ways to run a call: every implementation, where there are several."""
    name = call.removeprefix("sfa_functional.")
    match name:
        case "write_cache":
            function = write_zeros
        case "select_topk":  # no argument, but the oracle has one too
            return {"blockwise": sfa.select_topk, "reference": reference.select_topk}
        case "Batch.from_lengths":
            function = sfa.Batch.from_lengths
        case _:
            function = getattr(sfa, name)
    if "implementation" not in inspect.signature(function).parameters:
        return {"only": function}
    return {x: partial(function, implementation=x) for x in IMPLEMENTATIONS}


RUNS = [
    pytest.param(check, function, id=f"{name}-{variant}")
    for name, check in CHECKS
    for variant, function in variants(check["call"]).items()
]


def named_results(result: Any, expect: dict[str, Any]) -> dict[str, Tensor]:
    """Pair the tensors of a result with the names that a check gives them; what is not a gradient must be named."""
    names = [name for name in expect if not name.startswith("grad_")]
    if isinstance(result, sfa.Batch):
        derived = {"last_row_of_each_request": result.query_start_B1[1:] - 1}
        return {name: derived[name] if name in derived else getattr(result, name) for name in names}
    if isinstance(result, sfa.JointCache):
        assert names == ["rows"]
        assert torch.equal(result.kv, result.index_k)
        return {"rows": result.kv.flatten()}
    if isinstance(result, tuple):
        return {name: getattr(result, name) for name in names}
    return dict.fromkeys(names, result)


def assert_gradients(result: Any, expect: dict[str, Any], args: dict[str, Any], tolerance: float) -> None:
    """Check every ``grad_...`` entry of a check."""
    wanted = [key for key in expect if key.startswith("grad_")]
    if not wanted:
        return
    inputs = {name: x for name, x in args.items() if isinstance(x, Tensor) and x.requires_grad}
    total = (result.out_THL if isinstance(result, tuple) else result).sum()

    def grads(loss: Tensor) -> dict[str, Tensor | None]:
        found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, retain_graph=True)
        assert all(g is None or g.isfinite().all() for g in found)
        return dict(zip(inputs, found, strict=True))

    for key in wanted:
        match key:
            case "grad_of_sum_out" | "grad_of_sum" | "grad_of_zero_times_sum":
                got = grads(0.0 * total if key == "grad_of_zero_times_sum" else total)
                for name, want in expect[key].items():
                    assert got[name] is not None, f"{key}: {name} has no gradient"
                    torch.testing.assert_close(got[name], numbers(want), atol=tolerance, rtol=0)
            case "grad_of_sum_is_nonzero":
                got = grads(total)
                assert all(got[name] is not None and got[name].any() for name in expect[key])
            case "grad_of_sum_is_none_or_zero":
                got = grads(total)
                assert all(got[name] is None or not got[name].any() for name in expect[key])
            case _:
                raise AssertionError(f"a check expects {key}, which nothing here looks at")


@pytest.mark.parametrize(("check", "function"), RUNS)
def test_numeric_case_gives_the_right_value_and_not_the_slip(check, function):
    tolerance = check.get("tolerance", 1e-5)
    args = {name: argument(name, value) for name, value in check["args"].items()}
    expect = check["expect"]

    result = function(**args)
    results = named_results(result, expect)

    for name, got in results.items():
        want = numbers(expect[name], got.dtype)
        exact = {"atol": tolerance, "rtol": 0} if got.is_floating_point() else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(got, want, **exact)
    assert_gradients(result, expect, args, tolerance)

    slip = check.get("slip")
    if isinstance(slip, list):
        wrong = numbers(slip, torch.float64)
        alike = [got.double() for got in results.values() if got.shape == wrong.shape]
        assert alike, "the slip has the shape of no result"
        assert all(((got - wrong).abs() > 100 * tolerance).any() for got in alike)


def plan(call: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run a function of `sharding` and list its results under the names that checks give them."""
    name = call.removeprefix("sharding.")
    result = getattr(sharding, name)(**args)
    match name:
        case "split_tokens":
            rows = [[t for t in row if t >= 0] for row in result.index_NC.tolist()]
            return {"rows_of_each_rank": rows, "padded_count": result.rows}
        case "token_ranges":
            names = ("start_N", "end_N", "padded_end_N")
        case "local_lengths":
            names = ("query_end_NB", "key_len_NB")
        case "layer_owners":
            return {"owners": list(result)}
        case _:
            raise AssertionError(f"a check calls {call}, whose results have no names here")
    return {name: x.tolist() for name, x in zip(names, result, strict=True)}


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in PLANS])
def test_numeric_case_of_a_plan_gives_the_right_value_and_not_the_slip(check):
    args = {name: argument(name, value) for name, value in check["args"].items()}

    results = plan(check["call"], args)

    assert {name: results[name] for name in check["expect"]} == check["expect"]
    if "slip" in check:
        assert check["slip"] not in results.values()


def ring(call: str, args: dict[str, Any]) -> dict[str, Any]:
    """Plan a ring, read the slots as it goes, and list what is found under the names that checks give it."""
    assert call == "weights.ring_schedule", f"a check calls {call}, whose results have no names here"
    steps = weights.ring_schedule(**args)
    holds = {step.slot: step.layer for step in steps[: min(args["prefetch"], args["num_layers"])]}
    wrong = []
    for step in steps:
        if step.fetch_slot is not None:
            holds[step.fetch_slot] = step.fetch_layer
        if holds.get(step.slot) != step.layer:
            wrong.append(f"layer {step.layer} reads the weight of layer {holds.get(step.slot)}")
    return {
        "used_layers": [step.layer for step in steps],
        "each_layer_is_in_its_slot": not wrong,
        "fetches": sum(step.fetch_layer is not None for step in steps),
        "wrong": wrong,
    }


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in RINGS])
def test_numeric_case_of_a_ring_gives_the_right_value_and_not_the_slip(check):
    for args in check["args"].get("each_of", [check["args"]]):
        results = ring(check["call"], args)

        assert {name: results[name] for name in check["expect"]} == check["expect"], args
        assert check.get("slip") not in results["wrong"]


# ---- tools of the properties -----------------------------------------------------------------------------------------


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Differentiate a finite loss; every gradient of every test here must be finite (L11)."""
    assert loss.isfinite()
    grads = torch.autograd.grad(loss, inputs)
    assert all(g.isfinite().all() for g in grads)
    return grads


def unreached(loss: Tensor, *inputs: Tensor) -> bool:
    """Say whether a loss gives none of the inputs a gradient other than zero; keeps the graph."""
    grads = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    return all(g is None or not g.any() for g in grads)


def masked_attention(q_THE: Tensor, kv_SE: Tensor, seen_TS: Tensor, *, scale: float, value_dim: int):
    """Compute dense attention under a mask in float64; a query without keys has out 0 and lse -inf."""
    q_THE, kv_SE = q_THE.double(), kv_SE.double()
    any_T1 = seen_TS.any(-1)[:, None]
    z_THS = scale * torch.einsum("the,se->ths", q_THE, kv_SE)
    z_THS = z_THS.masked_fill(~(seen_TS | ~any_T1)[:, None], -torch.inf)
    p_THS = z_THS.softmax(-1) * any_T1[..., None]
    lse_TH = torch.where(any_T1, z_THS.logsumexp(-1), -torch.inf)
    return torch.einsum("ths,sl->thl", p_THS, kv_SE[:, :value_dim]), lse_TH


def spelled_out(topk_TK: Tensor, num_keys: int) -> Tensor:
    """Return the mask [T, S] that a selection spells out."""
    seen_TS = torch.zeros(topk_TK.shape[0], num_keys, dtype=torch.bool)
    for t, row in enumerate(topk_TK.tolist()):
        for s in row:
            if 0 <= s < num_keys:
                seen_TS[t, s] = True
    return seen_TS


def best_rows(score_S: Tensor, k: int) -> list[int]:
    """Choose the k highest scores, the lower row first among equals, and list them in ascending order."""
    by_score = sorted(range(len(score_S)), key=lambda s: (-float(score_S[s]), s))
    return sorted(by_score[:k])


def in_chunks(function: Any, size: int, *per_query: Tensor) -> Tensor:
    """Call a function on runs of ``size`` queries and join the results."""
    return torch.cat([function(*rows) for rows in zip(*(x.split(size) for x in per_query), strict=True)])


def tied_indexer(num_queries: int, num_keys: int, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Draw small whole numbers: scores are exact in float32 however they are summed, and many are equal."""
    q_TJI = torch.randint(-2, 3, (num_queries, heads, 8)).float()
    return q_TJI, torch.randint(-2, 3, (num_keys, 8)).float(), torch.randint(-1, 3, (num_queries, heads)).float()


# ---- scores and rotation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 128])
def test_hadamard_on_both_sides_moves_no_score_and_on_one_side_it_does(width):
    """A4."""
    q_TJI = torch.nn.functional.normalize(torch.randn(7, 4, width), dim=-1)
    k_SI = torch.nn.functional.normalize(torch.randn(11, width), dim=-1)
    w_TJ = torch.randn(7, 4) * 4**-0.5
    plain_TS = sfa.index_scores(q_TJI, k_SI, w_TJ)

    both_TS = sfa.index_scores(sfa.hadamard(q_TJI), sfa.hadamard(k_SI), w_TJ)
    query_only_TS = sfa.index_scores(sfa.hadamard(q_TJI), k_SI, w_TJ)

    torch.testing.assert_close(both_TS, plain_TS, atol=1e-6, rtol=0)
    assert (query_only_TS - plain_TS).abs().max() > 1e-2


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_index_scores_equal_a_triple_loop_at_every_width(width, heads):
    """A7: a constant that is right for width 128 alone would show."""
    q_TJI, k_SI, w_TJ = torch.randn(5, heads, width) * width**-0.5, torch.randn(9, width), torch.randn(5, heads)
    q, k, w = q_TJI.tolist(), k_SI.tolist(), w_TJ.tolist()
    want = [[0.0] * 9 for _ in range(5)]
    for t in range(5):
        for s in range(9):
            for j in range(heads):
                want[t][s] += w[t][j] * max(0.0, sum(x * y for x, y in zip(q[t][j], k[s], strict=True)))

    torch.testing.assert_close(sfa.index_scores(q_TJI, k_SI, w_TJ), torch.tensor(want), atol=1e-5, rtol=0)


HALF, INTERLEAVED = [0.5403023, 0, 0.8414710, 0], [0.5403023, 0.8414710, 0, 0]


@pytest.mark.parametrize(
    ("model", "flag", "want"),
    [
        ("glm_5", None, INTERLEAVED),
        ("glm_5", True, INTERLEAVED),
        ("glm_5", False, HALF),
        ("deepseek_v32", None, HALF),
        ("deepseek_v32", False, HALF),
        ("deepseek_v32", True, INTERLEAVED),
    ],
)
def test_from_hf_decides_how_index_queries_and_keys_are_rotated(model, flag, want):
    """B3: position 1 of a rope of width 4 and base 10000, as in B1; the flag wins, else the model's own pairing."""
    published = read_vectors("model_configs.json")["models"][model]["config"]
    rope = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    small = {"hidden_size": 4, "q_lora_rank": 4, "qk_rope_head_dim": 4, "index_n_heads": 1, "index_head_dim": 4}
    values = {**published, **small, **rope}
    values.pop("indexer_rope_interleave", None)
    config = sfa.SFAConfig.from_hf(values if flag is None else values | {"indexer_rope_interleave": flag})
    first_I = torch.tensor([1.0, 0, 0, 0])
    indexer = sfa.IndexerParams(
        wq_b=torch.eye(4),
        wk=torch.eye(4),
        k_norm_weight=torch.zeros(4),
        k_norm_bias=first_I,  # a key before its rotation, whatever x is
        weights_proj=torch.ones(1, 4),
    )
    cos, sin = sfa.rope_cos_sin(torch.tensor([1]), config)

    q_TJI = sfa.index_queries(indexer, first_I[None], cos, sin, config=config)
    k_TI = sfa.index_keys(indexer, torch.randn(1, 4), cos, sin, config=config)

    torch.testing.assert_close(q_TJI[0, 0], torch.tensor(want), atol=1e-6, rtol=0)
    torch.testing.assert_close(k_TI[0], torch.tensor(want), atol=1e-6, rtol=0)


# ---- exact selection -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 24])
@pytest.mark.parametrize("select", [sfa.select_topk, reference.select_topk], ids=["blockwise", "reference"])
def test_select_topk_of_tied_scores_is_the_same_on_every_call_and_for_every_chunk(select, size):
    """D4."""
    score_TS = torch.randint(-1, 2, (24, 40)).float() * torch.tensor([1.0, -0.0])[torch.randint(0, 2, (24, 40))]
    start_T, end_T = torch.randint(0, 20, (24,)), torch.randint(0, 41, (24,))
    want = [
        best_rows(score_TS[t, a:b], 5) for t, (a, b) in enumerate(zip(start_T.tolist(), end_T.tolist(), strict=True))
    ]
    want_TK = [[s + a for s in rows] + [-1] * (5 - len(rows)) for rows, a in zip(want, start_T.tolist(), strict=True)]

    for _ in range(3):
        got_TK = in_chunks(partial(select, k=5), size, score_TS, start_T, end_T)
        assert got_TK.tolist() == want_TK


@pytest.mark.parametrize("size", [1, 3, 24])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lightning_indexer_of_tied_scores_is_the_same_on_every_call_and_for_every_chunk(implementation, size):
    """D4, and the first half of K1."""
    q_TJI, k_SI, w_TJ = tied_indexer(24, 40)
    start_T, end_T = torch.zeros(24, dtype=torch.int64), torch.arange(17, 41)
    score_TS = torch.einsum("tj,tjs->ts", w_TJ, torch.einsum("tji,si->tjs", q_TJI, k_SI).relu())
    want_TK = [best_rows(score_TS[t, : 17 + t], 5) for t in range(24)]

    def select(q: Tensor, w: Tensor, start: Tensor, end: Tensor) -> Tensor:
        return sfa.lightning_indexer(q, k_SI, w, start, end, k=5, implementation=implementation)

    for _ in range(3):
        assert in_chunks(select, size, q_TJI, w_TJ, start_T, end_T).tolist() == want_TK


@pytest.mark.parametrize(("workspace", "key_tile"), [(1, 1), (10**4, 3), (10**5, 7), (2**22, 1024)])
def test_lightning_indexer_selects_the_same_whatever_the_size_of_its_tiles(monkeypatch, workspace, key_tile):
    """D4, K1."""
    q_TJI, k_SI, w_TJ = tied_indexer(24, 40)
    batch = sfa.Batch.from_lengths([9, 0, 15], [20, 0, 20])
    want_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, batch.start_T, batch.end_T, k=5, implementation="reference")

    monkeypatch.setattr(tiles, "KEY_TILE", key_tile)
    monkeypatch.setattr(tiles, "CPU_STEP", workspace)

    inputs = q_TJI, k_SI, w_TJ, batch.start_T, batch.end_T
    assert torch.equal(sfa.lightning_indexer(*inputs, k=5, workspace_bytes=workspace), want_TK)


class LargestTensor(TorchDispatchMode):
    """Note the number of values of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("pooled", [False, True])
def test_lightning_indexer_never_holds_the_scores_of_all_heads(pooled):
    """K1: a tile of them, a quarter of T·J·S here."""
    count, heads = 1024, 16
    q_TJI, k_SI, w_TJ = torch.randn(count, heads, 8), torch.randn(count, 8), torch.randn(count, heads)
    start_T, end_T = torch.zeros(count, dtype=torch.int64), torch.arange(count) + 1
    row_S = torch.randperm(count) if pooled else None

    with LargestTensor() as seen:
        blockwise_indexer.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, row_S, k=64, workspace_bytes=64 << 20)

    assert q_TJI.numel() < seen.largest <= tiles.CPU_STEP // 4 <= count * heads * count // 4


# ---- a selection that comes from another layer -----------------------------------------------------------------------


def packed_layer_output(params, x_TD: Tensor, lengths: list[int], position_TK: Tensor, *, config) -> Tensor:
    """Compute the layer on packed requests under given selections of positions, with attention in plain float64."""
    rows, first = [], 0
    for n in lengths:
        x, position_tK = x_TD[first : first + n], position_TK[first : first + n]
        cos, sin = sfa.rope_cos_sin(torch.arange(n), config)
        q_THE, _ = sfa.latent_queries(params, x, cos, sin, config=config)
        kv_SE = sfa.latent_keys(params, x, cos, sin, config=config)
        seen_TS = spelled_out(position_tK, n).tril()
        scale, value_dim = config.softmax_scale, config.kv_lora_rank
        out_THL, _ = masked_attention(q_THE, kv_SE, seen_TS, scale=scale, value_dim=value_dim)
        rows.append(sfa.latent_output(params, out_THL.to(x.dtype), config=config))
        first += n
    return torch.cat(rows)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sfa_layer_attends_to_exactly_the_selection_it_is_given(implementation, paged):
    """I6: another layer's selection, passed to a layer with an indexer of its own and to one without."""
    config, lengths = sfa.TINY, [7, 3, 9]
    first, second = (
        sfa.init_params(config, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (1, 2)
    )
    x_TD = torch.randn(19, config.hidden_size, dtype=torch.float64)
    batch = sfa.Batch.from_lengths(lengths)
    if paged:
        table_BU = torch.tensor([[4, 1, -1], [0, -1, -1], [5, 2, 3]], dtype=torch.int32)
        batch = sfa.Batch.from_lengths(lengths, block_table=table_BU, block_size=4)

    def cache() -> sfa.JointCache | None:
        sizes = {"num_blocks": 6, "block_size": 4, "dtype": torch.float64}
        return sfa.init_cache(config, **sizes) if paged else None

    run = partial(sfa.sfa_layer, x_TD=x_TD, batch=batch, config=config, implementation=implementation)
    given_TK = run(first, cache=cache()).selection_TK
    own = run(second, cache=cache())
    got = run(second, cache=cache(), selection=given_TK)
    shared = run(replace(second, indexer=None), cache=cache(), selection=given_TK)

    assert not torch.equal(own.selection_TK, given_TK)
    assert torch.equal(got.selection_TK, given_TK)
    assert torch.equal(shared.selection_TK, given_TK)
    want_TD = packed_layer_output(second, x_TD, lengths, given_TK, config=config)
    torch.testing.assert_close(got.y_TD, want_TD, atol=1e-10, rtol=0)
    torch.testing.assert_close(shared.y_TD, want_TD, atol=1e-10, rtol=0)
    assert (own.y_TD - want_TD).abs().max() > 1e-3
    if paged:
        assert torch.equal(got.cache.kv, own.cache.kv)
        assert torch.equal(got.cache.index_k, own.cache.index_k)


def test_sfa_layer_ignores_given_positions_that_a_query_does_not_see():
    """I6: any order, holes, later positions and positions of nobody."""
    config = sfa.TINY
    params = sfa.init_params(config, dtype=torch.float64)
    x_TD = torch.randn(6, config.hidden_size, dtype=torch.float64)
    given_TK = torch.tensor([[0, 1, 5], [-1, 1, 0], [2, -7, 99], [3, 0, 1], [0, -1, -1], [2, 2**31 - 1, 1]])
    given_TK = given_TK.to(torch.int32)

    got = sfa.sfa_layer(params, x_TD, sfa.Batch.from_lengths([4, 2]), config=config, selection=given_TK)

    want_TD = packed_layer_output(params, x_TD, [4, 2], given_TK, config=config)
    torch.testing.assert_close(got.y_TD, want_TD, atol=1e-10, rtol=0)


GLM_SMALL = {**read_vectors("model_configs.json")["models"]["glm_5"]["config"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    "schedule",
    [
        {"indexer_types": ["shared", "full", "shared", "shared"]},
        {"index_topk_pattern": "SFSS"},
        {"index_topk_freq": 4, "index_skip_topk_offset": 0},
    ],
)
def test_from_hf_refuses_a_first_layer_that_shares(schedule):
    """H8."""
    with pytest.raises(ValueError, match="layer 0 must be 'full'"):
        sfa.SFAConfig.from_hf(GLM_SMALL | schedule)


def test_a_stage_that_starts_on_a_sharing_layer_is_refused_when_its_config_is_made():
    """H8: layer 3 is the source, layer 4 shares, the stage starts at 4."""
    values = GLM_SMALL | {"num_hidden_layers": 6, "index_topk_pattern": "FFFFSS"}
    whole = sfa.SFAConfig.from_hf(values)

    assert replace(whole, indexer_types=whole.indexer_types[3:]).indexer_types == ("full", "shared", "shared")
    with pytest.raises(ValueError, match="layer 0 must be 'full'"):
        replace(whole, indexer_types=whole.indexer_types[4:])


def test_a_sharing_layer_without_a_selection_is_refused_by_name():
    """H8."""
    config = replace(sfa.TINY, indexer_types=("full", "shared"))
    params = sfa.init_params(config, layer=1)

    with pytest.raises(ValueError, match="sfa_layer: a layer without an indexer needs selection="):
        sfa.sfa_layer(params, torch.randn(3, config.hidden_size), sfa.Batch.from_lengths([3]), config=config)


# ---- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("layout", ["joint", "split"])
def test_write_cache_keeps_latent_slots_and_index_key_slots_apart(layout, donate):
    """F4: rank 1 of 2 holds the latents of positions 1 and 3, and every index key."""
    cache = sfa.init_cache(sfa.TINY, num_blocks=2, block_size=2, dtype=torch.float32, layout=layout)
    kv_TE, k_TI = torch.randn(4, sfa.TINY.key_width), torch.randn(4, sfa.TINY.index_head_dim)
    slot_T, index_slot_T = torch.tensor([-1, 0, -1, 1]), torch.tensor([0, 1, 2, 3])

    written = sfa.write_cache(cache, kv_TE, k_TI, slot_T, index_slot_T=index_slot_T, donate=donate)

    want_SE = torch.stack([kv_TE[1], kv_TE[3], torch.zeros_like(kv_TE[0]), torch.zeros_like(kv_TE[0])])
    assert torch.equal(sfa.fetch_rows(sfa.cache_rows(written), torch.arange(4)), want_SE)
    assert torch.equal(written.index_k.flatten(0, 1), k_TI)


@pytest.mark.parametrize("query_lens", [[1], [5]])
def test_a_sequence_longer_than_its_table_is_refused(query_lens):
    """F10: 5 rows where the table has room for 3."""
    with pytest.raises(ValueError, match="a sequence must fit its 3 rows of the table; got 5"):
        sfa.Batch.from_lengths(query_lens, [5], block_table=torch.tensor([[0]], dtype=torch.int32), block_size=3)


def test_a_step_past_the_end_of_the_table_is_refused():
    """F10."""
    batch = sfa.Batch.from_lengths([3], block_table=torch.tensor([[0]], dtype=torch.int32), block_size=3)

    with pytest.raises(ValueError, match="a sequence must fit its 3 rows of the table; got 5"):
        batch.next([2])


@pytest.mark.parametrize("donate", [False, True])
def test_write_cache_past_the_end_of_the_pool_raises(donate):
    """F10: 5 rows into a pool of 3."""
    cache = sfa.JointCache(kv=torch.zeros(1, 3, 1), index_k=torch.zeros(1, 3, 1))

    with pytest.raises(IndexError):
        sfa.write_cache(cache, torch.ones(5, 1), torch.ones(5, 1), torch.arange(5), donate=donate)


def test_reading_more_cached_rows_than_a_tile_has_room_for_reads_them_all(monkeypatch):
    """F10: 5 cached rows, tiles of 3; the best keys stand behind the first tile."""
    monkeypatch.setattr(tiles, "KEY_TILE", 3)
    monkeypatch.setattr(tiles, "CPU_STEP", 3)
    row_S = torch.tensor([4, 2, 0, 3, 1])
    pool_SE = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
    score_S = torch.tensor([1.0, 2, 3, 5, 4])
    k_SI = torch.empty(5, 1).index_copy(0, row_S, score_S[:, None])
    start_T, end_T = torch.tensor([0]), torch.tensor([5])

    rows_SE = sfa.fetch_rows(pool_SE, row_S)
    topk_TK = sfa.lightning_indexer(torch.ones(1, 1, 1), k_SI, torch.ones(1, 1), start_T, end_T, k=2, row_S=row_S)
    dense = sfa.dense_attention(torch.zeros(1, 1, 1), pool_SE, start_T, end_T, scale=1.0, value_dim=1, row_S=row_S)
    all_TK = row_S[None].to(torch.int32)
    sparse = sfa.sparse_attention(torch.zeros(1, 1, 1), pool_SE, all_TK, scale=1.0, value_dim=1)

    assert rows_SE.flatten().tolist() == [16, 4, 1, 8, 2]
    assert topk_TK.tolist() == [[3, 4]]
    for out_THL, lse_TH in (dense, sparse):
        torch.testing.assert_close(out_THL.flatten(), torch.tensor([31 / 5]))
        torch.testing.assert_close(lse_TH.flatten(), torch.tensor([5.0]).log())


# ---- splitting over ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, 4])
def test_a_rank_has_latent_slots_of_its_own_and_index_key_slots_of_all_positions(block_size):
    """F4: 2 ranks, interleave 1, rank 1, positions 0 to 3 on page 0; then write both and find them."""
    split, table_BU = sharding.CacheSplit(2, interleave=1), torch.tensor([[0]], dtype=torch.int32)
    index_table_BU = sharding.replicated_block_table(table_BU, 2)
    batch = sfa.Batch.from_lengths([4], block_table=index_table_BU, block_size=block_size)
    slot_T = split.local_slots(table_BU, batch.request_T, batch.position_T, 1, block_size=block_size)
    kv_TE, k_TI = torch.randn(4, sfa.TINY.key_width), torch.randn(4, sfa.TINY.index_head_dim)
    sizes = {"num_blocks": 1, "index_blocks": 2, "block_size": block_size, "dtype": torch.float32}

    cache = sfa.write_cache(sfa.init_cache(sfa.TINY, **sizes), kv_TE, k_TI, slot_T, index_slot_T=batch.slot_T)

    assert slot_T.tolist() == [-1, 0, -1, 1]
    assert batch.slot_T.tolist() == [0, 1, 2, 3]
    assert torch.equal(cache.kv.flatten(0, 1)[:2], kv_TE[[1, 3]])
    assert not cache.kv.flatten(0, 1)[2:].any()
    assert torch.equal(cache.index_k.flatten(0, 1)[:4], k_TI)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_every_layout_puts_each_token_on_one_rank_and_its_inverse_restores_them(layout):
    """G1: also fewer tokens than ranks, so that some are empty."""
    for lengths in [[0], [1], [2], [3], [7], [1, 2, 3], [0, 5, 0, 1]]:
        for num_ranks in range(1, 9):
            split = sharding.split_tokens(lengths, num_ranks, layout=layout)
            held = [[t for t in row if t >= 0] for row in split.index_NC.tolist()]
            x_TD = torch.randn(sum(lengths), 3)
            assert sorted(itertools.chain(*held)) == list(range(sum(lengths)))
            assert all(tokens == sorted(tokens) for tokens in held)
            assert split.index_NC.tolist() == [row + [-1] * (split.rows - len(row)) for row in held]
            assert torch.equal(split.gather(split.scatter(x_TD)), x_TD)
            local = [x_TD[tokens] for tokens in held]
            rows = [row[: len(tokens)] for row, tokens in zip(split.scatter(x_TD).chunk(num_ranks), held, strict=True)]
            assert split.rows == 0 or all(torch.equal(a, b) for a, b in zip(local, rows, strict=True))


@pytest.mark.parametrize("hostile", [torch.nan, torch.inf])
def test_what_the_padding_row_of_an_odd_length_holds_changes_no_output_and_no_gradient(hostile):
    """G2: 7 tokens on 2 ranks, each attending to all keys that it sees; the eighth row is padding."""
    split, batch = sharding.split_tokens([7], 2, layout="zigzag"), sfa.Batch.from_lengths([7])
    q_THE = torch.randn(7, 2, 5, dtype=torch.float64, requires_grad=True)
    kv_SE = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    given = {"scale": 0.5, "value_dim": 3}

    q_ranks = split.scatter(q_THE, fill=hostile).chunk(2)
    parts = []
    for rank, q_tHE in enumerate(q_ranks):
        local = split.local_batch(batch, rank)
        parts.append(sfa.dense_attention(q_tHE, kv_SE, local.start_T, local.end_T, **given))
    out_THL, lse_TH = (split.gather(torch.cat(column)) for column in zip(*parts, strict=True))
    whole = sfa.dense_attention(q_THE, kv_SE, batch.start_T, batch.end_T, **given)

    assert (split.index_NC < 0).tolist() == [[False, False, False, True], [False] * 4]
    assert not q_ranks[0][3].isfinite().any()
    torch.testing.assert_close((out_THL, lse_TH), tuple(whole), atol=1e-12, rtol=0)
    got, want = (gradients(out.square().sum() + lse.sum(), q_THE, kv_SE) for out, lse in ((out_THL, lse_TH), whole))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_a_rank_selects_and_reuses_as_many_rows_as_it_holds():
    """G7: 6 tokens, 2 ranks, 3 selection rows on each: those of its own tokens, not the first or all of them."""
    split, batch = sharding.split_tokens([6], 2, layout="contiguous"), sfa.Batch.from_lengths([6])
    q_TJI, k_SI, w_TJ = tied_indexer(6, 6)
    topk_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, batch.start_T, batch.end_T, k=2)

    reused = split.scatter(topk_TK, fill=-1).chunk(2)

    for rank in range(2):
        local, mine = split.local_batch(batch, rank), slice(3 * rank, 3 * rank + 3)
        own_tK = sfa.lightning_indexer(q_TJI[mine], k_SI, w_TJ[mine], local.start_T, local.end_T, k=2)
        assert own_tK.shape == reused[rank].shape == (3, 2)
        assert own_tK.tolist() == reused[rank].tolist() == topk_TK[mine].tolist()


def bits(x: Tensor) -> Tensor:
    """View floats as whole numbers: NaN equals itself, and its payload counts."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_packed_rows_come_back_bit_for_bit(count, shape):
    """G13: bf16×4, int8×2 and fp32×1 in one gather; any bits, among them NaN of every kind, -0 and denormals."""
    half = torch.randint(-(2**15), 2**15, (count, 4)).to(torch.int16)
    single = torch.randint(-(2**31), 2**31, (count, *shape)).to(torch.int32)
    if count > 0:
        half[0] = torch.tensor([0x7FA5, -1, 0x7F81, -0x8000]).to(torch.int16)  # NaN with payloads, -0
        single[0] = 0x7FA12345  # a signalling NaN
    tensors = half.view(torch.bfloat16), torch.randint(-128, 128, (count, 2)).to(torch.int8), single.view(torch.float32)

    packed = sharding.pack_rows(*tensors)
    got = sharding.unpack_rows(packed, [x.shape[1:] for x in tensors], [x.dtype for x in tensors])

    assert packed.dtype == torch.uint8
    assert packed.shape == (count, 14)
    assert len(got) == 3
    for x, again in zip(tensors, got, strict=True):
        assert (again.dtype, again.shape) == (x.dtype, x.shape)
        assert torch.equal(bits(again), bits(x))
        assert again.is_contiguous()
        assert count == 0 or again.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr()


def test_rows_of_several_ranks_are_packed_once_and_unpacked_once():
    """G13: what arrives is the ranks' packed rows one after the other."""
    ranks = [(torch.randn(3, 2, 2).bfloat16(), torch.randint(9, (3, 2), dtype=torch.int8)) for _ in range(4)]
    arrived = torch.cat([sharding.pack_rows(*tensors) for tensors in ranks])

    got = sharding.unpack_rows(arrived, [(2, 2), (2,)], [torch.bfloat16, torch.int8])

    for x, column in zip(got, zip(*ranks, strict=True), strict=True):
        assert torch.equal(x, torch.cat(column))


def test_rows_of_another_width_are_not_unpacked(unchecked):
    """G13."""
    for packed in (torch.zeros(3, 13, dtype=torch.uint8), torch.zeros(3, 14), torch.zeros(14, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"^unpack_rows: packed must be uint8 \[rows, 14\]; got"):
            sharding.unpack_rows(packed, [(4,), (2,), ()], [torch.bfloat16, torch.int8, torch.float32])


# ---- training --------------------------------------------------------------------------------------------------------


def indexer_inputs(params, x_TD: Tensor, batch: sfa.Batch, config) -> dict[str, Tensor]:
    """Compute what `indexer_kl` compares; as in the published recipe, the indexer's inputs are detached."""
    cos, sin = sfa.rope_cos_sin(batch.position_T, config)
    q_THE, q_latent_TQ = sfa.latent_queries(params, x_TD, cos, sin, config=config)
    x_detached_TD = x_TD.detach()
    return {
        "q_TJI": sfa.index_queries(params.indexer, q_latent_TQ.detach(), cos, sin, config=config),
        "k_SI": sfa.index_keys(params.indexer, x_detached_TD, cos, sin, config=config),
        "w_TJ": sfa.index_weights(params.indexer, x_detached_TD, config=config),
        "q_THE": q_THE,
        "kv_SE": sfa.latent_keys(params, x_TD, cos, sin, config=config),
        "start_T": batch.start_T,
        "end_T": batch.end_T,
    }


def trainable(config=sfa.TINY) -> tuple[sfa.LayerParams, dict[str, Tensor], dict[str, Tensor]]:
    """Draw a layer whose weights ask for gradients; also its indexer's weights and the others, by name."""
    params = tree_map(lambda x: x.requires_grad_(), sfa.init_params(config))
    indexer = {f.name: getattr(params.indexer, f.name) for f in fields(params.indexer)}
    others = {name: x for name, x in vars(params).items() if isinstance(x, Tensor)}
    return params, indexer, others


def test_a_loss_on_the_layer_output_reaches_every_weight_but_the_indexer():
    """L1."""
    params, indexer, others = trainable()
    x_TD = torch.randn(9, sfa.TINY.hidden_size)
    y_TD, _, _ = sfa.sfa_layer(params, x_TD, sfa.Batch.from_lengths([9]), config=sfa.TINY)
    loss = y_TD.square().sum()

    assert unreached(loss, *indexer.values())
    assert all(g.any() for g in gradients(loss, *others.values()))


@pytest.mark.parametrize("sparse", [False, True])
def test_indexer_kl_trains_every_weight_of_the_indexer_and_nothing_else(sparse):
    """L1, L12: warm-up over all visible keys, and the sparse stage over the selected ones."""
    params, indexer, others = trainable()
    batch = sfa.Batch.from_lengths([6, 3])
    x_TD = torch.randn(9, sfa.TINY.hidden_size)
    given = indexer_inputs(params, x_TD, batch, sfa.TINY)
    topk_TK = None
    if sparse:
        scored = [given[name] for name in ("q_TJI", "k_SI", "w_TJ", "start_T", "end_T")]
        topk_TK = sfa.lightning_indexer(*scored, k=sfa.TINY.index_topk)

    loss = sfa.indexer_kl(**given, scale=sfa.TINY.softmax_scale, topk_TK=topk_TK).mean()

    assert unreached(loss, *others.values())
    assert all(g.any() for g in gradients(loss, *indexer.values()))


@pytest.mark.parametrize("extra", [0, 1])
def test_backward_runs_with_k_keys_and_with_one_more(extra):
    """L2: scores matter from the first batch with more than k keys on; a selection carries no gradient."""
    params, _, others = trainable()
    length = sfa.TINY.index_topk + extra
    x_TD = torch.randn(length, sfa.TINY.hidden_size, requires_grad=True)

    y_TD, selection_TK, _ = sfa.sfa_layer(params, x_TD, sfa.Batch.from_lengths([length]), config=sfa.TINY)

    assert selection_TK.dtype == torch.int32
    assert not selection_TK.requires_grad
    assert (selection_TK[-1] >= 0).sum() == sfa.TINY.index_topk
    assert all(g.any() for g in gradients(y_TD.square().sum(), x_TD, *others.values()))


def test_the_teacher_of_indexer_kl_sums_to_one_over_visible_keys():
    """L8: with one index head per key, score = w, and w = 0 makes π uniform; so the teacher is p = π - d kl / d w."""
    logit_HTS = torch.tensor(
        [[[1.0, 9.0, 9.0], [0.5, 2.0, 9.0], [0.3, -1.0, 1.2]], [[-2.0, 9.0, 9.0], [1.5, 0.0, 9.0], [2.0, 0.1, -0.7]]]
    )
    w_TJ = torch.zeros(3, 3, requires_grad=True)
    kl_T = sfa.indexer_kl(
        torch.eye(3).expand(3, 3, 3),
        torch.eye(3),
        w_TJ,
        logit_HTS.transpose(0, 1),
        torch.eye(3),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([1, 2, 3]),
        scale=1.0,
    )

    (grad_TS,) = gradients(kl_T.sum(), w_TJ)

    uniform_TS = torch.ones(3, 3).tril() / torch.tensor([[1.0], [2.0], [3.0]])
    teacher_TS = uniform_TS - grad_TS
    want_TS = torch.zeros(3, 3)
    for t in range(3):
        weight_HS = logit_HTS[:, t, : t + 1].exp()
        want_TS[t, : t + 1] = (weight_HS / weight_HS.sum(-1, keepdim=True)).mean(0)
    torch.testing.assert_close(teacher_TS, want_TS, atol=1e-6, rtol=0)
    torch.testing.assert_close(teacher_TS.sum(-1), torch.ones(3), atol=1e-6, rtol=0)
    assert not teacher_TS.triu(1).any()


@pytest.mark.parametrize("heads", [1, 3, 5])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_sparse_attention_equal_those_of_dense_attention_under_its_mask(implementation, heads):
    """L9: odd head counts; one query without keys, one with a single key."""
    q_THE = torch.randn(6, heads, 7, dtype=torch.float64, requires_grad=True)
    kv_SE = torch.randn(10, 7, dtype=torch.float64, requires_grad=True)
    topk_TK = torch.stack([torch.randperm(10)[:4] for _ in range(6)]).to(torch.int32)
    topk_TK[2] = -1
    topk_TK[3, 1:] = torch.tensor([-1, 10, -5])
    pull_THL, pull_TH = torch.randn(6, heads, 5, dtype=torch.float64), torch.randn(6, heads, dtype=torch.float64)

    def loss(out_THL: Tensor, lse_TH: Tensor) -> Tensor:
        return (out_THL * pull_THL).sum() + (torch.where(lse_TH.isfinite(), lse_TH, 0) * pull_TH).sum()

    given = {"scale": 0.4, "value_dim": 5}
    got = gradients(
        loss(*sfa.sparse_attention(q_THE, kv_SE, topk_TK, **given, implementation=implementation)), q_THE, kv_SE
    )
    want = gradients(loss(*masked_attention(q_THE, kv_SE, spelled_out(topk_TK, 10), **given)), q_THE, kv_SE)

    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert not got[0][2].any()


UNUSED = [0, 3, 6]
"""Rows that nobody selects and nobody sees: the first and the last too, which -1 as an address would read."""


def hostile_ranges() -> tuple[Tensor, Tensor, Tensor]:
    """Return a selection of 7 rows and ranges: several keys, none, several, one."""
    topk_TK = torch.tensor([[1, 2, -1], [-1, -1, -1], [5, -1, 4], [1, 99, -3]], dtype=torch.int32)
    return topk_TK, torch.tensor([1, 2, 4, 1]), torch.tensor([3, 1, 6, 2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("hostile", [torch.nan, torch.inf, -torch.inf])
def test_gradients_are_finite_whatever_stands_in_rows_that_nobody_uses(implementation, hostile):
    """L11: beside rows without keys, unused entries and single keys; a finite loss alone proves nothing."""
    q_THE, kv_SE = torch.randn(4, 2, 5), torch.randn(7, 5)
    kv_SE[UNUSED] = hostile
    q_THE.requires_grad_(), kv_SE.requires_grad_()
    topk_TK, start_T, end_T = hostile_ranges()
    given = {"scale": 0.5, "value_dim": 3, "implementation": implementation}

    for out_THL, lse_TH in (
        sfa.sparse_attention(q_THE, kv_SE, topk_TK, **given),
        sfa.dense_attention(q_THE, kv_SE, start_T, end_T, **given),
    ):
        loss = out_THL.square().sum() + lse_TH[[0, 2, 3]].sum()
        grad_THE, grad_SE = gradients(loss, q_THE, kv_SE)
        assert grad_THE[[0, 2]].any()
        assert not grad_THE[1].any()
        assert not grad_SE[UNUSED].any()


@pytest.mark.parametrize("hostile", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_indexer_kl_are_finite_whatever_stands_in_rows_that_nobody_uses(sparse, hostile):
    """L11: beside rows that see one key or none."""
    q_TJI, k_SI, w_TJ = torch.randn(4, 3, 5), torch.randn(7, 5), torch.randn(4, 3)
    q_THE, kv_SE = torch.randn(4, 2, 7), torch.randn(7, 7)
    k_SI[UNUSED], kv_SE[UNUSED] = hostile, hostile
    inputs = [x.requires_grad_() for x in (q_TJI, k_SI, w_TJ)]
    topk_TK, start_T, end_T = hostile_ranges()

    kl_T = sfa.indexer_kl(
        q_TJI, k_SI, w_TJ, q_THE, kv_SE, start_T, end_T, scale=0.5, topk_TK=topk_TK if sparse else None
    )

    grad_TJI, grad_SI, _ = gradients(kl_T.sum(), *inputs)
    assert grad_TJI[0].any()
    assert not grad_TJI[[1, 3]].any()
    assert not grad_SI[UNUSED].any()


def test_gradients_of_a_layer_are_finite_whatever_stands_in_padding():
    """L11: rows of x that belong to no request hold NaN."""
    params, _, others = trainable()
    x_TD = torch.randn(9, sfa.TINY.hidden_size)
    x_TD[6:] = torch.nan
    x_TD.requires_grad_()
    batch = sfa.Batch.from_lengths([6, 3], [6, 0])

    y_TD, _, _ = sfa.sfa_layer(params, x_TD, batch, config=sfa.TINY)

    grad_TD, *rest = gradients(y_TD.square().sum(), x_TD, *others.values())
    assert all(g.any() for g in rest)
    assert grad_TD[:6].any()
    assert not grad_TD[6:].any()


def test_indexer_kl_gives_its_target_no_gradient():
    """L12: on the two causal rows of L1."""
    args = next(check["args"] for name, check in CHECKS if name.startswith("L1."))
    args = {name: argument(name, value) for name, value in args.items()}

    loss = sfa.indexer_kl(**args).sum()

    assert unreached(loss, args["q_THE"], args["kv_SE"])
    assert all(g.any() for g in gradients(loss, args["q_TJI"], args["k_SI"], args["w_TJ"]))


# ---- one property above all ------------------------------------------------------------------------------------------


class RandomBatch:
    """A random ragged batch in one of three layouts, beside the plain facts that it was made from.

    ``tokens`` lists request and position of every query, (-1, -1) for padding; ``keys`` and ``index_keys`` hold every
    request's keys in order; ``pool`` and ``index_pool`` are what the functions are given, NaN where no key stands.
    """

    def __init__(self, layout: str, *, key_width: int, index_width: int):
        new = torch.randint(0, 5, (4,)).tolist()
        new[0] += 1
        context = [0] * 4 if layout == "packed" else torch.randint(0, 8, (4,)).tolist()
        total = [n + c for n, c in zip(new, context, strict=True)]
        padding = int(torch.randint(1, 5, ()))  # request 4 does not exist: sometimes there is none
        if padding < 4:
            new[padding], total[padding] = 2, 0
        self.tokens = [
            (b, s - n + i) if s > 0 else (-1, -1)
            for b, (n, s) in enumerate(zip(new, total, strict=True))
            for i in range(n)
        ]
        self.keys = [torch.randn(s, key_width, dtype=torch.float64) for s in total]
        self.index_keys = [torch.randn(s, index_width, dtype=torch.float64) for s in total]
        if layout == "paged":
            table_BU = torch.randperm(4 * 5)[: 4 * 4].reshape(4, 4).to(torch.int32)
            self.batch = sfa.Batch.from_lengths(new, total, block_table=table_BU, block_size=3)
            places = [[int(table_BU[b, p // 3]) * 3 + p % 3 for p in range(s)] for b, s in enumerate(total)]
            rows = 20 * 3
        else:
            self.batch = sfa.Batch.from_lengths(new, total)
            first = [sum(max(n, s) for n, s in zip(new[:b], total[:b], strict=True)) for b in range(4)]
            places = [[first[b] + p for p in range(s)] for b, s in enumerate(total)]
            rows = sum(map(max, new, total))
        self.pool = torch.full((rows, key_width), torch.nan, dtype=torch.float64)
        self.index_pool = torch.full((rows, index_width), torch.nan, dtype=torch.float64)
        for b, place in enumerate(places):
            self.pool[place], self.index_pool[place] = self.keys[b], self.index_keys[b]


@pytest.mark.parametrize("layout", ["packed", "context", "paged"])
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sparse_attention_equals_dense_attention_under_what_the_selection_spells_out(implementation, heads, layout):
    """X1: with k at least the number of visible keys that is dense attention; with fewer, a mask on it."""
    given = {"scale": 0.3, "value_dim": 6, "implementation": implementation}
    for _ in range(3):
        drawn = RandomBatch(layout, key_width=9, index_width=8)
        batch, count = drawn.batch, len(drawn.tokens)
        q_THE = torch.randn(count, heads, 9, dtype=torch.float64)
        q_TJI = torch.randn(count, 3, 8, dtype=torch.float64)
        w_TJ = torch.randn(count, 3, dtype=torch.float64)
        ranges = batch.start_T, batch.end_T
        dense = sfa.dense_attention(q_THE, drawn.pool, *ranges, **given, row_S=batch.row_S)

        for k in (1, 3, 16):
            topk_TK = sfa.lightning_indexer(
                q_TJI, drawn.index_pool, w_TJ, *ranges, k=k, row_S=batch.row_S, implementation=implementation
            )
            row_TK = topk_TK if batch.row_S is None else sfa.map_selection(topk_TK, batch.row_S)
            sparse = sfa.sparse_attention(q_THE, drawn.pool, row_TK, **given)

            for t, ((b, p), chosen) in enumerate(
                zip(drawn.tokens, sfa.local_selection(topk_TK, batch).tolist(), strict=True)
            ):
                keys_SE = drawn.keys[b][: p + 1]
                score_S = w_TJ[t] @ (q_TJI[t] @ drawn.index_keys[b][: p + 1].T).relu()
                want = best_rows(score_S, k)
                assert chosen == want + [-1] * (k - len(want))
                seen_1S = spelled_out(torch.tensor([chosen]), p + 1)
                out_1HL, lse_1H = masked_attention(q_THE[t, None], keys_SE, seen_1S, scale=0.3, value_dim=6)
                torch.testing.assert_close(sparse.out_THL[t, None], out_1HL, atol=1e-12, rtol=0)
                torch.testing.assert_close(sparse.lse_TH[t, None], lse_1H, atol=1e-12, rtol=0)
            if k == 16:
                torch.testing.assert_close(tuple(sparse), tuple(dense), atol=1e-12, rtol=0)


@pytest.mark.parametrize("k", [3, 16])
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sfa_layer_over_a_cache_equals_dense_attention_under_its_selection(implementation, heads, k):
    """X1: packed requests, prefill and two further steps over pages in random order."""
    config = replace(sfa.TINY, num_attention_heads=heads, index_topk=k)
    params = sfa.init_params(config, dtype=torch.float64)
    steps = [[4, 1, 6], [3, 2, 0], [1, 1, 5]]
    lengths = [sum(step[b] for step in steps) for b in range(3)]
    x = [torch.randn(n, config.hidden_size, dtype=torch.float64) for n in lengths]
    table_BU = torch.randperm(14)[:12].reshape(3, 4).to(torch.int32)
    cache = sfa.init_cache(config, num_blocks=14, block_size=3, dtype=torch.float64)

    y: list[list[Tensor]] = [[], [], []]
    selected: list[list[Tensor]] = [[], [], []]
    batch, done = sfa.Batch.from_lengths(steps[0], block_table=table_BU, block_size=3), [0, 0, 0]
    for i, step in enumerate(steps):
        batch = batch if i == 0 else batch.next(step)
        x_TD = torch.cat([x[b][done[b] : done[b] + n] for b, n in enumerate(step)])
        y_TD, selection_TK, cache = sfa.sfa_layer(
            params, x_TD, batch, config=config, cache=cache, implementation=implementation
        )
        for b, (rows, chosen) in enumerate(zip(y_TD.split(step), selection_TK.split(step), strict=True)):
            y[b].append(rows)
            selected[b].append(chosen)
            done[b] += step[b]

    for b, n in enumerate(lengths):
        position_TK = torch.cat(selected[b])
        want = [list(range(t + 1)) if t < k else None for t in range(n)]
        for chosen, everything in zip(position_TK.tolist(), want, strict=True):
            used = [p for p in chosen if p >= 0]
            assert used == everything if everything is not None else len(set(used)) == k
        want_TD = packed_layer_output(params, x[b], [n], position_TK, config=config)
        torch.testing.assert_close(torch.cat(y[b]), want_TD, atol=1e-10, rtol=0)
