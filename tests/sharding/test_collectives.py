"""Collectives: values equal a plain loop over ranks, gradients those of the same maths for all ranks on one process."""

import itertools
import math
import random

import pytest
import torch

import sharding
from sharding import MeshShape, P, shard_map, simulated_mesh

pytestmark = pytest.mark.usefixtures("unchecked")  # checks at every call of every rank would take most of the time

SIZES = [1, 2, 3, 4, 7, 8, 16]
every_size = pytest.mark.parametrize("size", SIZES)
COLLECTIVES = ["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"]
every_collective = pytest.mark.parametrize("name", COLLECTIVES)


def _call(comm, name, x, source):
    return comm.broadcast(x, source) if name == "broadcast" else getattr(comm, name)(x)


def _started(comm, name, x, source):
    return (comm.broadcast_start(x, source) if name == "broadcast" else comm.all_gather_start(x)).wait()


def _ranks(body, *given):
    """Run ``body(comm, *local)`` with row r of each tensor on rank r; return the results of all ranks, stacked."""

    def with_rank_dim(comm, *local):
        result = body(comm["cp"], *(x[0] for x in local))
        return tuple(y[None] for y in result) if isinstance(result, tuple) else result[None]

    mesh = simulated_mesh(MeshShape(cp=given[0].shape[0]))
    return shard_map(with_rank_dim, mesh, in_specs=P("cp"), out_specs=P("cp"))(*given)


def _by_loop(name, xs, source):
    """Return what each rank gets, filled row by row."""
    size, rows = len(xs), xs[0].shape[0] if xs[0].ndim else 0
    results = []
    for rank in range(size):
        count = {"all_gather": size * rows, "reduce_scatter": rows // size}.get(name, rows)
        share = rows // size
        result = torch.zeros(count, *xs[0].shape[1:], dtype=xs[0].dtype) if xs[0].ndim else torch.zeros_like(xs[0])
        for r, x in enumerate(xs):
            if name == "all_gather":
                for i in range(rows):
                    result[r * rows + i] = x[i]
            elif name == "all_to_all":
                for i in range(share):
                    result[r * share + i] = x[rank * share + i]
            elif name == "reduce_scatter":
                for i in range(share):
                    result[i] += x[rank * share + i]
            elif name == "all_reduce":
                result += x
            elif r == source:
                result = x.clone()
        results.append(result)
    return results


def _whole_numbers(size, shape, dtype):
    """Give each rank integers that a sum over 64 ranks keeps exact in bfloat16."""
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    return torch.randint(low, 3, (size, *shape)).to(dtype)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (1,), (0, 3), (2, 3), (2, 1, 2), (1, 0)]


@every_collective
@every_size
def test_a_collective_is_a_loop_over_ranks(name, size):
    sums, scalars = name in ("all_reduce", "reduce_scatter"), name in ("all_reduce", "broadcast")
    dtypes = DTYPES[:-1] if sums else DTYPES
    shapes = SHAPES if scalars else SHAPES[1:]
    if name in ("reduce_scatter", "all_to_all"):
        shapes = [(size * shape[0], *shape[1:]) for shape in shapes]
    cases = [(torch.float32, shape) for shape in shapes] + [(dtype, shapes[-3]) for dtype in dtypes[1:]]
    given = [_whole_numbers(size, shape, dtype) for dtype, shape in cases]
    source = size * 2 // 3
    for call in [_call, _started] if name in ("all_gather", "broadcast") else [_call]:
        results = _ranks(lambda comm, *local, call=call: tuple(call(comm, name, x, source) for x in local), *given)
        for x, got in zip(given, results, strict=True):
            assert got.dtype == x.dtype
            assert torch.equal(got, torch.stack(_by_loop(name, list(x), source))), (x.dtype, x.shape)


