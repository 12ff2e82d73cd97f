"""shard_map: who holds what, whole values in and out, gradients as on one process, and what it refuses."""

import gc
import itertools
import math
import os
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import sfa_functional as sfa
from sharding import Collectives, MeshShape, P, Rules, param_specs, shard_map, simulated_mesh

pytestmark = pytest.mark.usefixtures("unchecked")  # checks at every call of every rank would take most of the time

CONFIG = replace(sfa.TINY, indexer_types=("full", "shared"))
ROOT = Path(__file__).parent.parent.parent
WHOLE = P()


def _mapped(body, in_specs=WHOLE, out_specs=WHOLE, **axes):
    """Map a body over a mesh, two ranks of "cp" unless said otherwise."""
    return shard_map(body, simulated_mesh(MeshShape(**axes or {"cp": 2})), in_specs=in_specs, out_specs=out_specs)


def _message(run, kind=ValueError):
    with pytest.raises(kind) as error:
        run()
    assert type(error.value) is kind
    text = str(error.value)
    assert "\n" not in text
    return text


def _close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# Axes.


@pytest.mark.parametrize(
    ("axes", "want"),
    [
        ("cp", {0: [0, 3], 1: [1, 4], 2: [2, 5], 3: [0, 3], 4: [1, 4], 5: [2, 5]}),
        ("tp", {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2], 3: [3, 4, 5], 4: [3, 4, 5], 5: [3, 4, 5]}),
        (("cp", "tp"), {rank: [0, 1, 2, 3, 4, 5] for rank in range(6)}),
        (("tp", "cp"), {rank: [0, 3, 1, 4, 2, 5] for rank in range(6)}),
        (("tp",), {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2], 3: [3, 4, 5], 4: [3, 4, 5], 5: [3, 4, 5]}),
    ],
)
def test_axes_join_the_ranks_that_differ_on_them_the_first_outermost(axes, want):
    """On MeshShape(cp=2, tp=3) rank r is at (r // 3, r % 3)."""
    seen = {}

    def body(comm, rank):
        one = comm[axes]
        seen[int(rank)] = one.all_gather(rank).tolist()
        assert seen[int(rank)].index(int(rank)) == one.rank
        assert one.size == len(seen[int(rank)])
        assert isinstance(one, Collectives)

    _mapped(body, P(("cp", "tp")), cp=2, tp=3)(torch.arange(6))
    assert seen == want


def test_three_axes_are_numbered_row_by_row():
    seen = {}

    def body(comm, rank):
        places = tuple(comm[axis].rank for axis in comm)
        seen[int(rank)] = places, comm["c", "a"].all_gather(rank).tolist(), comm["b"].all_gather(rank).tolist()

    _mapped(body, P(("a", "b", "c")), a=2, b=3, c=2)(torch.arange(12))
    for rank, (a, b, c) in enumerate(itertools.product(range(2), range(3), range(2))):
        across = [6 * i + 2 * b + k for k in range(2) for i in range(2)]
        assert seen[rank] == ((a, b, c), across, [6 * a + 2 * j + c for j in range(3)])


def test_a_mesh_without_axes_is_one_rank():
    x = torch.randn(3)
    assert torch.equal(
        shard_map(lambda comm, x: x * 2, simulated_mesh(MeshShape()), in_specs=P(), out_specs=P())(x), x * 2
    )


def test_comm_is_a_mapping_of_the_axes():
    def body(comm):
        assert list(comm) == ["cp", "tp"]
        assert len(comm) == 2
        assert "cp" in comm
        assert comm["cp"] is comm["cp"] is comm[("cp",)]
        assert comm["cp", "tp"] is not comm["tp", "cp"]
        assert [one.size for one in comm.values()] == [2, 1]

    _mapped(body, (), cp=2, tp=1)()


def test_comm_says_which_axes_it_has_not():
    def body(comm):
        assert "tp" not in comm

    _mapped(body, ())()


@pytest.mark.parametrize("axes", ["tp", (), ("cp", "cp"), ("cp", "tp"), 0, ["cp"], None])
def test_unknown_axes_are_refused(axes):
    message = f"comm: axes must be of MeshShape(cp=2); got {axes!r}"
    assert _message(lambda: _mapped(lambda comm: comm[axes], ())()) == message


# Specs.

SPECS = [
    P(),
    P("cp"),
    P("cp", None),
    P(None, "tp"),
    P("cp", "tp"),
    P("tp", "cp"),
    P(("cp", "tp")),
    P(("tp", "cp")),
    P(None, ("tp", "cp")),
    P(None, None, "cp"),
    P("tp", None, "cp"),
    P(("tp",), ("cp",)),
]


def _part(x, spec, place):
    """Cut a tensor dim by dim, axis by axis, as the spec's docstring says."""
    for dim, entry in enumerate(spec.dims):
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            count = x.shape[dim] // {"cp": 2, "tp": 3}[axis]
            x = x.narrow(dim, place[axis] * count, count)
    return x


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_spec_cuts_an_argument_and_joins_a_result(spec):
    x, seen = torch.randn(6, 12, 4), {}

    def body(comm, x):
        seen[comm["cp"].rank, comm["tp"].rank] = x
        return x * 2

    assert torch.equal(_mapped(body, spec, spec, cp=2, tp=3)(x), x * 2)
    assert len(seen) == 6
    for (cp, tp), got in seen.items():
        assert torch.equal(got, _part(x, spec, {"cp": cp, "tp": tp}))


