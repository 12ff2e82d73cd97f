"""Measure a live transformers DSA model: its loss with k keys per query, and what the selections keep, layer by layer.

The model is left as it was: weights, buffers, training flags, hooks, and torch's random state.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .batch import Batch
from .config import SFAConfig
from .evaluate import evaluate_layer
from .hf import attention_modules, layer_params, module_config, real_tokens, replace_attention
from .implementation import Implementation
from .layer import LayerOutput, sfa_layer
from .params import LayerParams
from .precision import require, wide
from .selection_stats import SelectionStats, empty_stats, merge_stats, reduce_tensors
from .selectors import Selector

TokenBatch = Tensor | Mapping[str, Any]
"""Token numbers [B, T], or what the model takes by keyword: input_ids, and maybe attention_mask, labels and others."""
Reduce = Callable[[Tensor], Tensor]
"""Takes one float64 vector and returns its sum over ranks, as ``comm.all_reduce`` does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelStats:
    """Sums over batches: of the loss, and of what each layer's selection keeps."""

    loss_sum: Tensor  # float64, Σ -ln p over predicted tokens
    tokens: Tensor  # float64, predicted
    layers: dict[int, SelectionStats]

    def merge(self, other: "ModelStats") -> "ModelStats":
        """Return the sums over both parts, in any grouping the same."""
        none = empty_stats(self.loss_sum.device)
        numbers = sorted({*self.layers, *other.layers})
        layers = {i: self.layers.get(i, none).merge(other.layers.get(i, none)) for i in numbers}
        return ModelStats(loss_sum=self.loss_sum + other.loss_sum, tokens=self.tokens + other.tokens, layers=layers)

    @property
    def loss(self) -> float:
        """Mean -ln p of a predicted token, in nats; NaN where none was predicted."""
        count = float(self.tokens)
        return float(self.loss_sum) / count if count else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def all_layers(self) -> SelectionStats:
        """The sums over layers: each query of each layer counts once."""
        return merge_stats(list(self.layers.values()))


