"""Checkpoints give back what was stored, bit for bit and one layer at a time, and refuse in one line what is broken."""

import json
import math
import mmap
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

import sfa_functional as sfa
import weights.checkpoint
from sfa_functional import DEEPSEEK_NAMES, HF_NAMES, TINY, LayerParams, SFAConfig
from sfa_functional.hf import attention_modules, layer_params
from sfa_functional.params import NORM_FIELDS, named_fields, param_shapes
from weights import Checkpoint, check_layers, dequantize_blocks, load_layer, open_checkpoint, save_checkpoint

SHARED = replace(TINY, indexer_types=("full", "shared", "full"), index_rope_pairing="interleaved")
YARN = replace(TINY, yarn=sfa.Yarn(factor=40.0, original_max_position_embeddings=64, mscale_all_dim=1.0))
CONFIGS = {"tiny": TINY, "shared": SHARED, "yarn": YARN}
WIDE = replace(  # kv_a_proj has 576 rows, as in the published models; last blocks are partial in both directions
    TINY,
    hidden_size=200,
    num_attention_heads=2,
    q_lora_rank=136,
    kv_lora_rank=512,
    qk_nope_head_dim=72,
    qk_rope_head_dim=64,
    v_head_dim=80,
    index_n_heads=2,
    index_head_dim=64,
)
Q_A = "model.layers.{}.self_attn.q_a_proj.weight"


def random_layers(config: SFAConfig, dtype: torch.dtype = torch.float32) -> list[LayerParams]:
    """Draw layers whose norms are random too, so that no two tensors are equal."""
    generator = torch.Generator().manual_seed(7)
    norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    layers = []
    for layer in range(config.num_layers):
        drawn = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(
                norm_dtype if name in NORM_FIELDS else dtype
            )
            for name, shape in param_shapes(config, layer=layer).items()
        }
        layers.append(sfa.params.params_from_fields(drawn))
    return layers


def state(layers: list[LayerParams], prefix: str = "model.layers.{}.self_attn.", names: Any = HF_NAMES) -> dict:
    return {
        prefix.format(layer) + names[field]: tensor
        for layer, params in enumerate(layers)
        for field, tensor in named_fields(params)
    }


def write(path: Path, tensors: dict[str, Tensor], config: SFAConfig = TINY) -> Path:
    """Write a checkpoint of one file without `save_checkpoint`."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.to_hf()))
    save_file(tensors, path / "model.safetensors")
    return path


def write_sharded(path: Path, tensors: dict[str, Tensor], owner: Callable[[str], str]) -> Path:
    """Write a checkpoint of several files with an index; ``owner`` names a key's file."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY.to_hf()))
    weight_map = {key: owner(key) for key in tensors}
    for name in set(weight_map.values()):
        save_file({key: x for key, x in tensors.items() if weight_map[key] == name}, path / name)
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """Write a safetensors file by hand, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def assert_same(a: LayerParams, b: LayerParams) -> None:
    """Equal fields, dtypes and bits."""
    left, right = dict(named_fields(a)), dict(named_fields(b))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def assert_refused(call: Callable[[], object], *parts: object) -> None:
    """One line of ValueError that holds every part, in order."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    place = 0
    for part in parts:
        assert str(part) in message[place:], (part, message)
        place = message.index(str(part), place)


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A right checkpoint of one file, for a test to break."""
    return write(tmp_path / "tiny", state(random_layers(TINY)))


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A right checkpoint with one file per layer."""
    return write_sharded(tmp_path / "sharded", state(random_layers(TINY)), lambda key: f"{key[:14]}.safetensors")


@pytest.fixture
def reads(monkeypatch) -> list[tuple[str, str, int]]:
    """Every tensor that is read, as (file name, key, bytes)."""
    seen: list[tuple[str, str, int]] = []
    read_bytes = weights.checkpoint._read_bytes

    def recorded(tensor, begin, target, *others):
        seen.append((tensor.file.name, tensor.key, target.nbytes))
        read_bytes(tensor, begin, target, *others)

    monkeypatch.setattr(weights.checkpoint, "_read_bytes", recorded)
    return seen


# what was stored comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_saved_layers_load_bit_for_bit(tmp_path, config, dtype):
    layers = random_layers(config, dtype)
    save_checkpoint(tmp_path / "out", layers, config)
    checkpoint = open_checkpoint(tmp_path / "out")
    check_layers(checkpoint, config)
    assert SFAConfig.from_hf(checkpoint.config) == config
    for layer, params in enumerate(layers):
        assert_same(load_layer(checkpoint, layer, config=config, dtype=dtype), params)


@pytest.mark.parametrize("name", ["DEEPSEEK_V32", "GLM_5", "GLM_52", "TINY"])
def test_a_config_survives_config_json(name):
    config = getattr(sfa, name)
    assert SFAConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_a_saved_file_is_what_safetensors_and_transformers_expect(tmp_path):
    layers = random_layers(SHARED, torch.bfloat16)
    save_checkpoint(tmp_path / "out", layers, SHARED)
    stored = load_file(tmp_path / "out/model.safetensors")
    expected = state(layers)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[key], x) and stored[key].dtype == x.dtype for key, x in expected.items())
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as stream:
        assert stream.metadata() == {"format": "pt"}
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.dtype == torch.bfloat16
    assert SFAConfig.from_hf(config.to_dict()) == SHARED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_load_layer_casts_projections_and_keeps_norms_wide(tmp_path, stored, dtype):
    """Norm weights stored in another dtype, as in GLM-5, come back as float32 or float64."""
    tensors = {key: x.to(stored) for key, x in state(random_layers(TINY, torch.float64)).items()}
    checkpoint = open_checkpoint(write(tmp_path / "in", tensors))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for field, tensor in named_fields(load_layer(checkpoint, 1, config=TINY, dtype=dtype)):
        want = tensors["model.layers.1.self_attn." + HF_NAMES[field]].to(wide if field in NORM_FIELDS else dtype)
        assert tensor.dtype == want.dtype, field
        assert torch.equal(tensor, want), field


def test_deepseek_names_load_like_hugging_face_names(tmp_path):
    layers = random_layers(TINY)
    path = write(tmp_path / "in", state(layers, "layers.{}.attn.", DEEPSEEK_NAMES))
    checkpoint = open_checkpoint(path)
    check_layers(checkpoint, TINY)
    for layer, params in enumerate(layers):
        assert_same(load_layer(checkpoint, layer, config=TINY), params)


def test_the_schedule_decides_about_the_indexer_not_the_keys(tiny, reads):
    """Indexer weights of a shared layer, which some checkpoints carry, are not even read."""
    config = replace(TINY, indexer_types=("full", "shared"))
    checkpoint = open_checkpoint(tiny)
    assert load_layer(checkpoint, 0, config=config).indexer is not None
    reads.clear()
    assert load_layer(checkpoint, 1, config=config).indexer is None
    assert not any("indexer" in key for _, key, _ in reads)


