"""Ring attention on paper: pairs counted by a loop, hops worked out by hand, and what it saves beside the gather."""

import pytest
import torch

import sfa_functional as sfa
from sharding import MeshShape, TokenSplit, estimate, ring_attention, split_tokens
from sharding.costs import FlopParts
from sharding.machine import Machine, RankLayer
from sharding.ring_attention import pairs_between_ranks, ring_layer_seconds
from sharding.traffic import Traffic

ONE = Machine(name="one", flops=1.0, link=1.0)


@pytest.mark.parametrize(("block", "groups"), [(1, 2), (3, 2), (4, 1), (32, 4096)])
@pytest.mark.parametrize("seed", range(5))
def test_pairs_between_ranks_are_those_of_a_loop(seed, block, groups, monkeypatch):
    """However runs are put into blocks, and blocks are taken at a time."""
    monkeypatch.setattr(ring_attention, "BLOCK", block)
    monkeypatch.setattr(ring_attention, "GROUPS", groups)
    generator = torch.Generator().manual_seed(seed)
    lengths, context, ranks = [5, 0, 9, 3], [4, 2, 0, 1], 3
    owners = torch.randint(ranks, (sum(lengths),), generator=generator)
    want, visible, first = torch.zeros(ranks, ranks + 1, dtype=torch.float64), [], 0
    for n, before in zip(lengths, context, strict=True):
        for i in range(n):
            visible.append(before + i + 1)
            want[owners[first + i], -1] += before
            for j in range(i + 1):
                want[owners[first + i], owners[first + j]] += 1
        first += n
    assert torch.equal(pairs_between_ranks(owners, torch.tensor(visible), lengths, ranks), want)


def test_pairs_of_padding_are_none():
    visible_T = torch.tensor([1, 2, 0, 0])
    got = pairs_between_ranks(torch.tensor([0, 1, 0, 1]), visible_T, [2, 2], 2)
    assert got.tolist() == [[1, 0, 0], [1, 1, 0]]


def test_a_hop_lasts_as_long_as_its_slowest_rank_or_the_link():
    """Rank 0 sees itself alone; rank 1 sees rank 0 in hop 1, and itself in hop 0, one to three."""
    keys = (Traffic("keys", "all_gather", "cp", 0, 99),)
    ranks = [RankLayer(FlopParts(5, 4, 1, 8, 2), 0, keys), RankLayer(FlopParts(6, 8, 3, 16, 1), 0, keys)]
    pairs = torch.tensor([[4.0, 0, 0], [6, 2, 0]], dtype=torch.float64)
    scores = max(4, 2) + 6  # hop 0: all of rank 0's, a quarter of rank 1's; hop 1: the rest of rank 1's
    sums = max(8, 4) + 12
    assert ring_layer_seconds(ranks, pairs, (1, 1), ONE) == 6 + scores + 3 + sums + 2
    assert ring_layer_seconds(ranks, pairs, (7, 1), ONE) == 6 + (7 + 6) + 3 + sums + 2
    assert ring_layer_seconds(ranks, pairs, (7, 10), ONE) == 6 + (7 + 6) + 3 + (10 + 12) + 2


def test_cached_keys_are_worked_on_in_the_first_hop_and_weights_take_the_link():
    moved = (Traffic("keys", "all_gather", "cp", 0, 9), Traffic("layer", "broadcast", "cp", 0, 50))
    ranks = [RankLayer(FlopParts(0, 8, 0, 0, 0), 0, moved)] * 2
    pairs = torch.tensor([[1.0, 1, 2], [1, 1, 2]], dtype=torch.float64)
    assert ring_layer_seconds(ranks, pairs, (1, 1), ONE) == 50 + 2
    alone = [rank._replace(traffic=moved[:1]) for rank in ranks]
    assert ring_layer_seconds(alone, pairs, (3, 1), ONE) == 6 + 2 + 1
    assert ring_layer_seconds(alone, pairs, (7, 1), ONE) == 7 + 2 + 1


def test_blocks_come_from_the_rank_before():
    """Ranks 1 and 2 have what they see after one hop, so only the last hop is idle."""
    ranks = [RankLayer(FlopParts(0, work, 0, 0, 0), 0, ()) for work in (4, 6, 10)]
    pairs = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.float64)
    assert ring_layer_seconds(ranks, pairs, (7, 0), ONE) == 7 + 10 + 0


def test_a_layer_that_scores_nothing_has_one_ring():
    ranks = [RankLayer(FlopParts(0, 0, 0, 4, 0), 0, ())] * 2
    pairs = torch.tensor([[1.0, 1, 0], [1, 1, 0]], dtype=torch.float64)
    assert ring_layer_seconds(ranks, pairs, (1000, 3), ONE) == 3 + 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_the_ring_sends_as_much_holds_less_and_is_never_faster_where_the_link_is_hidden(layout):
    got = estimate(sfa.DEEPSEEK_V32, [65536], MeshShape(cp=16), layout=layout)
    row = (512 + 64 + 128) * 2
    assert got.ring.bytes_sent == got.bytes_sent
    assert got.bytes_resident - got.ring.bytes_resident == 2 * 65536 * row - 2 * 4096 * row
    assert got.ring.seconds >= got.seconds * 0.999
    if layout == "contiguous":  # half of the ranks wait in each hop
        assert got.ring.seconds > 1.5 * got.seconds


def test_one_rank_is_a_ring_of_itself():
    split = TokenSplit.from_owner([0] * 9, 1)
    got = estimate(sfa.TINY, [9], MeshShape(cp=1), split=split)
    assert got.ring.seconds == pytest.approx(got.seconds)
    assert split_tokens([9], 1, layout="zigzag").rows == 9
