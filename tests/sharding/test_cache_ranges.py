"""A sharded cache's index arithmetic against the vectors, and against pools that are filled and gathered by hand."""

import itertools
import random

import pytest
import torch

import sfa_functional as sfa
import sharding
from sharding import CacheSplit
from tests.vectors import numbers, read_vectors

PEERS = read_vectors("peers.json")["sharded_cache"]
SPLITS = [CacheSplit(ranks, il) for ranks, il in itertools.product((1, 2, 3, 5), (1, 2, 3, 4))]


def vectors(part):
    entries = PEERS[part]
    return pytest.mark.parametrize("entry", entries, ids=[f"{part}{i}" for i in range(len(entries))])


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def dealt(split, count):
    """Deal positions 0 .. count - 1 out in runs, like cards; return every rank's list."""
    held = [[] for _ in range(split.num_ranks)]
    for run, first in enumerate(range(0, count, split.interleave)):
        held[run % split.num_ranks] += range(first, min(first + split.interleave, count))
    return held


# ---- vectors ---------------------------------------------------------------------------------------------------------


@vectors("index_remap")
def test_local_selection_equals_the_vectors(entry):
    split = CacheSplit(entry["ranks"], entry["interleave"])
    orders = [entry["selection"], *([entry["published_order"]] if "published_order" in entry else [])]
    for selection in orders:  # the peer's own order leaves every rank's entries in the same one
        got = [split.local_selection(int32([selection]), rank).tolist() for rank in range(split.num_ranks)]
        assert got == [[row] for row in entry["local"]]


@vectors("local_lengths")
def test_local_lengths_equal_the_vectors(entry):
    split = CacheSplit(entry["ranks"], entry["interleave"])
    assert split.local_lengths(torch.tensor(entry["seq_lens"])).tolist() == entry["local"]


@vectors("local_slots_of_positions")
def test_latent_slots_and_index_key_slots_equal_the_vectors(entry):
    """One page holds everything: page 0 of the sharded pool, the first pages of the replicated one."""
    split, rank = CacheSplit(entry["ranks"], entry["interleave"]), entry["rank"]
    position, request = torch.tensor(entry["positions"]), torch.zeros(len(entry["positions"]), dtype=torch.int64)
    table_BU = int32([[0]])
    index_table_BU = sharding.replicated_block_table(table_BU, split.num_ranks)
    for block_size in (2, 4):
        named = {"block_size": block_size}
        assert split.local_slots(table_BU, request, position, rank, **named).tolist() == entry["cache_slots"]
        assert sfa.token_slots(index_table_BU, request, position, **named).tolist() == entry["index_key_slots"]


@vectors("replicated_block_table")
def test_replicated_block_table_equals_the_vectors(entry):
    table_BU = int32(entry["block_table"])
    replicated = sharding.replicated_block_table(table_BU, entry["ranks"])
    assert replicated.tolist() == entry["replicated"]
    assert CacheSplit(entry["ranks"]).local_block_table(replicated).tolist() == entry["block_table"]


