"""`estimate` beside what simulated ranks really send and compute, the published imbalances, and sizes by hand."""

import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sfa_functional as sfa
import sharding
import weights
from sfa_functional.params import named_fields
from sharding import MeshShape, P, Rules, estimate, param_specs, shard_map, simulated_mesh, split_tokens
from tests.sharding.layers import (
    BATCHES,
    BLOCK,
    CONFIG,
    LAYOUTS,
    RANKS,
    make_split,
    on_ranks,
    pairwise,
    problem,
    product,
)
from tests.sharding.products import ProductCounter
from tests.vectors import read_vectors
from weights.ring_buffer import layout_of, slot_bytes

PEERS = read_vectors("peers.json")["load_balance"]
MOE = PEERS["per_token_flop"]["moe_or_ffn_if_local"]
V32 = sfa.DEEPSEEK_V32
K64, K128 = 65536, 131072


def moved(estimated, phase_of_layers=slice(None)):
    """List what each rank sends, collective by collective, in order."""
    return {
        rank.rank: [(x.collective, x.bytes_sent) for layer in rank.layers[phase_of_layers] for x in layer.traffic]
        for rank in estimated.ranks
    }


def recorded(record, ranks, collectives=None):
    """List the same of a run."""
    kept = [x for x in record if x.phase == "forward" and (collectives is None or x.collective in collectives)]
    return {rank: [(x.collective, x.bytes_sent) for x in kept if x.rank == rank] for rank in range(ranks)}


def in_pages(requests):
    return {"seq_lens": requests.seq_lens, "block_size": BLOCK if requests.paged else None}


# ---- bytes -----------------------------------------------------------------------------------------------------------

FACTORS = {
    "name": tuple(BATCHES),
    "ranks": RANKS,
    "layout": LAYOUTS,
    "strategy": ("replicated", "gathered", "exchanged"),
    "dtype": (torch.float32, torch.float64, torch.bfloat16),
    "layer": (0, 1),
}


def _allowed(case):
    return case.get("strategy") != "exchanged" or case.get("ranks", 1) in (1, 2, 4, 8, 16)


