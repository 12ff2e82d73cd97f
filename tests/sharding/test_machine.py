"""Seconds of a layer, worked out by hand on a machine of round numbers."""

import pytest

from sharding.costs import FlopParts
from sharding.machine import Machine, RankLayer, layer_seconds
from sharding.traffic import Traffic

ONE = Machine(name="one", flops=1.0, link=1.0)


def rank(*parts, keys=0, **received):
    """A rank with projections, scoring, selection, attention, output, and what it receives."""
    traffic = tuple(Traffic(what, "any", "cp", 0, count) for what, count in received.items())
    return RankLayer(FlopParts(*parts), keys, traffic)


def test_the_gather_of_keys_is_hidden_by_the_projection_of_queries_or_waited_for():
    """Keys done at 3; queries at 10; the gather at 3 + link."""
    for link, want in ((0, 34), (7, 34), (8, 35), (20, 47)):
        ranks = [rank(10, 8, 1, 11, 4, keys=3)._replace(traffic=(Traffic("keys", "any", "cp", 0, link),))]
        assert layer_seconds(ranks, ONE) == [want]


def test_every_rank_waits_for_the_keys_of_the_slowest():
    slow, fast = rank(40, 1, 0, 1, 1, keys=30), rank(4, 1, 0, 1, 1, keys=3)
    keys = (Traffic("keys", "all_gather", "cp", 0, 5),)
    assert layer_seconds([slow._replace(traffic=keys), fast._replace(traffic=keys)], ONE) == [43, 38]


def test_a_part_takes_its_own_rate_and_a_collective_its_latency():
    machine = Machine(name="m", flops=2.0, link=4.0, latency=0.5, scoring=4.0, selection=8.0, attention=16.0)
    got = layer_seconds([rank(8, 8, 8, 8, 8, keys=0)], machine)
    assert got == [4 + 2 + 1 + 0.5 + 4]
    gather = rank(0, 0, 0, 0, 0)._replace(traffic=(Traffic("keys", "all_gather", "cp", 0, 8),))
    assert layer_seconds([gather], machine) == [2.5]
    assert machine.on_link(0) == 0.0


def test_gathered_matrices_follow_the_keys_and_are_waited_for_before_their_use():
    """Keys at 1, gather to 3, q_b to 6, kv_b to 10: queries end at 14; attention at 19; o_proj came at 15."""
    ranks = [rank(5, 2, 0, 3, 6, keys=1)]
    moved = [("keys", 2), ("q_b_proj", 3), ("kv_b_proj", 4), ("o_proj", 5)]
    traffic = tuple(Traffic(what, "all_gather", "cp", 0, count) for what, count in moved)
    assert layer_seconds([ranks[0]._replace(traffic=traffic)], ONE) == [25]
    late = (*traffic[:3], Traffic("o_proj", "all_gather", "cp", 0, 50))
    assert layer_seconds([ranks[0]._replace(traffic=late)], ONE) == [66]


@pytest.mark.parametrize(("prefetch", "fetch", "want"), [(1, 5, 22), (1, 19, 22), (1, 25, 28), (2, 25, 28), (0, 5, 27)])
def test_a_fetched_layer_is_hidden_by_the_one_before_unless_the_link_is_busy(prefetch, fetch, want):
    """The layer takes 22 by itself; its keys leave the link free at 3."""
    traffic = (Traffic("keys", "all_gather", "cp", 0, 2), Traffic("layer", "broadcast", "cp", 0, fetch))
    source = (traffic[0], Traffic("layer", "broadcast", "cp", 9, 0))
    ranks = [rank(10, 4, 0, 4, 4, keys=1)._replace(traffic=moved) for moved in (traffic, source)]
    assert layer_seconds(ranks, ONE, prefetch=prefetch) == [want, want]


def test_exchanged_values_and_sums_and_dealt_out_heads_meet_all_ranks():
    moved = tuple(Traffic(what, "any", "cp", 0, count) for what, count in (("values", 7), ("sums", 5)))
    ranks = [rank(1, 1, 0, 1, 2)._replace(traffic=moved), rank(1, 3, 0, 1, 2)._replace(traffic=moved)]
    assert layer_seconds(ranks, ONE) == [5 + 7 + 2 + 5] * 2
    heads = (Traffic("heads", "all_reduce", "tp", 0, 11),)
    assert layer_seconds([one._replace(traffic=heads) for one in ranks], ONE) == [7 + 11] * 2


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"flops": 0.0}, "flops must be a number > 0; got 0.0"),
        ({"link": -1.0}, "link must be a number > 0; got -1.0"),
        ({"link": None}, "link must be a number > 0; got None"),
        ({"latency": -1e-9}, "latency must be a number >= 0; got -1e-09"),
        ({"attention": True}, "attention must be a number > 0; got True"),
        ({"scoring": "fast"}, "scoring must be a number > 0; got 'fast'"),
        ({"flops": float("nan")}, "flops must be a number > 0; got nan"),
    ],
)
def test_rates_that_are_none_are_refused(named, message, unchecked):
    with pytest.raises(ValueError) as error:
        Machine(**({"name": "m", "flops": 1.0, "link": 1.0} | named))
    assert str(error.value) == f"Machine: {message}"
