"""Token plans by exhaustion: ranges, local lengths and four layouts against plain loops over tokens; the vectors."""

import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import sfa_functional as sfa
import sharding
from sharding import TokenSplit, split_tokens
from tests.vectors import read_vectors

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
PEERS = read_vectors("peers.json")["token_ranges"]


def vectors(test):
    return pytest.mark.parametrize("entry", PEERS, ids=lambda x: x["id"])(test)


def lists(*tensors):
    return tuple(x.tolist() for x in tensors)


def ceil_div(a, b):
    return -(-a // b)


# ---- the contiguous rule ---------------------------------------------------------------------------------------------


@vectors
def test_token_ranges_equal_the_vectors(entry):
    got = sharding.token_ranges(entry["num_tokens"], entry["num_ranks"])
    assert lists(*got) == (entry["start_N"], entry["end_N"], entry["padded_end_N"])


def test_token_ranges_deal_every_token_to_one_rank_in_equal_padded_shares():
    for num_tokens, num_ranks in itertools.product(range(40), (*range(1, 10), 64)):
        tensors = sharding.token_ranges(num_tokens, num_ranks)
        start_N, end_N, padded_end_N = lists(*tensors)
        assert {x.dtype for x in tensors} == {torch.int64}
        assert [t for a, b in zip(start_N, end_N, strict=True) for t in range(a, b)] == list(range(num_tokens))
        assert {b - a for a, b in zip(start_N, padded_end_N, strict=True)} == {ceil_div(num_tokens, num_ranks)}
        assert start_N == [0, *padded_end_N[:-1]]


def test_token_ranges_lie_on_the_device_that_is_asked_for():
    assert {x.device.type for x in sharding.token_ranges(7, 3, device="meta")} == {"meta"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1, 2), "token_ranges: num_tokens must be an integer >= 0; got -1"),
        ((1.5, 2), "token_ranges: num_tokens must be an integer >= 0; got 1.5"),
        ((True, 2), "token_ranges: num_tokens must be an integer >= 0; got True"),
        ((3, 0), "token_ranges: num_ranks must be an integer >= 1; got 0"),
        ((3, None), "token_ranges: num_ranks must be an integer >= 1; got None"),
    ],
)
def test_token_ranges_refuse_counts_out_of_range_in_one_line(args, message, unchecked):
    with pytest.raises(ValueError) as error:
        sharding.token_ranges(*args)
    assert str(error.value) == message


# ---- local lengths ---------------------------------------------------------------------------------------------------


def loop_over_pieces(requests, start, end):
    """Walk one rank's tokens; return query ends, key lengths, and for each request what each of its tokens sees.

    ``requests`` are (query count, sequence length); a sequence length of 0 is padding, which sees nothing.
    """
    token, query_end, key_len, seen = 0, [], [], []
    for n, s in requests:
        mine = [i for i in range(n) if start <= token + i < end]
        token += n
        query_end.append((query_end[-1] if query_end else 0) + len(mine))
        seen.append([s - n + i + 1 if s else 0 for i in mine])
        key_len.append(seen[-1][-1] if mine else 0)
    return query_end, key_len, seen


def local_lengths(requests, ranges, dtype=torch.int64):
    start = [0, *itertools.accumulate(n for n, _ in requests)]
    columns = start, [s for _, s in requests], [a for a, _ in ranges], [b for _, b in ranges]
    return sharding.local_lengths(*(torch.tensor(x, dtype=dtype) for x in columns))


def assert_local_lengths(requests, ranges, dtype=torch.int64):
    query_end_NB, key_len_NB = local_lengths(requests, ranges, dtype)
    assert query_end_NB.dtype == key_len_NB.dtype == torch.int64
    assert query_end_NB.shape == key_len_NB.shape == (len(ranges), len(requests))
    for (start, end), query_end_B, key_len_B in zip(ranges, *lists(query_end_NB, key_len_NB), strict=True):
        want_end, want_len, seen = loop_over_pieces(requests, start, end)
        assert (query_end_B, key_len_B) == (want_end, want_len)
        for b, (first, last) in enumerate(itertools.pairwise([0, *query_end_B])):
            padding = requests[b][1] == 0
            place = [0 if padding else key_len_B[b] - (last - first) + i + 1 for i in range(last - first)]
            assert place == seen[b]  # what a mask aligned to the right lets each row see