def tiny_glm() -> GlmMoeDsaForCausalLM:
    sizes = {name: value for name, value in SHARED.to_hf().items() if name not in ("model_type", "attention_bias")}
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**sizes, **other_sizes(3)))


def tiny_deepseek() -> DeepseekV32ForCausalLM:
    sizes = {name: value for name, value in TINY.to_hf().items() if name not in ("model_type", "indexer_types")}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**sizes, **other_sizes(2)))


def other_sizes(layers: int) -> dict[str, Any]:
    """Sizes outside the attention: as small as they go, no experts."""
    experts = {"n_routed_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    dense = {"first_k_dense_replace": layers, "mlp_layer_types": ["dense"] * layers}
    tokens = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"intermediate_size": 16} | experts | dense | tokens


@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("build", [tiny_deepseek, tiny_glm])
def test_a_checkpoint_of_transformers_loads_as_the_live_weights(tmp_path, build, shard_size):
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard_size)
    checkpoint = open_checkpoint(tmp_path / "hf")
    assert (len(set(checkpoint.files.values())) > 2) == (shard_size == "40KB")
    config = SFAConfig.from_hf(checkpoint.config)
    check_layers(checkpoint, config)
    modules = attention_modules(model)
    assert len(modules) == config.num_layers
    for layer, module in enumerate(modules):
        assert_same(load_layer(checkpoint, layer, config=config), layer_params(module))


# fp8 ----------------------------------------------------------------------------------------------------------------

CODED = [field for field in HF_NAMES if field not in NORM_FIELDS and field != "indexer.weights_proj"]
"""What is fp8 in DeepSeek-V3.2: all projections but the one that is never quantised."""


def random_codes(*shape: int) -> Tensor:
    """Draw every code but the two that are NaN."""
    code = torch.randint(0, 256, shape, dtype=torch.uint8)
    return code.masked_fill(code & 0x7F == 0x7F, 0x80).view(torch.float8_e4m3fn)


def factors_of(shape: tuple[int, ...]) -> Tensor:
    """Draw one factor for every block of 128 x 128 that is begun."""
    return torch.rand(len(range(0, shape[0], 128)), len(range(0, shape[1], 128))) * 3 + 0.01


def coded_state(config: SFAConfig, norm_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Draw a checkpoint as DeepSeek-V3.2 stores it: codes, factors beside them, and the rest."""
    tensors = state(random_layers(config, torch.bfloat16))
    for key, x in list(tensors.items()):
        if x.ndim == 1:
            tensors[key] = x.to(norm_dtype)
        elif not key.endswith("weights_proj.weight"):
            tensors[key], tensors[f"{key}_scale_inv"] = random_codes(*x.shape), factors_of(x.shape)
    return tensors


def multiplied_out(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """w[i, j] = float32(code[i, j]) · scale[i // 128, j // 128], then cast."""
    row, column = (torch.arange(count) // 128 for count in code.shape)
    return (code.float() * scale[row[:, None], column]).to(dtype)


def assert_decoded(params: LayerParams, tensors: dict[str, Tensor], prefix: str, dtype: torch.dtype) -> None:
    """Equal to the formula in every bit, signs of zeros included."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for field, tensor in named_fields(params):
        key = prefix + HF_NAMES[field]
        if f"{key}_scale_inv" in tensors:
            want = multiplied_out(tensors[key], tensors[f"{key}_scale_inv"], dtype)
        else:
            want = tensors[key].to(wide if field in NORM_FIELDS else dtype)
        assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), field
        assert tensor.is_contiguous(), field
        assert torch.equal(tensor, want), field
        assert torch.equal(tensor.signbit(), want.signbit()), field


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [TINY, WIDE], ids=["below one block", "partial last blocks"])
def test_fp8_weights_are_multiplied_out_block_by_block_and_cast_once(tmp_path, config, norm_dtype, dtype):
    tensors = coded_state(config, norm_dtype)
    checkpoint = open_checkpoint(write(tmp_path / "in", tensors, config))
    check_layers(checkpoint, config)
    for layer in range(config.num_layers):
        params = load_layer(checkpoint, layer, config=config, dtype=dtype)
        assert_decoded(params, tensors, f"model.layers.{layer}.self_attn.", dtype)


def test_the_wide_checkpoint_has_partial_last_blocks_in_both_directions():
    """What the test above stands on: the numbers of factors, and that a product in bfloat16 would be another one."""
    tensors = coded_state(WIDE)
    prefix = "model.layers.0.self_attn."
    shapes = {field: tuple(tensors[f"{prefix}{HF_NAMES[field]}_scale_inv"].shape) for field in CODED}
    assert tensors[prefix + HF_NAMES["kv_a_proj"]].shape == (576, 200)
    assert shapes == {
        "q_a_proj": (2, 2),
        "q_b_proj": (3, 2),
        "kv_a_proj": (5, 2),
        "kv_b_proj": (3, 4),
        "o_proj": (2, 2),
        "indexer.wq_b": (1, 2),
        "indexer.wk": (1, 2),
    }
    code, scale = (tensors[prefix + HF_NAMES["kv_a_proj"] + end] for end in ("", "_scale_inv"))
    once = multiplied_out(code, scale, torch.bfloat16)
    assert (multiplied_out(code, scale.bfloat16(), torch.bfloat16) != once).any()


def test_codes_and_factors_may_lie_in_different_files(tmp_path):
    tensors = coded_state(WIDE)
    path = write_sharded(tmp_path / "in", tensors, lambda key: f"{key[-9:] == 'scale_inv'}-{len(key) % 3}.safetensors")
    checkpoint = open_checkpoint(path)
    assert len(set(checkpoint.files.values())) > 4
    for layer in range(2):
        params = load_layer(checkpoint, layer, config=WIDE, dtype=torch.bfloat16)
        assert_decoded(params, tensors, f"model.layers.{layer}.self_attn.", torch.bfloat16)


def test_the_stored_dtype_decides_not_the_factors_present(tmp_path):
    """Only o_proj is fp8; factors beside a weight that is not are never applied."""
    tensors = coded_state(TINY)
    for key, x in tensors.items():
        if x.dtype == torch.float8_e4m3fn and "o_proj" not in key:
            tensors[key] = torch.randn(x.shape).bfloat16()
    checkpoint = open_checkpoint(write(tmp_path / "in", tensors))
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        left = {key: x for key, x in tensors.items() if "scale_inv" not in key or "o_proj" in key}
        assert_decoded(load_layer(checkpoint, layer, config=TINY), left, prefix, torch.float32)


def test_fp8_loads_under_the_names_of_deepseek_where_factors_are_called_scale(tmp_path):
    """Its converter writes ``wq_a.weight`` and ``wq_a.scale``."""
    tensors = coded_state(TINY)
    renamed = {}
    for layer in range(2):
        for field, name in HF_NAMES.items():
            key, new = f"model.layers.{layer}.self_attn.{name}", f"layers.{layer}.attn.{DEEPSEEK_NAMES[field]}"
            renamed[new] = tensors[key]
            if f"{key}_scale_inv" in tensors:
                renamed[new.removesuffix("weight") + "scale"] = tensors[f"{key}_scale_inv"]
    checkpoint = open_checkpoint(write(tmp_path / "in", renamed))
    check_layers(checkpoint, TINY)
    for layer in range(2):
        params = load_layer(checkpoint, layer, config=TINY)
        assert_decoded(params, tensors, f"model.layers.{layer}.self_attn.", torch.float32)


@pytest.mark.parametrize("field", CODED)
def test_fp8_without_its_factors_is_refused_by_name(tmp_path, field):
    key = "model.layers.1.self_attn." + HF_NAMES[field]
    tensors = coded_state(TINY)
    del tensors[f"{key}_scale_inv"]
    path = write(tmp_path / "in", tensors)
    for call in both(open_checkpoint(path), TINY, 1):
        assert_refused(call, path, f"must hold {key}_scale_inv, as {key} is fp8", "no such key")


@pytest.mark.parametrize(
    ("factors", "got"),
    [
        (torch.ones(4, 2), "F32 [4, 2]"),  # whole blocks only
        (torch.ones(5, 1), "F32 [5, 1]"),
        (torch.ones(2, 5), "F32 [2, 5]"),
        (torch.ones(5, 3), "F32 [5, 3]"),
        (torch.ones(10), "F32 [10]"),
        (torch.ones(5, 2, 1), "F32 [5, 2, 1]"),
        (torch.ones(576, 200), "F32 [576, 200]"),
        (torch.ones(()), "F32 []"),
        (torch.ones(5, 2).bfloat16(), "BF16 [5, 2]"),
        (torch.ones(5, 2).double(), "F64 [5, 2]"),
        (torch.ones(5, 2).to(torch.uint8), "U8 [5, 2]"),
        (torch.ones(5, 2).to(torch.float8_e4m3fn), "F8_E4M3 [5, 2]"),
    ],
    ids=str,
)
def test_factors_of_another_count_or_dtype_are_refused_with_what_is_expected(tmp_path, factors, got):
    key = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    path = write(tmp_path / "in", coded_state(WIDE) | {key: factors}, WIDE)
    for call in both(open_checkpoint(path), WIDE, 1):
        assert_refused(call, path / "model.safetensors", f"{key} must be F32 [5, 2]", "block of 128", f"got {got}")


@pytest.mark.parametrize("field", sorted(NORM_FIELDS))
def test_a_norm_stored_as_fp8_is_refused(tmp_path, field):
    """With factors beside it or without."""
    key = "model.layers.1.self_attn." + HF_NAMES[field]
    tensors = coded_state(TINY)
    tensors |= {key: tensors[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(1)}
    path = write(tmp_path / "in", tensors)
    for call in both(open_checkpoint(path), TINY, 1):
        assert_refused(call, path / "model.safetensors", f"{key} must be F64, F32, F16, BF16; got F8_E4M3")


def test_codes_of_another_shape_are_refused_before_their_factors(tmp_path):
    key = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    tensors = coded_state(WIDE) | {key: random_codes(640, 200)}  # whole blocks, as code that pads would store
    path = write(tmp_path / "in", tensors, WIDE)
    for call in both(open_checkpoint(path), WIDE, 1):
        assert_refused(call, path / "model.safetensors", f"{key} must be [576, 200]", "got [640, 200]")


def decoded_by_hand(byte: int) -> float:
    """Read an e4m3 code: a sign, four bits of exponent with bias 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_dequantize_blocks_reads_all_256_codes():
    code = torch.arange(256, dtype=torch.uint8).view(256, 1)
    got = dequantize_blocks(code.view(torch.float8_e4m3fn), torch.tensor([[0.5], [-2.0]]), torch.float32)
    want = [[(0.5 if i < 128 else -2.0) * decoded_by_hand(i)] for i in range(256)]
    torch.testing.assert_close(got, torch.tensor(want), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (127, 129), (128, 128), (129, 127), (256, 300), (576, 1), (0, 5), (5, 0), (0, 0)]
)
def test_dequantize_blocks_equals_the_formula_at_every_shape(shape, dtype):
    code, scale = random_codes(*shape), factors_of(shape)
    got = dequantize_blocks(code, scale, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, multiplied_out(code, scale, dtype))
    assert torch.equal(dequantize_blocks(code.T, scale.T, dtype), got.T)


def test_dequantize_blocks_changes_factor_at_rows_and_columns_128():
    code, scale = torch.ones(129, 130).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3], [5, 7]])
    got = dequantize_blocks(code, scale, torch.float32)
    assert got[126:, 126:].tolist() == [[2, 2, 3, 3], [2, 2, 3, 3], [5, 5, 7, 7]]


