"""What a layout costs, rank by rank: operations, bytes that move, bytes that stay, and seconds on a stated machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from sfa_functional import SFAConfig, cache_bytes
from sfa_functional.packed import CacheFormat
from sfa_functional.params import param_shapes
from sfa_functional.precision import require, require_lengths, wide

from .costs import FlopParts, Pairs, computed_pairs, flop_parts, needed_pairs, visible_keys
from .layer_owners import layer_owners
from .machine import EXAMPLE_MACHINE, Machine, RankLayer, layer_seconds
from .mesh import MeshShape
from .ring_attention import RingOnPaper, pairs_between_ranks, ring_layer_seconds
from .rules import LARGE_FIELDS, Rules
from .tensor_parallel import heads_of_rank
from .token_ranges import Layout, TokenSplit, split_tokens
from .traffic import Traffic, WeightStrategy, collective_traffic, layer_bytes, token_axis_traffic

TILE = 16
"""Queries whose keys are scored together where nothing else is said."""


class Resident(NamedTuple):
    """Bytes that one rank holds."""

    weights: int  # of all layers, as the strategy keeps them
    ring: int  # slots through which layers pass
    cache: int  # pages of all layers, a copy on each rank
    workspace: int  # tensors that a layer keeps while it attends

    @property
    def total(self) -> int:
        """All together."""
        return sum(self)


class LayerEstimate(NamedTuple):
    """One rank in one layer."""

    flops: FlopParts  # what the tokens need, the model of `token_flops`
    computed: FlopParts  # what kernels run for it: padding rows, tiles and unused entries included
    traffic: tuple[Traffic, ...]  # in the order in which the collectives start
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """One rank in a pass over all layers."""

    rank: int
    tokens: int
    rows: int  # tokens and padding
    layers: tuple[LayerEstimate, ...]
    resident: Resident

    @property
    def flops(self) -> FlopParts:
        """Operations of all layers, by part."""
        return FlopParts(*(sum(part) for part in zip(*(layer.flops for layer in self.layers), strict=True)))

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in all layers."""
        return sum(moved.bytes_sent for layer in self.layers for moved in layer.traffic)

    @property
    def bytes_received(self) -> int:
        """Bytes received in all layers."""
        return sum(moved.bytes_received for layer in self.layers for moved in layer.traffic)

    @property
    def sent_by_collective(self) -> dict[str, int]:
        """Bytes sent in all layers, by collective."""
        sent: dict[str, int] = {}
        for layer in self.layers:
            for moved in layer.traffic:
                sent[moved.collective] = sent.get(moved.collective, 0) + moved.bytes_sent
        return sent

    @property
    def seconds(self) -> float:
        """Time at work or waiting for a collective, all layers."""
        return sum(layer.seconds for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A layout's costs, from `estimate`."""

    layout: str
    ranks: tuple[RankEstimate, ...]
    seconds: float  # of a pass, every layer as long as its last rank takes
    machine: Machine
    ring: RingOnPaper | None  # the same tokens with ring attention; None where tokens are not dealt out

    @property
    def max_over_mean(self) -> float:
        """Operations of the rank that has most over the mean, 1 where there are none."""
        totals = [rank.flops.total for rank in self.ranks]
        return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0

    @property
    def flops(self) -> int:
        """Operations of the rank that has most."""
        return max(rank.flops.total for rank in self.ranks)

    @property
    def bytes_sent(self) -> int:
        """Bytes that the rank sends that sends most."""
        return max(rank.bytes_sent for rank in self.ranks)

    @property
    def bytes_resident(self) -> int:
        """Bytes that the rank holds that holds most."""
        return max(rank.resident.total for rank in self.ranks)


def estimate(
    config: SFAConfig,
    lengths: Sequence[int] | Tensor,
    mesh_shape: MeshShape,
    *,
    layout: Layout | None = None,
    split: TokenSplit | None = None,
    rules: Rules | None = None,
    weights: WeightStrategy = "replicated",
    prefetch: int = 1,
    machine: Machine | None = None,
    seq_lens: Sequence[int] | Tensor | None = None,
    block_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_format: CacheFormat | None = None,
    tile: int | None = TILE,
) -> Estimate:
    """Count what one forward pass of a model's attention layers costs every rank of a mesh, without running it.

    Operations are those of `token_flops`, summed over a rank's tokens. Bytes are those that the collectives of
    `context_parallel_layer`, `tensor_parallel_layer` and `weights.from_owners` move, exactly. Seconds are a model,
    `layer_seconds`, on a machine that is stated.

    Args:
        config: the model's sizes and its layers.
        lengths: new tokens of each request.
        mesh_shape: the ranks.
        layout: how tokens are dealt out, a word for `split_tokens`; None is "contiguous".
        split: a layout of your own, in place of ``layout``.
        rules: which axis splits tokens and which heads; None: the mesh's only axis splits tokens.
        weights: "replicated": every rank keeps all layers. "layer-sharded": each keeps its own (`layer_owners`) and
            a ring of ``min(prefetch + 1, n)`` slots that broadcasts fill, one per layer and pass. "gathered" and
            "exchanged": as `context_parallel_layer` takes them, 1/N of the large matrices (of ``o_proj``) in each
            layer.
        prefetch: layers that a fetch starts ahead, for "layer-sharded".
        machine: rates for the seconds; None is `EXAMPLE_MACHINE`.
        seq_lens: context + new tokens of each request; context lies in a cache that every rank has whole.
        block_size: rows of a cache's page, for a cache that holds every request; None is no cache.
        dtype: of activations, matrices and cache; norm weights are float32.
        cache_format: of latents and index keys in the cache, where it is another: `sfa_functional.cache_bytes`.
        tile: queries of one request that are scored together, against all keys that any of them sees; None: each
            row against all key rows, as the reference does. Enters ``computed`` alone.

    Returns:
        `Estimate`: for every rank and layer operations by part, bytes sent and received by collective, seconds; for
        every rank the bytes of weights, ring, cache and workspace.

    Raises:
        ValueError: a layout and a split, or a split of other tokens or ranks; an axis that no rule names, rules that
            split neither tokens nor heads, or indexer heads; ranks that don't divide the heads; weights that are
            not whole where heads are split; context without a block size, or a count out of range.

    Cost: vector operations on T tokens for every rank.
    Not counted: norms, rope, softmax; sums of scores over indexer heads (``computed`` has them); what a function of
        the layer makes and lets go (a CPU held twice the workspace at its peak); what `weights.from_owners` tells
        every rank once, before the first pass; the backward pass; caches dealt out over ranks.
    Source: the FLOP model is `layer_flops`; a collective moves what `collective_traffic` says.
    """
    counts = require_lengths("estimate", lengths=lengths)
    total = counts if seq_lens is None else require_lengths("estimate", seq_lens=seq_lens)
    visible_T = visible_keys(counts, total)
    rules = _checked_rules(mesh_shape, rules)
    _check_numbers(counts, total, prefetch, block_size, tile, machine)
    ranks = 1 if rules.tokens is None else mesh_shape.axis_size(rules.tokens)
    _check_weights(config, rules, weights, ranks)
    require(layout is None or split is None, "estimate", "layout= and split= exclude each other", "both")
    name = "tensor parallel" if rules.tokens is None else "own" if split is not None else layout or "contiguous"
    if split is None:
        split = split_tokens(counts, ranks, layout=layout or "contiguous", seq_lens=total, config=config)
    require(split.num_ranks == ranks, "estimate", f"split must be for {ranks} ranks", split.num_ranks)
    require(split.num_tokens == sum(counts), "estimate", f"split must be of {sum(counts)} tokens", split.num_tokens)

    index_N = [row[row >= 0] for row in split.index_NC.cpu()]
    request_T = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    k, heads_size = config.index_topk, 1 if rules.heads is None else mesh_shape.axis_size(rules.heads)
    sizes = {"rows": split.rows, "key_rows": _key_rows(counts, total, block_size), "k": k}
    problem = _Problem(
        config=config,
        local=heads_of_rank(config, heads_size),
        rules=rules,
        ranks=ranks,
        heads_size=heads_size,
        split=split,
        weights=weights,
        prefetch=prefetch,
        dtype=dtype,
        machine=EXAMPLE_MACHINE if machine is None else machine,
        cache_format=cache_format,
        cache_rows=0 if block_size is None else sum(-(-s // block_size) for s in total) * block_size,
        needed=[needed_pairs(visible_T[index], k=k) for index in index_N],
        computed=[computed_pairs(visible_T[index], request_T[index], tile=tile, **sizes) for index in index_N],
    )
    owners = layer_owners(config.num_layers, ranks)
    steps = [
        (kind == "full", owner if weights == "layer-sharded" else 0)
        for kind, owner in zip(config.indexer_types, owners, strict=True)
    ]
    layers = {step: _layer(problem, *step) for step in dict.fromkeys(steps)}
    resident = [_resident(problem, place) for place in range(ranks)]
    places = [0 if rules.tokens is None else mesh_shape.axis_index(r, rules.tokens) for r in range(mesh_shape.size)]
    result = Estimate(
        layout=name,
        ranks=tuple(
            RankEstimate(
                rank=rank,
                tokens=problem.needed[place].rows,
                rows=split.rows,
                layers=tuple(layers[step].ranks[place] for step in steps),
                resident=resident[place],
            )
            for rank, place in enumerate(places)
        ),
        seconds=sum(max(rank.seconds for rank in layers[step].ranks) for step in steps),
        machine=problem.machine,
        ring=None,
    )
    if rules.tokens is None:
        return result
    pairs = pairs_between_ranks(split.inverse_T.cpu() // max(1, split.rows), visible_T, counts, ranks)
    return replace(result, ring=_ring(problem, pairs, result, [layers[step].parts for step in steps]))


def _checked_rules(shape: MeshShape, rules: Rules | None) -> Rules:
    if rules is None:
        rule = f"rules must be given for a mesh of {len(shape.names)} axes"
        require(len(shape.names) == 1, "estimate", rule, rules)
        return Rules(tokens=shape.names[0])
    require(rules.index_heads is None, "estimate", "no layer splits indexer heads: index_heads must be None", rules)
    named = {axis for axis in (rules.tokens, rules.heads) if axis is not None}
    require(len(named) > 0, "estimate", "rules must split tokens or heads", rules)
    require(named == set(shape.names), "estimate", f"rules must name the axes of {shape}, each of them", rules)
    return rules


def _check_numbers(
    counts: list[int],
    total: list[int],
    prefetch: int,
    block_size: int | None,
    tile: int | None,
    machine: Machine | None,
) -> None:
    for name, value, least in (("prefetch", prefetch, 0), ("block_size", block_size, 1), ("tile", tile, 1)):
        fits = (value is None and name != "prefetch") or (type(value) is int and value >= least)
        require(fits, "estimate", f"{name} must be an integer >= {least}", repr(value))
    for b, (n, s) in enumerate(zip(counts, total, strict=True)):
        rule = f"context of request {b} needs a cache: block_size must be given"
        require(s <= n or block_size is not None, "estimate", rule, block_size)
    require(machine is None or isinstance(machine, Machine), "estimate", "machine must be a Machine", repr(machine))


def _check_weights(config: SFAConfig, rules: Rules, weights: WeightStrategy, ranks: int) -> None:
    rule = f"weights must be of {', '.join(map(repr, get_args(WeightStrategy)))}"
    require(weights in get_args(WeightStrategy), "estimate", rule, repr(weights))
    whole = weights == "replicated" or (rules.tokens is not None and rules.heads is None)
    require(whole, "estimate", f"weights={weights!r} needs rules that split tokens and no heads", rules)
    heads = config.num_attention_heads
    divides = weights != "exchanged" or heads % ranks == 0
    require(divides, "estimate", f"weights='exchanged' needs ranks that divide {heads} heads", ranks)


def _key_rows(counts: list[int], total: list[int], block_size: int | None) -> int:
    """Return the rows of keys that a batch numbers, those of unused pages included."""
    if block_size is None:
        return sum(map(max, counts, total))
    return len(total) * max([0, *(-(-s // block_size) for s in total)]) * block_size


@dataclass(frozen=True, kw_only=True, eq=False)
class _Problem:
    """What `estimate` was asked, checked; lists have an entry for every place on the tokens' axis."""

    config: SFAConfig
    local: SFAConfig  # with the heads of one rank
    rules: Rules
    ranks: int  # of the tokens' axis
    heads_size: int
    split: TokenSplit
    weights: WeightStrategy
    prefetch: int
    dtype: torch.dtype
    machine: Machine
    cache_format: CacheFormat | None
    cache_rows: int
    needed: list[Pairs]
    computed: list[Pairs]


class _Layer(NamedTuple):
    """One layer, or all that are like it, on every place of the tokens' axis."""

    parts: list[RankLayer]
    ranks: list[LayerEstimate]


def _layer(problem: _Problem, indexer: bool, owner: int) -> _Layer:
    local, parts = problem.local, []
    key_width = problem.config.key_width + (problem.config.index_head_dim if indexer else 0)
    for place in range(problem.ranks):
        moved = []
        if problem.rules.tokens is not None:
            moved = token_axis_traffic(
                local,
                axis=problem.rules.tokens,
                size=problem.ranks,
                rows=problem.split.rows,
                indexer=indexer,
                weights=problem.weights,
                dtype=problem.dtype,
                is_owner=owner == place,
            )
        if problem.rules.heads is not None:
            count, size = problem.split.rows * local.hidden_size, problem.heads_size
            named = ("heads", "all_reduce", problem.rules.heads, size, count, problem.dtype.itemsize)
            moved.append(collective_traffic(*named))
        needed = problem.needed[place]
        keys = needed.rows * 2 * local.hidden_size * key_width
        parts.append(RankLayer(flop_parts(local, needed, indexer=indexer), keys, tuple(moved)))
    seconds = layer_seconds(parts, problem.machine, prefetch=problem.prefetch)
    computed = [flop_parts(local, pairs, indexer=indexer, weighted_sum=True) for pairs in problem.computed]
    rows = zip(parts, computed, seconds, strict=True)
    return _Layer(parts, [LayerEstimate(part.flops, ran, part.traffic, time) for part, ran, time in rows])


def _resident(problem: _Problem, place: int) -> Resident:
    """Add up what one rank holds. Workspace: the tensors that the layer keeps while it attends, tiles left out."""
    config, local, dtype, size = problem.config, problem.local, problem.dtype, problem.ranks
    aligned = problem.weights == "layer-sharded"
    size_of = {}  # by kind of layer: a model has two, and many layers
    for kind in dict.fromkeys(config.indexer_types):
        shapes = dict(param_shapes(local, layer=config.indexer_types.index(kind)))
        if problem.weights == "gathered":
            shapes |= {name: (-(-math.prod(shapes[name]) // size),) for name in LARGE_FIELDS}
        if problem.weights == "exchanged":
            shapes["o_proj"] = (shapes["o_proj"][0], shapes["o_proj"][1] // size)
        size_of[kind] = layer_bytes(shapes, dtype, aligned=aligned)
    owners = layer_owners(config.num_layers, size)
    kept = zip(config.indexer_types, owners, strict=True)
    weights = sum(size_of[kind] for kind, owner in kept if owner == place or not aligned)
    slots = max(size_of.values(), default=0) if aligned else 0
    if problem.cache_format is None:
        indexers = config.indexer_types.count("full")
        row = (config.num_layers * config.key_width + indexers * config.index_head_dim) * dtype.itemsize
    else:
        stored = problem.cache_format
        row = sum(sum(cache_bytes(config, kv=stored, index=stored, layer=layer)) for layer in range(config.num_layers))
    return Resident(
        weights=weights,
        ring=slots * min(problem.prefetch + 1, config.num_layers),
        cache=problem.cache_rows * row,
        workspace=_workspace(problem),
    )


def _workspace(problem: _Problem) -> int:
    """Count the bytes of a full layer's tensors while it attends, by name.

    What its functions make and let go comes on top: on a CPU, in float32, a layer held twice as much at its peak.
    """
    local, rows, size, item = problem.local, problem.split.rows, problem.ranks, problem.dtype.itemsize
    heads, wide_item = local.num_attention_heads, wide(problem.dtype).itemsize
    values = 2 * rows * local.hidden_size  # x and y
    values += rows * (heads * local.key_width + heads * local.kv_lora_rank)  # queries and results
    values += rows * (local.q_lora_rank + local.index_n_heads * local.index_head_dim)  # what the indexer's come from
    values += rows * (local.key_width + local.index_head_dim)
    if problem.rules.tokens is not None:
        values += _gathered_keys(problem)
    if problem.weights == "gathered":
        shapes = param_shapes(local)
        values += sum(math.prod(shapes[name]) for name in LARGE_FIELDS)
    if problem.weights == "exchanged":
        values += size * rows * local.hidden_size + 2 * rows * heads * local.v_head_dim
    return values * item + rows * (local.index_n_heads * wide_item + local.index_topk * 4)


def _gathered_keys(problem: _Problem) -> int:
    """Count the values of all ranks' keys, as they arrive and in global order."""
    width = problem.config.key_width + problem.config.index_head_dim
    return (problem.ranks * problem.split.rows + problem.split.num_tokens) * width


def _ring(problem: _Problem, pairs: Tensor, gather: Estimate, layers: list[list[RankLayer]]) -> RingOnPaper:
    """Put ring attention beside the gather: the same bytes, two blocks of keys in place of all, more steps."""
    config, item, rows = problem.config, problem.dtype.itemsize, problem.split.rows
    seconds: dict[int, float] = {}
    for parts in layers:
        if id(parts) not in seconds:
            blocks = (rows * config.index_head_dim * item, rows * config.key_width * item)
            seconds[id(parts)] = ring_layer_seconds(parts, pairs, blocks, problem.machine)
    kept = _gathered_keys(problem) - 2 * rows * (config.key_width + config.index_head_dim)
    return RingOnPaper(
        seconds=sum(seconds[id(parts)] for parts in layers),
        bytes_sent=gather.bytes_sent,
        bytes_resident=gather.bytes_resident - kept * item,
    )
