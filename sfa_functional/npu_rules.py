"""What Ascend's operators can't do, rule by rule; every broken one is in the list, so that one error names them all.

The vendor's own checks before the device accept next to anything: unknown layouts, 65 heads, a width of 64. These are
the only ones. They look at shapes, dtypes, devices and plain values.
"""

from typing import Any

import torch
from torch import Tensor

from . import npu
from .batch import Batch
from .config import SFAConfig
from .npu import HEADS, LATENT, ROPE
from .paged import Cache, Rows, SplitCache, SplitRows
from .params import LayerParams, named_fields

INDEX_WIDTH = 128
INDEX_HEADS = (8, 16, 24, 32, 64)
HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
LOW_RANKS = (1536, 2048)
HEAD_WIDTHS = (128, 192)

_NARROW = (torch.bfloat16, torch.float16)


def explain(function: str | None, *arguments: Any, **named: Any) -> list[str]:
    """Return every reason why a call can't go to the operators; looks at shapes, dtypes, devices and plain values.

    Only for the flat `lightning_indexer` it also reads the ranges, which waits for the device.

    Args:
        function: a name of `npu.OPERATORS`, "sfa_layer", or None for the operators alone.
        arguments: of the call.
        named: likewise.

    Returns:
        One short sentence per broken rule.
    """
    match function:
        case None:
            lacking = npu.missing(tuple(sorted({name for names in npu.OPERATORS.values() for name in names})))
            return [lacking] if lacking else []
        case "sparse_attention":
            return _explain_sparse_attention(*arguments, **named)
        case "lightning_indexer":
            return _explain_lightning_indexer(*arguments, **named)
        case "latent_projections":
            return _explain_latent_projections(*arguments, **named)
        case "write_cache":
            return _explain_write_cache(*arguments, **named)
        case "choose_positions":
            return _explain_choose_positions(*arguments, **named)
        case "attend_positions":
            return _explain_attend_positions(*arguments, **named)
        case "sfa_layer":
            return explain_layer(*arguments, **named)
        case _:
            return [f"there is no operator for {function}"]


def _explain_sparse_attention(
    q_THE: Tensor, kv_SE: Rows, topk_TK: Tensor, *, scale: float, value_dim: int
) -> list[str]:
    parts = [kv_SE.latent_SL, kv_SE.rope_SR] if isinstance(kv_SE, SplitRows) else [kv_SE]
    width = sum(part.shape[-1] for part in parts)
    latent = parts[0].shape[-1] if len(parts) == 2 else value_dim
    known = (value_dim, latent, width - latent, q_THE.shape[-1]) == (LATENT, LATENT, ROPE, LATENT + ROPE)
    got = (q_THE.shape[-1], latent, width - latent, value_dim)
    compiling = torch.compiler.is_compiling()
    return [
        *_explain_common("sparse_attention", q_THE, *parts, topk_TK),
        *_narrow(q=q_THE, **({"kv": parts[0]} if len(parts) == 1 else {"latent": parts[0], "rope": parts[1]})),
        *_rule(known, f"q must have {LATENT} + {ROPE} columns, rows {LATENT} and {ROPE}, value_dim {LATENT}", got),
        *_rule(1 <= q_THE.shape[1] <= HEADS[-1], f"there must be 1 to {HEADS[-1]} heads", q_THE.shape[1]),
        *_rule(topk_TK.dtype == torch.int32, "indices must be int32", topk_TK.dtype),
        *_rule(not compiling, "the operator gives no lse in a compiled graph", "torch.compile"),
    ]


def _explain_attend_positions(
    q_THE: Tensor, kv_SE: Rows, selection_TK: Tensor, batch: Batch, *, scale: float, value_dim: int
) -> list[str]:
    if not isinstance(kv_SE, SplitRows):
        return _explain_sparse_attention(q_THE, kv_SE, selection_TK, scale=scale, value_dim=value_dim)
    latent_SL, rope_SR = kv_SE.latent_SL, kv_SE.rope_SR
    got = (q_THE.shape[-1], latent_SL.shape[-1], rope_SR.shape[-1], value_dim)
    contiguous = latent_SL.is_contiguous() and rope_SR.is_contiguous()
    return [
        *_explain_common("attend_positions", q_THE, latent_SL, rope_SR, selection_TK),
        *_narrow(q=q_THE, latent=latent_SL, rope=rope_SR),
        *_rule(
            got == (LATENT + ROPE, LATENT, ROPE, LATENT),
            f"q must have {LATENT} + {ROPE} columns, rows {LATENT} and {ROPE}, value_dim {LATENT}",
            got,
        ),
        *_rule(1 <= q_THE.shape[1] <= HEADS[-1], f"there must be 1 to {HEADS[-1]} heads", q_THE.shape[1]),
        *_rule(selection_TK.dtype == torch.int32, "indices must be int32", selection_TK.dtype),
        *_rule(contiguous, "the pool must be contiguous", (latent_SL.stride(), rope_SR.stride())),
        *_explain_table(batch),
    ]