@pytest.mark.parametrize(
    ("code", "scale", "rule"),
    [
        ((576, 200), (4, 2), "scale must be [5, 2]; got [4, 2]"),
        ((576, 200), (5, 1), "scale must be [5, 2]; got [5, 1]"),
        ((576, 200), (2, 5), "scale must be [5, 2]; got [2, 5]"),
        ((576, 200), (10,), "scale must be [5, 2]; got [10]"),
        ((128, 128), (), "scale must be [1, 1]; got []"),
        ((128, 128), (2, 2), "scale must be [1, 1]; got [2, 2]"),
    ],
)
def test_dequantize_blocks_refuses_another_number_of_factors(code, scale, rule):
    with pytest.raises(ValueError) as error:
        dequantize_blocks(random_codes(*code), torch.ones(scale), torch.float32)
    assert str(error.value) == f"dequantize_blocks: {rule}"


@pytest.mark.parametrize("shape", [(), (5,), (5, 2, 2)])
def test_dequantize_blocks_refuses_codes_that_are_no_matrix(shape):
    code, scale = random_codes(*shape), torch.ones((1,) * len(shape))
    call = partial(dequantize_blocks, code, scale, torch.float32)
    assert_refused(call, "dequantize_blocks", f"got {list(shape)}")


# only what is needed is read ----------------------------------------------------------------------------------------


def test_a_checkpoint_is_plain_values(tiny):
    checkpoint = open_checkpoint(str(tiny))
    assert checkpoint.path == tiny
    assert checkpoint.config == TINY.to_hf() | {"indexer_types": ["full", "full"]}
    assert set(checkpoint.files.values()) == {tiny / "model.safetensors"}
    assert checkpoint.tensors[Q_A.format(1)] == ("F32", (32, 64))
    assert checkpoint.files.keys() == checkpoint.tensors.keys() == state(random_layers(TINY)).keys()
    assert checkpoint == open_checkpoint(tiny) == pickle.loads(pickle.dumps(checkpoint))


def test_opening_and_checking_read_no_tensor(sharded, reads):
    check_layers(open_checkpoint(sharded), TINY)
    assert reads == []


def test_load_layer_reads_the_bytes_of_one_layer(tiny, reads):
    load_layer(open_checkpoint(tiny), 1, config=TINY)
    counts = [torch.Size(shape).numel() for shape in param_shapes(TINY, layer=1).values()]
    assert sum(size for _, _, size in reads) == 4 * sum(counts)
    assert all(key.startswith("model.layers.1.") for _, key, size in reads if size)