def test_an_output_may_be_joined_otherwise_than_the_input_was_cut():
    x = torch.arange(6.0)
    got = _mapped(lambda comm, x: x, P(("cp", "tp")), P(("tp", "cp")), cp=2, tp=3)(x)
    assert got.tolist() == [0, 3, 1, 4, 2, 5]
    assert _mapped(lambda comm, x: x[None], P("cp"), P("cp"))(x).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert _mapped(lambda comm, x: x, P(), P("cp"))(x).tolist() == [*range(6), *range(6)]


def test_a_share_may_have_no_rows():
    got = _mapped(lambda comm, x: comm["cp"].all_gather(x), P("cp"), P())(torch.zeros(0, 3))
    assert got.shape == (0, 3)


def _collect(seen):
    def body(comm, *local):
        seen[comm["cp"].rank] = local
        return local

    return body


X, Y = torch.arange(4.0), torch.arange(8.0).view(2, 4)


@pytest.mark.parametrize(
    ("specs", "arguments", "second"),
    [
        (P(), (X, Y), (X, Y)),
        (P("cp"), (X, Y), (X[2:], Y[1:])),
        ((P(), P("cp")), (X, Y), (X, Y[1:])),
        ((P("cp"), P(None, "cp")), (X, Y), (X[2:], Y[:, 2:])),
        (((P("cp"), P()), P()), ((X, Y), X), ((X[2:], Y), X)),
        ((P("cp"),), ({"a": X, "b": (Y, X)},), ({"a": X[2:], "b": (Y[1:], X[2:])},)),
        (({"a": P(), "b": P("cp")},), ({"b": [Y, X], "a": X},), ({"b": [Y[1:], X[2:]], "a": X},)),
        (({"a": P(), "b": [P("cp"), P()]},), ({"a": X, "b": [Y, X]},), ({"a": X, "b": [Y[1:], X]},)),
        ((P("cp"), P()), (X, "word"), (X[2:], "word")),
        ((P("cp"), P("cp"), P("cp")), (X, None, {"n": 3, "x": X}), (X[2:], None, {"n": 3, "x": X[2:]})),
        ((P(), P("cp")), ((), X), ((), X[2:])),
    ],
)
def test_specs_are_prefixes_of_the_arguments(specs, arguments, second):
    """Checked by what rank 1 of two gets; what it returns under the same specs is joined to what was given."""
    seen = {}
    got = _mapped(_collect(seen), specs, specs)(*arguments)
    assert len(seen) == 2
    _assert_same_trees(seen[1], second)
    _assert_same_trees(got, arguments)


def _assert_same_trees(a, b):
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert type(a) is type(b)
    assert tree_map(lambda _: 0, a) == tree_map(lambda _: 0, b)


@pytest.mark.parametrize("layer", [0, 1])
def test_parameters_are_trees_and_so_are_their_specs(layer):
    """A shared layer has no indexer, and neither have its specs."""
    params, seen = sfa.init_params(CONFIG, layer=layer), {}

    def body(comm, params):
        seen[comm["cp"].rank] = params
        return params

    specs = param_specs(CONFIG, Rules(heads="cp"), layer=layer)
    got = _mapped(body, (specs,), specs)(params)
    whole = _mapped(body, P(), P())(params)
    for field in fields(sfa.LayerParams):
        x = getattr(params, field.name)
        if field.name == "indexer":
            assert (x is None) == (got.indexer is None) == (layer == 1)
        elif field.name != "prolog":
            assert torch.equal(getattr(got, field.name), x)
            assert torch.equal(getattr(whole, field.name), x)
    rows = params.q_b_proj.shape[0] // 2
    _mapped(body, (specs,), specs)(params)
    assert torch.equal(seen[1].q_b_proj, params.q_b_proj[rows:])
    assert torch.equal(seen[1].o_proj, params.o_proj[:, params.o_proj.shape[1] // 2 :])
    assert torch.equal(seen[1].q_a_proj, params.q_a_proj)


def test_one_spec_in_a_tuple_stands_for_a_whole_layer():
    params = sfa.init_params(CONFIG)
    got = _mapped(lambda comm, params, x: (params, x), (P(), P("cp")), (P(), P("cp")))(params, X)
    assert isinstance(got[0], sfa.LayerParams)
    assert torch.equal(got[0].indexer.wk, params.indexer.wk)
    assert torch.equal(got[1], X)


def test_results_may_be_trees_with_leaves_that_are_no_tensors():
    def body(comm, x):
        return {"x": [x, None], "n": 3, "word": "w", "nested": (x.sum(), {"axis": "cp"})}

    got = _mapped(body, P(), P())(X)
    assert torch.equal(got["x"][0], X)
    assert got["nested"][0] == 6
    assert (got["x"][1], got["n"], got["word"], got["nested"][1]) == (None, 3, "w", {"axis": "cp"})
    assert list(got) == ["x", "n", "word", "nested"]


@pytest.mark.parametrize("learns", [False, True])
def test_a_body_may_return_nothing(learns):
    assert _mapped(lambda comm, x: None)(X.clone().requires_grad_(learns)) is None
    assert _mapped(lambda comm, x: ())(X.clone().requires_grad_(learns)) == ()


def test_a_call_may_have_no_tensors():
    got = _mapped(lambda comm, a, b: torch.full((2,), a + b["k"]), P(), P())(1.5, {"k": 2})
    assert got.tolist() == [3.5, 3.5]
    assert _mapped(lambda comm: comm["cp"].size, ())() == 2


def test_a_number_that_is_none_is_the_same_on_every_rank():
    assert math.isnan(_mapped(lambda comm: math.nan, ())())


# What every rank holds must be the same.


def _of_ranks(*values, spec=WHOLE, **axes):
    """Let rank r return the r-th value."""
    axes = axes or {"cp": len(values)}
    return _mapped(lambda comm: values[comm[tuple(axes)].rank], (), spec, **axes)()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0]),
        torch.tensor([math.nan], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([2**62 + 1, -1]),
        torch.tensor([3, 255], dtype=torch.uint8),
        torch.tensor([1.5, math.nan]).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j, complex(math.nan, 1)]),
        torch.zeros(0, 3),
        torch.tensor(2.0),
    ],
    ids=str,
)
def test_equal_results_are_one_result(value):
    got = _of_ranks(value, value.clone(), value.clone())
    assert got.dtype == value.dtype
    torch.testing.assert_close(got, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "a difference of 0.5"),
        (torch.tensor([1, 7]), torch.tensor([3, 7]), "a difference of 2"),
        (torch.tensor([True]), torch.tensor([False]), "different values"),
        (torch.ones(2), torch.tensor([1.0, 1.0 + 2**-23]), "a difference of 1.19e-07"),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), "a difference of 1"),
        (torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([-2.0], dtype=torch.bfloat16), "a difference of 4"),
    ],
)
def test_results_that_differ_are_refused_with_the_difference(one, other, difference):
    rule = "shard_map: a result of P() must be the same on the ranks that hold it"
    assert _message(lambda: _of_ranks(one, one, other)) == f"{rule}; got {difference} between ranks 0, 2"
    assert _message(lambda: _of_ranks(other, one, one)) == f"{rule}; got {difference} between ranks 0, 1"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([math.nan]), torch.tensor([0.125])),
        (torch.tensor([math.inf]), torch.tensor([torch.finfo(torch.float32).max])),
        (torch.tensor([math.inf]), torch.tensor([-math.inf])),
        (torch.tensor([math.nan]), torch.tensor([0.0])),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    ],
    ids=str,
)
def test_no_value_stands_for_another(one, other):
    assert "must be the same on the ranks that hold it" in _message(lambda: _of_ranks(one, other))


