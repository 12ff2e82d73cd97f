"""Norms of the latents and the index keys, and the Hadamard rotation that may precede 8-bit index keys."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from .precision import require, wide


def rms_norm(x: Float[Tensor, "*rows W"], weight: Float[Tensor, " W"], eps: float) -> Float[Tensor, "*rows W"]:
    """Divide each row by its root mean square and multiply by a gain.

    ``rms_norm(x) = x * (mean(x²) + eps)^-0.5 * weight``, in float32 through the gain (float64 for float64 input),
    then cast to the dtype of x.

    Args:
        x: rows of any leading shape.
        weight: the gain, one value per column, of any float dtype.
        eps: added to the mean square; ``config.latent_norm_eps`` for the two latents.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ValueError: x is not floating point, or the gain is not one value per column.

    Gradients: of x and weight, by autograd.
    Source: Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
    """
    _check("rms_norm", x, weight)
    wide_x = x.to(wide(x.dtype))
    scaled = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide_x.dtype)).to(x.dtype)


def layer_norm(
    x: Float[Tensor, "*rows W"], weight: Float[Tensor, " W"], bias: Float[Tensor, " W"], eps: float
) -> Float[Tensor, "*rows W"]:
    """Centre each row, divide by its standard deviation, multiply by a gain and add a bias.

    ``layer_norm(x) = (x - mean) * (var + eps)^-0.5 * weight + bias`` with the biased variance, in float32 (float64
    for float64 input), then cast to the dtype of x. The norm of the index keys, with ``eps = 1e-6`` in every model.

    Args:
        x: rows of any leading shape.
        weight: gain per column.
        bias: offset per column.
        eps: added to the variance.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ValueError: x is not floating point, or gain or bias are not one value per column.

    Gradients: of x, weight and bias, by autograd.
    Source: Ba, Kiros & Hinton, "Layer Normalization" (2016), eq. 4.
    """
    _check("layer_norm", x, weight, bias)
    dtype = wide(x.dtype)
    return functional.layer_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), bias.to(dtype), eps).to(x.dtype)


def hadamard(x: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows W"]:
    """Multiply each row by the orthonormal Hadamard matrix of Sylvester's order.

    ``hadamard(x) = x · H_W / sqrt(W)``, ``H_1 = [1]``, ``H_2n = [[H_n, H_n], [H_n, -H_n]]``. It is its own inverse,
    and ``hadamard(q) · hadamard(k) = q · k``: rotate both sides or neither.

    Args:
        x: rows whose width W is a power of two.

    Returns:
        A tensor of x's shape and dtype; sums are taken in float32 (float64 for float64 input).

    Raises:
        ValueError: W is not a power of two.

    Gradients: linear, its own transpose.
    Cost: W · log2(W) additions a row.
    Source: DeepSeek-V3.2-Exp, inference/model.py (rotation of the indexer's queries and keys before fp8).
    """
    width = x.shape[-1]
    require(width > 0 and width & (width - 1) == 0, "hadamard", "the last dim must be a power of two", width)
    y = x.to(wide(x.dtype))
    span = 1
    while span < width:
        pairs = y.unflatten(-1, (width // (2 * span), 2, span))
        low, high = pairs.unbind(-2)
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        span *= 2
    return (y * width**-0.5).to(x.dtype)


def _check(function: str, x: Tensor, *per_column: Tensor) -> None:
    require(x.is_floating_point(), function, "x must be floating point", x.dtype)
    for values in per_column:
        fits = values.shape == x.shape[-1:]
        require(fits, function, f"weight and bias must be [{x.shape[-1]}]", tuple(values.shape))
