"""Run a Hugging Face transformers model (DeepSeek-V3.2, GLM-5) with its attention computed by this library.

The model stays as it is: only the ``forward`` of its attention modules is replaced, on the instances and for the
duration of a ``with``; weights are read at call time, so a model in training is always current. transformers' cache
object stays the one place where keys are kept: it is written and read as transformers' own attention does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Batch
from .config import SFAConfig
from .hf_cache import Store, cache_store, cached_layer, require_index_cache
from .hf_params import layer_params, load_params
from .implementation import Implementation
from .layer import LayerOutput, sfa_layer
from .precision import require, without_autocast
from .replay import Recording, Step, replay_selection
from .rotary import rope_cos_sin
from .selectors import Selector

__all__ = [
    "Attend",
    "AttendCached",
    "attention_modules",
    "layer_params",
    "load_params",
    "mask_to_batch",
    "module_config",
    "replace_attention",
    "use_sfa",
]

Attend = Callable[[nn.Module, Tensor, Batch, tuple[Tensor, Tensor], Tensor | None], LayerOutput]
"""``attend(module, x_TD, batch, (cos, sin), selection_TK or None) -> LayerOutput``."""

AttendCached = Callable[[nn.Module, Tensor, Batch, tuple[Tensor, Tensor], Tensor | None, Store], LayerOutput]
"""`Attend` beside a cache: the batch's key rows are those that ``store`` returns; it must be called, once."""


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


@contextmanager
def use_sfa(
    model: nn.Module,
    *,
    topk: int | None = None,
    select: Selector | None = None,
    implementation: Implementation = None,
    config: SFAConfig | None = None,
    record: Callable[[Step], object] | None = None,
    replay: Recording | None = None,
) -> Iterator[nn.Module]:
    """Run a transformers DSA model through `sfa_layer`, with its own live weights, and restore it on exit.

    Batches, padding on either side and packed documents work: visible ranges are read from the attention mask. Layers
    that share a selection get it from the layer before, as in the model. With a cache (``generate()``, beam search and
    assisted decoding included) the parts of `sfa_layer` run on the rows that transformers' own cache holds, so a cache
    filled outside of the ``with`` goes on inside, and the reverse.

    FSDP2 (``fully_shard``) and tensor-parallel plans work, transformers' own and torch's: the numbers are those of one
    process. Sharded weights are gathered for each layer (`layer_params`), and every rank computes all heads.

    A training run attends to what a rollout attended to:

        steps = []
        with use_sfa(model, record=steps.append):
            ids = model.generate(prompt, ...)
        with use_sfa(model, replay=record_selections(steps)):
            logits = model(ids[:, :-1]).logits  # the last token was drawn and never went through the model

    Args:
        model: of type ``deepseek_v32`` or ``glm_moe_dsa``.
        topk: keys per query, >= 1; None is the model's own number. At least the context makes attention dense.
        select: another way to choose keys; None is the lightning indexer.
        implementation: passed on to `sfa_layer`.
        config: sizes and constants to use instead of the live model's (`module_config`).
        record: takes the `Step` of every layer that chose, in every forward pass. Not for beams, which change rows, nor
            for assisted decoding, whose rejected drafts come again; nothing beside ``replay``.
        replay: what to attend to instead of choosing, `replay_selection` of each layer; of the same requests, in order.

    Yields:
        The model.

    Raises:
        ValueError: no DSA attention, topk < 1, ``replay`` beside ``select`` or of another number of keys, a model that
            this library can't compute; in the forward: tokens that were not recorded, a cache that keeps no index keys
            (dynamic and static ones made for the model do, quantised ones don't), a mask that is no range per query,
            attention dropout in training, hidden states that are shards (sequence parallelism), or weights that
            `layer_params` refuses. The layer at fault caches nothing then.

    Gradients: of inputs and weights, as without the library; indexers get none. Activation checkpointing runs a layer
        again in backward. With transformers' own, enabled before the ``with``, ``backward()`` may come after it; with
        another one it belongs inside, or the recomputation is transformers'. A ``select`` that draws numbers must
        draw the same ones when it runs again.
    Precision: under ``torch.autocast`` attention is computed in the weights' dtype, and the result cast back.
    Source: Hugging Face transformers 5.24, models/deepseek_v32, models/glm_moe_dsa and cache_utils.py.
    """
    require(topk is None or topk >= 1, "use_sfa", "topk must be >= 1", topk)
    used = module_config(attention_modules(model)[0]) if config is None else config
    used = used if topk is None else replace(used, index_topk=topk)
    require(select is None or replay is None, "use_sfa", "select= and replay= exclude each other", "both")
    if replay is not None:
        rule = f"a recording must hold {used.index_topk} keys per query"
        require(replay.topk == used.index_topk, "use_sfa", rule, replay.topk)
    number = {id(module): layer for layer, module in enumerate(attention_modules(model))}

    def given(module: nn.Module, batch: Batch, selection: Tensor | None) -> Tensor | None:
        return selection if replay is None else replay_selection(replay, number[id(module)], batch)

    def told(module: nn.Module, batch: Batch, selection: Tensor | None, output: LayerOutput) -> LayerOutput:
        if record is not None and selection is None:
            record(Step(number[id(module)], batch, output.selection_TK.detach()))
        return output

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], selection: Tensor | None
    ) -> LayerOutput:
        selection = given(module, batch, selection)
        output = sfa_layer(
            layer_params(module),
            x_TD,
            batch,
            config=used,
            selection=selection,
            select=select if selection is None else None,
            rope=rope,
            implementation=implementation,
        )
        return told(module, batch, selection, output)

    def attend_cached(
        module: nn.Module,
        x_TD: Tensor,
        batch: Batch,
        rope: tuple[Tensor, Tensor],
        selection: Tensor | None,
        store: Store,
    ) -> LayerOutput:
        selection = given(module, batch, selection)
        output = cached_layer(
            layer_params(module),
            x_TD,
            batch,
            store,
            config=used,
            selection=selection,
            select=select,
            rope=rope,
            implementation=implementation,
        )
        return told(module, batch, selection, output)

    with replace_attention(model, attend, config=used, attend_cached=attend_cached):
        yield model


