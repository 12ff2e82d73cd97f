"""The plan of a ring: every small plan is walked through step by step; rules known to be wrong fail on the way."""

import itertools
from collections.abc import Callable, Sequence

import pytest

import weights
from tests.vectors import read_vectors
from weights import RingStep

RING = read_vectors("peers.json")["ring"]
STARTS, COUNTS, DEPTHS, RANKS = range(41), range(1, 25), range(6), range(1, 9)


def fault(
    plan: Sequence[RingStep],
    *,
    start: int,
    n: int,
    k: int,
    passes: int,
    wrap: bool = True,
    ranks: int | None = None,
) -> str | None:
    """Walk through a plan and say what is wrong with it, or None.

    Slots are a plain list. A fetch marks its slot as under way; the use of a layer waits for its slot and clears it.
    """
    if [step.layer for step in plan] != [start + place for _ in range(passes) for place in range(n)]:
        return "the layers are not used in order"
    slots = {slot for step in plan for slot in (step.slot, step.fetch_slot) if slot is not None}
    if slots != set(range(min(k + 1, n))):
        return f"slots {slots}"
    resident = plan[: min(k, n)]
    holds = {step.slot: step.layer for step in resident}  # at step 0
    if len(holds) < len(resident):
        return "two layers are resident in one slot"
    under_way: list[int] = []
    for i, step in enumerate(plan):
        target = start + (step.layer - start + k) % n
        needless = target in holds.values() or (not wrap and i + k >= len(plan))
        if (step.fetch_layer is None) != needless:
            return f"step {i}: fetch of {step.fetch_layer}, while {holds} and {target} is due"
        if step.fetch_layer is None:
            if (step.fetch_slot, step.owner) != (None, None):
                return f"step {i}: a slot or an owner without a fetch"
        else:
            if step.fetch_layer != target:
                return f"step {i}: fetch of {step.fetch_layer}, not of {target}"
            if step.fetch_slot in under_way:
                return f"step {i}: slot {step.fetch_slot} is refilled before its layer was used"
            if step.fetch_slot == step.slot and target != step.layer:
                return f"step {i}: slot {step.slot} is refilled while in use"
            if ranks is not None and step.owner != step.fetch_layer % ranks:
                return f"step {i}: layer {step.fetch_layer} from rank {step.owner}"
            holds[step.fetch_slot] = step.fetch_layer
            under_way.append(step.fetch_slot)
        if holds.get(step.slot) != step.layer:
            return f"step {i}: layer {step.layer} reads {holds.get(step.slot)}"
        if step.slot in under_way:  # the one wait of this fetch
            under_way.remove(step.slot)
    ahead = [start + place for place in range(k)] if wrap and k < n - 1 else []
    if [holds[slot] for slot in under_way] != ahead:
        return f"under way at the end: {[holds[slot] for slot in under_way]}"
    return None


# ---- every small plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("k", DEPTHS)
def test_every_small_plan_has_each_layer_in_its_slot_and_fetches_it_once_ahead_of_its_use(k, wrap, unchecked):
    """The full product but for the ranks, which vary from one plan to the next: the test below has all of them."""
    for start, n in itertools.product(STARTS, COUNTS):
        ranks = 1 + (start + n + k) % 8
        plan = weights.ring_schedule(n, start_layer=start, prefetch=k, num_ranks=ranks, passes=3, wrap=wrap)
        assert fault(plan, start=start, n=n, k=k, passes=3, wrap=wrap, ranks=ranks) is None, (start, n)


@pytest.mark.parametrize("k", DEPTHS)
def test_the_number_of_ranks_changes_the_owners_and_nothing_else(k, unchecked):
    """So that all ranks, whatever their number, issue the same fetches in the same order."""
    for start, n in itertools.product(STARTS, COUNTS):
        alone = [step[:4] for step in weights.ring_schedule(n, start_layer=start, prefetch=k)]
        for ranks in RANKS:
            plan = weights.ring_schedule(n, start_layer=start, prefetch=k, num_ranks=ranks)
            assert [step[:4] for step in plan] == alone
            assert all(step.owner == (None if step[2] is None else step[2] % ranks) for step in plan)


def test_every_call_gives_the_same_plan_as_no_rank_is_told_which_one_it_is():
    for n, k in itertools.product((1, 2, 5, 24), DEPTHS):
        plans = [weights.ring_schedule(n, start_layer=31, prefetch=k, num_ranks=8, passes=3) for _ in range(8)]
        assert plans == plans[:1] * 8