def _explain_lightning_indexer(
    q_TJI: Tensor,
    k_SI: Tensor,
    w_TJ: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    *,
    k: int,
    row_S: Tensor | None = None,
) -> list[str]:
    reasons = _explain_index("lightning_indexer", q_TJI, k_SI, w_TJ, start_T, end_T, k=k)
    if row_S is not None:
        reasons.append("rows of a pool need a batch's block table: use the layer functions; got row_S")
    if torch.compiler.is_compiling():
        return [*reasons, "ranges are read on the host, which a compiled graph can't; got torch.compile"]
    runs = npu.runs_of(start_T, end_T, k_SI.shape[0])
    if not npu.back_to_back(runs, k_SI.shape[0]) and npu.page_size(runs) is None:
        rule = "visible ranges must be requests back to back over all rows, or begin at multiples of 16"
        reasons.append(f"{rule}; got starts {sorted({start for start, _, _ in runs})[:5]}")
    return reasons


def _explain_choose_positions(q_TJI: Tensor, k_SI: Tensor, w_TJ: Tensor, batch: Batch, *, k: int) -> list[str]:
    reasons = _explain_index("choose_positions", q_TJI, k_SI, w_TJ, batch.query_start_B1, k=k)
    if batch.block_table_BU is None:
        return [*reasons, *_rule(batch.row_S is None, "cached context needs a block table", "row_S alone")]
    contiguous = k_SI.is_contiguous()
    return [*reasons, *_explain_table(batch), *_rule(contiguous, "the pool must be contiguous", k_SI.stride())]


def _explain_latent_projections(
    params: LayerParams, x_TD: Tensor, cos: Tensor, sin: Tensor, *, config: SFAConfig
) -> list[str]:
    heads, hidden, low_rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
    widths = (config.kv_lora_rank, config.qk_rope_head_dim)
    prolog = params.prolog
    weights = [] if prolog is None else [prolog.weight_dq, prolog.weight_uk]
    dtypes = [x.dtype for x in (x_TD, *weights)]
    return [
        *_explain_common("latent_projections", x_TD, cos, sin, *weights, params.q_a_proj),
        *_rule(prolog is not None, "params must come from npu.prepare_params", "params without prolog"),
        *_rule(set(dtypes) == {torch.bfloat16}, "x and weights must be bfloat16", dtypes),
        *_rule(hidden in HIDDEN, f"hidden states must be {', '.join(map(str, HIDDEN))} wide", hidden),
        *_rule(low_rank in LOW_RANKS, "low-rank queries must be 1536 or 2048 wide", low_rank),
        *_rule(widths == (LATENT, ROPE), f"latent and rope must be {LATENT} and {ROPE} wide", widths),
        *_rule(config.qk_nope_head_dim in HEAD_WIDTHS, "heads must be 128 or 192 wide", config.qk_nope_head_dim),
        *_rule(heads in HEADS, f"there must be {', '.join(map(str, HEADS))} heads", heads),
        *_rule(config.rope_pairing == "interleaved", "rope must be interleaved", config.rope_pairing),
    ]


def _explain_write_cache(
    cache: Cache,
    kv_TE: Tensor,
    k_TI: Tensor | None,
    slot_T: Tensor,
    *,
    index_slot_T: Tensor | None = None,
    donate: bool = False,
) -> list[str]:
    split = isinstance(cache, SplitCache)
    pools = [cache.latent, cache.rope] if isinstance(cache, SplitCache) else [cache.kv]
    index_k = cache.index_k if k_TI is not None else None
    written = [*pools, *([] if index_k is None else [index_k])]
    known = _NARROW if split else (*_NARROW, torch.float32)
    dtypes = [x.dtype for x in (kv_TE, *written)]
    allowed = ", ".join(str(x).removeprefix("torch.") for x in known)
    strides = [x.stride() for x in written]
    return [
        *_explain_common("write_cache", *written, kv_TE, k_TI, slot_T, index_slot_T),
        *_rule(set(dtypes) <= set(known) and len(set(dtypes)) == 1, f"rows and pools must be one of {allowed}", dtypes),
        *_rule(all(x.is_contiguous() for x in written), "pools must be contiguous", strides),
    ]