@vectors("slots_of_a_rank")
def test_slots_of_a_rank_equal_the_vectors(entry):
    """A rank of any range is a layout of one's own; a rank of an equal share is the contiguous one."""
    slots, (start, end) = torch.tensor(entry["slots"]), entry["range"]
    owners = [0 if t < start else 1 if t < end else 2 for t in range(len(slots))]
    split = sharding.TokenSplit.from_owner(owners, 3, rows=end - start)
    assert split.scatter(slots, fill=-1).view(3, -1)[1].tolist() == entry["local"]
    if start % (end - start) == 0:
        ranks = entry["padded_rows"] // (end - start)
        split = sharding.split_tokens([len(slots)], ranks, layout="contiguous", rows=end - start)
        assert split.scatter(slots, fill=-1).view(ranks, -1)[start // (end - start)].tolist() == entry["local"]


@vectors("lse_merge")
def test_partial_results_merge_as_in_the_vectors_in_any_order(entry):
    parts = [
        sfa.AttentionOutput(numbers(part["out_THL"], torch.float64), numbers(part["lse_TH"], torch.float64))
        for part in entry["parts"]
    ]
    neutral = sfa.AttentionOutput(torch.zeros_like(parts[0].out_THL), torch.full_like(parts[0].lse_TH, -torch.inf))
    for order in itertools.permutations([*parts, neutral]):
        merged = sfa.merge_attention(order)
        torch.testing.assert_close(merged.out_THL, numbers(entry["out_THL"], torch.float64), atol=1e-6, rtol=0)
        torch.testing.assert_close(merged.lse_TH, numbers(entry["lse_TH"], torch.float64), atol=1e-6, rtol=0)


def test_gathered_block_table_equals_the_vectors():
    entry = PEERS["gathered_blocks"]["decode"]
    got = sharding.gathered_block_table(entry["requests"], entry["blocks_per_rank"], entry["ranks"])
    assert got.dtype == torch.int32
    assert got.tolist() == entry["place_of_logical_block"]


def test_compact_block_table_equals_the_vectors():
    entry = PEERS["gathered_blocks"]["prefill_compact"]
    page_M, table_BU = sharding.compact_block_table(int32(entry["block_table"]), entry["ranks"])
    assert (page_M.dtype, table_BU.dtype) == (torch.int64, torch.int32)
    assert page_M.tolist() == entry["distinct"]
    assert table_BU.tolist() == entry["compact_table"]


# ---- who holds what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_owner_and_local_position_are_those_of_dealing_out_runs(split):
    held = dealt(split, 100)
    place = {p: (rank, i) for rank, positions in enumerate(held) for i, p in enumerate(positions)}
    for dtype in (torch.int32, torch.int64):
        position = torch.arange(100, dtype=dtype)
        owner, local = split.owner(position), split.local_position(position)
        assert owner.dtype == local.dtype == torch.int64
        assert list(zip(owner.tolist(), local.tolist(), strict=True)) == [place[p] for p in range(100)]
        assert torch.equal(split.owner(position.view(4, 25)), owner.view(4, 25))
        assert torch.equal(split.local_position(position[7]), local[7])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_negative_positions_are_nobodys(split):
    position = torch.tensor([-1, -2, -5, -100, torch.iinfo(torch.int32).min])
    for function in (split.owner, split.local_position, lambda p: split.gathered_position(p, block_size=4)):
        assert function(position).tolist() == [-1] * 5


def test_positions_beyond_int32_have_an_owner_and_a_row():
    position = 2**40 + 5
    split = CacheSplit(3, 2)
    assert split.owner(torch.tensor([position])).tolist() == [position // 2 % 3]
    assert split.local_position(torch.tensor([position])).tolist() == [position // 6 * 2 + position % 2]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_local_lengths_are_those_of_dealing_out_runs_and_add_up(split):
    lengths = list(range(60))
    for dtype in (torch.int32, torch.int64):
        got_NB = split.local_lengths(torch.tensor(lengths, dtype=dtype))
        assert got_NB.dtype == torch.int64
        assert got_NB.T.tolist() == [[len(positions) for positions in dealt(split, n)] for n in lengths]
        assert got_NB.sum(0).tolist() == lengths
    assert split.local_lengths(torch.tensor([], dtype=torch.int64)).shape == (split.num_ranks, 0)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_local_selection_is_compacted_in_order_and_ends_in_unused_entries(split):
    held = dealt(split, 80)
    rows = [
        [0, 1, 2, 3, 7, 8, 30, 79],
        [-1] * 8,
        [79, 3, 5, 0, 1, 40, 41, 42],
        [-5, 9, -1, 10, -(2**31), 11, 12, -1],
        [13, -1, -1, -1, -1, -1, -1, -1],
    ]
    for rank in range(split.num_ranks):
        want = [[held[rank].index(p) for p in row if p in held[rank]] for row in rows]
        got_TK = split.local_selection(int32(rows), rank)
        assert got_TK.dtype == torch.int32
        assert got_TK.tolist() == [row + [-1] * (8 - len(row)) for row in want]


def test_local_selection_of_large_positions_and_of_nothing():
    split, large = CacheSplit(2, 1), 2**31 - 1
    selection_TK = int32([[large - 1, large, -1], [large, 0, large - 1]])
    assert split.local_selection(selection_TK, 0).tolist() == [[large // 2, -1, -1], [0, large // 2, -1]]
    assert split.local_selection(selection_TK, 1).tolist() == [[large // 2, -1, -1], [large // 2, -1, -1]]
    for shape in ((0, 3), (3, 0)):
        assert split.local_selection(torch.zeros(shape, dtype=torch.int32), 1).shape == shape


def test_local_selections_of_random_rows_equal_a_loop():
    draw = random.Random(0)
    for _ in range(50):
        split = CacheSplit(draw.randrange(1, 6), draw.randrange(1, 6))
        rows = [[draw.choice([-1, draw.randrange(-9, 200)]) for _ in range(12)] for _ in range(4)]
        for rank in range(split.num_ranks):
            got = split.local_selection(int32(rows), rank).tolist()
            cycle, il = split.num_ranks * split.interleave, split.interleave
            for row, mine in zip(rows, got, strict=True):
                want = [p // cycle * il + p % il for p in row if p >= 0 and p // il % split.num_ranks == rank]
                assert mine == want + [-1] * (12 - len(want))


# ---- tables ----------------------------------------------------------------------------------------------------------


def random_table(draw, requests, columns, pages):
    """Give requests pages in a scrambled order; some have fewer than others, -1 behind their last one."""
    order = draw.sample(range(pages), requests * columns)
    counts = [draw.choice([columns, draw.randrange(columns + 1)]) for _ in range(requests)]
    return [[order[b * columns + u] if u < counts[b] else -1 for u in range(columns)] for b in range(requests)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_local_block_table_is_the_inverse_of_replicated_block_table(num_ranks):
    draw = random.Random(1)
    for requests, columns in [(1, 1), (3, 4), (2, 0), (0, 2)]:
        table = random_table(draw, requests, columns, 20)
        table_BU = int32(table).view(requests, columns)
        replicated = sharding.replicated_block_table(table_BU, num_ranks)
        want = [[page * num_ranks + c if page >= 0 else -1 for page in row for c in range(num_ranks)] for row in table]
        assert replicated.dtype == torch.int32
        assert replicated.shape == (requests, columns * num_ranks)
        assert replicated.tolist() == want
        again = CacheSplit(num_ranks).local_block_table(replicated)
        assert again.dtype == torch.int32
        assert torch.equal(again, table_BU)


@pytest.mark.parametrize(
    ("table", "ranks", "message"),
    [
        ([[0, 1, 2]], 2, "the block table must have a multiple of 2 columns; got 3"),
        ([[0, 1, 3, 2]], 2, "the table must be that of replicated_block_table for 2 ranks; got page 3 at request 0, c"),
        ([[0, 1], [1, 2]], 2, "the table must be that of replicated_block_table for 2 ranks; got page 1 at request 1"),
        ([[0, -1]], 2, "the table must be that of replicated_block_table for 2 ranks; got page -1 at request 0, col"),
        ([[-1, 1]], 2, "the table must be that of replicated_block_table for 2 ranks; got page 1 at request 0, col"),
        ([[6, 7, 9]], 3, "the table must be that of replicated_block_table for 3 ranks; got page 9 at request 0, col"),
        ([[-2, -1]], 2, "the table must be that of replicated_block_table for 2 ranks; got page -2 at request 0, col"),
    ],
)
def test_local_block_table_refuses_a_table_of_another_form(table, ranks, message):
    with pytest.raises(ValueError) as error:
        CacheSplit(ranks).local_block_table(int32(table))
    assert str(error.value).startswith(f"CacheSplit.local_block_table: {message}")
    assert "\n" not in str(error.value)


def test_local_block_table_does_not_look_at_a_table_on_a_device():
    table_BU = torch.empty(3, 8, dtype=torch.int32, device="meta")
    assert CacheSplit(4).local_block_table(table_BU).shape == (3, 2)


class Pools:
    """Every rank's pool as a plain list of (request, position), filled by dealing out the positions of each request.

    A rank's positions of a request lie on its pages in order; rows of pages that nobody has hold None.
    """

    def __init__(self, split, table, *, block_size, pages):
        self.split, self.table, self.block_size = split, table, block_size
        self.pools = [[None] * (pages * block_size) for _ in range(split.num_ranks)]
        self.held = []
        for b, row in enumerate(table):
            room = sum(page >= 0 for page in row) * block_size
            for rank, positions in enumerate(dealt(split, room * split.num_ranks + split.interleave)):
                for i, p in enumerate(positions[:room]):
                    self.pools[rank][row[i // block_size] * block_size + i % block_size] = (b, p)
                    self.held.append((b, p, rank))

    def page(self, rank, page):
        return self.pools[rank][page * self.block_size : (page + 1) * self.block_size]


def pools():
    """Yield pools of several forms; the interleave need not be the block size, nor divide it."""
    draw = random.Random(2)
    for ranks, il, block_size in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 4)):
        table = random_table(draw, 3, 2, 9)
        yield Pools(CacheSplit(ranks, il), table, block_size=block_size, pages=9)


def test_local_slots_are_the_rows_where_positions_were_put():
    for filled in pools():
        table_BU = int32(filled.table)
        request, position, owner = torch.tensor(filled.held).T.reshape(3, -1)
        for rank, pool in enumerate(filled.pools):
            slots = filled.split.local_slots(table_BU, request, position, rank, block_size=filled.block_size)
            for slot, b, p, r in zip(*(x.tolist() for x in (slots, request, position, owner)), strict=True):
                assert (slot == -1) == (r != rank)
                assert slot == -1 or pool[slot] == (b, p)


def test_local_slots_of_nobody_are_unused_in_any_shape():
    split, table_BU = CacheSplit(2, 1), int32([[3, -1], [5, 1]])
    request = torch.tensor([[0, 0, 0, -1], [1, 1, 1, 2]])
    position = torch.tensor([[0, 2, 4, 0], [6, -1, 8, 0]])
    got = split.local_slots(table_BU, request, position, 0, block_size=2)
    assert got.dtype == torch.int64
    assert got.tolist() == [[6, 7, -1, -1], [3, -1, -1, -1]]


def test_gathered_position_is_the_position_itself_where_runs_are_blocks():
    position = torch.arange(200)
    for ranks, block_size in itertools.product((1, 2, 3, 7), (1, 2, 5, 64)):
        split = CacheSplit(ranks, block_size)
        assert torch.equal(split.gathered_position(position, block_size=block_size), position)
        assert split.gathered_position(position.to(torch.int32), block_size=block_size).dtype == torch.int64


def assert_found(filled, table_BU, rows):
    """Look every held position up in gathered rows, through the table of their blocks."""
    request, position, _ = torch.tensor(filled.held).T.reshape(3, -1)
    place = filled.split.gathered_position(position, block_size=filled.block_size)
    slots = sfa.token_slots(table_BU, request, place, block_size=filled.block_size)
    assert [rows[slot] for slot in slots.tolist()] == [(b, p) for b, p, _ in filled.held]
    assert -1 not in slots


def test_positions_are_found_after_every_ranks_blocks_were_gathered():
    """Each rank brings the pages of every request in order, whatever stands in a page that is none."""
    for filled in pools():
        rows = []
        for rank in range(filled.split.num_ranks):
            for page in itertools.chain(*filled.table):
                rows += filled.page(rank, page) if page >= 0 else [None] * filled.block_size
        table_BU = sharding.gathered_block_table(3, 2, filled.split.num_ranks)
        assert_found(filled, table_BU, rows)


def test_positions_are_found_after_the_blocks_that_a_batch_refers_to_were_gathered():
    for filled in pools():
        page_M, table_BU = sharding.compact_block_table(int32(filled.table), filled.split.num_ranks)
        assert page_M.tolist() == sorted({page for row in filled.table for page in row if page >= 0})
        rows = []
        for rank in range(filled.split.num_ranks):
            for page in page_M.tolist():
                rows += filled.page(rank, page)
        assert_found(filled, table_BU, rows)
        missing = [[page < 0 for page in row for _ in range(filled.split.num_ranks)] for row in filled.table]
        assert (table_BU == -1).tolist() == missing


def test_tables_of_nothing_are_empty():
    page_M, table_BU = sharding.compact_block_table(int32([[-1, -1]]), 3)
    assert page_M.shape == (0,)
    assert table_BU.tolist() == [[-1] * 6]
    assert sharding.gathered_block_table(0, 4, 2).shape == (0, 8)
    assert sharding.gathered_block_table(3, 0, 2).shape == (3, 0)


# ---- bad input -------------------------------------------------------------------------------------------------------


TWO, TABLE = CacheSplit(2, 2), int32([[0, 1]])
ZERO = torch.tensor([0])
REFUSED = [
    (lambda: CacheSplit(0), "CacheSplit: num_ranks must be an integer >= 1; got 0"),
    (lambda: CacheSplit(2.0), "CacheSplit: num_ranks must be an integer >= 1; got 2.0"),
    (lambda: CacheSplit(2, 0), "CacheSplit: interleave must be an integer >= 1; got 0"),
    (lambda: CacheSplit(2, True), "CacheSplit: interleave must be an integer >= 1; got True"),
    (lambda: TWO.local_selection(TABLE, 2), "CacheSplit.local_selection: rank must be in 0..1; got 2"),
    (lambda: TWO.local_selection(TABLE, -1), "CacheSplit.local_selection: rank must be in 0..1; got -1"),
    (lambda: TWO.local_selection(TABLE, True), "CacheSplit.local_selection: rank must be in 0..1; got True"),
    (
        lambda: TWO.local_slots(TABLE, ZERO, ZERO, 2, block_size=4),
        "CacheSplit.local_slots: rank must be in 0..1; got 2",
    ),
    (lambda: TWO.local_slots(TABLE, ZERO, ZERO, 0, block_size=0), "token_slots: block_size must be >= 1; got 0"),
    (
        lambda: TWO.gathered_position(ZERO, block_size=0),
        "CacheSplit.gathered_position: block_size must be >= 1; got 0",
    ),
    (
        lambda: sharding.replicated_block_table(TABLE, 0),
        "replicated_block_table: num_ranks must be an integer >= 1; got 0",
    ),
    (
        lambda: sharding.gathered_block_table(1, 1, 0),
        "gathered_block_table: num_ranks must be an integer >= 1; got 0",
    ),
    (
        lambda: sharding.compact_block_table(TABLE, True),
        "compact_block_table: num_ranks must be an integer >= 1; got True",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_misfits_are_refused_in_one_line(call, message, unchecked):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_a_split_is_a_value():
    assert CacheSplit(4) == CacheSplit(4, 1) == CacheSplit(num_ranks=4, interleave=1)
    assert CacheSplit(4) != CacheSplit(4, 2)
    assert len({CacheSplit(4), CacheSplit(4, 1), CacheSplit(2)}) == 2