CASES = (product if os.environ.get("SFA_ALL") else pairwise)(FACTORS, _allowed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_bytes_of_every_collective_are_those_that_simulated_ranks_send(case):
    """Layer 0 has an indexer, layer 1 is given a selection."""
    given, record = problem(case["name"], case["dtype"], layer=case["layer"]), []
    split = make_split(given.requests, case["ranks"], case["layout"])
    selection_TK = None
    if case["layer"] == 1:
        selection_TK = torch.full((split.num_tokens, 5), -1, dtype=torch.int32)
    local = "local" if case["strategy"] == "replicated" else case["strategy"]
    run = on_ranks(given.batch, split, layer=case["layer"], weights=local, record=record, selection_TK=selection_TK)
    run(given.params, given.x_TD, given.cache)

    got = estimate(
        CONFIG,
        given.requests.query_lens,
        MeshShape(cp=case["ranks"]),
        split=split,
        weights=case["strategy"],
        dtype=case["dtype"],
        **in_pages(given.requests),
    )

    assert moved(got, slice(case["layer"], case["layer"] + 1)) == recorded(record, case["ranks"])


@pytest.mark.parametrize(
    ("ranks", "prefetch", "dtype"),
    [
        (1, 1, torch.float32),
        (2, 0, torch.bfloat16),
        (2, 9, torch.float32),
        (3, 1, torch.bfloat16),
        (3, 3, torch.float32),
        (5, 2, torch.bfloat16),
    ],
)
def test_bytes_of_a_pass_through_a_ring_are_those_that_simulated_ranks_send(ranks, prefetch, dtype):
    config = replace(CONFIG, indexer_types=("full", "shared", "full", "shared"))
    layers = [sfa.init_params(config, layer=i, dtype=dtype) for i in range(4)]
    lengths, record = (13, 3, 7), []
    batch, split = sfa.Batch.from_lengths(lengths), split_tokens(lengths, ranks, layout="zigzag")
    x_TD = torch.randn(23, config.hidden_size).to(dtype)
    slots = []

    def body(comm, x_tD):
        local = weights.owned_layers(layers, comm["cp"].rank, ranks)
        ring = weights.open_ring(weights.from_owners(comm["cp"], local), prefetch=prefetch, passes=1)
        slots.append(ring.num_bytes)
        selection = None
        for i in range(4):
            params, ring = weights.take(ring, i)
            out = sharding.context_parallel_layer(
                params, x_tD, batch, comm["cp"], config=config, split=split, selection=selection
            )
            x_tD, selection = x_tD + out.y_TD, None if i % 2 else out.selection_TK
            ring = weights.start_next(ring)
        weights.close_ring(ring)
        return x_tD

    mesh = simulated_mesh(MeshShape(cp=ranks), record=record)
    with torch.no_grad():
        shard_map(body, mesh, in_specs=P("cp"), out_specs=P("cp"))(split.scatter(x_TD))
    got = estimate(
        config,
        lengths,
        MeshShape(cp=ranks),
        split=split,
        weights="layer-sharded",
        prefetch=prefetch,
        dtype=dtype,
    )

    for rank, sent in recorded(record, ranks).items():
        told, keys = 2, [x for x in sent if x[0] == "all_gather"]  # from_owners tells about layers in two gathers
        assert keys[told:] == [x for x in moved(got)[rank] if x[0] == "all_gather"]
        assert [x for x in sent if x[0] == "broadcast"] == [x for x in moved(got)[rank] if x[0] == "broadcast"]
        assert len(keys) == told + 4
    assert {rank.resident.ring for rank in got.ranks} == set(slots)
    aligned = [slot_bytes(layout_of(dict(named_fields(layer)))) for layer in layers]
    assert [rank.resident.weights for rank in got.ranks] == [sum(aligned[r::ranks]) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_bytes_of_dealt_out_heads_are_those_that_simulated_ranks_send(ranks):
    given, record = problem("ragged", torch.float32), []
    rules = Rules(heads="tp")
    run = shard_map(
        lambda comm, params, x: sharding.tensor_parallel_layer(params, x, given.batch, comm["tp"], config=CONFIG).y_TD,
        simulated_mesh(MeshShape(tp=ranks), record=record),
        in_specs=(param_specs(CONFIG, rules), P()),
        out_specs=P(),
    )
    run(given.params, given.x_TD)
    got = estimate(CONFIG, given.requests.query_lens, MeshShape(tp=ranks), rules=rules, dtype=torch.float32)
    assert moved(got, slice(0, 1)) == recorded(record, ranks)
    assert (got.layout, got.ring) == ("tensor parallel", None)


@pytest.mark.parametrize("axes", [{"cp": 2, "tp": 2}, {"tp": 4, "cp": 3}, {"cp": 1, "tp": 2}, {"cp": 3, "tp": 1}])
def test_bytes_of_dealt_out_tokens_and_heads_are_those_that_simulated_ranks_send(axes):
    given, record, shape = problem("ragged", torch.float32), [], MeshShape(**axes)
    split, rules = make_split(given.requests, axes["cp"], "own"), Rules(tokens="cp", heads="tp")
    run = shard_map(
        lambda comm, params, x: (
            sharding.context_parallel_layer(
                params, x, given.batch, comm["cp"], config=CONFIG, split=split, heads_comm=comm["tp"]
            ).y_TD
        ),
        simulated_mesh(shape, record=record),
        in_specs=(param_specs(CONFIG, rules), P("cp")),
        out_specs=P("cp"),
    )
    run(given.params, split.scatter(given.x_TD))
    lengths = given.requests.query_lens
    got = estimate(CONFIG, lengths, shape, split=split, rules=rules, dtype=torch.float32)
    assert moved(got, slice(0, 1)) == recorded(record, shape.size)
    tokens = [len(row[row >= 0]) for row in split.index_NC]
    assert [rank.tokens for rank in got.ranks] == [tokens[shape.axis_index(r, "cp")] for r in range(shape.size)]


@pytest.mark.parametrize("strategy", ["replicated", "layer-sharded", "gathered", "exchanged"])
def test_what_all_ranks_send_is_what_all_ranks_receive(strategy):
    config = replace(sfa.GLM_52, indexer_types=sfa.GLM_52.indexer_types[:8])
    got = estimate(config, [999, 5, 77], MeshShape(cp=16), layout="zigzag", weights=strategy)
    for i in range(8):
        for place in range(len(got.ranks[0].layers[i].traffic)):
            parts = [rank.layers[i].traffic[place] for rank in got.ranks]
            sent, received = sum(x.bytes_sent for x in parts), sum(x.bytes_received for x in parts)
            assert sent == received > 0
    assert got.bytes_sent == max(sum(rank.sent_by_collective.values()) for rank in got.ranks)


def test_the_gather_at_128K_moves_the_bytes_of_the_vectors():
    got = estimate(V32, [K128], MeshShape(cp=1), layout="contiguous")
    assert got.bytes_sent == 0
    got = estimate(replace(V32, indexer_types=("full",)), [K128], MeshShape(cp=16))
    everyones = got.ranks[0].bytes_sent // 15 * 16
    assert everyones == PEERS["gather_bytes_per_layer_at_128K"]["bf16_latent_and_bf16_index_key"]


# ---- operations ------------------------------------------------------------------------------------------------------


def computed(estimated, layer=0):
    """Return the operations of each rank's products: a selection has none."""
    parts = [rank.layers[layer].computed for rank in estimated.ranks]
    return [part.total - part.selection for part in parts]


def counted(given, split, counter, **named):
    """Run the layer with a counter in each rank's thread; return what it saw."""
    seen = {}

    def body(comm, params, x_tD, cache):
        with counter() as count:
            out = sharding.context_parallel_layer(
                params, x_tD, given.batch, comm["cp"], config=CONFIG, split=split, cache=cache, **named
            )
        seen[comm["cp"].rank] = count.flops if isinstance(count, ProductCounter) else count.get_total_flops()
        return out.y_TD

    mesh = simulated_mesh(MeshShape(cp=split.num_ranks))
    with torch.no_grad():
        run = shard_map(body, mesh, in_specs=(P(), P("cp"), P()), out_specs=P("cp"))
        run(given.params, split.scatter(given.x_TD), given.cache)
    return [seen[rank] for rank in range(split.num_ranks)]


def dispatcher():
    return FlopCounterMode(display=False)


@pytest.mark.parametrize("counter", [dispatcher, ProductCounter])
@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        ("ragged", 1, "contiguous"),
        ("ragged", 3, "striped"),
        ("single", 4, "zigzag"),
        ("single", 7, "own"),
        ("context", 2, "balanced"),
        ("mixed", 4, "contiguous"),
        ("padded", 3, "zigzag"),
        ("decode", 2, "striped"),
    ],
)
def test_operations_of_the_reference_are_those_that_a_counter_in_each_ranks_thread_sees(name, ranks, layout, counter):
    """Every row meets every key row there, of all requests and pages; not one product is missing or too many."""
    given = problem(name, torch.float32)
    split = make_split(given.requests, ranks, layout)
    want = counted(given, split, counter, implementation="reference")
    lengths, shape = given.requests.query_lens, MeshShape(cp=ranks)
    got = estimate(CONFIG, lengths, shape, split=split, tile=None, **in_pages(given.requests))
    assert computed(got) == want


