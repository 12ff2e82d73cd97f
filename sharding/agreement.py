"""What real ranks tell each other before they exchange data, so that a fault has a name and nothing waits for ever.

A ``torch.distributed`` group takes whatever comes: ranks that bring other shapes crash each other, ranks that call in
another order exchange contents without a word, and who waits for a rank that raised waits until a timeout that names
nobody. So each rank first writes a line, "all_gather of float32 [3, 4]", into the store that all processes share, and
reads those of the others. Data moves only once all lines are there and alike; then every rank of the group takes part,
and the group stays in step whatever happens next.

A pass, forward or backward, is one count on every rank, and its keys are its own:

=================================  ==============================================================
key                                who writes what
=================================  ==============================================================
``<pass>/<axes>/<first>/<n>/<r>``  rank r: what it brings to collective n of the group
                                   that begins with rank <first>
``end/<passes around>/<r>``        rank r: the last pass that it left, and how
=================================  ==============================================================

A rank that waits looks at ``end`` of those who have not come: one that raised, or returned, never will.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .collectives import Pending, Transport, spell_axes, spell_call, spell_ranks
from .mesh import MeshShape

PATIENCE = 0.9
"""The part of a mesh's timeout after which a rank gives up; the rest is for finding out who is to blame."""


@runtime_checkable
class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read, once it is there."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several, once they are there."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all are there."""

    def delete_key(self, key: str) -> bool:
        """Forget."""


class RanksApart(RuntimeError):
    """Another rank did not do what this one did."""

    def __init__(self, cause: str, here: str = "") -> None:
        super().__init__(f"shard_map: {cause}" + (f"; {here}" if here else ""))
        self.cause = cause  # what all ranks are to hear


class Absent(RuntimeError):
    """Some ranks did not come in time."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"{spell_ranks(ranks)} did not come")
        self.ranks = ranks


def gather_lines(
    store: Store,
    line: str,
    rank: int,
    ranks: Sequence[int],
    *,
    key: Callable[[int], str],
    patience: float,
    look: Callable[[Mapping[int, str], list[int]], bool] = lambda here, absent: False,
) -> dict[int, str]:
    """Write this rank's line and return those of all ranks.

    Args:
        store: shared by all.
        line: this rank's.
        rank: this one.
        ranks: whose lines to wait for.
        key: where each rank's line stands.
        patience: seconds to wait.
        look: called now and then, while some are missing, with the lines that are there and the ranks whose are not;
            says whether those are enough.

    Returns:
        Lines by rank, in the order of ``ranks``.

    Raises:
        Absent: they did not come in time.
        RuntimeError: the store is gone.
    """
    store.set(key(rank), line)
    keys, begin, looked = [key(r) for r in ranks], time.monotonic(), 0.0
    while not store.check(keys):  # store.wait would wake sooner, but every timeout of it writes two lines to stderr
        waited = time.monotonic() - begin
        if waited - looked > 0.05:
            looked = waited
            here = {r: store.get(key(r)).decode() for r in ranks if store.check([key(r)])}
            absent = [r for r in ranks if r not in here]
            if absent and look(here, absent):
                return here
            if absent and waited > patience:
                raise Absent(absent)
        time.sleep(min(0.01, 0.0001 + waited / 10))
    return {r: x.decode() for r, x in zip(ranks, store.multi_get(keys), strict=True)}


@dataclass
class _Pass:
    """A pass that is open on this rank."""

    path: tuple[int, ...]  # its number, behind those of the passes around it
    title: str
    asking: bool = True  # until all ranks have come to its end
    calls: dict[tuple[str, ...], int] = field(default_factory=dict)  # how many collectives, by axes
    met: dict[str, int] = field(default_factory=dict)  # how many meetings, by group


