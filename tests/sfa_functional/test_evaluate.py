"""The largest difference of two tensors equals its definition, special values included."""

import math

import pytest
import torch

import sfa_functional as sfa

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0.0, 0.0, None)),
        ([1.0, 2.5], [1.0, 2.0], (0.5, 0.25, (1,))),
        ([-1.0, 2.0], [3.0, -8.0], (10.0, 1.25, (1,))),
        ([0.0, -0.0], [-0.0, 0.0], (0.0, 0.0, None)),
        ([1.0], [0.0], (1.0, INF, (0,))),
        ([NAN, INF, -INF], [NAN, INF, -INF], (0.0, 0.0, None)),
        ([NAN, 5.0], [NAN, 4.0], (1.0, 0.25, (1,))),
        ([INF, 5.0], [INF, 4.0], (1.0, 0.25, (1,))),
        ([0.0, NAN], [9.0, 1.0], (INF, INF, (1,))),
        ([0.0, 1.0], [9.0, NAN], (INF, INF, (1,))),
        ([0.0, INF], [9.0, -INF], (INF, INF, (1,))),
        ([0.0, 1.0], [9.0, INF], (INF, INF, (1,))),
        ([NAN], [INF], (INF, INF, (0,))),
        ([], [], (0.0, 0.0, None)),
    ],
)
def test_difference_finds_the_largest(a, b, want):
    assert sfa.difference(torch.tensor(a), torch.tensor(b)) == sfa.Difference(*want)


def test_difference_names_the_place_in_every_dim_and_takes_integers():
    a = torch.zeros(2, 3, 4, dtype=torch.int32)
    b = a.clone()
    b[1, 2, 0] = 7
    assert sfa.difference(a, b) == (7.0, 1.0, (1, 2, 0))
    assert sfa.difference(torch.tensor(2.0), torch.tensor(1.0)) == (1.0, 1.0, ())


def test_difference_refuses_different_shapes():
    with pytest.raises(ValueError, match=r"^difference: shapes must be equal; got \(\(2,\), \(1, 2\)\)$"):
        sfa.difference(torch.zeros(2), torch.zeros(1, 2))
