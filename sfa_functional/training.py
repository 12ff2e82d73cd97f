"""What an indexer learns from: the divergence from the attention that it serves, with the recipe's detach rules."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from .batch import Batch, global_selection
from .config import SFAConfig
from .indexer import index_keys, index_queries, index_weights
from .latent import latent_projections, latent_queries
from .layer import check_layer
from .losses import indexer_kl
from .params import LayerParams
from .precision import require, without_autocast
from .rotary import rope_cos_sin
from .selectors import window


class Compared(NamedTuple):
    """What an indexer compares, as functions of its own weights alone."""

    q_TJI: Float[Tensor, "T J I"]
    k_TI: Float[Tensor, "T I"]
    w_TJ: Float[Tensor, "T J"]


def indexer_loss(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    batch: Batch,
    *,
    config: SFAConfig,
    selection: Int32[Tensor, "T K"] | None = None,
    rope: tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]] | None = None,
    compared: Compared | None = None,
) -> Float[Tensor, " T"]:
    """Return each query's `indexer_kl` for one layer, from which nothing but the indexer learns.

    The warm-up: ``selection=None``, all visible keys, beside dense attention. The sparse stage: the keys that
    `sfa_layer` selected, beside sparse attention and the model's own loss. A loss over a batch is
    ``coefficient · Σ kl_T / rows``, the rows those that the caller counts (the paper sums): with the sums of
    micro-batches or ranks divided by the rows of all, any split gives one number and one gradient.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm.
        batch: where each token stands and what it sees; without a block table.
        config: sizes and constants.
        selection: positions within each query's request, as `sfa_layer` returned them; None is all visible keys.
        rope: cos and sin to use instead of ``rope_cos_sin(batch.position_T, config)``.
        compared: of the indexer that serves this layer, from `index_vectors` at the layer that owns it; None is the
            layer's own.

    Returns:
        kl_T >= 0, float32 (float64 for float64 x); 0 for a query with at most one key.

    Raises:
        ValueError: as `sfa_layer`; a layer without an indexer and without ``compared``.

    Gradients: of the indexer's five tensors. x, q_a_proj and its norm get none, nor does what makes the target: the
        hidden states are detached before the indexer, and attention's weights are a constant.
    Cost: the layer's projections, and `indexer_kl`.
    Source: DeepSeek-V3.2-Exp report (2025), section 2.1.1.
    """
    _check("indexer_loss", params, x_TD, batch, selection)
    rule = "a layer without an indexer needs compared="
    require(compared is not None or params.indexer is not None, "indexer_loss", rule, None)
    with without_autocast(x_TD):
        x_TD, cos, sin = _prepared(x_TD, batch, config, rope)
        with torch.no_grad():
            q_THE, q_latent_TQ, kv_TE = latent_projections(params, x_TD, cos, sin, config=config)
            topk_TK = None if selection is None else global_selection(selection, batch)
        if compared is None:
            compared = _compared(params, x_TD, q_latent_TQ, cos, sin, config)
        ranges = batch.start_T, batch.end_T
        return indexer_kl(*compared, q_THE, kv_TE, *ranges, scale=config.softmax_scale, topk_TK=topk_TK)


def index_vectors(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    batch: Batch,
    *,
    config: SFAConfig,
    rope: tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]] | None = None,
) -> Compared:
    """Return what a layer's indexer compares, for the loss of layers that it serves besides its own.

    With the mean of `indexer_loss` over the layers served, an indexer has the gradient of the divergence from the
    mean of their attentions.

    Args:
        params: of the layer that owns the indexer.
        x_TD: hidden states after that layer's input norm.
        batch: where each token stands.
        config: sizes and constants.
        rope: cos and sin to use instead of ``rope_cos_sin(batch.position_T, config)``.

    Returns:
        `Compared`.

    Raises:
        ValueError: as `indexer_loss`; a layer without an indexer.

    Gradients: of the indexer's five tensors alone.
    Cost: the indexer's projections.
    Source: as `indexer_loss`.
    """
    _check("index_vectors", params, x_TD, batch, None)
    require(params.indexer is not None, "index_vectors", "the layer must have an indexer", None)
    with without_autocast(x_TD):
        x_TD, cos, sin = _prepared(x_TD, batch, config, rope)
        with torch.no_grad():
            _q_THE, q_latent_TQ = latent_queries(params, x_TD, cos, sin, config=config)
        return _compared(params, x_TD, q_latent_TQ, cos, sin, config)


def _check(function: str, params: LayerParams, x_TD: Tensor, batch: Batch, selection: Tensor | None) -> None:
    select = window if selection is None else None  # a layer without an indexer is looked at by the caller
    check_layer(function, params, x_TD, batch, cache=None, selection=selection, select=select)


def _prepared(
    x_TD: Tensor, batch: Batch, config: SFAConfig, rope: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    x_TD = torch.where(batch.request_T[:, None] >= 0, x_TD.detach(), 0)
    cos, sin = rope_cos_sin(batch.position_T.clamp(min=0), config) if rope is None else rope
    return x_TD, cos, sin


def _compared(
    params: LayerParams, x_TD: Tensor, q_latent_TQ: Tensor, cos: Tensor, sin: Tensor, config: SFAConfig
) -> Compared:
    assert params.indexer is not None
    return Compared(
        index_queries(params.indexer, q_latent_TQ, cos, sin, config=config),
        index_keys(params.indexer, x_TD, cos, sin, config=config),
        index_weights(params.indexer, x_TD, config=config),
    )