def test_a_result_is_compared_on_the_ranks_that_hold_the_same_part():
    values = [torch.tensor([float(i)]) for i in (1, 1, 2, 2)]
    assert _of_ranks(*values, spec=P("cp"), cp=2, tp=2).tolist() == [1, 2]
    rule = "shard_map: a result of P('tp') must be the same on the ranks that hold it"
    message = _message(lambda: _of_ranks(*values, spec=P("tp"), cp=2, tp=2))
    assert message == f"{rule}; got a difference of 1 between ranks 0, 2"
    values[3] = torch.tensor([2.25])
    rule = "shard_map: a result of P('cp') must be the same on the ranks that hold it"
    message = _message(lambda: _of_ranks(*values, spec=P("cp"), cp=2, tp=2))
    assert message == f"{rule}; got a difference of 0.25 between ranks 2, 3"


# Refusals of specs and trees.


@pytest.mark.parametrize("where", ["in_specs", "out_specs"])
@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (P("tp"), "P('tp') must name axes of MeshShape(cp=2); got 'tp'"),
        ((P(), P(None, ("cp", "dp"))), "P(None, ('cp', 'dp')) must name axes of MeshShape(cp=2); got 'dp'"),
        ({"a": (P("dp"),)}, "P('dp') must name axes of MeshShape(cp=2); got 'dp'"),
        ("cp", "a spec must be a P; got 'cp'"),
        (None, "a spec must be a P; got None"),
        ((P(), None), "a spec must be a P; got None"),
        ({"a": [P(), 3]}, "a spec must be a P; got 3"),
    ],
)
def test_specs_are_checked_when_the_function_is_made(where, specs, message):
    named = {"in_specs": P(), "out_specs": P()} | {where: specs}
    assert _message(lambda: shard_map(print, simulated_mesh(MeshShape(cp=2)), **named)) == f"shard_map: {message}"


STRUCTURE = "every rank must return the same structure; got ranks 0 and 1 that differ"
PREFIX = "must be a tree that the values' tree begins with"