def in_tiles(tile):
    """Return a selector that scores ``tile`` queries of one request at a time, made of the plain functions."""

    def select(*, q_TJI, k_SI, w_TJ, start_T, end_T, k, row_S, **_):
        chosen_TK = torch.full((start_T.shape[0], k), -1, dtype=torch.int32)
        for start in start_T[end_T > start_T].unique():
            mine = ((start_T == start) & (end_T > start_T)).nonzero().flatten()
            for rows in mine.split(tile):
                low, high = int(start), int(end_T[rows].max())
                keys = k_SI[low:high] if row_S is None else k_SI[row_S[low:high]]
                score = torch.zeros(len(rows), high - low)
                if high - low > k:
                    score = w_TJ[rows][:, None] @ torch.relu(q_TJI[rows] @ keys.mT)
                picked = sfa.select_topk(score.view(len(rows), -1), start_T[rows] - low, end_T[rows] - low, k=k)
                chosen_TK[rows] = torch.where(picked >= 0, picked + low, -1)
        return chosen_TK

    return select


def plain_attention(q_THE, kv_SE, topk_TK, *, scale, value_dim):
    """Attend to all K entries of every row, one product for the logits and one for the sum."""
    rows_TKE = kv_SE[topk_TK.clamp(min=0).long()]
    z_THK = (scale * q_THE @ rows_TKE.mT).masked_fill(topk_TK[:, None] < 0, -1e9)
    return z_THK.softmax(-1) @ rows_TKE[..., :value_dim], z_THK.logsumexp(-1)


