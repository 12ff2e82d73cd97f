"""How far two tensors are apart, and what a layer's selection keeps of dense attention."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from .batch import Batch, global_selection
from .config import SFAConfig
from .indexer import index_keys, index_queries, index_weights, lightning_indexer
from .latent import latent_keys, latent_queries
from .layer import check_layer
from .params import LayerParams
from .precision import require, without_autocast
from .rotary import rope_cos_sin
from .selection_stats import Scored, SelectionStats, draw_rows, measure_rows
from .selectors import Selector


class Difference(NamedTuple):
    """The largest difference of two tensors."""

    max_abs: float
    max_rel: float  # max_abs over the largest finite magnitude of the second tensor
    where: tuple[int, ...] | None  # index of the largest difference; None where the tensors are equal


def difference(a: Tensor, b: Tensor) -> Difference:
    """Return the largest difference between two tensors and where it is.

    ``max_abs = max |a - b|``, ``max_rel = max_abs / max |b|``. Equal infinities and two NaNs in one place count as
    equal; a NaN or an infinity against anything else is infinitely far away. Waits for the device.

    Args:
        a: the tensor in question, of any real dtype.
        b: what it should be.

    Returns:
        `Difference`; zeros and None where a and b are equal.

    Raises:
        ValueError: different shapes, or complex tensors.
    """
    require(a.shape == b.shape, "difference", "shapes must be equal", (tuple(a.shape), tuple(b.shape)))
    require(not (a.is_complex() or b.is_complex()), "difference", "tensors must be real", (a.dtype, b.dtype))
    wide_a, wide_b = a.detach().double().cpu(), b.detach().double().cpu()
    same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    far = torch.where(same, 0.0, (wide_a - wide_b).abs())
    far = torch.where(far.isnan(), torch.inf, far)
    if far.numel() == 0 or not bool((far > 0).any()):
        return Difference(0.0, 0.0, None)
    max_abs = float(far.max())
    peak = float(torch.where(wide_b.isfinite(), wide_b.abs(), 0).max())
    where = tuple(int(i) for i in torch.unravel_index(far.argmax(), far.shape))
    return Difference(max_abs, max_abs / peak if peak > 0 else math.inf, where)


def evaluate_layer(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    batch: Batch,
    *,
    config: SFAConfig,
    k: int,
    select: Selector | None = None,
    selection: Int32[Tensor, "T K"] | None = None,
    other: Selector | Int32[Tensor, "T M"] | None = None,
    rope: tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]] | None = None,
    rows: int | None = None,
    generator: torch.Generator | None = None,
) -> SelectionStats:
    """Measure what one layer's selection keeps of its dense attention: `selection_stats` from weights and states.

    Args:
        params: the layer's weights.
        x_TD: hidden states after the layer's input norm.
        batch: where each token stands and what it sees; without cached context.
        config: sizes and constants.
        k: keys that a query chooses, >= 1, in place of ``config.index_topk``.
        select: how to choose; None is the lightning indexer.
        selection: positions chosen already, as `sfa_layer` returned them: what a layer without an indexer needs.
        other: another selector, or positions chosen by one: for the metric ``overlap``. A selector that returns None
            for a layer leaves it undefined there.
        rope: cos and sin to use instead of ``rope_cos_sin(batch.position_T, config)``.
        rows: queries to measure, of those that see more than k keys; None is all.
        generator: draws them, on the CPU; None is a new one with seed 0.

    Returns:
        `SelectionStats`: add layers, batches and ranks with `merge_stats`.

    Raises:
        ValueError: as `selection_stats` and `sfa_layer`; a batch with a block table.

    Gradients: none.
    Cost: keys of all tokens; queries, selection, and dense attention's weights of the rows measured. Waits for the
        device.
    Source: as `selection_stats`.
    """
    function = "evaluate_layer"
    require(k >= 1, function, "k must be >= 1", k)
    require(rows is None or rows >= 1, function, "rows must be >= 1 or None", rows)
    require(batch.row_S is None, function, "the batch must have no block table", "one")
    check_layer(function, params, x_TD, batch, cache=None, selection=selection, select=select)
    if isinstance(other, Tensor):
        fits = other.ndim == 2 and other.shape[0] == x_TD.shape[0] and other.dtype == torch.int32
        rule = f"other must be int32 [{x_TD.shape[0]}, M] or a selector"
        require(fits, function, rule, (other.dtype, tuple(other.shape)))
    with torch.no_grad(), without_autocast(x_TD):
        x_TD = torch.where(batch.request_T[:, None] >= 0, x_TD, 0)
        cos, sin = rope_cos_sin(batch.position_T.clamp(min=0), config) if rope is None else rope
        start_T, end_T = batch.start_T.clamp(min=0), batch.end_T.clamp(max=x_TD.shape[0])
        drawn = draw_rows(start_T, end_T, k=k, rows=rows, generator=generator)
        index = drawn.row_n
        x_nD, cos_n, sin_n = x_TD[index], cos[index], sin[index]
        kv_SE = latent_keys(params, x_TD, cos, sin, config=config)
        q_nHE, q_latent_nQ = latent_queries(params, x_nD, cos_n, sin_n, config=config)
        scored = None
        if params.indexer is not None:
            scored = Scored(
                index_queries(params.indexer, q_latent_nQ, cos_n, sin_n, config=config),
                index_keys(params.indexer, x_TD, cos, sin, config=config),
                index_weights(params.indexer, x_nD, config=config),
            )
        start_n, end_n = start_T[index], end_T[index]

        def choose(how: Selector | None) -> Tensor | None:
            if how is None:
                assert scored is not None  # check_layer has seen to it
                return lightning_indexer(*scored, start_n, end_n, k=k)
            compared = dict.fromkeys(Scored._fields) if scored is None else scored._asdict()
            topk_nK: Any = how(**compared, q_THE=q_nHE, kv_SE=kv_SE, start_T=start_n, end_T=end_n, k=k, row_S=None)
            if topk_nK is None:
                return None
            fits = topk_nK.ndim == 2 and topk_nK.shape[0] == len(index) and topk_nK.dtype == torch.int32
            got = (topk_nK.dtype, tuple(topk_nK.shape))
            require(fits, function, f"a selector must return int32 [{len(index)}, K]", got)
            return topk_nK

        topk_nK = choose(select) if selection is None else global_selection(selection, batch)[index]
        if topk_nK is None:
            raise ValueError(f"{function}: a selector must return int32 [{len(index)}, K]; got None")
        if isinstance(other, Tensor):
            other = global_selection(other, batch)[index]
        elif other is not None:
            other = choose(other)
        return measure_rows(
            drawn,
            q_nHE,
            kv_SE,
            topk_nK,
            start_n,
            end_n,
            scale=config.softmax_scale,
            k=k,
            scored=scored,
            other_nM=other,
        )
