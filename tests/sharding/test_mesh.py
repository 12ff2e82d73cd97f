"""Meshes and specs: ranks are numbered row by row, and a spec cuts a tensor axis by axis."""

import itertools

import pytest
import torch

import sharding
from sharding import MeshShape, P

MESHES = [MeshShape(), MeshShape(cp=1), MeshShape(cp=4), MeshShape(cp=2, tp=3), MeshShape(pp=2, cp=3, tp=2)]


def coordinates(mesh):
    """List every rank's coordinates, in the order of ranks: the last axis runs fastest."""
    return [dict(zip(mesh.names, place, strict=True)) for place in itertools.product(*map(range, mesh.sizes))]


def choices(mesh):
    """Yield every ordered choice of axes."""
    for count in range(len(mesh.names) + 1):
        yield from itertools.permutations(mesh.names, count)


# ---- specs -----------------------------------------------------------------------------------------------------------


def test_a_spec_lists_its_axes_in_order():
    spec = P("cp", None, ("pp", "tp"))
    assert spec.dims == ("cp", None, ("pp", "tp"))
    assert spec.axes == ("cp", "pp", "tp")
    assert [spec.dim_axes(i) for i in range(5)] == [("cp",), (), ("pp", "tp"), (), ()]
    assert P().axes == P(None, None).axes == ()


def test_specs_are_values():
    assert P("cp", None) == P("cp", None)
    assert P("cp") != P("cp", None)
    assert P("cp", "tp") != P(("cp", "tp"))
    assert len({P("cp"), P("cp"), P("tp"), P(("cp", "tp")), P(("tp", "cp")), P()}) == 5
    with pytest.raises(AttributeError):
        P("cp").dims = ()


@pytest.mark.parametrize("spec", [P(), P("cp"), P(None, "tp"), P(("cp", "tp"), None), P(("cp",))])
def test_the_repr_of_a_spec_makes_it_again(spec):
    assert eval(repr(spec)) == spec


def test_the_repr_of_a_spec_is_as_it_is_written():
    assert repr(P("cp", None, ("pp", "tp"))) == "P('cp', None, ('pp', 'tp'))"
    assert repr(P()) == "P()"


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((1,), "P: an entry must be an axis, a tuple of axes or None; got 1"),
        (("cp", ["tp"]), "P: an entry must be an axis, a tuple of axes or None; got ['tp']"),
        ((("cp", None),), "P: an entry must be an axis, a tuple of axes or None; got ('cp', None)"),
        (("cp", "cp"), "P: a mesh axis may be used once; got P('cp', 'cp')"),
        (("cp", None, ("tp", "cp")), "P: a mesh axis may be used once; got P('cp', None, ('tp', 'cp'))"),
        ((("tp", "tp"),), "P: a mesh axis may be used once; got P(('tp', 'tp'))"),
    ],
)
def test_specs_that_say_nothing_clear_are_refused_in_one_line(dims, message, unchecked):
    with pytest.raises(ValueError) as error:
        P(*dims)
    assert str(error.value) == message


# ---- mesh shapes -----------------------------------------------------------------------------------------------------


def test_a_mesh_shape_names_its_axes_outermost_first():
    mesh = MeshShape(cp=4, tp=2)
    assert (mesh.names, mesh.sizes, mesh.size) == (("cp", "tp"), (4, 2), 8)
    assert MeshShape().size == 1
    assert repr(mesh) == "MeshShape(cp=4, tp=2)"
    assert eval(repr(mesh)) == mesh


def test_mesh_shapes_are_values_in_which_order_counts():
    assert MeshShape(cp=2, tp=3) == MeshShape(cp=2, tp=3)
    assert MeshShape(cp=2, tp=3) != MeshShape(tp=3, cp=2)
    assert len({MeshShape(cp=2), MeshShape(cp=2), MeshShape(cp=3), MeshShape(tp=2)}) == 3


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_axis_sizes_and_places_are_those_of_counting_ranks_row_by_row(mesh):
    places = coordinates(mesh)
    assert mesh.size == len(places)
    for axes in choices(mesh):
        combined = list(itertools.product(*(range(mesh.sizes[mesh.names.index(axis)]) for axis in axes)))
        assert mesh.axis_size(*axes) == len(combined)
        for rank, place in enumerate(places):
            assert mesh.axis_index(rank, *axes) == combined.index(tuple(place[axis] for axis in axes))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_group_is_the_ranks_that_differ_on_its_axes_alone_in_their_order(mesh):
    places = coordinates(mesh)
    for axes in choices(mesh):
        for rank, place in enumerate(places):
            others = [axis for axis in mesh.names if axis not in axes]
            want = [r for r, other in enumerate(places) if all(other[axis] == place[axis] for axis in others)]
            want.sort(key=lambda r: [places[r][axis] for axis in axes])
            assert mesh.group(rank, *axes) == tuple(want)


