"""The layer equals the attention modules of Hugging Face transformers, and whole models run through it unchanged.

Tiny modules in float32: prefill, chunks and single steps through the paged cache, ragged batches, layers that share a
selection. Outputs are compared with transformers' own selection replayed, so that a near-tie can't hide or cause a
difference; selections are compared by themselves, as sets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedConfig,
)
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

import sfa_functional as sfa
from sfa_functional import hf
from sfa_functional.rotary import rope_frequencies
from tests.vectors import read_vectors

BLOCK = 4
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "max_position_embeddings": 2560,
    "first_k_dense_replace": 9,  # dense MLPs only
    "vocab_size": 97,
    "intermediate_size": 48,
}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "deepseek": (DeepseekV32Config, {"rope_parameters": PLAIN}),
    "deepseek-yarn": (DeepseekV32Config, {"rope_parameters": YARN}),
    "glm": (GlmMoeDsaConfig, {"rope_parameters": PLAIN | {"rope_theta": 1e6}}),
}
SHARING = ["full", "shared", "full", "shared", "shared"]


variants = pytest.mark.parametrize("variant", VARIANTS)
attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@dataclass
class Peer:
    """A few attention modules of transformers, one per layer, and their rotary module."""

    layers: list[nn.Module]
    rotary: nn.Module

    @property
    def config(self) -> sfa.SFAConfig:
        return hf.module_config(self.layers[0])

    def empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self.layers[0].config)

    def pages(self, num_blocks: int, layer: int = 0, layout: str = "joint") -> sfa.JointCache | sfa.SplitCache:
        return sfa.init_cache(
            self.config, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.float32, layer=layer, layout=layout
        )

    def run(
        self,
        x_TD: Tensor,
        *,
        layer: int = 0,
        cache: DynamicCache | None = None,
        shared: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one module on the next tokens of one request; return its output and its selection in our form."""
        module: Any = self.layers[layer]
        context = 0 if cache is None else cache.get_seq_length(layer)
        position_T = torch.arange(context, context + x_TD.shape[0])
        seen_TS = torch.arange(context + x_TD.shape[0]) <= position_T[:, None]
        mask_TS = seen_TS
        if module.config._attn_implementation == "eager":  # which adds the mask, a boolean one as 0 and 1 too
            mask_TS = torch.where(seen_TS, 0.0, torch.finfo(x_TD.dtype).min)
        sharing: dict[str, Any] = {}
        if shared is not None:  # its scatter takes no -1, and its mask no harm from an entry listed twice
            sharing["prev_topk_indices"] = torch.where(shared >= 0, shared, shared.amax(-1, keepdim=True))[None]
        taken: list[Tensor] = []
        watched = module if shared is not None else module.indexer
        hook = watched.register_forward_hook(lambda _module, _args, result: taken.append(result))
        result = module(
            x_TD[None],
            position_embeddings=self.rotary(x_TD[None], position_T[None]),
            attention_mask=mask_TS[None, None],
            position_ids=position_T[None],
            cache=cache,
            **sharing,
        )
        hook.remove()
        if shared is not None:
            return result[0][0], shared
        index_TK = taken[0][0]
        index_TK = torch.where(index_TK <= position_T[:, None], index_TK, -1)
        spare = self.config.index_topk - index_TK.shape[1]
        return result[0][0], nn.functional.pad(index_TK, (0, spare), value=-1).to(torch.int32)


def random_weights(module: nn.Module) -> None:
    """Fill projections with N(0, 0.3), norms with 1 + 0.1 N, and their biases with 0.3 N."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            normal = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * normal if "norm" in name and name.endswith("weight") else 0.3 * normal)


def make_config(variant: str, **changes: Any) -> PreTrainedConfig:
    config_class, rope = VARIANTS[variant]
    types = changes.get("indexer_types", ["full"])
    return config_class(**SIZES | rope | {"num_hidden_layers": len(types), "attn_implementation": "eager"} | changes)


def make_peer(variant: str, **changes: Any) -> Peer:
    config = make_config(variant, **changes)
    if isinstance(config, GlmMoeDsaConfig):
        layers = [glm.GlmMoeDsaAttention(config, i) for i in range(config.num_hidden_layers)]
        rotary: nn.Module = glm.GlmMoeDsaRotaryEmbedding(config)
    else:
        layers = [deepseek.DeepseekV32Attention(config, i) for i in range(config.num_hidden_layers)]
        rotary = deepseek.DeepseekV32RotaryEmbedding(config)
    for layer in layers:
        random_weights(layer)
    return Peer(nn.ModuleList(layers), rotary)


def hidden_states(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


def sets(selection_TK: Tensor) -> list[list[int]]:
    """List each row's positions in order, unused entries left out; a position listed twice stays twice."""
    return [sorted(s for s in row if s >= 0) for row in selection_TK.tolist()]


def close(a: Tensor, b: Tensor) -> None:
    result = sfa.difference(a, b)
    assert result.max_rel < 1e-5, result