def test_load_layer_opens_only_the_files_that_hold_the_layer(sharded, reads):
    checkpoint = open_checkpoint(sharded)
    (sharded / "model.layers.0.safetensors").write_bytes(b"rubbish")
    assert_same(load_layer(checkpoint, 1, config=TINY), random_layers(TINY)[1])
    assert {name for name, _, _ in reads} == {"model.layers.1.safetensors"}


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the safetensors files that are opened."""
    seen: list[str] = []
    real = Path.open

    def recorded(self, *args, **kwargs):
        if self.suffix == ".safetensors":
            seen.append(self.name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", recorded)
    return seen


SPELLINGS = {"hugging face": "model.layers.{}.self_attn.q_a_proj.weight", "deepseek": "layers.{}.attn.wq_a.weight"}


@pytest.mark.parametrize("layers", [[1], range(10, 12), {0, 5}, [3, 3], [], [2, 99]], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_open_checkpoint_opens_only_the_files_that_its_layers_need(tmp_path, opened, spelling, layers):
    """Every other file is rubbish, or is not there; that of layer 1 is not taken for those of 10 and 11."""
    held = {spelling.format(layer): f"{layer}.safetensors" for layer in range(12)}
    held |= {f"{key}_scale_inv": f"scale-{name}" for key, name in held.items()}
    others = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    others |= {f"model.layers.{i}.mlp.gate_proj.weight" for i in range(12)} | {"layers.1.ffn.w1.weight"}
    held |= {key: f"other-{i}.safetensors" for i, key in enumerate(sorted(others))}
    path = write_sharded(tmp_path / "in", {key: torch.zeros(2, 3) for key in held}, held.__getitem__)
    wanted = {spelling.format(i) + end for i in layers if i < 12 for end in ("", "_scale_inv")}
    for i, name in enumerate(sorted(set(held.values()) - {held[key] for key in wanted})):
        (path / name).write_bytes(b"rubbish") if i % 2 else (path / name).unlink()
    opened.clear()

    checkpoint = open_checkpoint(path, layers=layers)

    assert sorted(opened) == sorted({held[key] for key in wanted})  # each once
    assert checkpoint.tensors.keys() == checkpoint.files.keys() == wanted
    assert checkpoint.layers == tuple(sorted(i for i in set(layers) if i < 2))
    assert_refused(lambda: open_checkpoint(path), "safetensors", "must")


def test_without_layers_every_file_is_opened_once(sharded, opened):
    open_checkpoint(sharded)
    assert sorted(opened) == ["model.layers.0.safetensors", "model.layers.1.safetensors"]


@pytest.mark.parametrize("layers", [[1], (1,), {1}, range(1, 2), iter([1])], ids=lambda x: type(x).__name__)
def test_layers_may_be_any_collection_and_others_cannot_be_loaded(sharded, layers):
    (sharded / "model.layers.0.safetensors").unlink()
    checkpoint = open_checkpoint(sharded, layers=layers)
    assert_same(load_layer(checkpoint, 1, config=TINY), random_layers(TINY)[1])
    for call in both(checkpoint, TINY, 0):
        assert_refused(call, sharded, f"must hold {Q_A.format(0)}", "no such key")


def test_layers_choose_the_keys_of_a_single_file_too(tiny):
    checkpoint = open_checkpoint(tiny, layers=[1])
    assert checkpoint.tensors.keys() == {key for key in state(random_layers(TINY)) if key.startswith("model.layers.1.")}
    assert_same(load_layer(checkpoint, 1, config=TINY), random_layers(TINY)[1])


def test_an_index_that_points_outside_is_refused_whatever_layers_are_wanted(sharded):
    weight_map = {Q_A.format(0): "../x.safetensors", Q_A.format(1): "model.layers.1.safetensors"}
    write_index(sharded, weight_map)
    rule = "weight_map must name files inside the directory"
    assert_refused(lambda: open_checkpoint(sharded, layers=[1]), rule, "'../x.safetensors'")


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_layers_of_multi_token_prediction_are_counted_apart(tmp_path, spelling):
    """The model has two layers; what follows is its prediction's. A layer without attention weights is none here."""
    tensors = {spelling.format(i): torch.zeros(2) for i in (3, 0, 2, 1, 12)}
    tensors |= {key: torch.zeros(2) for key in ("model.layers.5.mlp.up_proj.weight", "model.layers.6.eh_proj.weight")}
    checkpoint = open_checkpoint(write(tmp_path / "in", tensors))
    assert checkpoint.layers == (0, 1)
    assert checkpoint.mtp_layers == (2, 3, 12)


def test_layers_of_multi_token_prediction_are_not_the_models(tmp_path):
    """A whole layer 2 behind a model of two: nothing asks for it, and `load_layer` does not give it."""
    tensors = state([*random_layers(TINY), random_layers(TINY)[0]])
    checkpoint = open_checkpoint(write(tmp_path / "in", tensors))
    check_layers(checkpoint, TINY)
    assert (checkpoint.layers, checkpoint.mtp_layers) == ((0, 1), (2,))
    assert open_checkpoint(tmp_path / "in", layers=[1, 2]).mtp_layers == (2,)
    assert_refused(lambda: load_layer(checkpoint, 2, config=TINY), "layer must be in 0..1", "got 2")


@pytest.mark.parametrize("count", [None, 0, -1, "2", 2.0, True])
def test_a_model_without_a_number_of_layers_does_not_tell_them_apart(tiny, count):
    config = TINY.to_hf() | {"num_hidden_layers": count}
    (tiny / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tiny)
    for name in ("layers", "mtp_layers"):
        rule = "num_hidden_layers must be an integer >= 1"
        assert_refused(lambda name=name: getattr(checkpoint, name), tiny, rule, f"got {count!r}")


def test_a_layer_spread_over_files_is_put_together(tmp_path):
    layers = random_layers(TINY)
    path = write_sharded(tmp_path / "in", state(layers), lambda key: f"{len(key) % 5}.safetensors")
    checkpoint = open_checkpoint(path)
    assert len(set(checkpoint.files.values())) == 5
    for layer, params in enumerate(layers):
        assert_same(load_layer(checkpoint, layer, config=TINY), params)


def before_reads(monkeypatch, act: Callable[[int], object]) -> None:
    """Call ``act`` with the number of the read before each read of a tensor's bytes."""
    real, count = os.preadv, iter(range(10**9))

    def preadv(fd: int, buffers: Iterable[Any], offset: int) -> int:
        act(next(count))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("coded", [False, True])
