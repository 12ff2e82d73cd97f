"""Cache formats of others, byte for byte: latent rows in eight bits, pages of index keys, and what a token takes.

A packed latent row holds L codes with a float32 scale for every 128 of them, and R rope values in bfloat16. Two
orders of these parts are in use, of the same size: which one it is, the caller says. Numbers are little endian.

===========  =================================================  ===========================================
flash_mla    codes [0, 512), scales [512, 528), rope [528, 656)  FlashMLA, vLLM, SGLang: fp8 e4m3
ascend       codes [0, 512), rope [512, 640), scales [640, 656)  npu_kv_quant_sparse_flash_attention: int8, fp8
===========  =================================================  ===========================================
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from .attention import sparse_attention
from .config import SFAConfig
from .implementation import Implementation
from .paged import Rows, fetch_rows
from .precision import require
from .quantize import (
    AMAX_FLOOR,
    BLOCK,
    Code,
    Quantized,
    Scales,
    dequantize,
    quantize_fp8,
    quantize_index,
    quantize_int8,
    validate_scales,
)

RowOrder = Literal["flash_mla", "ascend"]
CacheFormat = Literal["float32", "bfloat16", "fp8", "int8"]


class CacheBytes(NamedTuple):
    """Bytes that one token takes in one layer's cache."""

    latent: int
    index_k: int  # 0 for a layer without an indexer


def pack_rows(
    kv_SE: Rows,
    *,
    value_dim: int,
    order: RowOrder,
    dtype: Code = "fp8",
    scales: Scales = "power_of_two",
    floor: float = AMAX_FLOOR,
) -> UInt8[Tensor, "S bytes"]:
    """Pack latent keys: the first L columns in eight bits with a scale per 128, the rope columns in bfloat16.

    Args:
        kv_SE: key rows, [S, E] or `SplitRows`.
        value_dim: L, how many leading columns are rounded to eight bits.
        order: "flash_mla" or "ascend", as the table of this file says.
        dtype: "fp8" or "int8".
        scales: "power_of_two" or "plain".
        floor: what the largest magnitude of a group counts as at least; `FLASH_MLA_FLOOR` gives FlashMLA's bytes,
            ``scales="plain"`` with `VLLM_FLOOR` gives vLLM's.

    Returns:
        uint8 rows; at L = 512 and R = 64 they have 656 bytes.

    Raises:
        ValueError: a value_dim that is not in 1..E, or an unknown word.

    Gradients: none; the input is detached.
    Cost: a few passes over the rows in float32.
    Source: deepseek-ai/FlashMLA, tests/quant.py; Ascend op-plugin, npu_kv_quant_sparse_flash_attention.
    """
    rows_SE = fetch_rows(kv_SE, slice(None)).detach()
    width = rows_SE.shape[-1]
    require(0 < value_dim <= width, "pack_rows", f"value_dim must be in 1..{width}", value_dim)
    _require_order("pack_rows", order, dtype)
    latent_SL, rope_SR = rows_SE[:, :value_dim], rows_SE[:, value_dim:]
    quantize = quantize_fp8 if dtype == "fp8" else quantize_int8
    code, scale = quantize(latent_SL, per="block", scales=scales, floor=floor)
    parts = [_bytes(code), _bytes(scale), _bytes(rope_SR.to(torch.bfloat16))]
    return torch.cat([parts[i] for i in _places(order)], dim=-1)


def unpack_rows(
    packed: UInt8[Tensor, "S bytes"], *, value_dim: int, rope_dim: int, order: RowOrder, dtype: Code = "fp8"
) -> Float[Tensor, "S E"]:
    """Read packed latent rows as bfloat16 keys.

    ``latent = bfloat16(float32(code) · scale)``; rope values come back bit for bit.

    Args:
        packed: uint8 rows.
        value_dim: L.
        rope_dim: R.
        order: in which they were packed. The two orders have one size: nothing here can tell them apart, though
            `validate_packed_rows` mostly finds scales that are none.
        dtype: "fp8" or "int8".

    Returns:
        bfloat16 [S, L + R]. 128 columns whose scale is not a positive number are NaN; a row of zero bytes, which
        nobody wrote, is NaN in all its latent columns.

    Raises:
        ValueError: not uint8 rows of the format's size, or an unknown word.

    Gradients: none.
    Cost: one pass.
    Source: as `pack_rows`.
    """
    quantized, rope_SR = _parts("unpack_rows", packed, value_dim, rope_dim, order, dtype)
    return torch.cat([dequantize(quantized, torch.bfloat16), rope_SR], dim=-1)