def scattered_pages(seq_lens: list[int]) -> Tensor:
    """Hand out pages in a random order, some of them to nobody."""
    table_BU = sfa.allocate_blocks(seq_lens, BLOCK)
    order = torch.randperm(int(table_BU.max()) + 3, generator=torch.Generator().manual_seed(5)).int()
    return torch.where(table_BU >= 0, order[table_BU.clamp(min=0)], -1)


def pool_size(table_BU: Tensor) -> int:
    return int(table_BU.max()) + 1


# Rope, configs and weights


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_5", "glm_52"])
def test_rope_cos_sin_equals_the_rotary_module_of_published_configs(name: str) -> None:
    published = read_vectors("model_configs.json")["models"][name]["config"]
    if published["model_type"] == "deepseek_v32":
        rotary: nn.Module = deepseek.DeepseekV32RotaryEmbedding(DeepseekV32Config(**published))
    else:
        rotary = glm.GlmMoeDsaRotaryEmbedding(GlmMoeDsaConfig(**published))
    check_rope(rotary, sfa.SFAConfig.from_hf(published))


@pytest.mark.parametrize(
    "rope",
    [
        PLAIN,
        YARN,
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"mscale_all_dim": 0.0},
        YARN | {"factor": 1.0},
    ],
    ids=["plain", "yarn", "two mscales", "no mscale_all_dim", "factor 1"],
)
def test_rope_cos_sin_equals_the_rotary_module(rope: dict[str, Any]) -> None:
    peer = make_peer("deepseek", rope_parameters=rope)
    check_rope(peer.rotary, peer.config)


def check_rope(rotary: nn.Module, config: sfa.SFAConfig) -> None:
    """Compare at positions up to 4095; beyond, a last bit of a frequency would show."""
    position_T = torch.arange(4096)
    half = config.qk_rope_head_dim // 2
    assert torch.equal(rope_frequencies(config), rotary.inv_freq)
    theirs = rotary(torch.zeros(1), position_T[None])
    for ours_TF, theirs_1TR in zip(sfa.rope_cos_sin(position_T, config), theirs, strict=True):
        assert torch.equal(theirs_1TR[..., :half], theirs_1TR[..., half:])
        assert sfa.difference(ours_TF, theirs_1TR[0, :, :half]).max_abs <= 1e-6


@variants
def test_softmax_scale_is_the_modules_scaling(variant: str) -> None:
    peer = make_peer(variant)
    assert peer.config.softmax_scale == pytest.approx(peer.layers[0].scaling, rel=1e-12)
    assert peer.config.softmax_scale == pytest.approx(0.382499 if variant == "deepseek-yarn" else 0.204124, rel=1e-5)


@pytest.mark.parametrize("variant", ["deepseek", "glm"])
def test_module_config_takes_the_epsilon_of_the_live_norms(variant: str) -> None:
    """transformers builds the latent norms with 1e-6 whatever ``rms_norm_eps`` says; small inputs show it."""
    peer = make_peer(variant, rms_norm_eps=1e-5)
    module: Any = peer.layers[0]
    named = sfa.SFAConfig.from_hf(module.config.to_dict())
    assert named.latent_norm_eps == 1e-5
    assert peer.config == replace(named, latent_norm_eps=1e-6)

    x_TD = 0.01 * hidden_states(20)
    y_TD, selection_TK = peer.run(x_TD)
    batch = sfa.Batch.from_lengths([20])
    params = hf.layer_params(module)
    close(sfa.sfa_layer(params, x_TD, batch, config=peer.config, selection=selection_TK).y_TD, y_TD)
    other = sfa.sfa_layer(params, x_TD, batch, config=named, selection=selection_TK)
    assert sfa.difference(other.y_TD, y_TD).max_rel > 1e-4


# One layer, without a cache


@variants
@attentions
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("length", [1, 5, 17, 40])
def test_prefill_equals_transformers(variant: str, attention: str, implementation: Any, length: int) -> None:
    peer = make_peer(variant, attn_implementation=attention)
    x_TD = hidden_states(length)
    params, batch = hf.layer_params(peer.layers[0]), sfa.Batch.from_lengths([length])
    y_TD, selection_TK = peer.run(x_TD)
    own = sfa.sfa_layer(params, x_TD, batch, config=peer.config, implementation=implementation)
    assert sets(own.selection_TK) == sets(selection_TK)
    replayed = sfa.sfa_layer(
        params, x_TD, batch, config=peer.config, selection=selection_TK, implementation=implementation
    )
    close(replayed.y_TD, y_TD)
    close(own.y_TD, y_TD)