@pytest.mark.parametrize(
    ("specs", "arguments", "message"),
    [
        ((P(),), (X, X), "in_specs must be a P or a tuple of 2, one per argument; got (P(),)"),
        ((P(), P()), (X,), "in_specs must be a P or a tuple of 1, one per argument; got (P(), P())"),
        ((P(),), (), "in_specs must be a P or a tuple of 0, one per argument; got (P(),)"),
        ([P()], (X,), "in_specs must be a P or a tuple of 1, one per argument; got [P()]"),
        (((P(), P()),), ((X,),), f"in_specs {PREFIX}; got tuple of 2 for tuple of 1"),
        (((P(), P()),), ([X, X],), f"in_specs {PREFIX}; got tuple of 2 for list of 2"),
        (({"a": P()},), (X,), f"in_specs {PREFIX}; got dict of 1 for Tensor"),
        (({"a": P()},), ({"b": X},), f"in_specs {PREFIX}; got dict of 1 for dict of 1"),
        (((P(), (P(),)),), ((X, X),), f"in_specs {PREFIX}; got tuple of 1 for Tensor"),
        ((param_specs(CONFIG, Rules()),), (X,), f"in_specs {PREFIX}; got LayerParams for Tensor"),
        (P("cp"), (torch.zeros(3),), "P('cp') must divide dim 0 by 2 ranks; got [3]"),
        ((P(), P(None, "cp")), (X, torch.zeros(2, 5)), "P(None, 'cp') must divide dim 1 by 2 ranks; got [2, 5]"),
        (P("cp"), (torch.tensor(1.0),), "P('cp') must not name more dims than the tensor has; got []"),
        (P(None, None), (X,), "P(None, None) must not name more dims than the tensor has; got [4]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_any_rank_starts(specs, arguments, message):
    started = []
    assert _message(lambda: _mapped(lambda *_: started.append(0), specs)(*arguments)) == f"shard_map: {message}"
    assert not started


@pytest.mark.parametrize(
    ("specs", "result", "message"),
    [
        ((P(), P()), lambda rank: X, f"out_specs {PREFIX}; got tuple of 2 for Tensor"),
        ((P(),), lambda rank: (X, X), f"out_specs {PREFIX}; got tuple of 1 for tuple of 2"),
        ([P()], lambda rank: (X,), f"out_specs {PREFIX}; got list of 1 for tuple of 1"),
        (P("cp"), lambda rank: X.sum(), "P('cp') in out_specs must not name more dims than the result has; got []"),
        (P(), lambda rank: (X,) * (1 + rank), STRUCTURE),
        (P(), lambda rank: X if rank else None, STRUCTURE),
        (P("cp"), lambda rank: X[rank:], STRUCTURE),
        (P(), lambda rank: X.double() if rank else X, STRUCTURE),
        (P(), lambda rank: rank, STRUCTURE),
        (P(), lambda rank: float(rank) if rank else 0, STRUCTURE),
        (P(), lambda rank: {"ab"[rank]: X}, STRUCTURE),
    ],
)
def test_results_that_do_not_fit_are_refused(specs, result, message):
    run = _mapped(lambda comm: result(comm["cp"].rank), (), specs)
    assert _message(run) == f"shard_map: {message}"


def test_the_function_takes_no_keywords():
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        _mapped(lambda comm, x: x)(x=X)


def test_the_function_has_the_name_of_the_body_and_may_be_called_again():
    def body(comm, x):
        """Say what it does."""
        return comm["cp"].all_reduce(x)

    run = _mapped(body, P("cp"), P())
    assert (run.__name__, run.__doc__) == ("body", "Say what it does.")
    for x in (X, torch.arange(6.0), X.double()):
        half = x.shape[0] // 2
        assert torch.equal(run(x), x[:half] + x[half:])


# Gradients. One formula, written for ranks and for whole values.


def _sharded_formula(comm, w, x, b):
    """Rows of x over cp, columns of b over tp; w on every rank."""
    h = (x @ w).tanh()
    total = comm["cp"].all_reduce(h.sum(0))
    z = (h * total) @ b
    squares = comm["cp", "tp"].all_reduce(z.square().sum())
    return z * squares, total.sin()


def _whole_formula(w, x, b):
    h = (x @ w).tanh()
    total = h.sum(0)
    z = (h * total) @ b
    return z * z.square().sum(), total.sin()


FORMULA = {"in_specs": (P(), P("cp"), P(None, "tp")), "out_specs": (P("cp", "tp"), P())}
MESHES = [{"cp": 1, "tp": 1}, {"cp": 2, "tp": 1}, {"cp": 1, "tp": 2}, {"tp": 2, "cp": 4}]


def _arguments():
    return tuple(torch.randn(*shape, dtype=torch.float64) for shape in [(3, 3), (4, 3), (3, 2)])


def _loss(formula):
    """Weigh both results; the second is on every rank and counts once."""
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in [(4, 2), (3,)]]
    return lambda *given: sum((weight * y).sum() for weight, y in zip(weights, formula(*given), strict=True))


def _wanted(*given):
    leaves = [x.detach().clone().requires_grad_() for x in given]
    return torch.autograd.grad(_loss(_whole_formula)(*leaves), leaves)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_values_and_gradients_are_those_of_whole_values(axes):
    given = _arguments()
    run, want = _mapped(_sharded_formula, **FORMULA, **axes), _wanted(*given)
    for got, y in zip(run(*given), _whole_formula(*given), strict=True):
        _close(got, y)
    leaves = [x.clone().requires_grad_() for x in given]
    _loss(run)(*leaves).backward()
    by_vjp = torch.func.vjp(_loss(run), *given)[1](torch.ones((), dtype=torch.float64))
    by_func = torch.func.grad(_loss(run), argnums=(0, 1, 2))(*given)
    by_autograd = torch.autograd.grad(_loss(run)(*leaves), leaves)
    for found in ([x.grad for x in leaves], by_vjp, by_func, by_autograd):
        for got, g in zip(found, want, strict=True):
            _close(got, g)


def test_gradients_are_those_of_finite_differences():
    leaves = [x.requires_grad_() for x in _arguments()]
    assert torch.autograd.gradcheck(_mapped(_sharded_formula, **FORMULA, cp=2, tp=2), leaves, fast_mode=True)
    small = _mapped(lambda comm, x: comm["cp"].all_gather(x.sin() * comm["cp"].all_reduce(x.sum())), P("cp"), P())
    assert torch.autograd.gradcheck(small, torch.randn(4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("learning", [*itertools.product([False, True], repeat=3)])
def test_only_arguments_that_require_grad_get_one(learning):
    given = [x.requires_grad_(learns) for x, learns in zip(_arguments(), learning, strict=True)]
    run = _mapped(_sharded_formula, **FORMULA, cp=2, tp=1)
    loss = _loss(run)(*given)
    assert loss.requires_grad == any(learning)
    if any(learning):
        loss.backward()
    for x, want, learns in zip(given, _wanted(*given), learning, strict=True):
        assert (x.grad is not None) == learns
        if learns:
            _close(x.grad, want)
    places = tuple(i for i, learns in enumerate(learning) if learns)
    if places:
        found = torch.func.grad(_loss(run), argnums=places)(*(x.detach() for x in given))
        for place, got in zip(places, found, strict=True):
            _close(got, _wanted(*given)[place])


def test_gradients_add_up_in_leaves():
    leaves = [x.requires_grad_() for x in _arguments()]
    run = _mapped(_sharded_formula, **FORMULA, cp=2, tp=2)
    for count in range(1, 4):
        _loss(run)(*leaves).backward()
        for leaf, want in zip(leaves, _wanted(*leaves), strict=True):
            _close(leaf.grad, count * want)


def test_a_graph_that_is_retained_goes_back_twice_and_one_that_is_not_once():
    leaves = [x.requires_grad_() for x in _arguments()]
    loss = _loss(_mapped(_sharded_formula, **FORMULA, cp=2, tp=2))(*leaves)
    for retain in (True, False):
        for got, want in zip(torch.autograd.grad(loss, leaves, retain_graph=retain), _wanted(*leaves), strict=True):
            _close(got, want)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


def test_functions_on_different_meshes_follow_each_other():
    w, x, b = _arguments()
    first = _mapped(lambda comm, w, x: comm["cp"].all_gather(x @ w).sin(), (P(), P("cp")), P(), cp=4)
    second = _mapped(lambda comm, h, b: comm["tp"].all_reduce(h @ b), (P(None, "tp"), P("tp")), P(), tp=3)

    def sharded(w, x, b):
        return second(first(w, x) * 2, b).square().sum()

    leaves = [t.requires_grad_() for t in (w, x, b)]
    want = torch.autograd.grad((((x @ w).sin() * 2) @ b).square().sum(), leaves)
    for found in (
        torch.autograd.grad(sharded(*leaves), leaves),
        torch.func.grad(sharded, argnums=(0, 1, 2))(*(t.detach() for t in leaves)),
    ):
        for got, g in zip(found, want, strict=True):
            _close(got, g)


def test_a_replicated_argument_sums_over_ranks_and_a_replicated_result_counts_once():
    x = torch.tensor([3.0], dtype=torch.float64)
    for size in (1, 2, 3, 8):
        places = torch.arange(size, dtype=torch.float64)

        def each(comm, x, places):
            return (places + 1) * x

        def same(comm, x, places):
            return x * 5

        grad = torch.func.grad(lambda x: _mapped(each, (P(), P("cp")), P("cp"), cp=size)(x, places).sum())  # noqa: B023
        assert grad(x).item() == size * (size + 1) / 2
        grad = torch.func.grad(lambda x: _mapped(same, (P(), P("cp")), P(), cp=size)(x, places).sum())  # noqa: B023
        assert grad(x).item() == 5


def test_a_replicated_result_counts_once_where_it_is_held_twice():
    """Over cp it is split, over tp two ranks hold the same part."""
    x = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    y = _mapped(lambda comm, x: comm["tp"].all_reduce(x), P(("cp", "tp")), P("cp"), cp=2, tp=2)(x)
    assert y.tolist() == [1, 5]
    assert torch.autograd.grad(y, x, torch.tensor([3.0, 7.0]).double())[0].tolist() == [3, 3, 7, 7]


def test_gradients_of_half_precision_are_summed_over_ranks_and_rounded_once():
    """256 + 1 + 1 + 1: in bfloat16 one by one it would stay 256."""
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16)
    y = _mapped(lambda comm, x, scale: x[None] * scale, (P(), P("cp")), P("cp"), cp=4)(x, scale)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [260, 260]


def test_one_tensor_may_be_several_arguments():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    y = _mapped(lambda comm, a, b: a * b * b, (P("cp"), P()), P("cp"))(x[:, None], x)
    want = (x[:, None] * x * x).sum()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(want, x)[0])


def test_parameters_and_results_of_other_functions_may_be_arguments():
    w = torch.nn.Parameter(torch.randn(3))
    y = _mapped(lambda comm, x: comm["cp"].all_reduce(x) * x)(w.exp())
    y.sum().backward()
    torch.testing.assert_close(w.grad, 4 * w.detach().exp() ** 2)


@pytest.mark.parametrize("by", ["autograd", "func"])
def test_unused_arguments_and_results_and_those_without_gradient(by):
    def body(comm, x, unused, index):
        y = comm["cp"].all_reduce(x)[index]
        return {"y": y, "rank": x.argmax(), "stopped": y.detach() * 2, "unused": comm["cp"].all_gather(x).exp(), "n": 3}

    x, unused, index = torch.tensor([1.0, 5.0, 2.0]), torch.ones(2), torch.tensor([2, 2, 0])
    run = _mapped(body)

    def loss(x, unused):
        got = run(x, unused, index)
        assert got["n"] == 3
        return (got["y"] * torch.tensor([1.0, 10.0, 100.0])).sum() * got["rank"] + got["stopped"].sum() * 1

    want = [200.0, 0, 22]  # each of two ranks brings x; the index of the largest is 1
    if by == "func":
        found, none = torch.func.grad(loss, argnums=(0, 1))(x, unused)
        assert none.tolist() == [0, 0]
    else:
        leaves = x.clone().requires_grad_(), unused.clone().requires_grad_()
        got = run(*leaves, index)
        assert [got[name].requires_grad for name in ("y", "rank", "stopped", "unused")] == [True, False, False, True]
        found, none = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
        assert none is None
    assert found.tolist() == want


def test_any_part_of_several_results_may_be_differentiated():
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    doubled, total = _mapped(lambda comm, x: (x * 2, comm["cp"].all_reduce(x) * 3))(x)
    for result, want in [(doubled, 2), (total, 6), (doubled + total, 8)]:
        assert torch.autograd.grad(result.sum(), x, retain_graph=True)[0].tolist() == [want, want]
    assert torch.autograd.grad([doubled, total], x, [torch.ones(2).double()] * 2)[0].tolist() == [8, 8]


def test_integers_and_booleans_may_be_arguments_beside_tensors_that_learn():
    x, rows, mask = torch.randn(4, dtype=torch.float64), torch.tensor([3, 0]), torch.tensor([True, False])
    run = _mapped(lambda comm, x, rows, mask: (x[rows] * mask, rows + 1), (P(), P("cp"), P("cp")), P("cp"))
    y, later = run(x.requires_grad_(), rows, mask)
    assert later.tolist() == [4, 1]
    assert not later.requires_grad
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 0, 0, 1]


def test_a_rank_may_hold_a_part_that_carries_no_gradient():
    def body(comm, x):
        return x * 3 if comm["cp"].rank == 1 else x.detach() * 3

    x = torch.ones(4, requires_grad=True)
    y = _mapped(body, P("cp"), P("cp"))(x)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 0, 3, 3]


