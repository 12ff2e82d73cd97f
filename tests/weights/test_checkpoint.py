"""Checkpoints give back what was stored, bit for bit and one layer at a time, and refuse in one line what is broken."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
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
from weights import Checkpoint, check_layers, load_layer, open_checkpoint, save_checkpoint

SHARED = replace(TINY, indexer_types=("full", "shared", "full"), index_rope_pairing="interleaved")
YARN = replace(TINY, yarn=sfa.Yarn(factor=40.0, original_max_position_embeddings=64, mscale_all_dim=1.0))
CONFIGS = {"tiny": TINY, "shared": SHARED, "yarn": YARN}
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
    """Every tensor that is read, as (file name, key, bytes); a file that is opened is there even if nothing is read."""
    seen: list[tuple[str, str, int]] = []

    class Recorded:
        def __init__(self, file, **options):
            self.name, self.inner = Path(file).name, safe_open(file, **options)
            seen.append((self.name, "", 0))

        def __enter__(self):
            self.stream = self.inner.__enter__()
            return self

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

        def get_tensor(self, key):
            tensor = self.stream.get_tensor(key)
            seen.append((self.name, key, tensor.nbytes))
            return tensor

    monkeypatch.setattr(weights.checkpoint, "safe_open", Recorded)
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


def test_a_layer_spread_over_files_is_put_together(tmp_path):
    layers = random_layers(TINY)
    path = write_sharded(tmp_path / "in", state(layers), lambda key: f"{len(key) % 5}.safetensors")
    checkpoint = open_checkpoint(path)
    assert len(set(checkpoint.files.values())) == 5
    for layer, params in enumerate(layers):
        assert_same(load_layer(checkpoint, layer, config=TINY), params)


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


def test_a_directory_in_place_of_a_file_is_refused(tiny):
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors").mkdir()
    assert_refused(lambda: open_checkpoint(tiny), tiny / "model.safetensors", "must be a file", "a directory")


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
        ({"x": entry(offsets=[4, 12])}, "data of 'x' must begin at byte 0", "got 4"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, "data of 'y' must begin at byte 8", "got 4"),
        ({"x": entry(), "y": entry(offsets=[12, 20])}, "data of 'y' must begin at byte 8", "got 12"),
        ({"x": entry(), "y": entry(offsets=[8, 16])}, "must hold the 16 bytes of data", "got 8 bytes"),
        ({"a\nb": 3}, r"header of 'a\nb' must give", "got 3"),
    ],
)
def test_a_bad_header_is_refused_at_opening(tiny, header, rule, got):
    file = tiny / "model.safetensors"
    write_raw(file, header, b"\0" * 8)
    assert_refused(lambda: open_checkpoint(tiny), file, rule, got)


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
    ],
)
def test_an_index_that_points_outside_the_directory_is_refused(sharded, tiny, name):
    """All but the last name a right file, two of them one inside, in a way that only a plain name should."""
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
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.int64, "I64"), (torch.bool, "BOOL")],
)
def test_other_stored_dtypes_are_refused_by_name(tmp_path, dtype, name):
    tensors = state(random_layers(TINY))
    tensors[Q_A.format(1)] = tensors[Q_A.format(1)].to(dtype)
    path = write(tmp_path / "in", tensors)
    for call in both(open_checkpoint(path), TINY, 1):
        parts = path / "model.safetensors", Q_A.format(1), "not supported in this version", f"got {name}"
        assert_refused(call, *parts)


@pytest.mark.parametrize("layer", [-1, 2, 61])
def test_a_layer_that_does_not_exist_is_refused(tiny, layer):
    checkpoint = open_checkpoint(tiny)
    parts = "load_layer", tiny, "layer must be in 0..1", f"got {layer}"
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
    assert_refused(call, "load_layer", file, "must be as when it was opened", "not fully covered")
    save_file(state(random_layers(TINY, torch.bfloat16)), file)
    assert_refused(call, "load_layer", file, f"{Q_A.format(0)} must be F32 [32, 64]", "got torch.bfloat16 [32, 64]")
    save_file({"x": torch.zeros(1)}, file)
    assert_refused(call, "load_layer", file, "must be as when it was opened", Q_A.format(0))
    file.unlink()
    assert_refused(call, "load_layer", file, "must be as when it was opened", "No such file")


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