@variants
def test_ragged_batch_equals_one_call_per_request(variant: str) -> None:
    peer = make_peer(variant)
    lengths = [5, 40, 1, 17, 0, 23]
    inputs = [hidden_states(n, seed) for seed, n in enumerate(lengths)]
    results = [peer.run(x_TD) for x_TD in inputs if len(x_TD) > 0]
    y_TD, selection_TK = (torch.cat(parts) for parts in zip(*results, strict=True))
    params, batch = hf.layer_params(peer.layers[0]), sfa.Batch.from_lengths(lengths)
    own = sfa.sfa_layer(params, torch.cat(inputs), batch, config=peer.config)
    assert sets(own.selection_TK) == sets(selection_TK)
    close(own.y_TD, y_TD)
    close(sfa.sfa_layer(params, torch.cat(inputs), batch, config=peer.config, selection=selection_TK).y_TD, y_TD)


@variants
def test_selections_of_two_index_heads_agree_up_to_ties(variant: str) -> None:
    """Two heads leave a quarter of all scores exactly 0: several sets of k keys are right, and both of ours are."""
    peer = make_peer(variant, index_n_heads=2)
    x_TD = hidden_states(40)
    params, batch = hf.layer_params(peer.layers[0]), sfa.Batch.from_lengths([40])
    y_TD, theirs_TK = peer.run(x_TD)
    ours_TK = sfa.sfa_layer(params, x_TD, batch, config=peer.config).selection_TK
    score_TS = exact_index_scores(peer, x_TD)
    assert sets(ours_TK) != sets(theirs_TK)
    check_selection(theirs_TK, score_TS, k=4)
    check_selection(ours_TK, score_TS, k=4)
    close(sfa.sfa_layer(params, x_TD, batch, config=peer.config, selection=theirs_TK).y_TD, y_TD)


def exact_index_scores(peer: Peer, x_TD: Tensor) -> Tensor:
    """Score all pairs of tokens in float64, with the module's weights and transformers' own rotations."""
    module: Any = peer.layers[0]
    indexer, width = module.indexer, module.qk_rope_head_dim
    rope = [x.double() for x in peer.rotary(x_TD[None], torch.arange(len(x_TD))[None])]
    is_glm = isinstance(module, glm.GlmMoeDsaAttention)
    apply = glm.apply_rotary_pos_emb_interleave if is_glm else deepseek.apply_rotary_pos_emb
    q_latent_TQ = module.q_a_layernorm(module.q_a_proj(x_TD)).double()
    q_1TJI = (q_latent_TQ @ indexer.wq_b.weight.double().T).view(1, len(x_TD), indexer.n_heads, indexer.head_dim)
    gain, bias = indexer.k_norm.weight.double(), indexer.k_norm.bias.double()
    k_TI = nn.functional.layer_norm(x_TD.double() @ indexer.wk.weight.double().T, gain.shape, gain, bias, 1e-6)
    k_1T1I = k_TI[None, :, None]
    q_rope, k_rope = apply(q_1TJI[..., :width], k_1T1I[..., :width], *rope, unsqueeze_dim=2)
    q_TJI = torch.cat([q_rope, q_1TJI[..., width:]], dim=-1)[0]
    k_TI = torch.cat([k_rope, k_1T1I[..., width:]], dim=-1)[0, :, 0]
    w_TJ = x_TD.double() @ indexer.weights_proj.weight.double().T
    score_TS = torch.einsum("tj,tjs->ts", w_TJ, torch.relu(torch.einsum("tji,si->tjs", q_TJI, k_TI)))
    return (score_TS * (indexer.n_heads * indexer.head_dim) ** -0.5).detach()


def check_selection(selection_TK: Tensor, score_TS: Tensor, *, k: int) -> None:
    """Accept any set of the k best visible keys, near-ties either way."""
    eps = 1e-5 * float(score_TS.abs().max())
    for t, chosen in enumerate(sets(selection_TK)):
        visible = score_TS[t, : t + 1]
        assert len(set(chosen)) == len(chosen) == min(k, t + 1), (t, chosen)
        assert all(0 <= s <= t for s in chosen), (t, chosen)
        kth = float(visible.sort(descending=True).values[len(chosen) - 1])
        left = [s for s in range(t + 1) if s not in chosen]
        assert all(float(visible[s]) >= kth - eps for s in chosen), (t, chosen)
        assert all(float(visible[s]) <= kth + eps for s in left), (t, chosen)


@variants
def test_gradients_equal_transformers(variant: str) -> None:
    peer = make_peer(variant)
    module = peer.layers[0]
    weight_TD = hidden_states(20, seed=9)
    gradients = []
    for ours in (False, True):
        x_TD = hidden_states(20).requires_grad_()
        y_TD, selection_TK = peer.run(x_TD)
        if ours:
            params, batch = hf.layer_params(module), sfa.Batch.from_lengths([20])
            y_TD = sfa.sfa_layer(params, x_TD, batch, config=peer.config, selection=selection_TK).y_TD
        module.zero_grad()
        (y_TD * weight_TD).sum().backward()
        gradients.append({"x": x_TD.grad} | {name: weight.grad for name, weight in module.named_parameters()})
    theirs, ours = gradients
    for name, gradient in theirs.items():
        if name.startswith("indexer."):
            assert gradient is None
            assert ours[name] is None
        else:
            close(ours[name], gradient)


# Through the paged cache: chunks, single steps, ragged batches

