"""Eight-bit numbers with float32 scales: fp8 e4m3 and int8, per row, per 128 columns, or per block of a matrix.

A group of values shares one scale s; its codes are the values over s, rounded to the nearest code (ties to even), and
a value is read as ``float32(code) · s``. A group that holds a NaN or an infinity gets the scale NaN and the codes 0,
and is read as NaN: never as a number. The same goes for a scale that is not a positive number, whoever wrote it.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from . import norm
from .precision import require

BLOCK = 128
"""Columns (and, of a weight, rows) that share a scale; the last group may be narrower."""

AMAX_FLOOR = 1e-4
"""What the largest magnitude of a group counts as at least, in DeepSeek's code and by default here."""

FLASH_MLA_FLOOR = 448e-4
"""The same in FlashMLA's packed rows: there the scale is at least 1e-4, before it is rounded up."""

VLLM_FLOOR = 448 * 2.0**-126
"""The same in vLLM's packed rows: there the scale is at least the smallest normal float32."""

Code = Literal["fp8", "int8"]
Scales = Literal["power_of_two", "plain"]
Per = Literal["block", "row"]

_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"fp8": 448, "int8": 127}
_TINY = 2.0**-126


class Quantized(NamedTuple):
    """Codes and what to multiply them with: one scale per row, or one per 128 of its columns."""

    code: Shaped[Tensor, "*rows W"]  # float8_e4m3fn or int8
    scale: Float[Tensor, "*rows G"]  # float32


def quantize_fp8(
    x: Float[Tensor, "*rows W"], *, per: Per = "block", scales: Scales = "power_of_two", floor: float = AMAX_FLOOR
) -> Quantized:
    """Round to fp8 e4m3 with a scale for every 128 columns.

    ``s = 2^ceil(log2(max(amax, floor) / 448))``, or without the rounding where ``scales="plain"``;
    ``code = e4m3(clamp(x / s, ±448))``, round to nearest even. amax is the group's own: what stands in other rows or
    columns, padding among them, changes nothing.

    Args:
        x: rows of any leading shape and width.
        per: "block": a scale per 128 columns, the last group may be narrower; "row": one scale per row.
        scales: "power_of_two" (values keep their mantissa) or "plain".
        floor: amax counts as at least this, >= 0. An all-zero group has codes 0 and the scale of the floor, so it is
            read as zeros; no scale is below 2^-126. `FLASH_MLA_FLOOR` and `VLLM_FLOOR` are those of others.

    Returns:
        `Quantized`. A group with a NaN or an infinity has scale NaN and codes 0.

    Raises:
        ValueError: x is not floating point, an unknown word, or a floor that is not a number >= 0.

    Gradients: none; the input is detached.
    Cost: a few passes over x in float32.
    Source: deepseek-ai/DeepSeek-V3.2-Exp, inference/kernel.py; deepseek-ai/FlashMLA, tests/quant.py.
    """
    return _quantize("quantize_fp8", x, "fp8", per, scales, floor)


def quantize_int8(
    x: Float[Tensor, "*rows W"], *, per: Per = "row", scales: Scales = "plain", floor: float = AMAX_FLOOR
) -> Quantized:
    """Round to int8 with one scale per row: symmetric, per token.

    ``s = max(amax, floor) / 127``; ``code = round(clamp(x / s, ±127))``, ties to even; -128 is never used.

    Args:
        x: rows of any leading shape and width.
        per: "row" or "block", as `quantize_fp8`.
        scales: "plain", or rounded up to a power of two.
        floor: as `quantize_fp8`.

    Returns:
        `Quantized`. A group with a NaN or an infinity has scale NaN and codes 0.

    Raises:
        ValueError: as `quantize_fp8`.

    Gradients: none; the input is detached.
    Cost: a few passes over x in float32.
    Source: the per-token rule of npu_dynamic_quant (Ascend op-plugin); the floor is DeepSeek's.
    """
    return _quantize("quantize_int8", x, "int8", per, scales, floor)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*rows W"]:
    """Multiply codes by their scales.

    ``x = float32(code) · s``, then cast once.

    Args:
        quantized: codes with one scale per row or per 128 columns; any positive scale is read, whoever wrote it.
        dtype: of the result.

    Returns:
        Values of the codes' shape. NaN where the scale is zero, negative, infinite or NaN: memory that nobody wrote
        is not taken for zeros. `validate_scales` finds such places.

    Raises:
        ValueError: codes that are neither fp8 e4m3 nor int8, or another number of scales.

    Gradients: none.
    Cost: one pass.
    Source: deepseek-ai/DeepSeek-V3.2-Exp, inference/kernel.py.
    """
    code, scale = quantized
    _require_fit("dequantize", quantized)
    return (code.float() * _spread(_positive(scale), code.shape[-1])).to(dtype)


