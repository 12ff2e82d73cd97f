"""Ranks that are processes: how they find each other, and how tensors really get from one to another.

The only file that names ``torch.distributed`` (and `sharding.dtensors` its tensors).
"""

import atexit
import itertools
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sfa_functional.precision import require

from .agreement import PATIENCE, Absent, AgreedTransport, Agreement, gather_lines
from .collectives import Collectives, DifferentiableCollectives, Pending, Transport, spell_ranks
from .mesh import MeshShape

BACKENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""What moves tensors of a device type."""


@dataclass(frozen=True, eq=False)
class DistributedMesh:
    """Ranks that are processes, of which this is one; made by `distributed_mesh`."""

    shape: MeshShape
    rank: int
    device_mesh: DeviceMesh = field(repr=False)
    agreement: Agreement = field(repr=False)
    groups: Mapping[frozenset[str], Any] = field(repr=False)  # process groups, by the axes on which their ranks differ

    def transport(self, axes: tuple[str, ...]) -> Transport:
        """Return what moves tensors over one axis, or over several with the first outermost."""
        members = self.shape.group(self.rank, *axes)
        return AgreedTransport(ProcessTransport(self.groups[frozenset(axes)], members), self.agreement, axes)


def distributed_mesh(
    shape: MeshShape, device_type: str, *, timeout: float = 60.0, check: bool = True
) -> DistributedMesh:
    """Make a mesh of the processes that run this script, for `shard_map`; process r is rank r.

    Under torchrun nothing else is needed: processes that ``torch.distributed`` has not joined yet are joined here, and
    part when the interpreter exits. To be called by all processes, once for a script: each call makes groups anew.

    Args:
        shape: axes and sizes; there must be as many processes as ranks.
        device_type: where tensors live, which decides what moves them: "cpu" (gloo), "cuda" (nccl), "npu" (hccl). The
            device is the process's current one; where processes are joined here, that of torchrun's local rank.
        timeout: seconds within which every rank ends with an error if another one dies, raises, hangs, or never came.
        check: let ranks tell each other what they are about to do before each collective. Without, ranks that call
            other collectives or bring other shapes may exchange wrong contents, crash or wait for the timeout, and
            results declared replicated are not compared.

    Returns:
        The mesh. Its ``device_mesh`` is the ``DeviceMesh`` to distribute DTensors over.

    Raises:
        ValueError: something else than a `MeshShape` with an axis, another number of ranks than of processes, an
            unknown device type or one that this torch has no backend for, a timeout that is not positive, or processes
            that nobody joined and that torchrun did not start.
        RuntimeError: ranks that did not come in time, by number, or that ask for another mesh.

    Cost: one process group for each choice of axes. With ``check``, each collective takes four round trips to the
        store, about as long as a small all_gather by gloo, and starts when the last rank has come to it; each call of
        `shard_map` takes a dozen more, and waits for the device where it compares results. Switch it off to measure
        speed.
    Source: torch.distributed.device_mesh.init_device_mesh.
    """
    function = "distributed_mesh"
    known = isinstance(shape, MeshShape) and len(shape.names) > 0
    require(known, function, "shape must be a MeshShape with at least one axis", repr(shape))
    known = isinstance(device_type, str) and device_type in BACKENDS
    require(known, function, f"device_type must be one of {', '.join(map(repr, BACKENDS))}", repr(device_type))
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout)
    require(number and timeout > 0, function, "timeout must be a number of seconds > 0", repr(timeout))
    require(isinstance(check, bool), function, "check must be True or False", repr(check))
    backend = BACKENDS[device_type]
    rule = f"{device_type!r} needs a torch with the backend {backend!r}"
    require(dist.is_available() and dist.is_backend_available(backend), function, rule, torch.__version__)
    limit = timedelta(seconds=PATIENCE * timeout)
    deadline = time.monotonic() + limit.total_seconds()  # of all that follows, so that nobody waits twice as long
    if not dist.is_initialized():
        _join(shape, device_type, backend, limit, deadline)
    _require_size(shape, dist.get_world_size())

    rank, number_of = dist.get_rank(), next(_MADE)
    world: Any = dist.group.WORLD
    store = dist.PrefixStore(f"sharding/{number_of}", world.get_group_store().clone())  # type: ignore[attr-defined]
    wanted = f"distributed_mesh({shape}, {device_type!r}, timeout={timeout}, check={check})"
    _come(store, wanted, rank, shape.size, limit, deadline)
    groups: dict[frozenset[str], Any] = {}
    for count in range(1, len(shape.names) + 1):
        for axes in itertools.combinations(shape.names, count):
            for members in sorted({shape.group(r, *axes) for r in range(shape.size)}):
                with _joined_by(backend, members):  # every process takes part in every group's making
                    made = dist.new_group(list(members), backend=backend, timeout=limit)
                if rank in members:
                    groups[frozenset(axes)] = made
    device_mesh = DeviceMesh.from_group(
        [groups[frozenset({axis})] for axis in shape.names],
        device_type,
        mesh=torch.arange(shape.size).view(shape.sizes),
        mesh_dim_names=shape.names,
    )
    return DistributedMesh(
        shape, rank, device_mesh, Agreement(shape, rank, store, timeout=timeout, check=check), groups
    )


def distributed_collectives(group: Any = None) -> Collectives:
    """Return the `Collectives` of a ``torch.distributed`` process group.

    Args:
        group: a ``ProcessGroup``; None is the default one. Weights want a group of their own
            (``torch.distributed.new_group``): a small collective waits behind a large broadcast of the same group.
            Give that group its ``timeout=``: it does not take over the one of ``init_process_group``, and a rank that
            died is noticed only then.

    Returns:
        One axis's collectives. Sums are taken in the tensor's own dtype, by the backend. Ranks are not checked against
        each other; those of a `distributed_mesh` are.

    Raises:
        RuntimeError: no process group was made; in a collective, what the backend can't move (gloo: int16) or a rank
            that is gone.

    Gradients: those of `sharding.collectives`' table.
    Cost: a reduce_scatter sends as much as an all_reduce: gloo has the former for some dtypes only.
    Source: torch.distributed.
    """
    return DifferentiableCollectives(ProcessTransport(group))


class ProcessTransport:
    """Moves tensors within a process group; ``members`` are its ranks in the order of the mesh axes, if in another."""

    def __init__(self, group: Any, members: Sequence[int] | None = None) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        ordered = list(range(self._size)) if members is None else [sorted(members).index(r) for r in members]
        self._places = ordered  # of each rank on the axes, its rank in the group
        self._sorted = ordered == sorted(ordered)

    @property
    def rank(self) -> int:
        """This rank's place on the axes."""
        return self._places.index(self._rank)

    @property
    def size(self) -> int:
        """Number of ranks on the axes."""
        return self._size

    def start(self, collective: str, x: Tensor, source: int, out: Tensor | None) -> Pending:
        """Start a collective; see `sharding.collectives.Transport`."""
        there = out is x  # the same object, not the same address: under func.grad tensors are wrapped and have none
        x = x.contiguous()
        group, size = self._group, self._size
        into = None
        if collective == "all_gather" and not self._sorted:
            into, out = out, None
        if collective == "all_to_all" and not self._sorted:
            x = x.unflatten(0, (size, -1))[[self._places.index(i) for i in range(size)]].flatten(0, 1)
        moved = x.view(torch.uint8) if x.dtype.itemsize == 1 and x.dtype != torch.bool else x  # gloo knows no fp8
        origin = self._places[source]
        match collective:
            case "all_gather":
                result = x.new_empty((size * x.shape[0], *x.shape[1:])) if out is None else out
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                work = gather(result.view(moved.dtype), moved, group=group, async_op=True)
            case "broadcast":
                result = x.clone() if out is None else out
                if self._rank == origin and out is not None and not there:
                    result.copy_(x)
                sender = origin if group is None else dist.get_global_rank(group, origin)
                work = dist.broadcast(result.view(moved.dtype), sender, group=group, async_op=True)
            case "all_to_all":
                result = torch.empty_like(x)
                work = dist.all_to_all_single(result.view(moved.dtype), moved, group=group, async_op=True)
            case "all_reduce" | "reduce_scatter" | "reduce":
                result = x.clone()
                work = dist.all_reduce(result, group=group, async_op=True)
            case _:
                raise ValueError(f"distributed_collectives: there is no collective {collective!r}")
        order = None if self._sorted or collective not in ("all_gather", "all_to_all") else self._places
        return _ProcessPending(collective, work, result, self.rank, size, source, order, into)


