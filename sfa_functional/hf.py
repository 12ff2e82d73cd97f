"""Run a Hugging Face transformers model (DeepSeek-V3.2, GLM-5) with its attention computed by this library.

The model stays as it is: only the ``forward`` of its attention modules is replaced, on the instances and for the
duration of a ``with``; weights are read at call time, so a model in training is always current.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Batch
from .config import SFAConfig
from .implementation import Implementation
from .layer import LayerOutput, sfa_layer
from .params import HF_NAMES, NORM_FIELDS, LayerParams, named_fields, params_from_fields
from .precision import require, without_autocast
from .rotary import rope_cos_sin
from .selectors import Selector

Attend = Callable[[nn.Module, Tensor, Batch, tuple[Tensor, Tensor], Tensor | None], LayerOutput]
"""``attend(module, x_TD, batch, (cos, sin), selection_TK or None) -> LayerOutput``."""


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a DSA model, in layer order.

    Args:
        model: a transformers model of type ``deepseek_v32`` or ``glm_moe_dsa``, or a part of one.

    Returns:
        At least one module.

    Raises:
        ValueError: there are none.
    """
    found = [m for m in model.modules() if hasattr(m, "kv_a_proj_with_mqa") and hasattr(m, "indexer")]
    require(len(found) > 0, "use_sfa", "the model must have DSA attention modules", type(model).__name__)
    return found


def module_config(module: nn.Module) -> SFAConfig:
    """Return the config of a live attention module: what its code computes, where that is not what config.json says.

    transformers 5.24 builds the latent norms with an epsilon of 1e-6 whatever ``rms_norm_eps`` says, and fixes the
    rope pairings by class whatever the interleave flags say. A live model is followed as it is.

    Args:
        module: one attention module.

    Returns:
        The config; ``index_topk`` is that of the model's config.

    Raises:
        ValueError: as `SFAConfig.from_hf`.
    """
    live: Any = module
    config = SFAConfig.from_hf(live.config.to_dict())
    return replace(
        config,
        latent_norm_eps=live.q_a_layernorm.variance_epsilon,
        rope_pairing="interleaved",
        index_rope_pairing="interleaved" if _is_glm(module) else "half",
    )


def _is_glm(module: nn.Module) -> bool:
    """Tell GLM-5's attention, which hands its selection on to the next layer, from DeepSeek-V3.2's."""
    return hasattr(module, "skip_topk")


def layer_params(module: nn.Module) -> LayerParams:
    """Take the weights of a live attention module, as they are: no copy, gradients flow into them.

    Args:
        module: a ``DeepseekV32Attention`` or ``GlmMoeDsaAttention``.

    Returns:
        `LayerParams`; ``indexer`` is None in a shared layer.

    Raises:
        ValueError: a projection that is no plain linear map (adapted, quantised) or has a bias, by name.

    Gradients: those of the module's parameters.
    """
    tensors = {}
    for field, key in HF_NAMES.items():
        owner_name, _, leaf = key.rpartition(".")
        if owner_name.startswith("indexer") and getattr(module, "indexer", None) is None:
            continue
        owner = module.get_submodule(owner_name)
        linear = type(owner) is nn.Linear or field in NORM_FIELDS
        require(linear, "layer_params", f"{owner_name} must be a plain torch.nn.Linear", type(owner).__name__)
        biased = linear and isinstance(owner, nn.Linear) and owner.bias is not None
        require(not biased, "layer_params", f"{owner_name} must have no bias", "one")
        tensors[field] = getattr(owner, leaf)
    return params_from_fields(tensors)


def load_params(module: nn.Module, params: LayerParams) -> None:
    """Copy parameters into a live attention module, in place; nothing is written if anything does not fit.

    Args:
        module: the attention module.
        params: weights of the same layer; cast to the module's dtypes.

    Raises:
        ValueError: another shape, or an indexer on one side only.
    """
    target, source = dict(named_fields(layer_params(module))), dict(named_fields(params))
    require(target.keys() == source.keys(), "load_params", f"fields must be {sorted(target)}", sorted(source))
    for name, tensor in target.items():
        fits = tensor.shape == source[name].shape
        require(fits, "load_params", f"{name} must have shape {list(tensor.shape)}", list(source[name].shape))
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])


