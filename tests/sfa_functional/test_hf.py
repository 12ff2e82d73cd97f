"""`use_sfa` in generation and in training loops: transformers' own tokens, logits, caches and gradients.

Whole forward passes, masks and padding are in tests/peers/test_transformers.py.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DeepseekV32ForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

import sfa_functional as sfa
from sfa_functional import hf
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text
from tests.peers.test_transformers import SIZES, VARIANTS, make_model
from tests.sfa_functional.test_hf_evaluate import snapshot

LENGTHS = (20, 13, 4)
"""Tokens of each prompt; padded on the left to the longest."""

NEW = 7

variants = pytest.mark.parametrize("variant", VARIANTS)
types = pytest.mark.parametrize("variant", ["deepseek", "glm"])


def close(a: Tensor, b: Tensor, bound: float = 1e-5) -> None:
    result = sfa.difference(a, b)
    assert result.max_rel < bound, result


def prompts(vocabulary: int = SIZES["vocab_size"], count: int = len(LENGTHS)) -> dict[str, Tensor]:
    width = max(LENGTHS)
    generator = torch.Generator().manual_seed(3)
    mask_BT = torch.arange(width) >= width - torch.tensor(LENGTHS)[:count, None]
    ids_BT = torch.randint(vocabulary, mask_BT.shape, generator=generator)
    return {"input_ids": ids_BT, "attention_mask": mask_BT.long()}


def generate(model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Any:
    """Generate greedily and return every step's logits beside the tokens."""
    always = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    wanted = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **always | wanted | settings)


def check_same_generation(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.logits) == len(theirs.logits)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        close(a, b)


# Generation with transformers' cache

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "lookup": {"prompt_lookup_num_tokens": 3},  # writes drafts into the cache and crops it
}


@variants
@pytest.mark.parametrize(("way", "k"), [("greedy", 3), ("greedy", 64), ("beams", 3), ("static", 3), ("lookup", 3)])
def test_generate_gives_transformers_tokens_and_logits(variant: str, way: str, k: int) -> None:
    """Prompts padded on the left; k below and above the context; layers that share a selection in "glm"."""
    attention = "eager" if way == "greedy" else "sdpa"
    model = make_model(variant, index_topk=k, attn_implementation=attention).eval()
    inputs = prompts(count=1 if way == "lookup" else len(LENGTHS))
    theirs = generate(model, inputs, **WAYS[way])
    with hf.use_sfa(model):
        ours = generate(model, inputs, **WAYS[way])
    assert isinstance(ours.cache, StaticCache if way == "static" else DynamicCache)
    check_same_generation(ours, theirs)


@pytest.mark.parametrize("k", [8, 512])
def test_generate_from_the_bundled_checkpoint_gives_transformers_tokens(k: int) -> None:
    model = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32).eval()
    ids_BT = torch.tensor(list(held_out_text().encode()[: 3 * 90])).view(3, 90)
    inputs = {"input_ids": ids_BT, "attention_mask": (torch.arange(90) >= torch.tensor([[0], [30], [85]])).long()}
    for module in hf.attention_modules(model):
        module.indexer.index_topk = k
    theirs = generate(model, inputs, max_new_tokens=10)
    with hf.use_sfa(model, topk=k):
        check_same_generation(generate(model, inputs, max_new_tokens=10), theirs)


@variants
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_cache_holds_what_transformers_would_have_put_there(variant: str, kind: str) -> None:
    model = make_model(variant).eval()
    inputs = prompts()
    real_BT = inputs["attention_mask"].bool()
    caches = []
    for ours in (False, True):
        cache: Any = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=25)
        with torch.no_grad():
            if ours:
                with hf.use_sfa(model):
                    model(**inputs, cache=cache)
            else:
                model(**inputs, cache=cache)
        caches.append(cache)
    for mine, other in zip(caches[1].layers, caches[0].layers, strict=True):
        for name in ("keys", "values", "indexer_keys"):
            a, b = getattr(mine, name), getattr(other, name)
            if b is None:  # a shared layer has no index keys
                assert a is None
            else:
                assert a.shape == b.shape
                assert a.dtype == b.dtype
                seen = (slice(None), slice(20)) if name == "indexer_keys" else (slice(None), 0, slice(20))
                close(a[seen][real_BT], b[seen][real_BT])


