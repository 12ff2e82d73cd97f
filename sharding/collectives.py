"""What ranks can do together, one mesh axis at a time, and how gradients pass through it.

A function on many ranks takes a `Collectives` and calls it; it never asks how the ranks are run. All operations work on
dim 0, all ranks of the axis must make the same calls in the same order with the same shapes.

Gradients are those of the sum, over ranks, of what each rank differentiates. So

===============  =================================================================
collective       its gradient
===============  =================================================================
all_gather       reduce_scatter
reduce_scatter   all_gather
all_to_all       all_to_all
all_reduce       all_reduce
broadcast        a sum on the source, zero elsewhere
===============  =================================================================

and a loss that each of N ranks computes in full counts N times.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import Function

from sfa_functional.precision import require


@runtime_checkable
class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Return the result, once it is there; to be called once."""


@runtime_checkable
class Collectives(Protocol):
    """One mesh axis as seen by one rank. Every method is called by all ranks of the axis."""

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""

    @property
    def size(self) -> int:
        """Number of ranks on the axis, N."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[C, ...] on each rank -> [N·C, ...], rank after rank, on all."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[N·C, ...] on each rank -> the sum over ranks of the r-th C rows, on rank r."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """[N·C, ...] on each rank; rank r gets the r-th C rows of every rank, rank after rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, on all."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return the source's tensor, on all; the others bring one of its shape."""

    def all_gather_start(self, x: Tensor, *, out: Tensor | None = None) -> Pending:
        """Start an `all_gather`; x must not be changed before ``wait()``. With ``out``, the result is written there."""

    def broadcast_start(self, x: Tensor, source: int, *, out: Tensor | None = None) -> Pending:
        """Start a `broadcast`; x must not be changed before ``wait()``. With ``out``, as `all_gather_start`."""


@runtime_checkable
class Transport(Protocol):
    """How tensors really get from rank to rank; knows nothing of gradients."""

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""

    def start(self, collective: str, x: Tensor, source: int, out: Tensor | None) -> Pending:
        """Start a collective by name: one of `Collectives`, or "reduce": the sum on the source, zero elsewhere.

        The result is written to ``out`` if that is given (it may be x itself), else to memory of its own.
        """


_TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
    "broadcast": "reduce",
    "reduce": "broadcast",
}