class Agreement:
    """One rank's side of what the ranks of a mesh tell each other."""

    def __init__(self, shape: MeshShape, rank: int, store: Store, *, timeout: float, check: bool) -> None:
        self.shape, self.rank, self.check = shape, rank, check
        self._store, self._patience, self._grace = store, PATIENCE * timeout, min(2.0, 0.1 * timeout)
        self._passes: list[_Pass] = []  # those that are open: an activation checkpoint runs one inside of another
        self._opened: dict[tuple[int, ...], int] = {}  # how many passes were opened, by the path of the one around
        self._written: dict[str, str] = {}  # this rank's last key, by group
        self._broken: str | None = None

    @contextmanager
    def during(self, title: str, items: Sequence[str]) -> Iterator[None]:
        """Be in a pass: open it on all ranks, and tell them if it fails on this one.

        Args:
            title: "forward pass of f" for example.
            items: what must be the same on all ranks.

        Raises:
            RanksApart: ranks that open another one, or with other items, or that do not come.
        """
        if self._broken is not None:
            raise RanksApart(f"this mesh can't be used any more: {self._broken}")
        around = self._passes[-1].path if self._passes else ()
        self._opened[around] = self._opened.get(around, 0) + 1
        self._passes.append(_Pass((*around, self._opened[around]), title))
        try:
            if self.check:
                self._open(title, items)
            yield
        except RanksApart as error:
            self._leave("lost", error.cause)
            raise
        except BaseException as error:
            first = (str(error).splitlines() or [""])[0][:200]
            self._leave("raised", f"rank {self.rank} raised {type(error).__name__}: {first} in the {title}")
            error.add_note(f"raised on rank {self.rank} of {self.shape} in the {title}")
            raise
        finally:
            path = self._passes.pop().path
            if self._opened.pop(path, 0):
                inner = _end_key(path, self.rank)
                self._written[inner] = inner

    def close(self, told: Any) -> list[Any]:
        """Return what each rank tells at the end of a pass; then they may exchange data without asking."""
        title = self._passes[-1].title
        self._leave("returned", f"rank {self.rank} returned from the {title}")
        lines = self._meet(self.shape.names, json.dumps([_RETURNS, told]), f"the end of the {title}")
        self._require_alike(lines, f"the end of the {title}")
        self._passes[-1].asking = False
        return [json.loads(line)[1] for line in lines.values()]

    def before(self, axes: tuple[str, ...], call: str) -> str:
        """Return where a collective stands, once all ranks of its group have come to it.

        Raises:
            RanksApart: another call, a rank that failed or returned, or that does not come.
        """
        if not self._passes:
            raise RuntimeError(f"{call}: ranks meet inside of shard_map only; got a call outside of it")
        this = self._passes[-1]
        this.calls[axes] = this.calls.get(axes, 0) + 1
        where = f"collective {this.calls[axes]} of {spell_axes(axes)} in the {this.title}"
        if self.check and this.asking:
            lines = self._meet(axes, json.dumps([f"{call} on {spell_axes(axes)}"]), f"{call} ({where})")
            self._require_alike(lines, where)
        return where

    def explain(self, error: Exception, axes: tuple[str, ...], what: str) -> RanksApart:
        """Find out why data did not arrive, and say it."""
        mine = f"{what} failed on rank {self.rank}: {(str(error).splitlines() or [''])[0]}"
        self._broken = mine
        self._leave("lost", mine)
        others = [r for r in self.shape.group(self.rank, *axes) if r != self.rank]
        deadline = time.monotonic() + self._grace
        while True:
            try:
                ends = {r: self._end(r) for r in others}
            except RuntimeError:
                return RanksApart(f"{_GONE}; {mine}")
            raised = [end for end in ends.values() if end is not None and end[0] == "raised"]
            silent = [r for r, end in ends.items() if end is None or end[0] == "returned"]
            if raised or not silent or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        if raised:
            return RanksApart(raised[0][1], mine)
        return RanksApart(mine + (f"; no answer from {spell_ranks(silent)}" if silent else ""))

    def _open(self, title: str, items: Sequence[str]) -> None:
        what = f"the start of the {title}"
        lines = self._meet(self.shape.names, json.dumps([f"begins the {title}", *items]), what)
        self._require_alike(lines, "what to run")
        first = min(lines)
        want = json.loads(lines[first])[1:]
        for rank, line in lines.items():
            got = json.loads(line)[1:]
            if got != want:
                pairs = enumerate(zip(want, got, strict=False))
                differs = (f"leaf {i} is {a} on rank {first}, {b} on rank {rank}" for i, (a, b) in pairs if a != b)
                counts = f"{len(want)} leaves on rank {first}, {len(got)} on rank {rank}"
                raise RanksApart(f"ranks disagree on the arguments of the {title}: {next(differs, counts)}")

    def _meet(self, axes: Sequence[str], line: str, what: str) -> dict[int, str]:
        """Gather the lines of the ranks that differ on these axes; in any order of the axes it is one group."""
        ranks = sorted(self.shape.group(self.rank, *axes))
        group = f"{'+'.join(name for name in self.shape.names if name in axes)}/{ranks[0]}"
        this = self._passes[-1]
        place = f"{'.'.join(map(str, this.path))}/{group}/{this.met.get(group, 0)}"
        this.met[group] = this.met.get(group, 0) + 1
        closing = json.loads(line)[0] == _RETURNS

        def key(rank: int) -> str:
            return f"{place}/{rank}"

        def look(here: Mapping[int, str], absent: list[int]) -> bool:
            for r in absent:
                end = self._end(r)
                if end is None or self._store.check([key(r)]):  # it may have come, and gone on, since it was missed
                    continue
                if end[0] != "returned" or not closing:  # who returned is about to come to the end
                    raise RanksApart(end[1], f"rank {self.rank} waited in {what}")
            return len({json.loads(x)[0] for x in here.values()}) > 1

        try:
            lines = gather_lines(self._store, line, self.rank, ranks, key=key, patience=self._patience, look=look)
            if len(lines) == len(ranks):
                self._forget(None if len(ranks) == self.shape.size else group)
        except RanksApart:
            raise
        except Absent as error:
            self._broken = f"{error}; rank {self.rank} waited {self._patience:.3g} s in {what}"
            raise RanksApart(self._broken) from None
        except RuntimeError as error:
            self._broken = f"{_GONE}; rank {self.rank} was in {what}"
            raise RanksApart(self._broken) from error
        self._written[group] = key(self.rank)
        return lines

    def _require_alike(self, lines: Mapping[int, str], where: str) -> None:
        calls = {rank: str(json.loads(line)[0]) for rank, line in lines.items()}
        first = min(calls)
        for rank, call in calls.items():
            if call != calls[first]:
                sides = f"rank {first} {_spell_line(calls[first])}, rank {rank} {_spell_line(call)}"
                raise RanksApart(f"ranks disagree on {where}: {sides}")

    def _end(self, rank: int) -> list[str] | None:
        """Return how a rank left this pass, one around it, or a later one; None while it has not."""
        path = self._passes[-1].path
        for depth, number in enumerate(path):
            key = _end_key(path[:depth], rank)
            if self._store.check([key]):
                left, *end = json.loads(self._store.get(key))
                if left >= number:
                    return list(end)
        return None

    def _leave(self, how: str, text: str) -> None:
        *around, number = self._passes[-1].path
        try:
            self._store.set(_end_key(around, self.rank), json.dumps([number, how, text]))
        except RuntimeError:
            self._broken = self._broken or _GONE

    def _forget(self, group: str | None) -> None:
        """Delete what all ranks of a group have read: who has come to its next meeting has read the one before.

        Who has come to a meeting of the whole mesh (None) has read what any group wrote before.
        """
        for read in list(self._written) if group is None else [group] * (group in self._written):
            self._store.delete_key(self._written.pop(read))