def test_no_grad_and_inference_mode_of_the_caller_hold():
    x = torch.ones(2, requires_grad=True)
    run = _mapped(lambda comm, x: comm["cp"].all_reduce(x * x))
    with torch.no_grad():
        assert not run(x).requires_grad
        with torch.enable_grad():
            assert run(x).requires_grad
        assert torch.func.grad(lambda x: run(x).sum())(x.detach()).tolist() == [4, 4]
    with torch.inference_mode():
        y = run(x)
        born = torch.ones(2)
    assert y.is_inference()
    assert y.tolist() == [2, 2]
    assert run(born).tolist() == [2, 2]
    both = _mapped(lambda comm, x, y: x + y)(x, born)
    assert torch.autograd.grad(both.sum(), x)[0].tolist() == [1, 1]


def test_grad_modes_of_the_body_hold():
    def body(comm, x):
        with torch.no_grad():
            scale = comm["cp"].all_reduce(x)
        return x * scale

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = _mapped(body, P("cp"), P("cp"))(x)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [3, 3]


def test_gradients_of_the_body_are_values_outside_of_it():
    """.backward() in the body fills the gradients of the rank's own leaves, not those of the caller."""

    def body(comm, x):
        y = x.detach().requires_grad_()
        comm["cp"].all_reduce(y.square()).sum().backward()
        return y.grad

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = _mapped(body, P("cp"), P("cp"), cp=3)(x)
    assert y.tolist() == [6, 12, 18]  # 3 ranks, 2 x
    assert not y.requires_grad
    assert x.grad is None