class DifferentiableCollectives:
    """`Collectives` over a transport, with gradients: in ``backward()``, ``torch.func.grad`` and ``vmap`` of it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self._transport.size

    def all_gather(self, x: Tensor) -> Tensor:
        """As `Collectives.all_gather`."""
        return self.all_gather_start(x).wait()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """As `Collectives.reduce_scatter`."""
        return self._start("reduce_scatter", x).wait()

    def all_to_all(self, x: Tensor) -> Tensor:
        """As `Collectives.all_to_all`."""
        return self._start("all_to_all", x).wait()

    def all_reduce(self, x: Tensor) -> Tensor:
        """As `Collectives.all_reduce`."""
        return self._start("all_reduce", x).wait()

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """As `Collectives.broadcast`."""
        return self.broadcast_start(x, source).wait()

    def all_gather_start(self, x: Tensor, *, out: Tensor | None = None) -> Pending:
        """As `Collectives.all_gather_start`."""
        return self._start("all_gather", x, out=out)

    def broadcast_start(self, x: Tensor, source: int, *, out: Tensor | None = None) -> Pending:
        """As `Collectives.broadcast_start`."""
        known = type(source) is int and 0 <= source < self.size
        require(known, "broadcast", f"source must be in 0..{self.size - 1}", repr(source))
        return self._start("broadcast", x, source, out=out)

    def _start(self, collective: str, x: Tensor, source: int = 0, out: Tensor | None = None) -> Pending:
        if collective not in ("all_reduce", "broadcast"):
            require(x.ndim >= 1, collective, "there must be a dim 0", tuple(x.shape))
        if collective in ("reduce_scatter", "all_to_all"):
            require(x.shape[0] % self.size == 0, collective, f"{self.size} ranks must divide dim 0", tuple(x.shape))
        if out is None:
            return _Started(_Call(self._transport, collective, source), x)
        shape = (x.shape[0] * self.size, *x.shape[1:]) if collective == "all_gather" else tuple(x.shape)
        fits = out.dtype == x.dtype and tuple(out.shape) == shape
        require(fits, collective, f"out must be {x.dtype} {list(shape)}", (out.dtype, list(out.shape)))
        learning = torch.is_grad_enabled() and (x.requires_grad or out.requires_grad)
        require(not learning, collective, "what is written to out= must not require grad", tuple(x.shape))
        call = _Call(self._transport, collective, source)
        call.pending = self._transport.start(collective, x, source, out)
        return call


class _Call:
    """One collective of one rank. It starts inside of one autograd function and is waited for inside of another."""

    def __init__(self, transport: Transport, collective: str, source: int) -> None:
        self.transport, self.collective, self.source = transport, collective, source
        self.pending: Pending | None = None

    def start(self, x: Tensor) -> None:
        self.pending = self.transport.start(self.collective, x, self.source, None)

    def wait(self) -> Tensor:
        if self.pending is None:
            raise RuntimeError(f"{self.collective}: wait() must be called once; got a second call")
        pending, self.pending = self.pending, None
        return pending.wait()

    def transposed(self, gradient: Tensor) -> Tensor:
        call = _Call(self.transport, _TRANSPOSED[self.collective], self.source)
        return _Started(call, gradient).wait()


class _Started:
    """A handle. Data travels from `_Start` on; the graph's node is made in `wait`."""

    def __init__(self, call: _Call, x: Tensor) -> None:
        self._call, self._x = call, _start(x, call)

    def wait(self) -> Tensor:
        return _wait(self._x, self._call)


def _start(x: Tensor, call: _Call) -> Tensor:
    return _Start.apply(x, call)  # type: ignore[no-untyped-call]


def _wait(x: Tensor, call: _Call) -> Tensor:
    return _Wait.apply(x, call)  # type: ignore[no-untyped-call]


class _Start(Function):
    """Hand the plain tensor, free of any transform, to the transport; pass x on."""

    @staticmethod
    def forward(x: Tensor, call: _Call) -> Tensor:
        call.start(x.detach())
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, call: _Call) -> tuple[Tensor, int]:
        return _start(x.movedim(in_dims[0] or 0, -1), call), -1


class _Wait(Function):
    """Return what arrived; in backward, run the transposed collective."""

    @staticmethod
    def forward(x: Tensor, call: _Call) -> Tensor:
        return call.wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call = inputs[1]
        if not (output.is_floating_point() or output.is_complex()):
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.call.transposed(gradient), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, call: _Call) -> tuple[Tensor, int]:
        return _wait(x.movedim(in_dims[0] or 0, -1), call), -1