@vectors
def test_local_lengths_equal_the_vectors_and_not_the_form_without_the_mask(entry):
    columns = [torch.tensor(entry[name]) for name in ("query_start_B1", "seq_len_B", "start_N")]
    for end in ("end_N", "padded_end_N"):  # whether padding is counted makes no difference
        query_end_NB, key_len_NB = lists(*sharding.local_lengths(*columns, torch.tensor(entry[end])))
        assert query_end_NB == entry["query_end_NB"]
        assert key_len_NB == entry["key_len_NB"]
        assert key_len_NB != entry["key_len_without_mask"]
        assert min(map(min, key_len_NB)) >= 0


SMALL_REQUESTS = [(n, s) for n in range(4) for s in (0, *range(max(n, 1), n + 3))]


def test_local_lengths_of_every_small_batch_equal_a_loop_over_its_tokens():
    for requests in (
        *itertools.product(SMALL_REQUESTS, repeat=1),
        *itertools.product(SMALL_REQUESTS, repeat=2),
    ):
        total = sum(n for n, _ in requests)
        for num_ranks, padding in ((1, 0), (2, 0), (3, 1), (4, 0), (5, 4)):
            start_N, end_N, _ = lists(*sharding.token_ranges(total + padding, num_ranks))
            assert_local_lengths(requests, list(zip(start_N, end_N, strict=True)))


def test_local_lengths_of_random_batches_and_ranges_equal_a_loop_over_their_tokens():
    """Any ranges: of unequal size, overlapping, empty, past the end, and ones that end before they start."""
    draw = random.Random(0)
    for _ in range(300):
        requests = []
        for _ in range(draw.randrange(9)):
            n = draw.choice([0, 1, 2, draw.randrange(40)])
            requests.append((n, draw.choice([0, n, n + draw.randrange(50)])))
        total = sum(n for n, _ in requests)
        ranges = [(draw.randrange(total + 4), draw.randrange(total + 9)) for _ in range(draw.randrange(1, 7))]
        assert_local_lengths(requests, ranges, draw.choice([torch.int32, torch.int64]))


def test_local_lengths_of_no_requests_or_no_ranks_are_empty():
    assert [x.shape for x in local_lengths([], [(0, 4), (4, 8)])] == [(2, 0), (2, 0)]
    assert [x.shape for x in local_lengths([(3, 3)], [])] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_lengths_of_very_long_streams_do_not_overflow(dtype):
    half, most = 2**30, 2**31 - 1
    columns = [0, half, most], [most, most - half], [0, half + 5], [half + 5, most]
    query_end_NB, key_len_NB = sharding.local_lengths(*(torch.tensor(x, dtype=dtype) for x in columns))
    assert query_end_NB.tolist() == [[half, half + 5], [0, most - half - 5]]
    assert key_len_NB.tolist() == [[most, 5], [0, most - half]]


def test_local_lengths_reads_no_data():
    args = [torch.empty(n, dtype=torch.int64, device="meta") for n in (4, 3, 8, 8)]
    query_end_NB, key_len_NB = sharding.local_lengths(*args)
    assert query_end_NB.shape == key_len_NB.shape == (8, 3)
    assert query_end_NB.device.type == key_len_NB.device.type == "meta"


@pytest.mark.parametrize(
    "shapes",
    [
        [(2,), (2,), (1,), (1,)],
        [(3,), (1,), (1,), (1,)],
        [(2,), (1,), (2,), (1,)],
        [(1, 2), (1,), (1,), (1,)],
        [(2,), (), (1,), (1,)],
        [(), (1,), (1,), (1,)],
        [(2,), (1,), (1,), (1, 1)],
        [(2,), (1,), (), ()],
    ],
)
def test_local_lengths_refuse_vectors_that_do_not_fit_in_one_line(shapes, unchecked):
    rule = "query_start, seq_len, start, end must be [B + 1], [B], [N], [N]"
    with pytest.raises(ValueError) as error:
        sharding.local_lengths(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes))
    assert str(error.value) == f"local_lengths: {rule}; got {shapes}"


