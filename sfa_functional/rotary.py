"""Rotary position embedding: angles from positions, and the rotation with its pairing written out."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import SFAConfig
from .precision import require, wide

Pairing = Literal["interleaved", "half"]


def rope_frequencies(config: SFAConfig, device: torch.device | str | None = None) -> Float[Tensor, " F"]:
    """Return the angle per position of each of the R/2 pairs.

    ``f_i = theta^(-2i/R)``. With yarn, ``f_i * (1 - ramp_i) + f_i / factor * ramp_i`` where
    ``ramp_i = clamp((i - low) / (high - low), 0, 1)`` and low, high are the pairs that turn ``beta_fast`` and
    ``beta_slow`` times over the original length, rounded outwards.

    Args:
        config: gives theta, R and the yarn values.
        device: where to put the result.

    Returns:
        float32, radians per position; float64 angles would differ from every public implementation.

    Source: Su et al., "RoFormer" (2021), section 3.2.2; Peng et al., "YaRN" (2023), section 3.2.
    """
    width = config.qk_rope_head_dim
    period = config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if config.yarn is None:
        return 1.0 / period
    low, high = config.yarn.pair_range(config.rope_theta, width)
    pair = torch.arange(width // 2, dtype=torch.float32, device=device)
    ramp = ((pair - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / period * keep + 1.0 / (config.yarn.factor * period) * (1 - keep)  # rounds as transformers' does


def rope_cos_sin(position_T: Int[Tensor, " T"], config: SFAConfig) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]]:
    """Return cosine and sine of every token's angles, one column per rotated pair.

    ``cos[t, i] = m * cos(position_T[t] * f_i)``, likewise sin, with f from `rope_frequencies` and the multiplier m
    of yarn (``mscale(mscale) / mscale(mscale_all_dim)``, 1 for the published models).

    Args:
        position_T: positions within their requests, >= 0; what stands at padding (-1) does not matter.
        config: gives theta, R and the yarn values.

    Returns:
        ``(cos_TF, sin_TF)``, float32 for every model dtype, F = R/2.

    Gradients: none (integers in).
    Source: Su et al., "RoFormer" (2021), eq. 15; DeepSeek-V3.2-Exp, inference/model.py, precompute_freqs_cis.
    """
    angle_TF = position_T.to(torch.float32)[:, None] * rope_frequencies(config, position_T.device)
    multiplier = 1.0 if config.yarn is None else config.yarn.cos_sin_multiplier
    return angle_TF.cos() * multiplier, angle_TF.sin() * multiplier


def rotate(
    x: Float[Tensor, "T *heads R"], cos: Float[Tensor, "T F"], sin: Float[Tensor, "T F"], *, pairing: Pairing
) -> Float[Tensor, "T *heads R"]:
    """Rotate the pairs of the last dim by their angles; the order of the columns stays as it is.

    ``(a, b) -> (a cos - b sin, b cos + a sin)`` for the pairs ``(x[2i], x[2i+1])`` ("interleaved") or
    ``(x[i], x[i + R/2])`` ("half"). With cos² + sin² = 1 it preserves the norm of every row.

    Args:
        x: one row per token, with any number of head dims between.
        cos: cosines as `rope_cos_sin` gives them; broadcast over the head dims.
        sin: sines, likewise.
        pairing: "interleaved" or "half". Attention is interleaved in every model; the indexer of DeepSeek-V3.2 is
            half, that of GLM-5 interleaved.

    Returns:
        A tensor of x's shape and dtype, rotated in float32 (float64 for float64 x).

    Raises:
        ValueError: an unknown pairing, an odd width, or a width that is not twice that of cos and sin.

    Gradients: of x, cos and sin, by autograd.
    Source: Su et al., "RoFormer" (2021), eq. 34 (interleaved); GPT-NeoX for the half form.
    """
    width = x.shape[-1]
    require(pairing in ("interleaved", "half"), "rotate", "pairing must be 'interleaved' or 'half'", repr(pairing))
    require(
        cos.shape == sin.shape and width == 2 * cos.shape[-1] and cos.shape[:-1] == x.shape[: cos.ndim - 1],
        "rotate",
        "cos and sin must have the rows of x and half its width",
        (tuple(x.shape), tuple(cos.shape), tuple(sin.shape)),
    )
    dtype = wide(x.dtype)
    heads = x.ndim - cos.ndim
    cos, sin = (y.to(dtype).reshape(*y.shape[:-1], *(1,) * heads, y.shape[-1]) for y in (cos, sin))
    pairs = x.to(dtype).unflatten(-1, (-1, 2) if pairing == "interleaved" else (2, -1))
    dim = -1 if pairing == "interleaved" else -2
    a, b = pairs.unbind(dim)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=dim).flatten(-2).to(x.dtype)