SCHEDULES = {
    "chunked prefill": [[7], [1], [12], [20]],
    "decode": [[5], *[[1]] * 11],
    "prefill of many": [[5, 40, 1, 17]],
    "decode of many": [[6, 1, 13, 3], *[[1, 1, 1, 1]] * 3],
    "drafts": [[6, 1, 13, 3], [2, 4, 1, 3], [3, 1, 2, 2]],
    "requests come and go": [[9, 0, 4, 0], [1, 6, 0, 0], [1, 1, 5, 17], [0, 1, 1, 1], [1, 0, 0, 8]],
}


@variants
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_through_pages_equal_the_cached_module_and_its_one_prefill(variant: str, name: str) -> None:
    check_steps(make_peer(variant), SCHEDULES[name])


@pytest.mark.parametrize("variant", ["deepseek", "glm"])
@pytest.mark.parametrize("layout", ["joint", "split"])
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_steps_through_pages_in_each_layout_by_each_implementation(
    variant: str, layout: str, implementation: Any
) -> None:
    peer = make_peer(variant, attn_implementation="sdpa")
    check_steps(peer, SCHEDULES["drafts"], layout=layout, implementation=implementation)


def check_steps(peer: Peer, steps: list[list[int]], *, layout: str = "joint", implementation: Any = None) -> None:
    """Serve requests with scattered pages; compare every step, then every request with its one prefill, and keys."""
    params, config = hf.layer_params(peer.layers[0]), peer.config
    totals = [sum(new) for new in zip(*steps, strict=True)]
    inputs = [hidden_states(n, seed) for seed, n in enumerate(totals)]
    table_BU = scattered_pages(totals)
    pages = peer.pages(pool_size(table_BU), layout=layout)
    caches = [peer.empty_cache() for _ in totals]
    done = [0] * len(totals)
    outputs: list[list[Tensor]] = [[] for _ in totals]
    for new in steps:
        pieces = [x_TD[d : d + n] for x_TD, d, n in zip(inputs, done, new, strict=True)]
        done = [d + n for d, n in zip(done, new, strict=True)]
        batch = sfa.Batch.from_lengths(new, done, block_table=table_BU, block_size=BLOCK)
        results = [peer.run(x_TD, cache=cache) for x_TD, cache in zip(pieces, caches, strict=True) if len(x_TD) > 0]
        y_TD, selection_TK = (torch.cat(parts) for parts in zip(*results, strict=True))
        common: dict[str, Any] = {"config": config, "cache": pages, "implementation": implementation}
        replayed = sfa.sfa_layer(params, torch.cat(pieces), batch, selection=selection_TK, **common)
        own = sfa.sfa_layer(params, torch.cat(pieces), batch, **common, donate=True)
        close(replayed.y_TD, y_TD)
        assert sets(own.selection_TK) == sets(selection_TK)
        close(own.y_TD, y_TD)
        pages = own.cache
        for parts, piece_TD in zip(outputs, own.y_TD.split(new), strict=True):
            parts.append(piece_TD)
    for x_TD, parts in zip(inputs, outputs, strict=True):
        close(torch.cat(parts), peer.run(x_TD)[0])
    check_keys(
        peer, pages, sfa.Batch.from_lengths([0] * len(totals), totals, block_table=table_BU, block_size=BLOCK), caches
    )


def check_keys(peer: Peer, pages: Any, batch: sfa.Batch, caches: list[DynamicCache]) -> None:
    """Compare cached rows: transformers stores what it rotated in pairs with all first elements first."""
    config = peer.config
    rows_SE = sfa.fetch_rows(sfa.cache_rows(pages), batch.row_S)
    index_SI = sfa.fetch_rows(pages.index_k.flatten(0, 1), batch.row_S)
    for cache, first, length in zip(caches, batch.key_start_B.tolist(), batch.seq_len_B.tolist(), strict=True):
        keys: Any = cache.layers[0]
        latent_SL, rope_SR = rows_SE[first : first + length].split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        close(latent_SL, keys.keys[0, 0])
        close(torch.cat([rope_SR[:, 0::2], rope_SR[:, 1::2]], dim=-1), keys.values[0, 0])
        rotated_SR, plain = index_SI[first : first + length].tensor_split([config.qk_rope_head_dim], dim=-1)
        if config.index_rope_pairing == "interleaved":
            rotated_SR = torch.cat([rotated_SR[:, 0::2], rotated_SR[:, 1::2]], dim=-1)
        close(torch.cat([rotated_SR, plain], dim=-1), keys.indexer_keys[0])