@pytest.mark.parametrize("tile", [2, 16])
@pytest.mark.parametrize(
    ("name", "layout"), [("ragged", "striped"), ("single", "zigzag"), ("mixed", "balanced"), ("padded", "own")]
)
def test_operations_of_tiles_are_those_that_a_counter_sees(name, layout, tile):
    given = problem(name, torch.float32)
    split = make_split(given.requests, 4, layout)
    want = counted(given, split, dispatcher, select=in_tiles(tile), implementation=plain_attention)
    got = estimate(
        CONFIG, given.requests.query_lens, MeshShape(cp=4), split=split, tile=tile, **in_pages(given.requests)
    )
    assert computed(got) == want


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_operations_of_the_default_kernels_are_within_a_hundredth_of_the_estimate(layout):
    """Behind a long context, so that it does not matter how large their tiles are."""
    lengths, seq_lens = [24, 16, 24], [3000, 2900, 3100]
    table_BU = sfa.allocate_blocks(seq_lens, 64)
    batch = sfa.Batch.from_lengths(lengths, seq_lens, block_table=table_BU, block_size=64)
    blocks = int(table_BU.max()) + 1
    pool = sfa.init_cache(CONFIG, num_blocks=blocks, block_size=64, dtype=torch.float32)
    pool = replace(pool, kv=torch.randn_like(pool.kv), index_k=torch.randn_like(pool.index_k))
    given = problem("ragged", torch.float32)._replace(batch=batch, x_TD=torch.randn(64, CONFIG.hidden_size), cache=pool)
    split = split_tokens(lengths, 4, layout=layout, seq_lens=seq_lens, config=CONFIG)
    want = counted(given, split, ProductCounter)
    got = estimate(CONFIG, lengths, MeshShape(cp=4), split=split, seq_lens=seq_lens, block_size=64)
    assert computed(got) == pytest.approx(want, rel=0.01)


def test_a_cache_of_eight_bits_takes_the_bytes_of_its_rows():
    """656 bytes a latent and 132 an index key at V3.2's sizes; GLM-5.2 has 21 layers with index keys of 78."""
    named = {"seq_lens": [1000, 130], "block_size": 64}
    rows = (16 + 3) * 64
    for config, want in ((sfa.DEEPSEEK_V32, 61 * (656 + 132)), (sfa.GLM_52, 78 * 656 + 21 * 132)):
        got = estimate(config, [1, 1], MeshShape(cp=2), cache_format="fp8", **named)
        assert [rank.resident.cache for rank in got.ranks] == [rows * want] * 2
    plain = estimate(sfa.DEEPSEEK_V32, [1, 1], MeshShape(cp=2), cache_format="bfloat16", **named)
    assert plain.ranks[0].resident == estimate(sfa.DEEPSEEK_V32, [1, 1], MeshShape(cp=2), **named).ranks[0].resident


