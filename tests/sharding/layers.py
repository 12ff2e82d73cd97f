"""Builders for tests of sharded layers: batches, one rank's results and gradients, the layer on simulated ranks."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
from sfa_functional.params import named_fields
from sharding import (
    MeshShape,
    P,
    Rules,
    TokenSplit,
    context_parallel_layer,
    param_specs,
    shard_flat,
    shard_map,
    simulated_mesh,
    split_tokens,
)

CONFIG = replace(sfa.TINY, num_attention_heads=16, index_topk=5, indexer_types=("full", "shared"))
BLOCK = 4
RANKS = (1, 2, 3, 4, 7, 8, 16)
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced", "own")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


class Requests(NamedTuple):
    """New and total lengths of the requests of a batch, and whether they live in pages."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...] | None = None
    paged: bool = False


BATCHES = {
    "ragged": Requests((13, 3, 7)),
    "single": Requests((64,)),
    "few": Requests((2,)),
    "context": Requests((5, 0, 3), (15, 0, 11), True),
    "decode": Requests((1, 1, 1), (9, 17, 3), True),
    "mixed": Requests((1, 6, 1, 9), (12, 6, 4, 20), True),
    "padded": Requests((9, 3, 8), (9, 0, 8)),
    "padded_pages": Requests((4, 2, 3, 1), (11, 0, 9, 0), True),
    "none": Requests((0,)),
    "none_pages": Requests((0, 0), (6, 0), True),
}


class Problem(NamedTuple):
    """What a layer is given. Shared between tests: not to be written to."""

    requests: Requests
    batch: sfa.Batch
    params: sfa.LayerParams
    x_TD: torch.Tensor
    cache: sfa.JointCache | sfa.SplitCache | None


class Result(NamedTuple):
    """What a layer returns in the batch's order, the gradients of `loss` by name, the rows in the order of ranks."""

    output: sfa.LayerOutput
    gradients: dict[str, torch.Tensor]
    rows: sfa.LayerOutput


