"""Operations per token: counted by hand, counted while the layer's functions run, and the published imbalances."""

import itertools
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sfa_functional as sfa
import sharding
from tests.sharding.products import ProductCounter
from tests.vectors import read_vectors

PEERS = read_vectors("peers.json")["load_balance"]
MOE = PEERS["per_token_flop"]["moe_or_ffn_if_local"]


def test_layer_flops_of_the_tiny_model_are_those_counted_by_hand():
    """D 64, H 4, Q 32, L 24, P 16, R 8, V 20, J 16, I 16."""
    products = [
        64 * 32,  # hidden state to low-rank query
        32 * 4 * (16 + 8),  # low-rank query to 4 heads, no-rope and rope parts
        4 * 16 * 24,  # no-rope parts into the latent width
        64 * (24 + 8),  # hidden state to latent key and rope key
        32 * 16 * 16,  # low-rank query to 16 index heads
        64 * 16,  # hidden state to index key
        64 * 16,  # hidden state to 16 index weights
        4 * 24 * 20,  # latent results to values
        4 * 20 * 64,  # values to hidden state
    ]
    got = sharding.layer_flops(sfa.TINY)
    assert got == (2 * sum(products), 2 * 16 * 16, 2 * 4 * (32 + 24)) == (51968, 512, 448)


def test_layer_flops_of_the_published_model_are_those_of_the_vectors():
    got = sharding.layer_flops(sfa.DEEPSEEK_V32)
    assert got.projections == PEERS["per_token_flop"]["projections"]
    assert got.per_visible_key == PEERS["per_visible_key_flop"]
    assert got.per_selected_key == PEERS["per_selected_key_flop"]


@pytest.mark.parametrize("tokens", [1, 7])
def test_layer_flops_are_the_matrix_products_that_the_functions_run(tokens):
    """Every token sees and selects the same 10 keys here, so no product is cut to a triangle."""
    config, params = sfa.TINY, sfa.init_params(sfa.TINY)
    x_TD, position_T, keys = torch.randn(tokens, 64), torch.arange(tokens), 10
    cos, sin = sfa.rope_cos_sin(position_T, config)
    kv_SE, k_SI = torch.randn(keys, 32), torch.randn(keys, 16)
    topk_TK = torch.arange(keys, dtype=torch.int32).expand(tokens, -1)

    with FlopCounterMode(display=False) as projections:
        q_THE, q_latent_TQ = sfa.latent_queries(params, x_TD, cos, sin, config=config)
        sfa.latent_keys(params, x_TD, cos, sin, config=config)
        q_TJI = sfa.index_queries(params.indexer, q_latent_TQ, cos, sin, config=config)
        sfa.index_keys(params.indexer, x_TD, cos, sin, config=config)
        w_TJ = sfa.index_weights(params.indexer, x_TD, config=config)
        sfa.latent_output(params, torch.randn(tokens, 4, 24), config=config)
    with FlopCounterMode(display=False) as scores:
        sfa.index_scores(q_TJI, k_SI, w_TJ)
    with ProductCounter() as attention:
        named = {"scale": 1.0, "value_dim": 24, "implementation": "blockwise"}
        sfa.sparse_attention(q_THE, kv_SE, topk_TK, **named)

    got = sharding.layer_flops(config)
    assert projections.get_total_flops() == tokens * got.projections
    weighted_sum = 2 * 16  # over index heads; left out of the model, as it is 1 in 128 of it at V3.2's sizes
    assert scores.get_total_flops() == tokens * keys * (got.per_visible_key + weighted_sum)
    assert attention.flops == tokens * keys * got.per_selected_key


def test_token_flops_grow_with_every_visible_key_and_with_the_first_k_selected_ones():
    visible = [0, 1, 3, 4, 5, 100]
    want = [51968 + 512 * n + 448 * min(n, 4) for n in visible]
    for dtype in (torch.int64, torch.int32):
        got_T = sharding.token_flops(sfa.TINY, torch.tensor(visible, dtype=dtype))
        assert got_T.dtype == torch.float64
        assert got_T.tolist() == want
    assert sharding.token_flops(sfa.TINY, torch.tensor([], dtype=torch.int64)).shape == (0,)


def test_token_flops_of_long_contexts_are_exact():
    got_T = sharding.token_flops(sfa.DEEPSEEK_V32, torch.tensor([2**17, 2**31]))
    assert got_T.tolist() == [402128896 + 16384 * n + 278528 * 2048 for n in (2**17, 2**31)]


def test_visible_keys_of_every_small_batch_equal_a_loop_and_those_of_its_ranges():
    pairs = [(n, s) for n in range(4) for s in range(6) if s == 0 or s >= n]
    for requests in [(), *itertools.product(pairs, repeat=1), *itertools.product(pairs, repeat=2)]:
        lengths, seq_lens = [n for n, _ in requests], [s for _, s in requests]
        want = [s - n + i + 1 if s else 0 for n, s in requests for i in range(n)]
        got_T = sharding.visible_keys(lengths, seq_lens)
        batch = sfa.Batch.from_lengths(lengths, seq_lens)
        assert got_T.dtype == torch.int64
        assert got_T.tolist() == want == (batch.end_T - batch.start_T).tolist()


# ---- load balance ----------------------------------------------------------------------------------------------------


@cache
def seen(lengths: tuple[int, ...], cached: int) -> torch.Tensor:
    """Return what each token sees of requests that have all the same number of cached tokens."""
    return torch.cat([torch.arange(cached + 1, cached + n + 1) for n in lengths])