class PendingRows:
    """Several tensors' rows under way in one gather."""

    def __init__(self, pending: Pending, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> None:
        self._pending, self._shapes, self._dtypes = pending, shapes, dtypes

    def wait(self) -> tuple[Tensor, ...]:
        """Return the gathered rows of each tensor."""
        rows = self._pending.wait()
        if rows.dtype == torch.uint8:
            return unpack_rows(rows, self._shapes, self._dtypes)
        parts = rows.split([shape.numel() for shape in self._shapes], dim=1)
        return tuple(part.reshape(part.shape[0], *shape) for part, shape in zip(parts, self._shapes, strict=True))


def gather_rows_start(comm: Collectives, *tensors: Shaped[Tensor, "rows *_"]) -> PendingRows:
    """Start one gather for the rows of several tensors, packed side by side.

    Args:
        comm: one axis.
        tensors: [C, ...] each, of the same C.

    Returns:
        A handle whose ``wait()`` returns one [N·C, ...] tensor for each.

    Raises:
        ValueError: different numbers of rows, or tensors of several dtypes of which one requires grad (those travel
            as bytes, which have no gradient).

    Gradients: of each tensor, by one reduce_scatter, where all have one dtype.
    Cost: one gather; a copy of the rows on each side.
    Source: one packed gather for several small ones, vllm-project/vllm-ascend#12984.
    """
    _require_rows("gather_rows_start", tensors)
    shapes, dtypes = [x.shape[1:] for x in tensors], [x.dtype for x in tensors]
    if len(set(dtypes)) == 1 and dtypes[0] != torch.uint8:
        return PendingRows(comm.all_gather_start(torch.cat([_matrix(x) for x in tensors], dim=1)), shapes, dtypes)
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    require(not learning, "gather_rows_start", "rows of several dtypes must not require grad", dtypes)
    return PendingRows(comm.all_gather_start(pack_rows(*tensors)), shapes, dtypes)


def pack_rows(*tensors: Shaped[Tensor, "rows *_"]) -> Shaped[Tensor, "rows bytes"]:
    """Lay the bytes of several tensors' rows side by side.

    Args:
        tensors: [C, ...] each, of the same C and any dtypes.

    Returns:
        uint8 [C, bytes of a row].

    Raises:
        ValueError: no tensors, or different numbers of rows.

    Gradients: none (bytes).
    """
    _require_rows("pack_rows", tensors)
    return torch.cat([_matrix(x.detach()).contiguous().view(torch.uint8) for x in tensors], dim=1)


def unpack_rows(
    packed: Shaped[Tensor, "rows bytes"], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, ...]:
    """Take rows apart that `pack_rows` laid side by side, bit for bit.

    Args:
        packed: uint8 [C, bytes of a row].
        shapes: of one row of each tensor.
        dtypes: of each tensor.

    Returns:
        One [C, ...] tensor for each, with memory of its own.

    Raises:
        ValueError: another number of bytes in a row, or of shapes than of dtypes.
    """
    require(len(shapes) == len(dtypes), "unpack_rows", f"there must be {len(dtypes)} shapes", len(shapes))
    widths = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    fits = packed.ndim == 2 and packed.dtype == torch.uint8 and packed.shape[1] == sum(widths)
    require(fits, "unpack_rows", f"packed must be uint8 [rows, {sum(widths)}]", (packed.dtype, tuple(packed.shape)))
    parts = packed.split(widths, dim=1)
    return tuple(  # a copy even of a single row: where it starts need not be a multiple of the dtype's size
        part.clone(memory_format=torch.contiguous_format).flatten().view(dtype).view(packed.shape[0], *shape)
        for part, shape, dtype in zip(parts, shapes, dtypes, strict=True)
    )


def _require_rows(function: str, tensors: Sequence[Tensor]) -> None:
    fits = bool(tensors) and all(x.ndim >= 1 and x.shape[0] == tensors[0].shape[0] for x in tensors)
    require(fits, function, "tensors must have one number of rows", [tuple(x.shape) for x in tensors])


def _matrix(x: Tensor) -> Tensor:
    return x.flatten(1) if x.ndim > 1 else x[:, None]


def spell_call(collective: str, source: int, kind: tuple[torch.dtype, Sequence[int]]) -> str:
    """Say what a rank calls: "broadcast from 1 of float32 [3, 4]"."""
    origin = f" from {source}" if collective in ("broadcast", "reduce") else ""
    return f"{collective}{origin} of {str(kind[0]).removeprefix('torch.')} {list(kind[1])}"


def spell_axes(axes: Sequence[str]) -> str:
    """Say on which axes: "axis 'cp'"."""
    return f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {tuple(axes)}"


def spell_ranks(ranks: Sequence[int]) -> str:
    """Say who: "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