def _checkpointed(comm, w, x, b):
    return checkpoint(_sharded_formula, comm, w, x, b, use_reentrant=False)


def _checkpointed_half(comm, w, x, b):
    """Recompute a step that starts a collective, and waits for another's result."""

    def step(x):
        handle = comm["cp"].all_gather_start(x)
        return handle.wait().exp()[: x.shape[0]] * x

    return _sharded_formula(comm, w, checkpoint(step, x, use_reentrant=False), b)


def test_activation_checkpoints_inside_of_the_body_change_nothing():
    given = _arguments()
    leaves = [x.clone().requires_grad_() for x in given]
    run = _mapped(_checkpointed, **FORMULA, cp=2, tp=2)
    for got, want in zip(torch.autograd.grad(_loss(run)(*leaves), leaves), _wanted(*given), strict=True):
        _close(got, want)

    run = _mapped(_checkpointed_half, **FORMULA, cp=2, tp=2)

    def whole(w, x, b):
        return _whole_formula(w, x[:2].exp().repeat(2, 1) * x, b)

    want = torch.autograd.grad(_loss(whole)(*leaves), leaves)
    for got, g in zip(torch.autograd.grad(_loss(run)(*leaves), leaves), want, strict=True):
        _close(got, g)


@pytest.mark.parametrize("body", [_sharded_formula, _checkpointed])
def test_an_activation_checkpoint_around_the_function_changes_nothing(body):
    given = _arguments()
    leaves = [x.clone().requires_grad_() for x in given]
    run = _mapped(body, **FORMULA, cp=2, tp=2)
    loss = _loss(lambda *given: checkpoint(run, *given, use_reentrant=False))
    for got, want in zip(torch.autograd.grad(loss(*leaves), leaves), _wanted(*given), strict=True):
        _close(got, want)


