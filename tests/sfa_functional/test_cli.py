"""`sfa eval` on small models of both types and on the bundled checkpoint; bad input is one line and exit code 2."""

import json
import math
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from sfa_functional import cli
from sfa_functional.bundled import held_out_text

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "first_k_dense_replace": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A random two-layer DeepSeek-V3.2 checkpoint."""
    path = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    DeepseekV32ForCausalLM(DeepseekV32Config(**SIZES, num_hidden_layers=2)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A random three-layer GLM-5 checkpoint in shards, whose last two layers share a selection."""
    path = tmp_path_factory.mktemp("glm")
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(**SIZES, num_hidden_layers=3, indexer_types=["full", "full", "shared"])
    GlmMoeDsaForCausalLM(config).save_pretrained(path, max_shard_size="150KB")
    return path


@pytest.fixture
def text(tmp_path):
    """A short text file."""
    path = tmp_path / "text.txt"
    path.write_text(held_out_text()[:300])
    return path


def run(*args):
    cli.main(["eval", *map(str, args)])


def refusal(capsys, *args):
    """Run with bad input and return its one line."""
    with pytest.raises(SystemExit) as stop:
        run(*args)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith(("sfa eval: ", "sfa: "))
    return captured.err.strip()


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_eval_writes_every_number_and_agrees_with_transformers(name, request, text, tmp_path, capsys):
    out = tmp_path / "out.json"
    path = request.getfixturevalue(name)
    run(path, "--text", text, "--context", 100, "--topk", 8, 16, 100, "--json", out, "--untrained")
    result = json.loads(out.read_text())
    layers = 2 if name == "deepseek" else 3
    assert result["tokens"] == 300
    for key in ("perplexity_at_k", "perplexity_untrained_at_k", "layers"):
        assert list(result[key]) == ["8", "16", "100"]
    for rows in result["layers"].values():
        assert len(rows) == layers
        assert all(0 < row["mass"] <= row["best_mass"] + 1e-6 <= 1 + 1e-5 for row in rows)
    assert result["parity"]["max_rel"] < 1e-5
    assert result["parity"]["selection_overlap"] > 0.999
    assert result["seconds"]["ours"] > 0 < result["seconds"]["transformers"]
    dense = result["perplexity_dense"]
    assert result["perplexity_at_k"]["100"] == pytest.approx(dense, rel=1e-5)
    assert all(row["mass"] == 1 for row in result["layers"]["100"])
    assert {k: list(runs) for k, runs in result["selectors"].items()} == {
        "8": ["indexer", "best", "window", "random", "untrained"],  # the model's own number of keys
        "16": ["indexer", "untrained"],
        "100": ["indexer", "untrained"],
    }
    for k, runs in result["selectors"].items():
        assert runs["indexer"]["perplexity"] == result["perplexity_at_k"][k]
        assert runs["indexer"]["layers"] == result["layers"][k]
        assert all(0 < run["mass"] <= run["best_mass"] + 1e-6 and 0 <= run["recall"] <= 1 for run in runs.values())
    if name == "deepseek":  # a shared layer takes what was best for another
        assert result["selectors"]["8"]["best"]["recall"] == 1
    assert result["selectors"]["8"]["indexer"]["kl"] > 0
    printed = capsys.readouterr().out
    assert f"{dense:.3f}" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_selectors_asked_for_run_at_every_k(deepseek, text, tmp_path, monkeypatch, capsys):
    """The user's own among them, from a module in the working directory; blocks of one key are the indexer's choice."""
    (tmp_path / "mine.py").write_text("from sfa_functional import window as last\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    names = ["window", "mine:last", "indexer", "block:1"]
    options = "--context", 60, "--topk", 8, 16, "--rows", 20, "--json", out, "--plot", picture
    run(deepseek, "--text", text, *options, "--select", *names)
    result = json.loads(out.read_text())
    assert [list(runs) for runs in result["selectors"].values()] == [names, names]
    for runs in result["selectors"].values():
        assert runs["mine:last"]["perplexity"] == runs["window"]["perplexity"]
        assert runs["block:1"]["perplexity"] == runs["indexer"]["perplexity"] != runs["window"]["perplexity"]
        assert runs["indexer"]["mass_standard_error"] > 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_eight_bits_of_a_model_whose_layers_share_a_selection(glm, text, tmp_path):
    out = tmp_path / "out.json"
    run(glm, "--text", text, "--context", 60, "--topk", 8, "--json", out, "--select", "indexer:int8")
    layers = json.loads(out.read_text())["selectors"]["8"]["indexer:int8"]["layers"]
    assert ["overlap" in layer for layer in layers] == [True, True, False]


def test_a_picture_can_be_drawn_of_one_k_and_without_the_indexer(deepseek, text, tmp_path):
    options = "--context", 60, "--topk", 8, "--select", "random", "--plot", tmp_path / "out.png"
    run(deepseek, "--text", text, *options)
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_eight_bits_stand_beside_what_they_round(deepseek, text, tmp_path, capsys):
    """Almost the same keys, a perplexity that moves a little; the table still fits."""
    out = tmp_path / "out.json"
    options = "--context", 60, "--topk", 8, "--json", out, "--index-dtype", "int8", "--kv-dtype", "fp8"
    run(deepseek, "--text", text, *options, "--select", "indexer", "sfa_functional.selectors:window")
    runs = json.loads(out.read_text())["selectors"]["8"]
    names = ["indexer", "sfa_functional.selectors:window", "indexer:int8", "hadamard:int8", "kv:fp8"]
    assert list(runs) == names
    for name in ("indexer:int8", "hadamard:int8"):
        assert 0.8 < runs[name]["overlap"] < 1
    assert "overlap" not in runs["kv:fp8"]
    assert runs["kv:fp8"]["layers"][0] == runs["indexer"]["layers"][0]  # what it sees is still exact
    assert 0 < abs(runs["kv:fp8"]["perplexity"] / runs["indexer"]["perplexity"] - 1) < 0.1
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("indexer:fp4", "must be indexer:fp8 or indexer:int8; got indexer:fp4"),
        ("kv:", "must be kv:fp8 or kv:int8; got kv:"),
        ("nobody", "must be indexer, best, window, random, untrained, block:N or module:function; got nobody"),
        ("best:3", "must be importable"),
        ("block:0", "a block must have its number of keys"),
        ("block:x", "a block must have its number of keys"),
        ("block:99999999999", "a block must have its number of keys"),
        ("os:getcwd", "os:getcwd must run; got TypeError"),
        ("missing_module:f", "missing_module:f must be importable; got ModuleNotFoundError"),
        ("json:nothing", "json:nothing must be a function of its module; got NoneType"),
        ("string:digits", "string:digits must be a function of its module; got str"),
    ],
)
def test_selectors_that_can_not_be_found_are_refused(name, words, deepseek, text, capsys):
    assert words in refusal(capsys, deepseek, "--text", text, "--select", name)


