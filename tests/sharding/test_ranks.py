"""Fingerprints of tensors: the same for the same values, others for others."""

import itertools

import pytest
import torch

from sharding.ranks import fingerprint

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_have_one_fingerprint_and_every_change_of_one_value_another(dtype):
    x = torch.tensor([0.0, 1, 0, 1, 1, 0, 1]).to(dtype)
    seen = {tuple(fingerprint(x).tolist())}
    assert seen == {tuple(fingerprint(x.clone()).tolist())}
    for i in range(7):
        y = x.clone()
        y[i] = (1 - x[i].to(torch.complex64)).real.to(dtype)
        seen.add(tuple(fingerprint(y).tolist()))
    assert len(seen) == 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_zeros_of_both_signs_are_one_value_and_so_are_all_nan(dtype):
    one, other = torch.tensor([0.0, torch.nan, 1]).to(dtype), torch.tensor([-0.0, -torch.nan, 1]).to(dtype)
    payload = one.clone()
    if dtype == torch.float32:
        payload.view(torch.int32)[1] += 5
        assert payload[1].isnan()
    assert fingerprint(one).tolist() == fingerprint(other).tolist() == fingerprint(payload).tolist()


def test_order_and_places_count():
    rows = [torch.tensor(order, dtype=torch.float32) for order in itertools.permutations([1.0, 2, 3, 4])]
    assert len({tuple(fingerprint(x).tolist()) for x in rows}) == 24
    assert fingerprint(torch.zeros(8)).tolist() != fingerprint(torch.zeros(16)).tolist()
    assert fingerprint(torch.zeros(0)).tolist() == [0, 0]


def test_fingerprints_of_a_million_neighbours_differ():
    """Tensors that differ from each other in one or two bits."""
    x = torch.arange(1024).repeat(1024, 1)
    x[torch.arange(1024), torch.arange(1024)] ^= 1
    prints = {tuple(fingerprint(row).tolist()) for row in x}
    assert len(prints) == 1024
    assert len({first for first, _ in prints}) == len({second for _, second in prints}) == 1024


def test_strides_do_not_matter():
    x = torch.randn(4, 6)
    assert fingerprint(x.T.contiguous().T).tolist() == fingerprint(x).tolist()
