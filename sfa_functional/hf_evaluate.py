"""Measure a transformers DSA model on token windows: dense perplexity, and parity with transformers.

The model's embedding, MLPs and head are transformers' code; its attention is this library's, except where the two
are compared. Nothing here changes the model.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .attention import dense_attention
from .batch import Batch, global_selection, local_selection
from .config import SFAConfig
from .evaluate import difference
from .hf import attention_modules, layer_params, module_config, replace_attention
from .latent import latent_output, latent_projections
from .layer import LayerOutput, sfa_layer
from .params import LayerParams, init_params
from .precision import wide
from .selection_measures import selection_overlap

ParamsOf = Callable[[nn.Module], LayerParams]


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How this library and transformers differ on one model; `combine` adds up several."""

    max_rel: float  # largest difference of any attention layer's output, over the largest magnitude
    logits_max_rel: float  # the same of the logits, after all layers in a row
    overlap: float  # sum over queries of the share of transformers' selected keys that ours selects too
    queries: int  # queries in that sum: those that see more than k keys, in every layer
    seconds_ours: float  # spent in attention layers
    seconds_transformers: float

    @property
    def selection_overlap(self) -> float:
        """The mean share; 1 where no query had a choice."""
        return self.overlap / self.queries if self.queries else 1.0


def combine(parts: Sequence[Parity]) -> Parity:
    """Return the worst difference, the pooled overlap and the summed times of several comparisons."""
    return Parity(
        max_rel=max(part.max_rel for part in parts),
        logits_max_rel=max(part.logits_max_rel for part in parts),
        overlap=sum(part.overlap for part in parts),
        queries=sum(part.queries for part in parts),
        seconds_ours=sum(part.seconds_ours for part in parts),
        seconds_transformers=sum(part.seconds_transformers for part in parts),
    )


