"""How the ranks of a mesh run, and how their parts become whole values: as threads of this process, or as processes.

`shard_map` asks four things of a mesh: to run a body on the ranks that are here, to agree on what they returned, to
join results, and to add gradients up.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from sfa_functional.precision import require, wide

from .agreement import Agreement
from .collectives import Collectives, DifferentiableCollectives, Transport
from .dtensors import is_dtensor
from .mesh import MeshShape, P, SimulatedMesh
from .processes import DistributedMesh
from .simulate import SimulatedTransport, run_ranks


class MeshCollectives(Mapping[Any, Collectives]):
    """What a body gets: the `Collectives` of each mesh axis, or of several together, as one rank sees them."""

    def __init__(self, shape: MeshShape, transport: Callable[[tuple[str, ...]], Transport]) -> None:
        self._shape, self._transport, self._made = shape, transport, dict[tuple[str, ...], Collectives]()

    def __getitem__(self, axes: str | tuple[str, ...]) -> Collectives:
        """Return the collectives of an axis, or of several taken together."""
        named = (axes,) if isinstance(axes, str) else axes
        known = isinstance(named, tuple) and len(named) > 0 and all(axis in self._shape.names for axis in named)
        require(known and len(set(named)) == len(named), "comm", f"axes must be of {self._shape}", repr(axes))
        if named not in self._made:
            self._made[named] = DifferentiableCollectives(self._transport(named))
        return self._made[named]

    def __contains__(self, axis: object) -> bool:
        return axis in self._shape.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._shape.names)

    def __len__(self) -> int:
        return len(self._shape.names)


@runtime_checkable
class Ranks(Protocol):
    """What `shard_map` asks of a mesh. Lists are by rank, of those that are here."""

    @property
    def shape(self) -> MeshShape:
        """Axes and sizes."""

    @property
    def here(self) -> Sequence[int]:
        """The ranks that run in this process."""

    def during(self, title: str, leaves: Sequence[Any], learning: Sequence[bool]) -> AbstractContextManager[None]:
        """Be in a pass over the mesh; what its arguments are, and which learn, must be the same on all ranks."""

    def run(self, body: Callable[[int, MeshCollectives], Any], phase: str) -> list[Any]:
        """Run a body on each rank that is here."""

    def settle(self, results: Sequence[Sequence[Any]], trees: Sequence[TreeSpec], specs: Sequence[P]) -> Sequence[bool]:
        """Refuse results that are not alike; say for each leaf whether a gradient can come back through any rank's."""

    def join(self, parts: Sequence[Tensor], spec: P) -> Tensor:
        """Make a whole value of the ranks' parts."""

    def add_up(
        self, gradients: Sequence[Sequence[Tensor | None]], inputs: Sequence[Tensor], specs: Sequence[P], whole: Any
    ) -> list[Tensor | None]:
        """Make the gradients of whole arguments (of parts, where ``whole`` says False) of those of the ranks' parts."""


