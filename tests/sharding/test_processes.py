"""Ranks that are processes: how a mesh is made, what moves over it, and that a fault ends every rank, in time, by name.

`on_processes` fails where a process does not end by itself: there is no hang and no orphan in any test here.
"""

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sharding
from sharding import Collectives, DistributedMesh, MeshShape, P, distributed_mesh, shard_map, simulated_mesh
from tests.sharding.processes import on_processes

pytestmark = pytest.mark.usefixtures("unchecked")

TIMEOUT = 8.0
SQUARE = MeshShape(cp=2, tp=2)


def mesh_of(shape: MeshShape, **named: Any) -> DistributedMesh:
    return distributed_mesh(shape, "cpu", **{"timeout": TIMEOUT, **named})


def told(run: Callable[[], object]) -> tuple[str, str, float]:
    """Return the kind of error and the message that a call ends with, and how long it took."""
    begin = time.monotonic()
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


def mapped(mesh: DistributedMesh, body: Callable[..., Any], spec: P = P("cp")) -> Callable[..., Any]:  # noqa: B008
    return shard_map(body, mesh, in_specs=spec, out_specs=spec)


def test_one_file_names_torch_distributed_and_one_its_tensors():
    files = sorted(Path(sharding.__file__).parent.glob("*.py"))
    names = [file.name for file in files if re.search(r"^\s*(import|from) torch.distributed", file.read_text(), re.M)]
    assert names == ["dtensors.py", "processes.py"]


# ---- making a mesh ---------------------------------------------------------------------------------------------------