@contextmanager
def replace_attention(
    model: nn.Module, attend: Attend, *, config: SFAConfig, attend_cached: AttendCached | None = None
) -> Iterator[nn.Module]:
    """Replace the forward of every attention module by a function of packed tokens, and restore it on exit.

    Where transformers' activation checkpointing is on, a layer is recomputed with the function that it ran with, also
    if ``backward()`` comes after the exit.

    Args:
        model: of type ``deepseek_v32`` or ``glm_moe_dsa``.
        attend: called once per layer with the module, hidden states [B·T, D], the `Batch` read from the mask, cos and
            sin of the model's positions (float32, computed here), and the selection of the layer before (only in a
            layer without an indexer of its own).
        config: gives the rope, and the widths of cached rows.
        attend_cached: called instead where the model is given a cache; None refuses one.

    Yields:
        The model.
    """
    modules = attention_modules(model)
    forwards = [_forward(module, attend, attend_cached, config) for module in modules]
    checkpointed: list[Any] = [module for module in model.modules() if _CHECKPOINT in module.__dict__]
    before = [module.__dict__[_CHECKPOINT] for module in checkpointed]
    during = [_recompute_with(checkpoint, modules, forwards) for checkpoint in before]
    try:
        for module, checkpoint in zip(checkpointed, during, strict=True):
            setattr(module, _CHECKPOINT, checkpoint)
        with _installed(modules, forwards):
            yield model
    finally:
        for module, old, new in zip(checkpointed, before, during, strict=True):
            if module.__dict__.get(_CHECKPOINT) is new:  # else it was set anew in the meantime
                setattr(module, _CHECKPOINT, old)


_CHECKPOINT = "_gradient_checkpointing_func"
"""What a layer of transformers calls ``checkpoint`` through, once activation checkpointing is enabled."""