def test_autocast_of_the_caller_reaches_products_of_the_body():
    x, w = torch.randn(4, 3), torch.randn(3, 3, requires_grad=True)
    run = _mapped(lambda comm, x, w: x @ w, (P("cp"), P()), P("cp"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = run(x, w), x @ w
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.float().square().sum(), w)[0] for y in (got, want)]
    assert grads[0].dtype == torch.float32
    torch.testing.assert_close(*grads, rtol=2**-6, atol=2**-6)  # two ranks' gradients, each in bfloat16


def test_an_argument_that_is_changed_between_the_passes_is_an_error():
    x, w = torch.ones(4), torch.ones(4, requires_grad=True)
    loss = _mapped(lambda comm, x, w: x * w, P("cp"), P("cp"))(x, w).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:], lambda x: x.view(3, 1), lambda x: x.detach()])
def test_a_result_that_learns_shares_no_memory_with_an_argument(part):
    x = torch.ones(3, requires_grad=True)
    y = _mapped(lambda comm, x: part(x) if part(x).requires_grad else x + 0)(x)
    with torch.no_grad():
        y.add_(1)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:], lambda x: (x.view(3, 1), x), lambda x: (x, x)])
def test_an_argument_that_comes_back_has_a_gradient(part):
    def loss(run):
        return lambda x: sum(y.sin().sum() for y in tree_leaves(run(x)))

    x = torch.randn(3, dtype=torch.float64)
    run = _mapped(lambda comm, x: part(x))
    _close(torch.func.grad(loss(run))(x), torch.func.grad(loss(part))(x))
    leaf = x.clone().requires_grad_()
    _close(torch.autograd.grad(loss(run)(leaf), leaf)[0], torch.func.grad(loss(part))(x))


def test_what_ranks_keep_for_backward_is_free_when_the_result_is():
    kept = []

    def body(comm, x):
        y = comm["cp"].all_reduce(x).exp()
        kept.append(weakref.ref(y))
        return y * y

    x = torch.ones(2, requires_grad=True)
    gc.disable()
    try:
        y = _mapped(body)(x)
        assert all(ref() is not None for ref in kept)
        del y
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


# Refusals of derivatives and transforms.

TWICE = "shard_map: a gradient of a gradient can't pass a mesh's ranks; use func.grad in the body"
VMAP = "shard_map: an outer vmap can't run a mesh's ranks; use vmap inside of the body"
JVP = "shard_map: a mesh's ranks have no forward-mode derivative; use backward() or func.grad"


def _cubes(comm, x):
    return comm["cp"].all_reduce(x**3)


def test_a_second_derivative_from_outside_is_refused():
    run = _mapped(_cubes)

    def first(x):
        return torch.func.grad(lambda x: run(x).sum())(x).sum()

    assert _message(lambda: torch.func.grad(first)(torch.ones(3)), RuntimeError) == TWICE
    x = torch.ones(3, requires_grad=True)
    (once,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    assert once.tolist() == [6, 6, 6]
    assert _message(lambda: torch.autograd.grad(once.sum(), x), RuntimeError) == TWICE
    assert _message(lambda: once.sum().backward(), RuntimeError) == TWICE
    scale = torch.ones(3, requires_grad=True)
    (once,) = torch.autograd.grad((run(x) * scale).sum(), x, create_graph=True)
    assert _message(lambda: torch.autograd.grad(once.sum(), scale), RuntimeError) == TWICE
    linear = _mapped(lambda comm, x: x * 2)
    (once,) = torch.autograd.grad(linear(x).sum(), x, create_graph=True)
    assert _message(lambda: torch.autograd.grad(once.sum(), x), RuntimeError) == TWICE


def test_a_first_derivative_may_be_scaled_by_something_that_learns():
    x, scale = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    (once,) = torch.autograd.grad(_mapped(_cubes)(x).sum(), x, create_graph=True)
    assert torch.autograd.grad((once * scale).sum(), scale)[0] == 18


def test_an_outer_vmap_is_refused():
    run, started = _mapped(lambda comm, x: started.append(0) or comm["cp"].all_reduce(x)), []
    x = torch.ones(2, 3)
    assert _message(lambda: torch.func.vmap(run)(x)) == VMAP
    assert _message(lambda: torch.func.vmap(torch.func.grad(lambda x: run(x).sum()))(x)) == VMAP
    assert _message(lambda: torch.func.grad(lambda x: torch.func.vmap(run)(x).sum())(x)) == VMAP
    assert not started
    assert _message(lambda: torch.func.jacrev(run)(x[0])) == VMAP  # the forward pass is none


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # jvp's own, in torch
def test_an_outer_forward_mode_derivative_is_refused_before_any_rank_starts():
    started = []
    run = _mapped(lambda comm, x: started.append(0) or comm["cp"].all_reduce(x))
    x = torch.ones(3)
    assert _message(lambda: torch.func.jvp(run, (x,), (x,))) == JVP
    assert _message(lambda: torch.func.jacfwd(run)(x)) == JVP
    with forward_ad.dual_level():
        assert _message(lambda: run(forward_ad.make_dual(x, x))) == JVP
    assert not started


@pytest.mark.parametrize("inner", [False, True])
def test_compiling_is_refused_with_the_reason(inner):
    """Whether it is the function itself that is compiled or one that calls it."""
    torch.compiler.reset()
    run = _mapped(_cubes)
    compiled = torch.compile((lambda x: run(x) * 2) if inner else run, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        compiled(torch.ones(3))
    assert "shard_map: a mesh's ranks can't be compiled; compile what the body calls" in str(error.value)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_what_breaks_out_of_a_compiled_function_gives_the_same_values_and_gradients():
    torch.compiler.reset()
    run = _mapped(_cubes)
    x = torch.arange(3.0, requires_grad=True)
    compiled = torch.compile(lambda x: run(x * 2) + 1, backend="eager")(x)
    plain = run(x * 2) + 1
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    want = torch.autograd.grad(plain.sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), x)[0], want, rtol=0, atol=0)