@types
@pytest.mark.parametrize("first_ours", [False, True])
def test_a_cache_goes_on_from_outside_to_inside_and_back(variant: str, first_ours: bool) -> None:
    model = make_model(variant, index_topk=5).eval()
    inputs = prompts()
    whole = inputs["attention_mask"]
    with torch.no_grad():
        position_BT = (whole.cumsum(-1) - 1).clamp(min=0)
        want = model(**inputs, position_ids=position_BT, use_cache=False).logits
        cache, parts = DynamicCache(config=model.config), []
        for step, (low, high) in enumerate([(0, 9), (9, 10), (10, 18), (18, 20)]):
            piece = {"input_ids": inputs["input_ids"][:, low:high], "attention_mask": whole[:, :high]}
            piece["position_ids"] = position_BT[:, low:high]
            if (step % 2 == 0) == first_ours:
                with hf.use_sfa(model):
                    parts.append(model(**piece, cache=cache).logits)
            else:
                parts.append(model(**piece, cache=cache).logits)
    assert cache.get_seq_length() == 20
    close(torch.cat(parts, dim=1)[whole.bool()], want[whole.bool()])


@types
def test_positions_go_on_behind_a_cache_where_the_caller_gives_none(variant: str) -> None:
    model = make_model(variant, index_topk=5).eval()
    ids_BT = prompts()["input_ids"]
    with torch.no_grad():
        want = model(ids_BT, use_cache=False).logits
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
            with hf.use_sfa(model):
                parts = [model(ids_BT[:, i : i + 7], cache=cache).logits for i in range(0, 20, 7)]
            close(torch.cat(parts, dim=1), want)


@pytest.mark.parametrize("select", [sfa.window, sfa.best_keys(0.2)], ids=["window", "best"])
def test_selectors_choose_the_same_keys_with_a_cache_and_without(select: Any) -> None:
    model = make_model("glm").eval()
    inputs = {"input_ids": prompts()["input_ids"]}
    with hf.use_sfa(model, topk=6, select=select):
        cached = generate(model, inputs, max_new_tokens=3)
        check_same_generation(cached, generate(model, inputs, max_new_tokens=3, use_cache=False))
    assert sfa.difference(cached.logits[0], generate(model, inputs, max_new_tokens=1).logits[0]).max_rel > 1e-2


def test_topk_and_implementation_hold_with_a_cache_too() -> None:
    model, sparse = make_model("glm", index_topk=64).eval(), make_model("glm", index_topk=3).eval()
    inputs = prompts()
    with hf.use_sfa(model, topk=3, implementation="reference"):
        ours = generate(model, inputs, max_new_tokens=4)
    check_same_generation(ours, generate(sparse, inputs, max_new_tokens=4))


def test_gradients_through_a_cache_equal_those_of_one_pass() -> None:
    """Nothing is written in place: a graph over a prefix and its continuation stays whole."""
    model = make_model("glm")
    ids_BT = prompts()["input_ids"]
    gradients = []
    for pieces in ([(0, 20)], [(0, 8), (8, 20)]):
        model.zero_grad()
        with hf.use_sfa(model):
            cache = DynamicCache(config=model.config)
            logits = torch.cat([model(ids_BT[:, low:high], cache=cache).logits for low, high in pieces], dim=1)
            nn.functional.cross_entropy(logits.flatten(0, 1), torch.arange(60)).backward()
        gradients.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient)


@types
def test_a_cache_without_index_keys_is_refused_before_it_is_written(variant: str) -> None:
    model = make_model(variant).eval()
    ids_BT = prompts()["input_ids"]
    rule = r"use_sfa: the cache must keep index keys, as DynamicCache\(config=model.config\) and StaticCache do; got "
    lazy, plain = DynamicCache(), Cache(layers=[DynamicLayer() for _ in hf.attention_modules(model)])
    with torch.no_grad(), hf.use_sfa(model):
        for cache in (lazy, plain):
            with pytest.raises(ValueError, match=rule + "DynamicLayer"):
                model(ids_BT, cache=cache)
    assert len(lazy) == 0
    assert plain.get_seq_length() == 0