COMPILED = """
import torch, warnings
import sfa_functional as sfa
import sharding

warnings.simplefilter("error")


def check(name, function, *args):
    eager = torch.utils._pytree.tree_leaves(function(*args))
    compiled = torch.utils._pytree.tree_leaves(torch.compile(function, fullgraph=True, backend="eager")(*args))
    assert len(eager) == len(compiled) > 0
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled) if a is not None)
    print(name, flush=True)


ranges = sharding.token_ranges(15, 4)
check("local_lengths", sharding.local_lengths, torch.tensor([0, 5, 8, 15]), torch.tensor([15, 3, 0]), *ranges[:2])
split = sharding.split_tokens([5, 2], 2, layout="zigzag")
check("scatter", lambda split, x: split.scatter(x, fill=-1), split, torch.arange(14).view(7, 2))
check("gather", lambda split, x: split.gather(x), split, torch.arange(16).view(8, 2))
table = sfa.allocate_blocks([5, 2], 2)
batch = sfa.Batch.from_lengths([5, 2], block_table=table, block_size=2)
check("local_batch", lambda split, batch: split.local_batch(batch, 1), split, batch)
cache = sharding.CacheSplit(2, 2)
check("local_selection", lambda x: cache.local_selection(x, 1), torch.tensor([[0, 2, 5, -1]], dtype=torch.int32))
args = batch.request_T, batch.position_T
check("local_slots", lambda t, b, p: cache.local_slots(t, b, p, 1, block_size=2), table, *args)
"""