def _recompute_with(
    checkpoint: Callable[..., Any], modules: list[nn.Module], forwards: list[Callable[..., Any]]
) -> Callable[..., Any]:
    """Have a checkpointed function run with these forwards each time, not with those of the time of backward."""

    def checkpoint_with(function: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
        def run(*inputs: Any, **named: Any) -> Any:
            with _installed(modules, forwards):
                return function(*inputs, **named)

        return checkpoint(run, *inputs, **settings)

    return checkpoint_with


@contextmanager
def _installed(modules: list[nn.Module], forwards: list[Callable[..., Any]]) -> Iterator[None]:
    """Put forwards on module instances and take them off again."""
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module, forward in zip(modules, forwards, strict=True):
            module.forward = forward
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            if old is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = old


def _forward(
    module: nn.Module, attend: Attend, attend_cached: AttendCached | None, config: SFAConfig
) -> Callable[..., tuple[Any, ...]]:
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
        whole = not hasattr(hidden_states, "full_tensor")
        require(whole, "use_sfa", "hidden states must be whole, not a DTensor", type(hidden_states).__name__)
        dropout = live.training and live.attention_dropout > 0
        require(not dropout, "use_sfa", "attention_dropout must be 0 in training", live.attention_dropout)
        batch_size, length, _width = hidden_states.shape
        cache = other.get("past_key_values") if cache is None else cache
        keys, first = length, 0
        if cache is not None:
            rule = "whole forward passes only, call the model with use_cache=False"
            require(attend_cached is not None, "replace_attention", rule, "a cache")
            require_index_cache(cache, live.layer_idx)
            keys, first = cache.get_mask_sizes(length, live.layer_idx)[0], cache.get_seq_length(live.layer_idx)
        batch = mask_to_batch(attention_mask, batch_size, length, keys=keys, first=first)
        if position_ids is None:
            position_ids = (torch.arange(length, device=hidden_states.device) + first)[None]
        rope = rope_cos_sin(position_ids.expand(batch_size, length).flatten(), config)
        selection = None
        if live.indexer is None and prev_topk_indices is not None:
            selection = prev_topk_indices.flatten(0, 1).to(torch.int32)
        x_TD = hidden_states.flatten(0, 1)
        with without_autocast(x_TD):
            x_TD = x_TD.to(getattr(live.kv_b_proj, "weight", x_TD).dtype)
            if cache is None or attend_cached is None:
                output = attend(module, x_TD, batch, rope, selection)
            else:
                store = cache_store(cache, live.layer_idx, batch_size, config)
                output = attend_cached(module, x_TD, batch, rope, selection, store)
        y = output.y_TD.unflatten(0, (batch_size, length)).to(hidden_states.dtype)
        if _is_glm(module):
            return y, None, output.selection_TK.unflatten(0, (batch_size, length))
        return y, None

    return forward


def real_tokens(batch: Batch) -> Batch:
    """Take the padding behind a sequence for what it is: it sees the sequence before it, but not itself.

    To a layer it does not matter, its results are thrown away; it must not be measured or learnt from.
    """
    own_T = batch.key_start_B[batch.request_T.clamp(min=0)] + batch.position_T
    real_T = (batch.request_T >= 0) & (batch.start_T <= own_T) & (own_T < batch.end_T)
    return replace(
        batch,
        position_T=torch.where(real_T, batch.position_T, -1),
        request_T=torch.where(real_T, batch.request_T, -1),
        start_T=torch.where(real_T, batch.start_T, 0),
        end_T=torch.where(real_T, batch.end_T, 0),
    )


def mask_to_batch(
    attention_mask: Tensor | None,
    batch_size: int,
    length: int,
    *,
    keys: int | None = None,
    first: int | Tensor = 0,
) -> Batch:
    """Read a batch's visible ranges from a transformers attention mask.

    Args:
        attention_mask: [B or 1, 1, T, S]; boolean (True = visible) or additive (0 = visible).
        batch_size: B, sequences of the batch.
        length: T, tokens of each, padding included.
        keys: S, key rows of each; None is T. With a cache these are all rows that it returns.
        first: tokens of each that are cached already.

    Returns:
        A batch of B requests of T query rows and S key rows each; a token that sees nothing is padding.

    Raises:
        ValueError: no mask, another shape, or a row whose visible keys are not one run.

    Cost: O(B·T·S), and one wait for the device.
    """
    keys = length if keys is None else keys
    shape = None if attention_mask is None else tuple(attention_mask.shape)
    if attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[2:] != (length, keys):
        raise ValueError(f"use_sfa: attention_mask must be [B, 1, {length}, {keys}]; got {shape}")
    seen = attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] == 0
    seen = seen.expand(batch_size, length, keys)
    count = seen.sum(-1)
    lowest = seen.to(torch.int8).argmax(-1)
    last = keys - seen.flip(-1).to(torch.int8).argmax(-1)
    one_run = bool(((last - lowest == count) | (count == 0)).all())
    require(one_run, "use_sfa", "each query's visible keys must be one run of the attention mask", "holes")
    request = torch.arange(batch_size, device=seen.device)
    key_start = request * keys
    some = (count > 0).flatten()
    start = (key_start[:, None] + lowest).flatten()
    position = torch.arange(length, device=seen.device) + first
    return Batch(
        position_T=torch.where(some, position.repeat(batch_size), -1),
        request_T=torch.where(some, request.repeat_interleave(length), -1),
        start_T=torch.where(some, start, 0),
        end_T=torch.where(some, start + count.flatten(), 0),
        query_start_B1=torch.arange(batch_size + 1, device=seen.device) * length,
        seq_len_B=torch.zeros_like(request) + length + first,
        key_start_B=key_start,
    )
