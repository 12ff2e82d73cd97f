"""Packed rows and pages equal bytes that a plain oracle writes, and are read as what the bytes say."""

import math
import struct
from dataclasses import replace

import pytest
import torch

import sfa_functional as sfa
from sfa_functional.packed import (
    cache_bytes,
    pack_index_pages,
    pack_rows,
    packed_attention,
    packed_row_bytes,
    through_packed_rows,
    unpack_index_pages,
    unpack_rows,
    validate_packed_rows,
)
from sfa_functional.quantize import AMAX_FLOOR, FLASH_MLA_FLOOR, VLLM_FLOOR, dequantize, quantize_index
from tests.sfa_functional.eight_bits import bfloat16, code_bytes, e4m3, group_scale

ORDERS = ["flash_mla", "ascend"]
WRITERS = {
    "ours": ("power_of_two", AMAX_FLOOR),
    "FlashMLA": ("power_of_two", FLASH_MLA_FLOOR),
    "vLLM": ("plain", VLLM_FLOOR),
}
SIZES = [(512, 64), (200, 6), (24, 8)]


def _rows(latent=512, rope=64, rows=6):
    """Draw keys of several magnitudes; the first row is zero, the second next to zero."""
    kv_SE = torch.randn(rows, latent + rope) * torch.exp2(torch.randint(-8, 8, (rows, 1)).float())
    kv_SE[0], kv_SE[1] = 0.0, kv_SE[1].sign() * 2e-5
    return kv_SE


def _row_bytes(row, latent, order, dtype, scales, floor):
    """Write one row, part by part."""
    fp8 = dtype == "fp8"
    groups = [row[i : min(i + 128, latent)] for i in range(0, latent, 128)]
    rule = {"largest": 448 if fp8 else 127, "power_of_two": scales == "power_of_two", "floor": floor}
    found = [group_scale(group, **rule) for group in groups]
    codes = b"".join(code_bytes(group, scale, fp8=fp8) for group, scale in zip(groups, found, strict=True))
    tail = [struct.pack(f"<{len(found)}f", *found), b"".join(bfloat16(x) for x in row[latent:])]
    return codes + b"".join(tail if order == "flash_mla" else reversed(tail))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize(("latent", "rope"), SIZES)
def test_rows_are_the_oracles_bytes(latent, rope, dtype, order, writer):
    scales, floor = WRITERS[writer]
    kv_SE = _rows(latent, rope)
    packed = pack_rows(kv_SE, value_dim=latent, order=order, dtype=dtype, scales=scales, floor=floor)
    for row, got in zip(kv_SE.tolist(), packed, strict=True):
        assert bytes(got.tolist()) == _row_bytes(row, latent, order, dtype, scales, floor)


def test_the_public_sizes_are_656_bytes_a_row_and_8448_a_page():
    assert packed_row_bytes(512, 64) == 656
    assert pack_rows(_rows(), value_dim=512, order="flash_mla").shape == (6, 656)
    pages = pack_index_pages(torch.randn(3, 64, 128))
    assert pages.shape == (3, 8448)
    assert pages.view(-1, 64, 1, 132).shape == (3, 64, 1, 132)


def test_the_parts_lie_where_each_reader_looks():
    kv_SE = torch.ones(1, 576)
    kv_SE[0, 512:] = 3.0
    rows = {order: pack_rows(kv_SE, value_dim=512, order=order)[0] for order in ORDERS}
    scales, rope = (slice(512, 528), slice(528, 656)), (slice(528, 656), slice(512, 640))
    for place, row in zip((scales[0], slice(640, 656)), rows.values(), strict=True):
        assert row[place].clone().view(torch.float32).tolist() == [2.0**-8] * 4
    for place, row in zip(rope, rows.values(), strict=True):
        assert row[place].clone().view(torch.bfloat16).tolist() == [3.0] * 64
    assert sorted(rows["ascend"].tolist()) == sorted(rows["flash_mla"].tolist())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("scales", ["power_of_two", "plain"])
