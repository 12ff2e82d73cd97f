"""The lightning indexer: score every visible key with a few narrow heads, keep the k best."""

import torch
from einops import rearrange
from jaxtyping import Float, Int, Int32
from torch import Tensor

from . import blockwise_indexer, npu, operators, reference
from .config import SFAConfig
from .implementation import Implementation, choose
from .norm import layer_norm
from .paged import present_rows
from .params import IndexerParams
from .precision import linear, require, require_float, require_integers, wide, without_autocast
from .rotary import rotate
from .tiles import WORKSPACE


def index_queries(
    indexer: IndexerParams,
    q_latent_TQ: Float[Tensor, "T Q"],
    cos: Float[Tensor, "T F"],
    sin: Float[Tensor, "T F"],
    *,
    config: SFAConfig,
) -> Float[Tensor, "T J I"]:
    """Project the normalised low-rank query to the indexer's heads.

    ``q = c W_qbᵀ`` per head, the first R columns rotated with ``config.index_rope_pairing``.

    Args:
        indexer: the indexer's weights.
        q_latent_TQ: c, the second result of `latent_queries` (after its norm).
        cos: cosines of the tokens' positions.
        sin: sines, likewise.
        config: sizes and pairing.

    Returns:
        q_TJI in the dtype of the input.

    Raises:
        ValueError: a wrong width, or a dtype that is not that of the projection.

    Gradients: by autograd. In the published recipe the caller detaches ``q_latent_TQ``.
    Cost: 2·T·Q·J·I FLOPs.
    Source: DeepSeek-V3.2-Exp report (2025), eq. 1; its corrected inference/model.py for the pairing.
    """
    _check("index_queries", "q_latent", q_latent_TQ, config.q_lora_rank, indexer, config)
    require_float("index_queries", q_latent=q_latent_TQ, projection=indexer.wq_b)
    with without_autocast(q_latent_TQ):
        q_TJI = rearrange(linear(q_latent_TQ, indexer.wq_b), "t (j i) -> t j i", j=config.index_n_heads)
    return _rotate_first(q_TJI, cos, sin, config)


def index_keys(
    indexer: IndexerParams,
    x_TD: Float[Tensor, "T D"],
    cos: Float[Tensor, "T F"],
    sin: Float[Tensor, "T F"],
    *,
    config: SFAConfig,
) -> Float[Tensor, "T I"]:
    """Project hidden states to index keys, one per token for all heads.

    ``k = layer_norm(x W_kᵀ)`` over all I columns (mean subtracted, gain and bias, eps 1e-6), then the first R
    columns are rotated.

    Args:
        indexer: the indexer's weights.
        x_TD: hidden states after the layer's input norm.
        cos: cosines of the tokens' positions.
        sin: sines, likewise.
        config: sizes, pairing, epsilon.

    Returns:
        k_TI in the dtype of the input.

    Raises:
        ValueError: a wrong width, or a dtype that is not that of the projection.

    Gradients: by autograd. In the published recipe the caller detaches ``x_TD``.
    Cost: 2·T·D·I FLOPs.
    Source: DeepSeek-V3.2-Exp, inference/model.py (corrected version), class Indexer.
    """
    _check("index_keys", "x", x_TD, config.hidden_size, indexer, config)
    require_float("index_keys", x=x_TD, projection=indexer.wk)
    with without_autocast(x_TD):
        k_TI = linear(x_TD, indexer.wk)
    k_TI = layer_norm(k_TI, indexer.k_norm_weight, indexer.k_norm_bias, config.index_norm_eps)
    return _rotate_first(k_TI, cos, sin, config)


def index_weights(indexer: IndexerParams, x_TD: Float[Tensor, "T D"], *, config: SFAConfig) -> Float[Tensor, "T J"]:
    """Project hidden states to one weight per indexer head, the score's constants included.

    ``w = x W_wᵀ · J^-0.5 · I^-0.5``, the product taken in float32. Weights may be negative.

    Args:
        indexer: the indexer's weights.
        x_TD: hidden states after the layer's input norm.
        config: sizes.

    Returns:
        w_TJ, float32 (float64 for float64 x).

    Raises:
        ValueError: a wrong width.

    Gradients: by autograd. In the published recipe the caller detaches ``x_TD``.
    Cost: 2·T·D·J FLOPs.
    Source: DeepSeek-V3.2-Exp, inference/model.py, class Indexer.
    """
    _check("index_weights", "x", x_TD, config.hidden_size, indexer, config)
    require_float("index_weights", x=x_TD)
    dtype = wide(x_TD.dtype)
    with without_autocast(x_TD):
        return linear(x_TD.to(dtype), indexer.weights_proj.to(dtype)) * config.index_weight_scale