REFUSED = {
    "shape must be a MeshShape with at least one axis; got (2,)": ((2,), "cpu", {}),
    "shape must be a MeshShape with at least one axis; got MeshShape()": (MeshShape(), "cpu", {}),
    "device_type must be one of 'cpu', 'cuda', 'npu'; got 'tpu'": (MeshShape(cp=2), "tpu", {}),
    "device_type must be one of 'cpu', 'cuda', 'npu'; got None": (MeshShape(cp=2), None, {}),
    "timeout must be a number of seconds > 0; got 0": (MeshShape(cp=2), "cpu", {"timeout": 0}),
    "timeout must be a number of seconds > 0; got inf": (MeshShape(cp=2), "cpu", {"timeout": float("inf")}),
    "timeout must be a number of seconds > 0; got True": (MeshShape(cp=2), "cpu", {"timeout": True}),
    "check must be True or False; got 1": (MeshShape(cp=2), "cpu", {"check": 1}),
    "processes must be started by torchrun, or joined by torch.distributed.init_process_group; "
    "got no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment": (MeshShape(cp=2), "cpu", {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_mesh_is_refused_in_one_line(message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    shape, device_type, named = REFUSED[message]
    kind, text, _ = told(lambda: distributed_mesh(shape, device_type, **named))
    assert (kind, text) == ("ValueError", f"distributed_mesh: {message}")


@pytest.mark.parametrize(("device_type", "backend"), [("cuda", "nccl"), ("npu", "hccl")])
def test_a_device_without_a_backend_is_refused_by_name(device_type, backend):
    if dist.is_backend_available(backend):
        pytest.skip(f"this torch has {backend}")
    kind, text, _ = told(lambda: distributed_mesh(MeshShape(cp=2), device_type))
    rule = f"{device_type!r} needs a torch with the backend {backend!r}"
    assert (kind, text) == ("ValueError", f"distributed_mesh: {rule}; got {torch.__version__}")


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("shape", [MeshShape(cp=4), MeshShape(cp=1)], ids=str)
def test_another_number_of_processes_than_of_ranks_is_refused_at_once(shape, joined):
    def body(rank: int) -> tuple[str, str, float]:
        if joined:
            dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        return told(lambda: mesh_of(shape))

    for kind, text, seconds in on_processes(2, body):
        rule = f"{shape} must have as many ranks as there are processes"
        assert (kind, text) == ("ValueError", f"distributed_mesh: {rule}; got 2")
        assert seconds < TIMEOUT / 2


def test_a_mesh_numbers_processes_row_by_row_and_may_be_made_again():
    def body(rank: int) -> list[Any]:
        found = []
        for shape in (SQUARE, MeshShape(cp=4), SQUARE):
            mesh = mesh_of(shape)
            places = {axes: [] for axes in ("cp", "tp", ("tp", "cp")) if set(axes) <= {*shape.names, *"cpt"}}

            def look(comm: Any, places: Any = places) -> None:
                for axes in places:
                    if set([axes] if isinstance(axes, str) else axes) <= set(comm):
                        places[axes] = comm[axes].rank, comm[axes].size

            shard_map(look, mesh, in_specs=(), out_specs=P())()
            found.append([mesh.rank, places, mesh.device_mesh.mesh_dim_names, mesh.device_mesh.get_coordinate()])
        return found

    for rank, (square, line, again) in enumerate(on_processes(4, body)):
        cp, tp = divmod(rank, 2)
        assert square[0] == line[0] == rank
        assert square[1] == {"cp": (cp, 2), "tp": (tp, 2), ("tp", "cp"): (tp * 2 + cp, 4)}
        assert (square[2], list(square[3])) == (("cp", "tp"), [cp, tp])
        assert (line[1]["cp"], line[2], list(line[3])) == ((rank, 4), ("cp",), [rank])
        assert again == square


# ---- what moves over it ----------------------------------------------------------------------------------------------


def call(comm: Collectives, name: str, x: torch.Tensor) -> torch.Tensor:
    return comm.broadcast(x, comm.size - 1) if name == "broadcast" else getattr(comm, name)(x)


def test_collectives_over_axes_in_any_order_are_those_of_simulated_ranks():
    """Values and gradients; whole numbers make every sum exact."""
    names = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
    orders = ("cp", "tp", ("cp", "tp"), ("tp", "cp"))
    x = torch.randint(-4, 5, (16, 8, 3), generator=torch.Generator().manual_seed(0)).double()

    def run(mesh: Any) -> list[torch.Tensor]:
        def body(comm: Any, x: torch.Tensor) -> list[torch.Tensor]:
            found = [call(comm[axes], name, x[0] * (1 + comm["cp"].rank)) for axes in orders for name in names]
            out = torch.empty(4 * x.shape[1], *x.shape[2:], dtype=x.dtype)
            return [*found, comm["tp", "cp"].all_gather_start(x[0].detach(), out=out).wait()]

        leaf = x.clone().requires_grad_()
        results = shard_map(body, mesh, in_specs=P(("cp", "tp")), out_specs=P(("cp", "tp")))(leaf)
        sum((y * (1 + torch.arange(y.numel()).view_as(y) % 7)).sum() for y in results).backward()
        return [*(y.detach() for y in results), leaf.grad]

    want = run(simulated_mesh(SQUARE))

    def body(rank: int) -> list[int]:
        return [i for i, pair in enumerate(zip(run(mesh_of(SQUARE)), want, strict=True)) if not torch.equal(*pair)]

    assert on_processes(4, body) == [[]] * 4


def test_without_checks_values_and_gradients_are_the_same():
    x = torch.arange(12.0).view(4, 3)

    def run(mesh: Any) -> list[torch.Tensor]:
        leaves = x.clone().requires_grad_(), torch.tensor(2.0, requires_grad=True), torch.ones(1, requires_grad=True)

        def body(comm: Any, x: torch.Tensor, w: torch.Tensor, unused: torch.Tensor) -> Any:
            return comm["cp"].all_reduce(x * w), x.sum(0, keepdim=True) * w

        one, two = shard_map(body, mesh, in_specs=(P("cp"), P(), P()), out_specs=(P(), P("cp")))(*leaves)
        (one.square().sum() + two.sum()).backward()
        return [one.detach(), two.detach(), leaves[0].grad, leaves[1].grad]

    want = run(simulated_mesh(MeshShape(cp=2)))

    def body(rank: int) -> bool:
        return all(map(torch.equal, run(mesh_of(MeshShape(cp=2), check=False)), want))

    assert on_processes(2, body) == [True, True]


# ---- faults ----------------------------------------------------------------------------------------------------------


def assert_ended(answers: list[Any], faulty: set[int], *, patterns: tuple[str, ...], within: float = TIMEOUT) -> None:
    """Refuse ranks that did not end with an error in time, and errors that are no line or name nobody."""
    for rank, answer in enumerate(answers):
        if rank not in faulty:
            kind, text, seconds = answer
            assert kind in ("RanksApart", "RuntimeError"), answer
            assert "\n" not in text
            assert any(re.search(pattern, text) for pattern in patterns), text
            assert seconds < within


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_raises_ends_the_others_at_once_and_they_name_it(size):
    """In the forward pass and in the backward pass; afterwards the mesh is as good as before."""

    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyError("no gradient")

    def forward(comm: Any, x: torch.Tensor) -> torch.Tensor:
        if comm["cp"].rank == 1:
            raise ValueError("no luck\nat all")
        return comm["cp"].reduce_scatter(comm["cp"].all_gather(x))

    def backward(comm: Any, x: torch.Tensor) -> torch.Tensor:
        y = comm["cp"].all_gather(x)
        return comm["cp"].reduce_scatter(Faulty.apply(y) if comm["cp"].rank == 1 else y)

    def body(rank: int) -> list[tuple[str, str, float]]:
        mesh, x = mesh_of(MeshShape(cp=size), timeout=60.0), torch.ones(4, requires_grad=True)
        first = told(lambda: mapped(mesh, forward)(x))
        second = told(lambda: mapped(mesh, backward)(x).sum().backward())
        good = mapped(mesh, lambda comm, x: comm["cp"].reduce_scatter(comm["cp"].all_gather(x)))(x)
        return [first, second, told(lambda: torch.testing.assert_close(good, size * torch.ones(4)))]

    first, second, good = zip(*on_processes(size, body), strict=True)
    assert_ended(
        first,
        {1},
        patterns=(r"^shard_map: rank 1 raised ValueError: no luck in the forward pass of forward; rank . waited in",),
        within=20,
    )
    assert_ended(
        second,
        {1},
        patterns=(r"^shard_map: rank 1 raised KeyError: 'no gradient' in the backward pass of backward; rank . wai",),
        within=20,
    )
    assert first[1][:2] == ("ValueError", "no luck\nat all")
    assert second[1][0] == "KeyError"
    assert [kind for kind, _, _ in good] == ["none"] * size


def test_an_error_reaches_ranks_that_share_no_axis_with_the_one_that_raised():
    def faulty(comm: Any, x: torch.Tensor) -> torch.Tensor:
        if (comm["cp"].rank, comm["tp"].rank) == (1, 1):
            raise ValueError("boom")
        return comm["tp"].all_reduce(comm["cp"].all_reduce(x))

    def body(rank: int) -> tuple[str, str, float]:
        mesh = mesh_of(SQUARE, timeout=60.0)
        return told(lambda: shard_map(faulty, mesh, in_specs=P(), out_specs=P())(torch.ones(2)))

    answers = on_processes(4, body)
    assert_ended(answers, {3}, patterns=(r"^shard_map: rank 3 raised ValueError: boom in the forward",), within=20)


def swapped(comm: Any, x: torch.Tensor) -> torch.Tensor:
    """Two ranks take the axes in one order, the others in the other: each waits for the next one in a circle."""
    axes = ("cp", "tp") if comm["cp", "tp"].rank in (0, 3) else ("tp", "cp")
    for axis in axes:
        x = comm[axis].all_reduce(x)
    return x


DISAGREE = {
    "shapes": (
        lambda comm, x: comm["cp"].all_gather(x[: 1 + comm["cp"].rank]),
        r"^shard_map: ranks disagree on collective 1 of axis 'cp' in the forward pass of <lambda>: "
        r"rank 0 calls all_gather of float32 \[1\] on axis 'cp', rank 1 calls all_gather of float32 \[2\] on axis",
    ),
    "dtypes": (
        lambda comm, x: comm["cp"].all_reduce(x.double() if comm["cp"].rank else x),
        r"rank 0 calls all_reduce of float32 \[2\] on axis 'cp', rank 1 calls all_reduce of float64 \[2\] on",
    ),
    "order": (
        lambda comm, x: [
            getattr(comm["cp"], name)(x) for name in ("all_reduce", "all_to_all")[:: 1 - 2 * comm["cp"].rank]
        ],
        r"rank 0 calls all_reduce of float32 \[2\] on axis 'cp', rank 1 calls all_to_all of float32 \[2\] on",
    ),
    "source": (
        lambda comm, x: comm["cp"].broadcast(x, comm["cp"].rank),
        r"rank 0 calls broadcast from 0 of float32 \[2\] on axis 'cp', rank 1 calls broadcast from 1 of float32",
    ),
    "one returns": (
        lambda comm, x: comm["cp"].all_reduce(x) if comm["cp"].rank else x,
        r"(rank 0 returns, rank 1 calls all_reduce of float32)|(rank 0 returned from the forward pass of <lambda>)",
    ),
}


def test_ranks_that_disagree_all_end_and_say_on_what():
    """No data moves, so the mesh is as good as before."""

    def body(rank: int) -> list[tuple[str, str, float]]:
        mesh, x = mesh_of(MeshShape(cp=2), timeout=60.0), torch.ones(4)
        found = []
        for faulty, _ in DISAGREE.values():
            found.append(told(lambda faulty=faulty: mapped(mesh, faulty)(x)))
            found.append(told(lambda: mapped(mesh, lambda comm, x: comm["cp"].all_reduce(x))(x)))
        return found

    by_rank = on_processes(2, body)
    for i, (_, pattern) in enumerate(DISAGREE.values()):
        assert_ended([found[2 * i] for found in by_rank], set(), patterns=(pattern,), within=20)
        assert [found[2 * i + 1][0] for found in by_rank] == ["none", "none"]


def test_ranks_that_disagree_on_the_arguments_or_on_what_to_run_end_too():
    def ones(comm: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    def others(comm: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    def body(rank: int) -> list[tuple[str, str, float]]:
        mesh, x = mesh_of(MeshShape(cp=2), timeout=60.0), torch.ones(4, requires_grad=True)
        y = mapped(mesh, ones)(x)
        return [
            told(lambda: mapped(mesh, ones)(torch.ones(4 + 2 * rank))),
            told(lambda: mapped(mesh, ones)(torch.ones(4, requires_grad=rank == 1))),
            told(lambda: mapped(mesh, others if rank else ones)(x)),
            told(lambda: y.sum().backward() if rank else mapped(mesh, ones)(x)),
            told(lambda: shard_map(lambda comm: [1] * (1 + rank), mesh, in_specs=(), out_specs=P())()),
            told(lambda: shard_map(lambda comm: torch.ones(1) * rank, mesh, in_specs=(), out_specs=P())()),
        ]

    patterns = [
        r"^shard_map: ranks disagree on the arguments of the forward pass of ones: "
        r"leaf 0 is float32 \[4\] on rank 0, float32 \[6\] on rank 1$",
        r"leaf 0 is float32 \[4\] on rank 0, float32 \[4\] that learns on rank 1$",
        r"^shard_map: ranks disagree on what to run: "
        r"rank 0 begins the forward pass of ones, rank 1 begins the forward pass of others$",
        r"rank 0 begins the forward pass of ones, rank 1 begins the backward pass of ones$",
    ]
    by_rank = on_processes(2, body)
    for i, pattern in enumerate(patterns):
        assert_ended([found[i] for found in by_rank], set(), patterns=(pattern,), within=20)
    for found in by_rank:
        rule = "every rank must return the same structure; got ranks 0 and 1 that differ"
        assert found[4][:2] == ("ValueError", f"shard_map: {rule}")
        rule = "a result of P() must be the same on the ranks that hold it; got different values between ranks 0, 1"
        assert found[5][:2] == ("ValueError", f"shard_map: {rule}")


def test_ranks_that_wait_for_each_other_end_within_the_timeout():
    def body(rank: int) -> tuple[str, str, float]:
        mesh = mesh_of(SQUARE)
        return told(lambda: shard_map(swapped, mesh, in_specs=P(), out_specs=P())(torch.ones(2)))

    assert_ended(on_processes(4, body), set(), patterns=(r"did not come; rank \d waited .* in all_reduce of float32",))


def test_a_rank_that_leaves_the_backward_pass_out_ends_the_others_within_the_timeout():
    def body(rank: int) -> list[tuple[str, str, float]]:
        mesh, x = mesh_of(MeshShape(cp=2)), torch.ones(4, requires_grad=True)
        y = mapped(mesh, lambda comm, x: comm["cp"].all_reduce(x))(x)
        first = told(lambda: None if rank else y.sum().backward())
        return [first, first if rank else told(lambda: mapped(mesh, lambda comm, x: x)(x))]

    (first, again), _ = on_processes(2, body)
    assert_ended([first], set(), patterns=(r"^shard_map: rank 1 did not come; rank 0 waited .* backward pass of",))
    assert_ended([again], set(), patterns=(r"^shard_map: this mesh can't be used any more: rank 1 did not",), within=1)


def dies(mesh: DistributedMesh, when: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Return a body in which rank 1 is killed."""

    def killed(comm: Any, x: torch.Tensor) -> torch.Tensor:
        me = comm["cp"].rank
        if me == 1 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        pending = comm["cp"].all_gather_start(x.expand(4_000_000) + me)
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        return comm["cp"].all_reduce(pending.wait()[:2])

    return killed


@pytest.mark.parametrize(("size", "when", "check"), [(4, "before", True), (2, "within", True), (2, "within", False)])
def test_a_rank_that_is_killed_ends_the_others_within_the_timeout(size, when, check):
    def body(rank: int) -> tuple[str, str, float]:
        mesh = mesh_of(MeshShape(cp=size), check=check)
        return told(lambda: mapped(mesh, dies(mesh, when), P())(torch.ones(1)))

    answers = on_processes(size, body, dies=frozenset({1}))
    patterns = (r"rank 1 did not come; rank \d waited", r"failed on rank \d: .*no answer from rank 1$")
    assert_ended(answers, {1}, patterns=patterns)


def test_who_keeps_the_store_may_be_killed_too():
    """Rank 0, where torchrun does not keep it."""

    def body(rank: int) -> tuple[str, str, float]:
        mesh = mesh_of(MeshShape(cp=2))

        def killed(comm: Any, x: torch.Tensor) -> torch.Tensor:
            if comm["cp"].rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return comm["cp"].all_reduce(x)

        return told(lambda: mapped(mesh, killed, P())(torch.ones(1)))

    answers = on_processes(2, body, dies=frozenset({0}))
    assert_ended(answers, {0}, patterns=(r"the store that the ranks share is gone, and who keeps it; rank 1 was in",))


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_is_missing_at_the_start_is_named_within_the_timeout(missing):
    def body(rank: int) -> tuple[str, str, float]:
        return told(lambda: mesh_of(MeshShape(cp=3), timeout=4.0))

    answers = on_processes(3, body, absent=frozenset({missing}))
    named = r"rank 2 of 3 did not come within" if missing else r"nobody kept the store at 127.0.0.1:\d+ within"
    assert_ended(answers, {missing}, patterns=(rf"^distributed_mesh: {named} 3.6 s",), within=4.5)


def test_who_waits_for_one_rank_after_another_waits_no_longer():
    """Rank 0, which keeps the store, comes late; rank 2 never does."""

    def body(rank: int) -> tuple[str, str, float]:
        if rank == 0:
            time.sleep(2.5)
        return told(lambda: mesh_of(MeshShape(cp=3), timeout=4.0))

    answers = on_processes(3, body, absent=frozenset({2}))
    assert_ended(answers, {2}, patterns=(r"^distributed_mesh: rank 2 of 3 did not come within 3.6 s$",), within=4.5)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_processes_that_were_joined_before_make_a_mesh_of_any_store(kind, tmp_path):
    def body(rank: int) -> list[Any]:
        method = f"file://{tmp_path}/store" if kind == "file" else "env://"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        mesh, x = mesh_of(MeshShape(cp=2), timeout=30.0), torch.ones(2, requires_grad=True)
        y = mapped(mesh, lambda comm, x: comm["cp"].all_reduce(x))(x)
        y.sum().backward()
        wrong = told(lambda: mapped(mesh, lambda comm, x: comm["cp"].all_gather(x.expand(1 + rank)))(x))
        dist.destroy_process_group()
        return [y.tolist(), x.grad.tolist(), wrong]

    by_rank = on_processes(2, body)
    assert [found[:2] for found in by_rank] == [[[2.0, 2.0], [2.0, 2.0]]] * 2
    assert_ended([found[2] for found in by_rank], set(), patterns=(r"^shard_map: ranks disagree on collec",), within=20)


def test_a_rank_that_asks_for_another_mesh_or_for_none_is_named():
    def body(rank: int) -> list[tuple[str, str, float]]:
        shapes = MeshShape(cp=2), MeshShape(tp=2)
        first = told(lambda: mesh_of(shapes[rank], timeout=20.0))
        return [first, first if rank else told(lambda: mesh_of(shapes[0], timeout=3.0))]

    by_rank = on_processes(2, body)
    pattern = r"^distributed_mesh: all ranks must ask for the same; rank 0: .*cp=2.*, rank 1: .*tp=2"
    assert_ended([found[0] for found in by_rank], set(), patterns=(pattern,), within=20)
    pattern = r"^distributed_mesh: rank 1 of 2 did not come within 2.7 s$"
    assert_ended([by_rank[0][1]], set(), patterns=(pattern,), within=4)


def test_a_collective_outside_of_a_body_is_refused():
    def body(rank: int) -> tuple[str, str, float]:
        mesh, kept = mesh_of(MeshShape(cp=2)), []
        mapped(mesh, lambda comm, x: kept.append(comm["cp"]))(torch.ones(2))
        return told(lambda: kept[0].all_reduce(torch.ones(2)))

    text = "all_reduce of float32 [2]: ranks meet inside of shard_map only; got a call outside of it"
    assert [found[:2] for found in on_processes(2, body)] == [("RuntimeError", text)] * 2


def test_the_store_keeps_nothing_of_passes_that_are_over():
    """Else a long training would fill it."""

    def body(rank: int) -> list[int]:
        mesh, x, counts = mesh_of(SQUARE), torch.ones(4, requires_grad=True), []

        def step(comm: Any, x: torch.Tensor) -> torch.Tensor:
            for axes in itertools.islice(itertools.cycle(["cp", "tp", ("tp", "cp")]), 5):
                x = comm[axes].all_reduce(x)
            return x

        store = dist.group.WORLD.get_group_store()
        for _ in range(4):
            y = torch.utils.checkpoint.checkpoint(
                shard_map(step, mesh, in_specs=P(), out_specs=P()), x, use_reentrant=False
            )
            y.sum().backward()
            shard_map(lambda comm: None, mesh, in_specs=(), out_specs=P())()
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
        return counts

    for counts in on_processes(4, body):
        assert max(counts[1:]) <= counts[1] + 4  # one of a rank may be under way
