"""Simulated ranks: one runs at a time, in one order; whatever goes wrong on one of them ends all, at once, in words."""

import contextvars
import signal
import threading
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sharding import MeshShape, P, Transfer, shard_map, simulated_mesh
from sharding.simulate import run_ranks


def _mesh(**axes):
    return simulated_mesh(MeshShape(**axes))


def _run(body, size=3, x=None):
    """Run ``body(comm, x)`` on the ranks of one axis; x is [size, ...], row r on rank r."""
    x = torch.arange(2.0 * size).view(size, 2) if x is None else x
    local = shard_map(lambda comm, x: body(comm["cp"], x[0])[None], _mesh(cp=size), in_specs=P("cp"), out_specs=P("cp"))
    return local(x)


def _work_goes_on():
    assert _run(lambda comm, x: comm.all_reduce(x)).tolist() == [[6, 9]] * 3


@pytest.fixture(autouse=True, scope="module")
def _imported():
    """Import what the first call imports, so that times measured below are times of waiting."""
    x = torch.zeros(3, 2, requires_grad=True)
    _run(lambda comm, x: comm.all_reduce(x), x=x).sum().backward()


def _ends(run, expected=RuntimeError, seconds=1):
    """Return what ``run`` raises, once it is sure that it ends within a second and leaves no thread behind."""
    before, raised = set(threading.enumerate()), []

    def watched():
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=watched, daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(3 * seconds)
    assert not thread.is_alive(), "the ranks hang"
    assert time.monotonic() - began < seconds
    assert set(threading.enumerate()) <= before
    assert [type(error) for error in raised] == [expected]
    _work_goes_on()
    return raised[0]


def _message(body, size=3):
    return str(_ends(lambda: _run(body, size), seconds=max(1, size / 4)))  # 64 threads take their time to start


# What ranks disagree about.


def _first_alone(first, others):
    return lambda comm, x: first(comm, x) if comm.rank == 0 else others(comm, x)


def _gather_then_reduce(comm, x):
    return comm.all_gather(x)[:2] + comm.all_reduce(x)


def _reduce_then_gather(comm, x):
    return comm.all_reduce(x) + comm.all_gather(x)[:2]