def test_parts_add_up_to_the_flops_of_tokens():
    lengths, seq_lens = [700, 3000, 0, 41], [700, 5000, 9, 41]
    split = split_tokens(lengths, 5, layout="zigzag", seq_lens=seq_lens)
    got = estimate(sfa.GLM_52, lengths, MeshShape(cp=5), split=split, seq_lens=seq_lens, block_size=128)
    visible_T = sharding.visible_keys(lengths, seq_lens)
    flops_T = sharding.token_flops(sfa.GLM_52, visible_T)
    for rank, row in zip(got.ranks, split.index_NC, strict=True):
        mine = row[row >= 0]
        full, shared = rank.layers[0].flops, rank.layers[3].flops
        assert full.total - full.selection == int(flops_T[mine].sum())
        assert full.selection == int(visible_T[mine][visible_T[mine] > 2048].sum())
        assert (shared.scoring, shared.selection) == (0, 0)
        assert (shared.attention, shared.output) == (full.attention, full.output)
        index = 2 * (2048 * 32 * 128 + 6144 * 128 + 6144 * 32)
        assert full.projections - shared.projections == len(mine) * index
        assert rank.flops.total == sum(layer.flops.total for layer in rank.layers)
        assert len(rank.layers) == 78


def test_a_rank_of_heads_does_its_part_of_the_heads_and_all_of_the_indexer():
    whole = estimate(V32, [4096], MeshShape(tp=1), rules=Rules(heads="tp")).ranks[0].layers[0].flops
    part = estimate(V32, [4096], MeshShape(tp=16), rules=Rules(heads="tp")).ranks[5].layers[0].flops
    assert (part.scoring, part.selection) == (whole.scoring, whole.selection)
    assert (part.attention * 16, part.output * 16) == (whole.attention, whole.output)
    everyones = 4096 * 2 * (7168 * 1536 + 7168 * 576 + 1536 * 64 * 128 + 7168 * 128 + 7168 * 64)
    assert (part.projections - everyones) * 16 == whole.projections - everyones


# ---- balance ---------------------------------------------------------------------------------------------------------


@cache
def balance(lengths, ranks, layout, cached=0):
    config = replace(V32, indexer_types=("full",))
    seq_lens = [cached + n for n in lengths]
    return estimate(config, lengths, MeshShape(cp=ranks), layout=layout, seq_lens=seq_lens, block_size=128)


def over_mean(values):
    return max(values) / (sum(values) / len(values))


@pytest.mark.parametrize(
    "entry", PEERS["single_request"], ids=lambda x: f"{x['indexer']}-{x['length'] // 1024}K-{x['ranks']}"
)
def test_the_published_imbalances_of_a_single_request_are_reproduced(entry):
    rate = {"bf16": 1.0, "fp8": 0.5}[entry["indexer"]]
    got, lengths = {}, (entry["length"],)
    for layout in ("contiguous", "zigzag", "striped"):
        ranks = balance(lengths, entry["ranks"], layout).ranks
        total = [rank.flops.total - (1 - rate) * rank.flops.scoring for rank in ranks]
        got[layout] = over_mean(total)
        got[f"{layout}_with_moe"] = over_mean([x + MOE * rank.tokens for x, rank in zip(total, ranks, strict=True)])
        got[f"{layout}_indexer"] = over_mean([rank.flops.scoring for rank in ranks])
    got["zigzag_gain"] = got["contiguous"] / got["zigzag"]
    got["zigzag_gain_with_moe"] = got["contiguous_with_moe"] / got["zigzag_with_moe"]
    wanted = {name: value for name, value in entry.items() if name in got}
    assert len(wanted) == 7
    assert {name: got[name] for name in wanted} == pytest.approx(wanted, abs=0.002)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("entry", PEERS["ragged"], ids=lambda x: x["batch"].replace(" ", "_"))