def explain_layer(
    params: LayerParams,
    x_TD: Tensor,
    batch: Batch,
    *,
    config: SFAConfig,
    cache: Cache | None = None,
    selection: Tensor | None = None,
    select: Any = None,
    num_keys: int | None = None,
    fused: bool = True,
    **_: Any,
) -> list[str]:
    """Return every reason why a layer can't run through the operators, before anything is computed or written.

    Args:
        params: the layer's weights.
        x_TD: hidden states.
        batch: what each query sees.
        config: sizes.
        cache: the pool, if there is one.
        selection: given positions, if any.
        select: another way to choose keys, if any.
        num_keys: rows of keys where there is no pool; None is as many as there are tokens.
        fused: whether the projections are to be the fused ones.

    Returns:
        One short sentence per broken rule, each once.
    """
    tokens, heads = x_TD.shape[0], config.num_attention_heads
    k = config.index_topk if selection is None else selection.shape[1]
    keys = tokens if num_keys is None else num_keys

    def like(*shape: int, dtype: torch.dtype = x_TD.dtype) -> Tensor:
        return x_TD.new_empty((), dtype=dtype).expand(shape)  # a shape without memory

    position_TK = like(tokens, k, dtype=torch.int32) if selection is None else selection
    q_THE, kv_TE = like(tokens, heads, config.key_width), like(keys, config.key_width)
    rows: Rows = kv_TE
    index_rows = like(keys, config.index_head_dim)
    reasons = []
    if torch.is_grad_enabled() and (x_TD.requires_grad or any(w.requires_grad for _, w in named_fields(params))):
        reasons.append("it gives no gradients: inputs must not require grad")
    if fused:
        frequencies = like(tokens, config.qk_rope_head_dim // 2)
        reasons += _explain_latent_projections(params, x_TD, frequencies, frequencies, config=config)
    if cache is not None and batch.slot_T is not None:
        k_TI = None if params.indexer is None else like(keys, config.index_head_dim)
        reasons += _explain_write_cache(cache, kv_TE, k_TI, batch.slot_T)
        index_rows = index_rows if cache.index_k is None else cache.index_k.flatten(0, 1)
        if isinstance(cache, SplitCache):
            rows = SplitRows(latent_SL=cache.latent.flatten(0, 1), rope_SR=cache.rope.flatten(0, 1))
        else:
            rows = cache.kv.flatten(0, 1)
    if selection is None and select is None:
        q_TJI = like(tokens, config.index_n_heads, config.index_head_dim)
        w_TJ = like(tokens, config.index_n_heads, dtype=torch.float32)
        reasons += _explain_choose_positions(q_TJI, index_rows, w_TJ, batch, k=k)
    call: dict[str, Any] = {"scale": config.softmax_scale, "value_dim": config.kv_lora_rank}
    reasons += _explain_attend_positions(q_THE, rows, position_TK, batch, **call)
    return list(dict.fromkeys(reasons))


def _explain_index(function: str, q_TJI: Tensor, k_SI: Tensor, w_TJ: Tensor, *vectors: Tensor, k: int) -> list[str]:
    heads, width = q_TJI.shape[1:]
    count = 1 <= k <= 2048 or (3072 <= k <= 8192 and k % 1024 == 0)
    return [
        *_explain_common(function, q_TJI, k_SI, w_TJ, *vectors),
        *_narrow(q=q_TJI, k=k_SI),
        *_rule(width == INDEX_WIDTH, f"index heads must be {INDEX_WIDTH} wide", width),
        *_rule(heads in INDEX_HEADS, f"there must be {', '.join(map(str, INDEX_HEADS))} index heads", heads),
        *_rule(count, "k must be in 1..2048 or 3072, 4096, ... 8192", k),
    ]


def _explain_table(batch: Batch) -> list[str]:
    table_BU = batch.block_table_BU
    if table_BU is None or batch.row_S is None:
        return ["a split pool needs a batch with a block table; got none"]
    size = npu.block_size(batch)
    return [
        *_rule(size % 16 == 0 and 16 <= size <= 1024, "pages must have 16, 32, ... 1024 rows", size),
        *_rule(table_BU.is_contiguous(), "the block table must be contiguous", table_BU.stride()),
    ]


def _explain_common(function: str, *tensors: Tensor | None) -> list[str]:
    """Operators there, with kernels for the one device; no gradients wanted."""
    names, given = npu.OPERATORS[function], [x for x in tensors if x is not None]
    absent = npu.missing(names)
    reasons = [absent] if absent else []
    devices = sorted({str(x.device) for x in given})
    if len(devices) > 1:
        reasons.append(f"tensors must be on one device; got {', '.join(devices)}")
    elif not reasons:
        lacking = [name for name in names if not npu.has_kernel(name, given[0].device.type)]
        if lacking:
            reasons.append(f"operators have no kernel for {devices[0]}: {', '.join(lacking)}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        reasons.append("it gives no gradients: inputs must not require grad")
    return reasons


def _narrow(**tensors: Tensor) -> list[str]:
    dtypes = [x.dtype for x in tensors.values()]
    ok = dtypes[0] in _NARROW and len(set(dtypes)) == 1
    return _rule(ok, f"{' and '.join(tensors)} must be bfloat16 or float16, all of them", dtypes)


def _rule(ok: bool, rule: str, got: object) -> list[str]:
    return [] if ok else [f"{rule}; got {got}"]