DISAGREEMENTS = {
    "another collective": (
        _first_alone(lambda comm, x: comm.all_gather(x), lambda comm, x: comm.all_reduce(x)),
        "collective 1 of axis 'cp' in the forward pass: "
        "rank 0 calls all_gather of float32 [2], rank 1 calls all_reduce of float32 [2]",
    ),
    "another shape": (
        _first_alone(lambda comm, x: comm.all_gather(x), lambda comm, x: comm.all_gather(x[:1])),
        "collective 1 of axis 'cp' in the forward pass: "
        "rank 0 calls all_gather of float32 [2], rank 1 calls all_gather of float32 [1]",
    ),
    "another dtype": (
        _first_alone(lambda comm, x: comm.all_reduce(x.bfloat16()), lambda comm, x: comm.all_reduce(x.long())),
        "collective 1 of axis 'cp' in the forward pass: "
        "rank 0 calls all_reduce of bfloat16 [2], rank 1 calls all_reduce of int64 [2]",
    ),
    "another source": (
        lambda comm, x: comm.broadcast(x, comm.rank),
        "collective 1 of axis 'cp' in the forward pass: "
        "rank 0 calls broadcast from 0 of float32 [2], rank 1 calls broadcast from 1 of float32 [2]",
    ),
    "another order": (
        _first_alone(_gather_then_reduce, _reduce_then_gather),
        "collective 1 of axis 'cp' in the forward pass: "
        "rank 0 calls all_gather of float32 [2], rank 1 calls all_reduce of float32 [2]",
    ),
    "another order of started ones": (
        lambda comm, x: sum(h.wait() for h in [comm.broadcast_start(x, abs(comm.rank - i)) for i in range(2)]),
        "collective 1 of axis 'cp' in the forward pass: "
        "rank 0 calls broadcast from 0 of float32 [2], rank 1 calls broadcast from 1 of float32 [2]",
    ),
    "another one after one that fits": (
        lambda comm, x: comm.all_gather(comm.all_reduce(x)[comm.rank :])[:2],
        "collective 2 of axis 'cp' in the forward pass: "
        "rank 2 calls all_gather of float32 [0], rank 0 calls all_gather of float32 [2]",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_ends_all_ranks_and_names_both_sides(name):
    body, message = DISAGREEMENTS[name]
    assert _message(body) == f"shard_map: ranks disagree on {message}"


@pytest.mark.parametrize("size", [2, 16, 64])
def test_a_disagreement_ends_any_number_of_ranks(size, unchecked):
    def body(comm, x):
        return comm.all_reduce(x if comm.rank < comm.size - 1 else x.double())

    rank = size - 1
    assert _message(body, size).endswith(
        f"rank 0 calls all_reduce of float32 [2], rank {rank} calls all_reduce of float64 [2]"
    )


# Who waits for whom.


def _early_return(comm, x):
    return x if comm.rank == 1 else comm.all_gather(x)[:2]


def _one_more(comm, x):
    x = comm.all_reduce(x)
    return comm.all_to_all(x.repeat(3))[:2] if comm.rank == 2 else x


def _started_by_one(comm, x):
    if comm.rank == 1:
        comm.all_gather_start(x)
    return x


def _started_and_awaited_by_one(comm, x):
    return comm.broadcast_start(x, 0).wait() if comm.rank == 0 else x


def _caught_fault(comm, x):
    """Rank 1's first try is refused before it meets the others; it goes on without them."""
    try:
        return comm.reduce_scatter(x if comm.rank == 1 else x.repeat(3))
    except ValueError:
        return x


WAITING = {
    "an early return": (
        _early_return,
        "shard_map: the forward pass can't go on: "
        "ranks 0, 2: waiting in all_gather (collective 1 of axis 'cp'); rank 1: returned",
    ),
    "one collective too many": (
        _one_more,
        "shard_map: the forward pass can't go on: "
        "ranks 0, 1: returned; rank 2: waiting in all_to_all (collective 2 of axis 'cp')",
    ),
    "a started one that others never join": (
        _started_by_one,
        "shard_map: all ranks must take part in all_gather, collective 1 of axis 'cp' in the forward pass; "
        "ranks 0, 2 returned without",
    ),
    "a started one that is waited for": (
        _started_and_awaited_by_one,
        "shard_map: the forward pass can't go on: "
        "rank 0: waiting in broadcast (collective 1 of axis 'cp'); ranks 1, 2: returned",
    ),
    "a fault that the body catches": (
        _caught_fault,
        "shard_map: the forward pass can't go on: "
        "ranks 0, 2: waiting in reduce_scatter (collective 1 of axis 'cp'); rank 1: returned",
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_ranks_that_wait_in_vain_end_and_say_what_each_does(name):
    body, message = WAITING[name]
    assert _message(body) == message


def _on_two_axes(body):
    local = shard_map(body, _mesh(cp=2, tp=2), in_specs=P(), out_specs=P(("cp", "tp")))
    return str(_ends(lambda: local(torch.zeros(2))))


def test_ranks_that_wait_for_each_other_on_two_axes_end():
    def body(comm, x):
        first, second = ("cp", "tp") if comm["cp"].rank == comm["tp"].rank else ("tp", "cp")
        return comm[second].all_reduce(comm[first].all_reduce(x))

    assert _on_two_axes(body) == (
        "shard_map: the forward pass can't go on: ranks 0, 3: waiting in all_reduce (collective 1 of axis 'cp'); "
        "ranks 1, 2: waiting in all_reduce (collective 1 of axis 'tp')"
    )


def test_the_same_axes_in_another_order_do_not_meet():
    def body(comm, x):
        axes = ("cp", "tp") if comm["cp"].rank == 0 else ("tp", "cp")
        return comm[axes].all_reduce(x)

    assert _on_two_axes(body) == (
        "shard_map: the forward pass can't go on: "
        "ranks 0, 1: waiting in all_reduce (collective 1 of axes ('cp', 'tp')); "
        "ranks 2, 3: waiting in all_reduce (collective 1 of axes ('tp', 'cp'))"
    )


# Exceptions of the body.


class _Odd(BaseException):
    """Neither an Exception nor one that Python knows."""


def _failing_at(place, error, rank):
    """Meet twice; the given rank raises before, between or after."""

    def body(comm, x):
        for step in range(3):
            if comm.rank == rank and step == place:
                raise error
            if step < 2:
                x = comm.all_gather(x)[:2] if step == 0 else comm.all_reduce(x)
        return x

    return body


FIRST, SECOND = "all_gather (collective 1 of axis 'cp')", "all_reduce (collective 2 of axis 'cp')"
OTHERS = {
    (0, 0): "ranks 1, 2: not started",
    (0, 1): f"rank 0: waiting in {FIRST}; rank 2: not started",
    (0, 2): f"ranks 0, 1: waiting in {FIRST}",
    (1, 0): f"rank 1: waiting in {FIRST}; rank 2: waiting in {SECOND}",  # rank 2 came last to the first, and went on
    (1, 1): f"ranks 0, 2: waiting in {SECOND}",
    (1, 2): f"ranks 0, 1: waiting in {FIRST}",
    (2, 0): "ranks 1, 2: returned",  # rank 1 came last to the second
    (2, 1): f"ranks 0, 2: waiting in {SECOND}",
    (2, 2): f"rank 0: waiting in {SECOND}; rank 1: returned",
}


KINDS = [KeyError("odd"), SystemExit(3), StopIteration(1), _Odd("odd")]


@pytest.mark.parametrize(
    ("place", "rank", "error"),
    [*((*at, ValueError("odd")) for at in OTHERS), *((1, 1, error) for error in KINDS), (0, 0, KeyError("odd"))],
    ids=repr,
)
def test_an_exception_keeps_its_type_and_says_where_it_was_raised_and_what_others_wait_in(place, rank, error):
    raised = _ends(lambda: _run(_failing_at(place, type(error)(*error.args), rank)), type(error))
    assert raised.args == error.args
    (note,) = raised.__notes__
    where, others = note.split("; ", 1)
    assert where == f"raised on rank {rank} of MeshShape(cp=3) in the forward pass"
    assert others == OTHERS[place, rank]


def test_the_first_exception_is_the_one_that_counts():
    def body(comm, x):
        if comm.rank == 1:
            raise ValueError("first")
        try:
            return comm.all_reduce(x)
        finally:
            if comm.rank == 0:
                raise KeyError("second")

    raised = _ends(lambda: _run(body), ValueError)
    assert raised.args == ("first",)
    assert len(raised.__notes__) == 1


def test_an_exception_of_64_ranks_names_the_one_that_raised(unchecked):
    def body(comm, x):
        x = comm.all_reduce(x)
        return comm.all_reduce(x) if comm.rank != 40 else x / {}[40]

    raised = _ends(lambda: _run(body, 64), KeyError, seconds=16)
    assert raised.__notes__[0].startswith("raised on rank 40 of MeshShape(cp=64) in the forward pass; ranks 0, 1, 2,")


def test_a_body_may_catch_its_own_exceptions():
    """All ranks make the same mistake and recover: nothing has happened."""

    def body(comm, x):
        try:
            comm.reduce_scatter(x)
        except ValueError:
            return comm.all_reduce(x)

    assert _run(body).tolist() == [[6, 9]] * 3


def test_a_body_that_tries_again_and_again_ends_too():
    def body(comm, x):
        while True:
            try:
                return comm.all_reduce(x[comm.rank :])
            except Exception:
                continue

    assert "rank 0 calls all_reduce of float32 [2], rank 1 calls all_reduce of float32 [1]" in _message(body)


def test_a_body_that_catches_everything_ends_too():
    def body(comm, x):
        for _ in range(5):
            try:
                return comm.all_reduce(x[comm.rank :])
            except BaseException:
                continue
        return x

    assert "rank 0 calls all_reduce of float32 [2], rank 1 calls all_reduce of float32 [1]" in _message(body)


def test_a_body_that_cleans_up_with_a_collective_ends_too():
    def body(comm, x):
        try:
            if comm.rank == 1:
                raise ValueError("odd")
            return comm.all_reduce(x)
        finally:
            comm.all_gather(x)

    message = str(_ends(lambda: _run(body)))
    assert "rank 0 calls all_reduce of float32 [2], rank 1 calls all_gather of float32 [2]" in message


def test_collectives_outside_of_shard_map_are_refused():
    kept = []
    _run(lambda comm, x: kept.append(comm) or x)
    for call, name in [
        (lambda: kept[0].all_reduce(torch.zeros(2)), "all_reduce"),
        (lambda: kept[1].all_gather_start(torch.zeros(2)), "all_gather"),
    ]:
        text = f"{name}: simulated ranks meet inside of shard_map only; got a call outside of it"
        assert str(_ends(call)) == text


def _keep(mesh, kept):
    """Run a body that leaves each rank's collectives behind."""
    shard_map(lambda comm: kept.append(comm["cp"]), mesh, in_specs=(), out_specs=P())()
    return kept


@pytest.mark.parametrize("other", ["a rank", "a smaller mesh", "a larger mesh", "an outer body"])
def test_collectives_of_others_are_refused(other):
    kept = [] if other == "an outer body" else _keep(_mesh(cp={"a rank": 3, "a smaller mesh": 2}.get(other, 5)), [])

    def body(comm, x):
        if other == "an outer body":
            inner = shard_map(lambda _, x: comm.all_reduce(x), _mesh(tp=2), in_specs=P(), out_specs=P())
            return inner(x)
        return kept[-1 if other == "a larger mesh" else 0].all_reduce(x)

    assert "all_reduce" in str(_ends(lambda: _run(body)))


def test_a_loss_of_the_body_has_no_backward_outside_of_it():
    kept = []

    def body(comm, x):
        x = x.detach().requires_grad_()
        kept.append(comm.all_gather(x).sum())
        return x.detach()

    _run(body)
    text = "reduce_scatter: simulated ranks meet inside of shard_map only; got a call outside of it"
    assert str(_ends(lambda: kept[0].backward())) == text


def test_ctrl_c_ends_all_ranks():
    """The main thread is interrupted while rank 1 works; rank 1 ends at its next collective."""

    def body(comm, x):
        if comm.rank == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)
        return comm.all_reduce(x)

    def too_late(*_):
        raise AssertionError("the ranks hang")

    before, alarm = set(threading.enumerate()), signal.signal(signal.SIGALRM, too_late)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        with pytest.raises(KeyboardInterrupt):
            _run(body)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, interrupt)
    assert set(threading.enumerate()) <= before
    _work_goes_on()


# The backward pass.


def _backward_error(body, expected=RuntimeError):
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    y = _run(body, x=x)
    error = _ends(lambda: y.sum().backward(), expected)
    assert x.grad is None
    return error


def test_a_disagreement_in_the_backward_pass_ends_all_ranks():
    def body(comm, x):
        gathered, total = comm.all_gather(x), comm.all_reduce(x)
        return gathered[:2] if comm.rank == 0 else total

    assert str(_backward_error(body)) == (
        "shard_map: ranks disagree on collective 1 of axis 'cp' in the backward pass: "
        "rank 0 calls reduce_scatter of float32 [6], rank 1 calls all_reduce of float32 [2]"
    )


def test_a_rank_without_a_backward_pass_ends_the_others():
    def body(comm, x):
        gathered = comm.all_gather(x)[:2]
        return gathered if comm.rank == 1 else gathered.detach()

    assert str(_backward_error(body)) == (
        "shard_map: the backward pass can't go on: "
        "ranks 0, 2: returned; rank 1: waiting in reduce_scatter (collective 1 of axis 'cp')"
    )


@pytest.mark.parametrize("kind", [ValueError, KeyError, SystemExit])
def test_an_exception_in_the_backward_pass_keeps_its_type_and_says_where(kind):
    def body(comm, x):
        x = x * 2
        if comm.rank == 1:
            x.register_hook(_raise)
        return comm.all_reduce(comm.all_gather(x)[:2])

    def _raise(gradient):
        raise kind("odd")

    error = _backward_error(body, kind)
    assert error.args == ("odd",)
    others = "ranks 0, 2: waiting in reduce_scatter (collective 2 of axis 'cp')"  # rank 1 came last and went on
    assert error.__notes__ == [f"raised on rank 1 of MeshShape(cp=3) in the backward pass; {others}"]


# Order and state.


def test_a_rank_runs_until_it_waits_for_others():
    order = []

    def body(comm, x):
        for step in range(3):
            order.append((comm.rank, step))
            x = comm.all_reduce(x) if step < 2 else x
        return x

    _run(body)
    # 2 comes last to the first meeting and goes on, 1 to the second
    assert order == [(0, 0), (1, 0), (2, 0), (2, 1), (0, 1), (1, 1), (1, 2), (2, 2), (0, 2)]


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_one_rank_runs_at_a_time(size):
    """Two that worked at once would count to two; the pause lets any other thread in that could run."""
    working, most = [0], [0]

    def work(gradient):
        working[0] += 1
        time.sleep(0.0005)
        most[0] = max(most[0], working[0])
        working[0] -= 1
        return gradient

    def body(comm, x):
        for _ in range(2):
            x = comm.all_reduce(work(x) * 1)
            x.register_hook(work)
        return x

    x = torch.zeros(size, 2, requires_grad=True)
    _run(body, size, x).sum().backward()
    assert most == [1]


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_the_same_bits_twice_random_numbers_included(size):
    def body(comm, x):
        noise = torch.randn(5)
        return comm.all_reduce((x * noise).softmax(0)) + torch.nn.functional.dropout(x, 0.5)

    def once():
        torch.manual_seed(3)
        x = torch.linspace(0, 1, 5 * size).view(size, 5).requires_grad_()
        y = _run(body, size, x)
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0], torch.get_rng_state()

    first, second = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].unique(dim=0).shape[0] == size


