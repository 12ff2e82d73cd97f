"""Many ranks in one process: each a thread, one of them running at a time, meeting in collectives."""

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from sfa_functional.precision import wide

from .collectives import Pending, spell_axes, spell_call, spell_ranks
from .mesh import MeshShape, Transfer


def run_ranks(
    shape: MeshShape, body: Callable[[int], Any], *, phase: str, record: list[Transfer] | None = None
) -> list[Any]:
    """Run ``body(rank)`` for every rank, each in a thread of its own, one at a time.

    Rank 0 runs until it waits for others, then the next one that can; so the order, and every result, is the same
    each time. Threads get the caller's grad mode, autocast, device and context variables; autograd's own
    multithreading is off in them, so that a backward pass stays in its rank's thread.

    Args:
        shape: of the mesh.
        body: called with the rank; calls collectives through a `SimulatedTransport`.
        phase: "forward" or "backward", for errors and the record.
        record: where to append a `Transfer` for each rank's part in each collective.

    Returns:
        What the body returned, by rank.

    Raises:
        RuntimeError: collectives of one place in the order that differ in kind, shape, dtype or source; ranks that
            wait for one that has returned, or for each other; a collective that was started and never joined by all.
            The message says what every rank does. All threads have ended by then.
        BaseException: the first exception of a body, with a note that names its rank and what the others do.
    """
    turns = _Turns(shape, phase, record)
    enter = _thread_state()
    threads = [
        threading.Thread(target=turns.take, args=(rank, body, enter, contextvars.copy_context()), daemon=True)
        for rank in range(shape.size)
    ]
    for thread in threads:
        thread.start()
    turns.pass_on(-1)
    try:
        turns.finished.wait()
    except BaseException as error:  # Ctrl-C: the running rank ends at its next collective
        turns.error = error
    for thread in threads:
        thread.join()
    turns.require_complete()
    if turns.error is not None:
        raise turns.error
    return turns.results


class SimulatedTransport:
    """One or several mesh axes as seen by one rank; finds the run under way by the thread that calls."""

    def __init__(self, shape: MeshShape, rank: int, axes: tuple[str, ...]) -> None:
        self._axes, self._shape, self._owner = axes, shape, rank
        self._group = shape.group(rank, *axes)
        self._member = self._group.index(rank)

    @property
    def rank(self) -> int:
        """This rank's place on the axes."""
        return self._member

    @property
    def size(self) -> int:
        """Number of ranks on the axes."""
        return len(self._group)

    def start(self, collective: str, x: Tensor, source: int, out: Tensor | None) -> Pending:
        """Bring this rank's part; the handle waits for those of the others."""
        turns: _Turns | None = getattr(_seat, "turns", None)
        if turns is None:
            raise RuntimeError(f"{collective}: simulated ranks meet inside of shard_map only; got a call outside of it")
        if turns.shape != self._shape or _seat.rank != self._owner:
            rule = f"collectives of rank {self._owner} of {self._shape} must be called by it"
            raise RuntimeError(f"{collective}: {rule}; got a call of rank {_seat.rank} of {turns.shape}")
        return turns.start(self._axes, self._group, self._member, collective, x, source, out)


_seat = threading.local()  # .turns and .rank: whose thread this is


class _Stopped(BaseException):
    """Unwinds a rank after another one has failed."""


