"""Configs: published files give the published constants in every spelling, and what can't be computed is refused."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest

import sfa_functional as sfa
from tests.vectors import read_vectors

VECTORS = read_vectors("model_configs.json")
MODELS = VECTORS["models"]
CONSTANTS = {"deepseek_v32": sfa.DEEPSEEK_V32, "glm_5": sfa.GLM_5, "glm_52": sfa.GLM_52}
SPELLINGS = [
    pytest.param(config, model["expected"], id=f"{name}-{i}")
    for name, model in MODELS.items()
    for i, config in enumerate([model["config"], *model.get("same_config_other_spelling", [])])
]
LETTERS = {
    "D": "hidden_size",
    "H": "num_attention_heads",
    "Q": "q_lora_rank",
    "L": "kv_lora_rank",
    "R": "qk_rope_head_dim",
    "E": "key_width",
    "P": "qk_nope_head_dim",
    "V": "v_head_dim",
    "J": "index_n_heads",
    "I": "index_head_dim",
    "K": "index_topk",
}
V32 = MODELS["deepseek_v32"]["config"]
NESTED = MODELS["deepseek_v32"]["same_config_other_spelling"][0]
GLM = MODELS["glm_5"]["config"]


@pytest.mark.parametrize(("config", "expected"), SPELLINGS)
def test_from_hf_derives_the_published_values(config, expected):
    got = sfa.SFAConfig.from_hf(config)
    assert {letter: getattr(got, name) for letter, name in LETTERS.items()} == expected["dims"]
    assert got.softmax_scale == pytest.approx(expected["softmax_scale"], rel=1e-14)
    assert got.index_weight_scale == pytest.approx(expected["index_weight_scale"], rel=1e-14)
    assert got.latent_norm_eps == expected["latent_norm_eps"]
    assert got.index_norm_eps == expected["index_key_norm_eps"]
    assert got.rope_pairing == expected["rope_pairing"]["latent"]
    assert got.index_rope_pairing == expected["rope_pairing"]["indexer"]
    assert got.rope_theta == expected["rope_theta"]
    assert got.max_position_embeddings == config["max_position_embeddings"]
    assert got.qk_head_dim == config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    assert got.num_layers == config["num_hidden_layers"]
    full = [i for i, kind in enumerate(got.indexer_types) if kind == "full"]
    assert full == expected["full_indexer_layers"]
    assert len(full) == expected["num_full_indexer_layers"]


@pytest.mark.parametrize(("config", "expected"), SPELLINGS)
def test_yarn_has_the_published_range_and_factors(config, expected):
    got, want = sfa.SFAConfig.from_hf(config), expected["yarn"]
    assert (got.yarn is None) == (want is None)
    if got.yarn is not None:
        low, high = want["correction_range_exact"]
        pairs = got.yarn.pair_range(got.rope_theta, got.qk_rope_head_dim)
        assert pairs == tuple(want["correction_range"]) == (math.floor(low), math.ceil(high))
        assert got.yarn.attention_factor(got.yarn.mscale_all_dim) == pytest.approx(want["mscale"], rel=1e-14)
        assert got.softmax_scale * got.qk_head_dim**0.5 == pytest.approx(want["mscale_squared"], rel=1e-14)
        assert got.yarn.cos_sin_multiplier == want["cos_sin_multiplier"]


@pytest.mark.parametrize(("config", "expected"), SPELLINGS)
def test_param_shapes_are_those_of_the_checkpoints(config, expected):
    got = sfa.SFAConfig.from_hf(config)
    shapes = {sfa.HF_NAMES[field]: list(shape) for field, shape in sfa.param_shapes(got).items()}
    assert shapes == expected["weight_shapes"]


@pytest.mark.parametrize(("original", "pairs"), [(64, (0, 9)), (10**9, (53, 63))])
def test_pair_range_is_clamped_to_the_rope_width(original, pairs):
    """64 ln(64 / 64π) / 2 ln 1e4 = -3.98 and 64 ln(64 / 2π) / 2 ln 1e4 = 8.06; 53.6 and 65.6 for 1e9."""
    assert sfa.Yarn(factor=4.0, original_max_position_embeddings=original).pair_range(1e4, 64) == pairs


def test_yarn_multiplies_cos_and_sin_by_the_ratio_of_its_factors():
    yarn = sfa.Yarn(factor=math.e**10, original_max_position_embeddings=64, mscale=3.0, mscale_all_dim=1.0)
    assert yarn.cos_sin_multiplier == pytest.approx(4.0 / 2.0)  # 0.1 · mscale · 10 + 1
    assert replace(sfa.TINY, yarn=yarn).softmax_scale == pytest.approx(24**-0.5 * 4.0)


def test_yarn_without_mscale_all_dim_leaves_the_softmax_scale_alone():
    yarn = sfa.Yarn(factor=40.0, original_max_position_embeddings=64)
    assert replace(sfa.TINY, yarn=yarn).softmax_scale == 24**-0.5


def test_yarn_that_does_not_stretch_has_factor_one():
    assert sfa.Yarn(factor=1.0, original_max_position_embeddings=64, mscale=2.0).attention_factor(2.0) == 1.0


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_constants_equal_the_published_files(name):
    assert sfa.SFAConfig.from_hf(MODELS[name]["config"]) == CONSTANTS[name]


@pytest.mark.parametrize("config", [*CONSTANTS.values(), sfa.TINY, replace(sfa.TINY, rope_pairing="half")])
def test_from_hf_reads_back_what_to_hf_wrote(config):
    assert sfa.SFAConfig.from_hf(config.to_hf()) == config


def test_to_hf_refuses_an_epsilon_that_no_key_of_config_json_says():
    with pytest.raises(ValueError, match=r"no key for an index_norm_eps other than 1e-06; got 1e-05$"):
        replace(sfa.TINY, index_norm_eps=1e-5).to_hf()


@pytest.mark.parametrize("entry", VECTORS["indexer_schedule"], ids=lambda entry: str(entry["full"]))
def test_the_schedule_of_indexers_follows_pattern_frequency_and_offset(entry):
    config = V32 | {"num_hidden_layers": entry["num_layers"]} | {k: v for k, v in entry.items() if "topk" in k}
    if entry["full"][0] != 0:
        with pytest.raises(ValueError, match="layer 0 must be 'full'"):
            sfa.SFAConfig.from_hf(config)
    else:
        types = sfa.SFAConfig.from_hf(config).indexer_types
        assert [i for i, kind in enumerate(types) if kind == "full"] == entry["full"]


def test_listed_types_win_over_a_pattern_and_a_pattern_over_a_frequency():
    config = V32 | {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 1}
    assert sfa.SFAConfig.from_hf(config).indexer_types == ("full", "shared") * 2
    config |= {"index_topk_pattern": "FFSS"}
    assert sfa.SFAConfig.from_hf(config).indexer_types == ("full", "full", "shared", "shared")
    config |= {"indexer_types": ["full", "shared", "shared", "full"]}
    assert sfa.SFAConfig.from_hf(config).indexer_types == ("full", "shared", "shared", "full")


def test_the_indexers_pairing_follows_the_flag_then_the_model_type():
    assert sfa.SFAConfig.from_hf(V32 | {"indexer_rope_interleave": True}).index_rope_pairing == "interleaved"
    assert sfa.SFAConfig.from_hf(GLM | {"indexer_rope_interleave": False}).index_rope_pairing == "half"
    without = {k: v for k, v in GLM.items() if k != "indexer_rope_interleave"}
    assert sfa.SFAConfig.from_hf(without).index_rope_pairing == "interleaved"


def test_head_dim_carries_no_information():
    assert sfa.SFAConfig.from_hf(GLM | {"head_dim": 7}) == sfa.GLM_5


def _yarn(**changes):
    return {"rope_parameters": NESTED["rope_parameters"] | changes}


REFUSED = [
    ({"model_type": "deepseek_v3"}, "model_type must be 'deepseek_v32' or 'glm_moe_dsa'; got 'deepseek_v3'"),
    ({"model_type": None}, "model_type must be 'deepseek_v32' or 'glm_moe_dsa'; got None"),
    ({"attention_bias": True}, "attention_bias must be false; got True"),
    ({"num_key_value_heads": 8}, "num_key_value_heads must equal num_attention_heads; got 8"),
    *[
        ({name: None}, f"{name} must be an integer >= 1; got None")
        for name in (*(n for n in LETTERS.values() if n != "key_width"), "num_hidden_layers", "max_position_embeddings")
    ],
    ({"index_topk": 0}, "index_topk must be an integer >= 1; got 0"),
    ({"index_topk": True}, "index_topk must be an integer >= 1; got True"),
    ({"index_topk": 2.5}, "index_topk must be an integer >= 1; got 2.5"),
    ({"rms_norm_eps": None}, "rms_norm_eps must be a number > 0; got None"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0; got 0"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number > 0; got nan"),
    ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a number > 0; got inf"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number > 0; got '1e-6'"),
    (_yarn(rope_theta=None), "rope_theta must be a number > 0; got None"),
    (_yarn(rope_type="linear"), "rope type must be 'default' or 'yarn'; got 'linear'"),
    (
        _yarn(partial_rotary_factor=0.5),
        "partial_rotary_factor must be 1: the rope width is qk_rope_head_dim; got 0.5",
    ),
    (_yarn(attention_factor=1.2), "attention_factor of yarn must be left out; got 1.2"),
    (_yarn(truncate=False), "truncate of yarn must be left out; got False"),
    (_yarn(factor=None), "factor must be a number > 0; got None"),
    (
        _yarn(original_max_position_embeddings=None),
        "original_max_position_embeddings must be an integer >= 1; got None",
    ),
    ({"indexer_types": ["full"] * 60}, "indexer_types must name all 61 layers; got 60 names"),
    ({"index_topk_pattern": "F" * 60}, "indexer_types must name all 61 layers; got 60 names"),
    (
        {"num_hidden_layers": 2, "index_topk_pattern": "FX"},
        "indexer_types must list 'full' or 'shared' for at least one layer; got ('full', 'X')",
    ),
    (
        {"num_hidden_layers": 2, "indexer_types": ["shared", "full"]},
        "layer 0 must be 'full', it has no earlier layer to share a selection with; got shared",
    ),
    ({"index_topk_freq": -1}, "index_topk_freq must be an integer >= 1; got -1"),
    ({"index_topk_freq": 2.0}, "index_topk_freq must be an integer >= 1; got 2.0"),
    (
        {"index_topk_freq": 4},
        "index_skip_topk_offset must be given (an integer >= 0) where index_topk_freq > 1; got None",
    ),
    (
        {"index_topk_freq": 4, "index_skip_topk_offset": -1},
        "index_skip_topk_offset must be given (an integer >= 0) where index_topk_freq > 1; got -1",
    ),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even; got 63"),
    ({"index_head_dim": 32}, "index_head_dim must be at least qk_rope_head_dim; got (32, 64)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_from_hf_refuses_what_it_cannot_compute(change, message, unchecked):
    with pytest.raises(ValueError) as error:
        sfa.SFAConfig.from_hf(NESTED | change)
    assert str(error.value) == f"SFAConfig: {message}"


@pytest.mark.parametrize("name", [f.name for f in fields(sfa.SFAConfig) if f.type is int])
def test_every_size_must_be_at_least_one(name):
    with pytest.raises(ValueError, match=f"^SFAConfig: {name} must be an integer >= 1; got 0$"):
        replace(sfa.TINY, **{name: 0})


def test_a_config_without_layers_is_refused():
    with pytest.raises(ValueError, match="for at least one layer"):
        replace(sfa.TINY, indexer_types=())


@pytest.mark.parametrize("config", [*CONSTANTS.values(), sfa.TINY])
def test_a_config_is_hashable_and_frozen(config):
    assert {config: "found"}[replace(config)] == "found"
    with pytest.raises(FrozenInstanceError):
        config.index_topk = 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"indexer_types": 5}, "indexer_types"),
        ({"indexer_types": [["x"]] * 61}, "indexer_types"),
        ({"index_topk_pattern": 7}, "index_topk_pattern"),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"rope_parameters": "abc"}, "rope_parameters"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "mscale": "x"}},
            "mscale",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": [1]}},
            "beta_fast",
        ),
    ],
)
def test_values_of_another_kind_are_refused_by_name(changes, name):
    config = read_vectors("model_configs.json")["models"]["deepseek_v32"]["config"]
    with pytest.raises(ValueError, match=f"^SFAConfig: [^\n]*{name}[^\n]*$"):
        sfa.SFAConfig.from_hf(config | changes)


@pytest.mark.parametrize("change", [{"rope_pairing": "neox"}, {"latent_norm_eps": 0.0}, {"rope_theta": -1.0}])
def test_a_config_that_can_not_be_computed_is_refused_when_it_is_built(change, unchecked):
    with pytest.raises(ValueError, match=f"^SFAConfig: {next(iter(change))} must be"):
        replace(sfa.TINY, **change)


@pytest.mark.parametrize("model", ["deepseek_v32", "glm_5"])
def test_a_flag_that_is_null_is_a_flag_that_is_absent(model):
    config = read_vectors("model_configs.json")["models"][model]["config"]
    flags = ("rope_interleave", "indexer_rope_interleave")
    absent = {name: value for name, value in config.items() if name not in flags}
    assert sfa.SFAConfig.from_hf(absent | dict.fromkeys(flags)) == sfa.SFAConfig.from_hf(absent)
    for name in flags:
        with pytest.raises(ValueError, match=f"^SFAConfig: {name} must be true or false; got 'false'$"):
            sfa.SFAConfig.from_hf(config | {name: "false"})


def test_two_spellings_of_rope_are_read_together_and_must_not_contradict_each_other():
    """rope_parameters beside rope_scaling must not make yarn disappear."""
    config = read_vectors("model_configs.json")["models"]["deepseek_v32"]["config"]
    want = sfa.SFAConfig.from_hf(config)
    assert want.yarn is not None
    for nested in ({}, {"rope_theta": 10000}, {"rope_type": "yarn", "rope_theta": 10000}):
        assert sfa.SFAConfig.from_hf(config | {"rope_parameters": nested}) == want
    for nested, name in (({"rope_theta": 8e6}, "rope_theta"), ({"rope_type": "default"}, "rope_type")):
        with pytest.raises(ValueError, match=f"^SFAConfig: {name} must be the same wherever it is given; got"):
            sfa.SFAConfig.from_hf(config | {"rope_parameters": nested})


def test_sizes_are_whole_numbers_and_lists_become_hashable(unchecked):
    with pytest.raises(ValueError, match=r"^SFAConfig: hidden_size must be an integer >= 1; got 64\.5$"):
        replace(sfa.TINY, hidden_size=64.5)
    assert hash(replace(sfa.TINY, indexer_types=["full", "full"])) == hash(sfa.TINY)
    with pytest.raises(ValueError, match=r"^SFAConfig: factor of yarn must be > 0; got 0\.0$"):
        sfa.Yarn(factor=0.0, original_max_position_embeddings=64)