class ThreadRanks:
    """The ranks of a simulated mesh: all of them are here."""

    def __init__(self, mesh: SimulatedMesh) -> None:
        self.shape, self.here, self._record = mesh.shape, range(mesh.shape.size), mesh.record

    def during(self, title: str, leaves: Sequence[Any], learning: Sequence[bool]) -> AbstractContextManager[None]:
        """As `Ranks.during`: nothing to agree on, all have the same arguments."""
        return nullcontext()

    def run(self, body: Callable[[int, MeshCollectives], Any], phase: str) -> list[Any]:
        """As `Ranks.run`: in threads, one at a time."""

        def on_rank(rank: int) -> Any:
            return body(rank, MeshCollectives(self.shape, lambda axes: SimulatedTransport(self.shape, rank, axes)))

        return run_ranks(self.shape, on_rank, phase=phase, record=self._record)

    def settle(self, results: Sequence[Sequence[Any]], trees: Sequence[TreeSpec], specs: Sequence[P]) -> Sequence[bool]:
        """As `Ranks.settle`."""
        for rank, (leaves, tree) in enumerate(zip(results, trees, strict=True)):
            same = tree == trees[0] and all(map(_same_kind, leaves, results[0]))
            require(same, "shard_map", "every rank must return the same structure", f"ranks 0 and {rank} that differ")
        columns = list(zip(*results, strict=True))
        for column, spec in zip(columns, specs, strict=True):
            for rank, part in enumerate(column) if isinstance(column[0], Tensor) else ():
                first = holder(self.shape, spec, rank)
                if rank != first and not _same_values(part.detach(), column[first].detach()):
                    rule = f"a result of {spec} must be the same on the ranks that hold it"
                    got = f"{_apart(part, column[first])} between ranks {first}, {rank}"
                    raise ValueError(f"shard_map: {rule}; got {got}")
        return [any(isinstance(x, Tensor) and x.requires_grad for x in column) for column in columns]

    def join(self, parts: Sequence[Tensor], spec: P) -> Tensor:
        """As `Ranks.join`."""
        joined = parts[0].new_empty(whole_shape(self.shape, spec, parts[0]))
        for rank, part in enumerate(parts):
            if holder(self.shape, spec, rank) == rank:
                cut(self.shape, joined, spec, rank).copy_(part)
        return joined

    def add_up(
        self, gradients: Sequence[Sequence[Tensor | None]], inputs: Sequence[Tensor], specs: Sequence[P], whole: Any
    ) -> list[Tensor | None]:
        """As `Ranks.add_up`."""
        return [self._sum(column, spec) for column, spec in zip(zip(*gradients, strict=True), specs, strict=True)]

    def _sum(self, gradients: Sequence[Tensor | None], spec: P) -> Tensor | None:
        known = [g for g in gradients if g is not None]
        if not known:
            return None
        dtype = known[0].dtype
        total = known[0].new_zeros(whole_shape(self.shape, spec, known[0]), dtype=_sum_dtype(dtype))
        for rank, gradient in enumerate(gradients):
            if gradient is not None:
                cut(self.shape, total, spec, rank).add_(gradient)
        return total.to(dtype)


class ProcessRanks:
    """The ranks of a distributed mesh: one of them is here."""

    def __init__(self, mesh: DistributedMesh) -> None:
        self.shape, self.here, self._mesh = mesh.shape, (mesh.rank,), mesh

    @property
    def _agreement(self) -> Agreement:
        return self._mesh.agreement

    def during(self, title: str, leaves: Sequence[Any], learning: Sequence[bool]) -> AbstractContextManager[None]:
        """As `Ranks.during`."""
        pairs = zip(leaves, learning, strict=True) if self._agreement.check else ()
        return self._agreement.during(title, [_spell(leaf) + " that learns" * learns for leaf, learns in pairs])

    def run(self, body: Callable[[int, MeshCollectives], Any], phase: str) -> list[Any]:
        """As `Ranks.run`: here and now."""
        return [body(self._mesh.rank, MeshCollectives(self.shape, self._mesh.transport))]

    def settle(self, results: Sequence[Sequence[Any]], trees: Sequence[TreeSpec], specs: Sequence[P]) -> Sequence[bool]:
        """As `Ranks.settle`: structures, and a fingerprint of what must be the same, travel; nothing else does."""
        (leaves,), (tree,) = results, trees
        learns = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        if not self._agreement.check:
            return learns
        structure = hashlib.sha256(json.dumps([str(tree), *map(_spell, leaves)]).encode()).hexdigest()
        compared = [i for i, spec in enumerate(specs) if isinstance(leaves[i], Tensor) and self._copies(spec)]
        prints = torch.stack([fingerprint(leaves[i].detach()) for i in compared]).tolist() if compared else []
        told = self._agreement.close([structure, learns, prints])
        for rank, (other, _, _) in enumerate(told):
            same = other == told[0][0]
            require(same, "shard_map", "every rank must return the same structure", f"ranks 0 and {rank} that differ")
        for place, i in enumerate(compared):
            for rank, (_, _, others) in enumerate(told):
                first = holder(self.shape, specs[i], rank)
                rule = f"a result of {specs[i]} must be the same on the ranks that hold it"
                same = others[place] == told[first][2][place]
                require(same, "shard_map", rule, f"different values between ranks {first}, {rank}")
        return [any(flags) for flags in zip(*(flags for _, flags, _ in told), strict=True)]

    def join(self, parts: Sequence[Tensor], spec: P) -> Tensor:
        """As `Ranks.join`: by one gather."""
        (part,) = parts
        gathered = self._move("all_gather", spec.axes, part[None]) if spec.axes else part[None]
        joined = part.new_empty(whole_shape(self.shape, spec, part))
        members = self.shape.group(self._mesh.rank, *spec.axes)
        for rank, piece in zip(members, gathered, strict=True):
            cut(self.shape, joined, spec, rank).copy_(piece)
        return joined

    def add_up(
        self, gradients: Sequence[Sequence[Tensor | None]], inputs: Sequence[Tensor], specs: Sequence[P], whole: Any
    ) -> list[Tensor | None]:
        """As `Ranks.add_up`: a sum over the ranks that hold a copy, then a gather."""
        (mine,) = gradients
        there = [gradient is not None for gradient in mine]
        if self._agreement.check:
            there = [any(flags) for flags in zip(*self._agreement.close(there), strict=True)]
        else:
            there = [x.requires_grad for x in inputs]
        found: list[Tensor | None] = []
        for gradient, x, spec, known, joins in zip(mine, inputs, specs, there, whole, strict=True):
            if not known:
                found.append(None)
                continue
            total = torch.zeros_like(x) if gradient is None else gradient.detach()
            copies = self._copies(spec)
            if copies:
                total = self._move("all_reduce", copies, total.to(_sum_dtype(x.dtype))).to(x.dtype)
            found.append(self.join([total], spec) if joins else total)
        return found

    def _copies(self, spec: P) -> tuple[str, ...]:
        """Return the axes on which ranks hold the same, if there are other ranks on them."""
        axes = tuple(axis for axis in self.shape.names if axis not in spec.axes)
        return axes if self.shape.axis_size(*axes) > 1 else ()

    def _move(self, collective: str, axes: tuple[str, ...], x: Tensor) -> Tensor:
        return self._mesh.transport(axes).start(collective, x, 0, None).wait()


