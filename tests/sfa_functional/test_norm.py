"""Norms equal their formulas in float64, keep float32 through the gain, and the Hadamard rotation is orthonormal."""

import pytest
import torch

import sfa_functional as sfa

EPS = 1e-5


def _rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _layer(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def _sylvester(width):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * width**-0.5


def test_norms_by_hand():
    x, one, zero = torch.tensor([[3.0, 4.0]]), torch.ones(2), torch.zeros(2)
    torch.testing.assert_close(sfa.rms_norm(x, 2 * one, 0.0), 2 * x / 12.5**0.5)
    torch.testing.assert_close(sfa.layer_norm(x, 2 * one, zero + 5, 0.0), torch.tensor([[3.0, 7.0]]))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7)])
def test_norms_equal_their_formulas_in_float64(shape):
    x = torch.randn(shape, dtype=torch.float64)
    weight, bias = torch.randn(2, 7, dtype=torch.float64)
    torch.testing.assert_close(sfa.rms_norm(x, weight, EPS), _rms(x, weight, EPS), rtol=1e-12, atol=1e-12)
    got = sfa.layer_norm(x, weight, bias, EPS)
    torch.testing.assert_close(got, _layer(x, weight, bias, EPS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_is_rounded_once_after_gain_and_bias(dtype):
    x, weight, bias = torch.randn(50, 64).to(dtype), torch.randn(64), torch.randn(64)
    exact = _rms(x.double(), weight.double(), EPS)
    assert (sfa.rms_norm(x, weight, EPS).double() - exact).abs().le(exact.abs() * _half_step(dtype)).all()
    exact = _layer(x.double(), weight.double(), bias.double(), EPS)
    error = (sfa.layer_norm(x, weight, bias, EPS).double() - exact).abs()
    assert error.le(exact.abs() * _half_step(dtype) + 1e-6).all()
    assert sfa.rms_norm(x, weight, EPS).dtype == sfa.layer_norm(x, weight, bias, EPS).dtype == dtype


def _half_step(dtype):
    return torch.finfo(dtype).eps / 2 * 1.01


def test_eps_keeps_constant_rows_finite():
    zero, weight, bias = torch.zeros(3, 8), torch.ones(8), torch.full((8,), 0.5)
    assert torch.equal(sfa.rms_norm(zero, weight, EPS), zero)
    assert torch.equal(sfa.layer_norm(zero + 7, weight, bias, EPS), zero + 0.5)


@pytest.mark.parametrize("width", [1, 2, 4, 16, 128])
def test_hadamard_multiplies_by_sylvesters_matrix(width):
    x = torch.randn(3, 2, width, dtype=torch.float64)
    torch.testing.assert_close(sfa.hadamard(x), x @ _sylvester(width), rtol=1e-13, atol=1e-13)


def test_hadamard_is_its_own_inverse_and_keeps_products():
    q_TI, k_SI = torch.randn(5, 64, dtype=torch.float64), torch.randn(6, 64, dtype=torch.float64)
    torch.testing.assert_close(sfa.hadamard(sfa.hadamard(q_TI)), q_TI)
    torch.testing.assert_close(sfa.hadamard(q_TI) @ sfa.hadamard(k_SI).T, q_TI @ k_SI.T)


@pytest.mark.parametrize("width", [0, 3, 12])
def test_hadamard_refuses_widths_that_are_no_power_of_two(width):
    with pytest.raises(ValueError, match=f"^hadamard: the last dim must be a power of two; got {width}$"):
        sfa.hadamard(torch.zeros(2, width))


def test_norms_and_hadamard_differentiate():
    x, weight, bias = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 1, 1))
    assert torch.autograd.gradcheck(lambda x, w: sfa.rms_norm(x, w[0], EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w, b: sfa.layer_norm(x, w[0], b[0], EPS), (x, weight, bias))
    assert torch.autograd.gradcheck(sfa.hadamard, (x,))