def test_the_published_imbalances_of_ragged_batches_and_chunks_are_reproduced(entry, layout):
    want = entry.get("zigzag_with_chunks_of_ceil", entry[layout]) if layout == "zigzag" else entry[layout]
    lengths, cached = tuple(entry["lengths"]), entry["cached_before"]
    got = [balance(lengths, ranks, layout, cached).max_over_mean for ranks in entry["ranks"]]
    assert got == pytest.approx(want, abs=0.002)


@pytest.mark.parametrize(("length", "contiguous"), [(K64, 1.34), (K128, 1.50)])
def test_sixteen_ranks_share_long_prompts_to_a_hundredth(length, contiguous):
    got = {x: balance((length,), 16, x).max_over_mean for x in ("contiguous", "zigzag", "striped", "balanced")}
    assert min(got.values()) <= 1.01
    assert round(got["contiguous"], 2) == contiguous


@pytest.mark.parametrize("lengths", [(65536, *[4096] * 8), (100, 20000, 7, 3333, 64000, 1), (5000,) * 7, (1,) * 400])
def test_sixteen_ranks_share_ragged_batches_to_a_hundredth(lengths):
    assert min(balance(lengths, 16, layout).max_over_mean for layout in ("striped", "balanced")) <= 1.01


RATES = sharding.Machine(name="400 TFLOP/s, 100 GB/s, 20 µs", flops=4e14, link=1e11, latency=2e-5)


@pytest.mark.parametrize("length", [K64, K128])
def test_context_parallel_is_faster_than_heads_dealt_out_by_more_than_the_seed_reports(length):
    """The seed states neither sizes nor rates; here they are V3.2's on 16 ranks and those of ``RATES``."""
    heads = estimate(V32, [length], MeshShape(tp=16), rules=Rules(heads="tp"), machine=RATES)
    for strategy in ("replicated", "layer-sharded", "gathered"):
        tokens = estimate(V32, [length], MeshShape(cp=16), layout="zigzag", weights=strategy, machine=RATES)
        ratio = heads.seconds / tokens.seconds
        print(f"{length} tokens, {RATES.name}: heads {heads.seconds:.3f} s, tokens {tokens.seconds:.3f} s, {strategy}")
        print(f"{ratio:.2f}x; matrix products alone {heads.flops / tokens.flops:.2f}x")
        assert ratio > 3.36


# ---- what stays ------------------------------------------------------------------------------------------------------


def test_large_matrices_have_the_sizes_of_the_design():
    """224, 72 and 32 MiB in bfloat16: a rank of 16 keeps 1/16 of them where they are gathered."""
    whole, parts = (
        estimate(V32, [64], MeshShape(cp=16), weights=strategy).ranks[3].resident.weights
        for strategy in ("replicated", "gathered")
    )
    assert whole - parts == 61 * (224 + 72 + 32) * 2**20 * 15 // 16
    exchanged = estimate(V32, [64], MeshShape(cp=16), weights="exchanged").ranks[3].resident.weights
    assert whole - exchanged == 61 * 224 * 2**20 * 15 // 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_are_the_bytes_of_parameters_and_the_cache_those_of_pools(dtype):
    config, seq_lens = replace(CONFIG, indexer_types=("full", "shared", "shared")), [9, 0, 21]
    got = estimate(config, [3, 0, 21], MeshShape(cp=2), seq_lens=seq_lens, block_size=BLOCK, dtype=dtype)
    params = [sfa.init_params(config, layer=i, dtype=dtype) for i in range(3)]
    want = sum(x.numel() * x.element_size() for layer in params for _, x in named_fields(layer))
    assert [rank.resident.weights for rank in got.ranks] == [want, want]
    table_BU = sfa.allocate_blocks(seq_lens, BLOCK)
    blocks = int((table_BU >= 0).sum())
    pools = [sfa.init_cache(config, num_blocks=blocks, block_size=BLOCK, dtype=dtype, layer=i) for i in range(3)]
    tensors = [x for pool in pools for x in (pool.kv, pool.index_k) if x is not None]
    assert got.ranks[0].resident.cache == sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize(("prefetch", "slots"), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4), (9, 4)])