@pytest.mark.parametrize("name", ["all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.complex64])
def test_any_dtype_travels_bit_for_bit(name, dtype):
    width = dtype.itemsize
    bits = torch.randint(0, 256, (3, 6, 2 * width), dtype=torch.uint8)
    got = _ranks(lambda comm, x: _call(comm, name, x.view(dtype), 2).view(torch.uint8), bits)
    assert torch.equal(got, torch.stack(_by_loop(name, list(bits), 2)))


def test_64_ranks_meet():
    x = _whole_numbers(64, (64, 2), torch.float32)
    results = _ranks(lambda comm, x: tuple(_call(comm, name, x, 63) for name in COLLECTIVES), x)
    for name, got in zip(COLLECTIVES, results, strict=True):
        assert torch.equal(got, torch.stack(_by_loop(name, list(x), 63))), name


@every_size
def test_a_rank_knows_its_place_and_the_size(size):
    def body(comm, x):
        assert isinstance(comm, sharding.Collectives)
        return x + comm.rank, x + comm.size

    places, sizes = _ranks(body, torch.zeros(size))
    assert (places.tolist(), sizes.tolist()) == (list(range(size)), [size] * size)


@every_size
def test_every_rank_can_be_the_source_of_a_broadcast(size):
    x = torch.randn(size, 2)
    results = _ranks(lambda comm, x: tuple(comm.broadcast(x, source) for source in range(size)), x)
    for source, got in enumerate(results):
        assert torch.equal(got, x[source].expand(size, 2))


@pytest.mark.parametrize(("dtype", "big", "step"), [(torch.bfloat16, 256.0, 2), (torch.float16, 2048.0, 2)])
@pytest.mark.parametrize("size", [4, 7, 16])
def test_sums_of_half_precision_are_rounded_once(dtype, big, step, size):
    """Where numbers lie ``step`` apart, ones that are added one by one are lost one by one."""
    x = torch.ones(size, size, dtype=dtype)
    x[0] = big
    exact = big + size - 1
    once = big + step * round((exact - big) / step)  # halfway goes to the even neighbour, as in Python
    assert once != big
    for got in _ranks(lambda comm, x: (comm.all_reduce(x), comm.reduce_scatter(x)), x):
        assert got.double().eq(once).all()


@pytest.mark.parametrize("size", [1, 2, 4])
@every_collective
def test_a_result_is_memory_of_its_own(name, size):
    """Each rank overwrites its result; what it brought and what others got stay as they are."""

    def body(comm, x):
        x = x.clone()
        y = _call(comm, name, x, 0)
        before = y.clone()
        y.fill_(100 + comm.rank)
        comm.all_reduce(torch.zeros(1))
        return x, before, y

    given = torch.randn(size, size, 2)
    x, before, y = _ranks(body, given)
    assert torch.equal(x, given)
    torch.testing.assert_close(before, torch.stack(_by_loop(name, list(given), 0)))
    assert torch.equal(y, (100.0 + torch.arange(size))[:, None, None].expand_as(y))


@every_collective
def test_what_a_rank_brought_may_be_changed_once_it_has_its_result(name):
    def body(comm, x, call):
        x = x.clone()
        y = call(comm, name, x, 2)
        x.fill_(-1000)
        return y

    x = torch.randn(3, 3, 2)
    want = torch.stack(_by_loop(name, list(x), 2))
    torch.testing.assert_close(_ranks(lambda comm, x: body(comm, x, _call), x), want)
    if name in ("all_gather", "broadcast"):
        torch.testing.assert_close(_ranks(lambda comm, x: body(comm, x, _started), x), want)


@every_collective
def test_strides_do_not_matter(name):
    x = torch.randn(3, 2, 6).transpose(1, 2)
    got = _ranks(lambda comm, x: _call(comm, name, x, 1), x)
    torch.testing.assert_close(got, torch.stack(_by_loop(name, list(x), 1)))
    row = torch.randn(3, 1, 2)
    got = _ranks(lambda comm, x: _call(comm, name, x.expand(3, 2), 1).add_(1), row)
    want = torch.stack(_by_loop(name, [x.expand(3, 2) for x in row], 1)) + 1
    torch.testing.assert_close(got, want)


def test_started_collectives_may_be_waited_for_in_any_order():
    """Three are under way, others run between, and each rank waits in an order of its own."""

    def body(comm, x):
        handles = [comm.all_gather_start(x), comm.broadcast_start(x + 10, 1), comm.all_gather_start(x + 20)]
        total = comm.all_reduce(x)
        order = list(itertools.permutations(range(3)))[comm.rank]
        results = {i: handles[i].wait() for i in order}
        return results[0], results[1], results[2], total

    x = torch.arange(6.0).view(6, 1)
    gathered, sent, gathered_later, total = _ranks(body, x)
    assert gathered.tolist() == [[0, 1, 2, 3, 4, 5]] * 6
    assert sent.tolist() == [[11]] * 6
    assert gathered_later.tolist() == [[20, 21, 22, 23, 24, 25]] * 6
    assert total.tolist() == [[15]] * 6


@every_size
def test_a_result_is_written_to_memory_that_is_given(size):
    """For a broadcast that may be the tensor which is brought."""

    def body(comm, x):
        out, mine = torch.full((2 * size, 2), math.nan), x.clone()
        gathered = comm.all_gather_start(x, out=out).wait()
        sent = comm.broadcast_start(mine, size - 1, out=mine).wait()
        assert gathered.data_ptr() == out.data_ptr()
        assert sent.data_ptr() == mine.data_ptr()
        before = gathered.clone(), sent.clone()
        out.fill_(-1)
        mine.fill_(-1)
        comm.all_reduce(torch.zeros(1))
        return *before, x

    x = torch.randn(size, 2, 2)
    gathered, sent, brought = _ranks(body, x)
    assert torch.equal(gathered, torch.stack(_by_loop("all_gather", list(x), 0)))
    assert torch.equal(sent, torch.stack(_by_loop("broadcast", list(x), size - 1)))
    assert torch.equal(brought, x)


REFUSED = {
    "all_gather: there must be a dim 0; got ()": lambda comm: comm.all_gather(torch.tensor(1.0)),
    "reduce_scatter: there must be a dim 0; got ()": lambda comm: comm.reduce_scatter(torch.tensor(1.0)),
    "reduce_scatter: 3 ranks must divide dim 0; got (4, 2)": lambda comm: comm.reduce_scatter(torch.zeros(4, 2)),
    "all_to_all: 3 ranks must divide dim 0; got (2,)": lambda comm: comm.all_to_all(torch.zeros(2)),
    "broadcast: source must be in 0..2; got 3": lambda comm: comm.broadcast(torch.zeros(2), 3),
    "broadcast: source must be in 0..2; got -1": lambda comm: comm.broadcast_start(torch.zeros(2), -1),
    "broadcast: source must be in 0..2; got True": lambda comm: comm.broadcast(torch.zeros(2), True),
    "broadcast: source must be in 0..2; got '0'": lambda comm: comm.broadcast(torch.zeros(2), "0"),
    "broadcast: source must be in 0..2; got None": lambda comm: comm.broadcast(torch.zeros(2), None),
    "all_gather: out must be torch.float32 [6, 2]; got (torch.float32, [2, 2])": lambda comm: comm.all_gather_start(
        torch.zeros(2, 2), out=torch.zeros(2, 2)
    ),
    "broadcast: out must be torch.float32 [2]; got (torch.float64, [2])": lambda comm: comm.broadcast_start(
        torch.zeros(2), 0, out=torch.zeros(2).double()
    ),
    "all_gather: what is written to out= must not require grad; got (1,)": lambda comm: comm.all_gather_start(
        torch.zeros(1, requires_grad=True), out=torch.zeros(3)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_tensor_that_does_not_fit_is_refused(message):
    with pytest.raises(ValueError) as error:
        shard_map(
            lambda comm: REFUSED[message](comm["cp"]), simulated_mesh(MeshShape(cp=3)), in_specs=(), out_specs=P()
        )()
    assert str(error.value) == message


def test_a_handle_is_waited_for_once():
    def gather(comm, x):
        handle = comm.all_gather_start(x)
        return handle.wait() + handle.wait()

    def broadcast(comm, x):
        handle = comm.broadcast_start(x, 0)
        return handle.wait() + handle.wait()

    def written(comm, x):
        handle = comm.broadcast_start(x.detach(), 0, out=torch.zeros(2))
        return handle.wait() + handle.wait()

    def rows(comm, x):
        handle = sharding.gather_rows_start(comm, x)
        return handle.wait()[0] + handle.wait()[0]

    for body, name in [(gather, "all_gather"), (broadcast, "broadcast"), (written, "broadcast"), (rows, "all_gather")]:
        for size, learns in itertools.product([1, 2], [False, True]):
            with pytest.raises(RuntimeError) as error:
                _ranks(body, torch.zeros(size, 2, requires_grad=learns))
            assert str(error.value) == f"{name}: wait() must be called once; got a second call"


# Gradients. A program is a generator: it yields (collective, axes, tensor, source) and is sent the result, or yields
# ("start", ...) and later ("wait", ...). The same program is driven on simulated ranks, and on one process for all.


def _on_rank(program, comm, rank, x):
    """Drive a program on one rank."""
    steps, result, handles = program(rank, x), None, {}
    while True:
        try:
            name, axes, x, source = steps.send(result)
        except StopIteration as end:
            return end.value
        if name == "wait":
            result = handles.pop(axes).wait()
        elif name.endswith("_start"):
            start = comm[axes].all_gather_start
            handle = comm[axes].broadcast_start(x, source) if name == "broadcast_start" else start(x)
            result = len(handles)
            handles[result] = handle
        else:
            result = _call(comm[axes], name, x, source)


def _groups(sizes, axes):
    """Return the ranks that meet on some axes, by plain counting: the first axis is the outermost."""
    places = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*map(range, sizes.values()))]
    axes = (axes,) if isinstance(axes, str) else axes
    groups = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(place[axis] for axis in sizes if axis not in axes), []).append(rank)
    return [sorted(group, key=lambda rank: [places[rank][axis] for axis in axes]) for group in groups.values()]


def _together(name, xs, source):
    """Compute a collective for all ranks of a group, in ways that autograd knows."""
    size = len(xs)
    pieces = [x.unflatten(0, (size, -1)) if name in ("reduce_scatter", "all_to_all") else None for x in xs]
    match name.removesuffix("_start"):
        case "all_gather":
            return [torch.cat(xs) for _ in xs]
        case "reduce_scatter":
            return [sum(piece[rank] for piece in pieces) for rank in range(size)]
        case "all_to_all":
            return [torch.cat([piece[rank] for piece in pieces]) for rank in range(size)]
        case "all_reduce":
            return [sum(xs) for _ in xs]
        case "broadcast":
            return [xs[source].clone() for _ in xs]


def _on_one_process(program, sizes, xs):
    """Drive a program for all ranks in step; ``xs[r]`` is what rank r starts from."""
    ranks = range(len(xs))
    steps, results, started = [program(rank, xs[rank]) for rank in ranks], [None] * len(xs), [{} for _ in ranks]
    while True:
        calls = []
        try:
            calls = [steps[rank].send(results[rank]) for rank in ranks]
        except StopIteration as end:
            return [end.value, *(_end(step, result) for step, result in zip(steps[1:], results[1:], strict=True))]
        name, axes = calls[0][:2]
        if name == "wait":
            results = [started[rank].pop(axes) for rank in ranks]
            continue
        for group in _groups(sizes, axes):
            for rank, y in zip(group, _together(name, [calls[r][2] for r in group], calls[0][3]), strict=True):
                results[rank] = y
        if name.endswith("_start"):
            for rank in ranks:
                number = len(started[rank])
                started[rank][number], results[rank] = results[rank], number


def _end(steps, result):
    with pytest.raises(StopIteration) as end:
        steps.send(result)
    return end.value.value


def _gather(rank, x):
    y = yield "all_gather", "cp", x.tanh(), 0
    return (y.sin() * y + rank * y).square()


def _scatter(rank, x):
    y = yield "reduce_scatter", "cp", (1 + rank) * x.sin(), 0
    return y.tanh() * (2 + rank) * y


def _exchange(rank, x):
    y = yield "all_to_all", "cp", x.tanh() * x, 0
    return (y + rank).cos() * x


def _reduce(rank, x):
    y = yield "all_reduce", "cp", (x * (rank + 1)).sin(), 0
    return y * y * x


def _send(rank, x):
    y = yield "broadcast", "cp", x.sin(), 0
    return (y * x + rank).tanh()


def _overlap(rank, x):
    """Hold two started collectives while a third runs, and use a result twice."""
    first = yield "all_gather_start", "cp", x.tanh(), 0
    second = yield "broadcast_start", "cp", x * x, 0
    total = yield "all_reduce", "cp", x.sin(), 0
    y = yield "wait", second, None, 0
    z = yield "wait", first, None, 0
    mixed = yield "all_to_all", "cp", total * y + rank * x, 0
    return torch.cat([z * z, mixed * y, mixed.cos()])


PROGRAMS = {
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "all_reduce": _reduce,
    "broadcast": _send,
    "started": _overlap,
}
every_program = pytest.mark.parametrize("name", PROGRAMS)
few_sizes = pytest.mark.parametrize("size", [1, 2, 3, 4, 7])


def _close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _setup(name, size):
    """Build what each rank starts from, the results of all ranks on one process, and weights for a loss of them."""
    x = torch.randn(size, size, 2, dtype=torch.float64)
    wanted = _on_one_process(PROGRAMS[name], {"cp": size}, list(x))
    return x, torch.randn(size, *wanted[0].shape, dtype=torch.float64)


def _losses(name, xs, weights):
    """Return each rank's loss: its results, weighted."""
    ys = _on_one_process(PROGRAMS[name], {"cp": len(xs)}, list(xs))
    return [(weight * y).sum() for weight, y in zip(weights, ys, strict=True)]


def _mapped(body, size):
    """Map ``body(comm, rank, *local)``, with row r of every argument on rank r."""

    def local(comm, *arguments):
        result = body(comm, comm["cp"].rank, *(x[0] for x in arguments))
        return tuple(y[None] for y in result) if isinstance(result, tuple) else result[None]

    return shard_map(local, simulated_mesh(MeshShape(cp=size)), in_specs=P("cp"), out_specs=P("cp"))


def _program(name, size):
    return _mapped(lambda comm, rank, x: _on_rank(PROGRAMS[name], comm, rank, x), size)


@pytest.mark.parametrize(
    ("name", "size"), [*itertools.product(PROGRAMS, [1, 2, 3, 4, 7]), ("started", 8), ("started", 16)]
)
def test_gradients_from_outside_are_those_of_one_process(name, size):
    x, weights = _setup(name, size)
    plain = x.clone().requires_grad_()
    want = torch.autograd.grad(sum(_losses(name, plain, weights)), plain)[0]
    sharded = _program(name, size)
    leaf = x.clone().requires_grad_()
    y = sharded(leaf)
    _close(y.detach(), torch.stack(_on_one_process(PROGRAMS[name], {"cp": size}, list(x))))
    (y * weights).sum().backward()
    _close(leaf.grad, want)
    _close(torch.func.grad(lambda x: (sharded(x) * weights).sum())(x), want)


def _by_func(loss, x):
    return torch.func.grad(loss)(x)


def _by_vjp(loss, x):
    _, pull = torch.func.vjp(loss, x)
    return pull(torch.ones((), dtype=x.dtype))[0]


def _by_autograd(loss, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def _by_backward(loss, x):
    x = x.detach().requires_grad_()
    loss(x).backward()
    return x.grad


INSIDE = [_by_func, _by_vjp, _by_autograd, _by_backward]


@every_program
@few_sizes
def test_gradients_inside_of_the_body_are_those_of_the_sum_over_ranks(name, size):
    x, weights = _setup(name, size)

    def body(comm, rank, x, weight):
        def loss(x):
            return (_on_rank(PROGRAMS[name], comm, rank, x) * weight).sum()

        return tuple(gradient(loss, x) for gradient in INSIDE)

    plain = x.clone().requires_grad_()
    want = torch.autograd.grad(sum(_losses(name, plain, weights)), plain)[0]
    for got in _mapped(body, size)(x, weights):
        _close(got, want)


@every_program
@pytest.mark.parametrize("size", [1, 2, 3])
def test_second_derivatives_inside_of_the_body_are_those_of_the_sum_over_ranks(name, size):
    x, weights = _setup(name, size)

    def twice(comm, rank, x, weight):
        def loss(x):
            return (_on_rank(PROGRAMS[name], comm, rank, x) * weight).sum()

        return torch.func.grad(lambda x: torch.func.grad(loss)(x).sin().sum())(x)

    plain = x.clone().requires_grad_()
    first = torch.autograd.grad(sum(_losses(name, plain, weights)), plain, create_graph=True)[0]
    _close(_mapped(twice, size)(x, weights), torch.autograd.grad(first.sin().sum(), plain)[0])


@every_program
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_pass_through_a_gradient_inside_of_the_body(name, size):
    """The body returns a gradient of its own; one derivative more is taken from outside."""
    x, weights = _setup(name, size)

    def body(comm, rank, x, weight):
        return torch.func.grad(lambda x: (_on_rank(PROGRAMS[name], comm, rank, x) * weight).sum())(x).sin()

    plain, leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    first = torch.autograd.grad(sum(_losses(name, plain, weights)), plain, create_graph=True)[0]
    _mapped(body, size)(leaf, weights).sum().backward()
    _close(leaf.grad, torch.autograd.grad(first.sin().sum(), plain)[0])


@every_program
@pytest.mark.parametrize("size", [1, 2, 3])
def test_vmap_inside_of_the_body_is_a_loop(name, size):
    x = torch.randn(size, 3, size, 2, dtype=torch.float64)

    def body(comm, rank, x):
        def run(x):
            return _on_rank(PROGRAMS[name], comm, rank, x)

        return tuple(torch.func.vmap(run, in_dims=dim, out_dims=dim)(x.movedim(0, dim)) for dim in range(3))

    want = torch.stack([torch.stack(_on_one_process(PROGRAMS[name], {"cp": size}, list(x[:, i]))) for i in range(3)], 1)
    for dim, got in enumerate(_mapped(body, size)(x)):
        _close(got, want.movedim(1, dim + 1))


@every_program
@pytest.mark.parametrize("size", [1, 2, 3])
def test_vmap_of_grad_and_grad_of_vmap_inside_of_the_body_are_loops(name, size):
    x = torch.randn(size, 3, size, 2, dtype=torch.float64)
    weights = _setup(name, size)[1]

    def body(comm, rank, x, weight):
        def loss(x):
            return (_on_rank(PROGRAMS[name], comm, rank, x) * weight).sum()

        run = torch.func.vmap(loss)
        return torch.func.vmap(torch.func.grad(loss))(x), torch.func.grad(lambda x: run(x).sum())(x)

    plain = x.clone().requires_grad_()
    total = sum(sum(_losses(name, plain[:, i], weights)) for i in range(3))
    want = torch.autograd.grad(total, plain)[0]
    for got in _mapped(body, size)(x, weights):
        _close(got, want)


@every_program
def test_gradients_from_outside_pass_through_vmap_inside_of_the_body(name):
    size = 3
    x = torch.randn(size, 2, size, 2, dtype=torch.float64)
    weights = _setup(name, size)[1]

    def body(comm, rank, x):
        return torch.func.vmap(lambda x: _on_rank(PROGRAMS[name], comm, rank, x))(x)

    plain, leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    (_mapped(body, size)(leaf) * weights[:, None]).sum().backward()
    want = sum(sum(_losses(name, plain[:, i], weights)) for i in range(2))
    _close(leaf.grad, torch.autograd.grad(want, plain)[0])


def test_vmap_in_vmap_inside_of_the_body_is_two_loops():
    x = torch.randn(2, 3, 4, 2, dtype=torch.float64)

    def body(comm, rank, x):
        one = torch.func.vmap(lambda x: _on_rank(_reduce, comm, rank, x), in_dims=0)
        return torch.func.vmap(one, in_dims=1)(x)

    want = torch.empty(2, 4, 3, 2, dtype=torch.float64)
    for i, j in itertools.product(range(3), range(4)):
        for rank, y in enumerate(_on_one_process(_reduce, {"cp": 2}, list(x[:, i, j]))):
            want[rank, j, i] = y
    _close(_mapped(body, 2)(x), want)


def test_vmap_over_something_else_leaves_a_collective_alone():
    def body(comm, rank, x):
        return torch.func.vmap(lambda c: c * comm["cp"].all_reduce(x))(torch.arange(3.0).double())

    x = torch.randn(2, 4, dtype=torch.float64)
    want = torch.arange(3.0).double()[:, None] * x.sum(0)
    _close(_mapped(body, 2)(x), want.expand(2, 3, 4))


@every_program
def test_the_jacobian_inside_of_the_body_is_that_of_the_sum_over_ranks(name):
    """Row i of rank r's jacobian: how the i-th results of all ranks, added up, follow rank r's argument."""
    x = torch.randn(2, 2, 2, dtype=torch.float64)
    got = _mapped(lambda comm, rank, x: torch.func.jacrev(lambda x: _on_rank(PROGRAMS[name], comm, rank, x))(x), 2)(x)
    total = torch.autograd.functional.jacobian(
        lambda x: sum(_on_one_process(PROGRAMS[name], {"cp": 2}, list(x))), x, create_graph=False
    )
    _close(got, total.movedim(-3, 0))


@every_size
def test_backward_is_the_transpose(size):
    """The product of y with A x is the product of x with what backward makes of y."""
    x = torch.randn(size, size, 2, dtype=torch.float64, requires_grad=True)
    calls = [*((name, 0) for name in COLLECTIVES), ("broadcast", size // 2), ("broadcast", size - 1)]
    results = _ranks(lambda comm, x: tuple(_call(comm, name, x, source) for name, source in calls), x)
    for (name, source), y in zip(calls, results, strict=True):
        other = torch.randn_like(y)
        transposed = torch.autograd.grad(y, x, other, retain_graph=True)[0]
        _close((y * other).sum(), (x * transposed).sum())
        if name == "broadcast":
            want = torch.zeros_like(transposed)
            want[source] = other.sum(0)
            _close(transposed, want)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_loss_that_every_rank_computes_in_full_counts_once_for_each(size):
    x = torch.randn(size, 2, dtype=torch.float64)

    def body(comm, rank, x):
        return torch.func.grad(lambda x: comm["cp"].all_reduce(x.square().sum()))(x)

    _close(_mapped(body, size)(x), size * 2 * x)


def test_integers_travel_beside_tensors_that_learn():
    def body(comm, x, index):
        rows, sent = comm.all_gather(index), comm.broadcast(index, 1)
        y = comm.all_gather(x)[rows]
        return y, rows, sent, comm.all_reduce(index > 0)

    x, index = torch.randn(2, 2, dtype=torch.float64, requires_grad=True), torch.tensor([[3, 0], [0, 1]])
    y, rows, sent, positive = _ranks(body, x, index)
    assert [t.requires_grad for t in (rows, sent, positive)] == [False] * 3
    assert (rows.tolist(), sent.tolist()) == ([[3, 0, 0, 1]] * 2, [[0, 1]] * 2)
    assert positive.tolist() == [[True, True]] * 2
    grad = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert grad.flatten().tolist() == [4, 2, 0, 2]

    def inside(comm, x, index):
        return torch.func.grad(lambda x: comm.all_gather(x)[comm.all_gather(index)].sum())(x)

    assert torch.equal(_ranks(inside, x.detach(), index), grad)


def test_only_what_requires_grad_gets_a_gradient_and_no_grad_holds():
    def body(comm, x, y):
        assert comm.all_gather(x).requires_grad
        assert not comm.all_gather(y).requires_grad
        with torch.no_grad():
            assert not comm.all_reduce(x).requires_grad
        return comm.all_reduce(x.detach()) + comm.all_reduce(y) * x

    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    result = _ranks(body, x, y)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], y.sum(0).expand(2, 3))


def test_complex_numbers_have_gradients_too():
    z = torch.randn(3, 3, 2, dtype=torch.complex128)

    def loss(ys):
        return sum((y * y.conj()).real.square().sum() for y in ys)

    for name in COLLECTIVES:
        plain = z.clone().requires_grad_()
        want = torch.autograd.grad(loss(_together(name, list(plain), 1)), plain)[0]

        def body(comm, z, name=name):
            z = z.detach().requires_grad_()
            return torch.autograd.grad(loss([_call(comm, name, z, 1)]), z)[0]

        _close(_ranks(body, z), want)
        leaf = z.clone().requires_grad_()
        got = _ranks(lambda comm, z, name=name: _call(comm, name, z, 1), leaf)
        loss(got).backward()
        _close(leaf.grad, want)


# Several tensors in one gather.

ROWS = [((), torch.float64), ((3,), torch.float64), ((2, 2), torch.float64), ((1,), torch.float64)]
MIXED = [
    ((), torch.bool),
    ((3,), torch.float8_e4m3fn),
    ((1,), torch.int64),
    ((2, 2), torch.bfloat16),
    ((), torch.uint8),
    ((5,), torch.float64),
]


def _random_bits(size, rows, shape, dtype):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size, rows, *shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).squeeze(-1)


def _same_bits(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


@every_size
def test_rows_of_several_tensors_travel_in_one_gather(size):
    kinds = [ROWS, MIXED, ROWS[:1], MIXED[1:2], MIXED[4:5], [((2,), torch.uint8)] * 2]
    cases = [(rows, several) for rows in (0, 1, 3) for several in kinds]
    given = [[_random_bits(size, rows, shape, dtype) for shape, dtype in several] for rows, several in cases]
    record = []

    def body(comm, *local):
        return tuple(sharding.gather_rows_start(comm["cp"], *(x[0] for x in xs)).wait() for xs in local)

    mesh = simulated_mesh(MeshShape(cp=size), record=record)
    for xs, ys in zip(given, shard_map(body, mesh, in_specs=P("cp"), out_specs=P())(*given), strict=True):
        assert len(xs) == len(ys)
        assert all(_same_bits(y, x.flatten(0, 1)) for x, y in zip(xs, ys, strict=True))
    widths = [sum(math.prod(shape) * dtype.itemsize for shape, dtype in several) for _, several in cases]
    want = [rows * width * (size - 1) for (rows, _), width in zip(cases, widths, strict=True)]
    for rank in range(size):
        assert [transfer.bytes_sent for transfer in record if transfer.rank == rank] == want


def test_rows_without_values_travel_too():
    for kinds in ([((0,), torch.float32), ((2,), torch.float32)], [((2, 0), torch.float32), ((2,), torch.int64)]):
        given = [torch.ones(2, 3, *shape, dtype=dtype) for shape, dtype in kinds]
        got = _ranks(lambda comm, *local: sharding.gather_rows_start(comm, *local).wait(), *given)
        assert [tuple(y.shape) for y in got] == [(2, 6, *shape) for shape, _ in kinds]


@few_sizes
def test_rows_of_one_dtype_have_gradients(size):
    given = [torch.randn(size, 2, *shape, dtype=dtype, requires_grad=True) for shape, dtype in ROWS]
    weights = [torch.randn(size, 2 * size, *shape, dtype=dtype) for shape, dtype in ROWS]

    def body(comm, *local):
        pending = sharding.gather_rows_start(comm, *(x.tanh() for x in local))
        return tuple(y * y for y in pending.wait())

    got = _ranks(body, *given)
    total = sum((weight * y).sum() for weight, y in zip(weights, got, strict=True))
    wanted = sum((w * x.tanh().flatten(0, 1).square()).sum() for w, x in zip(weights, given, strict=True))
    for a, b in zip(torch.autograd.grad(total, given), torch.autograd.grad(wanted, given), strict=True):
        _close(a, b)

    def inside(comm, *local):
        def loss(*local):
            pending = sharding.gather_rows_start(comm, *local[: len(ROWS)])
            return sum((weight * y).sum() for weight, y in zip(local[len(ROWS) :], pending.wait(), strict=True))

        return torch.func.grad(loss, argnums=tuple(range(len(ROWS))))(*local)

    for x, weight, got in zip(given, weights, _ranks(inside, *(x.detach() for x in (*given, *weights))), strict=True):
        _close(got, weight.sum(0).view_as(x))


def test_rows_under_vmap_are_a_loop():
    x, y = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3)
    one, other = _ranks(
        lambda comm, x, y: torch.func.vmap(lambda x, y: sharding.gather_rows_start(comm, x, y).wait())(x, y), x, y
    )
    for b in range(4):
        assert torch.equal(one[0, b], x[:, b].flatten(0, 1))
        assert torch.equal(other[0, b], y[:, b].flatten(0, 1))


def test_rows_of_several_dtypes_carry_no_gradient():
    refusal = "gather_rows_start: rows of several dtypes must not require grad; got [torch.float32, torch.int64]"

    def body(comm, x, index):
        return sharding.gather_rows_start(comm, x, index).wait()

    x, index = torch.randn(2, 3, requires_grad=True), torch.randint(9, (2, 3))
    with pytest.raises(ValueError) as error:
        _ranks(body, x, index)
    assert str(error.value) == refusal
    with pytest.raises(ValueError) as error:
        _ranks(lambda comm, x, i: torch.func.grad(lambda x: body(comm, x, i)[0].sum())(x), x.detach(), index)
    assert str(error.value) == refusal
    rows, indices = _ranks(torch.no_grad()(body), x, index)
    assert torch.equal(rows[1], x.flatten())
    assert torch.equal(indices[0], index.flatten())
    assert not _ranks(body, x.detach(), index)[0].requires_grad


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "tensors must have one number of rows; got []"),
        ([(2, 3), (3, 3)], "tensors must have one number of rows; got [(2, 3), (3, 3)]"),
        ([(2,), ()], "tensors must have one number of rows; got [(2,), ()]"),
    ],
)
def test_rows_that_do_not_fit_beside_each_other_are_refused(shapes, message):
    def body(comm):
        return sharding.gather_rows_start(comm["cp"], *map(torch.zeros, shapes)).wait()

    with pytest.raises(ValueError) as error:
        shard_map(body, simulated_mesh(MeshShape(cp=2)), in_specs=(), out_specs=P())()
    assert str(error.value) == f"gather_rows_start: {message}"


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_packed_rows_unpack_to_the_same_bits(rows):
    given = [_random_bits(1, rows, shape, dtype)[0] for shape, dtype in [*MIXED, ((2,), torch.complex64)]]
    packed = sharding.pack_rows(*given)
    widths = [math.prod(x.shape[1:]) * x.dtype.itemsize for x in given]
    assert (packed.dtype, packed.shape) == (torch.uint8, (rows, sum(widths)))
    for row, (first, second) in itertools.product(range(rows), [(1, 2)]):
        got = packed[row, sum(widths[:first]) : sum(widths[: second + 1])].tolist()
        assert got == [
            *given[first][row].flatten().view(torch.uint8).tolist(),
            *given[second][row].flatten().view(torch.uint8).tolist(),
        ]
    unpacked = sharding.unpack_rows(packed, [x.shape[1:] for x in given], [x.dtype for x in given])
    packed.zero_()
    assert all(_same_bits(a, b) for a, b in zip(unpacked, given, strict=True))


