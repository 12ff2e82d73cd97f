"""Real ranks for tests: forked processes that find each other over loopback; tests of simulated ranks run on them."""

import inspect
import itertools
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from typing import Any

import torch
import torch._dynamo  # by far the slowest thing that a process would import

from sharding import DistributedMesh, MeshShape, distributed_mesh

LIMIT = 120.0
"""Seconds after which processes that have not answered are ended and the test fails; a loaded machine needs ten."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def torchrun_names(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a process by its environment, and that gloo is to use loopback."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"GLOO_SOCKET_IFNAME": "lo"} | {name: str(value) for name, value in names.items()}


def on_processes(
    size: int, body: Callable[[int], Any], *, dies: frozenset[int] = frozenset(), absent: frozenset[int] = frozenset()
) -> list[Any]:
    """Run ``body(rank)`` in forked processes, and return what each returned.

    Each has the environment that torchrun would give it, and has joined nothing yet. None ends before all have
    answered; all have ended when this returns, or the test fails.

    Args:
        size: how many.
        body: returns plain values.
        dies: ranks that are to end without an answer.
        absent: ranks that are not started.
    """
    context, port = get_context("fork"), free_port()
    started = [rank for rank in range(size) if rank not in absent]
    ends = {rank: context.Pipe() for rank in started}
    processes = [context.Process(target=_be_rank, args=(rank, size, port, body, ends), daemon=True) for rank in started]
    answers: dict[int, Any] = {}
    patience = 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking beside other threads
            for process in processes:
                process.start()
        for _, theirs in ends.values():
            theirs.close()
        waiting = {mine: rank for rank, (mine, _) in ends.items()}
        deadline = time.monotonic() + LIMIT
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} have not answered for {LIMIT} s"
            for mine in ready:
                rank = waiting.pop(mine)
                try:
                    answers[rank] = mine.recv()
                except EOFError:
                    assert rank in dies, f"rank {rank} died"
                    continue
                assert not isinstance(answers[rank], str), f"rank {rank}:\n{answers[rank]}"
        for mine, _ in ends.values():
            mine.close()  # they wait for it, so that no connection breaks before all are done
        patience = 10.0
        return [answers[rank][0] if rank in answers else None for rank in range(size)]
    finally:
        orphans = []
        for process in processes:
            process.join(patience)
            if process.is_alive():
                orphans.append(process.pid)
                process.kill()
                process.join()
        assert not orphans or patience == 0.0, f"{len(orphans)} processes did not end"


def _be_rank(rank: int, size: int, port: int, body: Callable[[int], Any], ends: dict[int, Any]) -> None:
    for other, (parents, childs) in ends.items():
        parents.close()
        if other != rank:
            childs.close()
    end = ends[rank][1]
    os.environ.update(torchrun_names(rank, size, port))
    torch.set_num_threads(1)  # before any other thread runs; see tests/weights/test_processes.py
    try:
        end.send((body(rank),))
    except BaseException:
        end.send(traceback.format_exc())
    try:
        end.recv()
    except EOFError:
        os._exit(0)


def cases_of(test: Callable[..., None]) -> list[dict[str, Any]]:
    """List the arguments that pytest would call a test with."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*map(_choices, marks))]


def _choices(mark: Any) -> list[dict[str, Any]]:
    names, values = mark.args[:2]
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    return [dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values]


class OtherSize(Exception):
    """A test asks for another number of ranks than there are processes."""


def with_real_meshes(size: int, modules: list[Any]) -> None:
    """Give tests in this process real meshes for simulated ones. The process is not to be used for anything else."""
    made: dict[MeshShape, DistributedMesh] = {}

    def mesh(shape: MeshShape, *, record: Any = None) -> DistributedMesh:
        if shape.size != size or record is not None or not shape.names:
            raise OtherSize
        if shape not in made:
            made[shape] = distributed_mesh(shape, "cpu", timeout=LIMIT / 2)
        return made[shape]

    for module in modules:
        module.simulated_mesh = mesh


def run_on_real_ranks(size: int, tests: list[tuple[Callable[..., None], dict[str, Any]]]) -> list[str]:
    """Run tests of simulated ranks on processes, no line changed but the mesh; return the names of those that ran.

    Each process runs the whole test and compares for itself; all of them must agree on which tests ran.
    """
    answers = on_processes(size, lambda rank: run_here(size, tests))
    assert all(ran == answers[0] for ran in answers)
    return answers[0]


def run_here(size: int, tests: list[tuple[Callable[..., None], dict[str, Any]]]) -> list[str]:
    """Be one of the processes of `run_on_real_ranks`."""
    names = {test.__module__ for test, _ in tests} | {"tests.sharding.layers", "sharding"}
    with_real_meshes(size, [sys.modules[name] for name in names])
    ran = []
    for test, arguments in tests:
        torch.manual_seed(0)
        name = f"{test.__qualname__} {arguments}"
        try:
            test(**arguments)
        except OtherSize:
            continue
        except BaseException as error:
            raise AssertionError(f"{name} failed") from error
        ran.append(name)
    return ran


def plain_tests(place: Any, *, without: Sequence[str] = ()) -> Iterator[tuple[Callable[..., None], dict[str, Any]]]:
    """Yield the tests of a module, or of an object of a class, that need no fixture, with every choice of arguments."""
    module = getattr(place, "__name__", type(place).__module__)
    for name in dir(place):
        test = getattr(place, name)
        if name.startswith("test_") and name not in without and getattr(test, "__module__", None) == module:
            for arguments in cases_of(test):
                if set(inspect.signature(test).parameters) == set(arguments):
                    yield test, arguments
