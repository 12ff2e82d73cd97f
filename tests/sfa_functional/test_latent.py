"""Absorbed projections with attention over latents equal ordinary multi-head attention; bad arguments are refused."""

from dataclasses import replace

import pytest
import torch

import sfa_functional as sfa

YARN = sfa.Yarn(factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
CONFIGS = {"plain": sfa.TINY, "yarn": replace(sfa.TINY, yarn=YARN), "half": replace(sfa.TINY, rope_pairing="half")}


def _setup(config=sfa.TINY, tokens=7, dtype=torch.float32):
    params = sfa.init_params(config, dtype=dtype)
    gains = {"q_a_layernorm": torch.randn(32), "kv_a_layernorm": torch.randn(24)}
    params = replace(params, **{name: (1 + 0.1 * gain).to(dtype) for name, gain in gains.items()})
    x_TD = torch.randn(tokens, config.hidden_size, dtype=dtype)
    return params, x_TD, *sfa.rope_cos_sin(torch.arange(tokens), config)


def _ordinary_attention(params, x_TD, cos_TF, sin_TF, config):
    """Write DeepSeek-V2's attention head by head, without absorption: keys and values are projected up."""
    p, v, r, rank = config.qk_nope_head_dim, config.v_head_dim, config.qk_rope_head_dim, config.kv_lora_rank

    def rms(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + config.latent_norm_eps).sqrt() * gain

    def turned(x):
        order = torch.arange(r).view(-1, 2) if config.rope_pairing == "interleaved" else torch.arange(r).view(2, -1).T
        z = torch.complex(x[:, order[:, 0]], x[:, order[:, 1]]) * torch.complex(cos_TF.to(x), sin_TF.to(x))
        return torch.stack([z.real, z.imag], -1).flatten(1)[:, order.flatten().argsort()]

    c_TQ = rms(x_TD @ params.q_a_proj.T, params.q_a_layernorm)
    down_TE = x_TD @ params.kv_a_proj.T
    c_SL, k_rope_SR = rms(down_TE[:, :rank], params.kv_a_layernorm), turned(down_TE[:, rank:])
    causal_TS = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).tril()
    heads = []
    for h in range(config.num_attention_heads):
        q = c_TQ @ params.q_b_proj[h * (p + r) : (h + 1) * (p + r)].T
        up = c_SL @ params.kv_b_proj[h * (p + v) : (h + 1) * (p + v)].T
        z_TS = q[:, :p] @ up[:, :p].T + turned(q[:, p:]) @ k_rope_SR.T
        weight_TS = (z_TS * config.softmax_scale).masked_fill(~causal_TS, -torch.inf).softmax(-1)
        heads.append(weight_TS @ up[:, p:])
    return torch.cat(heads, -1) @ params.o_proj.T


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", CONFIGS)
def test_absorbed_attention_equals_ordinary_multi_head_attention(name, dtype, tolerance):
    config = CONFIGS[name]
    params, x_TD, cos_TF, sin_TF = _setup(config, dtype=dtype)
    q_THE, _, kv_SE = sfa.latent_projections(params, x_TD, cos_TF, sin_TF, config=config)
    start_T = torch.zeros(7, dtype=torch.int64)
    attended = sfa.dense_attention(
        q_THE, kv_SE, start_T, torch.arange(1, 8), scale=config.softmax_scale, value_dim=config.kv_lora_rank
    )
    y_TD = sfa.latent_output(params, attended.out_THL, config=config)
    want_TD = _ordinary_attention(params, x_TD, cos_TF, sin_TF, config)
    torch.testing.assert_close(y_TD, want_TD, rtol=tolerance, atol=tolerance)


