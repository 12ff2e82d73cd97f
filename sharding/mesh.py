"""Meshes of ranks, and specs that say which mesh axis splits which dim of a tensor.

A mesh of shape ``MeshShape(cp=2, tp=3)`` has 6 ranks, numbered row by row: rank = cp · 3 + tp. On it a [4, 6] tensor is
cut so:

==================  ==============  =======================================
spec                local shape     who holds what
==================  ==============  =======================================
``P()``             [4, 6]          every rank holds all of it
``P("cp")``         [2, 6]          the first index of the rank cuts dim 0
``P(None, "tp")``   [4, 2]          the second index of the rank cuts dim 1
``P("cp", "tp")``   [2, 2]          each rank holds a piece of its own
==================  ==============  =======================================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from sfa_functional.precision import require

Dim = str | tuple[str, ...] | None


@dataclass(frozen=True, init=False, repr=False)
class P:
    """A partition spec: for each dim of a tensor the mesh axis that splits it, or None.

    ``P("cp", None)`` splits dim 0 over axis cp; dims that are not named are not split, so ``P("cp")`` is the same for
    any tensor, and ``P()`` is a tensor that every rank holds whole. A tuple of axes splits one dim over all of them,
    the first axis outermost.

    Raises:
        ValueError: an entry that is not an axis, a tuple of axes or None, or an axis used twice.

    Source: jax.sharding.PartitionSpec.
    """

    dims: tuple[Dim, ...]

    def __init__(self, *dims: Dim) -> None:
        for dim in dims:
            named = dim is None or isinstance(dim, str) or (isinstance(dim, tuple) and all(type(a) is str for a in dim))
            require(named, "P", "an entry must be an axis, a tuple of axes or None", repr(dim))
        object.__setattr__(self, "dims", dims)
        require(len(set(self.axes)) == len(self.axes), "P", "a mesh axis may be used once", self)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that splits a dim, in order."""
        return tuple(axis for i in range(len(self.dims)) for axis in self.dim_axes(i))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """Return the mesh axes that split one dim; none where the spec is silent."""
        entry = self.dims[dim] if dim < len(self.dims) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.dims))})"


@dataclass(frozen=True, init=False, repr=False)
class MeshShape:
    """Named axes of a mesh and their sizes, outermost first: ``MeshShape(cp=4, tp=2)`` has 8 ranks.

    Raises:
        ValueError: a size that is not an integer >= 1.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, **axes: int) -> None:
        for name, size in axes.items():
            require(type(size) is int and size >= 1, "MeshShape", f"{name} must be an integer >= 1", repr(size))
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", tuple(axes.values()))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def axis_size(self, *axes: str) -> int:
        """Return how many ranks one axis, or several together, have.

        Raises:
            ValueError: an axis that the mesh does not have.
        """
        self._require("axis_size", 0, axes)
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)

    def axis_index(self, rank: int, *axes: str) -> int:
        """Return a rank's place on one axis, or on several together with the first outermost.

        Raises:
            ValueError: an axis or a rank that the mesh does not have.
        """
        self._require("axis_index", rank, axes)
        place = 0
        for axis in axes:
            i = self.names.index(axis)
            place = place * self.sizes[i] + rank // math.prod(self.sizes[i + 1 :]) % self.sizes[i]
        return place

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from a rank on the given axes alone, ordered by `axis_index`.

        Raises:
            ValueError: an axis or a rank that the mesh does not have.
        """
        self._require("group", rank, axes)
        return _group(self, rank, axes)

    def require_axes(self, function: str, spec: P) -> None:
        """Refuse a spec that names an axis which this mesh does not have."""
        unknown = [axis for axis in spec.axes if axis not in self.names]
        require(not unknown, function, f"{spec} must name axes of {self}", ", ".join(map(repr, unknown)))

    def local_slices(self, function: str, spec: P, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """Return which part of a tensor of a given shape a rank holds.

        Args:
            function: who asks, for the error.
            spec: how the tensor is split.
            shape: of the whole tensor.
            rank: whose part.

        Returns:
            One slice per dim.

        Raises:
            ValueError: more entries than dims, a dim that the axes' sizes do not divide, or an axis or a rank that
                the mesh does not have.
        """
        self.require_axes(function, spec)
        self._require(function, rank, ())
        rule = f"{spec} must not name more dims than the tensor has"
        require(len(spec.dims) <= len(shape), function, rule, list(shape))
        slices = []
        for dim, count in enumerate(shape):
            axes = spec.dim_axes(dim)
            ranks = self.axis_size(*axes)
            require(count % ranks == 0, function, f"{spec} must divide dim {dim} by {ranks} ranks", list(shape))
            start = self.axis_index(rank, *axes) * (count // ranks)
            slices.append(slice(start, start + count // ranks))
        return tuple(slices)

    def _require(self, function: str, rank: int, axes: tuple[str, ...]) -> None:
        unknown = [axis for axis in axes if axis not in self.names]
        require(not unknown, function, f"axes must be of {self}", ", ".join(map(repr, unknown)))
        known = type(rank) is int and 0 <= rank < self.size
        require(known, function, f"rank must be in 0..{self.size - 1}", repr(rank))

    def __repr__(self) -> str:
        return f"MeshShape({', '.join(f'{name}={size}' for name, size in zip(self.names, self.sizes, strict=True))})"


@lru_cache(maxsize=4096)
def _group(shape: MeshShape, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    others = [axis for axis in shape.names if axis not in axes]
    mine = [r for r in range(shape.size) if shape.axis_index(r, *others) == shape.axis_index(rank, *others)]
    return tuple(sorted(mine, key=lambda r: shape.axis_index(r, *axes)))


class Transfer(NamedTuple):
    """One rank's part in one collective, as a simulated mesh records it."""

    rank: int
    axes: tuple[str, ...]
    collective: str
    phase: str  # "forward" or "backward"
    shape: tuple[int, ...]  # of what the rank brings
    bytes_sent: int


@dataclass(frozen=True, eq=False)
class SimulatedMesh:
    """Ranks imagined in one process; made by `simulated_mesh`."""

    shape: MeshShape
    record: list[Transfer] | None = field(default=None, repr=False)


def simulated_mesh(shape: MeshShape, *, record: list[Transfer] | None = None) -> SimulatedMesh:
    """Imagine a mesh of ranks in this process, for `shard_map`.

    Args:
        shape: axes and sizes.
        record: a list to which every rank's part in every collective is appended as a `Transfer`, in the order in
            which the ranks take part.

    Returns:
        The mesh.

    Raises:
        ValueError: something else than a `MeshShape`.

    Source: the axes and their order are those of jax.sharding.Mesh.
    """
    require(isinstance(shape, MeshShape), "simulated_mesh", "shape must be a MeshShape", repr(shape))
    return SimulatedMesh(shape, record)
