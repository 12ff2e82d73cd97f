"""Rope: published frequencies, the worked example in both pairings, and a rotation that keeps norms and order."""

import math
from dataclasses import replace

import pytest
import torch

import sfa_functional as sfa
from sfa_functional.rotary import rope_frequencies
from tests.vectors import read_vectors

VECTORS = read_vectors("model_configs.json")
EXAMPLE = VECTORS["rope_example"]
PAIRINGS = ["interleaved", "half"]


def _angles(*shape):
    angle = torch.randn(*shape, dtype=torch.float64)
    return angle.cos().float(), angle.sin().float()


@pytest.mark.parametrize("name", VECTORS["models"])
def test_frequencies_are_the_published_ones(name):
    model = VECTORS["models"][name]
    got = rope_frequencies(sfa.SFAConfig.from_hf(model["config"]))
    assert got.dtype == torch.float32
    for pair, value in model["expected"]["inv_freq"].items():
        assert float(got[int(pair)]) == pytest.approx(value, rel=2e-6)


def test_yarn_keeps_then_ramps_then_divides_frequencies():
    want = torch.tensor(VECTORS["models"]["deepseek_v32"]["expected"]["yarn"]["frequency_multiplier"])
    got = rope_frequencies(sfa.DEEPSEEK_V32) / rope_frequencies(replace(sfa.DEEPSEEK_V32, yarn=None))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_cos_and_sin_carry_the_ratio_of_yarns_factors():
    yarn = sfa.Yarn(factor=math.e**10, original_max_position_embeddings=64, mscale=3.0, mscale_all_dim=1.0)
    cos_TF, sin_TF = sfa.rope_cos_sin(torch.arange(50), replace(sfa.TINY, yarn=yarn))
    torch.testing.assert_close(cos_TF.square() + sin_TF.square(), torch.full((50, 4), 4.0))


def test_cos_and_sin_are_those_of_position_times_frequency():
    position_T = torch.tensor([0, 3, 1, 4095])
    cos_TF, sin_TF = sfa.rope_cos_sin(position_T, sfa.TINY)
    for t, position in enumerate(position_T.tolist()):
        for i in range(4):
            angle = position * 1e4 ** (-2 * i / 8)
            assert float(cos_TF[t, i]) == pytest.approx(math.cos(angle), abs=2e-4)
            assert float(sin_TF[t, i]) == pytest.approx(math.sin(angle), abs=2e-4)
    assert cos_TF.dtype == sin_TF.dtype == torch.float32


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_worked_example(pairing):
    config = replace(sfa.TINY, qk_rope_head_dim=4, rope_theta=100.0)  # frequencies 1 and 0.1
    cos_TF, sin_TF = sfa.rope_cos_sin(torch.tensor([EXAMPLE["position"]]), config)
    got_TR = sfa.rotate(torch.tensor([EXAMPLE["x"]], dtype=torch.float64), cos_TF, sin_TF, pairing=pairing)
    torch.testing.assert_close(got_TR, torch.tensor([EXAMPLE[pairing]]).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_rotate_multiplies_each_pair_by_a_complex_number(pairing, heads):
    cos_TF, sin_TF = _angles(5, 4)
    x = torch.randn(5, *heads, 8, dtype=torch.float64)
    got = sfa.rotate(x, cos_TF, sin_TF, pairing=pairing)
    for i in range(4):
        a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + 4)
        turn_T = torch.complex(cos_TF[:, i].double(), sin_TF[:, i].double()).view(5, *(1 for _ in heads))
        want = torch.complex(x[..., a], x[..., b]) * turn_T
        torch.testing.assert_close(torch.complex(got[..., a], got[..., b]), want)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_keeps_every_norm_and_position_zero_changes_nothing(pairing):
    x_THR = torch.randn(40, 3, 8, dtype=torch.float64)
    got_THR = sfa.rotate(x_THR, *sfa.rope_cos_sin(torch.arange(40), sfa.TINY), pairing=pairing)
    torch.testing.assert_close(got_THR.norm(dim=-1), x_THR.norm(dim=-1), rtol=1e-6, atol=0)
    assert torch.equal(got_THR[0], x_THR[0])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_products_of_rotated_rows_depend_on_the_distance_alone(pairing):
    q_R, k_R = torch.randn(2, 8, dtype=torch.float64)
    angle_TF = torch.arange(20, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]).double()
    q_TR, k_TR = (sfa.rotate(x.expand(20, 8), angle_TF.cos(), angle_TF.sin(), pairing=pairing) for x in (q_R, k_R))
    product_TT = q_TR @ k_TR.T
    for distance in range(-10, 11):
        diagonal = product_TT.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_rotated_in_float32_and_rounded_once(pairing):
    cos_TF, sin_TF = _angles(9, 4)
    x_TR = torch.randn(9, 8).bfloat16()
    got_TR = sfa.rotate(x_TR, cos_TF, sin_TF, pairing=pairing)
    assert torch.equal(got_TR, sfa.rotate(x_TR.float(), cos_TF, sin_TF, pairing=pairing).bfloat16())


def test_rotate_refuses_an_unknown_pairing_and_a_wrong_width(unchecked):
    cos_TF, sin_TF = _angles(2, 4)
    with pytest.raises(ValueError, match=r"^rotate: pairing must be 'interleaved' or 'half'; got 'neox'$"):
        sfa.rotate(torch.zeros(2, 8), cos_TF, sin_TF, pairing="neox")
    for width in (6, 7, 4):
        with pytest.raises(ValueError, match=r"^rotate: cos and sin must have the rows of x and half its width; got"):
            sfa.rotate(torch.zeros(2, width), cos_TF, sin_TF, pairing="half")
    with pytest.raises(ValueError, match=r"^rotate: cos and sin must have the rows of x and half its width; got"):
        sfa.rotate(torch.zeros(2, 8), cos_TF, sin_TF[:, :3], pairing="half")


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotate_differentiates(pairing):
    x_THR, cos_TF, sin_TF = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 2, 4), (2, 2), (2, 2))
    )
    assert torch.autograd.gradcheck(lambda x, c, s: sfa.rotate(x, c, s, pairing=pairing), (x_THR, cos_TF, sin_TF))