def test_no_file_is_mapped_to_memory_during_a_load_or_after_it(tmp_path, monkeypatch, coded):
    """Pages of a mapped file would count as the process's own; the system lists what is mapped."""
    tensors = coded_state(TINY) if coded else state(random_layers(TINY))
    file = write(tmp_path / "unmistakable", tensors) / "model.safetensors"

    def is_mapped() -> bool:
        return str(file) in Path("/proc/self/maps").read_text()

    seen = []
    before_reads(monkeypatch, lambda _: seen.append(is_mapped()))
    params = load_layer(open_checkpoint(file.parent), 1, config=TINY)
    assert len(seen) >= len(param_shapes(TINY))
    assert not any(seen)
    assert not is_mapped()
    assert params.o_proj.isfinite().all()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ):
        assert is_mapped()  # the list would have shown it


@pytest.mark.parametrize("at_once", [1000, 4096])
def test_reads_may_come_in_parts(tiny, monkeypatch, at_once):
    """The system may give less than was asked for; a large tensor is asked for in parts."""
    real, asked = os.preadv, []

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        asked.append(len(buffers[0]))
        return real(fd, [buffers[0][: at_once - 1]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(weights.checkpoint, "CHUNK", at_once)
    assert_same(load_layer(open_checkpoint(tiny), 1, config=TINY), random_layers(TINY)[1])
    assert max(asked) == at_once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_parts_of_kv_b_are_views(tiny, dtype):
    params = load_layer(open_checkpoint(tiny), 0, config=TINY, dtype=dtype)
    storage = params.kv_b_proj.untyped_storage()
    assert params.kv_b_proj.is_contiguous()
    assert storage.nbytes() == params.kv_b_proj.nbytes
    for part in sfa.split_kv_b(params.kv_b_proj, TINY):
        assert part.untyped_storage().data_ptr() == storage.data_ptr()


def test_loaded_weights_outlive_the_file(tiny):
    params = load_layer(open_checkpoint(tiny), 0, config=TINY)
    with (tiny / "model.safetensors").open("r+b") as file:
        file.write(bytes((tiny / "model.safetensors").stat().st_size))
    assert_same(params, random_layers(TINY)[0])


def test_a_single_file_counts_before_an_index(tiny):
    write_index(tiny, {"other": "missing.safetensors"})
    assert Q_A.format(0) in open_checkpoint(tiny).files


@pytest.mark.parametrize("blobs", ["models--a--b/blobs", "blobs/0f"], ids=["repository", "cache"])
def test_a_snapshot_of_the_hugging_face_cache_opens_through_its_links(tmp_path, sharded, blobs):
    snapshot, store = tmp_path / "models--a--b/snapshots/0123", tmp_path / blobs
    snapshot.mkdir(parents=True)
    store.mkdir(parents=True)
    for file in sharded.iterdir():
        file.rename(store / file.stem)
        (snapshot / file.name).symlink_to(os.path.relpath(store / file.stem, snapshot))
    assert_same(load_layer(open_checkpoint(snapshot), 1, config=TINY), random_layers(TINY)[1])


# what is broken is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [3, None, b"model", ["model"]])
def test_what_is_no_path_is_refused(path, unchecked):
    with pytest.raises(ValueError) as error:
        open_checkpoint(path)
    assert str(error.value) == f"open_checkpoint: path must be a directory's, a str or os.PathLike; got {path!r}"


@pytest.mark.parametrize("layers", [3, "01", 1.0])
def test_layers_that_are_no_collection_are_refused(tiny, layers, unchecked):
    parts = "open_checkpoint", tiny, "layers must be a collection of numbers, or None", f"got {layers!r}"
    assert_refused(lambda: open_checkpoint(tiny, layers=layers), *parts)


def test_a_path_that_is_no_directory_is_refused(tmp_path, tiny):
    missing, file = tmp_path / "missing", tiny / "model.safetensors"
    assert_refused(lambda: open_checkpoint(missing), "open_checkpoint", missing, "directory", "nothing of that name")
    assert_refused(lambda: open_checkpoint(file), "open_checkpoint", file, "directory", "got a file")
    assert_refused(lambda: open_checkpoint(tmp_path / "two\nlines"), "two lines", "must be a directory")


@pytest.mark.parametrize(
    ("text", "rule", "got"),
    [
        (None, "must be a file", "got nothing of that name"),
        (b"", "must hold JSON", "char 0"),
        (b'{"hidden_size": 64', "must hold JSON", "delimiter"),
        (b"\xff\xfe\x00", "must hold JSON", "decode byte 0xff"),
        (b"[" * 100_000, "must hold JSON", "recursion"),
        (b"[1, 2]", "must hold a JSON object", "got list"),
        (b"null", "must hold a JSON object", "got NoneType"),
    ],
)
def test_a_bad_config_json_is_refused(tiny, text, rule, got):
    file = tiny / "config.json"
    file.unlink()
    if text is not None:
        file.write_bytes(text)
    assert_refused(lambda: open_checkpoint(tiny), file, rule, got)


def test_a_key_that_stands_twice_is_refused(tiny, sharded):
    """JSON's own reader would take the last without a word."""
    config, index = tiny / "config.json", sharded / "model.safetensors.index.json"
    whole = config.read_text()
    for text, name in [
        ('{"hidden_size": 64, "vocab_size": 3, "hidden_size": 64}', "hidden_size"),
        ('{"rope_parameters": {"rope_theta": 1, "rope_theta": 2}}', "rope_theta"),
        ('{"x": [{"a": 1}, {"b": 1, "b": 1}]}', "b"),
    ]:
        config.write_text(text)
        assert_refused(lambda: open_checkpoint(tiny), config, "must hold each key once", f"got '{name}' twice")
    config.write_text(whole)
    key = Q_A.format(0)
    index.write_text(f'{{"weight_map": {{"{key}": "a.safetensors", "x": "b", "{key}": "b.safetensors"}}}}')
    assert_refused(lambda: open_checkpoint(sharded), index, "must hold each key once", f"got '{key}' twice")
    index.write_text('{"weight_map": {}, "metadata": {}, "weight_map": {}}')
    assert_refused(lambda: open_checkpoint(sharded), index, "must hold each key once", "got 'weight_map' twice")
    file, one = tiny / "model.safetensors", json.dumps(entry())
    write_raw(file, f'{{"{key}": {one}, "{key}": {one}}}'.encode(), b"\0" * 8)
    assert_refused(lambda: open_checkpoint(tiny), file, "must hold each key once", f"got '{key}' twice")
    write_raw(file, f'{{"x": {one[:-1]}, "dtype": "F64"}}}}'.encode(), b"\0" * 8)
    assert_refused(lambda: open_checkpoint(tiny), file, "must hold each key once", "got 'dtype' twice")


def test_a_key_that_stands_twice_is_named_in_one_short_line(tiny):
    (tiny / "config.json").write_text('{"a\\nb": 1, "a\\nb": 2}')
    assert_refused(lambda: open_checkpoint(tiny), "must hold each key once", r"'a\nb' twice")
    name = "k" * 10_000
    (tiny / "config.json").write_text(f'{{"{name}": 1, "{name}": 2}}')
    with pytest.raises(ValueError) as error:
        open_checkpoint(tiny)
    assert len(str(error.value)) < 1000


def test_a_key_that_stands_twice_is_found_in_one_pass(tiny):
    """A long file must not keep its reader busy: with a pass per key, this one takes minutes."""
    names = [f'"{i}": 0' for i in range(50_000)]
    (tiny / "config.json").write_text(f'{{{", ".join(names)}, "49999": 0}}')
    begin = time.process_time()
    assert_refused(lambda: open_checkpoint(tiny), "must hold each key once", "got '49999' twice")
    assert time.process_time() - begin < 10


def test_a_key_in_two_files_belongs_to_the_one_that_the_index_names(sharded):
    first, second = (load_file(sharded / f"model.layers.{i}.safetensors") for i in range(2))
    save_file(first | second, sharded / "model.layers.0.safetensors")
    assert_same(load_layer(open_checkpoint(sharded), 1, config=TINY), random_layers(TINY)[1])
    assert open_checkpoint(sharded).files[Q_A.format(1)].name == "model.layers.1.safetensors"


def test_a_directory_in_place_of_a_file_is_refused(tiny):
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors").mkdir()
    assert_refused(lambda: open_checkpoint(tiny), tiny / "model.safetensors", "must be a file", "a directory")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_link_without_its_target_is_called_one(tiny, name):
    (tiny / "model.safetensors").rename(tiny / "other")
    (tiny / name).unlink(missing_ok=True)
    (tiny / name).symlink_to("nowhere")
    got = "got a link whose target is missing, 'nowhere'"
    assert_refused(lambda: open_checkpoint(tiny), tiny / name, "must be a file", got)


def test_a_link_without_its_target_that_an_index_names_is_called_one(sharded):
    (sharded / "model.layers.1.safetensors").unlink()
    (sharded / "model.layers.1.safetensors").symlink_to("blob")
    got = "got a link whose target is missing, 'blob'"
    assert_refused(lambda: open_checkpoint(sharded), sharded / "model.layers.1.safetensors", "must be a file", got)


def test_an_index_counts_beside_a_link_without_its_target(sharded):
    """As in transformers, which asks whether there is a file."""
    (sharded / "model.safetensors").symlink_to("nowhere")
    assert_same(load_layer(open_checkpoint(sharded), 1, config=TINY), random_layers(TINY)[1])


def test_a_directory_without_weights_is_refused(tiny):
    (tiny / "model.safetensors").unlink()
    rule = "must hold model.safetensors or model.safetensors.index.json"
    assert_refused(lambda: open_checkpoint(tiny), tiny, rule, "neither")
    (tiny / "model0-mp8.safetensors").write_bytes(b"")
    assert_refused(lambda: open_checkpoint(tiny), tiny, rule, "model0-mp8.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_reason_and_never_read(tiny, name, monkeypatch):
    (tiny / "model.safetensors").unlink()
    torch.save({}, tiny / name)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    assert_refused(lambda: open_checkpoint(tiny), tiny, "pickle can run code", name)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused_at_opening(tiny, keep):
    file = tiny / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert_refused(lambda: open_checkpoint(tiny), file, "must", "bytes")


def test_bytes_after_the_data_are_refused(tiny):
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    assert_refused(lambda: open_checkpoint(tiny), file, "bytes of data that its header names", "bytes")


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "rule", "got"),
    [
        ([], "must hold a JSON object", "got list"),
        (b"{not json", "must hold JSON", "property name"),
        ({"x": 3}, "header of 'x' must give", "got 3"),
        ({"x": {"dtype": "F32"}}, "header of 'x' must give", "got {'dtype': 'F32'}"),
        ({"x": entry(dtype=4)}, "header of 'x' must give", "'dtype': 4"),
        ({"x": entry(shape=[-2])}, "header of 'x' must give", "[-2]"),
        ({"x": entry(shape=[2.0])}, "header of 'x' must give", "[2.0]"),
        ({"x": entry(shape=[True, 2])}, "header of 'x' must give", "[True, 2]"),
        ({"x": entry(offsets=[8, 0])}, "header of 'x' must give", "[8, 0]"),
        ({"x": entry(offsets=[0, 4, 8])}, "header of 'x' must give", "[0, 4, 8]"),
        ({"x": entry(shape=[3])}, "'x' must have 12 bytes, F32 [3]", "got 8"),
        ({"x": entry("F8_E4M3", [2, 3])}, "'x' must have 6 bytes, F8_E4M3 [2, 3]", "got 8"),
        ({"x": entry(offsets=[4, 12])}, "data of 'x' must begin at byte 0", "got 4"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, "data of 'y' must begin at byte 8", "got 4"),
        ({"x": entry(), "y": entry(offsets=[12, 20])}, "data of 'y' must begin at byte 8", "got 12"),
        ({"x": entry(), "y": entry(offsets=[8, 16])}, "must hold the 16 bytes of data", "got 8 bytes"),
        ({"a\nb": 3}, r"header of 'a\nb' must give", "got 3"),
        ({"x": entry(shape=[10**4000, 10**4000])}, "header of 'x' must give", "characters"),
        ({"x": entry(shape=[2**63])}, "header of 'x' must give", f"[{2**63}]"),
        ({"x": entry(offsets=[0, 2**63])}, "header of 'x' must give", f"[0, {2**63}]"),
        ({"x": entry(shape=[2**62] * 300)}, "'x' must have more than 9223372036854775807 bytes", "got 8"),
        ({"x": entry(shape=[1] * 5000)}, "'x' must have 4 bytes, F32 [1, 1, 1,", "got 8"),
        ({"k" * 5000: entry(offsets=[4, 12])}, "characters must begin at byte 0", "got 4"),
        ({"k" * 5000: entry(shape=[3])}, "characters must have 12 bytes", "got 8"),
        ({"k" * 5000: 3}, "characters must give a dtype", "got 3"),
        ({"x": {"dtype": "F" * 5000}}, "header of 'x' must give", "characters"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_bad_header_is_refused_at_opening(tiny, header, rule, got):
    file = tiny / "model.safetensors"
    write_raw(file, header, b"\0" * 8)
    assert_refused(lambda: open_checkpoint(tiny), file, rule, got)
    with pytest.raises(ValueError) as error:
        open_checkpoint(tiny)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 10, "\u0663", "\u00b2"], ids=["long", "ten", "arabic", "square"])
def test_a_number_that_is_no_layer_s_makes_a_key_of_none(tiny, number):
    """Such a key is no attention weight of the layers asked for, and no other error either."""
    write_raw(tiny / "model.safetensors", {f"model.layers.{number}.self_attn.x": entry()}, b"\0" * 8)
    assert open_checkpoint(tiny, layers=[0, 3]).tensors == {}
    assert open_checkpoint(tiny).layers == ()


@pytest.mark.parametrize("length", [65, 10**8 + 1, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused_and_not_allocated(tiny, length):
    file = tiny / "model.safetensors"
    write_raw(file, b"{}" + b" " * 62, length=length)
    assert_refused(lambda: open_checkpoint(tiny), file, "must fit into the file's 72 bytes", length)


@pytest.mark.parametrize(
    ("text", "rule", "got"),
    [
        ("{}", "weight_map must be an object", "got NoneType"),
        ('{"weight_map": ["a"]}', "weight_map must be an object", "got list"),
        ('{"weight_map": {"k": 3}}', "weight_map of 'k' must be a file name", "got 3"),
        ('{"weight_map": ', "must hold JSON", "char"),
        ("7", "must hold a JSON object", "got int"),
    ],
)
def test_a_bad_index_is_refused(sharded, text, rule, got):
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    assert_refused(lambda: open_checkpoint(sharded), index, rule, got)


@pytest.mark.parametrize(
    "name",
    [
        "{tiny}/model.safetensors",
        "../tiny/model.safetensors",
        "x/../../tiny/model.safetensors",
        "link",
        "up/model.safetensors",
        "{sharded}/model.layers.0.safetensors",
        "x/../model.layers.0.safetensors",
        "a\0",
        "\ud800.safetensors",
    ],
)
def test_an_index_that_points_outside_the_directory_is_refused(sharded, tiny, name):
    """All but the last two name a right file, two of them one inside, in a way that only a plain name should."""
    name = name.format(tiny=tiny, sharded=sharded)
    (sharded / "x").mkdir()
    (sharded / "link").symlink_to(tiny / "model.safetensors")
    (sharded / "up").symlink_to(tiny)
    write_index(sharded, {Q_A.format(0): name})
    rule = "weight_map must name files inside the directory"
    assert_refused(lambda: open_checkpoint(sharded), sharded / "model.safetensors.index.json", rule, repr(name))


def test_a_link_inside_the_directory_may_be_named(sharded):
    (sharded / "link.safetensors").symlink_to("model.layers.0.safetensors")
    write_index(sharded, {Q_A.format(0): "link.safetensors"})
    assert open_checkpoint(sharded).files == {Q_A.format(0): sharded / "link.safetensors"}


@pytest.mark.parametrize("name", ["gone.safetensors", ""])
def test_an_index_that_names_no_file_is_refused(sharded, name):
    write_index(sharded, {Q_A.format(0): name})
    assert_refused(lambda: open_checkpoint(sharded), sharded / name, "must be a file", "got")


def test_an_index_that_names_a_key_the_file_lacks_is_refused(sharded):
    write_index(sharded, {Q_A.format(1): "model.layers.0.safetensors"})
    parts = sharded / "model.layers.0.safetensors", f"must hold '{Q_A.format(1)}'", "no such key"
    assert_refused(lambda: open_checkpoint(sharded), *parts)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_unreadable_file_is_refused(tiny, name, monkeypatch):
    real = Path.open

    def denied(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    assert_refused(lambda: open_checkpoint(tiny), tiny / name, "must be readable", "got Permission denied")


def both(checkpoint: Checkpoint, config: SFAConfig, layer: int) -> list[Callable[[], object]]:
    """The header check and the load, which must refuse the same."""
    return [lambda: check_layers(checkpoint, config), lambda: load_layer(checkpoint, layer, config=config)]


@pytest.mark.parametrize("field", HF_NAMES)
def test_a_missing_key_is_refused_by_name(tmp_path, field):
    key = "model.layers.1.self_attn." + HF_NAMES[field]
    tensors = state(random_layers(TINY))
    del tensors[key]
    path = write(tmp_path / "in", tensors)
    for call in both(open_checkpoint(path), TINY, 1):
        assert_refused(call, path, f"must hold {key}", "no such key")


def test_a_missing_indexer_of_a_full_layer_is_refused(tmp_path):
    path = write(tmp_path / "in", state(random_layers(SHARED)))
    config = replace(SHARED, indexer_types=("full",) * 3)
    for call in both(open_checkpoint(path), config, 1):
        assert_refused(call, path, "must hold model.layers.1.self_attn.indexer.wq_b.weight", "no such key")


@pytest.mark.parametrize("field", HF_NAMES)
def test_a_wrong_shape_is_refused_by_name(tmp_path, field):
    key, shape = "model.layers.1.self_attn." + HF_NAMES[field], param_shapes(TINY)[field]
    tensors = state(random_layers(TINY)) | {key: torch.zeros(3, *shape[1:])}
    path = write(tmp_path / "in", tensors)
    for call in both(open_checkpoint(path), TINY, 1):
        assert_refused(call, path / "model.safetensors", f"{key} must be {list(shape)}", f"got {[3, *shape[1:]]}")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8"), (torch.int64, "I64"), (torch.bool, "BOOL")],
)
def test_other_stored_dtypes_are_refused_by_name(tmp_path, dtype, name):
    tensors = state(random_layers(TINY))
    tensors[Q_A.format(1)] = tensors[Q_A.format(1)].to(dtype)
    path = write(tmp_path / "in", tensors)
    for call in both(open_checkpoint(path), TINY, 1):
        parts = path / "model.safetensors", Q_A.format(1), "must be F64, F32, F16, BF16 or F8_E4M3", f"got {name}"
        assert_refused(call, *parts)


@pytest.mark.parametrize("layer", [-1, 2, 61, "0", 0.0, True, None])
def test_a_layer_that_does_not_exist_is_refused(tiny, layer, unchecked):
    checkpoint = open_checkpoint(tiny)
    parts = "load_layer", tiny, "layer must be in 0..1", f"got {layer!r}"
    assert_refused(lambda: load_layer(checkpoint, layer, config=TINY), *parts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex64, torch.bool], ids=str)
def test_load_layer_refuses_other_dtypes(tiny, dtype):
    checkpoint = open_checkpoint(tiny)
    parts = "load_layer", tiny, "dtype must be one of torch.float64, torch.float32", f"got {dtype}"
    assert_refused(lambda: load_layer(checkpoint, 0, config=TINY, dtype=dtype), *parts)


def test_files_that_changed_since_opening_are_refused(tiny):
    checkpoint, file = open_checkpoint(tiny), tiny / "model.safetensors"
    whole = file.read_bytes()

    def call() -> object:
        return load_layer(checkpoint, 0, config=TINY)

    file.write_bytes(whole[:-1])
    assert_refused(call, "load_layer", file, "must be as when it was opened", "got must hold the 208576 bytes")
    save_file(state(random_layers(TINY, torch.bfloat16)), file)
    assert_refused(call, "load_layer", file, f"{Q_A.format(0)} must be F32 [32, 64]", "got BF16 [32, 64]")
    save_file({"x": torch.zeros(1)}, file)
    assert_refused(call, "load_layer", file, "must hold", "as when it was opened", "no such key")
    file.unlink()
    assert_refused(call, "load_layer", file, "must be as when it was opened", "No such file")


def write_backwards(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a right file whose tensors lie in the reverse of the usual order."""
    header, data = {}, b""
    for key in sorted(tensors, reverse=True):
        x = tensors[key]
        header[key] = entry("F32", list(x.shape), [len(data), len(data) + x.nbytes])
        data += x.numpy().tobytes()
    write_raw(file, header, data)


def test_a_file_replaced_since_opening_by_another_of_the_same_tensors_is_read_as_it_is_now(tiny):
    checkpoint = open_checkpoint(tiny)
    layers = random_layers(TINY)
    write_backwards(tiny / "model.safetensors", state(layers[::-1]))
    for layer in range(2):
        assert_same(load_layer(checkpoint, layer, config=TINY), layers[1 - layer])


@pytest.mark.parametrize("read", [0, 1, 5])
def test_a_file_replaced_while_it_is_read_gives_one_file_or_an_error_never_a_mixture(tiny, monkeypatch, read):
    """Replaced as a download does it: by a rename; the new file has the same tensors in other places."""
    layers, file, new = random_layers(TINY), tiny / "model.safetensors", tiny / "new"
    write_backwards(new, state(layers[::-1]))
    before_reads(monkeypatch, lambda i: new.rename(file) if i == read else None)
    loaded: list[LayerParams] = []
    with suppress(ValueError):
        loaded.append(load_layer(open_checkpoint(tiny), 1, config=TINY))
    for params in loaded:
        found = dict(named_fields(params))
        assert any(all(torch.equal(found[name], x) for name, x in named_fields(layer)) for layer in layers)
    assert not new.exists()


def test_a_file_truncated_while_it_is_read_is_refused(tiny, monkeypatch):
    """Where a mapped file would end the process."""
    file = tiny / "model.safetensors"
    size = file.stat().st_size
    before_reads(monkeypatch, lambda i: os.truncate(file, size // 2 + 8) if i == 0 else None)
    checkpoint = open_checkpoint(tiny)
    assert_refused(lambda: load_layer(checkpoint, 1, config=TINY), "load_layer", file, "must have", "bytes", "got")


def test_an_error_of_the_disk_while_reading_is_told_in_one_line(tiny, monkeypatch):
    def broken(i: int) -> None:
        if i == 3:
            raise OSError(5, "Input/output error")

    before_reads(monkeypatch, broken)
    checkpoint = open_checkpoint(tiny)
    parts = "load_layer", tiny / "model.safetensors", "must be as when it was opened", "got Input/output error"
    assert_refused(lambda: load_layer(checkpoint, 1, config=TINY), *parts)


@pytest.mark.parametrize("change", ["codes", "factors", "factors gone"])
def test_fp8_that_changed_since_opening_is_refused(tmp_path, change):
    tensors = coded_state(TINY)
    file = write(tmp_path / "in", tensors) / "model.safetensors"
    checkpoint, key = open_checkpoint(file.parent), Q_A.format(1)
    if change == "codes":
        save_file(tensors | {key: tensors[key].bfloat16()}, file)
        parts = f"{key} must be F8_E4M3 [32, 64] as when it was opened", "got BF16 [32, 64]"
    elif change == "factors":
        save_file(tensors | {f"{key}_scale_inv": torch.ones(2, 1)}, file)
        parts = f"{key}_scale_inv must be F32 [1, 1] as when it was opened", "got F32 [2, 1]"
    else:
        save_file({name: x for name, x in tensors.items() if name != f"{key}_scale_inv"}, file)
        parts = f"must hold {key}_scale_inv as when it was opened", "no such key"
    assert_refused(lambda: load_layer(checkpoint, 1, config=TINY), "load_layer", file, *parts)


# saving leaves all or nothing ---------------------------------------------------------------------------------------


def test_saving_never_overwrites(tiny):
    before = {file.name: file.read_bytes() for file in tiny.iterdir()}
    for path, rule, got in [
        (tiny, "must not exist or be an empty directory", "got a directory with files in it"),
        (tiny / "config.json", "must not exist or be an empty directory", "got a file"),
        (tiny / "config.json/x", "must be writable", "got"),
    ]:
        assert_refused(lambda path=path: save_checkpoint(path, random_layers(TINY), TINY), path, rule, got)
    assert {file.name: file.read_bytes() for file in tiny.iterdir()} == before


@pytest.mark.parametrize("name", ["new", "empty", "a/b/c", "link"])
def test_saving_fills_a_new_or_an_empty_directory(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    save_checkpoint(tmp_path / name, random_layers(TINY), TINY)
    check_layers(open_checkpoint(tmp_path / name), TINY)
    assert {file.name for file in (tmp_path / name).iterdir()} == {"config.json", "model.safetensors"}
    assert not [file for file in tmp_path.rglob(".*")]


@pytest.mark.parametrize("step", ["save_file", "copymode", "replace"])
def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch, step):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    owner = {"save_file": weights.checkpoint, "copymode": weights.checkpoint.shutil, "replace": Path}[step]
    monkeypatch.setattr(owner, step, full)
    target = tmp_path / "out"
    parts = "save_checkpoint", target, "must be writable", "No space left on device"
    assert_refused(lambda: save_checkpoint(target, random_layers(TINY), TINY), *parts)
    assert list(tmp_path.iterdir()) == []


def test_saved_files_have_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "out", random_layers(TINY), TINY)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == {"config.json": 0o640, "model.safetensors": 0o640}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_layers_that_share_memory_or_are_not_contiguous_are_saved(tmp_path):
    params = random_layers(TINY)[0]
    flipped = replace(params, o_proj=params.o_proj.T.contiguous().T.requires_grad_())
    assert not flipped.o_proj.is_contiguous()
    save_checkpoint(tmp_path / "out", [flipped, params], TINY)
    checkpoint = open_checkpoint(tmp_path / "out")
    for layer in range(2):
        assert_same(load_layer(checkpoint, layer, config=TINY), params)


def test_saving_refuses_what_does_not_fit_the_config(tmp_path, unchecked):
    target, (first, second) = tmp_path / "out", random_layers(TINY)
    schedule = replace(TINY, indexer_types=("full", "shared"))

    def refused(layers: list[LayerParams], config: SFAConfig, *parts: str) -> None:
        assert_refused(lambda: save_checkpoint(target, layers, config), "save_checkpoint", target, *parts)
        assert list(tmp_path.iterdir()) == []

    refused([first], TINY, "layers must be 2", "got 1")
    refused([first, second], schedule, "layer 1 must have no indexer", "indexer.wk")
    refused([first, replace(second, indexer=None)], TINY, "layer 1 must have an indexer", "got")
    short = replace(second, o_proj=second.o_proj[:5])
    refused([first, short], TINY, "o_proj of layer 1 must be [64, 80]", "got [5, 80]")
    coded = replace(second, o_proj=second.o_proj.to(torch.float8_e4m3fn))
    refused([first, coded], TINY, "o_proj of layer 1 must be stored as F64, F32", "got torch.float8_e4m3fn")
    half = random_layers(TINY, torch.bfloat16)[1]
    refused([first, half], TINY, "projections must have one dtype", "got ['bfloat16', 'float32']")
    eps = replace(TINY, index_norm_eps=1e-3)
    refused([first, second], eps, "config.json has no key for an index_norm_eps other than 1e-06", "got 0.001")