def parts(visible_T: torch.Tensor, indexer: str) -> list[torch.Tensor]:
    """Return the costs of indexer, attention and projections of every token, from the vectors' numbers."""
    rate = {"bf16": 1.0, "fp8": 0.5}[indexer]
    return [
        rate * PEERS["per_visible_key_flop"] * visible_T.double(),
        PEERS["per_selected_key_flop"] * visible_T.clamp(max=2048).double(),
        torch.full(visible_T.shape, PEERS["per_token_flop"]["projections"], dtype=torch.float64),
    ]


@cache
def layout_of(lengths: tuple[int, ...], ranks: int, layout: str, cached: int = 0) -> sharding.TokenSplit:
    return sharding.split_tokens(lengths, ranks, layout=layout, seq_lens=[cached + n for n in lengths])


def imbalance(split: sharding.TokenSplit, cost_T: torch.Tensor) -> float:
    """Divide the heaviest rank's cost by the mean; padding costs nothing."""
    loads = [float(cost_T[row[row >= 0]].sum()) for row in split.index_NC]
    return max(loads) / (sum(loads) / len(loads))


@pytest.mark.parametrize(
    "entry", PEERS["single_request"], ids=lambda x: f"{x['indexer']}-{x['length'] // 1024}K-{x['ranks']}"
)
def test_imbalance_of_a_single_request_is_that_of_the_vectors(entry):
    lengths, ranks = (entry["length"],), entry["ranks"]
    visible_T = seen(lengths, 0)
    costs = parts(visible_T, entry["indexer"])
    cost_T = sum(costs)
    if entry["indexer"] == "bf16":
        assert torch.equal(sharding.token_flops(sfa.DEEPSEEK_V32, visible_T), cost_T)
    contiguous, zigzag, striped = (layout_of(lengths, ranks, name) for name in ("contiguous", "zigzag", "striped"))

    got = {
        "contiguous_indexer": imbalance(contiguous, costs[0]),
        "contiguous": imbalance(contiguous, cost_T),
        "contiguous_with_moe": imbalance(contiguous, cost_T + MOE),
        "zigzag": imbalance(zigzag, cost_T),
        "striped": imbalance(striped, cost_T),
    }
    got["zigzag_gain"] = got["contiguous"] / got["zigzag"]
    got["zigzag_gain_with_moe"] = got["contiguous_with_moe"] / imbalance(zigzag, cost_T + MOE)
    shares = [float(part.sum() / cost_T.sum()) for part in costs]

    assert got == pytest.approx({name: entry[name] for name in got}, abs=2e-4)
    assert shares == pytest.approx(entry["share_indexer_attention_projections"], abs=1e-4)
    assert set(entry) == {"indexer", "length", "ranks", "share_indexer_attention_projections", *got}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("entry", PEERS["ragged"], ids=lambda x: x["batch"].replace(" ", "_"))
def test_imbalance_of_ragged_batches_and_chunks_is_that_of_the_vectors(entry, layout):
    """Zigzag is the rule of this library where lengths are no multiples of twice the ranks: chunks of the ceiling."""
    lengths, cached = tuple(entry["lengths"]), entry["cached_before"]
    cost_T = sharding.token_flops(sfa.DEEPSEEK_V32, seen(lengths, cached))
    want = entry.get("zigzag_with_chunks_of_ceil", entry[layout]) if layout == "zigzag" else entry[layout]

    got = [imbalance(layout_of(lengths, ranks, layout, cached), cost_T) for ranks in entry["ranks"]]

    assert got == pytest.approx(want, abs=2e-4)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("entry", PEERS["ragged"], ids=lambda x: x["batch"].replace(" ", "_"))
def test_a_layout_of_ones_own_gives_the_other_columns_of_the_vectors(entry, whole):
    """Zigzag with chunks cut at rounded multiples of length / 2N: per request, and over the whole batch."""
    lengths, cached = tuple(entry["lengths"]), entry["cached_before"]
    cost_T = sharding.token_flops(sfa.DEEPSEEK_V32, seen(lengths, cached))
    streams = (sum(lengths),) if whole else lengths

    for ranks, want in zip(entry["ranks"], entry["zigzag_over_the_whole_batch" if whole else "zigzag"], strict=True):
        owners = []
        for n in streams:
            cuts = [round(n * i / (2 * ranks)) for i in range(2 * ranks + 1)]
            chunk_n = torch.arange(2 * ranks).repeat_interleave(torch.tensor(cuts).diff())
            owners.append(torch.minimum(chunk_n, 2 * ranks - 1 - chunk_n))
        split = sharding.TokenSplit.from_owner(torch.cat(owners), ranks)
        assert imbalance(split, cost_T) == pytest.approx(want, abs=2e-4)


@pytest.mark.parametrize(
    ("layout", "ranks", "pieces", "want"),
    [
        ("contiguous", 8, 1, PEERS["sliced_matmul_indexer_work_over_ideal"]["contiguous_last_rank"]),
        ("zigzag", 8, 2, PEERS["sliced_matmul_indexer_work_over_ideal"]["zigzag_8_ranks"]),
        ("zigzag", 16, 2, PEERS["sliced_matmul_indexer_work_over_ideal"]["zigzag_16_ranks"]),
        ("striped", 16, 1, PEERS["sliced_matmul_indexer_work_over_ideal"]["striped"]),
    ],
)
def test_balanced_counts_are_not_balanced_time_of_plain_sliced_products(layout, ranks, pieces, want):
    """A piece's rows are all multiplied with every key up to its last one; the ideal is half the square, shared."""
    length = 65536
    split = layout_of((length,), ranks, layout)

    work = [sum(len(piece) * (int(piece[-1]) + 1) for piece in row.chunk(pieces)) for row in split.index_NC]

    assert max(work) == work[-1] or layout != "contiguous"
    assert max(work) / (length**2 / 2 / ranks) == pytest.approx(want, abs=5e-3)