def token_windows(ids: Tensor, context: int) -> list[Tensor]:
    """Cut tokens into windows of ``context`` tokens, several full ones to a batch; a rest of one token is dropped.

    Args:
        ids: token numbers, one-dimensional.
        context: tokens of a window, >= 2.

    Returns:
        Batches [B, context] of at most 2048 tokens (at least one window), then the shorter rest [1, n].
    """
    full = len(ids) // context
    windows = list(ids[: full * context].view(full, context).split(max(1, 2048 // context))) if full else []
    rest = ids[full * context :]
    return [*windows, rest[None]] if len(rest) >= 2 else windows


def dense_perplexity(
    model: nn.Module, windows: Sequence[Tensor], *, config: SFAConfig, tick: Callable[[], None] = lambda: None
) -> float:
    """Return the perplexity with every query attending to all that it sees.

    ``exp(mean over predicted tokens of -ln p)``; the first token of a window is not predicted.

    Args:
        model: a transformers DSA model.
        windows: token batches from `token_windows`.
        config: sizes and constants of its attention.
        tick: called after every window batch.
    """

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], _: Tensor | None
    ) -> LayerOutput:
        params = layer_params(module)
        q_THE, _q_latent_TQ, kv_TE = latent_projections(params, x_TD, *rope, config=config)
        scale, value_dim = config.softmax_scale, config.kv_lora_rank
        out_THL, _lse_TH = dense_attention(q_THE, kv_TE, batch.start_T, batch.end_T, scale=scale, value_dim=value_dim)
        nothing = torch.empty(x_TD.shape[0], 0, dtype=torch.int32, device=x_TD.device)
        return LayerOutput(latent_output(params, out_THL, config=config), nothing, None)

    with replace_attention(model, attend, config=config):
        return _perplexity(model, windows, tick)


def untrained_indexers(model: nn.Module, *, config: SFAConfig, seed: int = 0) -> ParamsOf:
    """Return a ``params_of`` in which every indexer is drawn anew; the model is left alone.

    Args:
        model: a transformers DSA model.
        config: sizes of its attention.
        seed: of the one generator that draws all layers.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for layer, module in enumerate(attention_modules(model)):
        weight = layer_params(module).kv_b_proj
        fresh = init_params(config, layer=layer, generator=generator, dtype=weight.dtype, device=weight.device)
        drawn[id(module)] = fresh.indexer
    return lambda module: replace(layer_params(module), indexer=drawn[id(module)])


def parity(model: nn.Module, windows: Sequence[Tensor], *, k: int, tick: Callable[[], None] = lambda: None) -> Parity:
    """Compare this library's attention with transformers' own, layer by layer and at the logits.

    A layer's output is compared on the hidden states that reach transformers' layer and on the selection that it
    makes, replayed through ours: a near-tie at the indexer's cut, or in an expert's router further up, may flip and
    says nothing about the arithmetic. Our own selections are made beside it and compared as sets on the queries that
    see more than k keys. The logits are those of the whole model with these layers, on its own hidden states; there
    a router may flip. The live model is followed as it is (`module_config`).

    Args:
        model: a transformers DSA model whose attention implementation is "sdpa" or "eager".
        windows: token batches from `token_windows`; the first is also run once beforehand, untimed.
        k: keys per query, >= 1.
        tick: called after every window batch.

    Returns:
        `Parity` over all windows.
    """
    _compare(model, windows[0], _record(model, windows[0], k), k)  # warm up
    parts = []
    for ids in windows:
        parts.append(_compare(model, ids, _record(model, ids, k), k))
        tick()
    return combine(parts)


class _Recorded(NamedTuple):
    """One forward pass of transformers' own attention."""

    logits: Tensor
    inputs: list[Tensor]  # of every attention layer, [B·T, D]
    outputs: list[Tensor]  # of every attention layer, [B·T, D]
    selections: list[Tensor]  # of every attention layer, [B·T, K], unordered, later positions among them
    seconds: float  # in attention layers


def _record(model: nn.Module, ids: Tensor, k: int) -> _Recorded:
    """Run the model as it is, its indexers selecting k keys; hooks and numbers are taken back afterwards."""
    modules: list[Any] = list(attention_modules(model))
    indexers = [module.indexer for module in modules if module.indexer is not None]
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    selections: list[Tensor] = []
    clock: list[float] = []

    def before(_module: nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
        inputs.append(named["hidden_states"].flatten(0, 1))
        clock.append(-time.perf_counter())

    def selected(_module: nn.Module, _inputs: Any, indices: Tensor) -> None:
        selections.append(indices.flatten(0, 1).to(torch.int32))

    def after(_module: nn.Module, _inputs: Any, result: tuple[Any, ...]) -> None:
        clock.append(time.perf_counter())
        outputs.append(result[0].flatten(0, 1))
        if len(selections) < len(outputs):  # a shared layer attends to the selection before
            selections.append(selections[-1])

    kept = [indexer.index_topk for indexer in indexers]
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(after) for module in modules]
    hooks += [indexer.register_forward_hook(selected) for indexer in indexers]
    try:
        for indexer in indexers:
            indexer.index_topk = k
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
    finally:
        for indexer, number in zip(indexers, kept, strict=True):
            indexer.index_topk = number
        for hook in hooks:
            hook.remove()
    return _Recorded(logits, inputs, outputs, selections, sum(clock))


def _compare(model: nn.Module, ids: Tensor, theirs: _Recorded, k: int) -> Parity:
    """Run the model through this library on recorded selections, making our own beside them."""
    config = replace(module_config(attention_modules(model)[0]), index_topk=k)
    outputs: list[Tensor] = []
    own: list[Tensor] = []
    seconds: list[float] = []
    overlaps: list[Tensor] = []

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], _: Tensor | None
    ) -> LayerOutput:
        params, layer = layer_params(module), len(outputs)
        shared = None if params.indexer is not None else own[-1]
        began = time.perf_counter()
        mine = sfa_layer(params, theirs.inputs[layer], batch, config=config, selection=shared, rope=rope)
        seconds.append(time.perf_counter() - began)
        own.append(mine.selection_TK)
        seen_TK = local_selection(global_selection(theirs.selections[layer], batch), batch)
        choosing_T = batch.end_T - batch.start_T > k
        overlaps.append(selection_overlap(mine.selection_TK[choosing_T], seen_TK[choosing_T]))
        outputs.append(sfa_layer(params, theirs.inputs[layer], batch, config=config, selection=seen_TK, rope=rope).y_TD)
        return sfa_layer(params, x_TD, batch, config=config, selection=seen_TK, rope=rope)

    with torch.no_grad(), replace_attention(model, attend, config=config):
        logits = model(ids, use_cache=False).logits
    pairs = zip(outputs, theirs.outputs, strict=True)
    overlap_T = torch.cat(overlaps)
    return Parity(
        max_rel=max(difference(ours, other).max_rel for ours, other in pairs),
        logits_max_rel=difference(logits, theirs.logits).max_rel,
        overlap=float(overlap_T.double().sum()),
        queries=len(overlap_T),
        seconds_ours=sum(seconds),
        seconds_transformers=theirs.seconds,
    )


def _perplexity(model: nn.Module, windows: Sequence[Tensor], tick: Callable[[], None]) -> float:
    total, count = 0.0, 0
    for ids in windows:
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        target = ids[:, 1:].flatten()
        total += float(cross_entropy(logits.to(wide(logits.dtype)), target, reduction="none").double().sum())
        count += len(target)
        tick()
    mean = total / count
    return math.inf if mean > 700 else math.exp(mean)