def _end_key(around: Sequence[int], rank: int) -> str:
    return f"end/{'.'.join(map(str, around))}/{rank}"


def _spell_line(text: str) -> str:
    return text if text.startswith(("begins", _RETURNS)) else f"calls {text}"


_RETURNS = "returns"
_GONE = "the store that the ranks share is gone, and who keeps it"


class AgreedTransport:
    """A transport whose ranks tell each other first, and that says who is to blame when data does not come."""

    def __init__(self, transport: Transport, agreement: Agreement, axes: tuple[str, ...]) -> None:
        self._transport, self._agreement, self._axes = transport, agreement, axes

    @property
    def rank(self) -> int:
        """This rank's place on the axes."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of ranks on the axes."""
        return self._transport.size

    def start(self, collective: str, x: Tensor, source: int, out: Tensor | None) -> Pending:
        """Start a collective once all ranks have come to it."""
        call = spell_call(collective, source, (x.dtype, x.shape))
        what = f"{call} ({self._agreement.before(self._axes, call)})"
        try:
            pending = self._transport.start(collective, x, source, out)
        except RuntimeError as error:
            raise self._agreement.explain(error, self._axes, what) from error
        return _AgreedPending(pending, self._agreement, self._axes, what)


class _AgreedPending:
    def __init__(self, pending: Pending, agreement: Agreement, axes: tuple[str, ...], what: str) -> None:
        self._pending, self._agreement, self._axes, self._what = pending, agreement, axes, what

    def wait(self) -> Tensor:
        try:
            return self._pending.wait()
        except RuntimeError as error:
            raise self._agreement.explain(error, self._axes, self._what) from error