def index_scores(
    q_TJI: Float[Tensor, "T J I"], k_SI: Float[Tensor, "S I"], w_TJ: Float[Tensor, "T J"]
) -> Float[Tensor, "T S"]:
    """Score every key for every query.

    ``score[t, s] = Σ_j w[t, j] · relu(q[t, j] · k[s])``, without further constants (they are in `index_weights`).
    One score serves all attention heads; about half of all scores are negative.

    Args:
        q_TJI: indexer queries.
        k_SI: index keys.
        w_TJ: weight of each head.

    Returns:
        score_TS, float32 (float64 for float64 q). A key with a NaN or an infinity scores NaN for every query and
        leaves all other scores and gradients alone.

    Raises:
        ValueError: shapes or dtypes that don't fit.

    Gradients: of q, k and w, by autograd; relu's derivative at 0 is 0.
    Cost: 2·T·S·J·(I + 1) FLOPs; holds T·J·S values. `lightning_indexer` works in tiles.
    Source: DeepSeek-V3.2-Exp report (2025), eq. 1.
    """
    _check_scores("index_scores", q_TJI, k_SI, w_TJ)
    with without_autocast(q_TJI):
        return blockwise_indexer.index_scores(q_TJI, k_SI, w_TJ)


def select_topk(
    score_TS: Float[Tensor, "T S"], start_T: Int[Tensor, " T"], end_T: Int[Tensor, " T"], *, k: int
) -> Int32[Tensor, "T K"]:
    """Choose the k best visible keys of every query, by an exact rule.

    Key s is visible to query t iff ``start[t] <= s < end[t]``. With at most k visible keys all are chosen and no
    score is looked at; otherwise the k highest scores are, equal scores (0 and -0 too) go to the lower row, and a
    NaN is never chosen. A visible -inf is a score like any other.

    Args:
        score_TS: scores as `index_scores` gives them.
        start_T: first visible row of each query; below 0 is 0.
        end_T: one past the last; above S is S, not above ``start`` is an empty range.
        k: keys to choose, >= 1; may exceed S.

    Returns:
        int32 ``topk_TK``: ascending rows, then -1. K is k whatever the data.

    Raises:
        ValueError: k < 1, or shapes that don't fit.

    Gradients: none (integers out).
    Cost: O(T·S); ``torch.topk`` finds the k-th value, whose ties are then taken from the left: its own indices
        break ties arbitrarily on CPU.
    Source: DeepSeek-V3.2-Exp report (2025), eq. 2; the tie rule is this library's.
    """
    _check_ranges("select_topk", score_TS.shape[0], k, start_T, end_T)
    real = score_TS.ndim == 2 and score_TS.is_floating_point()
    require(real, "select_topk", "scores must be floating point [T, S]", (score_TS.dtype, tuple(score_TS.shape)))
    return blockwise_indexer.select_topk(score_TS, start_T, end_T, k=k)