def test_unpack_refuses_another_width_or_dtype():
    cases = {
        "(torch.uint8, (2, 9))": torch.zeros(2, 9, dtype=torch.uint8),
        "(torch.int8, (2, 8))": torch.zeros(2, 8, dtype=torch.int8),
        "(torch.uint8, (8,))": torch.zeros(8, dtype=torch.uint8),
    }
    for got, packed in cases.items():
        with pytest.raises(ValueError) as error:
            sharding.unpack_rows(packed, [(2,)], [torch.float32])
        assert str(error.value) == f"unpack_rows: packed must be uint8 [rows, 8]; got {got}"


# Random programs.


def _random_program(dice, sizes, rows):
    """Draw ten steps on a [rows, 2] tensor: local maths that differs by rank, and collectives over any axes."""
    axes = [*sizes, tuple(sizes), tuple(reversed(sizes))]
    kinds = [*COLLECTIVES, "sin", "mix", "product", "overlap"]
    steps = [(dice.choice(kinds), dice.choice(axes), dice.random(), dice.random()) for _ in range(10)]
    ranks = {a: math.prod(sizes[name] for name in ((a,) if isinstance(a, str) else a)) for a in axes}

    def program(rank, x):
        kept = x
        for kind, axis, a, b in steps:
            n = ranks[axis]
            source = int(a * n)
            if kind == "sin":
                x = (x * (1 + a * rank)).sin()
            elif kind == "mix":
                x = x @ torch.tensor([[a, b - rank], [1.0, -b]], dtype=x.dtype)
                x = x.tanh()
            elif kind == "product":
                x, kept = x * kept.cos(), x
            elif kind == "all_gather":
                y = yield kind, axis, x, 0
                x = (y.unflatten(0, (n, rows)) * torch.linspace(a, b, n, dtype=x.dtype)[:, None, None]).sum(0)
            elif kind == "reduce_scatter":
                y = yield kind, axis, x, 0
                x = y.repeat(n, 1) / n + kept
            elif kind == "all_reduce":
                y = yield kind, axis, x, 0
                x = y / n
            elif kind == "overlap":
                first = yield "all_gather_start", axis, x, 0
                second = yield "broadcast_start", axis, x.sin(), source
                x = yield "all_to_all", axis, x, 0
                y = yield "wait", second, None, 0
                z = yield "wait", first, None, 0
                x = x * y + a * z[-rows:]
            else:
                x = yield kind, axis, x, source
        return x

    return program