def ranks_of(mesh: SimulatedMesh | DistributedMesh) -> Ranks:
    """Return the ranks of a mesh."""
    return ThreadRanks(mesh) if isinstance(mesh, SimulatedMesh) else ProcessRanks(mesh)


def cut(shape: MeshShape, x: Tensor, spec: P, rank: int) -> Tensor:
    """Return a rank's part of a whole value."""
    return x[shape.local_slices("shard_map", spec, x.shape, rank)]


def holder(shape: MeshShape, spec: P, rank: int) -> int:
    """Return the first of the ranks that hold the same part as this one."""
    return min(shape.group(rank, *(axis for axis in shape.names if axis not in spec.axes)))


def whole_shape(shape: MeshShape, spec: P, part: Tensor) -> list[int]:
    """Return the shape of the whole value that a part belongs to."""
    return [count * shape.axis_size(*spec.dim_axes(dim)) for dim, count in enumerate(part.shape)]


def fingerprint(x: Tensor) -> Tensor:
    """Map a tensor to two int64 that differ, but for chance of 2^-64 or so, where values do.

    0 and -0 are the same value, and so are all NaN.
    """
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.is_floating_point():
        x = x.float() if x.itemsize == 1 else x
        x = torch.where(x != x, torch.nan, torch.where(x == 0, 0.0, x)).to(x.dtype)
    code = x.contiguous().flatten().view(torch.uint8)
    code = torch.nn.functional.pad(code, (0, -code.shape[0] % 8)).view(torch.int64)
    place = torch.arange(code.shape[0], device=x.device)
    sums = []
    for first, second in ((-7046029254386353131, -4417276706812531889), (1609587929392839161, -8796714831421723037)):
        mixed = (code + (place + 1) * first) * second  # odd constants: int64 wraps around, and nothing is lost
        mixed = (mixed ^ (mixed >> 29)) * first
        sums.append((mixed ^ (mixed >> 32)).sum())
    return torch.stack(sums)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return wide(dtype) if dtype.is_floating_point else dtype


def _spell(leaf: Any) -> str:
    """Say what kind of argument this is; values that are plain are said too."""
    if isinstance(leaf, Tensor):
        placed = "DTensor " if is_dtensor(leaf) else ""
        return f"{placed}{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype)
    return repr(leaf) if plain else type(leaf).__name__


def _same_kind(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    return type(a) is type(b) and (a is b or bool(a == b) or bool(a != a and b != b))


def _same_values(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() and a.itemsize == 1:
        a, b = a.float(), b.float()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _apart(a: Tensor, b: Tensor) -> str:
    if a.dtype == torch.bool or a.numel() == 0:
        return "different values"
    if a.is_complex():
        return f"a difference of {float((a.detach() - b.detach()).abs().max()):.3g}"
    return f"a difference of {float((a.detach().double() - b.detach().double()).abs().max()):.3g}"