def test_padding_that_holds_nan_reaches_no_other_token_and_no_cached_row() -> None:
    model = make_model("glm").eval()
    inputs = prompts()
    inputs["input_ids"] = torch.where(inputs["attention_mask"] > 0, inputs["input_ids"].clamp(max=95), 96)
    with torch.no_grad():
        clean = generate(model, inputs, max_new_tokens=3)
        model.model.embed_tokens.weight[96] = torch.nan
        with hf.use_sfa(model):
            ours = generate(model, inputs, max_new_tokens=3)
    check_same_generation(ours, clean)
    assert all(bool(x.isfinite().all()) for layer in ours.cache.layers for x in (layer.keys, layer.values))


def test_a_cache_goes_on_in_a_model_of_another_dtype() -> None:
    """A dynamic cache then holds the wider dtype; attention computes in the weights'."""
    model = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32).eval()
    ids_BT = torch.tensor(list(held_out_text().encode()[:80])).view(2, 40)
    with torch.no_grad(), hf.use_sfa(model):
        want = model(ids_BT, use_cache=False).logits[:, 30:]
        for first, then in [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]:
            cache = DynamicCache(config=model.config)
            model.to(first)(ids_BT[:, :30], cache=cache)
            got = model.to(then)(ids_BT[:, 30:], cache=cache).logits
            assert got.dtype == then
            assert (got - want).norm() < 0.05 * want.norm()


def test_masks_of_a_continuation_become_ranges_behind_the_cached_rows() -> None:
    """Two new tokens behind three cached ones, in a static cache of seven rows; the second prompt begins at row 2."""
    seen = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]])
    mask = seen.view(2, 1, 2, 7)
    for given in (mask.bool(), torch.where(mask > 0, 0.0, torch.finfo(torch.float32).min)):
        for first in (3, torch.tensor(3)):
            batch = hf.mask_to_batch(given, 2, 2, keys=7, first=first)
            assert batch.start_T.tolist() == [0, 0, 9, 9]
            assert batch.end_T.tolist() == [4, 5, 11, 12]
            assert batch.position_T.tolist() == [3, 4, 3, 4]
            assert batch.request_T.tolist() == [0, 0, 1, 1]
            assert batch.key_start_B.tolist() == [0, 7]
            assert batch.seq_len_B.tolist() == [5, 5]
            assert batch.query_start_B1.tolist() == [0, 2, 4]


def test_replace_attention_refuses_a_cache_unless_it_is_told_what_to_do_with_one() -> None:
    model = make_model("deepseek")
    config = hf.module_config(hf.attention_modules(model)[0])

    def attend(module: nn.Module, x_TD: Tensor, batch: sfa.Batch, rope: Any, selection: Tensor | None) -> Any:
        return sfa.sfa_layer(hf.layer_params(module), x_TD, batch, config=config, selection=selection, rope=rope)

    refusal = r"replace_attention: whole forward passes only, call the model with use_cache=False; got a cache"
    with hf.replace_attention(model, attend, config=config), pytest.raises(ValueError, match=refusal):
        model(prompts()["input_ids"], use_cache=True)


# bfloat16: as far from float32 as transformers' own


def test_bfloat16_is_no_further_from_float32_than_transformers() -> None:
    """The same tokens through a prefill and a decode step, on the bundled checkpoint's weights."""
    exact = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32).eval()
    model = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.bfloat16).eval()
    ids_BT = torch.tensor(list(held_out_text().encode()[: 4 * 100])).view(4, 100)

    def logits(which: nn.Module) -> Tensor:
        cache = DynamicCache(config=which.config)
        with torch.no_grad():
            return torch.cat([which(part, cache=cache).logits for part in ids_BT.split([99, 1], dim=1)], dim=1).float()

    want, theirs = logits(exact), logits(model)
    with hf.use_sfa(model):
        ours = logits(model)
    assert (ours - want).norm() < 1.25 * (theirs - want).norm()
    assert (ours - want).norm() < 0.05 * want.norm()