def test_the_latent_query_is_normalised_and_the_rope_part_of_keys_is_not():
    params, x_TD, cos_TF, sin_TF = _setup(dtype=torch.float64)
    unit = replace(params, q_a_layernorm=torch.ones(32).double(), kv_a_layernorm=torch.ones(24).double())
    _, q_latent_TQ, kv_TE = sfa.latent_projections(unit, 10 * x_TD, cos_TF, sin_TF, config=sfa.TINY)
    one_T = torch.ones(7, dtype=torch.float64)
    torch.testing.assert_close(q_latent_TQ.square().mean(-1), one_T)
    torch.testing.assert_close(kv_TE[:, :24].square().mean(-1), one_T)
    rope_TR = 10 * x_TD @ unit.kv_a_proj[24:].T
    torch.testing.assert_close(kv_TE[:, 24:].norm(dim=-1), rope_TR.norm(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_have_the_dtype_of_the_input(dtype):
    params, x_TD, cos_TF, sin_TF = _setup(dtype=dtype)
    results = sfa.latent_projections(params, x_TD, cos_TF, sin_TF, config=sfa.TINY)
    assert [x.dtype for x in results] == [dtype] * 3
    assert [tuple(x.shape) for x in results] == [(7, 4, 32), (7, 32), (7, 32)]
    assert sfa.latent_output(params, results[0][..., :24], config=sfa.TINY).dtype == dtype


def test_split_kv_b_views_the_parts_of_every_head():
    weight = torch.arange(144 * 24).float().view(144, 24)
    w_uk_HPL, w_uv_HVL = sfa.split_kv_b(weight, sfa.TINY)
    for h in range(4):
        assert torch.equal(w_uk_HPL[h], weight[36 * h : 36 * h + 16])
        assert torch.equal(w_uv_HVL[h], weight[36 * h + 16 : 36 * h + 36])
    storage = weight.untyped_storage().data_ptr()
    assert w_uk_HPL.untyped_storage().data_ptr() == w_uv_HVL.untyped_storage().data_ptr() == storage


@pytest.mark.parametrize("implementation", [None, "reference", "blockwise"])
def test_latent_projections_compose_queries_and_keys(implementation):
    inputs = _setup()
    got = sfa.latent_projections(*inputs, config=sfa.TINY, implementation=implementation)
    want = (*sfa.latent_queries(*inputs, config=sfa.TINY), sfa.latent_keys(*inputs, config=sfa.TINY))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_callable_replaces_the_projections():
    inputs = _setup()

    def fused(params, x_TD, cos, sin, *, config):
        assert all(a is b for a, b in zip((params, x_TD, cos, sin), inputs, strict=True))
        return torch.zeros(7, 4, 32), torch.ones(7, 32), torch.zeros(7, 32)

    got = sfa.latent_projections(*inputs, config=sfa.TINY, implementation=fused)
    assert torch.equal(got[1], torch.ones(7, 32))


def test_no_tokens_give_empty_results():
    results = sfa.latent_projections(*_setup(tokens=0), config=sfa.TINY)
    assert [tuple(x.shape) for x in results] == [(0, 4, 32), (0, 32), (0, 32)]


@pytest.mark.parametrize("function", [sfa.latent_queries, sfa.latent_keys])
def test_projections_refuse_a_wrong_width_and_a_wrong_dtype(function, unchecked):
    params, x_TD, cos_TF, sin_TF = _setup()
    with pytest.raises(ValueError, match=rf"^{function.__name__}: x must be \[T, 64\]; got \(7, 63\)$"):
        function(params, x_TD[:, :63], cos_TF, sin_TF, config=sfa.TINY)
    with pytest.raises(ValueError, match=rf"^{function.__name__}: x, projections must have one dtype; got"):
        function(params, x_TD.bfloat16(), cos_TF, sin_TF, config=sfa.TINY)
    with pytest.raises(ValueError, match=rf"^{function.__name__}: x must be floating point; got torch.int64$"):
        function(params, x_TD.long(), cos_TF, sin_TF, config=sfa.TINY)


def test_latent_output_refuses_a_wrong_width(unchecked):
    with pytest.raises(ValueError, match=r"^latent_output: out must be \[T, 4, 24\]; got torch.Size\(\[7, 4, 32\]\)$"):
        sfa.latent_output(_setup()[0], torch.zeros(7, 4, 32), config=sfa.TINY)


def test_an_implementation_that_cannot_run_is_refused_with_its_reasons(unchecked):
    with pytest.raises(ValueError, match=r"^latent_projections: implementation 'npu' can't run: "):
        sfa.latent_projections(*_setup(), config=sfa.TINY, implementation="npu")
    with pytest.raises(ValueError, match=r"implementation 'fast' can't run: it is unknown"):
        sfa.latent_projections(*_setup(), config=sfa.TINY, implementation="fast")