def lightning_indexer(
    q_TJI: Float[Tensor, "T J I"],
    k_SI: Float[Tensor, "rows I"],
    w_TJ: Float[Tensor, "T J"],
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    *,
    k: int,
    row_S: Int[Tensor, " S"] | None = None,
    implementation: Implementation = None,
    workspace_bytes: int = WORKSPACE,
) -> Int32[Tensor, "T K"]:
    """Score the visible keys of every query and choose the k best.

    ``select_topk(index_scores(q, k_rows, w), start, end, k)``, in tiles.

    Args:
        q_TJI: indexer queries.
        k_SI: index keys, or the rows of a pool if ``row_S`` is given.
        w_TJ: weight of each head, from `index_weights`.
        start_T: first visible key row of each query.
        end_T: one past the last visible key row.
        k: keys to choose, >= 1.
        row_S: row of the pool for each key row; -1 where none holds it (such a key scores NaN).
        implementation: "blockwise" works in tiles, "reference" is the oracle, "npu" is Ascend's operator (without
            ``row_S``); None chooses for the device. A callable has the reference's signature (no ``row_S``: it is
            given the key rows).
        workspace_bytes: how much a tile of "blockwise" may hold beside inputs and results; one query is the least.

    Returns:
        int32 ``topk_TK``, key rows ascending, then -1.

    Raises:
        ValueError: k < 1, shapes or dtypes that don't fit, or an implementation that can't run.

    Gradients: none (integers out); the inputs are detached.
    Cost: 2·J·(I + 1) FLOPs per query and key of its tile; memory O(tile · S), never T·S or T·J·S. On a CPU a tile
        reads the keys of one request, and none where its queries all see at most k; where ranges can't be read
        without waiting (another device, vmap, compile) it reads all S.
    Source: DeepSeek-V3.2-Exp report (2025), eq. 1 and 2.
    """
    _check_scores("lightning_indexer", q_TJI, k_SI, w_TJ)
    _check_ranges("lightning_indexer", q_TJI.shape[0], k, start_T, end_T)
    if row_S is not None:
        require_integers("lightning_indexer", row_S.numel(), row_S=row_S)
    chosen = choose("lightning_indexer", implementation, q_TJI, k_SI, w_TJ, start_T, end_T, k=k, row_S=row_S)
    q_TJI, k_SI, w_TJ = q_TJI.detach(), k_SI.detach(), w_TJ.detach()
    match chosen:
        case "blockwise":
            with without_autocast(q_TJI):
                return operators.lightning_indexer(
                    q_TJI, k_SI, w_TJ, start_T, end_T, k=k, row_S=row_S, workspace_bytes=workspace_bytes
                )
        case "npu":
            return npu.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=k)
        case "reference":
            with without_autocast(q_TJI):
                return reference.lightning_indexer(q_TJI, _keys(k_SI, row_S), w_TJ, start_T, end_T, k=k)
        case custom:
            return custom(q_TJI, _keys(k_SI, row_S), w_TJ, start_T, end_T, k=k)


def _keys(k_SI: Tensor, row_S: Tensor | None) -> Tensor:
    return k_SI if row_S is None else present_rows(k_SI, row_S)


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor, config: SFAConfig) -> Tensor:
    width = config.qk_rope_head_dim
    rotated = rotate(x[..., :width], cos, sin, pairing=config.index_rope_pairing)
    return torch.cat([rotated, x[..., width:]], dim=-1)


def _check(function: str, name: str, x: Tensor, width: int, indexer: IndexerParams, config: SFAConfig) -> None:
    require(x.ndim == 2 and x.shape[1] == width, function, f"{name} must be [T, {width}]", tuple(x.shape))
    heads, head_width = config.index_n_heads, config.index_head_dim
    want = (heads * head_width, head_width, heads)
    got = (indexer.wq_b.shape[0], indexer.wk.shape[0], indexer.weights_proj.shape[0])
    require(got == want, function, f"wq_b, wk and weights_proj must have {want} rows, as the config says", got)


def _check_scores(function: str, q_TJI: Tensor, k_SI: Tensor, w_TJ: Tensor) -> None:
    shapes = (tuple(q_TJI.shape), tuple(k_SI.shape), tuple(w_TJ.shape))
    fits = q_TJI.ndim == 3 and k_SI.ndim == 2 and w_TJ.shape == q_TJI.shape[:2] and k_SI.shape[1] == q_TJI.shape[2]
    require(fits, function, "q, k, w must be [T, J, I], [S, I], [T, J]", shapes)
    require_float(function, q=q_TJI, k=k_SI)
    require(w_TJ.is_floating_point(), function, "w must be floating point", w_TJ.dtype)


def _check_ranges(function: str, count: int, k: int, start_T: Tensor, end_T: Tensor) -> None:
    require(type(k) is int and k >= 1, function, "k must be an integer >= 1", k)
    require_integers(function, count, start_T=start_T, end_T=end_T)