def validate_scales(quantized: Quantized) -> None:
    """Refuse scales that are not positive numbers; waits for the device.

    Args:
        quantized: codes and scales, for example of rows that somebody else packed.

    Raises:
        ValueError: naming the first scale at fault.
    """
    good = (quantized.scale > 0) & (quantized.scale < torch.inf)
    for place in (~good).nonzero()[:1].tolist():
        got = float(quantized.scale[tuple(place)])
        raise ValueError(f"validate_scales: scales must be positive numbers; got {got} at {place}")


def quantize_index(
    x: Float[Tensor, "*rows I"],
    *,
    dtype: Code,
    hadamard: bool = False,
    scales: Scales = "power_of_two",
    floor: float = AMAX_FLOOR,
) -> Quantized:
    """Round index queries or index keys to eight bits, one scale per head of a query and per key.

    `norm.hadamard`, if asked for, then `quantize_fp8` or `quantize_int8` of each row. The rotation spreads an outlier
    channel over all columns and changes no product of a query and a key; rotate both sides or neither.

    Args:
        x: q_TJI or k_SI, after rope; I at most 128, so that a row is one group in every known format.
        dtype: "fp8" or "int8".
        hadamard: rotate before rounding, in float32; I must then be a power of two.
        scales: "power_of_two" or "plain".
        floor: as `quantize_fp8`.

    Returns:
        `Quantized`, scale [*rows, 1].

    Raises:
        ValueError: I > 128, or as `quantize_fp8` and `hadamard`.

    Gradients: none; the input is detached.
    Cost: a few passes over x in float32.
    Source: DeepSeek-V3.2-Exp, inference/model.py, class Indexer.
    """
    require(x.shape[-1] <= BLOCK, "quantize_index", f"x must have at most {BLOCK} columns", tuple(x.shape))
    require(dtype in _DTYPES, "quantize_index", "dtype must be 'fp8' or 'int8'", repr(dtype))
    if hadamard:
        x = norm.hadamard(x.detach().float())
    return _quantize("quantize_index", x, dtype, "row", scales, floor)


def quantized_index_scores(q_TJI: Quantized, k_SI: Quantized, w_TJ: Float[Tensor, "T J"]) -> Float[Tensor, "T S"]:
    """Score every key for every query on their codes.

    ``score[t, s] = s_k[s] · Σ_j (w[t, j] · s_q[t, j]) · relu(code_q[t, j] · code_k[s])``: the query's scales go into
    the weights, the key's multiplies the finished sum; both are positive, so relu does not notice.

    Args:
        q_TJI: index queries from `quantize_index`, scale [T, J, 1].
        k_SI: index keys from `quantize_index`, scale [S, 1], with or without Hadamard as the queries.
        w_TJ: weight of each head, from `index_weights`.

    Returns:
        score_TS in float32. NaN for a key whose scale is not a positive number, and for all keys of such a query.

    Raises:
        ValueError: shapes that don't fit.

    Gradients: none.
    Cost: 2·T·S·J·(I + 1) FLOPs in float32; holds T·J·S values. `quantized_indexer` works in tiles.
    Source: DeepSeek-V3.2-Exp, inference/kernel.py, fp8_index; deepseek-ai/DeepGEMM, fp8_mqa_logits.
    """
    shapes = [tuple(x.shape) for x in (*q_TJI, *k_SI, w_TJ)]
    fits = [len(shape) for shape in shapes] == [3, 3, 2, 2, 2]
    fits = fits and shapes[1] == (*shapes[4], 1) and shapes[0][:2] == shapes[4] and shapes[3] == (shapes[2][0], 1)
    fits = fits and shapes[0][2] == shapes[2][1]
    rule = "q, k, w must be [T, J, I], [S, I], [T, J], with one scale per row of q and k"
    require(fits, "quantized_index_scores", rule, shapes)
    s_q_TJ, s_k_S = _positive(q_TJI.scale)[..., 0], _positive(k_SI.scale)[..., 0]
    heads_TJS = torch.relu(q_TJI.code.float() @ k_SI.code.float().mT)
    return ((w_TJ.detach().float() * s_q_TJ)[:, None] @ heads_TJS)[:, 0] * s_k_S


