"""Parameters: shapes come from the config, tables of names lose nothing, and taking them copies nothing."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import sfa_functional as sfa
from sfa_functional.params import named_fields, params_from_fields

SHARED = replace(sfa.TINY, indexer_types=("full", "shared"))
NORMS = {"q_a_layernorm", "kv_a_layernorm", "indexer.k_norm_weight", "indexer.k_norm_bias"}


def _state(config=sfa.TINY, names=sfa.HF_NAMES, prefix=""):
    return {prefix + names[field]: torch.randn(shape) for field, shape in sfa.param_shapes(config).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_init_params_has_the_shapes_and_keeps_norms_wide(dtype):
    params = dict(named_fields(sfa.init_params(sfa.TINY, dtype=dtype)))
    assert {name: tuple(x.shape) for name, x in params.items()} == sfa.param_shapes(sfa.TINY)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {name: x.dtype for name, x in params.items()} == {name: wide if name in NORMS else dtype for name in params}


def test_init_params_draws_unit_outputs_and_neutral_norms():
    params = dict(named_fields(sfa.init_params(replace(sfa.TINY, hidden_size=512, q_lora_rank=256))))
    for name, x in params.items():
        if name in NORMS:
            assert torch.equal(x, torch.full_like(x, 0.0 if name.endswith("bias") else 1.0))
        else:
            five_sigma = 5 / (2 * x.numel()) ** 0.5
            assert float(x.std()) * x.shape[1] ** 0.5 == pytest.approx(1, abs=five_sigma), name


def test_init_params_repeats_itself_and_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    first, second = sfa.init_params(sfa.TINY), sfa.init_params(sfa.TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True))


def test_init_params_draws_the_same_numbers_whatever_the_default_dtype():
    want = sfa.init_params(sfa.TINY, dtype=torch.float64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        got = sfa.init_params(sfa.TINY, dtype=torch.float64)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True))


def test_init_params_advances_the_generator_it_is_given():
    generator = torch.Generator().manual_seed(1)
    first, second = (sfa.init_params(sfa.TINY, generator=generator) for _ in range(2))
    assert not torch.equal(first.q_a_proj, second.q_a_proj)
    again = sfa.init_params(sfa.TINY, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again.q_a_proj, first.q_a_proj)


def test_a_shared_layer_has_no_indexer():
    assert sfa.init_params(SHARED, layer=1).indexer is None
    assert sfa.init_params(SHARED, layer=0).indexer is not None
    assert not any(name.startswith("indexer.") for name in sfa.param_shapes(SHARED, layer=1))


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_does_not_exist_is_refused(layer):
    with pytest.raises(ValueError, match=rf"^param_shapes: layer must be in 0\.\.1; got {layer}$"):
        sfa.init_params(sfa.TINY, layer=layer)


@pytest.mark.parametrize("names", [sfa.HF_NAMES, sfa.DEEPSEEK_NAMES], ids=["hf", "deepseek"])
def test_a_table_of_names_is_one_to_one_and_names_every_field(names):
    assert list(names) == list(sfa.param_shapes(sfa.TINY))
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("names", [sfa.HF_NAMES, sfa.DEEPSEEK_NAMES], ids=["hf", "deepseek"])
def test_params_from_state_takes_every_tensor_without_a_copy(names):
    state = _state(names=names, prefix="layers.3.")
    params = sfa.params_from_state(state, config=sfa.TINY, names=names, prefix="layers.3.")
    taken = {f"layers.3.{names[name]}": x for name, x in named_fields(params)}
    assert taken.keys() == state.keys()
    assert all(taken[key] is state[key] for key in state)


def test_the_schedule_decides_about_the_indexer_not_the_keys_present():
    assert sfa.params_from_state(_state(), config=SHARED, layer=1).indexer is None


@pytest.mark.parametrize("field", sfa.HF_NAMES)
def test_params_from_state_names_a_missing_key(field):
    state = _state(prefix="a.")
    del state["a." + sfa.HF_NAMES[field]]
    with pytest.raises(ValueError) as error:
        sfa.params_from_state(state, config=sfa.TINY, prefix="a.")
    assert str(error.value) == f"params_from_state: key a.{sfa.HF_NAMES[field]} is missing"


def test_params_from_state_refuses_a_wrong_shape():
    state = _state() | {"kv_b_proj.weight": torch.zeros(144, 23)}
    with pytest.raises(ValueError, match=r"kv_b_proj.weight must have shape \[144, 24\]; got \[144, 23\]"):
        sfa.params_from_state(state, config=sfa.TINY)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_params_from_state_refuses_codes_and_integers(dtype):
    state = _state() | {"o_proj.weight": torch.zeros(64, 80).to(dtype)}
    with pytest.raises(ValueError, match=rf"o_proj.weight must be float64, 32, 16 or bfloat16; got {dtype}"):
        sfa.params_from_state(state, config=sfa.TINY)


@pytest.mark.parametrize("layer", [0, 1])
def test_params_are_pytrees_and_survive_a_round_trip_through_their_fields(layer):
    params = sfa.init_params(SHARED, layer=layer)
    again = params_from_fields(dict(named_fields(params)))
    assert all(a is b for a, b in zip(tree_leaves(params), tree_leaves(again), strict=True))
    doubled = tree_map(lambda x: 2 * x, params)
    assert isinstance(doubled, sfa.LayerParams)
    assert torch.equal(doubled.o_proj, 2 * params.o_proj)


def test_grad_of_a_function_of_params_has_their_structure():
    params = sfa.init_params(sfa.TINY)
    gradient = torch.func.grad(lambda p: p.q_a_proj.sum() + p.indexer.wk.square().sum())(params)
    assert torch.equal(gradient.q_a_proj, torch.ones(32, 64))
    assert torch.equal(gradient.indexer.wk, 2 * params.indexer.wk)
    assert not gradient.o_proj.any()