def _per_sample(program, comm, rank, batched, weight):
    """Return value and gradient of each sample, as vmap and func.grad in the body make them."""

    def loss(x):
        y = _on_rank(program, comm, rank, x)
        return (y * weight).sum(), y

    return torch.func.vmap(torch.func.grad(loss, has_aux=True))(batched)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_those_of_one_process(seed):
    dice = random.Random(seed)
    sizes = {"cp": dice.choice([1, 2, 3]), "tp": dice.choice([1, 2])}
    size = math.prod(sizes.values())
    program = _random_program(dice, sizes, rows=12)
    x, weights = (torch.randn(size, 12, 2, dtype=torch.float64) for _ in range(2))
    plain = x.clone().requires_grad_()
    wanted = torch.stack(_on_one_process(program, sizes, list(plain)))
    want = torch.autograd.grad((wanted * weights).sum(), plain)[0]

    shape = MeshShape(**sizes)
    named = {"in_specs": P(tuple(sizes)), "out_specs": P(tuple(sizes))}

    def ranked(body):
        def local(comm, *given):
            result = body(comm, comm["cp"].rank * sizes["tp"] + comm["tp"].rank, *(x[0] for x in given))
            return tuple(y[None] for y in result) if isinstance(result, tuple) else result[None]

        return shard_map(local, simulated_mesh(shape), **named)

    leaf = x.clone().requires_grad_()
    y = ranked(lambda comm, rank, x: _on_rank(program, comm, rank, x))(leaf)
    _close(y.detach(), wanted.detach())
    (y * weights).sum().backward()
    _close(leaf.grad, want)

    pair = torch.stack([x, x.flip(1)], 1)
    inside = ranked(lambda comm, rank, x, weight: _per_sample(program, comm, rank, x, weight))
    gradients, values = inside(pair, weights)
    _close(values[:, 0], wanted.detach())
    _close(gradients[:, 0], want)
    flipped = pair[:, 1].clone().requires_grad_()
    other = torch.stack(_on_one_process(program, sizes, list(flipped)))
    _close(values[:, 1], other.detach())
    _close(gradients[:, 1], torch.autograd.grad((other * weights).sum(), flipped)[0])