def test_a_process_that_compiles_nothing_does_not_import_the_compiler():
    """It would take as long again as all that it imports."""
    script = """if True:
        import sys, torch, sharding
        mesh, P = sharding.simulated_mesh(sharding.MeshShape(cp=2)), sharding.P
        run = sharding.shard_map(lambda comm, x: comm["cp"].all_gather(x), mesh, in_specs=P("cp"), out_specs=P())
        x = torch.ones(4, requires_grad=True)
        run(x).sum().backward()
        print(x.grad.tolist(), "torch._dynamo" in sys.modules)
    """
    environment = os.environ | {"SFA_UNCHECKED": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0, 1.0, 1.0, 1.0] False\n"


def test_a_body_may_call_what_is_compiled():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin() * x, backend="eager", fullgraph=True)
    x = torch.randn(4, requires_grad=True)
    y = _mapped(lambda comm, x: comm["cp"].all_gather(compiled(x)), P("cp"), P())(x)
    torch.testing.assert_close(y, x.sin() * x)
    want = torch.autograd.grad((x.sin() * x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], want)


# Tensors that the body closes over.


def _outsider(shape):
    rule = "a tensor that requires grad must come to the body as a tensor among its arguments, or detached"
    return f"shard_map: {rule}; got one of shape {shape}"


CLOSURES = {
    "used": lambda w: lambda comm, x: x * w,
    "gathered": lambda w: lambda comm, x: x * comm["cp"].all_reduce(w),
    "used twice removed": lambda w: lambda comm, x: (x * (w + 1).sin(), x),
    "returned": lambda w: lambda comm, x: w,
    "returned beside": lambda w: lambda comm, x: (x, w),
}
closures = pytest.mark.parametrize("name", CLOSURES)
outs = pytest.mark.parametrize("spec", [P(), P("cp")], ids=repr)


@closures
@outs
@pytest.mark.parametrize("learns", [False, True])
def test_a_leaf_that_learns_must_be_an_argument(name, spec, learns):
    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=learns)
    assert _message(lambda: _mapped(CLOSURES[name](w), P(), spec)(x)) == _outsider([3])
    with torch.no_grad():
        _mapped(CLOSURES[name](w), P(), spec)(x)
    _mapped(CLOSURES[name](w.detach()), P(), spec)(x)


@closures
@outs
def test_a_tensor_computed_from_a_leaf_must_be_an_argument(name, spec):
    w = torch.ones(2, requires_grad=True)
    assert _message(lambda: _mapped(CLOSURES[name](w.sum() * torch.ones(3)), P(), spec)(torch.ones(3))) == _outsider(
        [2]
    )


@closures
@outs
@pytest.mark.parametrize("learns", [False, True])
def test_a_tensor_of_an_outer_func_grad_must_be_an_argument(name, spec, learns):
    """Its gradient would be zeros without a word."""

    def loss(w):
        x = w * 2 if learns else plain
        return sum(y.sum() for y in tree_leaves(_mapped(CLOSURES[name](w), P(), spec)(x)))

    plain = torch.ones(3)
    assert _message(lambda: torch.func.grad(loss)(torch.ones(3))) == _outsider([3])


INNER = {
    "grad": lambda w, x: torch.func.grad(lambda x: (x * w).sum())(x),
    "vmap": lambda w, x: torch.func.vmap(lambda x: (x * w).sum())(x),
    "vjp": lambda w, x: torch.func.vjp(lambda x: x * w, x)[1](torch.ones(3))[0],
}


@pytest.mark.parametrize("name", INNER)
def test_a_tensor_of_an_outer_func_grad_must_be_an_argument_of_a_body_that_differentiates(name):
    def loss(w):
        return _mapped(lambda comm, x: INNER[name](w, x))(torch.ones(3)).sum()

    assert _message(lambda: torch.func.grad(loss)(torch.full((3,), 2.0))) == _outsider([3])


def test_a_function_without_arguments_refuses_tensors_of_an_outer_func_grad():
    for body in (lambda w: lambda comm: w * 2, lambda w: lambda comm: w):
        run = torch.func.grad(lambda w, body=body: _mapped(body(w), ())().sum())
        assert _message(lambda run=run: run(torch.ones(3))) == _outsider([3])


def test_a_body_may_differentiate_by_tensors_it_closes_over():
    """Nothing of that gradient passes through the function's result, so nothing is lost."""
    w = torch.ones(3, requires_grad=True)

    def body(comm, x):
        (g,) = torch.autograd.grad(comm["cp"].all_reduce((w * x).sum()), w)
        return g

    assert _mapped(body)(torch.tensor([1.0, 2.0, 3.0])).tolist() == [2, 4, 6]
