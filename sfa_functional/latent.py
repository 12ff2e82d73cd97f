"""Hidden states to absorbed queries and latent keys, and the attention's result back to hidden states (MLA)."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from . import npu
from .config import SFAConfig
from .implementation import Implementation, choose
from .norm import rms_norm
from .params import LayerParams
from .precision import linear, matmul, require, require_float, without_autocast
from .rotary import rotate

Projections = tuple[Float[Tensor, "T H E"], Float[Tensor, "T Q"], Float[Tensor, "T E"]]


def split_kv_b(
    kv_b_proj: Float[Tensor, "HY L"], config: SFAConfig
) -> tuple[Float[Tensor, "H P L"], Float[Tensor, "H V L"]]:
    """View the up-projection of the latents as its key part W_UK and its value part W_UV; no copy.

    Args:
        kv_b_proj: [H·(P+V), L], per head P rows, then V rows.
        config: gives H, P and V.

    Returns:
        ``(w_uk_HPL, w_uv_HVL)``, views of ``kv_b_proj``.

    Raises:
        ValueError: another shape.

    Gradients: of ``kv_b_proj``.
    Source: DeepSeek-V2 (2024), section 2.1.2; the row order is that of the published checkpoints.
    """
    want = (config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
    require(tuple(kv_b_proj.shape) == want, "split_kv_b", f"kv_b_proj must be {list(want)}", tuple(kv_b_proj.shape))
    heads = kv_b_proj.unflatten(0, (config.num_attention_heads, -1))
    return heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]


def latent_queries(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    cos: Float[Tensor, "T F"],
    sin: Float[Tensor, "T F"],
    *,
    config: SFAConfig,
) -> tuple[Float[Tensor, "T H E"], Float[Tensor, "T Q"]]:
    """Project hidden states to queries that can be compared with latent keys.

    ``c = rms_norm(x W_qaᵀ)``, ``[q_nope ; q_rope] = c W_qbᵀ`` per head, ``q = [q_nope W_UK ; rotate(q_rope)]``: the
    up-projection of the keys is absorbed into the query, so that ``q · [latent ; rope]`` is the ordinary product of
    the head's query and key.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm.
        cos: cosines of the tokens' positions, from `rope_cos_sin`.
        sin: sines, likewise.
        config: sizes, pairing, epsilon.

    Returns:
        ``(q_THE, q_latent_TQ)``: absorbed queries, the L latent columns first, then R; and c, the input of
        `index_queries`. In x's dtype.

    Raises:
        ValueError: x is not [T, D], or its dtype is not that of the projections.

    Gradients: of x and the weights, by autograd.
    Cost: 2·T·(D·Q + Q·H·(P+R) + H·P·L) FLOPs.
    Source: DeepSeek-V2 (2024), eq. 6 to 12 and section 2.1.2 (absorption); DeepSeek-V3.2-Exp, inference/model.py.
    """
    _check(params, x_TD, config, "latent_queries")
    nope_THP, rope_THR, q_latent_TQ = _heads_of(params, x_TD, cos, sin, config)
    return _absorbed(params, nope_THP, rope_THR, config), q_latent_TQ


def head_queries(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    cos: Float[Tensor, "T F"],
    sin: Float[Tensor, "T F"],
    *,
    config: SFAConfig,
) -> tuple[Float[Tensor, "T H X"], Float[Tensor, "T Q"]]:
    """Project hidden states to the queries of each head, `latent_queries` before absorption.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm.
        cos: cosines of the tokens' positions, from `rope_cos_sin`.
        sin: sines, likewise.
        config: sizes, pairing, epsilon.

    Returns:
        ``(q_THX, q_latent_TQ)``, X = P + R: ``[q_nope ; rotate(q_rope)]``, and c as in `latent_queries`.

    Raises:
        ValueError: as `latent_queries`.

    Gradients: of x and the weights, by autograd.
    Cost: 2·T·(D·Q + Q·H·(P+R)) FLOPs.
    Source: DeepSeek-V2 (2024), eq. 6 to 12.
    """
    _check(params, x_TD, config, "head_queries")
    nope_THP, rope_THR, q_latent_TQ = _heads_of(params, x_TD, cos, sin, config)
    return torch.cat([nope_THP, rope_THR], dim=-1), q_latent_TQ


def absorb_queries(params: LayerParams, q_THX: Float[Tensor, "T H X"], *, config: SFAConfig) -> Float[Tensor, "T H E"]:
    """Absorb the up-projection of keys into queries: from `head_queries` to `latent_queries`.

    Args:
        params: for ``kv_b_proj``.
        q_THX: queries of each head.
        config: sizes.

    Returns:
        q_THE = ``[q_nope W_UK ; q_rope]``.

    Gradients: of q and ``kv_b_proj``, by autograd.
    Cost: 2·T·H·P·L FLOPs.
    Source: DeepSeek-V2 (2024), section 2.1.2.
    """
    nope_THP, rope_THR = q_THX.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    return _absorbed(params, nope_THP, rope_THR, config)


def latent_keys(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    cos: Float[Tensor, "T F"],
    sin: Float[Tensor, "T F"],
    *,
    config: SFAConfig,
) -> Float[Tensor, "T E"]:
    """Project hidden states to the rows that attention compares with and sums: one per token, for all heads.

    ``[c ; k] = x W_kvaᵀ``, ``kv = [rms_norm(c) ; rotate(k)]``. The rope part is not normalised. A row's value is its
    first L columns.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm.
        cos: cosines of the tokens' positions, from `rope_cos_sin`.
        sin: sines, likewise.
        config: sizes, pairing, epsilon.

    Returns:
        kv_TE in x's dtype, E = L + R.

    Raises:
        ValueError: x is not [T, D], or its dtype is not that of the projections.

    Gradients: of x and the weights, by autograd.
    Cost: 2·T·D·E FLOPs.
    Source: DeepSeek-V2 (2024), eq. 9 and 14 to 16; DeepSeek-V3.2-Exp, inference/model.py.
    """
    _check(params, x_TD, config, "latent_keys")
    with without_autocast(x_TD):
        kv_TE = linear(x_TD, params.kv_a_proj)
    latent_TL, rope_TR = kv_TE.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    latent_TL = rms_norm(latent_TL, params.kv_a_layernorm, config.latent_norm_eps)
    return torch.cat([latent_TL, rotate(rope_TR, cos, sin, pairing=config.rope_pairing)], dim=-1)


def latent_projections(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    cos: Float[Tensor, "T F"],
    sin: Float[Tensor, "T F"],
    *,
    config: SFAConfig,
    implementation: Implementation = None,
) -> Projections:
    """Compute `latent_queries` and `latent_keys` of the same tokens; the place for a fused device op.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm.
        cos: cosines of the tokens' positions.
        sin: sines, likewise.
        config: sizes, pairing, epsilon.
        implementation: "reference" and "blockwise" are the plain composition, "npu" is Ascend's fused operator on
            `npu.prepare_params`; None chooses for the device. A callable takes the same arguments but this one.

    Returns:
        ``(q_THE, q_latent_TQ, kv_TE)``.

    Raises:
        ValueError: as the two functions, or an implementation that can't run.

    Gradients: as the two functions.
    Cost: theirs together.
    Source: as the two functions; the fused form is that of the Ascend operator npu_mla_prolog_v3.
    """
    match choose("latent_projections", implementation, params, x_TD, cos, sin, config=config):
        case "npu":
            _check(params, x_TD, config, "latent_projections")
            return npu.latent_projections(params, x_TD, cos, sin, config=config)
        case str():
            q_THE, q_latent_TQ = latent_queries(params, x_TD, cos, sin, config=config)
            return q_THE, q_latent_TQ, latent_keys(params, x_TD, cos, sin, config=config)
        case custom:
            return custom(params, x_TD, cos, sin, config=config)


def latent_output(params: LayerParams, out_THL: Float[Tensor, "T H L"], *, config: SFAConfig) -> Float[Tensor, "T D"]:
    """Project the attention's weighted latents to hidden states.

    ``y = flatten(out W_UVᵀ per head) W_oᵀ``.

    Args:
        params: the layer's weights.
        out_THL: weighted sums of latents per head, from `sparse_attention` or `dense_attention`.
        config: gives H, P and V.

    Returns:
        y_TD, to be added to the residual stream.

    Raises:
        ValueError: out is not [T, H, L].

    Gradients: of out and the weights, by autograd.
    Cost: 2·T·(H·V·L + H·V·D) FLOPs.
    Source: DeepSeek-V2 (2024), eq. 10 and section 2.1.2; DeepSeek-V3.2-Exp, inference/model.py.
    """
    want = (config.num_attention_heads, config.kv_lora_rank)
    require(tuple(out_THL.shape[1:]) == want, "latent_output", f"out must be [T, {want[0]}, {want[1]}]", out_THL.shape)
    require_float("latent_output", out=out_THL, projections=params.o_proj)
    return output_of_heads(params, head_values(params, out_THL, config=config))


def head_values(params: LayerParams, out_THL: Float[Tensor, "T H L"], *, config: SFAConfig) -> Float[Tensor, "T H V"]:
    """Turn weighted latents into the weighted values of each head, ``out W_UVᵀ``: the first half of `latent_output`.

    Args:
        params: for ``kv_b_proj``.
        out_THL: weighted sums of latents per head.
        config: gives H, P and V.

    Returns:
        value_THV.

    Gradients: of out and ``kv_b_proj``, by autograd.
    Cost: 2·T·H·V·L FLOPs.
    Source: DeepSeek-V2 (2024), section 2.1.2.
    """
    _, w_uv_HVL = split_kv_b(params.kv_b_proj, config)
    with without_autocast(out_THL):
        return matmul(out_THL.transpose(0, 1), w_uv_HVL.mT).transpose(0, 1)


def output_of_heads(params: LayerParams, value_THV: Float[Tensor, "T H V"]) -> Float[Tensor, "T D"]:
    """Project the values of all heads to hidden states: the second half of `latent_output`.

    Args:
        params: for ``o_proj``.
        value_THV: weighted values of each head.

    Returns:
        y_TD.

    Gradients: of the values and ``o_proj``, by autograd.
    Cost: 2·T·H·V·D FLOPs.
    Source: DeepSeek-V2 (2024), eq. 10.
    """
    with without_autocast(value_THV):
        return linear(rearrange(value_THV, "t h v -> t (h v)"), params.o_proj)


def _heads_of(
    params: LayerParams, x_TD: Tensor, cos: Tensor, sin: Tensor, config: SFAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each head's query without and with rope, and the latent query."""
    with without_autocast(x_TD):
        q_latent_TQ = rms_norm(linear(x_TD, params.q_a_proj), params.q_a_layernorm, config.latent_norm_eps)
        q = rearrange(linear(q_latent_TQ, params.q_b_proj), "t (h x) -> t h x", h=config.num_attention_heads)
    nope_THP, rope_THR = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    return nope_THP, rotate(rope_THR, cos, sin, pairing=config.rope_pairing), q_latent_TQ


def _absorbed(params: LayerParams, nope_THP: Tensor, rope_THR: Tensor, config: SFAConfig) -> Tensor:
    w_uk_HPL, _ = split_kv_b(params.kv_b_proj, config)
    with without_autocast(nope_THP):
        return torch.cat([matmul(nope_THP.transpose(0, 1), w_uk_HPL).transpose(0, 1), rope_THR], dim=-1)


def _check(params: LayerParams, x_TD: Tensor, config: SFAConfig, function: str) -> None:
    require(
        x_TD.ndim == 2 and x_TD.shape[1] == config.hidden_size,
        function,
        f"x must be [T, {config.hidden_size}]",
        tuple(x_TD.shape),
    )
    require_float(function, x=x_TD, projections=params.q_a_proj)