def validate_packed_rows(
    packed: UInt8[Tensor, "S bytes"], *, value_dim: int, rope_dim: int, order: RowOrder, dtype: Code = "fp8"
) -> None:
    """Refuse packed rows with a scale that is not a positive number: unwritten, or of another order; waits.

    Args:
        packed: uint8 rows.
        value_dim: L.
        rope_dim: R.
        order: in which they should be.
        dtype: "fp8" or "int8".

    Raises:
        ValueError: as `unpack_rows`, or naming the first scale at fault.
    """
    validate_scales(_parts("validate_packed_rows", packed, value_dim, rope_dim, order, dtype)[0])


def pack_index_pages(
    index_k: Float[Tensor, "blocks block_size I"],
    *,
    dtype: Code = "fp8",
    scales: Scales = "power_of_two",
    floor: float = AMAX_FLOOR,
) -> UInt8[Tensor, "blocks bytes"]:
    """Pack pages of index keys: of each page first all codes, row by row, then all float32 scales, one per row.

    A token takes I + 4 bytes, but they do not lie together: this is a page, not rows.

    Args:
        index_k: pages as a cache holds them, ``cache.index_k``, I at most 128. Rotate them first (`hadamard`) if
            the queries are.
        dtype: "fp8" or "int8".
        scales: "power_of_two" or "plain".
        floor: as `quantize_fp8`.

    Returns:
        uint8 pages of ``block_size · (I + 4)`` bytes: 8448 at 64 rows of 128, which ``.view(-1, 64, 1, 132)`` hands
        to DeepGEMM's paged operator.

    Raises:
        ValueError: as `quantize_index`.

    Gradients: none; the input is detached.
    Cost: a few passes in float32.
    Source: deepseek-ai/DeepGEMM, fp8_paged_mqa_logits and its tests.
    """
    code, scale = quantize_index(index_k, dtype=dtype, scales=scales, floor=floor)
    return torch.cat([_bytes(code).flatten(1), _bytes(scale).flatten(1)], dim=-1)


def unpack_index_pages(
    packed: UInt8[Tensor, "blocks bytes"], *, block_size: int, width: int, dtype: Code = "fp8"
) -> Quantized:
    """Read pages of index keys.

    Args:
        packed: uint8 pages.
        block_size: rows of a page.
        width: I.
        dtype: "fp8" or "int8".

    Returns:
        `Quantized` of shape [blocks, block_size, I] with scale [blocks, block_size, 1]: flatten its first two dims
        for `quantized_index_scores`, or `dequantize` it.

    Raises:
        ValueError: not uint8 pages of ``block_size · (width + 4)`` bytes, or an unknown word.

    Gradients: none.
    Cost: a copy of the bytes.
    Source: as `pack_index_pages`.
    """
    require(dtype in ("fp8", "int8"), "unpack_index_pages", "dtype must be 'fp8' or 'int8'", repr(dtype))
    size = block_size * (width + 4)
    fits = packed.ndim == 2 and packed.shape[1] == size and packed.dtype == torch.uint8
    got = packed.dtype, tuple(packed.shape)
    require(fits, "unpack_index_pages", f"pages must be uint8 [blocks, {size}]", got)
    code, scale = packed.split([block_size * width, block_size * 4], dim=-1)
    return Quantized(
        _typed(code, _code_dtype(dtype)).unflatten(-1, (block_size, width)),
        _typed(scale, torch.float32).unflatten(-1, (block_size, 1)),
    )


def through_packed_rows(
    kv_SE: Rows,
    *,
    value_dim: int,
    order: RowOrder = "flash_mla",
    dtype: Code = "fp8",
    scales: Scales = "power_of_two",
    floor: float = AMAX_FLOOR,
) -> Float[Tensor, "S E"]:
    """Pack latent keys and read them back: what a packed cache makes of them, in their own dtype.

    Args:
        kv_SE: key rows, [S, E] or `SplitRows`.
        value_dim: L.
        order: as `pack_rows`; it changes no value.
        dtype: "fp8" or "int8".
        scales: "power_of_two" or "plain".
        floor: as `pack_rows`.

    Returns:
        kv_SE, values rounded as the format does: also the rope columns, to bfloat16.

    Raises:
        ValueError: rows that require grad (rounding has none to give; detach them), or as `pack_rows`.

    Cost: both ways.
    Source: as `pack_rows`.
    """
    rows_SE = fetch_rows(kv_SE, slice(None))
    needed = torch.is_grad_enabled() and rows_SE.requires_grad
    require(not needed, "through_packed_rows", "rows must not require grad: rounding has none", "rows that do")
    packed = pack_rows(rows_SE, value_dim=value_dim, order=order, dtype=dtype, scales=scales, floor=floor)
    rope_dim = rows_SE.shape[-1] - value_dim
    return unpack_rows(packed, value_dim=value_dim, rope_dim=rope_dim, order=order, dtype=dtype).to(rows_SE.dtype)


