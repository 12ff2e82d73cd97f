"""Ascend: this library's functions through the operators of torch_npu 2.13. The only file that names it.

Nothing here was ever run on such a device: the operators' documentation is the contract, and tests hold this file to
it with stand-ins for the operators. It has no maths of its own. What an operator can't do is refused before a function
of this file is called (`npu_rules`). It **translates** rows, lengths and layouts, and **repairs** results to this
library's conventions: entries that a query does not see are -1 and last, rows without keys give 0 and -inf, rope
columns keep the order of the input. Two promises the operators do not make: equal scores need not go to the lower row,
and a NaN score may be selected.

``import torch`` loads torch_npu where it is installed, and fails where CANN is missing beside it. That is not undone
here: whoever has the wheel without the device sets ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` before Python starts.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor
from torch.nn.functional import pad

from .batch import Batch, global_selection
from .config import SFAConfig
from .paged import Cache, JointCache, Rows, SplitCache, SplitRows, fetch_rows, map_selection, num_rows, writes
from .params import LayerParams, PrologWeights

P = ParamSpec("P")
R = TypeVar("R")

LATENT, ROPE = 512, 64
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of attention heads that the operators take; others are filled up with heads of zeros."""
FRACTAL_NZ = 29
"""Number of the memory format in which the fused projections want their large weights."""
GATHERED_VALUES = 2**24
"""Values of the largest tensor of selected rows that a tile of queries gathers (32 MiB in bfloat16)."""

_ATTENTION, _INDEXER = "npu_sparse_flash_attention", "npu_lightning_indexer"
_PROLOG = "npu_mla_prolog_v3"
_SCATTER, _SCATTER_IN_PLACE, _SCATTER_PAGES = (
    "npu_scatter_nd_update",
    "npu_scatter_nd_update_",
    "npu_scatter_pa_kv_cache",
)
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

OPERATORS = {
    "sparse_attention": (_ATTENTION,),
    "attend_positions": (_ATTENTION,),
    "lightning_indexer": (_INDEXER,),
    "choose_positions": (_INDEXER,),
    "latent_projections": (_PROLOG,),
    "write_cache": (_SCATTER, _SCATTER_IN_PLACE, _SCATTER_PAGES),
}
"""Which operators each function calls; the two that speak of positions are a layer's own forms."""


# whether the operators are there -------------------------------------------------------------------------------------


def has_operators(function: str, *arguments: Any) -> bool:
    """Say whether the device of a call's first tensor has the function's operators; cheap where it does not."""
    tensor = next((x for x in arguments if isinstance(x, Tensor)), None)
    names = OPERATORS.get(function, ())
    return tensor is not None and bool(names) and all(has_kernel(name, tensor.device.type) for name in names)


