"""Which dtype a sum is taken in, and the checks that every public function makes of its arguments."""

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

CAST_ROWS = 32
"""Rows for which weights that lie by columns are worth a cast: it takes as long as 30 rows in bfloat16."""
CAST_BYTES = 64 << 20
"""Bytes of weights in float32 that a product holds at a time."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, softmax, norms and rotations: float32, or float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which blockwise products of x are taken.

    bfloat16 where the device multiplies it: the result comes rounded to bfloat16 and goes on in float32. Elsewhere
    that of sums: without such instructions a CPU takes 20 to 80 times as long for a product in bfloat16.
    """
    return torch.bfloat16 if x.dtype == torch.bfloat16 and _multiplies_bfloat16(x.device.type) else wide(x.dtype)


@cache
def _multiplies_bfloat16(device: str) -> bool:
    if device != "cpu":
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the (batched) matrix product, taken in `product_dtype` and returned in the dtype of sums."""
    dtype = product_dtype(a if a.dtype.itemsize <= b.dtype.itemsize else b)
    return (a.to(dtype) @ b.to(dtype)).to(wide(dtype))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in their dtype, for a few or many rows a and weights b.

    bfloat16 products of `CAST_ROWS` rows or more are taken in float32 where the device has no instructions for them,
    and rounded once, as those in bfloat16 are: 0.7 s instead of 3.8 for 1024 rows by [1536, 24576], two threads. With
    weights that lie by rows, as W_UK does, one row is enough: 2 ms instead of 10 for 64 heads of GLM-5.
    """
    if not _worth_casting(a, b):
        return a @ b
    run: Callable[[Tensor, Tensor], Tensor] = _Float32Product.apply
    return run(a, b)


def linear(x_TX: Tensor, w_YX: Tensor) -> Tensor:
    """Return ``x Wᵀ`` as ``torch.nn.functional.linear`` does, taken as `matmul`."""
    return matmul(x_TX, w_YX.mT) if _worth_casting(x_TX, w_YX.mT) else torch.nn.functional.linear(x_TX, w_YX)


def _worth_casting(a: Tensor, b: Tensor) -> bool:
    if torch.compiler.is_compiling() or not a.dtype == b.dtype == torch.bfloat16:  # first: a size looked at is guarded
        return False
    return product_dtype(a) != torch.bfloat16 and (a.shape[-2] >= CAST_ROWS or b.stride(-1) == 1)


class _Float32Product(torch.autograd.Function):
    """Casts a part of the weights at a time, forward and backward, and saves none of the casts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        a_float = a.float()
        return torch.cat([(a_float @ part.float()).to(a.dtype) for part in _parts(b)], dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        da = db = None
        if ctx.needs_input_grad[0]:
            parts = _parts(b)
            cut = d.float().split([part.shape[-1] for part in parts], dim=-1)
            products = (d_part @ part.float().mT for d_part, part in zip(cut, parts, strict=True))
            da = reduce(torch.add, products).to(a.dtype)
        if ctx.needs_input_grad[1]:
            a_float = a.float()
            cut = d.split([part.shape[-1] for part in _parts(b)], dim=-1)
            db = torch.cat([(a_float.mT @ part.float()).to(b.dtype) for part in cut], dim=-1)
        return da, db


def _parts(b: Tensor) -> tuple[Tensor, ...]:
    """Cut columns into parts of which each takes `CAST_BYTES` in float32, or is one column."""
    return b.split(max(1, CAST_BYTES // (4 * max(1, b[..., :1].numel()))), dim=-1)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Suspend ``torch.autocast`` on x's device: it would take products in bfloat16 that are promised in float32."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def require(ok: bool, function: str, rule: str, got: object) -> None:
    """Raise ``ValueError("function: rule; got value")`` unless ``ok``. Looks at shapes and dtypes, never at data."""
    if not ok:
        raise ValueError(f"{function}: {rule}; got {got}")


def require_integers(function: str, count: int, **tensors: Tensor | None) -> None:
    """Refuse tensors that are not one-dimensional, of ``count`` integers."""
    for name, x in tensors.items():
        if x is not None:
            whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
            require(
                x.ndim == 1 and x.shape[0] == count and whole,
                function,
                f"{name} must be {count} integers",
                (x.dtype, tuple(x.shape)),
            )


def require_float(function: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that are not floating point, and floating tensors of different dtypes."""
    given = {name: x for name, x in tensors.items() if x is not None}
    for name, x in given.items():
        require(x.is_floating_point(), function, f"{name} must be floating point", x.dtype)
    dtypes = {name: x.dtype for name, x in given.items()}
    require(len(set(dtypes.values())) <= 1, function, f"{', '.join(dtypes)} must have one dtype", list(dtypes.values()))


def require_rows(function: str, count: int, **tensors: Tensor | None) -> None:
    """Refuse tensors whose first dim is not ``count``."""
    for name, x in tensors.items():
        require(
            x is None or (x.ndim > 0 and x.shape[0] == count),
            function,
            f"{name} must have {count} rows",
            None if x is None else tuple(x.shape),
        )


def require_lengths(function: str, **lengths: Sequence[int] | Tensor) -> list[int]:
    """Refuse lengths that are not a sequence of integers >= 0; return them as a list. Waits where they are a tensor."""
    ((name, values),) = lengths.items()
    listed = values.tolist() if isinstance(values, Tensor) else values
    require(isinstance(listed, Iterable), function, f"{name} must be a sequence of integers", repr(listed))
    listed = list(listed)
    for value in listed:
        whole = hasattr(value, "__index__") and not isinstance(value, bool) and value >= 0
        require(whole, function, f"{name} must be integers >= 0", repr(value))
    return [operator.index(value) for value in listed]