class _Turns:
    """Who runs, who waits for what, and who goes on next. Touched only by the thread whose turn it is."""

    def __init__(self, shape: MeshShape, phase: str, record: list[Transfer] | None) -> None:
        self.shape, self.phase, self.record = shape, phase, record
        self.gates = [threading.Semaphore(0) for _ in range(shape.size)]
        self.states = ["ready"] * shape.size  # then "running", "waiting", "done"
        self.waits: list[_Meeting | None] = [None] * shape.size
        self.results: list[Any] = [None] * shape.size
        self.meetings: dict[tuple[tuple[str, ...], tuple[int, ...]], list[_Meeting]] = {}
        self.calls: dict[tuple[tuple[str, ...], int], int] = {}
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def take(
        self,
        rank: int,
        body: Callable[[int], Any],
        enter: Callable[[], AbstractContextManager[Any]],
        context: contextvars.Context,
    ) -> None:
        """Be one rank, from its first turn to its last."""
        self.gates[rank].acquire()
        try:
            if self.error is None:
                _seat.turns, _seat.rank = self, rank
                with enter():
                    self.results[rank] = context.run(body, rank)
        except _Stopped:
            pass
        except BaseException as error:
            self.fail(error, f"raised on rank {rank} of {self.shape} in the {self.phase} pass", rank)
        self.states[rank] = "done"
        self.pass_on(rank)

    def pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; see to it that there is one."""
        if all(state == "done" for state in self.states):
            self.finished.set()
            return
        if not any(map(self.can_run, range(self.shape.size))):
            self.error = RuntimeError(f"shard_map: the {self.phase} pass can't go on: {self.describe()}")
        following = (r % self.shape.size for r in range(rank + 1, rank + 1 + self.shape.size))
        chosen = next(filter(self.can_run, following))
        self.states[chosen] = "running"
        self.gates[chosen].release()

    def can_run(self, rank: int) -> bool:
        meeting = self.waits[rank]
        waits = self.states[rank] == "waiting" and meeting is not None
        over = self.error is not None or (meeting is not None and meeting.complete)
        return self.states[rank] == "ready" or (waits and over)

    def start(
        self,
        axes: tuple[str, ...],
        group: tuple[int, ...],
        member: int,
        collective: str,
        x: Tensor,
        source: int,
        out: Tensor | None,
    ) -> Pending:
        """Join the meeting whose turn it is on these axes, or open it."""
        self.stop_if_failed()
        rank = group[member]
        number = self.calls.get((axes, rank), 0)
        self.calls[axes, rank] = number + 1
        meetings = self.meetings.setdefault((axes, group), [])
        if number == len(meetings):
            meetings.append(_Meeting(axes, group, number, collective, source, rank, _kind(x)))
        meeting = meetings[number]
        mine, theirs = (collective, source, _kind(x)), (meeting.collective, meeting.source, meeting.kind)
        if mine != theirs:
            sides = [f"rank {meeting.opener} calls {spell_call(*theirs)}", f"rank {rank} calls {spell_call(*mine)}"]
            where = f"collective {number + 1} of {spell_axes(axes)}"
            text = f"shard_map: ranks disagree on {where} in the {self.phase} pass: {', '.join(sides)}"
            self.error = RuntimeError(text)
            raise _Stopped
        unread = collective == "broadcast" and member != source
        meeting.parts[member] = x if unread else x.clone()  # x may be changed before the others read it
        if self.record is not None:
            sent = _bytes_sent(collective, x, len(group), member == source)
            self.record.append(Transfer(rank, axes, collective, self.phase, tuple(x.shape), sent))
        # the same object, not the same address: under func.grad tensors are wrapped and have none
        there = collective == "broadcast" and member == source and out is x
        return _SimulatedPending(self, meeting, member, out, there)

    def wait(self, meeting: "_Meeting", member: int) -> Tensor:
        """Let others run until all of them have come."""
        self.stop_if_failed()
        rank = meeting.group[member]
        if not meeting.complete:
            self.states[rank], self.waits[rank] = "waiting", meeting
            self.pass_on(rank)
            self.gates[rank].acquire()
            self.waits[rank] = None
            self.stop_if_failed()
        return meeting.take(member)

    def stop_if_failed(self) -> None:
        if self.error is not None:
            raise _Stopped

    def fail(self, error: BaseException, what: str, rank: int) -> None:
        if self.error is None:
            self.states[rank] = "failed"
            error.add_note(f"{what}; {self.describe()}")
            self.error = error

    def describe(self) -> str:
        """Say what every rank does, those that do the same together."""
        doing: dict[str, list[int]] = {}
        for rank, state in enumerate(self.states):
            meeting = self.waits[rank]
            if state == "waiting" and meeting is not None:
                what = f"in {meeting.collective} (collective {meeting.number + 1} of {spell_axes(meeting.axes)})"
                doing.setdefault(f"waiting {what}", []).append(rank)
            elif state in ("ready", "done"):
                doing.setdefault("not started" if state == "ready" else "returned", []).append(rank)
        return "; ".join(f"{spell_ranks(ranks)}: {what}" for what, ranks in doing.items()) or "no other rank"

    def require_complete(self) -> None:
        """Refuse collectives that some rank started and another never did."""
        for meetings in self.meetings.values():
            for meeting in meetings:
                if not meeting.complete and self.error is None:
                    absent = [r for i, r in enumerate(meeting.group) if i not in meeting.parts]
                    where = f"{meeting.collective}, collective {meeting.number + 1} of {spell_axes(meeting.axes)}"
                    rule = f"shard_map: all ranks must take part in {where} in the {self.phase} pass"
                    self.error = RuntimeError(f"{rule}; {spell_ranks(absent)} returned without")


class _Meeting:
    """One collective: what each rank brought, until each has taken its result."""

    def __init__(
        self,
        axes: tuple[str, ...],
        group: tuple[int, ...],
        number: int,
        collective: str,
        source: int,
        opener: int,
        kind: tuple[torch.dtype, tuple[int, ...]],
    ) -> None:
        self.axes, self.group, self.number, self.opener = axes, group, number, opener
        self.collective, self.source, self.kind = collective, source, kind
        self.parts: dict[int, Tensor | None] = {}
        self.taken = 0

    @property
    def complete(self) -> bool:
        return len(self.parts) == len(self.group)

    def take(self, member: int) -> Tensor:
        """Return one rank's result, in memory of its own."""
        parts = [part for _, part in sorted(self.parts.items()) if part is not None]
        size = len(self.group)
        match self.collective:
            case "all_gather":
                result = torch.cat(parts)
            case "reduce_scatter":
                result = _sum([part.unflatten(0, (size, -1))[member] for part in parts])
            case "all_to_all":
                result = torch.cat([part.unflatten(0, (size, -1))[member] for part in parts])
            case "all_reduce":
                result = _sum(parts)
            case "broadcast":
                result = parts[self.source].clone()
            case "reduce":
                result = _sum(parts) if member == self.source else torch.zeros_like(parts[member])
            case _:
                raise ValueError(f"SimulatedTransport: there is no collective {self.collective!r}")
        self.taken += 1
        if self.taken == size:
            self.parts = dict.fromkeys(self.parts)  # still complete, but the tensors are free
        return result