class _ProcessPending:
    """A reduce_scatter and a reduce are cut out of the sum that all get: gloo has them for some dtypes only."""

    def __init__(
        self,
        collective: str,
        work: Any,
        result: Tensor,
        rank: int,
        size: int,
        source: int,
        order: list[int] | None,
        into: Tensor | None,
    ) -> None:
        self._collective, self._work, self._result = collective, work, result
        self._rank, self._size, self._source = rank, size, source
        self._order, self._into = order, into

    def wait(self) -> Tensor:
        self._work.wait()
        if self._collective == "reduce_scatter":
            return self._result.unflatten(0, (self._size, -1))[self._rank].clone()
        if self._collective == "reduce" and self._rank != self._source:
            return torch.zeros_like(self._result)
        if self._order is not None:
            ordered = self._result.unflatten(0, (self._size, -1))[self._order].flatten(0, 1)
            return ordered if self._into is None else self._into.copy_(ordered)
        return self._result


_MADE = itertools.count()
"""Numbers the meshes of this process, so that each has keys of its own in a store that outlives it."""


def _join(shape: MeshShape, device_type: str, backend: str, limit: timedelta, deadline: float) -> None:
    """Join the processes that torchrun has started."""
    function, names = "distributed_mesh", ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    rule = "processes must be started by torchrun, or joined by torch.distributed.init_process_group"
    require(not missing, function, rule, f"no {', '.join(missing)} in the environment")
    rank, size, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    _require_size(shape, size)
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if not keeps:
        _await_listener(address, port, limit, deadline)
    try:
        store = dist.TCPStore(address, port, size, keeps, limit, wait_for_workers=False)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise RuntimeError(f"distributed_mesh: {address}:{port} keeps no store: {_first_line(error)}") from None
    joining = dist.PrefixStore(f"sharding/join/{next(_MADE)}", store)  # type: ignore[attr-defined]
    try:
        _come(joining, repr(device_type), rank, size, limit, deadline)
    except RuntimeError:
        if keeps:  # the others give up in this moment: let them read who is missing
            time.sleep(min(1.0, limit.total_seconds() * (1 - PATIENCE)))
        raise
    if device_type != "cpu" and "LOCAL_RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    with _joined_by(backend, range(size)):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    atexit.register(_part, store, rank, size, keeps)