def test_ranks_draw_random_numbers_one_after_the_other():
    torch.manual_seed(5)
    got = _run(lambda comm, x: torch.randn(4))
    torch.manual_seed(5)
    assert torch.equal(got, torch.stack([torch.randn(4) for _ in range(3)]))


def test_the_random_state_is_left_alone():
    before = torch.get_rng_state()
    x = torch.ones(3, 2, requires_grad=True)
    _run(lambda comm, x: comm.all_reduce(x * comm.broadcast(x, 1)), x=x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def _seen_by_ranks(look, size=3):
    """Return what ``look()`` returns on each rank, in its thread."""
    seen = []
    local = shard_map(lambda comm: seen.append(look()), _mesh(cp=size), in_specs=(), out_specs=P())
    local()
    assert len(seen) == size
    return seen


def test_ranks_are_threads_of_their_own():
    threads = _seen_by_ranks(threading.get_ident)
    assert threading.get_ident() not in threads


def test_ranks_have_the_callers_grad_mode():
    def look():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert _seen_by_ranks(look) == [(True, False)] * 3
    with torch.no_grad():
        assert _seen_by_ranks(look) == [(False, False)] * 3
        with torch.enable_grad():
            assert _seen_by_ranks(look) == [(True, False)] * 3
    with torch.inference_mode():
        assert _seen_by_ranks(look) == [(False, True)] * 3


def test_ranks_of_a_bare_run_have_the_callers_grad_mode_and_give_their_results_by_rank():
    def body(rank):
        return rank, torch.is_grad_enabled()

    for phase in ("forward", "backward"):
        assert run_ranks(MeshShape(cp=2, tp=2), body, phase=phase) == [(rank, True) for rank in range(4)]
        with torch.no_grad():
            assert run_ranks(MeshShape(cp=3), body, phase=phase) == [(rank, False) for rank in range(3)]


def test_ranks_have_the_callers_autocast():
    def look():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return product.dtype, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()

    assert _seen_by_ranks(look) == [(torch.float32, False, True)] * 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _seen_by_ranks(look) == [(torch.bfloat16, True, True)] * 3
        with torch.autocast("cpu", enabled=False):
            assert _seen_by_ranks(look) == [(torch.float32, False, True)] * 3
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        assert _seen_by_ranks(look) == [(torch.float16, True, False)] * 3


def test_ranks_have_the_callers_device():
    with torch.device("meta"):
        assert _seen_by_ranks(lambda: torch.empty(2).device.type) == ["meta"] * 3
    assert _seen_by_ranks(lambda: torch.empty(2).device.type) == ["cpu"] * 3


def test_ranks_have_copies_of_the_callers_context_variables():
    variable = contextvars.ContextVar("variable", default=0)

    def look():
        seen = variable.get()
        variable.set(seen + 1)
        return seen, variable.get()

    token = variable.set(7)
    assert _seen_by_ranks(look) == [(7, 8)] * 3
    assert variable.get() == 7
    variable.reset(token)
    assert _seen_by_ranks(look) == [(0, 1)] * 3


def test_ranks_have_the_callers_number_of_threads():
    assert _seen_by_ranks(torch.get_num_threads) == [torch.get_num_threads()] * 3


def test_a_backward_pass_stays_in_the_thread_of_its_rank():
    homes, seen = [], []

    def note(gradient):
        seen.append((threading.get_ident(), torch._C._is_multithreading_enabled(), torch.is_grad_enabled()))

    def body(comm, x):
        homes.append((threading.get_ident(), torch._C._is_multithreading_enabled()))
        y = x.detach().requires_grad_()
        y.register_hook(note)
        comm.all_reduce(y * y).sum().backward()
        assert seen[-1] == (*homes[comm.rank], False)
        return x

    before = torch._C._is_multithreading_enabled()
    _run(body)
    assert len(seen) == 3
    assert not any(multithreading for _, multithreading in homes)
    assert torch._C._is_multithreading_enabled() == before


def test_backward_passes_have_the_modes_of_who_calls_backward():
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    def body(comm, x):
        y = x * 1
        y.register_hook(lambda g: seen.append((variable.get(), torch.is_autocast_enabled("cpu"))))
        return y

    x = torch.zeros(3, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = _run(body, x=x)
    variable.set(4)
    y.sum().backward()
    assert seen == [(4, False)] * 3


def test_modes_entered_inside_of_the_body_count_that_rank():
    flops = []

    def body(comm, x):
        x = comm.all_reduce(x)
        with FlopCounterMode(display=False) as counter:
            x = torch.zeros(5 + comm.rank, 2) @ x[:, None]
            comm.all_gather(torch.zeros(1))
        flops.append((comm.rank, counter.get_total_flops()))
        return torch.zeros(1)

    _run(body)
    assert sorted(flops) == [(rank, 2 * (5 + rank) * 2) for rank in range(3)]


def test_shard_map_inside_of_a_body_is_a_run_of_its_own():
    def inner(comm, x):
        return comm["tp"].all_reduce(x)

    def body(comm, x):
        parts = shard_map(inner, _mesh(tp=2), in_specs=P("tp"), out_specs=P())(x)
        return comm.all_reduce(parts * comm.rank)

    x = torch.arange(6.0, dtype=torch.float64).view(3, 2).requires_grad_()
    y = _run(body, x=x)
    want = sum(rank * x[rank].sum() for rank in range(3))
    assert torch.equal(y, want.detach().expand(3, 1))
    got = torch.autograd.grad(y[0].sum() * 2, x)[0]
    assert torch.equal(got, torch.autograd.grad(want * 2, x)[0])


# The record.


def _hand_count(name, shape, itemsize, size, rank, source):
    """Count the bytes that one rank sends: each byte once to each rank that needs it and does not have it."""
    rows, width = shape[0], itemsize
    for count in shape[1:]:
        width *= count
    match name:
        case "all_gather":  # my shard, to each other rank
            return sum(rows * width for other in range(size) if other != rank)
        case "reduce_scatter" | "all_to_all":  # each other rank's share of mine
            return sum(rows // size * width for other in range(size) if other != rank)
        case "broadcast":
            return sum(rows * width for other in range(size) if other != rank) if rank == source else 0
        case "all_reduce":  # values padded to a multiple of the ranks, scattered, then gathered
            values = rows * width // itemsize
            while values % size:
                values += 1
            share = values // size * itemsize
            return sum(share for other in range(size) if other != rank) * 2
        case "reduce":  # the transpose of a broadcast: what I have, to the source
            return rows * width if rank != source else 0


TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
    "broadcast": "reduce",
}


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, torch.float64), (3, torch.bfloat16), (4, torch.float64), (7, torch.bfloat16)]
)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_the_record_counts_what_each_rank_sends(name, dtype, size):
    record, source = [], size // 2
    rows = size * 2 if name in ("reduce_scatter", "all_to_all") else 3
    counts = {"all_gather": size * rows, "reduce_scatter": rows // size}
    back = (counts.get(name, rows), 5)

    def body(comm, x):
        comm = comm["cp"]
        return comm.broadcast(x, source) if name == "broadcast" else getattr(comm, name)(x)

    mesh = simulated_mesh(MeshShape(cp=size), record=record)
    x = torch.zeros(size * rows, 5, dtype=dtype, requires_grad=True)
    y = shard_map(body, mesh, in_specs=P("cp"), out_specs=P("cp"))(x)
    ranks = range(size)
    forward = [(rank, name, "forward", (rows, 5)) for rank in ranks]
    assert record == [
        Transfer(*call[:1], ("cp",), *call[1:], _hand_count(name, (rows, 5), dtype.itemsize, size, call[0], source))
        for call in forward
    ]
    record.clear()
    y.sum().backward()
    other = TRANSPOSED[name]
    want = [
        Transfer(r, ("cp",), other, "backward", back, _hand_count(other, back, dtype.itemsize, size, r, source))
        for r in ranks
    ]
    assert record == want


def test_the_record_of_a_worked_example():
    record = []

    def body(comm, x, y):
        handle = comm["cp"].all_gather_start(x)
        total = comm["tp"].all_reduce(y)
        return comm["cp", "tp"].broadcast(total, 3) + handle.wait()[:5]

    mesh = simulated_mesh(MeshShape(cp=2, tp=3), record=record)
    x, y = torch.zeros(6, 2), torch.zeros(5, 2)
    shard_map(body, mesh, in_specs=(P("cp"), P()), out_specs=P(("cp", "tp")))(x, y)
    by_rank = {rank: [transfer[1:] for transfer in record if transfer.rank == rank] for rank in range(6)}
    for rank, transfers in by_rank.items():
        assert transfers == [
            (("cp",), "all_gather", "forward", (3, 2), 24),  # 3 rows of 2 floats, to one other rank
            (("tp",), "all_reduce", "forward", (5, 2), 64),  # 10 values in 3 shares of 4: 2 of them out, mine 2 times
            (("cp", "tp"), "broadcast", "forward", (5, 2), 200 if rank == 3 else 0),  # 40 bytes to 5 ranks
        ]


def test_a_scalar_is_one_value_in_the_record():
    record = []
    mesh = simulated_mesh(MeshShape(cp=4), record=record)
    shard_map(lambda comm: comm["cp"].all_reduce(torch.tensor(1.0)), mesh, in_specs=(), out_specs=P())()
    assert record == [Transfer(rank, ("cp",), "all_reduce", "forward", (), 2 * 3 * 4) for rank in range(4)]


def test_records_go_on_from_call_to_call_and_meshes_without_one_record_nothing():
    record = []
    shape = MeshShape(cp=2)
    for mesh in (simulated_mesh(shape, record=record), simulated_mesh(shape)):
        local = shard_map(lambda comm, x: comm["cp"].all_reduce(x), mesh, in_specs=P(), out_specs=P())
        for _ in range(2):
            local(torch.zeros(2))
        assert len(record) == 4