class _SimulatedPending:
    def __init__(self, turns: _Turns, meeting: _Meeting, member: int, out: Tensor | None, there: bool) -> None:
        self._turns, self._meeting, self._member, self._out = turns, meeting, member, out
        self._there = there  # a source's own tensor holds the result already

    def wait(self) -> Tensor:
        result = self._turns.wait(self._meeting, self._member)
        if self._out is None:
            return result
        return self._out if self._there else self._out.copy_(result)


def _sum(parts: list[Tensor]) -> Tensor:
    """Add in the order of ranks, in float32 or wider, so that a sum over ranks rounds once."""
    dtype = parts[0].dtype
    if not dtype.is_floating_point:
        return reduce(torch.add, parts).clone()
    return reduce(torch.add, [part.to(wide(dtype)) for part in parts]).to(dtype, copy=True)


def _bytes_sent(collective: str, x: Tensor, size: int, is_source: bool) -> int:
    """Return what a rank sends at least: each byte once to each rank that needs it and does not have it."""
    count = x.numel() * x.element_size()
    match collective:
        case "all_gather":
            return count * (size - 1)
        case "reduce_scatter" | "all_to_all":
            return count // size * (size - 1)
        case "all_reduce":  # a reduce_scatter of padded rows, then an all_gather
            return 2 * (-(-x.numel() // size) * x.element_size()) * (size - 1)
        case "broadcast":
            return count * (size - 1) if is_source else 0
        case _:
            return 0 if is_source else count


def _kind(x: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return x.dtype, tuple(x.shape)


def _thread_state() -> Callable[[], AbstractContextManager[Any]]:
    """Remember the caller's modes, and return what enters them in another thread."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    index = None if accelerator is None else torch.accelerator.current_device_index()
    kinds = {"cpu"} | (set() if accelerator is None else {accelerator.type})
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]
    default = torch.get_default_device()

    def enter() -> AbstractContextManager[Any]:
        stack = ExitStack()
        if index is not None:
            torch.accelerator.set_device_index(index)
        if default.type != "cpu":
            stack.enter_context(default)
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for kind, enabled, dtype, cached in casts:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cached))
        return stack

    return enter