def test_compiled_plans_equal_eager_ones():
    """``fullgraph=True``: no value is read on the way; in a process without the annotations, which can't be traced."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"SFA_UNCHECKED": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=120, cwd=root
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    names = ["local_lengths", "scatter", "gather", "local_batch", "local_selection", "local_slots"]
    assert done.stdout.split("\n")[:-1] == names


# ---- layouts ---------------------------------------------------------------------------------------------------------


def loop_over_owners(owners, num_ranks, rows=None):
    """Return index and inverse of the split in which token t is on rank ``owners[t]``, as lists."""
    held = [[t for t, rank in enumerate(owners) if rank == r] for r in range(num_ranks)]
    rows = max(map(len, held)) if rows is None else rows
    index = [tokens + [-1] * (rows - len(tokens)) for tokens in held]
    flat = [t for row in index for t in row]
    place = {t: i for i, t in enumerate(flat) if t >= 0}
    return index, [place[t] for t in range(len(owners))]


def assert_split(split, owners, num_ranks, rows=None):
    index, inverse = loop_over_owners(owners, num_ranks, rows)
    assert split.index_NC.dtype == split.inverse_T.dtype == torch.int64
    assert (split.index_NC.tolist(), split.inverse_T.tolist()) == (index, inverse)
    assert (split.num_ranks, split.rows, split.num_tokens) == (num_ranks, len(index[0]), len(owners))


def contiguous_owners(lengths, num_ranks):
    share = ceil_div(sum(lengths), num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(share)][: sum(lengths)]


def zigzag_owners(lengths, num_ranks):
    owners = []
    for n in lengths:
        size = ceil_div(n, 2 * num_ranks)
        there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
        owners += [rank for rank in there_and_back for _ in range(size)][:n]
    return owners


def striped_owners(lengths, num_ranks):
    return [t % num_ranks for t in range(sum(lengths))]


def balanced_owners(lengths, num_ranks, *, cost):
    """Deal out blocks, the dearest first, each to the least loaded rank that has room; cut what does not fit."""
    total = sum(lengths)
    share = ceil_div(total, num_ranks)
    size = 128 if share >= 256 else max(1, ceil_div(share, 2))
    blocks = [list(range(first, min(first + size, total))) for first in range(0, total, size)]
    blocks.sort(key=lambda block: (-sum(cost[t] for t in block), block[0]))
    owners, loads, held = [None] * total, [0] * num_ranks, [0] * num_ranks
    for block in blocks:
        while block:
            rank = min((r for r in range(num_ranks) if held[r] < share), key=lambda r: (loads[r], r))
            piece, block = block[: share - held[rank]], block[share - held[rank] :]
            for t in piece:
                owners[t] = rank
            loads[rank] += sum(cost[t] for t in piece)
            held[rank] += len(piece)
    return owners


V32 = (402128896, 16384, 278528, 2048)
TINY = (51968, 512, 448, 4)


def token_costs(lengths, seq_lens=None, sizes=V32):
    """Return what each token costs, in whole numbers: projections, scores of visible keys, attention to k of them."""
    projections, score, attention, k = sizes
    seq_lens = lengths if seq_lens is None else seq_lens
    seen = [s - n + i + 1 if s else 0 for n, s in zip(lengths, seq_lens, strict=True) for i in range(n)]
    return [projections + score * v + attention * min(v, k) for v in seen]


OWNERS = {
    "contiguous": contiguous_owners,
    "zigzag": zigzag_owners,
    "striped": striped_owners,
    "balanced": lambda lengths, num_ranks: balanced_owners(lengths, num_ranks, cost=token_costs(lengths)),
}
RANKS = (*range(1, 9), 64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_small_batch_is_dealt_out_by_the_rule_of_its_layout(layout):
    triples = [(0, 5, 0), (3, 0, 4), (1, 1, 1), (7, 2, 9), (0, 0, 0), (2, 17, 1)]
    for lengths in [[], *([n] for n in range(21)), *itertools.product(range(5), repeat=2), *triples]:
        for num_ranks in RANKS:
            split = split_tokens(lengths, num_ranks, layout=layout)
            assert_split(split, OWNERS[layout](lengths, num_ranks), num_ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_batches_are_dealt_out_by_the_rule_of_their_layout(layout):
    """Large enough for blocks of 128 tokens on few ranks, and for smaller ones on many."""
    draw = random.Random(1)
    for _ in range(12):
        lengths = [draw.choice([0, 1, draw.randrange(90), draw.randrange(600)]) for _ in range(draw.randrange(1, 9))]
        num_ranks = draw.choice([1, 2, 3, 5, 8, 16, 64])
        split = split_tokens(torch.tensor(lengths), num_ranks, layout=layout)
        assert_split(split, OWNERS[layout](lengths, num_ranks), num_ranks)


def test_the_contiguous_layout_is_the_rule_of_token_ranges():
    for lengths, num_ranks in itertools.product([[5, 3, 7], [1, 1, 1], [0], [20]], RANKS):
        split = split_tokens(lengths, num_ranks, layout="contiguous")
        start_N, end_N, padded_end_N = lists(*sharding.token_ranges(sum(lengths), num_ranks))
        assert [[t for t in row if t >= 0] for row in split.index_NC.tolist()] == [
            list(range(a, b)) for a, b in zip(start_N, end_N, strict=True)
        ]
        assert split.rows == padded_end_N[0] - start_N[0]


@pytest.mark.parametrize("layout", ["contiguous", "striped", "balanced"])
def test_layouts_with_equal_counts_hold_no_more_rows_than_a_share(layout):
    for total, num_ranks in itertools.product(range(0, 400, 13), (1, 2, 3, 7, 16)):
        assert split_tokens([total], num_ranks, layout=layout).rows == ceil_div(total, num_ranks)


BALANCED = [
    ([8, 8], [8, 300000], 2),
    ([300, 5, 411, 0, 77], [300, 9000, 411, 70, 0], 2),
    ([1000, 40], [1000, 100040], 4),
    ([64] * 9, [64 * i * i + 64 for i in range(9)], 3),
    ([257, 255], [0, 255], 2),
    ([12, 12, 12], [12, 0, 500], 5),
]


@pytest.mark.parametrize("model", ["V3.2", "TINY"])
@pytest.mark.parametrize(("lengths", "seq_lens", "num_ranks"), BALANCED)
def test_the_balanced_layout_weighs_what_each_token_costs(lengths, seq_lens, num_ranks, model):
    """With cached context and padded requests, by the sizes of a model."""
    config, sizes = {"V3.2": (sfa.DEEPSEEK_V32, V32), "TINY": (sfa.TINY, TINY)}[model]
    cost = token_costs(lengths, seq_lens, sizes)
    want = balanced_owners(lengths, num_ranks, cost=cost)

    assert_split(split_tokens(lengths, num_ranks, layout="balanced", seq_lens=seq_lens, config=config), want, num_ranks)
    if model == "V3.2":
        assert_split(split_tokens(lengths, num_ranks, layout="balanced", seq_lens=seq_lens), want, num_ranks)


def test_cached_context_and_the_sizes_of_a_model_change_the_balanced_layout_and_no_other():
    lengths, seq_lens = [64, 64, 64], [64, 8256, 64]
    for layout in LAYOUTS:
        plain, cached, tiny = (
            split_tokens(lengths, 2, layout=layout, **named).index_NC
            for named in ({}, {"seq_lens": seq_lens}, {"seq_lens": seq_lens, "config": sfa.TINY})
        )
        assert torch.equal(plain, cached) == (layout != "balanced")
        assert torch.equal(cached, tiny) == (layout != "balanced")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_rows_than_needed_are_padding_and_contiguous_ranks_are_filled(layout):
    """For the contiguous layout that is the rule for a stream padded to ranks · rows tokens."""
    for lengths, num_ranks, extra in itertools.product([[7, 4], [0], [20]], (1, 2, 3, 8), (0, 1, 5)):
        plain = split_tokens(lengths, num_ranks, layout=layout)
        rows, total = plain.rows + extra, sum(lengths)
        split = split_tokens(lengths, num_ranks, layout=layout, rows=rows)
        if layout == "contiguous":
            owners = [rank for rank in range(num_ranks) for _ in range(rows)][:total]
            start_N, end_N, _ = lists(*sharding.token_ranges(num_ranks * rows, num_ranks))
            held = [list(range(a, min(b, total))) for a, b in zip(start_N, end_N, strict=True)]
            assert [[t for t in row if t >= 0] for row in split.index_NC.tolist()] == held
        else:
            owners = OWNERS[layout](lengths, num_ranks)
        assert_split(split, owners, num_ranks, rows)


# ---- a layout of one's own -------------------------------------------------------------------------------------------


def test_from_owner_puts_every_token_where_it_is_told():
    draw = random.Random(2)
    for _ in range(100):
        num_ranks, total = draw.choice([1, 2, 3, 8, 64]), draw.randrange(1, 30)
        owners = [draw.randrange(num_ranks) for _ in range(total)]
        rows = max(owners.count(rank) for rank in range(num_ranks)) + draw.randrange(3)
        for given in (owners, tuple(owners), torch.tensor(owners), torch.tensor(owners, dtype=torch.int32)):
            assert_split(TokenSplit.from_owner(given, num_ranks), owners, num_ranks)
            assert_split(TokenSplit.from_owner(given, num_ranks, rows=rows), owners, num_ranks, rows)


@pytest.mark.parametrize("owners", [[], (), torch.empty(0, dtype=torch.int64)], ids=["list", "tuple", "tensor"])
def test_from_owner_of_no_tokens_is_padding_alone(owners):
    assert_split(TokenSplit.from_owner(owners, 3), [], 3)
    assert TokenSplit.from_owner(owners, 3, rows=2).index_NC.tolist() == [[-1, -1]] * 3


INTEGERS = "owner must be one integer per token"


@pytest.mark.parametrize(
    ("owner", "named", "message"),
    [
        ([0, 2, -1], {}, "owner must be in 0..1; got 2 for token 1"),
        ([0, -1, 2], {}, "owner must be in 0..1; got -1 for token 1"),
        (torch.tensor([1, 1, 7]), {}, "owner must be in 0..1; got 7 for token 2"),
        (torch.tensor([0.0, 1.0]), {}, f"{INTEGERS}; got (torch.float32, (2,))"),
        (torch.tensor([True, False]), {}, f"{INTEGERS}; got (torch.bool, (2,))"),
        (torch.tensor([[0, 1]]), {}, f"{INTEGERS}; got (torch.int64, (1, 2))"),
        (torch.tensor(1), {}, f"{INTEGERS}; got (torch.int64, ())"),
        (torch.empty(0), {}, f"{INTEGERS}; got (torch.float32, (0,))"),
        ([0, 1, 1], {"rows": 1}, "rows must be an integer >= 2; got 1"),
        ([0, 1, 1], {"rows": 2.0}, "rows must be an integer >= 2; got 2.0"),
        ([0, 1, 1], {"rows": True}, "rows must be an integer >= 2; got True"),
        ([0], {"num_ranks": 0}, "num_ranks must be an integer >= 1; got 0"),
        ([0], {"num_ranks": 2.0}, "num_ranks must be an integer >= 1; got 2.0"),
    ],
)
def test_from_owner_refuses_misfits_in_one_line(owner, named, message, unchecked):
    with pytest.raises(ValueError) as error:
        TokenSplit.from_owner(owner, **({"num_ranks": 2} | named))
    assert str(error.value) == f"TokenSplit.from_owner: {message}"


@pytest.mark.parametrize(
    "owner",
    [[0.0, 1.0], [True, False], [0, True], ["0", "1"], [None], [[0], [1, 0]], [[0, 1]], 1, None, torch.tensor([0j])],
    ids=repr,
)
def test_from_owner_refuses_what_are_no_integers_by_name(owner, unchecked):
    with pytest.raises(ValueError, match=r"^TokenSplit\.from_owner: owner must be .*; got .*$"):
        TokenSplit.from_owner(owner, 2)


# ---- scatter and gather ----------------------------------------------------------------------------------------------


def splits():
    """Yield splits of every kind: full, padded, with empty ranks, of no tokens, and a random one."""
    for layout in LAYOUTS:
        yield from (split_tokens(lengths, 3, layout=layout) for lengths in ([5, 2], [9], [1], []))
    yield split_tokens([7], 2, layout="contiguous", rows=6)
    yield TokenSplit.from_owner(torch.randint(5, (23,)), 5)


@pytest.mark.parametrize("dims", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool])
def test_scatter_equals_a_loop_over_rows_and_gather_is_its_inverse(dtype, dims):
    for split in splits():
        x_TD = torch.randint(2 if dtype == torch.bool else 100, (split.num_tokens, *dims)).to(dtype)
        for fill in (0, 1) if dtype == torch.bool else (0, -1):
            rows = split.scatter(x_TD, fill=fill)
            want = [x_TD[t] if t >= 0 else torch.full(dims, fill, dtype=dtype) for t in split.index_NC.flatten()]
            assert rows.dtype == dtype
            assert rows.shape == (split.num_ranks * split.rows, *dims)
            assert all(torch.equal(a, b) for a, b in zip(rows, want, strict=True))
            assert torch.equal(split.gather(rows), x_TD)
        assert torch.equal(split.scatter(x_TD), split.scatter(x_TD, fill=0))


def test_gradients_of_scatter_and_gather_are_each_others_inverse():
    for split in splits():
        x_TD = torch.randn(split.num_tokens, 2, dtype=torch.float64, requires_grad=True)
        y_MD = torch.randn(split.num_ranks * split.rows, 2, dtype=torch.float64, requires_grad=True)
        if x_TD.numel() > 0:
            assert torch.autograd.gradcheck(split.scatter, x_TD)
            assert torch.autograd.gradcheck(split.gather, y_MD)

        pull_MD, pull_TD = torch.randn_like(y_MD), torch.randn_like(x_TD)
        (grad_TD,) = torch.autograd.grad(split.scatter(x_TD, fill=7), x_TD, pull_MD)
        (grad_MD,) = torch.autograd.grad(split.gather(y_MD), y_MD, pull_TD)
        assert torch.equal(grad_TD, split.gather(pull_MD))
        assert torch.equal(grad_MD, split.scatter(pull_TD))


def test_what_padding_rows_hold_reaches_no_value_and_no_gradient():
    for split in splits():
        padding_M = split.index_NC.flatten() < 0
        x_TD = torch.randn(split.num_tokens, 2, requires_grad=True)
        rows = split.scatter(x_TD, fill=torch.nan).square()
        assert torch.equal(rows.isnan().any(1), padding_M)

        y_TD = split.gather(rows)
        grad_TD, grad_MD = torch.autograd.grad(y_TD.sum(), (x_TD, rows))

        assert torch.equal(y_TD, x_TD.square())
        assert torch.equal(grad_TD, 2 * x_TD)
        assert torch.equal(grad_MD, (~padding_M).float()[:, None].expand(-1, 2))


def test_gradients_of_padding_rows_are_dropped_even_if_they_are_not_finite():
    split = split_tokens([7], 2, layout="zigzag")
    x_TD = torch.randn(7, 2, requires_grad=True)
    pull_MD = torch.where((split.index_NC.flatten() < 0)[:, None], torch.nan, 1.0).expand(-1, 2)
    (grad_TD,) = torch.autograd.grad(split.scatter(x_TD), x_TD, pull_MD)
    assert torch.equal(grad_TD, torch.ones(7, 2))


def test_scatter_and_gather_run_under_grad_and_vmap():
    split = split_tokens([7], 2, layout="zigzag")
    x_TD = torch.randn(7, 2)
    grad_TD = torch.func.grad(lambda x: split.gather(split.scatter(x).sin()).sum())(x_TD)
    torch.testing.assert_close(grad_TD, x_TD.cos())
    x_BTD = torch.randn(3, 7, 2)
    mapped = torch.func.vmap(split.scatter)(x_BTD)
    assert torch.equal(mapped, torch.stack([split.scatter(x) for x in x_BTD]))


def test_a_split_is_a_pytree_of_its_two_vectors():
    split = split_tokens([5, 2], 3, layout="striped")
    leaves, spec = tree_flatten(split)
    again = tree_unflatten(leaves, spec)
    assert leaves[0] is again.index_NC is split.index_NC
    assert leaves[1] is again.inverse_T is split.inverse_T
    assert len(leaves) == 2
    assert tree_map(lambda x: x.to("meta"), split).rows == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda split: split.scatter(torch.zeros(8, 2)), "scatter: there must be 7 rows; got (8, 2)"),
        (lambda split: split.scatter(torch.tensor(1.0)), "scatter: there must be 7 rows; got ()"),
        (lambda split: split.gather(torch.zeros(7)), "gather: there must be 8 rows; got (7,)"),
        (
            lambda split: split.local_batch(sfa.Batch.from_lengths([8]), 0),
            "local_batch: there must be 7 rows; got (8,)",
        ),
        (lambda split: split.local_batch(sfa.Batch.from_lengths([7]), 2), "local_batch: rank must be in 0..1; got 2"),
        (lambda split: split.local_batch(sfa.Batch.from_lengths([7]), -1), "local_batch: rank must be in 0..1; got -1"),
        (
            lambda split: split.local_batch(sfa.Batch.from_lengths([7]), True),
            "local_batch: rank must be in 0..1; got True",
        ),
    ],
)
def test_other_numbers_of_rows_and_ranks_are_refused_in_one_line(call, message, unchecked):
    with pytest.raises(ValueError) as error:
        call(split_tokens([7], 2, layout="zigzag"))
    assert str(error.value) == f"TokenSplit.{message}"


# ---- local batches ---------------------------------------------------------------------------------------------------


def random_batch(draw, paged):
    """Draw a ragged batch with cached context and padded requests."""
    requests = []
    for _ in range(draw.randrange(1, 6)):
        n = draw.randrange(6)
        requests.append((n, draw.choice([0, n, n + draw.randrange(5)])))
    lengths, seq_lens = [n for n, _ in requests], [s for _, s in requests]
    if not paged:
        return lengths, sfa.Batch.from_lengths(lengths, seq_lens)
    table_BU = torch.randperm(len(requests) * 4).view(-1, 4).to(torch.int32)
    return lengths, sfa.Batch.from_lengths(lengths, seq_lens, block_table=table_BU, block_size=3)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", [*LAYOUTS, "random"])
def test_local_batch_equals_a_loop_over_its_rows(layout, paged):
    draw = random.Random(3)
    for _ in range(20):
        lengths, batch = random_batch(draw, paged)
        num_ranks, start = draw.choice([1, 2, 3, 7]), batch.query_start_B1.tolist()
        if layout == "random":
            split = TokenSplit.from_owner([draw.randrange(num_ranks) for _ in range(start[-1])], num_ranks, rows=40)
        else:
            split = split_tokens(lengths, num_ranks, layout=layout)
        for rank, index in enumerate(split.index_NC.tolist()):
            local = split.local_batch(batch, rank)

            fills = {"position_T": -1, "request_T": -1, "start_T": 0, "end_T": 0, "slot_T": -1}
            for name, fill in fills.items():
                if name == "slot_T" and not paged:
                    assert local.slot_T is None
                    continue
                everything = getattr(batch, name).tolist()
                assert getattr(local, name).tolist() == [everything[t] if t >= 0 else fill for t in index], name
                assert getattr(local, name).dtype == torch.int64
            counts = [sum(a <= t < b for t in index) for a, b in itertools.pairwise(start)]
            assert local.query_start_B1.tolist() == [0, *itertools.accumulate(counts)]
            for name in ("seq_len_B", "key_start_B", "block_table_BU", "row_S"):
                assert getattr(local, name) is getattr(batch, name)
            named = set(fills) | {"query_start_B1", "seq_len_B", "key_start_B", "block_table_BU", "row_S"}
            assert named == set(batch.__dataclass_fields__)


def test_local_batches_of_the_contiguous_layout_have_the_query_ends_of_local_lengths():
    draw = random.Random(4)
    for _ in range(20):
        lengths, batch = random_batch(draw, paged=False)
        for num_ranks in (1, 2, 5):
            start_N, end_N, _ = sharding.token_ranges(sum(lengths), num_ranks)
            query_end_NB, _ = sharding.local_lengths(batch.query_start_B1, batch.seq_len_B, start_N, end_N)
            split = split_tokens(lengths, num_ranks, layout="contiguous")
            for rank in range(num_ranks):
                got = split.local_batch(batch, rank).query_start_B1.tolist()
                assert got == [0, *query_end_NB[rank].tolist()]


def test_a_local_batch_of_no_tokens_is_padding_alone():
    batch = sfa.Batch.from_lengths([2, 0])
    local = split_tokens([2, 0], 4, layout="striped").local_batch(batch, 3)
    assert lists(local.position_T, local.request_T, local.end_T) == ([-1], [-1], [0])
    assert local.query_start_B1.tolist() == [0, 0, 0]
    empty = split_tokens([], 2, layout="striped").local_batch(sfa.Batch.from_lengths([]), 1)
    assert (empty.position_T.shape, empty.query_start_B1.tolist()) == ((0,), [0])


def test_slots_of_a_rank_equal_the_vectors():
    """Pages of one row, so that the tokens' slots are 0 to 4: two of request 1 stand behind three cached ones."""
    (entry,) = (x for x in PEERS if "slots_T" in x)
    table_BU = torch.tensor([[0, 1, 2, -1, -1], [5, 6, 7, 3, 4]], dtype=torch.int32)
    batch = sfa.Batch.from_lengths(entry["query_lens"], entry["seq_len_B"], block_table=table_BU, block_size=1)
    assert batch.slot_T.tolist() == entry["slots_T"]

    split = split_tokens(entry["query_lens"], entry["num_ranks"], layout="contiguous")

    assert split.local_batch(batch, 1).slot_T.tolist() == entry["slots_of_rank_1"]
    scattered = split.scatter(torch.tensor(entry["slots_T"]), fill=-1)
    assert scattered.view(2, -1)[1].tolist() == entry["slots_of_rank_1"]