def _constant(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that `torch.compile` is to call while it traces, and whose result it is to keep.

    This is what `torch.compiler.assume_constant_result` does, which imports Dynamo besides: as long again as this
    package and torch take together.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _kernel_is_there(name: str, device: str) -> bool:
    if not torch._C._dispatch_has_kernel(f"npu::{name}"):
        return False
    key = torch._C._dispatch_key_for_device(device)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", key))


has_kernel: Callable[[str, str], bool] = _constant(_kernel_is_there)


def _what_is_missing(names: tuple[str, ...]) -> str:
    """Say which operators are not registered, and why, after trying to load the package that registers them."""
    lacking = [name for name in names if not torch._C._dispatch_has_kernel(f"npu::{name}")]
    why = _load() if lacking else None
    lacking = [name for name in lacking if not torch._C._dispatch_has_kernel(f"npu::{name}")]
    return f"operators are missing: {', '.join(lacking)}{'' if why is None else f' ({why})'}" if lacking else ""


missing: Callable[[tuple[str, ...]], str] = _constant(_what_is_missing)


def _load() -> str | None:
    """Import torch_npu, if it is there, and say why that failed; the environment is left as it was."""
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    before = os.environ.get(_AUTOLOAD)
    try:
        importlib.import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        return f"torch_npu does not load: {' '.join(str(error).split())}"
    finally:
        if before is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = before
    return None


# attention -----------------------------------------------------------------------------------------------------------


def sparse_attention(
    q_THE: Float[Tensor, "T H E"], kv_SE: Rows, topk_TK: Int32[Tensor, "T K"], *, scale: float, value_dim: int
) -> tuple[Float[Tensor, "T H L"], Float[Tensor, "T H"]]:
    """Run `attention.sparse_attention` as npu_sparse_flash_attention: flat, one request, no causal cropping.

    Latent and rope rows are wanted apart and contiguous. `SplitRows` are passed as they are; of joint rows the
    smaller thing is copied: all S rows once, or tile by tile the T·K selected ones (never a pool).

    Args:
        q_THE: absorbed queries.
        kv_SE: key rows.
        topk_TK: row numbers; every value outside [0, S) is unused.
        scale: of the logits.
        value_dim: L.

    Returns:
        ``(out_THL, lse_TH)``, lse float32.

    Gradients: none; `npu_rules` refuses inputs that require grad.
    Source: Ascend op-plugin, npu_sparse_flash_attention.
    """
    tokens, heads, _ = q_THE.shape
    keys, chosen = num_rows(kv_SE), topk_TK.shape[1]
    if 0 in (tokens, keys, chosen):
        empty = q_THE.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
        return q_THE.new_zeros(tokens, heads, value_dim), empty
    topk_TK, valid_TK = _valid_first(topk_TK, (topk_TK >= 0) & (topk_TK < keys))
    q_THE = _pad_heads(q_THE)
    if isinstance(kv_SE, SplitRows) or keys <= tokens * chosen:
        latent_SL, rope_SR = _apart(kv_SE, value_dim)
        out_THL, lse_TH = _attend(q_THE, latent_SL, rope_SR, topk_TK, scale)
    else:
        outs, lses = [], []
        tile = max(1, GATHERED_VALUES // (chosen * q_THE.shape[2]))
        for q_tHE, topk_tK, valid_tK in zip(q_THE.split(tile), topk_TK.split(tile), valid_TK.split(tile), strict=True):
            latent_SL, rope_SR = _apart(fetch_rows(kv_SE, topk_tK.flatten()), value_dim)
            place_tK = torch.arange(topk_tK.numel(), device=q_THE.device).view(topk_tK.shape)
            place_tK = torch.where(valid_tK, place_tK, -1).to(torch.int32)
            out_tHL, lse_tH = _attend(q_tHE, latent_SL, rope_SR, place_tK, scale)
            outs.append(out_tHL)
            lses.append(lse_tH)
        out_THL, lse_TH = torch.cat(outs), torch.cat(lses)
    any_T = valid_TK[:, 0]
    out_THL = torch.where(any_T[:, None, None], out_THL[:, :heads], 0)
    return out_THL, torch.where(any_T[:, None], lse_TH[:, :heads], -torch.inf)


def _attend(q_THE: Tensor, latent_SL: Tensor, rope_SR: Tensor, topk_TK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    latent, rope = latent_SL[:, None], rope_SR[:, None]
    out_THL, top, total = torch.ops.npu.npu_sparse_flash_attention(
        q_THE[..., :LATENT].contiguous(),
        latent,
        latent,
        topk_TK[:, None],
        scale,
        query_rope=q_THE[..., LATENT:].contiguous(),
        key_rope=rope,
        actual_seq_lengths_query=_filled(q_THE, q_THE.shape[0]),
        actual_seq_lengths_kv=_filled(q_THE, latent_SL.shape[0]),
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="TND",
        sparse_mode=0,
        attention_mode=2,
        return_softmax_lse=True,
    )
    return out_THL, (top + total.log())[0]


def attend_positions(
    q_THE: Float[Tensor, "T H E"],
    kv_SE: SplitRows,
    selection_TK: Int32[Tensor, "T K"],
    batch: Batch,
    *,
    scale: float,
    value_dim: int,
) -> Float[Tensor, "T H L"]:
    """Attend to positions of each query's request over a split pool, in the form of the serving code; no copies.

    The pool's two tensors are passed as pages, with the block table and the batch's lengths, right-aligned and
    causal. The operator gives no lse in this form.

    Args:
        q_THE: absorbed queries.
        kv_SE: the rows of a pool that holds latent and rope apart.
        selection_TK: positions; those that the query does not see are unused.
        batch: with a block table. Its lengths must be those of these queries: of a rank's contiguous piece, row r of
            `sharding.local_lengths`.
        scale: of the logits.
        value_dim: L.

    Returns:
        out_THL; 0 for queries without keys.

    Gradients: none.
    Source: the decode of vllm-project/vllm-ascend, attention/sfa_v1.py.
    """
    heads = q_THE.shape[1]
    if 0 in (q_THE.shape[0], selection_TK.shape[1], num_rows(kv_SE)) or batch.row_S is None:
        return q_THE.new_zeros(q_THE.shape[0], heads, value_dim)
    held_TK = map_selection(global_selection(selection_TK, batch), batch.row_S) >= 0
    topk_TK, valid_TK = _valid_first(selection_TK, held_TK)
    q_THE, size = _pad_heads(q_THE), block_size(batch)
    latent, rope = (part.unflatten(0, (-1, size))[:, :, None] for part in (kv_SE.latent_SL, kv_SE.rope_SR))
    out_THL, _, _ = torch.ops.npu.npu_sparse_flash_attention(
        q_THE[..., :LATENT].contiguous(),
        latent,
        latent,
        topk_TK[:, None],
        scale,
        block_table=batch.block_table_BU,
        query_rope=q_THE[..., LATENT:].contiguous(),
        key_rope=rope,
        actual_seq_lengths_query=batch.query_start_B1[1:].to(torch.int32),
        actual_seq_lengths_kv=batch.seq_len_B.to(torch.int32),
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
        return_softmax_lse=False,
    )
    return torch.where(valid_TK[:, :1, None], out_THL[:, :heads], 0)


# the indexer ---------------------------------------------------------------------------------------------------------


def lightning_indexer(
    q_TJI: Float[Tensor, "T J I"],
    k_SI: Float[Tensor, "S I"],
    w_TJ: Float[Tensor, "T J"],
    start_T: Int[Tensor, " T"],
    end_T: Int[Tensor, " T"],
    *,
    k: int,
) -> Int32[Tensor, "T K"]:
    """Run `indexer.lightning_indexer` as npu_lightning_indexer, which knows requests instead of visible ranges.

    Rows with one start whose ends grow by one are a request. Where the requests' keys follow each other without a gap
    they are passed flat, else as pages of a size that divides every start (a copy, if the last one is not full). Reads
    the ranges on the host, 2·T integers, as the check before does. A layer knows its requests (`choose_positions`).

    Args:
        q_TJI: indexer queries.
        k_SI: index keys.
        w_TJ: weight of each head.
        start_T: first visible key row of each query.
        end_T: one past the last visible key row.
        k: keys to choose.

    Returns:
        int32 key rows, ascending, then -1.

    Gradients: none.
    Source: Ascend op-plugin, npu_lightning_indexer.
    """
    tokens, keys = q_TJI.shape[0], k_SI.shape[0]
    if 0 in (tokens, keys):
        return torch.full((tokens, k), -1, dtype=torch.int32, device=q_TJI.device)
    runs = runs_of(start_T, end_T, keys)
    _starts, lengths, counts = zip(*runs, strict=True)
    query_ends, key_lens = list(accumulate(counts)), list(accumulate(lengths))
    table, key_pages, layout = None, k_SI[:, None], "TND"
    if not back_to_back(runs, keys):
        size = page_size(runs) or 16
        key_pages, layout = pad(k_SI, (0, 0, 0, -keys % size)).unflatten(0, (-1, size))[:, :, None], "PA_BSND"
        columns = max(1, *(-(-length // size) for length in lengths))
        pages = [[s // size + u if u * size < n else -1 for u in range(columns)] for s, n, _ in runs]
        table, key_lens = torch.tensor(pages, dtype=torch.int32, device=q_TJI.device), list(lengths)
    position_TK = _index(
        q_TJI,
        key_pages,
        w_TJ,
        torch.tensor(query_ends, dtype=torch.int32, device=q_TJI.device),
        torch.tensor(key_lens, dtype=torch.int32, device=q_TJI.device),
        table,
        layout,
        k,
    )
    start_T1, end_T1 = start_T.clamp(min=0).long()[:, None], end_T.clamp(max=keys).long()[:, None]
    key_TK = position_TK + start_T1
    return _ascending(key_TK, (position_TK >= 0) & (key_TK < end_T1))


def choose_positions(
    q_TJI: Float[Tensor, "T J I"], k_SI: Float[Tensor, "S I"], w_TJ: Float[Tensor, "T J"], batch: Batch, *, k: int
) -> Int32[Tensor, "T K"]:
    """Score and select positions within each query's request: flat, or over a pool through the block table.

    Nothing waits for the device: the batch's lengths are passed as they are.

    Args:
        q_TJI: indexer queries.
        k_SI: index keys in the batch's order, or the rows of a pool for a batch with a block table, in which every
            position of a request must have a page (`validate_block_table`).
        w_TJ: weight of each head.
        batch: as for `attend_positions`.
        k: keys to choose.

    Returns:
        int32 positions, ascending, then -1.

    Gradients: none.
    Source: the indexer of vllm-project/vllm-ascend, attention/sfa_v1.py.
    """
    tokens, table_BU = q_TJI.shape[0], batch.block_table_BU
    if 0 in (tokens, k_SI.shape[0], batch.seq_len_B.shape[0]):
        return torch.full((tokens, k), -1, dtype=torch.int32, device=q_TJI.device)
    if table_BU is None:
        keys, key_lens, layout = k_SI[:, None], _packed_key_ends(batch, k_SI.shape[0]), "TND"
    else:
        keys, layout = k_SI.unflatten(0, (-1, block_size(batch)))[:, :, None], "PA_BSND"
        key_lens = batch.seq_len_B
    query_ends = batch.query_start_B1[1:].to(torch.int32)
    position_TK = _index(q_TJI, keys, w_TJ, query_ends, key_lens.to(torch.int32), table_BU, layout, k)
    seen_T1 = (batch.end_T - batch.start_T)[:, None]
    return _ascending(position_TK, (position_TK >= 0) & (position_TK < seen_T1))


def _index(
    q_TJI: Tensor,
    keys: Tensor,
    w_TJ: Tensor,
    query_ends: Tensor,
    key_lens: Tensor,
    table: Tensor | None,
    layout: str,
    k: int,
) -> Tensor:
    position, _ = torch.ops.npu.npu_lightning_indexer(
        q_TJI.contiguous(),
        keys.contiguous(),
        w_TJ.to(q_TJI.dtype if _wants_narrow_weights() else torch.float32).contiguous(),
        actual_seq_lengths_query=query_ends,
        actual_seq_lengths_key=key_lens,
        block_table=table,
        layout_query="TND",
        layout_key=layout,
        sparse_count=k,
        sparse_mode=3,
    )
    return position[:, 0].long()


def _is_950() -> bool:
    """Say whether this part takes the heads' weights in the queries' dtype; A2 and A3 take float32."""
    package = sys.modules.get("torch_npu")
    return package is not None and package.npu.get_soc_version() >= 260


_wants_narrow_weights: Callable[[], bool] = _constant(_is_950)


def _packed_key_ends(batch: Batch, num_keys: int) -> Tensor:
    """Return where the keys of each request end among packed rows, cut after the last that these queries see.

    On a rank that holds a piece of the tokens, the last request of its piece may go on elsewhere: its length is cut,
    and the requests behind it, of which no query is here, have none.
    """
    start_B, count_B = batch.key_start_B, batch.query_start_B1.diff()
    whole_B = torch.cat([start_B[1:], start_B.new_full((1,), num_keys)])
    mine_B = (count_B > 0) & (batch.seq_len_B > 0)
    last = torch.where(mine_B, start_B + batch.seq_len_B, 0).amax()
    return torch.minimum(whole_B, last)


def runs_of(start_T: Tensor, end_T: Tensor, num_keys: int) -> list[tuple[int, int, int]]:
    """Group queries into requests: (first key row, number of keys that the last query sees, number of queries)."""
    ranges = torch.stack([start_T.long().clamp(min=0), end_T.long().clamp(max=num_keys)]).tolist()
    runs: list[tuple[int, int, int]] = []
    last: tuple[int, int] | None = None
    for start, end in zip(*ranges, strict=True):
        if end <= start:
            runs.append((runs[-1][0] + runs[-1][1] if runs else 0, 0, 1))
            last = None
            continue
        if last == (start, end - 1):
            runs[-1] = (start, end - start, runs[-1][2] + 1)
        else:
            runs.append((start, end - start, 1))
        last = (start, end)
    return runs


def back_to_back(runs: list[tuple[int, int, int]], num_keys: int) -> bool:
    """Say whether the requests' keys are all rows, one request after the other."""
    ends = [0, *(start + length for start, length, _ in runs)]
    return all(start == end for (start, _, _), end in zip(runs, ends, strict=False)) and ends[-1] == num_keys


def page_size(runs: list[tuple[int, int, int]]) -> int | None:
    """Return the largest page, of 16 to 1024 rows, at whose borders all requests with keys begin."""
    starts = [start for start, length, _ in runs if length > 0]
    return next((size for size in (1024, 512, 256, 128, 64, 32, 16) if all(s % size == 0 for s in starts)), None)


# projections ---------------------------------------------------------------------------------------------------------


def prepare_params(params: LayerParams, *, config: SFAConfig) -> LayerParams:
    """Lay a layer's weights out for the fused projections, once, at load.

    The three large matrices are transposed and put into the operator's memory format; the fields of the result are
    views of them, so that nothing is held twice but the key part of ``kv_b_proj`` and the two gains, in bfloat16.

    Args:
        params: the layer's weights, on the device.
        config: the model's sizes.

    Returns:
        `LayerParams` with ``prolog``; every other function takes them as before.

    Raises:
        AttributeError: the operator npu_format_cast is not there.

    Gradients: none.
    Cost: a copy of the matrices.
    Source: Ascend op-plugin, npu_mla_prolog_v3 and npu_format_cast.
    """

    def laid_out(w: Tensor) -> Tensor:
        return torch.ops.npu.npu_format_cast(w.detach().T.contiguous(), FRACTAL_NZ)

    w_uk_HPL = params.kv_b_proj.detach().unflatten(0, (config.num_attention_heads, -1))[:, : config.qk_nope_head_dim]
    prolog = PrologWeights(
        weight_dq=laid_out(params.q_a_proj),
        weight_uq_qr=laid_out(params.q_b_proj),
        weight_uk=w_uk_HPL.contiguous(),
        weight_dkv_kr=laid_out(params.kv_a_proj),
        gamma_cq=params.q_a_layernorm.detach().to(torch.bfloat16),
        gamma_ckv=params.kv_a_layernorm.detach().to(torch.bfloat16),
    )
    views: dict[str, Any] = {
        "q_a_proj": prolog.weight_dq.T,
        "q_b_proj": prolog.weight_uq_qr.T,
        "kv_a_proj": prolog.weight_dkv_kr.T,
    }
    return replace(params, prolog=prolog, **views)


def latent_projections(
    params: LayerParams,
    x_TD: Float[Tensor, "T D"],
    cos: Float[Tensor, "T F"],
    sin: Float[Tensor, "T F"],
    *,
    config: SFAConfig,
) -> tuple[Float[Tensor, "T H E"], Float[Tensor, "T Q"], Float[Tensor, "T E"]]:
    """Run `latent.latent_projections` as npu_mla_prolog_v3, which writes to rows of its own, not to a cache.

    Args:
        params: from `prepare_params`.
        x_TD: hidden states.
        cos: cosines of the tokens' positions; rounded to bfloat16 here, as the operator wants.
        sin: sines, likewise.
        config: sizes and epsilon.

    Returns:
        ``(q_THE, q_latent_TQ, kv_TE)``; the operator's de-interleaved rope columns are put back in order.

    Gradients: none.
    Source: Ascend op-plugin, npu_mla_prolog_v3.
    """
    prolog, tokens = params.prolog, x_TD.shape[0]
    if tokens == 0 or prolog is None:
        heads, low_rank = config.num_attention_heads, config.q_lora_rank
        sizes = (0, heads, config.key_width), (0, low_rank), (0, config.key_width)
        return x_TD.new_zeros(sizes[0]), x_TD.new_zeros(sizes[1]), x_TD.new_zeros(sizes[2])
    latent, rope = x_TD.new_empty(tokens, 1, LATENT), x_TD.new_empty(tokens, 1, ROPE)
    nope_THL, rope_THR, _, q_latent_TQ, _ = torch.ops.npu.npu_mla_prolog_v3(
        x_TD.contiguous(),
        prolog.weight_dq,
        prolog.weight_uq_qr,
        prolog.weight_uk,
        prolog.weight_dkv_kr,
        prolog.gamma_cq,
        prolog.gamma_ckv,
        torch.cat([sin, sin], dim=-1).to(torch.bfloat16),
        torch.cat([cos, cos], dim=-1).to(torch.bfloat16),
        latent,
        rope,
        rmsnorm_epsilon_cq=config.latent_norm_eps,
        rmsnorm_epsilon_ckv=config.latent_norm_eps,
        cache_mode="TND",
        query_norm_flag=True,
    )
    q_THE = torch.cat([nope_THL, _interleaved(rope_THR)], dim=-1)
    return q_THE, q_latent_TQ, torch.cat([latent[:, 0], _interleaved(rope[:, 0])], dim=-1)


def _interleaved(x: Tensor) -> Tensor:
    """Put first elements, then second elements of all pairs, back pair by pair."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


# cache writes --------------------------------------------------------------------------------------------------------


def write_cache(
    cache: Cache,
    kv_TE: Float[Tensor, "T E"],
    k_TI: Float[Tensor, "T I"] | None,
    slot_T: Int[Tensor, " T"],
    *,
    index_slot_T: Int[Tensor, " T"] | None = None,
    donate: bool = False,
) -> Cache:
    """Run `paged.write_cache`: latent and rope by one call, index keys by one.

    No operator is ever given a slot of -1, which for them is outside the contract: such a row repeats the write of
    the first row that has a slot (the same bytes to the same place), or, where none has, writes back what row 0 of
    the pool holds. So a pool needs no scratch row, and nothing waits for the device.

    Args:
        cache: the pool.
        kv_TE: latent keys of the new tokens.
        k_TI: their index keys, or None.
        slot_T: row of the pool for each token, -1 for nowhere.
        index_slot_T: other slots for the index keys.
        donate: write in place; else the pool is copied first.

    Returns:
        The pool after the write.

    Gradients: none.
    Source: Ascend op-plugin, npu_scatter_pa_kv_cache and npu_scatter_nd_update.
    """
    if kv_TE.shape[0] == 0:
        return cache
    index_k = cache.index_k
    if k_TI is not None and index_k is not None:
        index_k = _scatter(index_k, k_TI, slot_T if index_slot_T is None else index_slot_T, donate)
    if isinstance(cache, JointCache):
        return JointCache(kv=_scatter(cache.kv, kv_TE, slot_T, donate), index_k=index_k)
    latent, rope = (cache.latent, cache.rope) if donate else (cache.latent.clone(), cache.rope.clone())
    latent_TL, rope_TR = kv_TE.split([latent.shape[-1], rope.shape[-1]], dim=-1)
    slots, latent_TL = writes(latent.flatten(0, 1), latent_TL, slot_T)
    _, rope_TR = writes(rope.flatten(0, 1), rope_TR, slot_T)
    torch.ops.npu.npu_scatter_pa_kv_cache(
        latent_TL[:, None].contiguous(),
        rope_TR[:, None].contiguous(),
        latent[:, :, None],
        rope[:, :, None],
        slots.to(torch.int32),
        cache_mode="Norm",
    )
    return SplitCache(latent=latent, rope=rope, index_k=index_k)


def _scatter(pages: Tensor, rows: Tensor, slot_T: Tensor, donate: bool) -> Tensor:
    pool = pages.flatten(0, 1)
    slots, rows = writes(pool, rows, slot_T)
    write = torch.ops.npu.npu_scatter_nd_update_ if donate else torch.ops.npu.npu_scatter_nd_update
    written = write(pool, slots.to(torch.int32)[:, None], rows.contiguous())
    return pages if donate else written.unflatten(0, pages.shape[:2])


# small things --------------------------------------------------------------------------------------------------------


def block_size(batch: Batch) -> int:
    table_BU, row_S = batch.block_table_BU, batch.row_S
    return 0 if table_BU is None or row_S is None else row_S.shape[0] // max(1, table_BU.numel())


def _valid_first(topk_TK: Tensor, valid_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Move valid entries to the front, in their order, and make all others -1: the operator stops at the first."""
    order_TK = (~valid_TK).to(torch.int8).argsort(dim=-1, stable=True)
    valid_TK = valid_TK.gather(1, order_TK)
    return torch.where(valid_TK, topk_TK.gather(1, order_TK), -1).to(torch.int32), valid_TK


def _ascending(row_TK: Tensor, valid_TK: Tensor) -> Tensor:
    """Sort valid entries, with -1 for all others behind them."""
    beyond = torch.iinfo(torch.int32).max
    row_TK = torch.where(valid_TK, row_TK, beyond).sort(dim=-1).values
    return torch.where(row_TK < beyond, row_TK, -1).to(torch.int32)


def _pad_heads(q_THE: Tensor) -> Tensor:
    """Add heads of zeros, up to a number that the operator takes."""
    heads = q_THE.shape[1]
    return pad(q_THE, (0, 0, 0, next(n for n in HEADS if n >= heads) - heads))


def _apart(rows: Rows, value_dim: int) -> tuple[Tensor, Tensor]:
    if isinstance(rows, SplitRows):
        return rows.latent_SL.contiguous(), rows.rope_SR.contiguous()
    return rows[:, :value_dim].contiguous(), rows[:, value_dim:].contiguous()


def _filled(like: Tensor, value: int) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=like.device)