def test_a_ring_has_a_slot_for_each_layer_ahead_and_no_more_than_layers(prefetch, slots):
    config = replace(CONFIG, indexer_types=("full", "shared", "full", "shared"))
    layer = slot_bytes(layout_of(dict(named_fields(sfa.init_params(config, dtype=torch.bfloat16)))))
    got = estimate(config, [8], MeshShape(cp=2), weights="layer-sharded", prefetch=prefetch)
    assert {rank.resident.ring for rank in got.ranks} == {slots * layer}


def test_no_tokens_cost_nothing():
    got = estimate(sfa.TINY, [0, 0], MeshShape(cp=3), layout="balanced")
    assert (got.max_over_mean, got.flops, got.bytes_sent, got.seconds) == (1.0, 0, 0, 0.0)


# ---- bad input -------------------------------------------------------------------------------------------------------

TWO = {"mesh_shape": MeshShape(cp=2)}
BAD = {
    "weights must be of 'replicated', 'layer-sharded', 'gathered', 'exchanged'; got 'local'": {"weights": "local"},
    "layout= and split= exclude each other; got both": {
        "layout": "zigzag",
        "split": split_tokens([4], 2, layout="zigzag"),
    },
    "split must be for 2 ranks; got 3": {"split": split_tokens([4], 3, layout="zigzag")},
    "split must be of 4 tokens; got 5": {"split": split_tokens([5], 2, layout="zigzag")},
    "prefetch must be an integer >= 0; got -1": {"prefetch": -1},
    "prefetch must be an integer >= 0; got None": {"prefetch": None},
    "block_size must be an integer >= 1; got 0": {"block_size": 0},
    "tile must be an integer >= 1; got 1.5": {"tile": 1.5},
    "machine must be a Machine; got 'H100'": {"machine": "H100"},
    "context of request 0 needs a cache: block_size must be given; got None": {"seq_lens": [9]},
    "rules must be given for a mesh of 2 axes; got None": {"mesh_shape": MeshShape(cp=2, tp=2)},
    "rules must split tokens or heads; got Rules(tokens=None, heads=None, index_heads=None)": {"rules": Rules()},
    "rules must name the axes of MeshShape(cp=2), each of them; got Rules(tokens='cp', heads='tp', index_heads=None)": {
        "rules": Rules(tokens="cp", heads="tp")
    },
    "no layer splits indexer heads: index_heads must be None; got Rules(tokens='cp', heads=None, index_heads='tp')": {
        "rules": Rules(tokens="cp", index_heads="tp")
    },
    "weights='gathered' needs rules that split tokens and no heads; got "
    "Rules(tokens=None, heads='cp', index_heads=None)": {"rules": Rules(heads="cp"), "weights": "gathered"},
    "weights='exchanged' needs ranks that divide 16 heads; got 3": {
        "mesh_shape": MeshShape(cp=3),
        "weights": "exchanged",
    },
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused_in_one_line(message, unchecked):
    with pytest.raises(ValueError) as error:
        estimate(CONFIG, [4], **(TWO | BAD[message]))
    assert str(error.value) == f"estimate: {message}"


def test_heads_that_ranks_do_not_divide_and_unknown_layouts_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"^heads_of_rank: num_ranks must divide 16 heads; got 3$"):
        estimate(CONFIG, [4], MeshShape(tp=3), rules=Rules(heads="tp"))
    with pytest.raises(ValueError, match=r"^split_tokens: layout must be of 'contiguous', .*; got 'own'$"):
        estimate(CONFIG, [4], MeshShape(cp=3), layout="own")
    with pytest.raises(ValueError, match=r"^estimate: lengths must be integers >= 0; got -1$"):
        estimate(CONFIG, [-1], MeshShape(cp=3))
