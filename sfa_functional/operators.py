"""The blockwise functions as operators: opaque to tracers, differentiable once, mapped over a batch by a loop.

`torch.compile` and `torch.export` see one node instead of the loop over tiles. The operators are declared with
``Library.define`` and wrapped in ``torch.autograd.Function``: that, unlike ``torch.library.custom_op`` with
``register_autograd``, also works under ``torch.func.grad`` and ``jacrev``. A second derivative is refused by `_Once`;
``jvp`` by torch itself: a Function that defined one, if only to say so, could not be compiled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import blockwise_dense, blockwise_heads, blockwise_indexer, blockwise_kl, blockwise_sparse
from .paged import Rows, SplitRows
from .precision import wide, without_autocast

LIBRARY = torch.library.Library("sfa_functional", "FRAGMENT")
PLAIN: dict[Any, Callable[..., Any]] = {}
"""The plain function behind each operator: modes that count operations or watch calls don't see inside of one."""


def one_by_one(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of vmap for a function of tensors: call it for each member of the batch, stack the results.

    Of an argument that is a list ``in_dims`` has a list, of None.
    """

    def batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        results = [
            call(*(x.select(dim, b) if isinstance(dim, int) else x for x, dim in zip(arguments, in_dims, strict=True)))
            for b in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return batched


def operator(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Declare an operator: its schema, what it runs, and empty results for tracers."""
    name = schema.split("(", 1)[0]

    def without_casts(q: Tensor, *arguments: Any) -> Any:
        with without_autocast(q):
            return run(q, *arguments)

    def never_a_constant(*arguments: Any) -> Any:
        """Refuse what would come back as zeros: compiled, torch.func.grad forgets a Function's backward (2.13)."""
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            raise ValueError(f"{name}: torch.func.grad inside of torch.compile is not possible; use backward()")
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    LIBRARY.define(schema)
    overload = getattr(torch.ops.sfa_functional, name).default
    PLAIN[overload] = without_casts
    LIBRARY.impl(name, without_casts, "CompositeExplicitAutograd")
    LIBRARY.impl(name, never_a_constant, "Autograd")
    torch.library.register_fake(f"sfa_functional::{name}", shapes, lib=LIBRARY)
    torch.library.register_vmap(f"sfa_functional::{name}", one_by_one(overload), lib=LIBRARY)
    return overload


def rows_of(rows: Tensor, rope: Tensor | None) -> Rows:
    """Put key rows together again: an operator takes plain tensors, the second None where rows are joint."""
    return rows if rope is None else SplitRows(latent_SL=rows, rope_SR=rope)


def tensors_of(kv: Rows) -> tuple[Tensor, Tensor | None]:
    """Take key rows apart for an operator."""
    return (kv.latent_SL, kv.rope_SR) if isinstance(kv, SplitRows) else (kv, None)


def constant(*inputs: Tensor | None) -> bool:
    """Say whether a traced call carries no gradient: Dynamo warns where it traces a Function that it won't need."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs if x is not None)
    return torch.compiler.is_compiling() and not learns


def gradients_of(dkv_SE: Tensor, rows: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast the wide gradient of joint key rows and cut it like the rows."""
    dkv_SE = dkv_SE.to(rows.dtype)
    if rope is None:
        return dkv_SE, None
    latent_SL, rope_SR = dkv_SE.split([rows.shape[1], rope.shape[1]], dim=-1)
    return latent_SL, rope_SR


def once(name: str, *arguments: Any) -> Any:
    """Run a backward operator that can't itself be differentiated, and says so.

    A traced backward calls the operator alone: Dynamo can't nest one Function in another's backward, and compiled
    functions have no second derivative anyway.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops.sfa_functional, name).default(*arguments)
    run: Callable[..., Any] = _Once.apply
    return run(name, *arguments)


class _Once(torch.autograd.Function):
    """Raises where torch would take an operator without an autograd kernel for a constant."""

    @staticmethod
    def forward(name: str, *arguments: Any) -> Any:
        return getattr(torch.ops.sfa_functional, name).default(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[0].removesuffix("_backward")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError(f"{ctx.function}: gradients must be taken once; got a second derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return one_by_one(_Once.apply)(info, in_dims, *arguments)


def _attention_shapes(q_THE: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    out_THL = q_THE.new_empty(*q_THE.shape[:2], value_dim)
    return out_THL, q_THE.new_empty(q_THE.shape[:2], dtype=wide(q_THE.dtype))


def _attention_gradient_shapes(q_THE: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return q_THE.new_empty(q_THE.shape), q_THE.new_empty(rows.shape[0], q_THE.shape[2], dtype=wide(q_THE.dtype))


# --- sparse attention ----------------------------------------------------------------------------------------------

_SPARSE = operator(
    "sparse_attention(Tensor q, Tensor rows, Tensor? rope, Tensor topk, float scale, int value_dim,"
    " int workspace_bytes) -> (Tensor, Tensor)",
    lambda q, rows, rope, topk, scale, value_dim, workspace_bytes: blockwise_sparse.sparse_attention(
        q, rows_of(rows, rope), topk, scale=scale, value_dim=value_dim, workspace_bytes=workspace_bytes
    ),
    lambda q, rows, rope, topk, scale, value_dim, workspace_bytes: _attention_shapes(q, value_dim),
)
operator(
    "sparse_attention_backward(Tensor q, Tensor rows, Tensor? rope, Tensor topk, Tensor d_out, Tensor d_lse,"
    " float scale, int workspace_bytes) -> (Tensor, Tensor)",
    lambda q, rows, rope, topk, d_out, d_lse, scale, workspace_bytes: blockwise_sparse.sparse_attention_backward(
        q, rows_of(rows, rope), topk, d_out, d_lse, scale=scale, workspace_bytes=workspace_bytes
    ),
    lambda q, rows, *_: _attention_gradient_shapes(q, rows),
)


class _SparseAttention(torch.autograd.Function):
    """Saves q, the rows and the selection."""

    @staticmethod
    def forward(
        q: Tensor,
        rows: Tensor,
        rope: Tensor | None,
        topk: Tensor,
        scale: float,
        value_dim: int,
        workspace_bytes: int,
    ) -> Any:
        return _SPARSE(q, rows, rope, topk, scale, value_dim, workspace_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, rows, rope, topk, ctx.scale, _, ctx.workspace_bytes = inputs
        ctx.save_for_backward(q, rows, rope, topk)

    @staticmethod
    def backward(ctx: Any, *d_out_lse: Tensor) -> Any:
        q, rows, rope, topk = ctx.saved_tensors
        inputs = q, rows, rope, topk, *d_out_lse, ctx.scale, ctx.workspace_bytes
        dq_THE, dkv_SE = once("sparse_attention_backward", *inputs)
        return dq_THE, *gradients_of(dkv_SE, rows, rope), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return one_by_one(_SparseAttention.apply)(info, in_dims, *arguments)


def sparse_attention(
    q_THE: Tensor, kv: Rows, topk_TK: Tensor, *, scale: float, value_dim: int, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Attend to selected rows, differentiably. See `attention.sparse_attention`."""
    tensors = q_THE, *tensors_of(kv)
    run = _SPARSE if constant(*tensors) else _SparseAttention.apply
    return run(*tensors, topk_TK, float(scale), value_dim, workspace_bytes)


# --- dense attention -----------------------------------------------------------------------------------------------

_DENSE = operator(
    "dense_attention(Tensor q, Tensor rows, Tensor? rope, Tensor start, Tensor end, Tensor? row_S, float scale,"
    " int value_dim, int workspace_bytes) -> (Tensor, Tensor)",
    lambda q, rows, rope, start, end, row_S, scale, value_dim, workspace_bytes: blockwise_dense.dense_attention(
        q, rows_of(rows, rope), start, end, row_S, scale=scale, value_dim=value_dim, workspace_bytes=workspace_bytes
    ),
    lambda q, rows, rope, start, end, row_S, scale, value_dim, workspace_bytes: _attention_shapes(q, value_dim),
)
operator(
    "dense_attention_backward(Tensor q, Tensor rows, Tensor? rope, Tensor start, Tensor end, Tensor? row_S,"
    " Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, float scale, int workspace_bytes) -> (Tensor, Tensor)",
    lambda q, rows, rope, *tensors_scale_bytes: blockwise_dense.dense_attention_backward(
        q,
        rows_of(rows, rope),
        *tensors_scale_bytes[:-2],
        scale=tensors_scale_bytes[-2],
        workspace_bytes=tensors_scale_bytes[-1],
    ),
    lambda q, rows, *_: _attention_gradient_shapes(q, rows),
)


class _DenseAttention(torch.autograd.Function):
    """Saves q, the rows, the ranges, out and lse."""

    @staticmethod
    def forward(
        q: Tensor,
        rows: Tensor,
        rope: Tensor | None,
        start: Tensor,
        end: Tensor,
        row_S: Tensor | None,
        scale: float,
        value_dim: int,
        workspace_bytes: int,
    ) -> Any:
        return _DENSE(q, rows, rope, start, end, row_S, scale, value_dim, workspace_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale, _, ctx.workspace_bytes = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *d_out_lse: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: activation checkpointing gives them out a single time
        dq_THE, dkv_SE = once("dense_attention_backward", *saved, *d_out_lse, ctx.scale, ctx.workspace_bytes)
        return dq_THE, *gradients_of(dkv_SE, *saved[1:3]), None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return one_by_one(_DenseAttention.apply)(info, in_dims, *arguments)


def dense_attention(
    q_THE: Tensor,
    kv: Rows,
    start_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
    row_S: Tensor | None,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Attend to visible rows, differentiably. See `attention.dense_attention`."""
    tensors = q_THE, *tensors_of(kv)
    run = _DENSE if constant(*tensors) else _DenseAttention.apply
    return run(*tensors, start_T, end_T, row_S, float(scale), value_dim, workspace_bytes)


# --- attention with keys and values per head -----------------------------------------------------------------------

_HEADS = operator(
    "attend_per_head(Tensor q, Tensor rows, Tensor? rope, Tensor w_uk, Tensor w_uv, Tensor topk, Tensor start,"
    " Tensor end, Tensor? row_S, int[] runs, float scale, int workspace_bytes) -> Tensor",
    lambda q, rows, rope, *tensors_numbers: blockwise_heads.attend_per_head(
        q, rows_of(rows, rope), *tensors_numbers[:-3], **_head_numbers(*tensors_numbers[-3:])
    ),
    lambda q, rows, rope, w_uk, w_uv, *_: q.new_empty(*q.shape[:2], w_uv.shape[1]),
)
operator(
    "attend_per_head_backward(Tensor q, Tensor rows, Tensor? rope, Tensor w_uk, Tensor w_uv, Tensor topk, Tensor start,"
    " Tensor end, Tensor? row_S, Tensor d_value, int[] runs, float scale, int workspace_bytes)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda q, rows, rope, *tensors_numbers: blockwise_heads.attend_per_head_backward(
        q, rows_of(rows, rope), *tensors_numbers[:-3], **_head_numbers(*tensors_numbers[-3:])
    ),
    lambda q, rows, rope, w_uk, w_uv, *_: (
        q.new_empty(q.shape),
        q.new_empty(rows.shape[0], q.shape[2] - w_uk.shape[1] + w_uk.shape[2], dtype=wide(q.dtype)),
        *(w.new_empty(w.shape, dtype=wide(w.dtype)) for w in (w_uk, w_uv)),
    ),
)


def _head_numbers(runs: list[int], scale: float, workspace_bytes: int) -> dict[str, Any]:
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    return {"runs": pairs, "scale": scale, "workspace_bytes": workspace_bytes}


class _AttendPerHead(torch.autograd.Function):
    """Saves q, the rows, the up-projections, the selection and the ranges."""

    @staticmethod
    def forward(
        q: Tensor,
        rows: Tensor,
        rope: Tensor | None,
        w_uk: Tensor,
        w_uv: Tensor,
        topk: Tensor,
        start: Tensor,
        end: Tensor,
        row_S: Tensor | None,
        runs: list[int],
        scale: float,
        workspace_bytes: int,
    ) -> Any:
        return _HEADS(q, rows, rope, w_uk, w_uv, topk, start, end, row_S, runs, scale, workspace_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.runs, ctx.scale, ctx.workspace_bytes = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_value: Tensor) -> Any:
        saved = ctx.saved_tensors
        inputs = *saved, d_value, ctx.runs, ctx.scale, ctx.workspace_bytes
        dq_THX, dkv_SE, *dw = once("attend_per_head_backward", *inputs)
        dw_uk_HPL, dw_uv_HVL = (x.to(saved[3].dtype) for x in dw)
        return dq_THX, *gradients_of(dkv_SE, *saved[1:3]), dw_uk_HPL, dw_uv_HVL, *[None] * 7

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return one_by_one(_AttendPerHead.apply)(info, in_dims, *arguments)


def attend_per_head(
    q_THX: Tensor,
    kv: Rows,
    w_uk_HPL: Tensor,
    w_uv_HVL: Tensor,
    topk_TK: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    row_S: Tensor | None,
    *,
    runs: list[int],
    scale: float,
    workspace_bytes: int,
) -> Tensor:
    """Attend per head, differentiably; ``runs`` is flat. See `blockwise_heads.attend_per_head`."""
    tensors = q_THX, *tensors_of(kv), w_uk_HPL, w_uv_HVL
    run = _HEADS if constant(*tensors) else _AttendPerHead.apply
    return run(*tensors, topk_TK, start_T, end_T, row_S, runs, float(scale), workspace_bytes)


# --- the indexer ---------------------------------------------------------------------------------------------------

_INDEXER = operator(
    "lightning_indexer(Tensor q, Tensor k, Tensor w, Tensor start, Tensor end, Tensor? row_S, int top,"
    " int workspace_bytes) -> Tensor",
    lambda *tensors_k_bytes: blockwise_indexer.lightning_indexer(
        *tensors_k_bytes[:-2], k=tensors_k_bytes[-2], workspace_bytes=tensors_k_bytes[-1]
    ),
    lambda q, *rest: q.new_empty(q.shape[0], rest[-2], dtype=torch.int32),
)


def lightning_indexer(
    q_TJI: Tensor,
    k_SI: Tensor,
    w_TJ: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    *,
    k: int,
    row_S: Tensor | None,
    workspace_bytes: int,
) -> Tensor:
    """Score and select; integers come out, and no gradient. See `indexer.lightning_indexer`."""
    return _INDEXER(q_TJI, k_SI, w_TJ, start_T, end_T, row_S, k, workspace_bytes)


# --- the indexer's loss --------------------------------------------------------------------------------------------

_KL = operator(
    "indexer_kl(Tensor q, Tensor k, Tensor w, Tensor q_attention, Tensor rows, Tensor? rope, Tensor start, Tensor end,"
    " Tensor? topk, float scale, int workspace_bytes) -> Tensor",
    lambda q, k, w, q_attention, rows, rope, start, end, topk, scale, workspace_bytes: blockwise_kl.indexer_kl(
        q, k, w, q_attention, rows_of(rows, rope), start, end, topk, scale=scale, workspace_bytes=workspace_bytes
    ),
    lambda q, *_: q.new_empty(q.shape[0], dtype=wide(q.dtype)),
)
operator(
    "indexer_kl_backward(Tensor q, Tensor k, Tensor w, Tensor q_attention, Tensor rows, Tensor? rope, Tensor start,"
    " Tensor end, Tensor? topk, Tensor d_kl, float scale, int workspace_bytes) -> (Tensor, Tensor, Tensor)",
    lambda q, k, w, q_attention, rows, rope, start, end, topk, d_kl, scale, workspace_bytes: (
        blockwise_kl.indexer_kl_backward(
            q,
            k,
            w,
            q_attention,
            rows_of(rows, rope),
            start,
            end,
            topk,
            d_kl,
            scale=scale,
            workspace_bytes=workspace_bytes,
        )
    ),
    lambda q, k, w, *_: (q.new_empty(q.shape), k.new_empty(k.shape, dtype=wide(k.dtype)), w.new_empty(w.shape)),
)


class _IndexerKL(torch.autograd.Function):
    """Saves the inputs."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        w: Tensor,
        q_attention: Tensor,
        rows: Tensor,
        rope: Tensor | None,
        start: Tensor,
        end: Tensor,
        topk: Tensor | None,
        scale: float,
        workspace_bytes: int,
    ) -> Any:
        return _KL(q, k, w, q_attention, rows, rope, start, end, topk, scale, workspace_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale, ctx.workspace_bytes = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_kl: Tensor) -> Any:
        tensors = ctx.saved_tensors
        dq_TJI, dk_SI, dw_TJ = once("indexer_kl_backward", *tensors, d_kl, ctx.scale, ctx.workspace_bytes)
        return dq_TJI, dk_SI.to(tensors[1].dtype), dw_TJ, None, None, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return one_by_one(_IndexerKL.apply)(info, in_dims, *arguments)


def indexer_kl(
    q_TJI: Tensor,
    k_SI: Tensor,
    w_TJ: Tensor,
    q_THE: Tensor,
    kv: Rows,
    start_T: Tensor,
    end_T: Tensor,
    topk_TK: Tensor | None,
    *,
    scale: float,
    workspace_bytes: int,
) -> Tensor:
    """Return each query's divergence, differentiably by the indexer's tensors. See `losses.indexer_kl`."""
    tensors = q_TJI, k_SI, w_TJ, q_THE, *tensors_of(kv), start_T, end_T, topk_TK
    run = _KL if constant(q_TJI, k_SI, w_TJ) else _IndexerKL.apply
    return run(*tensors, float(scale), workspace_bytes)


_MEAN = operator(
    "mean_weights(Tensor q, Tensor rows, Tensor? rope, Tensor start, Tensor end, Tensor? row_S, int low, int high,"
    " float scale) -> Tensor",
    lambda q, rows, rope, start, end, row_S, low, high, scale: blockwise_kl.mean_weights(
        q, rows_of(rows, rope), start, end, row_S, low=low, high=high, scale=scale
    ),
    lambda q, rows, rope, start, end, row_S, low, high, scale: q.new_empty(q.shape[0], high - low, dtype=wide(q.dtype)),
)


def mean_weights(
    q_tHE: Tensor,
    kv: Rows,
    start_t: Tensor,
    end_t: Tensor,
    span: tuple[int, int],
    *,
    scale: float,
    row_S: Tensor | None = None,
) -> Tensor:
    """Return a tile's weights over its span of keys, averaged over heads. See `blockwise_kl.mean_weights`."""
    return _MEAN(q_tHE, *tensors_of(kv), start_t, end_t, row_S, *span, float(scale))