def cut(count, axes, mesh, place):
    """Cut 0 .. count - 1 by one axis after the other, the first one outermost."""
    part = list(range(count))
    for axis in axes:
        share = len(part) // mesh.sizes[mesh.names.index(axis)]
        part = part[place[axis] * share : (place[axis] + 1) * share]
    return part


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_local_slices_of_every_spec_are_those_of_cutting_axis_by_axis(mesh):
    dims = [None, *mesh.names, *(axes for axes in choices(mesh) if axes)]
    for first, second in itertools.product(dims, repeat=2):
        axes = [() if d is None else (d,) if isinstance(d, str) else d for d in (first, second)]
        if len({*axes[0], *axes[1]}) < len(axes[0]) + len(axes[1]):
            continue
        spec, shape, everything = P(first, second), (12, 24, 2), torch.zeros(12, 24, 2, dtype=torch.int64)
        for rank, place in enumerate(coordinates(mesh)):
            slices = mesh.local_slices("test", spec, shape, rank)
            rows, columns = (cut(n, a, mesh, place) for n, a in zip(shape, axes, strict=False))
            got = [list(range(*s.indices(n))) for s, n in zip(slices, shape, strict=True)]
            assert got == [rows, columns, [0, 1]]
            everything[slices] += 1
        copies = mesh.size // mesh.axis_size(*axes[0], *axes[1])
        assert (everything == copies).all()


def test_the_table_of_local_shapes_of_a_2_by_3_mesh():
    mesh = MeshShape(cp=2, tp=3)
    for spec, shape in [(P(), (4, 6)), (P("cp"), (2, 6)), (P(None, "tp"), (4, 2)), (P("cp", "tp"), (2, 2))]:
        for rank in range(6):
            assert torch.zeros(4, 6)[mesh.local_slices("test", spec, (4, 6), rank)].shape == shape
    assert mesh.local_slices("test", P("cp", "tp"), (4, 6), 5) == (slice(2, 4), slice(4, 6))
    assert mesh.local_slices("test", P(("tp", "cp")), (6,), 1) == (slice(2, 3),)
    assert mesh.local_slices("test", P(("cp", "tp")), (6,), 1) == (slice(1, 2),)
    assert mesh.local_slices("test", P("cp"), (0, 3), 1) == (slice(0, 0), slice(0, 3))
    assert mesh.local_slices("test", P(), (), 4) == ()


MESH = MeshShape(cp=2, tp=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MeshShape(cp=0), "MeshShape: cp must be an integer >= 1; got 0"),
        (lambda: MeshShape(cp=2, tp=-1), "MeshShape: tp must be an integer >= 1; got -1"),
        (lambda: MeshShape(cp=2.0), "MeshShape: cp must be an integer >= 1; got 2.0"),
        (lambda: MeshShape(cp=True), "MeshShape: cp must be an integer >= 1; got True"),
        (
            lambda: MESH.local_slices("f", P("cp", "tp"), (4,), 0),
            "f: P('cp', 'tp') must not name more dims than the tensor has; got [4]",
        ),
        (
            lambda: MESH.local_slices("f", P("cp", "tp"), (4, 4), 0),
            "f: P('cp', 'tp') must divide dim 1 by 3 ranks; got [4, 4]",
        ),
        (
            lambda: MESH.local_slices("f", P(None, ("cp", "tp")), (4, 3), 0),
            "f: P(None, ('cp', 'tp')) must divide dim 1 by 6 ranks; got [4, 3]",
        ),
        (
            lambda: MESH.require_axes("f", P("dp", ("cp", "pp"))),
            "f: P('dp', ('cp', 'pp')) must name axes of MeshShape(cp=2, tp=3); got 'dp', 'pp'",
        ),
    ],
)
def test_misfits_are_refused_in_one_line(call, message, unchecked):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize(
    "call",
    [
        lambda: MESH.axis_size("pp"),
        lambda: MESH.axis_index(0, "cp", "pp"),
        lambda: MESH.group(0, "pp"),
        lambda: MESH.local_slices("f", P("cp", "pp"), (4, 4), 0),
    ],
    ids=["axis_size", "axis_index", "group", "local_slices"],
)
def test_an_axis_that_the_mesh_does_not_have_is_refused_by_name(call):
    with pytest.raises(ValueError, match=r"MeshShape\(cp=2, tp=3\).*; got .*'pp'"):
        call()


@pytest.mark.parametrize("rank", [-1, 6])
@pytest.mark.parametrize(
    "call",
    [
        lambda rank: MESH.axis_index(rank, "cp"),
        lambda rank: MESH.group(rank, "cp"),
        lambda rank: MESH.local_slices("f", P("cp"), (4, 4), rank),
    ],
    ids=["axis_index", "group", "local_slices"],
)
def test_a_rank_that_the_mesh_does_not_have_is_refused(call, rank):
    with pytest.raises(ValueError, match=rf"rank must be in 0\.\.5; got {rank}"):
        call(rank)


def test_require_axes_accepts_what_the_mesh_has():
    for spec in (P(), P("cp"), P(None, ("tp", "cp"))):
        MESH.require_axes("f", spec)


def test_a_simulated_mesh_keeps_its_shape_and_the_list_it_writes_to():
    record = []
    mesh = sharding.simulated_mesh(MESH, record=record)
    assert mesh.shape == MESH
    assert mesh.record is record
    assert sharding.simulated_mesh(MESH).record is None
    assert repr(mesh) == "SimulatedMesh(shape=MeshShape(cp=2, tp=3))"