@variants
def test_next_batches_decode_like_the_cached_module(variant: str) -> None:
    """`Batch.next` over a table with room to grow; the cache is donated from step to step."""
    peer = make_peer(variant)
    x_TD = hidden_states(24)
    params, cache = hf.layer_params(peer.layers[0]), peer.empty_cache()
    table_BU = scattered_pages([24])
    pages = peer.pages(pool_size(table_BU))
    batch = sfa.Batch.from_lengths([10], block_table=table_BU, block_size=BLOCK)
    for low, high in [(0, 10), *((i, i + 1) for i in range(10, 24))]:
        y_TD, selection_TK = peer.run(x_TD[low:high], cache=cache)
        own = sfa.sfa_layer(params, x_TD[low:high], batch, config=peer.config, cache=pages, donate=True)
        assert sets(own.selection_TK) == sets(selection_TK)
        close(own.y_TD, y_TD)
        pages, batch = own.cache, batch.next([1]) if high < 24 else batch


# Layers that share a selection


def test_shared_layers_use_the_selection_handed_on() -> None:
    """A chain of layers, each side handing on its own selection: without a cache, and in chunks through pages."""
    peer = make_peer("glm", indexer_types=SHARING)
    config = peer.config
    assert list(config.indexer_types) == SHARING
    table_BU = scattered_pages([30])
    caches = [peer.pages(pool_size(table_BU), layer=i) for i in range(len(SHARING))]
    assert [cache.index_k is None for cache in caches] == [kind == "shared" for kind in SHARING]
    cached = peer.empty_cache()
    x_TD = hidden_states(30)
    whole = sfa.Batch.from_lengths([30])
    for low, high in [(0, 30), (0, 13), (13, 14), (14, 30)]:
        uncached = high - low == 30
        batch = (
            whole if uncached else sfa.Batch.from_lengths([high - low], [high], block_table=table_BU, block_size=BLOCK)
        )
        h_TD, theirs_TK, ours_TK = x_TD[low:high], None, None
        for i, kind in enumerate(SHARING):
            params = hf.layer_params(peer.layers[i])
            assert (params.indexer is None) == (kind == "shared")
            handed = {"selection": ours_TK} if kind == "shared" else {}
            own = sfa.sfa_layer(params, h_TD, batch, config=config, cache=None if uncached else caches[i], **handed)
            shared_TK = theirs_TK if kind == "shared" else None
            y_TD, theirs_TK = peer.run(h_TD, layer=i, cache=None if uncached else cached, shared=shared_TK)
            ours_TK = own.selection_TK
            assert sets(ours_TK) == sets(theirs_TK), (i, low)
            close(own.y_TD, y_TD)
            if not uncached:
                caches[i] = own.cache
            h_TD = nn.functional.rms_norm(h_TD + y_TD.detach(), (h_TD.shape[1],))