def quantize_blocks(
    w_RC: Float[Tensor, "R C"], *, scales: Scales = "plain", floor: float = VLLM_FLOOR
) -> tuple[Shaped[Tensor, "R C"], Float[Tensor, "r c"]]:
    """Round a weight to fp8 with a factor for every block of 128 rows and columns: what `dequantize_blocks` reads.

    ``s = max(amax, floor) / 448`` of the block, ``code = e4m3(w / s)``.

    Args:
        w_RC: a weight.
        scales: "plain", as in published checkpoints, or "power_of_two".
        floor: as `quantize_fp8`.

    Returns:
        ``(code_RC, scale_rc)``; the last blocks may be partial. A block with a NaN or an infinity has the factor NaN.

    Raises:
        ValueError: not a matrix, or as `quantize_fp8`.

    Gradients: none; the input is detached.
    Cost: a few passes over w in float32.
    Source: deepseek-ai/DeepSeek-V3, inference/kernel.py (the factor); the blocks are those of its checkpoints.
    """
    require(w_RC.ndim == 2, "quantize_blocks", "w must be [R, C]", tuple(w_RC.shape))
    rows, columns = w_RC.shape
    padded = pad(w_RC.detach(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    groups = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
    code, scale = _quantize("quantize_blocks", groups, "fp8", "row", scales, floor)
    code = code.view(torch.uint8).unflatten(2, (BLOCK, BLOCK)).transpose(1, 2).flatten(2).flatten(0, 1)
    return code[:rows, :columns].contiguous().view(torch.float8_e4m3fn), scale[..., 0]


def dequantize_blocks(code_RC: Tensor, scale_rc: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply fp8 codes by the factor of their block.

    ``w[i, j] = float32(code[i, j]) · scale[i // 128, j // 128]`` in float32, then cast to ``dtype``.

    Args:
        code_RC: fp8 weights, [R, C].
        scale_rc: float32 factors, [ceil(R / 128), ceil(C / 128)]; the last blocks may be partial.
        dtype: of the result.

    Returns:
        [R, C].

    Raises:
        ValueError: another number of factors.

    Gradients: none.
    Cost: one block of rows in float32 beside the result.
    Source: deepseek-ai/DeepSeek-V3, inference/fp8_cast_bf16.py.
    """
    require(code_RC.ndim == 2, "dequantize_blocks", "code must be [R, C]", list(code_RC.shape))
    want = [-(-count // BLOCK) for count in code_RC.shape]
    require(list(scale_rc.shape) == want, "dequantize_blocks", f"scale must be {want}", list(scale_rc.shape))
    result = torch.empty(code_RC.shape, dtype=dtype, device=code_RC.device)
    for i, scale_c in enumerate(scale_rc):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        result[rows] = code_RC[rows].float() * scale_c.repeat_interleave(BLOCK)[: code_RC.shape[1]]
    return result


def _quantize(function: str, x: Tensor, code: Code, per: Per, scales: Scales, floor: float) -> Quantized:
    require(x.ndim >= 1 and x.is_floating_point(), function, "x must be floating point rows", (x.dtype, tuple(x.shape)))
    require(per in ("block", "row"), function, "per must be 'block' or 'row'", repr(per))
    known = scales in ("power_of_two", "plain")
    require(known, function, "scales must be 'power_of_two' or 'plain'", repr(scales))
    require(0 <= floor < torch.inf, function, "floor must be a number >= 0", floor)
    x, width = x.detach().float(), x.shape[-1]
    block = max(1, width if per == "row" else BLOCK)
    groups = pad(x, (0, -width % block)).unflatten(-1, (-1, block))
    amax = groups.abs().amax(-1)
    scale = (amax.clamp(min=floor) / _LARGEST[code]).clamp(min=_TINY)  # clamp hands NaN on
    if scales == "power_of_two":
        scale = _round_up(scale)
    finite = amax < torch.inf
    scale = torch.where(finite, scale, torch.nan)
    steps = torch.where(finite[..., None], groups / scale[..., None], 0).clamp(-_LARGEST[code], _LARGEST[code])
    steps = (steps.round() if code == "int8" else steps).flatten(-2)[..., :width]
    return Quantized(steps.to(_DTYPES[code]), scale)


def _round_up(scale: Tensor) -> Tensor:
    """Round positive normal float32 numbers up to powers of two: any bit of mantissa carries into the exponent."""
    return (scale.view(torch.int32) + 0x7FFFFF & ~0x7FFFFF).view(torch.float32)


def _positive(scale: Tensor) -> Tensor:
    return torch.where((scale > 0) & (scale < torch.inf), scale, torch.nan).float()


def _spread(scale: Tensor, width: int) -> Tensor:
    """Repeat scales over their columns."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(BLOCK, dim=-1)[..., :width]


def _require_fit(function: str, quantized: Quantized) -> None:
    code, scale = quantized
    require(code.dtype in _DTYPES.values(), function, "codes must be float8_e4m3fn or int8", code.dtype)
    groups = -(-code.shape[-1] // BLOCK)
    fits = scale.shape[:-1] == code.shape[:-1] and scale.shape[-1] in (1, groups) and scale.is_floating_point()
    rule = f"there must be 1 or {groups} floating point scales per row"
    require(fits, function, rule, (tuple(code.shape), tuple(scale.shape), scale.dtype))
