"""What ranks tell each other, with threads for ranks and a store in memory: every answer, and no answer."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from sharding import MeshShape
from sharding.agreement import Absent, Agreement, RanksApart, gather_lines

pytestmark = pytest.mark.usefixtures("unchecked")

SQUARE = MeshShape(cp=2, tp=2)


def on_threads(
    shape: MeshShape, body: Callable[[Agreement], Any], *, timeout: float = 20.0, store: Any = None
) -> list[Any]:
    """Run ``body(agreement)`` for each rank; return what each returned or raised."""
    store = dist.HashStore() if store is None else store
    results: list[Any] = [None] * shape.size

    def run(rank: int) -> None:
        try:
            results[rank] = body(Agreement(shape, rank, store, timeout=timeout, check=True))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(shape.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 10)
        assert not thread.is_alive()
    return results


def test_lines_come_by_rank_and_who_is_missing_is_named_in_time():
    store = dist.HashStore()
    for rank, line in ((2, "two"), (0, "zero")):
        store.set(f"k{rank}", line)
    named: dict[str, Any] = {"key": lambda r: f"k{r}", "patience": 0.3}
    assert gather_lines(store, "one", 1, [0, 1, 2], **named) == {0: "zero", 1: "one", 2: "two"}
    begin = time.monotonic()
    with pytest.raises(Absent, match=r"^ranks 3, 5 did not come$") as error:
        gather_lines(store, "one", 1, [0, 1, 3, 5], **named)
    assert error.value.ranks == [3, 5]
    assert 0.3 <= time.monotonic() - begin < 3


def test_a_look_at_those_who_came_may_be_enough():
    store, looked = dist.HashStore(), []
    store.set("k0", "zero")

    def look(here: Any, absent: list[int]) -> bool:
        looked.append((here, absent))
        return len(looked) == 2

    got = gather_lines(store, "one", 1, [0, 1, 2], key=lambda r: f"k{r}", patience=20, look=look)
    assert got == {0: "zero", 1: "one"}
    assert looked == [(got, [2])] * 2


def test_ranks_learn_what_the_others_tell_at_the_end_and_where_each_collective_stands():
    def body(agreement: Agreement) -> list[Any]:
        with agreement.during("test", ["a"]):
            places = [agreement.before(axes, "call") for axes in (("cp",), ("tp",), ("cp",), ("tp", "cp"))]
            told = agreement.close([agreement.rank, None])
            return [places, told, agreement.before(("cp",), "not asked")]

    for places, told, last in on_threads(SQUARE, body):
        assert places == [
            f"collective {n} of {axes} in the test"
            for n, axes in ((1, "axis 'cp'"), (1, "axis 'tp'"), (2, "axis 'cp'"), (1, "axes ('tp', 'cp')"))
        ]
        assert told == [[rank, None] for rank in range(4)]
        assert last == "collective 3 of axis 'cp' in the test"


def test_axes_taken_together_in_another_order_are_another_call():
    def body(agreement: Agreement) -> None:
        with agreement.during("test", []):
            agreement.before(("cp", "tp") if agreement.rank else ("tp", "cp"), "call")

    text = "rank 0 calls call on axes ('tp', 'cp'), rank 1 calls call on axes ('cp', 'tp')"
    for error in on_threads(SQUARE, body):
        assert isinstance(error, RanksApart)
        assert text in str(error)


def test_passes_in_passes_have_ends_of_their_own():
    """Who left an inner pass has not left the one around it, however long the others take to come to its next call."""

    def body(agreement: Agreement) -> list[Any]:
        for _ in range(3):
            with agreement.during("outer", []):
                for _ in range(2):
                    with agreement.during("inner", []):
                        agreement.before(("cp",), "inner call")
                        agreement.close(None)
                    if agreement.rank == 1:
                        time.sleep(0.15)
                    agreement.before(("cp",), "outer call")
                agreement.close(None)
        return [agreement._passes, list(agreement._opened)]

    assert on_threads(MeshShape(cp=2), body) == [[[], [()]]] * 2


def test_an_error_of_an_inner_pass_ends_the_outer_one_everywhere():
    def body(agreement: Agreement) -> None:
        with agreement.during("outer", []):
            with agreement.during("inner", []):
                if agreement.rank == 1:
                    raise ValueError("boom")
                agreement.close(None)
            agreement.before(("cp",), "call")

    zero, one = on_threads(MeshShape(cp=2), body)
    assert isinstance(one, ValueError)
    assert one.__notes__ == [f"raised on rank 1 of MeshShape(cp=2) in the {title}" for title in ("inner", "outer")]
    assert str(zero).startswith("shard_map: rank 1 raised ValueError: boom in the ")


def test_who_raised_is_found_where_data_did_not_arrive():
    store = dist.HashStore()
    one, zero = (Agreement(MeshShape(cp=2), rank, store, timeout=3.0, check=False) for rank in (1, 0))
    with pytest.raises(KeyError), one.during("test", []):
        raise KeyError("x")
    with pytest.raises(RanksApart) as error, zero.during("test", []):
        raise zero.explain(RuntimeError("Connection closed\nby peer"), ("cp",), "all_gather")
    assert str(error.value) == (
        "shard_map: rank 1 raised KeyError: 'x' in the test; all_gather failed on rank 0: Connection closed"
    )
    with pytest.raises(RanksApart, match=r"^shard_map: this mesh can't be used any more: all_gather failed on rank 0"):
        zero.during("test", []).__enter__()


def test_who_says_nothing_is_named_where_data_did_not_arrive():
    zero = Agreement(MeshShape(cp=3), 0, dist.HashStore(), timeout=3.0, check=False)
    begin = time.monotonic()
    text = r"^shard_map: all_gather failed on rank 0: gone; no answer from ranks 1, 2$"
    with pytest.raises(RanksApart, match=text), zero.during("test", []):
        raise zero.explain(RuntimeError("gone"), ("cp",), "all_gather")
    assert time.monotonic() - begin < 2


def test_a_rank_that_went_on_since_it_was_missed_has_not_left():
    """It came to the call, and returned, between the look at who is here and the look at who left."""

    class Slow:
        """A store in which a rank that is missed comes, and leaves, right after."""

        def __init__(self) -> None:
            self.store, self.missed = dist.HashStore(), False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def check(self, keys: list[str]) -> bool:
            there = self.store.check(keys)
            if len(keys) == 1 and keys[0].startswith("1/cp/0/1/1") and not there and not self.missed:
                self.missed = True
                self.store.set(keys[0], json.dumps(["call on axis 'cp'"]))
                self.store.set("end//1", json.dumps([1, "returned", "rank 1 returned"]))
            return there

    store = Slow()
    store.set("1/cp/0/0/1", json.dumps(["begins the test"]))
    zero = Agreement(MeshShape(cp=2), 0, store, timeout=10.0, check=True)
    with zero.during("test", []):
        assert zero.before(("cp",), "call") == "collective 1 of axis 'cp' in the test"
    assert store.missed


def test_who_is_about_to_come_to_the_end_is_waited_for():
    """It says that it returned before it tells what."""
    store = dist.HashStore()
    store.set("1/cp/0/0/1", json.dumps(["begins the test"]))
    store.set("end//1", json.dumps([1, "returned", "rank 1 returned"]))
    zero = Agreement(MeshShape(cp=2), 0, store, timeout=10.0, check=True)
    late = threading.Timer(0.4, lambda: store.set("1/cp/0/1/1", json.dumps(["returns", "one"])))
    late.start()
    with zero.during("test", []):
        assert zero.close("zero") == ["zero", "one"]
    late.join()