def test_a_shared_module_takes_our_selection() -> None:
    """Ours to theirs: any selection gives the same output, also one that no indexer would make."""
    peer = make_peer("glm", indexer_types=["full", "shared"])
    x_TD, batch = hidden_states(25), sfa.Batch.from_lengths([25])
    params = hf.layer_params(peer.layers[1])
    row_T1 = torch.arange(25)[:, None]
    scattered_TK = torch.cat([row_T1, row_T1 // 2, row_T1 // 3 - 1, row_T1 * 0 - 1], dim=-1).to(torch.int32)
    scattered_TK[:2] = torch.tensor([[0, -1, -1, -1], [-1, 1, -1, 0]])
    scattered_TK[2] = torch.tensor([2, 1, -1, -1])
    own = sfa.sfa_layer(params, x_TD, batch, config=peer.config, selection=scattered_TK)
    close(own.y_TD, peer.run(x_TD, layer=1, shared=scattered_TK)[0])


# Weights of a live module


@pytest.mark.parametrize("variant", ["deepseek", "glm"])
def test_load_params_and_layer_params_are_inverse(variant: str) -> None:
    types = ["full", "full"] if variant == "deepseek" else ["full", "shared"]
    changes = {"num_hidden_layers": 2} if variant == "deepseek" else {"indexer_types": types}
    peer = make_peer(variant, **changes)
    x_TD, batch = hidden_states(15), sfa.Batch.from_lengths([15])
    selection_TK = None
    for i, module in enumerate(peer.layers):
        config = peer.config
        params = sfa.init_params(config, layer=i, generator=torch.Generator().manual_seed(3))
        hf.load_params(module, params)
        live = hf.layer_params(module)
        left, right = (torch.utils._pytree.tree_leaves(p) for p in (live, params))
        assert len(left) == len(right) == len(list(module.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
        shared = selection_TK if live.indexer is None else None
        y_TD, selection_TK = peer.run(x_TD, layer=i, shared=shared)
        close(sfa.sfa_layer(params, x_TD, batch, config=config, selection=selection_TK).y_TD, y_TD)


def test_layer_params_are_the_modules_own_tensors() -> None:
    module: Any = make_peer("glm").layers[0]
    params = hf.layer_params(module)
    assert params.q_a_proj is module.q_a_proj.weight
    assert params.indexer is not None
    assert params.indexer.k_norm_bias is module.indexer.k_norm.bias
    assert {id(x) for x in torch.utils._pytree.tree_leaves(params)} == {id(x) for x in module.parameters()}


def test_params_from_state_of_a_module_are_its_layer_params() -> None:
    peer = make_peer("deepseek")
    params = sfa.params_from_state(peer.layers[0].state_dict(), config=peer.config)
    left, right = (torch.utils._pytree.tree_leaves(p) for p in (params, hf.layer_params(peer.layers[0])))
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_load_params_casts_to_the_modules_dtype() -> None:
    peer = make_peer("deepseek")
    params = sfa.init_params(peer.config)
    module: Any = peer.layers[0].to(torch.bfloat16)
    hf.load_params(module, params)
    assert torch.equal(module.o_proj.weight, params.o_proj.to(torch.bfloat16))


def test_load_params_writes_nothing_if_anything_does_not_fit(unchecked: None) -> None:
    peer = make_peer("glm", indexer_types=["full", "shared"])
    before = {name: x.clone() for name, x in peer.layers.state_dict().items()}
    fitting = sfa.init_params(peer.config)
    with pytest.raises(ValueError, match=r"load_params: fields must be .*; got"):
        hf.load_params(peer.layers[1], fitting)
    with pytest.raises(ValueError, match=r"load_params: fields must be .*; got"):
        hf.load_params(peer.layers[0], replace(fitting, indexer=None))
    with pytest.raises(ValueError, match=r"load_params: o_proj must have shape \[64, 80\]; got \[64, 79\]"):
        hf.load_params(peer.layers[0], replace(fitting, o_proj=fitting.o_proj[:, 1:]))
    assert all(torch.equal(x, before[name]) for name, x in peer.layers.state_dict().items())


def test_layer_params_refuse_what_is_no_plain_linear_map() -> None:
    class Adapted(nn.Linear):
        pass

    module: Any = make_peer("deepseek").layers[0]
    module.kv_b_proj = Adapted(24, 144, bias=False)
    with pytest.raises(ValueError, match=r"layer_params: kv_b_proj must be a plain torch.nn.Linear; got Adapted"):
        hf.layer_params(module)
    module.kv_b_proj = nn.Linear(24, 144, bias=True)
    with pytest.raises(ValueError, match=r"layer_params: kv_b_proj must have no bias; got one"):
        hf.layer_params(module)
    module.kv_b_proj = nn.Linear(24, 144, bias=False)
    module.indexer.wk = Adapted(64, 16, bias=False)
    with pytest.raises(ValueError, match=r"layer_params: indexer.wk must be a plain torch.nn.Linear; got Adapted"):
        hf.layer_params(module)


def test_attention_biases_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_bias must be false"):
        hf.module_config(make_peer("deepseek", attention_bias=True).layers[0])


# Whole models

LENGTHS = [12, 7, 9]
WIDTH = max(LENGTHS)
paddings = pytest.mark.parametrize("padding", ["left", "right"])


def make_model(variant: str, **changes: Any) -> nn.Module:
    if variant == "glm":
        model: nn.Module = GlmMoeDsaForCausalLM(make_config(variant, **{"indexer_types": SHARING} | changes))
    else:
        model = DeepseekV32ForCausalLM(make_config(variant, **{"num_hidden_layers": 3} | changes))
    random_weights(model)
    return model


def padded_batch(padding: str) -> dict[str, Tensor]:
    mask_BT = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    mask_BT = mask_BT.flip(-1) if padding == "left" else mask_BT
    ids_BT = torch.randint(SIZES["vocab_size"], mask_BT.shape, generator=torch.Generator().manual_seed(2))
    position_BT = (mask_BT.long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids_BT, "attention_mask": mask_BT.long(), "position_ids": position_BT}


def real_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs, use_cache=False).logits[inputs["attention_mask"] > 0]


@variants
@attentions
@paddings
@pytest.mark.parametrize("k", [3, WIDTH, 4 * WIDTH])
def test_logits_of_whole_models_stay(variant: str, attention: str, padding: str, k: int) -> None:
    model = make_model(variant, attn_implementation=attention, index_topk=k)
    inputs = padded_batch(padding)
    with torch.no_grad():
        theirs = real_logits(model, inputs)
        with hf.use_sfa(model):
            close(real_logits(model, inputs), theirs)
        assert torch.equal(real_logits(model, inputs), theirs)


@pytest.mark.parametrize("variant", ["deepseek", "glm"])
def test_topk_of_use_sfa_stands_for_the_models_own(variant: str) -> None:
    model = make_model(variant, index_topk=64)
    sparse = make_model(variant, index_topk=3)
    inputs = padded_batch("left")
    with torch.no_grad():
        dense_logits, sparse_logits = real_logits(model, inputs), real_logits(sparse, inputs)
        assert sfa.difference(sparse_logits, dense_logits).max_rel > 1e-2
        with hf.use_sfa(model, topk=3):
            close(real_logits(model, inputs), sparse_logits)
        with hf.use_sfa(sparse, topk=WIDTH, implementation="reference"):
            close(real_logits(sparse, inputs), dense_logits)


@variants
@paddings
def test_weight_gradients_of_whole_models_stay(variant: str, padding: str) -> None:
    model = make_model(variant).train()
    inputs = padded_batch(padding)
    target_T = torch.arange(sum(LENGTHS)) % SIZES["vocab_size"]

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        nn.functional.cross_entropy(real_logits(model, inputs), target_T).backward()
        return {name: None if x.grad is None else x.grad.clone() for name, x in model.named_parameters()}

    theirs = gradients()
    with hf.use_sfa(model):
        ours = gradients()
    assert {name for name, g in ours.items() if g is None} == {name for name in ours if ".indexer." in name}
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        if gradient is None:
            assert ours[name] is None
        else:
            close(ours[name], gradient)


def test_a_model_in_training_is_always_current() -> None:
    model = make_model("glm")
    inputs = padded_batch("right")
    with torch.no_grad(), hf.use_sfa(model):
        before = real_logits(model, inputs)
        for module in hf.attention_modules(model):
            module.o_proj.weight.mul_(1.5)
        after = real_logits(model, inputs)
    assert sfa.difference(after, before).max_rel > 1e-2
    with torch.no_grad():
        close(after, real_logits(model, inputs))


def test_a_selector_replaces_the_indexer_of_every_full_layer() -> None:
    model = make_model("glm")
    inputs = padded_batch("left")
    seen: list[int] = []

    def everything(*, start_T: Tensor, end_T: Tensor, k: int, **_: Any) -> Tensor:
        seen.append(k)
        return sfa.window(start_T=start_T, end_T=end_T, k=WIDTH)

    with torch.no_grad():
        with hf.use_sfa(model, select=everything):
            ours = real_logits(model, inputs)
        dense = make_model("glm", index_topk=WIDTH)
        close(ours, real_logits(dense, inputs))
    assert seen == [4] * SHARING.count("full")


def assert_untouched(model: nn.Module) -> None:
    for module in hf.attention_modules(model):
        assert "forward" not in module.__dict__


@pytest.mark.parametrize("variant", ["deepseek", "glm"])
def test_use_sfa_restores_the_model_also_after_an_exception(variant: str) -> None:
    model = make_model(variant)
    assert_untouched(model)
    with hf.use_sfa(model) as same:
        assert same is model
        assert all("forward" in module.__dict__ for module in hf.attention_modules(model))
    assert_untouched(model)
    with pytest.raises(KeyError, match="mine"), hf.use_sfa(model):
        raise KeyError("mine")
    assert_untouched(model)
    with pytest.raises(ValueError, match="topk must be >= 1; got 0"), hf.use_sfa(model, topk=0):
        pass
    assert_untouched(model)


def test_use_sfa_inside_use_sfa_restores_the_outer_one() -> None:
    model = make_model("deepseek")
    inputs = padded_batch("right")
    with torch.no_grad(), hf.use_sfa(model, topk=2):
        outer_forwards = [module.__dict__["forward"] for module in hf.attention_modules(model)]
        outer = real_logits(model, inputs)
        with hf.use_sfa(model, topk=WIDTH):
            assert not torch.equal(real_logits(model, inputs), outer)
        assert [module.__dict__["forward"] for module in hf.attention_modules(model)] == outer_forwards
        assert torch.equal(real_logits(model, inputs), outer)
    assert_untouched(model)


def test_dropout_in_training_is_refused() -> None:
    model = make_model("deepseek", attention_dropout=0.1).train()
    inputs = padded_batch("left")
    with hf.use_sfa(model), pytest.raises(ValueError, match=r"attention_dropout must be 0 in training; got 0.1"):
        real_logits(model, inputs)
    with torch.no_grad(), hf.use_sfa(model.eval()):
        ours = real_logits(model, inputs)
    with torch.no_grad():
        close(ours, real_logits(model, inputs))


def test_a_model_without_sparse_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use_sfa: the model must have DSA attention modules; got Linear"):
        hf.attention_modules(nn.Linear(2, 2))


# Attention masks


def both_kinds(seen_BTT: Tensor) -> Iterator[Tensor]:
    """Yield a mask as sdpa and as eager attention get it."""
    yield seen_BTT[:, None]
    yield torch.where(seen_BTT, 0.0, torch.finfo(torch.float32).min)[:, None]


def test_masks_become_the_ranges_that_they_show() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    padded_left = causal & (torch.arange(6) >= 2)
    padded_right = causal & (torch.arange(6) < 4)
    document = torch.tensor([0, 0, 0, 1, 1, 2])
    packed = causal & (document == document[:, None])
    windowed = causal & ~causal.tril(-3)
    nothing = torch.zeros(6, 6, dtype=torch.bool)
    seen_BTT = torch.stack([causal, padded_left, padded_right, packed, windowed, nothing])
    for mask in both_kinds(seen_BTT):
        batch = hf.mask_to_batch(mask, 6, 6)
        s_S = torch.arange(36)
        visible_TS = (s_S >= batch.start_T[:, None]) & (s_S < batch.end_T[:, None])
        assert torch.equal(visible_TS, torch.block_diag(*seen_BTT).bool())
        blank_T = ~seen_BTT.any(-1).flatten()
        assert torch.equal(batch.request_T, torch.where(blank_T, -1, s_S // 6))
        assert torch.equal(batch.position_T, torch.where(blank_T, -1, s_S % 6))
        assert batch.key_start_B.tolist() == [0, 6, 12, 18, 24, 30]
        assert batch.query_start_B1.tolist() == [0, 6, 12, 18, 24, 30, 36]


def test_one_mask_stands_for_all_sequences() -> None:
    seen_1TT = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    for mask in both_kinds(seen_1TT):
        batch = hf.mask_to_batch(mask, 3, 4)
        assert batch.start_T.tolist() == [0] * 4 + [4] * 4 + [8] * 4
        assert batch.end_T.tolist() == list(range(1, 13))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_masks_are_refused_exactly_where_a_row_has_holes(length: int) -> None:
    for bits in range(2**length):
        row = [bits >> s & 1 for s in range(length)]
        seen_BTT = torch.ones(2, length, length, dtype=torch.bool).tril()
        seen_BTT[1, length - 1] = torch.tensor(row, dtype=torch.bool)
        has_hole = "0" in "".join(map(str, row)).strip("0")
        for mask in both_kinds(seen_BTT):
            if has_hole:
                with pytest.raises(ValueError, match=r"visible keys must be one run of the attention mask; got holes"):
                    hf.mask_to_batch(mask, 2, length)
            else:
                batch = hf.mask_to_batch(mask, 2, length)
                start, end = int(batch.start_T[-1]), int(batch.end_T[-1])
                assert [s for s in range(length) if row[s]] == list(range(start % length, start % length + end - start))


@attentions
def test_a_model_whose_mask_has_holes_is_refused(attention: str) -> None:
    model = make_model("deepseek", attn_implementation=attention)
    inputs = padded_batch("right")
    inputs["attention_mask"][0, 5] = 0
    with hf.use_sfa(model), pytest.raises(ValueError, match=r"visible keys must be one run"):
        real_logits(model, inputs)
    assert_untouched(model)


def test_missing_flat_and_misshapen_masks_are_refused(unchecked: None) -> None:
    for mask in (None, torch.ones(2, 4), torch.ones(2, 1, 4, 5), torch.ones(2, 4, 4)):
        with pytest.raises(ValueError, match=r"use_sfa: attention_mask must be \[B, 1, 4, 4\]; got"):
            hf.mask_to_batch(mask, 2, 4)


def test_packed_documents_stay_apart_in_a_whole_model() -> None:
    """A 4-D mask of two documents and positions that start again: the logits of each document alone."""
    model = make_model("glm", index_topk=3)
    inputs = padded_batch("right")
    ids_1T = inputs["input_ids"][:1]
    document = torch.tensor([0] * 5 + [1] * 7)
    seen_11TT = (document == document[:, None]).tril()[None, None]
    mask = torch.where(seen_11TT, 0.0, torch.finfo(torch.float32).min)
    position_1T = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        with hf.use_sfa(model):
            packed = model(ids_1T, attention_mask=mask, position_ids=position_1T, use_cache=False).logits[0]
        alone = [model(ids_1T[:, s], use_cache=False).logits[0] for s in (slice(0, 5), slice(5, 12))]
        close(packed, torch.cat(alone))


@variants
def test_autocast_computes_attention_in_the_weights_dtype(variant: str) -> None:
    """As a float32 attention would inside of an autocast model; transformers' own takes its products in bfloat16."""
    torch.manual_seed(0)
    model = (GlmMoeDsaForCausalLM if variant == "glm" else DeepseekV32ForCausalLM)(make_config(variant))
    random_weights(model)
    module: Any = model.model.layers[0].self_attn
    seen: list[tuple[Tensor, Tensor]] = []
    module.register_forward_hook(
        lambda _m, _a, named, result: seen.append((named["hidden_states"], result[0])), with_kwargs=True
    )
    ids = torch.arange(20)[None]
    with torch.no_grad(), sfa.use_sfa(model), torch.autocast("cpu", torch.bfloat16):
        model(ids, use_cache=False)
    x_1TD, y_1TD = seen[0]
    params, batch = hf.layer_params(module), sfa.Batch.from_lengths([20])
    with torch.no_grad():
        want_TD = sfa.sfa_layer(params, x_1TD[0].float(), batch, config=hf.module_config(module)).y_TD
    assert torch.equal(y_1TD[0], want_TD.to(y_1TD.dtype))


def test_a_live_model_is_followed_where_its_class_ignores_its_flags() -> None:
    peer = make_peer("glm", indexer_rope_interleave=False)
    assert peer.config.index_rope_pairing == "interleaved"
    x_TD = hidden_states(20)
    y_TD, selection_TK = peer.run(x_TD)
    own = sfa.sfa_layer(hf.layer_params(peer.layers[0]), x_TD, sfa.Batch.from_lengths([20]), config=peer.config)
    assert sets(own.selection_TK) == sets(selection_TK)
    close(own.y_TD, y_TD)