def test_bfloat16_gradients_are_no_further_from_float32_than_transformers() -> None:
    exact = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    ids_BT = torch.tensor(list(held_out_text().encode()[: 4 * 60])).view(4, 60)

    def gradient(which: nn.Module) -> Tensor:
        which.zero_grad()
        which(ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        return torch.cat([x.grad.float().flatten() for x in which.parameters() if x.grad is not None])

    want, theirs = gradient(exact), gradient(model)
    with hf.use_sfa(model):
        ours = gradient(model)
    assert (ours - want).norm() < 1.25 * (theirs - want).norm()
    assert (ours - want).norm() < 0.2 * want.norm()


# Activation checkpointing


@types
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(variant: str, reentrant: bool) -> None:
    model = make_model(variant).train()
    inputs = prompts()
    real_BT = inputs["attention_mask"].bool()
    target_T = torch.arange(int(real_BT.sum()))

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        nn.functional.cross_entropy(model(**inputs, use_cache=False).logits[real_BT], target_T).backward()
        return {name: None if x.grad is None else x.grad.clone() for name, x in model.named_parameters()}

    theirs = gradients()
    calls: list[Tensor] = []

    def counted(**given: Any) -> Tensor:
        calls.append(given["start_T"])
        return sfa.lightning_indexer(**{name: given[name] for name in ("q_TJI", "k_SI", "w_TJ")}, **ranges(given))

    def ranges(given: dict[str, Any]) -> dict[str, Any]:
        return {name: given[name] for name in ("start_T", "end_T", "k", "row_S")}

    with hf.use_sfa(model, select=counted):
        plain = gradients()
        once = len(calls)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        recomputed = gradients()
        assert len(calls) == 3 * once  # forward, forward, and again in backward
    for name, gradient in theirs.items():
        if gradient is None:
            assert ".indexer." in name
            assert recomputed[name] is None
        else:
            close(plain[name], gradient, 1e-4)
            assert torch.equal(recomputed[name], plain[name])


@types
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_is_recomputed_as_it_ran_also_after_the_with(variant: str, reentrant: bool) -> None:
    model = make_model(variant, index_topk=64).train()
    inputs = prompts()
    names = [name for name, _ in model.named_parameters()]

    def loss() -> Tensor:
        model.zero_grad()
        return model(**inputs, use_cache=False).logits.square().mean()

    def gradients() -> list[Tensor | None]:
        return [None if x.grad is None else x.grad.clone() for x in model.parameters()]

    with hf.use_sfa(model, topk=3):
        loss().backward()
    want = gradients()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    before = [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers]
    with hf.use_sfa(model, topk=3), hf.use_sfa(model, topk=9), hf.use_sfa(model, topk=3):
        late = loss()
    late.backward()
    assert [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers] == before
    assert all("forward" not in vars(module) for module in hf.attention_modules(model))
    for name, got, gradient in zip(names, gradients(), want, strict=True):
        assert (got is None) == (gradient is None), name
        assert got is None or torch.equal(got, gradient), name


def test_checkpointing_that_is_enabled_inside_the_with_stays_enabled() -> None:
    model = make_model("deepseek").train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with hf.use_sfa(model):
        model.activation_checkpointing_enable({"use_reentrant": False})
        set_inside = [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers]
    assert [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers] == set_inside


# What is left behind


class Stop(BaseStreamer):
    """Raise in the middle of a generation."""

    def __init__(self) -> None:
        self.left = 4

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyError("enough")

    def end(self) -> None: ...


@types
def test_generating_leaves_model_hooks_mode_and_random_state_alone(variant: str) -> None:
    model = make_model(variant).eval()
    model.model.layers[0].mlp.train()  # a mode of its own
    modes = [module.training for module in model.modules()]
    one = {name: x[:1] for name, x in prompts().items()}
    generate(model, one)  # transformers leaves something of its own behind
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    before = snapshot(model)
    with hf.use_sfa(model, topk=4):
        generate(model, one)
    with pytest.raises(KeyError, match="enough"), hf.use_sfa(model, topk=4):
        generate(model, one, streamer=Stop())
    after = snapshot(model)
    for name, (tensor, version) in before[0].items():
        assert torch.equal(tensor, after[0][name][0])
        assert version == after[0][name][1]
    assert torch.equal(before[4], after[4])
    assert before[1:4] + before[5:] == after[1:4] + after[5:]
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(x, buffers[name]) for name, x in model.named_buffers())