@pytest.mark.parametrize(("latent", "rope"), SIZES)
def test_a_round_trip_is_within_half_a_step_and_bfloat16(latent, rope, scales, dtype, order):
    kv_SE = _rows(latent, rope, rows=40)
    named = {"value_dim": latent, "order": order, "dtype": dtype}
    packed = pack_rows(kv_SE, scales=scales, **named)
    got = unpack_rows(packed, rope_dim=rope, **named)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[:, latent:], kv_SE[:, latent:].to(torch.bfloat16))
    latent_SL = kv_SE[:, :latent]
    groups = torch.nn.functional.pad(latent_SL, (0, -latent % 128)).unflatten(1, (-1, 128)).abs().amax(-1)
    amax_SL = groups.clamp(min=AMAX_FLOOR).repeat_interleave(128, -1)[:, :latent]
    step = 2 if scales == "power_of_two" else 1  # a power of two may be almost twice what is needed
    code_step = latent_SL.abs() / 16 + amax_SL / 448 * 2.0**-10 * step if dtype == "fp8" else amax_SL / 254 * step
    assert ((got[:, :latent].float() - latent_SL).abs() <= code_step * 1.001 + latent_SL.abs() * 2.0**-8).all()
    assert torch.equal(got[0], torch.zeros(latent + rope).to(torch.bfloat16))


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_of_any_writer_is_read_as_code_times_scale_in_bfloat16(order):
    codes, scales, rope = [*range(127), *range(128, 255), 0, 0] * 2, [0.3, 2.0**-40, 1e20, 7e-3], [1.5] * 64
    parts = [struct.pack("<4f", *scales), b"".join(bfloat16(x) for x in rope)]
    row = bytes(codes) + b"".join(parts if order == "flash_mla" else reversed(parts))
    got = unpack_rows(torch.tensor([list(row)], dtype=torch.uint8), value_dim=512, rope_dim=64, order=order)
    scale = torch.tensor(scales).repeat_interleave(128)
    want = torch.cat([(torch.tensor([e4m3(c) for c in codes]) * scale), torch.tensor(rope)])
    assert torch.equal(got[0], want.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("order", ORDERS)
def test_memory_that_nobody_wrote_and_rows_of_the_other_order_are_not_taken_for_numbers(order, dtype):
    named = {"value_dim": 512, "rope_dim": 64, "dtype": dtype}
    blank = torch.zeros(2, 656, dtype=torch.uint8)
    assert unpack_rows(blank, order=order, **named)[:, :512].isnan().all()
    with pytest.raises(ValueError, match=r"^validate_scales: scales must be positive numbers; got 0.0 at "):
        validate_packed_rows(blank, order=order, **named)
    packed = pack_rows(torch.randn(8, 576), value_dim=512, order=order, dtype=dtype)
    validate_packed_rows(packed, order=order, **named)
    other = next(name for name in ORDERS if name != order)
    with pytest.raises(ValueError, match=r"^validate_scales: scales must be positive numbers; got -"):
        validate_packed_rows(packed, order=other, **named)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_latent_that_is_not_finite_spoils_its_128_columns_alone(bad):
    kv_SE = torch.randn(3, 576)
    clean = through_packed_rows(kv_SE, value_dim=512)
    kv_SE[1, 300] = bad
    got = through_packed_rows(kv_SE, value_dim=512)
    assert got[1, 256:384].isnan().all()
    got[1, 256:384] = clean[1, 256:384]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("scales", ["power_of_two", "plain"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize(("block_size", "width"), [(64, 128), (4, 16)])
def test_a_page_of_index_keys_is_all_codes_then_all_scales(block_size, width, dtype, scales):
    index_k = torch.randn(3, block_size, width)
    index_k[1, 2] = 0
    packed = pack_index_pages(index_k, dtype=dtype, scales=scales)
    rule = {"largest": 448 if dtype == "fp8" else 127, "power_of_two": scales == "power_of_two", "floor": AMAX_FLOOR}
    for page, got in zip(index_k.tolist(), packed, strict=True):
        found = [group_scale(row, **rule) for row in page]
        codes = b"".join(code_bytes(row, s, fp8=dtype == "fp8") for row, s in zip(page, found, strict=True))
        assert bytes(got.tolist()) == codes + struct.pack(f"<{block_size}f", *found)
    quantized = unpack_index_pages(packed, block_size=block_size, width=width, dtype=dtype)
    want = quantize_index(index_k, dtype=dtype, scales=scales)
    assert torch.equal(quantized.code.view(torch.uint8), want.code.view(torch.uint8))
    assert torch.equal(quantized.scale, want.scale)
    assert torch.equal(dequantize(quantized)[1, 2], torch.zeros(width))


def test_split_rows_pack_as_joint_ones_do():
    kv_SE = _rows()
    split = sfa.SplitRows(latent_SL=kv_SE[:, :512], rope_SR=kv_SE[:, 512:])
    packed = [pack_rows(rows, value_dim=512, order="ascend") for rows in (kv_SE, split)]
    assert torch.equal(*packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["joint", "split"])
def test_a_layer_attends_to_what_a_packed_cache_holds(layout, dtype):
    config = replace(sfa.TINY, indexer_types=("full",))
    params, x_TD = sfa.init_params(config, dtype=dtype), torch.randn(20, config.hidden_size).to(dtype)
    batch = sfa.Batch.from_lengths([13, 7], block_table=sfa.allocate_blocks([13, 7], 4), block_size=4)
    cache = sfa.init_cache(config, num_blocks=8, block_size=4, dtype=dtype, layout=layout)
    run = {"config": config, "cache": cache}
    plain = sfa.sfa_layer(params, x_TD, batch, **run)
    got = sfa.sfa_layer(params, x_TD, batch, implementation=packed_attention(dtype="fp8"), **run)
    assert got.y_TD.dtype == dtype
    assert torch.equal(got.selection_TK, plain.selection_TK)
    rows = through_packed_rows(sfa.cache_rows(plain.cache), value_dim=config.kv_lora_rank)
    rope = sfa.rope_cos_sin(batch.position_T, config)
    q_THE, _ = sfa.latent_queries(params, x_TD, *rope, config=config)
    topk_TK = sfa.map_selection(sfa.global_selection(plain.selection_TK, batch), batch.row_S)
    want = sfa.sparse_attention(q_THE, rows, topk_TK, scale=config.softmax_scale, value_dim=config.kv_lora_rank)
    assert torch.equal(got.y_TD, sfa.latent_output(params, want.out_THL, config=config))
    apart = sfa.difference(got.y_TD, plain.y_TD)
    assert 0 < apart.max_rel < 0.1


@pytest.mark.parametrize(
    ("config", "kv", "index", "want"),
    [
        (sfa.DEEPSEEK_V32, "bfloat16", "bfloat16", (1152, 256)),
        (sfa.DEEPSEEK_V32, "fp8", "fp8", (656, 132)),
        (sfa.DEEPSEEK_V32, "int8", "int8", (656, 132)),
        (sfa.GLM_5, "fp8", "bfloat16", (656, 256)),
        (sfa.DEEPSEEK_V32, "float32", "float32", (2304, 512)),
        (sfa.TINY, "fp8", "fp8", (24 + 4 + 16, 20)),
    ],
)
def test_bytes_of_a_token_are_those_of_the_formats(config, kv, index, want):
    assert cache_bytes(config, kv=kv, index=index) == want
    if kv == "fp8":
        kv_SE = torch.randn(2, config.key_width)
        assert pack_rows(kv_SE, value_dim=config.kv_lora_rank, order="ascend").shape[1] == want[0]
    if index == "fp8":
        assert pack_index_pages(torch.randn(1, 16, config.index_head_dim)).numel() == 16 * want[1]


def test_a_shared_layer_has_no_index_keys():
    shared = sfa.GLM_52.indexer_types.index("shared")
    assert cache_bytes(sfa.GLM_52, kv="fp8", index="fp8", layer=shared) == (656, 0)


ROWS = torch.zeros(2, 656, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pack_rows(torch.ones(2, 8), value_dim=9, order="ascend"),
            "pack_rows: value_dim must be in 1..8; got 9",
        ),
        (
            lambda: pack_rows(torch.ones(2, 8), value_dim=4, order="vllm"),
            "pack_rows: order must be 'flash_mla' or 'asc",
        ),
        (
            lambda: pack_rows(torch.ones(2, 8), value_dim=4, order="ascend", dtype="fp4"),
            "pack_rows: dtype must be 'fp8'",
        ),
        (
            lambda: unpack_rows(ROWS[:, :584], value_dim=512, rope_dim=64, order="ascend"),
            "unpack_rows: rows must be uint8 [S, 656]; got (torch.uint8, (2, 584))",
        ),
        (
            lambda: unpack_rows(ROWS.to(torch.int8), value_dim=512, rope_dim=64, order="ascend"),
            "unpack_rows: rows must be uint8 [S, 656]; got (torch.int8, (2, 656))",
        ),
        (
            lambda: unpack_index_pages(ROWS, block_size=64, width=128),
            "unpack_index_pages: pages must be uint8 [blocks, 8448]; got (torch.uint8, (2, 656))",
        ),
        (
            lambda: unpack_index_pages(ROWS, block_size=64, width=128, dtype="bf16"),
            "unpack_index_pages: dtype must be 'fp8' or 'int8'; got 'bf16'",
        ),
        (lambda: pack_index_pages(torch.ones(1, 4, 256)), "quantize_index: x must have at most 128 columns; got "),
        (
            lambda: cache_bytes(sfa.TINY, kv="fp4"),
            "cache_bytes: kv must be 'float32', 'bfloat16', 'fp8' or 'int8'; got",
        ),
        (lambda: cache_bytes(sfa.TINY, layer=2), "cache_bytes: layer must be in 0..1; got 2"),
        (
            lambda: through_packed_rows(torch.ones(2, 8, requires_grad=True), value_dim=4),
            "through_packed_rows: rows must not require grad: rounding has none; got rows that do",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(call, message, unchecked):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)