# ---- bad input -------------------------------------------------------------------------------------------------------

WORDS = "'contiguous', 'zigzag', 'striped', 'balanced'"
REFUSED = [
    (([3, -1], 2), {}, "lengths must be integers >= 0; got -1"),
    (([1.5], 2), {}, "lengths must be integers >= 0; got 1.5"),
    (([True], 2), {}, "lengths must be integers >= 0; got True"),
    ((torch.tensor([1.5]), 2), {}, "lengths must be integers >= 0; got 1.5"),
    ((5, 2), {}, "lengths must be a sequence of integers; got 5"),
    (([5], 0), {}, "num_ranks must be an integer >= 1; got 0"),
    (([5], 2.0), {}, "num_ranks must be an integer >= 1; got 2.0"),
    (([5], 2), {"layout": "ring"}, f"layout must be of {WORDS}; got 'ring'"),
    (([5], 2), {"layout": None}, f"layout must be of {WORDS}; got None"),
    (([5], 2), {"layout": ["striped"]}, f"layout must be of {WORDS}; got ['striped']"),
    (([2, 5], 2), {"seq_lens": [2, 4]}, "seq_len must be 0 or >= length 5 of request 1; got 4"),
    (([2, 5], 2), {"seq_lens": [2]}, "lengths and seq_lens must have one length; got 1"),
    (([5], 2), {"seq_lens": [-5]}, "seq_lens must be integers >= 0; got -5"),
    (([5], 2), {"layout": "contiguous", "rows": 2}, "rows must be an integer >= 3; got 2"),
    (([5], 2), {"layout": "zigzag", "rows": 2}, "rows must be an integer >= 3; got 2"),
    (([5], 2), {"layout": "striped", "rows": 2}, "rows must be an integer >= 3; got 2"),
    (([5], 2), {"layout": "balanced", "rows": 2}, "rows must be an integer >= 3; got 2"),
    (([5], 2), {"layout": "contiguous", "rows": 3.0}, "rows must be an integer >= 3; got 3.0"),
]


@pytest.mark.parametrize(("args", "named", "message"), REFUSED)
def test_split_tokens_refuses_misfits_in_one_line(args, named, message, unchecked):
    with pytest.raises(ValueError) as error:
        split_tokens(*args, **({"layout": "striped"} | named))
    assert str(error.value) == f"split_tokens: {message}"


def test_seq_lens_of_padded_requests_may_be_zero():
    assert_split(split_tokens([2, 5], 2, layout="striped", seq_lens=[0, 9]), [0, 1] * 3 + [0], 2)


def test_a_config_with_another_k_changes_the_balanced_layout():
    """Between 4 and 64 keys, attention is dearer with k = 64 only."""
    lengths, seq_lens = [64, 64, 64], [64, 128, 1024]
    wide = (*TINY[:3], 64)
    for config, sizes in ((sfa.TINY, TINY), (replace(sfa.TINY, index_topk=64), wide)):
        split = split_tokens(lengths, 3, layout="balanced", seq_lens=seq_lens, config=config)
        want = balanced_owners(lengths, 3, cost=token_costs(lengths, seq_lens, sizes))
        assert_split(split, want, 3)