def test_a_plan_only_adds_its_start_to_the_layers_of_a_plan_from_zero(unchecked):
    def moved(step: RingStep, start: int) -> tuple[int, int, int | None, int | None]:
        fetched = None if step.fetch_layer is None else step.fetch_layer + start
        return step.layer + start, step.slot, fetched, step.fetch_slot

    for n, k in itertools.product(COUNTS, DEPTHS):
        first = weights.ring_schedule(n, prefetch=k, passes=2)
        for start in (1, n, 31, 10**6):
            plan = weights.ring_schedule(n, start_layer=start, prefetch=k, passes=2)
            assert [step[:4] for step in plan] == [moved(step, start) for step in first]


def test_more_passes_continue_a_plan(unchecked):
    for n, k in itertools.product(COUNTS, DEPTHS):
        longest = weights.ring_schedule(n, start_layer=3, prefetch=k, passes=5)
        for passes in range(1, 5):
            assert weights.ring_schedule(n, start_layer=3, prefetch=k, passes=passes) == longest[: n * passes]


def test_without_wrap_the_last_steps_fetch_nothing_and_all_others_the_same(unchecked):
    for n, k, passes in itertools.product(COUNTS, DEPTHS, (1, 2, 3)):
        on, off = (weights.ring_schedule(n, prefetch=k, passes=passes, wrap=wrap) for wrap in (True, False))
        last = max(n * passes - k, 0)
        assert off[:last] == on[:last]
        assert [step[:2] for step in off] == [step[:2] for step in on]
        assert all(step[2:] == (None, None, None) for step in off[last:])


def test_with_as_many_layers_ahead_as_there_are_nothing_is_ever_fetched(unchecked):
    for n, extra in itertools.product(COUNTS, range(4)):
        plan = weights.ring_schedule(n, start_layer=7, prefetch=n + extra, passes=3)
        assert [step.slot for step in plan] == [*range(n)] * 3
        assert all(step[2:] == (None, None, None) for step in plan)


def test_with_one_slot_per_layer_the_last_one_is_fetched_once(unchecked):
    for n in COUNTS:
        plan = weights.ring_schedule(n, start_layer=7, prefetch=n - 1, passes=3)
        assert [step.fetch_layer for step in plan] == [7 + n - 1] + [None] * (3 * n - 1)


def test_each_pass_fetches_every_layer_once_where_layers_outnumber_slots(unchecked):
    for k in DEPTHS:
        for n in range(k + 2, 25):
            plan = weights.ring_schedule(n, start_layer=5, prefetch=k, passes=2)
            for one_pass in (plan[:n], plan[n:]):
                assert sorted(step.fetch_layer for step in one_pass) == list(range(5, 5 + n))


def test_a_fetch_is_issued_as_many_steps_ahead_of_its_use_as_it_says(unchecked):
    for n, k in itertools.product(range(8, 25), DEPTHS):
        plan = weights.ring_schedule(n, prefetch=k, passes=3)
        for i, step in enumerate(plan[: 3 * n - k]):
            assert (step.fetch_layer, step.fetch_slot) == (plan[i + k].layer, plan[i + k].slot)


def test_what_is_not_said_is_one_layer_ahead_of_one_pass_from_zero_on_one_rank_with_wrap():
    plain = weights.ring_schedule(7)
    assert plain == weights.ring_schedule(7, start_layer=0, prefetch=1, num_ranks=1, passes=1, wrap=True)
    assert plain[-1] == RingStep(layer=6, slot=0, fetch_layer=0, fetch_slot=1, owner=0)


# ---- by value --------------------------------------------------------------------------------------------------------


def test_the_plan_equals_the_valid_walk_of_the_vectors():
    plan = weights.ring_schedule(5, start_layer=10, prefetch=2, num_ranks=4, passes=2)
    assert [list(step) for step in plan] == RING["one_valid_walk"]["rows"]


def test_two_pipeline_stages_of_61_layers_fetch_their_next_layer_and_wrap_to_their_own_first():
    first = weights.ring_schedule(31, start_layer=0, prefetch=1, num_ranks=4)
    second = weights.ring_schedule(30, start_layer=31, prefetch=1, num_ranks=4)
    assert [step.layer for step in first + second] == list(range(61))
    assert [step.fetch_layer for step in first] == [*range(1, 31), 0]
    assert [step.fetch_layer for step in second] == [*range(32, 61), 31]
    assert second[:2] == (RingStep(31, 0, 32, 1, 0), RingStep(32, 1, 33, 0, 1))
    assert second[-1] == RingStep(60, 1, 31, 0, 3)
    assert fault(second, start=31, n=30, k=1, passes=1, ranks=4) is None


