"""DTensors as arguments and results of `shard_map`: a spec and placements say the same in two ways.

==================  =============================================
spec                placements on a mesh of axes cp, tp
==================  =============================================
``P()``             ``[Replicate(), Replicate()]``
``P("cp")``         ``[Shard(0), Replicate()]``
``P(None, "tp")``   ``[Replicate(), Shard(1)]``
``P("cp", "tp")``   ``[Shard(0), Shard(1)]``
==================  =============================================
"""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sfa_functional.precision import require

from .mesh import MeshShape, P


def is_dtensor(x: Any) -> bool:
    """Say whether this is a DTensor. Their module takes seconds to import: where nobody did, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def placements(shape: MeshShape, spec: P) -> tuple[Any, ...]:
    """Translate a spec into a placement for each mesh axis.

    Raises:
        ValueError: a dim that is split over several axes in another order than the mesh's: DTensors have no such.
    """
    from torch.distributed.tensor import Replicate, Shard

    for dim in range(len(spec.dims)):
        axes = [axis for axis in shape.names if axis in spec.dim_axes(dim)]
        rule = f"{spec} must name the axes of a dim in the mesh's order, for DTensors"
        require(tuple(axes) == spec.dim_axes(dim), "shard_map", rule, shape)
    dims = {axis: dim for dim in range(len(spec.dims)) for axis in spec.dim_axes(dim)}
    return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in shape.names)


def home_of(leaves: Sequence[Any], shape: MeshShape) -> DeviceMesh | None:
    """Return the mesh of the DTensors among an argument's leaves; None if there are none.

    Raises:
        ValueError: DTensors of another mesh than these axes and ranks.
    """
    meshes = [x.device_mesh for x in leaves if is_dtensor(x)]
    for mesh in meshes:
        same = mesh.mesh_dim_names == shape.names and tuple(mesh.shape) == shape.sizes
        same = same and mesh.mesh.flatten().tolist() == list(range(shape.size))
        require(same, "shard_map", f"DTensors must be on a mesh of the axes of {shape}, over all ranks", mesh)
    return meshes[0] if meshes else None


def local_part(x: Any, spec: P, shape: MeshShape) -> Any:
    """Return this rank's part of a DTensor that is placed as a spec says; anything else as it is.

    Raises:
        ValueError: one placed otherwise, a Partial one for example: nothing is redistributed without a word.

    Gradients: come back placed as x is. Those of a replicated x must be the sum over ranks already.
    """
    if not is_dtensor(x):
        return x
    want = placements(shape, spec)
    pairs = zip(x.placements, want, shape.sizes, strict=True)
    placed = all(a == b or (size == 1 and not a.is_partial()) for a, b, size in pairs)
    rule = f"a DTensor for {spec} must be placed {list(want)}; redistribute it first"
    require(placed, "shard_map", rule, list(x.placements))
    return x.to_local(grad_placements=x.placements)


def from_part(x: Tensor, spec: P, shape: MeshShape, home: DeviceMesh) -> Tensor:
    """Make a DTensor of what each rank has of it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, home, placements(shape, spec), run_check=False)