def _await_listener(address: str, port: int, limit: timedelta, deadline: float) -> None:
    """Wait until somebody keeps the store. `TCPStore` would try for twice its timeout, and tell stderr all about it."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.01, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                text = f"nobody kept the store at {address}:{port} within {limit.total_seconds():.3g} s; rank 0 must"
                raise RuntimeError(f"distributed_mesh: {text} ({error})") from None
            time.sleep(0.05)


def _part(store: Any, rank: int, size: int, keeps: bool) -> None:
    """Leave when the interpreter exits; who keeps the store stays until the others have left, or for a moment."""
    try:
        ranks = range(size) if keeps else [rank]
        gather_lines(store, "", rank, ranks, key=lambda r: f"sharding/left/{r}", patience=2.0)
    except RuntimeError:
        pass
    if dist.is_initialized():
        dist.destroy_process_group()


def _come(store: Any, wanted: str, rank: int, size: int, limit: timedelta, deadline: float) -> None:
    """Wait until all ranks are here and want the same."""
    patience = deadline - time.monotonic()
    try:
        lines = gather_lines(store, wanted, rank, range(size), key=lambda r: f"come/{r}", patience=patience)
    except Absent as error:
        text = f"{spell_ranks(error.ranks)} of {size} did not come within {limit.total_seconds():.3g} s"
        raise RuntimeError(f"distributed_mesh: {text}") from None
    except RuntimeError as error:
        text = f"the store that the ranks share is gone, and who keeps it: {_first_line(error)}"
        raise RuntimeError(f"distributed_mesh: {text}") from error
    for other, line in lines.items():
        if line != lines[0]:
            text = f"all ranks must ask for the same; rank 0: {lines[0]}, rank {other}: {line}"
            raise RuntimeError(f"distributed_mesh: {text}")


@contextmanager
def _joined_by(backend: str, members: Sequence[int]) -> Iterator[None]:
    """Say in one line that a process group can't be made."""
    try:
        yield
    except RuntimeError as error:
        text = f"{spell_ranks(members)} could not be joined by {backend}"
        raise RuntimeError(f"distributed_mesh: {text}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _require_size(shape: MeshShape, size: int) -> None:
    rule = f"{shape} must have as many ranks as there are processes"
    require(size == shape.size, "distributed_mesh", rule, size)