@contextmanager
def use_sfa(
    model: nn.Module,
    *,
    topk: int | None = None,
    select: Selector | None = None,
    implementation: Implementation = None,
    config: SFAConfig | None = None,
) -> Iterator[nn.Module]:
    """Run a transformers DSA model through `sfa_layer`, with its own live weights, and restore it on exit.

    Whole forward passes without a cache: call the model with ``use_cache=False``. Batches, padding on either side
    and packed documents work: visible ranges are read from the attention mask. Layers that share a selection get it
    from the layer before, as in the model.

    Args:
        model: of type ``deepseek_v32`` or ``glm_moe_dsa``.
        topk: keys per query, >= 1; None is the model's own number. At least the context makes attention dense.
        select: another way to choose keys; None is the lightning indexer.
        implementation: passed on to `sfa_layer`.
        config: sizes and constants to use instead of the live model's (`module_config`).

    Yields:
        The model.

    Raises:
        ValueError: no DSA attention, topk < 1, a model that this library can't compute; in the forward: a cache, a
            mask that is no range per query, or attention dropout in training.

    Gradients: of inputs and weights, as without the library; indexers get none. Activation checkpointing runs the
        forward again in backward, so ``backward()`` belongs inside the ``with`` too: outside it, the recomputation
        is transformers' own.
    Precision: under ``torch.autocast`` attention is computed in the weights' dtype, and the result cast back.
    Source: Hugging Face transformers 5.24, models/deepseek_v32 and models/glm_moe_dsa.
    """
    require(topk is None or topk >= 1, "use_sfa", "topk must be >= 1", topk)
    used = module_config(attention_modules(model)[0]) if config is None else config
    used = used if topk is None else replace(used, index_topk=topk)

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], selection: Tensor | None
    ) -> LayerOutput:
        return sfa_layer(
            layer_params(module),
            x_TD,
            batch,
            config=used,
            selection=selection,
            select=select if selection is None else None,
            rope=rope,
            implementation=implementation,
        )

    with replace_attention(model, attend, config=used):
        yield model


@contextmanager
def replace_attention(model: nn.Module, attend: Attend, *, config: SFAConfig) -> Iterator[nn.Module]:
    """Replace the forward of every attention module by a function of packed tokens, and restore it on exit.

    Args:
        model: of type ``deepseek_v32`` or ``glm_moe_dsa``.
        attend: called once per layer with the module, hidden states [B·T, D], the `Batch` read from the mask, cos and
            sin of the model's positions (float32, computed here), and the selection of the layer before (only in a
            layer without an indexer of its own).
        config: gives the rope.

    Yields:
        The model.
    """
    modules = attention_modules(model)
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module in modules:
            module.forward = _forward(module, attend, config)
        yield model
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


def _forward(module: nn.Module, attend: Attend, config: SFAConfig) -> Callable[..., tuple[Any, ...]]:
    live: Any = module

    def forward(
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **other: Any,
    ) -> tuple[Any, ...]:
        cache = other.get("past_key_values") if cache is None else cache
        require(cache is None, "use_sfa", "whole forward passes only, call the model with use_cache=False", "a cache")
        dropout = live.training and live.attention_dropout > 0
        require(not dropout, "use_sfa", "attention_dropout must be 0 in training", live.attention_dropout)
        batch_size, length, _width = hidden_states.shape
        batch = mask_to_batch(attention_mask, batch_size, length)
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden_states.device)[None]
        cos, sin = rope_cos_sin(position_ids.expand(batch_size, length).flatten(), config)
        selection = None
        if live.indexer is None and prev_topk_indices is not None:
            selection = prev_topk_indices.flatten(0, 1).to(torch.int32)
        x_TD = hidden_states.flatten(0, 1)
        with without_autocast(x_TD):
            output = attend(module, x_TD.to(live.kv_b_proj.weight.dtype), batch, (cos, sin), selection)
        y = output.y_TD.unflatten(0, (batch_size, length)).to(hidden_states.dtype)
        if _is_glm(module):
            return y, None, output.selection_TK.unflatten(0, (batch_size, length))
        return y, None

    return forward


def mask_to_batch(attention_mask: Tensor | None, batch_size: int, length: int) -> Batch:
    """Read a batch's visible ranges from a transformers attention mask.

    Args:
        attention_mask: [B or 1, 1, T, T]; boolean (True = visible) or additive (0 = visible).
        batch_size: B, sequences of the batch.
        length: T, tokens of each, padding included.

    Returns:
        A batch of B requests of T rows each; a token that sees nothing is padding.

    Raises:
        ValueError: no mask, another shape, or a row whose visible keys are not one run.

    Cost: O(B·T²), and one wait for the device.
    """
    shape = None if attention_mask is None else tuple(attention_mask.shape)
    if attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[2:] != (length, length):
        raise ValueError(f"use_sfa: attention_mask must be [B, 1, {length}, {length}]; got {shape}")
    seen = attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] == 0
    seen = seen.expand(batch_size, length, length)
    count = seen.sum(-1)
    first = seen.to(torch.int8).argmax(-1)
    last = length - seen.flip(-1).to(torch.int8).argmax(-1)
    one_run = bool(((last - first == count) | (count == 0)).all())
    require(one_run, "use_sfa", "each query's visible keys must be one run of the attention mask", "holes")
    request = torch.arange(batch_size, device=seen.device)
    key_start = request * length
    some = (count > 0).flatten()
    start = (key_start[:, None] + first).flatten()
    return Batch(
        position_T=torch.where(some, torch.arange(length, device=seen.device).repeat(batch_size), -1),
        request_T=torch.where(some, request.repeat_interleave(length), -1),
        start_T=torch.where(some, start, 0),
        end_T=torch.where(some, start + count.flatten(), 0),
        query_start_B1=torch.arange(batch_size + 1, device=seen.device) * length,
        seq_len_B=torch.full_like(request, length),
        key_start_B=key_start,
    )
