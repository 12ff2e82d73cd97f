"""Owners of layers: the global number mod the ranks, so that any run of layers is dealt out evenly."""

import pytest

import sharding
from tests.vectors import read_vectors


@pytest.mark.parametrize("entry", read_vectors("peers.json")["ring"]["owners"], ids=lambda x: f"{x['num_layers']}")
def test_layer_owners_equal_the_vectors(entry):
    got = sharding.layer_owners(entry["num_layers"], entry["num_ranks"], start_layer=entry["start_layer"])
    assert list(got) == entry["owners"]


def test_a_layer_has_the_same_owner_in_whatever_run_it_stands():
    """Counted by walking from global layer 0, rank by rank."""
    for num_ranks in (1, 2, 3, 5, 16):
        walk = [rank for _ in range(40 // num_ranks + 1) for rank in range(num_ranks)]
        for start in range(20):
            for count in range(20):
                got = sharding.layer_owners(count, num_ranks, start_layer=start)
                assert got == tuple(walk[start : start + count])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 16, 64])
def test_loads_of_any_run_of_layers_differ_by_at_most_one(num_ranks):
    for start in range(0, 70, 3):
        for count in (0, 1, 2, 5, 30, 61):
            owners = sharding.layer_owners(count, num_ranks, start_layer=start)
            loads = [owners.count(rank) for rank in range(num_ranks)]
            assert sum(loads) == count
            assert max(loads) - min(loads) <= 1


def test_the_start_layer_is_zero_if_none_is_given():
    assert sharding.layer_owners(7, 3) == sharding.layer_owners(7, 3, start_layer=0) == (0, 1, 2, 0, 1, 2, 0)


REFUSED = [
    ((-1, 2, 0), "layer_owners: num_layers must be an integer >= 0; got -1"),
    ((2.0, 2, 0), "layer_owners: num_layers must be an integer >= 0; got 2.0"),
    ((True, 2, 0), "layer_owners: num_layers must be an integer >= 0; got True"),
    ((2, 0, 0), "layer_owners: num_ranks must be an integer >= 1; got 0"),
    ((2, "2", 0), "layer_owners: num_ranks must be an integer >= 1; got '2'"),
    ((2, 2, -3), "layer_owners: start_layer must be an integer >= 0; got -3"),
    ((2, 2, None), "layer_owners: start_layer must be an integer >= 0; got None"),
]


@pytest.mark.parametrize(("args", "message"), REFUSED)
def test_counts_out_of_range_are_refused_in_one_line(args, message, unchecked):
    num_layers, num_ranks, start_layer = args
    with pytest.raises(ValueError) as error:
        sharding.layer_owners(num_layers, num_ranks, start_layer=start_layer)
    assert str(error.value) == message