def test_one_layer_is_fetched_as_often_as_the_vectors_say():
    given = {name: RING["one_layer"][name] for name in ("num_layers", "prefetch", "passes")}
    plan = weights.ring_schedule(given.pop("num_layers"), **given)
    assert [step.slot for step in plan] == [0, 0, 0]
    assert sum(step.fetch_layer is not None for step in plan) == RING["one_layer"]["fetches"] == 1


@pytest.mark.parametrize("entry", RING["owners"], ids=lambda entry: f"{entry['num_layers']}")
def test_owners_equal_the_vectors(entry):
    given = {name: entry[name] for name in ("num_ranks", "start_layer")}
    plan = weights.ring_schedule(entry["num_layers"], prefetch=0, **given)
    assert [step.owner for step in plan] == entry["owners"]


# ---- rules that are known to be wrong --------------------------------------------------------------------------------


def right_rule(layer: int, start: int, n: int, k: int) -> int:
    return start + (layer - start + k) % n


def faulty_rule(layer: int, start: int, n: int, k: int) -> int:
    return (layer + k) % n + start


SAME, LATE, FAILS = "same as the right rule", "right weights, fetched too late", "fails"


def outcome(rule: Callable[[int, int, int, int], int], start: int, n: int, k: int) -> str:
    """Walk two passes by a rule, filling the slots in turn and leaving out what a slot holds already."""
    holds: list[int | None] = [*range(start, start + k), None]
    turn, right = k, True
    for layer in [*range(start, start + n)] * 2:
        target = rule(layer, start, n, k)
        right &= target == right_rule(layer, start, n, k)
        if target not in holds:
            holds[turn] = target
            turn = (turn + 1) % (k + 1)
        if layer not in holds:
            return FAILS
    return SAME if right else LATE


@pytest.mark.parametrize("entry", RING["examples"], ids=lambda entry: f"{entry['start_layer']}-{entry['prefetch']}")
def test_fetches_equal_the_examples_and_the_faulty_rule_ends_as_they_say(entry):
    start, n, k = entry["start_layer"], entry["num_layers"], entry["prefetch"]
    plan = weights.ring_schedule(n, start_layer=start, prefetch=k, passes=2)
    for one_pass in (plan[:n], plan[n:]):
        fetched = {step.layer: step.fetch_layer for step in one_pass}
        assert [fetched[layer] for layer in entry["layers"]] == entry["right_fetch"]
    assert [faulty_rule(layer, start, n, k) for layer in entry["layers"]] == entry["faulty_fetch"]
    assert outcome(faulty_rule, start, n, k) == entry["faulty_rule"]
    assert outcome(right_rule, start, n, k) == SAME


def test_the_faulty_rule_ends_as_often_in_each_way_as_the_vectors_say_and_the_plan_always_well(unchecked):
    counts = dict.fromkeys((SAME, LATE, FAILS), 0)
    for start, k in itertools.product(range(60), range(4)):
        for n in range(k + 2, 20):
            end = outcome(faulty_rule, start, n, k)
            counts[end] += 1
            ahead = (k + start) % n
            assert end == (SAME if ahead == k else LATE if ahead < k else FAILS)
            plan = weights.ring_schedule(n, start_layer=start, prefetch=k, passes=2)
            assert fault(plan, start=start, n=n, k=k, passes=2) is None
            assert all(step.fetch_layer == right_rule(step.layer, start, n, k) for step in plan)
            assert outcome(right_rule, start, n, k) == SAME
    assert counts == RING["faulty_rule_over_start_0_to_59_prefetch_0_to_3_layers_prefetch_plus_2_to_19"]
    assert counts == {SAME: 487, LATE: 563, FAILS: 2910}


def test_the_faulty_rule_fails_on_the_second_stage_of_61_layers_at_layer_32():
    """Layer 32 is used in the second step, but 33 was fetched; on the first stage the rule is right."""
    assert outcome(faulty_rule, 0, 31, 1) == SAME
    assert outcome(faulty_rule, 31, 30, 1) == FAILS
    assert [faulty_rule(layer, 31, 30, 1) for layer in (31, 32, 60)] == [33, 34, 32]
    plan = weights.ring_schedule(30, start_layer=31, prefetch=1)
    fetched = [step._replace(fetch_layer=faulty_rule(step.layer, 31, 30, 1)) for step in plan]
    holds = {0: 31}
    for step in fetched[:2]:
        holds[step.fetch_slot] = step.fetch_layer
    assert holds[plan[1].slot] == 33 != plan[1].layer == 32