def test_dense_perplexity_is_that_of_transformers(deepseek, text, tmp_path):
    out = tmp_path / "out.json"
    run(deepseek, "--text", text, "--context", 100, "--topk", 100, "--json", out)
    model = DeepseekV32ForCausalLM.from_pretrained(deepseek, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 100
    ids = torch.tensor(list(text.read_bytes())).view(3, 100)
    with torch.no_grad():
        loss = model(ids, labels=ids, use_cache=False).loss
    result = json.loads(out.read_text())
    assert result["perplexity_dense"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert result["perplexity_untrained_at_k"] == {}


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A random two-layer checkpoint with tied embeddings whose second layer is a mixture of experts."""
    path = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = SIZES | experts | {"first_k_dense_replace": 1, "tie_word_embeddings": True}
    GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**sizes, num_hidden_layers=2)).save_pretrained(path)
    return path


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-6), ("bfloat16", 0.1)])
def test_a_mixture_of_experts_runs_in_every_dtype(dtype, bound, moe, text, tmp_path):
    """In float64 the bound is that of cosines, which are float32; in bfloat16 it is its rounding, routers aside."""
    out = tmp_path / "out.json"
    run(moe, "--text", text, "--context", 60, "--topk", 8, "--dtype", dtype, "--json", out)
    result = json.loads(out.read_text())
    assert result["parity"]["max_rel"] < bound
    assert math.isfinite(result["perplexity_at_k"]["8"])


def test_default_topk_is_parts_of_the_context(deepseek, text, tmp_path):
    out = tmp_path / "out.json"
    run(deepseek, "--text", text, "--json", out, "--dtype", "bfloat16")
    result = json.loads(out.read_text())
    assert result["context"] == 128
    assert list(result["perplexity_at_k"]) == ["8", "16", "32"]


def test_bundled_checkpoint_keeps_its_promises(tmp_path):
    """k = context / 8: at least 0.97 of the best mass in every layer, within 3 % of dense, untrained far worse."""
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(held_out_text()[: 3 * 512])
    run("--text", text, "--topk", 64, "--select", "indexer", "untrained", "--json", out)
    result = json.loads(out.read_text())
    assert result["context"] == 512
    assert len(result["layers"]["64"]) == 4
    for row in result["layers"]["64"]:
        assert row["mass"] >= 0.97 * row["best_mass"]
        assert row["best_mass"] < 0.9999  # there is something to lose
    dense = result["perplexity_dense"]
    assert result["perplexity_at_k"]["64"] < 1.03 * dense
    assert result["perplexity_untrained_at_k"]["64"] > 2 * dense
    assert result["parity"]["max_rel"] < 1e-5


def edited(path, target, **changes):
    """Copy a checkpoint and change its config; None removes an entry."""
    shutil.copytree(path, target)
    config = json.loads((target / "config.json").read_text())
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_options_out_of_range_are_refused(deepseek, text, tmp_path, capsys):
    assert refusal(capsys, deepseek, "--topk", 0) == "sfa eval: --topk: must be >= 1; got 0"
    assert "--topk" in refusal(capsys, deepseek, "--topk", "many")
    assert "--context: must be in 2..128" in refusal(capsys, deepseek, "--context", 129)
    assert "--context: must be in 2..128" in refusal(capsys, deepseek, "--context", 1)
    assert "--dtype" in refusal(capsys, deepseek, "--dtype", "int8")
    assert "--json" in refusal(capsys, deepseek, "--json", tmp_path / "none" / "out.json")
    assert "--wrong" in refusal(capsys, deepseek, "--wrong")


def test_texts_that_can_not_be_scored_are_refused(deepseek, tmp_path, capsys):
    path = tmp_path / "text.txt"
    assert str(path) in refusal(capsys, deepseek, "--text", path)
    path.write_text("x")
    assert refusal(capsys, deepseek, "--text", path) == f"sfa eval: --text {path}: must hold at least two tokens; got 1"
    path.write_bytes(b"ab\xff\xfe")
    assert "must be UTF-8; got byte 0xff at 2" in refusal(capsys, deepseek, "--text", path)


def test_tokens_beyond_the_vocabulary_are_refused(deepseek, text, tmp_path, capsys):
    small = edited(deepseek, tmp_path / "small", vocab_size=64)
    assert "below vocab_size 64" in refusal(capsys, small, "--text", text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"hidden_size": 32}, "must be [32, 32]; got [32, 64]"),
        ({"num_hidden_layers": 5}, "layers.2"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(changes, words, deepseek, text, tmp_path, capsys):
    line = refusal(capsys, edited(deepseek, tmp_path / "copy", **changes), "--text", text)
    assert words in line
    assert str(tmp_path / "copy") in line


def test_broken_checkpoints_are_refused(deepseek, text, tmp_path, capsys):
    assert "nowhere" in refusal(capsys, tmp_path / "nowhere")
    copy = edited(deepseek, tmp_path / "copy")
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in refusal(capsys, copy, "--text", text)
    tensors = load_file(deepseek / "model.safetensors")
    without = {name: x for name, x in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(without, weights, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(capsys, copy, "--text", text)
    wide = tensors | {"lm_head.weight": torch.zeros(256, 63)}
    save_file(wide, weights, metadata={"format": "pt"})
    assert "lm_head.weight" in refusal(capsys, copy, "--text", text)


def test_pickles_and_foreign_code_are_never_loaded(deepseek, text, tmp_path, capsys):
    copy = edited(deepseek, tmp_path / "copy", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text("raise SystemExit('code of the checkpoint was run')")
    (copy / "model.safetensors").rename(tmp_path / "kept")
    torch.save({}, copy / "pytorch_model.bin")
    assert "safetensors" in refusal(capsys, copy, "--text", text)
    (tmp_path / "kept").rename(copy / "model.safetensors")
    run(copy, "--text", text, "--topk", 8)
    assert "evil" not in sys.modules


def test_a_failing_run_leaves_no_result_behind(deepseek, text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "results" / "out.json"
    out.parent.mkdir()
    out.write_text("before")

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(cli.json, "dumps", fail)
    with pytest.raises(SystemExit):
        run(deepseek, "--text", text, "--topk", 8, "--json", out)
    assert "disk full" in capsys.readouterr().err
    assert [p.name for p in out.parent.iterdir()] == ["out.json"]
    assert out.read_text() == "before"


def test_results_go_where_a_link_points_and_never_onto_a_device(deepseek, text, tmp_path, capsys):
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    run(deepseek, "--text", text, "--topk", 8, "--json", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["tokens"] == 300
    assert (tmp_path / "target.json").stat().st_mode & 0o400
    capsys.readouterr()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert f"--json {pipe}: must be a file" in refusal(capsys, deepseek, "--text", text, "--json", pipe)
    assert "--json" in refusal(capsys, deepseek, "--text", text, "--json", tmp_path)
    assert "--json" in refusal(capsys, deepseek, "--text", text, "--json", tmp_path / ("x" * 300))


def test_more_keys_than_tokens_are_dense(deepseek, text, tmp_path):
    out = tmp_path / "out.json"
    run(deepseek, "--text", text, "--context", 50, "--topk", 10**12, "--json", out)
    result = json.loads(out.read_text())
    assert result["perplexity_at_k"][str(10**12)] == pytest.approx(result["perplexity_dense"], rel=1e-5)


def test_two_tokens_in_a_context_of_two_are_enough(deepseek, tmp_path):
    path, out = tmp_path / "text.txt", tmp_path / "out.json"
    path.write_text("ab")
    run(deepseek, "--text", path, "--context", 2, "--json", out)
    assert json.loads(out.read_text())["tokens"] == 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_dtypes_that_would_be_misread_are_refused_in_any_layer(dtype, deepseek, text, tmp_path, capsys):
    copy = edited(deepseek, tmp_path / "copy")
    tensors = load_file(deepseek / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {key: tensors[key].to(dtype)}, copy / "model.safetensors", metadata={"format": "pt"})
    line = refusal(capsys, copy, "--text", text)
    assert f"{key} must be F64, F32, F16, BF16" in line


def test_results_that_are_no_numbers_are_refused(deepseek, text, tmp_path, capsys):
    copy, out = edited(deepseek, tmp_path / "copy"), tmp_path / "out.json"
    tensors = load_file(deepseek / "model.safetensors")
    for factor, word in ((torch.nan, "nan"), (1e6, "inf")):
        spoiled = tensors | {"lm_head.weight": tensors["lm_head.weight"] * factor}
        save_file(spoiled, copy / "model.safetensors", metadata={"format": "pt"})
        line = refusal(capsys, copy, "--text", text, "--topk", 8, "--json", out)
        assert "must be finite; got [" in line
        assert word in line
        assert not out.exists()


def test_a_tokenizer_beside_the_weights_is_used(deepseek, text, tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    copy, out = edited(deepseek, tmp_path / "copy"), tmp_path / "out.json"
    words = {word: n for n, word in enumerate(sorted(set(text.read_text().split())))} | {"?": 200}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(copy / "tokenizer.json"))
    run(copy, "--text", text, "--topk", 8, "--json", out)
    assert json.loads(out.read_text())["tokens"] == len(text.read_text().split())
    capsys.readouterr()
    (copy / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: not a tokenizer" in refusal(capsys, copy, "--text", text)