def packed_attention(
    *,
    order: RowOrder = "flash_mla",
    dtype: Code = "fp8",
    scales: Scales = "power_of_two",
    floor: float = AMAX_FLOOR,
    implementation: Implementation = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return an implementation of `sparse_attention` that sees the keys through a packed cache.

    Pass it as ``implementation=`` to `sfa_layer` or `use_sfa`, to see what the format costs.

    Args:
        order: as `through_packed_rows`.
        dtype: likewise.
        scales: likewise.
        floor: likewise.
        implementation: of the attention to what comes back.

    Returns:
        A function with the reference's signature.

    Raises:
        ValueError: in the call, as `through_packed_rows` and `sparse_attention`.

    Cost: that of the attention, and a few passes over all key rows in every call.
    Source: as `pack_rows`.
    """

    def attend(q_THE: Tensor, kv_SE: Tensor, topk_TK: Tensor, *, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
        kv_SE = through_packed_rows(kv_SE, value_dim=value_dim, order=order, dtype=dtype, scales=scales, floor=floor)
        return sparse_attention(q_THE, kv_SE, topk_TK, scale=scale, value_dim=value_dim, implementation=implementation)

    return attend


def packed_row_bytes(value_dim: int, rope_dim: int) -> int:
    """Return the bytes of a packed latent row: ``L + 4·ceil(L / 128) + 2·R``, 656 at L = 512 and R = 64."""
    return value_dim + 4 * -(-value_dim // BLOCK) + 2 * rope_dim


def cache_bytes(
    config: SFAConfig, *, kv: CacheFormat = "bfloat16", index: CacheFormat = "bfloat16", layer: int = 0
) -> CacheBytes:
    """Return what one token takes in one layer's cache.

    ======================  =====================  ==============
    format                  latent                 index key
    ======================  =====================  ==============
    float32                 4·E                    4·I
    bfloat16                2·E                    2·I
    fp8, int8               `packed_row_bytes`     I + 4
    ======================  =====================  ==============

    Args:
        config: the model's sizes.
        kv: format of the latents.
        index: format of the index keys.
        layer: 0-based number; a shared layer has no index keys.

    Returns:
        `CacheBytes`. At V3.2's sizes 1152 and 256 in bfloat16, 656 and 132 in fp8.

    Raises:
        ValueError: an unknown format, or a layer that does not exist.

    Source: `pack_rows` and `pack_index_pages`.
    """
    plain = {"float32": 4, "bfloat16": 2}
    for name, given in (("kv", kv), ("index", index)):
        known = given in plain or given in ("fp8", "int8")
        require(known, "cache_bytes", f"{name} must be 'float32', 'bfloat16', 'fp8' or 'int8'", repr(given))
    require(0 <= layer < config.num_layers, "cache_bytes", f"layer must be in 0..{config.num_layers - 1}", layer)
    packed = packed_row_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
    latent = plain[kv] * config.key_width if kv in plain else packed
    width = config.index_head_dim
    one_key = plain[index] * width if index in plain else width + 4
    return CacheBytes(latent, one_key if config.indexer_types[layer] == "full" else 0)


def _parts(
    function: str, packed: Tensor, value_dim: int, rope_dim: int, order: RowOrder, dtype: Code
) -> tuple[Quantized, Tensor]:
    _require_order(function, order, dtype)
    size = packed_row_bytes(value_dim, rope_dim)
    fits = packed.ndim == 2 and packed.shape[1] == size and packed.dtype == torch.uint8
    require(fits, function, f"rows must be uint8 [S, {size}]", (packed.dtype, tuple(packed.shape)))
    sizes, places = [value_dim, 4 * -(-value_dim // BLOCK), 2 * rope_dim], _places(order)
    found = dict(zip(places, packed.split([sizes[i] for i in places], dim=-1), strict=True))
    quantized = Quantized(_typed(found[0], _code_dtype(dtype)), _typed(found[1], torch.float32))
    return quantized, _typed(found[2], torch.bfloat16)


def _places(order: RowOrder) -> tuple[int, int, int]:
    """Say in which order codes (0), scales (1) and rope (2) lie."""
    return (0, 1, 2) if order == "flash_mla" else (0, 2, 1)


def _require_order(function: str, order: str, dtype: str) -> None:
    require(order in ("flash_mla", "ascend"), function, "order must be 'flash_mla' or 'ascend'", repr(order))
    require(dtype in ("fp8", "int8"), function, "dtype must be 'fp8' or 'int8'", repr(dtype))


def _code_dtype(dtype: Code) -> torch.dtype:
    return torch.float8_e4m3fn if dtype == "fp8" else torch.int8


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _typed(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Read bytes as numbers; a copy, because the bytes of a number need not lie where it may."""
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)