def scattered_table(seq_lens: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Give every request its pages in a scrambled order, out of two more than are needed."""
    table_BU = sfa.allocate_blocks(list(seq_lens), BLOCK)
    page_M = torch.randperm(int(table_BU.max()) + 3, generator=generator).to(torch.int32)
    return torch.where(table_BU >= 0, page_M[table_BU.clamp(min=0)], -1)


@functools.cache
def problem(name: str, dtype: torch.dtype = torch.float64, *, pool: str = "joint", layer: int = 0) -> Problem:
    """Build one of `BATCHES` with weights, hidden states and a pool of random pages, the same every time."""
    generator = torch.Generator().manual_seed(1)
    requests, cache, table = BATCHES[name], None, {}
    if requests.paged:
        table = {"block_table": scattered_table(requests.seq_lens, generator), "block_size": BLOCK}
        blocks = int(table["block_table"].max()) + 3
        cache = sfa.init_cache(CONFIG, num_blocks=blocks, block_size=BLOCK, dtype=dtype, layout=pool, layer=layer)
        cache = tree_map(lambda x: drawn(x.shape, dtype, 2), cache)
    batch = sfa.Batch.from_lengths(requests.query_lens, requests.seq_lens, **table)
    params = sfa.init_params(CONFIG, dtype=dtype, layer=layer)
    x_TD = torch.randn(sum(requests.query_lens), CONFIG.hidden_size, generator=generator).to(dtype)
    return Problem(requests, batch, params, x_TD, cache)


def make_split(requests: Requests, ranks: int, layout: str, *, spare: int = 0) -> TokenSplit:
    """Deal a batch's tokens out; "own" is a random owner for each, with a rank that has none."""
    if layout == "own":
        tokens, holders = sum(requests.query_lens), torch.tensor([r for r in range(ranks) if r != ranks // 2] or [0])
        place_T = torch.randint(len(holders), (tokens,), generator=torch.Generator().manual_seed(tokens))
        deal = functools.partial(TokenSplit.from_owner, holders[place_T], ranks)
    else:
        deal = functools.partial(split_tokens, requests.query_lens, ranks, layout=layout, seq_lens=requests.seq_lens)
    return deal(rows=deal().rows + spare) if spare else deal()


def drawn(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw normal numbers that depend on the seed alone."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss(y_TD: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """Weigh every number that a layer returns with one of its own, so that no two gradients can be exchanged."""
    tensors = [x for x in tree_leaves((y_TD, cache)) if x is not None]
    return torch.stack([(x * drawn(x.shape, x.dtype, 7 + i)).sum() for i, x in enumerate(tensors)]).sum()


def named_leaves(params: sfa.LayerParams, x_TD: torch.Tensor, cache: Any = None) -> dict[str, torch.Tensor]:
    """Name every tensor that a layer's results may depend on."""
    pools = [x for x in tree_leaves(cache) if x is not None]
    return dict(named_fields(params)) | {"x": x_TD} | {f"pool {i}": x for i, x in enumerate(pools)}


def with_gradients(
    run: Callable[..., sfa.LayerOutput],
    params: sfa.LayerParams,
    x_TD: torch.Tensor,
    cache: Any,
    *,
    split: TokenSplit | None = None,
    way: str = "backward",
) -> Result:
    """Run ``run(params, x, cache)`` and take the gradients of `loss`, by ``backward()`` or by ``torch.func.grad``."""

    def value(params: Any, x_TD: torch.Tensor, *cache: Any) -> tuple[torch.Tensor, Any]:
        out = run(params, x_TD, *(cache or (None,)))
        y_TD = out.y_TD if split is None else split.gather(out.y_TD)
        return loss(y_TD, out.cache), out[: 2 + len(cache)]  # func.grad takes no None beside the value

    arguments = (params, x_TD) if cache is None else (params, x_TD, cache)
    if way == "func.grad":
        found, rows = torch.func.grad(value, argnums=tuple(range(len(arguments))), has_aux=True)(*arguments)
    else:
        arguments = tree_map(lambda x: x.detach().requires_grad_(), arguments)
        total, rows = value(*arguments)
        total.backward()
        found = tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, arguments)
        rows = tree_map(torch.Tensor.detach, rows)
    out = sfa.LayerOutput(*rows, *([None] if cache is None else []))
    return Result(out if split is None else in_order(split, out), named_leaves(*found), out)


def one_rank(given: Problem, **named: Any) -> Result:
    """Run `sfa_layer` on one rank."""
    run = functools.partial(sfa.sfa_layer, config=CONFIG, **named)
    return with_gradients(lambda params, x_TD, cache: run(params, x_TD, given.batch, cache=cache), *given[2:])


@functools.cache
def one_rank_of(name: str, dtype: torch.dtype, pool: str = "joint") -> Result:
    """Run `sfa_layer` on one rank, once for all tests that ask."""
    return one_rank(problem(name, dtype, pool=pool))


def on_ranks(
    batch: sfa.Batch,
    split: TokenSplit,
    *,
    layer: int = 0,
    weights: str = "local",
    record: list[Any] | None = None,
    selection_TK: torch.Tensor | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    spread: Callable[[torch.Tensor], torch.Tensor] | None = None,
    wrap: Callable[[Any], Any] = lambda comm: comm,
    **named: Any,
) -> Callable[..., sfa.LayerOutput]:
    """Return a function of weights, hidden states and cache that runs the layer on as many ranks as the split has.

    Hidden states, selection and rope are in the batch's order, results in that of ranks. ``spread`` puts hidden states
    into the order of ranks instead of ``split.scatter``, ``wrap`` changes the collectives.
    """
    shape = MeshShape(cp=split.num_ranks)

    def body(comm: Any, params: Any, x_tD: Any, cache: Any, selection: Any, rope: Any) -> sfa.LayerOutput:
        given = {"config": CONFIG, "split": split, "cache": cache, "weights": weights, "rope": rope} | named
        return context_parallel_layer(params, x_tD, batch, wrap(comm["cp"]), selection=selection, **given)

    specs = param_specs(CONFIG, Rules(tokens="cp"), layer=layer, weights=weights, mesh_shape=shape)
    sharded = shard_map(
        body,
        simulated_mesh(shape, record=record),
        in_specs=(specs, P("cp"), P(), P("cp"), P("cp")),
        out_specs=sfa.LayerOutput(P("cp"), P("cp"), P()),
    )
    selection = None if selection_TK is None else split.scatter(selection_TK, fill=-1)
    local_rope = None if rope is None else tuple(split.scatter(x) for x in rope)

    def run(params: sfa.LayerParams, x_TD: torch.Tensor, cache: Any) -> sfa.LayerOutput:
        params = shard_flat(params, split.num_ranks) if weights == "gathered" else params
        return sharded(params, (spread or split.scatter)(x_TD), cache, selection, local_rope)

    return run


def in_order(split: TokenSplit, out: sfa.LayerOutput) -> sfa.LayerOutput:
    """Put all ranks' rows back into the batch's order."""
    return out._replace(y_TD=split.gather(out.y_TD), selection_TK=split.gather(out.selection_TK))


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference, as a part of the largest value wanted."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if want.numel() == 0 or torch.equal(got, want):
        return 0.0
    return float(((got.detach() - want).abs().amax() / want.detach().abs().amax()).nan_to_num(nan=torch.inf))


def assert_near(got: Result, want: Result, tolerance: float) -> None:
    """Refuse outputs, caches or gradients that are not finite, or further apart than a part of the largest value."""
    pairs = {"y": (got.output.y_TD, want.output.y_TD)}
    caches = (tree_leaves(x.output.cache) for x in (got, want))
    pairs |= {f"cache {i}": pair for i, pair in enumerate(zip(*caches, strict=True)) if pair[0] is not None}
    assert got.gradients.keys() == want.gradients.keys()
    pairs |= {f"gradient of {name}": (x, want.gradients[name]) for name, x in got.gradients.items()}
    for name, (x, y) in pairs.items():
        assert x.isfinite().all(), name
        assert apart(x, y) <= tolerance, name


def index_scores_of(given: Problem) -> torch.Tensor:
    """Return the score of every key row for every query, as one rank computes them."""
    seen = []

    def select(*, q_TJI: Any, k_SI: Any, w_TJ: Any, row_S: Any, start_T: Any, k: int, **_: Any) -> torch.Tensor:
        seen.append(sfa.index_scores(q_TJI, k_SI if row_S is None else sfa.fetch_rows(k_SI, row_S), w_TJ))
        return torch.full((start_T.shape[0], k), -1, dtype=torch.int32)

    sfa.sfa_layer(given.params, given.x_TD, given.batch, config=CONFIG, cache=given.cache, select=select)
    return seen[0]


def misplaced(got_TK: torch.Tensor, want_TK: torch.Tensor, score_TS: torch.Tensor, *, slack: float) -> list[int]:
    """List the queries whose selections of key rows differ as sets by more than keys of nearly equal score.

    Keys that only one of them has must score within ``slack`` of each other, as a part of the query's largest score.
    """
    bad = []
    for t, (got, want) in enumerate(zip(got_TK.tolist(), want_TK.tolist(), strict=True)):
        only = sorted({s for s in got if s >= 0} ^ {s for s in want if s >= 0})
        scores = score_TS[t, only]
        same_count = sum(s >= 0 for s in got) == sum(s >= 0 for s in want)
        if only and not (same_count and scores.max() - scores.min() <= slack * score_TS[t].abs().max()):
            bad.append(t)
    return bad


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Choose cases so that any two values of different factors that may go together meet in one of them.

    Greedy: each case starts with the first pair that is still missing; each further factor takes the value that
    meets most pairs still missing, any of equals.

    Args:
        factors: name -> values.
        allowed: says of some of a case's values whether they may go together.

    Returns:
        The cases, each with a value for every factor.
    """
    missing, dice = set(_pairs(factors, allowed)), random.Random(0)
    cases: list[dict[str, Any]] = []
    for pair in _pairs(factors, allowed):
        if pair not in missing:
            continue
        case = dict(pair)
        for name in (name for name in factors if name not in dict(pair)):
            gains = [
                (sum(_pair(name, value, *item) in missing for item in case.items()), dice.random(), i)
                for i, value in enumerate(factors[name])
                if allowed(case | {name: value})
            ]
            case[name] = factors[name][max(gains)[-1]]
        missing -= {_pair(*one, *two) for one, two in itertools.combinations(case.items(), 2)}
        cases.append({name: case[name] for name in factors})
    return cases


def product(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """List all cases that are allowed."""
    cases = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if allowed(case)]


def _pairs(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]) -> Iterator[frozenset]:
    for one, two in itertools.combinations(factors, 2):
        for a, b in itertools.product(factors[one], factors[two]):
            if allowed({one: a, two: b}):
                yield _pair(one, a, two, b)


def _pair(one: str, a: Any, two: str, b: Any) -> frozenset:
    return frozenset({(one, a), (two, b)})