def evaluate_model(
    model: nn.Module,
    batches: Iterable[TokenBatch],
    *,
    select: Selector | None = None,
    topk: int | None = None,
    other: Selector | None = None,
    rows: int | None = 256,
    layers: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    reduce: Reduce | None = None,
    config: SFAConfig | None = None,
    params_of: Callable[[nn.Module], LayerParams] = layer_params,
    implementation: Implementation = None,
) -> ModelStats:
    """Run a model over token batches with k keys per query, and measure its loss and its selections.

    The model runs as under `use_sfa`, in eval mode and without gradients. Each layer measured is measured on the
    hidden states that reach it in this run: `evaluate_layer`.

    Args:
        model: a transformers model of type ``deepseek_v32`` or ``glm_moe_dsa``, with a language model's head.
        batches: token numbers [B, T], or keyword arguments of the model. Tokens with a label of -100, or without
            labels those that the attention mask hides, are not predicted. The first of a row never is.
        select: how queries choose keys; None is the lightning indexer.
        topk: keys per query, >= 1; None is the model's own number.
        other: another selector, for the metric ``overlap``.
        rows: queries to measure per layer and batch, of those that see more than ``topk`` keys; None is all. Exact
            masses cost dense attention; a sample has standard errors.
        layers: numbers of the layers to measure; None is all, none leaves only the loss.
        generator: draws the rows, on the CPU; None is a new one with seed 0. Ranks need seeds of their own: standard
            errors hold where draws are independent.
        reduce: adds up one vector over ranks, called once, at the end: each rank gives its own batches and gets the
            numbers of all.
        config: sizes and constants of attention to use instead of the live model's (`module_config`).
        params_of: gives a module's weights, where they are to be others than its own.
        implementation: of the layers that run; measuring is not affected.

    Returns:
        `ModelStats`.

    Raises:
        ValueError: as `use_sfa` and `evaluate_layer`; a layer that the model has not, or a batch without tokens.

    Gradients: none.
    Cost: a forward pass, and dense attention's weights of the rows measured. Waits for the device once per layer.
    Source: as `selection_stats`.
    """
    require(topk is None or topk >= 1, "evaluate_model", "topk must be >= 1", topk)
    require(rows is None or rows >= 1, "evaluate_model", "rows must be >= 1 or None", rows)
    modules = attention_modules(model)
    number = {id(module): layer for layer, module in enumerate(modules)}
    measured = list(range(len(modules)) if layers is None else layers)
    known = all(layer in range(len(modules)) for layer in measured)
    require(known, "evaluate_model", f"layers must be of 0..{len(modules) - 1}", measured)
    config = module_config(modules[0]) if config is None else config
    config = config if topk is None else replace(config, index_topk=topk)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    found: dict[int, SelectionStats] = {}

    def attend(
        module: nn.Module, x_TD: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], selection: Tensor | None
    ) -> LayerOutput:
        params, layer = params_of(module), number[id(module)]
        how = select if selection is None else None
        output = sfa_layer(
            params,
            x_TD,
            batch,
            config=config,
            selection=selection,
            select=how,
            rope=rope,
            implementation=implementation,
        )
        if layer in measured:
            found[layer] = evaluate_layer(
                params,
                x_TD,
                real_tokens(batch),
                config=config,
                k=config.index_topk,
                selection=output.selection_TK,
                other=other,
                rope=rope,
                rows=rows,
                generator=generator,
            )
        return output

    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))  # a DataLoader draws its seed, a selector may too
        stack.enter_context(_evaluating(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(replace_attention(model, attend, config=config))
        stats: ModelStats | None = None
        for batch in batches:
            found = {}
            loss_sum, tokens = batch_loss(model, batch)
            part = ModelStats(loss_sum=loss_sum, tokens=tokens, layers=found)
            stats = part if stats is None else stats.merge(part)
    if stats is None:
        device = next((p.device for p in model.parameters()), None)
        none = empty_stats(device)
        stats = ModelStats(loss_sum=none.queries, tokens=none.queries, layers=dict.fromkeys(sorted(measured), none))
    return stats if reduce is None else _reduced(stats, reduce)


def batch_loss(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return ``(Σ -ln p, count)`` over the predicted tokens of a batch, as float64 tensors.

    Args:
        model: a causal language model of transformers.
        batch: as `evaluate_model` takes it.

    Raises:
        ValueError: a batch without ``input_ids``, or labels of another shape.
    """
    named = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, labels = named.get("input_ids"), named.pop("labels", None)
    fits = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] >= 1
    rule = "a batch must have input_ids [B, T], T >= 1"
    require(fits, "evaluate_model", rule, tuple(ids.shape) if isinstance(ids, Tensor) else sorted(named))
    assert isinstance(ids, Tensor)
    if labels is None:
        mask = named.get("attention_mask")
        hidden = torch.zeros_like(ids, dtype=torch.bool) if mask is None or mask.ndim != 2 else mask == 0
        labels = ids.masked_fill(hidden, -100)
        labels = torch.where(hidden.roll(1, dims=1), -100, labels)  # nothing stands before a row's first token
    same = isinstance(labels, Tensor) and labels.shape == ids.shape
    got = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
    require(same, "evaluate_model", f"labels must be {list(ids.shape)}", got)
    device = next(model.parameters()).device
    named = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in named.items()}
    logits = model(**{**named, "use_cache": False}).logits[:, :-1].flatten(0, 1)
    target = labels[:, 1:].flatten().to(logits.device, torch.int64)
    losses = cross_entropy(logits.to(wide(logits.dtype)), target, reduction="none", ignore_index=-100)
    return losses.double().sum(), (target != -100).sum().double()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and every module back into its own mode on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _reduced(stats: ModelStats, reduce: Reduce) -> ModelStats:
    layers = [(i, name, x) for i, part in stats.layers.items() for name, x in vars(part).items()]
    loss_sum, tokens, *sums = reduce_tensors([stats.loss_sum, stats.tokens, *(x for _, _, x in layers)], reduce)
    fields: dict[int, dict[str, Tensor]] = {i: {} for i in stats.layers}
    for (i, name, _), x in zip(layers, sums, strict=True):
        fields[i][name] = x
    found = {i: SelectionStats(**parts) for i, parts in fields.items()}
    return ModelStats(loss_sum=loss_sum, tokens=tokens, layers=found)