def refilled_by_slot(n: int, slots: int) -> list[RingStep]:
    """Plan two passes by the other wrong rule: layer i lies in slot i mod slots, which is refilled after its use.

    The refill of a step's slot stands in the step after, as fetches are issued before the use.
    """
    plan, refill = [], (None, None)
    for layer in [*range(n)] * 2:
        plan.append(RingStep(layer, layer % slots, *refill, None))
        refill = (layer + slots) % n, layer % slots
    return plan


def reads_a_wrong_weight(plan: Sequence[RingStep], slots: int) -> bool:
    holds = dict(enumerate(range(slots)))
    for step in plan:
        if step.fetch_slot is not None:
            holds[step.fetch_slot] = step.fetch_layer
        if holds[step.slot] != step.layer:
            return True
    return False


def test_slots_by_layer_and_refills_by_slot_part_ways_at_the_wrap_exactly_where_the_vectors_say(unchecked):
    """H2."""
    pairs = [(n, slots) for n in range(1, 8) for slots in range(1, n + 1)]
    wrong = [[n, slots] for n, slots in pairs if reads_a_wrong_weight(refilled_by_slot(n, slots), slots)]
    assert wrong == RING["wrap_around"]["fails"]
    assert len(wrong) == 12
    for n, slots in pairs:
        for passes in range(1, 8):
            plan = weights.ring_schedule(n, prefetch=slots - 1, passes=passes)
            assert fault(plan, start=0, n=n, k=slots - 1, passes=passes) is None, (n, slots, passes)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({0: {"fetch_layer": 13}}, "step 0: fetch of 13, not of 12"),
        ({0: {"fetch_slot": 0}}, "step 0: slot 0 is refilled while in use"),
        ({1: {"fetch_slot": 2}}, "step 1: slot 2 is refilled before its layer was used"),
        ({3: {"slot": 1}}, "step 3: layer 13 reads 14"),
        ({0: {"fetch_layer": None}}, "step 0: fetch of None"),
        ({4: {"owner": 0}}, "step 4: layer 11 from rank 0"),
        ({1: {"slot": 0}}, "two layers are resident in one slot"),
        ({5: {"layer": 11}}, "the layers are not used in order"),
    ],
)
def test_a_walk_finds_each_kind_of_fault(broken, told):
    right = weights.ring_schedule(5, start_layer=10, prefetch=2, num_ranks=4, passes=2)
    plan = [step._replace(**broken.get(i, {})) for i, step in enumerate(right)]
    found = fault(plan, start=10, n=5, k=2, passes=2, ranks=4)
    assert found is not None
    assert found.startswith(told)


# ---- bad input -------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"num_layers": 0}, "num_layers must be an integer >= 1; got 0"),
    ({"num_layers": -3}, "num_layers must be an integer >= 1; got -3"),
    ({"num_layers": 2.0}, "num_layers must be an integer >= 1; got 2.0"),
    ({"num_layers": True}, "num_layers must be an integer >= 1; got True"),
    ({"num_layers": "3"}, "num_layers must be an integer >= 1; got '3'"),
    ({"prefetch": -1}, "prefetch must be an integer >= 0; got -1"),
    ({"prefetch": 1.5}, "prefetch must be an integer >= 0; got 1.5"),
    ({"prefetch": None}, "prefetch must be an integer >= 0; got None"),
    ({"passes": 0}, "passes must be an integer >= 1; got 0"),
    ({"passes": False}, "passes must be an integer >= 1; got False"),
    ({"num_ranks": 0}, "num_ranks must be an integer >= 1; got 0"),
    ({"num_ranks": 1.0}, "num_ranks must be an integer >= 1; got 1.0"),
    ({"start_layer": -1}, "start_layer must be an integer >= 0; got -1"),
    ({"start_layer": None}, "start_layer must be an integer >= 0; got None"),
]


@pytest.mark.parametrize(("given", "rule"), REFUSED)
def test_a_number_out_of_range_is_refused_in_one_line(given, rule, unchecked):
    given = {"num_layers": 4} | given
    with pytest.raises(ValueError) as error:
        weights.ring_schedule(given.pop("num_layers"), **given)
    assert str(error.value) in (f"ring_schedule: {rule}", f"layer_owners: {rule}")
