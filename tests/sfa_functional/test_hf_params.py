"""`layer_params` and `load_params` on modules of one process: what is refused, and the way to checkpoints and back.

That they are the module's own tensors, and each other's inverse, is in tests/peers/test_transformers.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoConfig

import sfa_functional as sfa
from sfa_functional import hf
from sfa_functional.params import named_fields
from tests.peers.test_transformers import SHARING, make_model, make_peer
from tests.sfa_functional.test_hf import prompts
from weights import load_layer, open_checkpoint, save_checkpoint

types = pytest.mark.parametrize("variant", ["deepseek", "glm"])


class LowRank(nn.Module):
    """An adapted projection, as adapter libraries wrap one."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(base_layer.in_features, 2, bias=False), nn.Linear(2, base_layer.out_features)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Packed(Tensor):
    """A weight that only looks like one."""


def adapt(module: Any) -> None:
    module.q_b_proj = LowRank(module.q_b_proj)


def parametrise(module: Any) -> None:
    parametrize.register_parametrization(module.q_b_proj, "weight", Halved())


def hook(module: Any) -> None:
    module.q_b_proj.register_forward_hook(lambda _module, _inputs, y: 2 * y)


def hook_before(module: Any) -> None:
    module.q_b_proj.register_forward_pre_hook(lambda _module, inputs: (2 * inputs[0],))


def override(module: Any) -> None:
    module.q_b_proj.forward = lambda x: 2 * x


def set_weight(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def apply(module: Any) -> None:
        module.q_b_proj.weight = nn.Parameter(change(module.q_b_proj.weight.detach()), requires_grad=False)

    return apply


OWN = "q_b_proj must have no forward and no forward hooks of its own, they would not run; got"
REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "adapted": (adapt, "q_b_proj must be a plain torch.nn.Linear; got LowRank of tests"),
    "parametrised": (parametrise, "q_b_proj must be a plain torch.nn.Linear; got ParametrizedLinear of torch"),
    "hooked": (hook, f"{OWN} hooks"),
    "hooked before": (hook_before, f"{OWN} hooks"),
    "overridden": (override, f"{OWN} a forward"),
    "int8": (set_weight(Tensor.char), r"q_b_proj.weight must be float64, 32, 16 or bfloat16; got torch.int8"),
    "fp8": (
        set_weight(lambda w: w.to(torch.float8_e4m3fn)),
        r"q_b_proj.weight must be float64, 32, 16 or bfloat16; got torch.float8_e4m3fn",
    ),
    "packed": (
        set_weight(lambda w: w.as_subclass(Packed)),
        r"q_b_proj.weight must be an ordinary tensor or a DTensor; got Packed of tests",
    ),
    "offloaded": (set_weight(lambda w: w.to("meta")), r"q_b_proj.weight must have values; got a meta tensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_weight_is_refused_by_name(kind: str) -> None:
    change, message = REFUSED[kind]
    module = make_peer("deepseek").layers[0]
    params = hf.layer_params(module)
    change(module)
    with pytest.raises(ValueError, match=rf"^layer_params: {message}"):
        hf.layer_params(module)
    with pytest.raises(ValueError, match=rf"^layer_params: {message}"):
        hf.load_params(module, params)


@pytest.mark.parametrize("kind", ["adapted", "hooked", "offloaded"])
@pytest.mark.parametrize("cached", [False, True])
def test_use_sfa_refuses_it_in_the_forward_and_restores_the_model(kind: str, cached: bool) -> None:
    change, message = REFUSED[kind]
    model = make_model("glm").eval()
    module = model.model.layers[2].self_attn
    change(module)
    with torch.no_grad(), hf.use_sfa(model), pytest.raises(ValueError, match=rf"^layer_params: {message}"):
        model(prompts()["input_ids"], use_cache=cached)
    assert all("forward" not in each.__dict__ for each in hf.attention_modules(model))


def test_frozen_weights_stay_frozen_and_trained_ones_their_own() -> None:
    module: Any = make_peer("deepseek").layers[0]
    module.o_proj.weight.requires_grad_(False)
    params = hf.layer_params(module)
    assert params.o_proj is module.o_proj.weight
    assert not params.o_proj.requires_grad
    assert params.q_b_proj.requires_grad


# To checkpoints and back


def trained(config: sfa.SFAConfig, params: sfa.LayerParams) -> sfa.LayerParams:
    """Give a layer another indexer, as training leaves it; a shared layer has none."""
    if params.indexer is None:
        return params
    fresh = sfa.init_params(config, generator=torch.Generator().manual_seed(7), dtype=params.q_a_proj.dtype)
    return replace(params, indexer=fresh.indexer)


def same(a: sfa.LayerParams, b: sfa.LayerParams) -> bool:
    left, right = dict(named_fields(a)), dict(named_fields(b))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@types
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_indexer_goes_through_transformers_checkpoints(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """`load_params` into a live model, saved by transformers, opened by `open_checkpoint` and by transformers."""
    model: Any = make_model(variant).to(dtype)
    modules = hf.attention_modules(model)
    config = hf.module_config(modules[0])
    want = [trained(config, hf.layer_params(module)) for module in modules]
    assert [same(params, hf.layer_params(m)) for m, params in zip(modules, want, strict=True)] == [
        params.indexer is None for params in want
    ]
    for module, params in zip(modules, want, strict=True):
        hf.load_params(module, params)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    own = sfa.SFAConfig.from_hf(checkpoint.config)
    again: Any = type(model).from_pretrained(tmp_path, dtype=dtype)
    for layer, params in enumerate(want):
        stored = load_layer(checkpoint, layer, config=own, dtype=dtype)
        assert same(params, stored)
        assert same(params, hf.layer_params(again.model.layers[layer].self_attn))
    inputs = prompts()
    with torch.no_grad(), hf.use_sfa(model), hf.use_sfa(again):
        assert torch.equal(model(**inputs, use_cache=False).logits, again(**inputs, use_cache=False).logits)


@types
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_indexer_goes_through_our_checkpoints(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """`save_checkpoint` of live weights; transformers loads the file by its own keys, `load_params` layer by layer."""
    model: Any = make_model(variant).to(dtype)
    modules = hf.attention_modules(model)
    config = hf.module_config(modules[0])
    want = [trained(config, hf.layer_params(module)) for module in modules]
    save_checkpoint(tmp_path / "indexers", want, config)
    checkpoint = open_checkpoint(tmp_path / "indexers")

    by_keys: Any = make_model(variant).to(dtype)
    missing, unexpected = by_keys.load_state_dict(load_file(tmp_path / "indexers" / "model.safetensors"), strict=False)
    assert unexpected == []
    assert not any(".self_attn." in key for key in missing)
    by_layers: Any = make_model(variant).to(dtype)
    for layer, module in enumerate(hf.attention_modules(by_layers)):
        hf.load_params(module, load_layer(checkpoint, layer, config=config, dtype=dtype))
    for layer, params in enumerate(want):
        assert same(params, hf.layer_params(by_keys.model.layers[layer].self_attn))
        assert same(params, hf.layer_params(by_layers.model.layers[layer].self_attn))

    read: Any = AutoConfig.from_pretrained(tmp_path / "indexers")
    assert type(read) is type(model.config)
    assert sfa.SFAConfig.from_hf(read.to_dict()) == config
    assert getattr(read, "indexer_types", None) == (SHARING if variant == "glm" else ["full"] * 3)
