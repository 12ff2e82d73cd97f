"""The picture of a ring says what the plan does: every row, every slot, the bytes; in any width."""

import io
import re

import pytest
from rich.console import Console

import weights
from weights import RingStep


def drawn(plan, width=80, **options):
    console = Console(width=width, file=io.StringIO())
    console.print(weights.show_ring(plan, **options))
    return console.file.getvalue()


def read_back(text, slots):
    """Read the rows of a table: numbers (None for "-"), the layers under way, and what each slot shows."""
    rows = []
    for line in text.splitlines():
        cells = line.split()
        if re.match(r" *\d+ +\d+ +(\d+|-) ", line):
            numbers = [None if cell == "-" else int(cell) for cell in cells[:5]]
            rows.append((numbers, [int(layer) for layer in cells[5:-slots]], cells[-slots:]))
    return rows


def walked(plan, start, n, k):
    """Walk through a plan with plain lists and write down what the table should say."""
    holds = [*range(start, start + min(k, n)), *[None] * (k + 1)][: min(k + 1, n)]
    rows, coming = [], []
    for i, step in enumerate(plan):
        if step.fetch_layer is not None:
            holds[step.fetch_slot] = step.fetch_layer
            coming.append(step.fetch_layer)
        if step.layer in coming:
            coming.remove(step.layer)
        cells = [
            f"<{layer}>" if layer == step.layer else f".{layer}" if layer in coming else f"{layer}" for layer in holds
        ]
        rows.append(([i, step.layer, step.fetch_layer, step.fetch_slot, step.owner], list(coming), cells))
    return rows


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 30])
def test_the_table_read_back_is_a_walk_through_the_plan(n, k, width):
    """Two passes of a stage in the middle of a model: layers of two digits, up to six slots."""
    plan = weights.ring_schedule(n, start_layer=31, prefetch=k, num_ranks=16, passes=2)
    assert read_back(drawn(plan, width), min(k + 1, n)) == walked(plan, 31, n, k)


@pytest.mark.parametrize("width", [80, 200])
def test_a_plan_that_ends_is_drawn_to_its_end(width):
    plan = weights.ring_schedule(5, start_layer=10, prefetch=2, num_ranks=4, wrap=False)
    assert read_back(drawn(plan, width), 3) == [
        ([0, 10, 12, 2, 0], [12], ["<10>", "11", ".12"]),
        ([1, 11, 13, 0, 1], [12, 13], [".13", "<11>", ".12"]),
        ([2, 12, 14, 1, 2], [13, 14], [".13", ".14", "<12>"]),
        ([3, 13, None, None, None], [14], ["<13>", ".14", "12"]),
        ([4, 14, None, None, None], [], ["13", "<14>", "12"]),
    ]


def test_layers_under_way_stand_in_the_order_of_their_use_also_across_the_wrap():
    plan = weights.ring_schedule(4, start_layer=7, prefetch=2, passes=3)
    for (numbers, under_way, _), i in zip(read_back(drawn(plan), 3), range(12), strict=True):
        first = 1 if i else 2  # at step 0 the first two layers are there
        assert numbers[1] == 7 + i % 4
        assert under_way == [7 + (i + ahead) % 4 for ahead in range(first, 3)]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("k", range(6))
def test_every_column_has_its_whole_heading(k, width):
    text = drawn(weights.ring_schedule(30, start_layer=31, prefetch=k, num_ranks=16), width)
    heading = re.split(r"\n *0 +31 ", text)[0].split("\n", 1)[1].split()
    slots = [word for slot in range(k + 1) for word in ("slot", str(slot))]
    names = ["step", "uses", "fetches", "into", "slot", "from", "rank", "under", "way"]
    assert sorted(heading) == sorted(names + slots)


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_the_console(width):
    text = drawn(weights.ring_schedule(78, prefetch=5, num_ranks=16), width, layer_bytes=2**28)
    assert max(map(len, text.splitlines())) <= width


# ---- the title -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "layer_bytes", "title"),
    [
        (1, None, "2 slots"),
        (0, None, "1 slot"),
        (9, None, "5 slots"),
        (1, 0, "2 slots of 0 B: 0 B resident"),
        (2, 300, "3 slots of 300 B: 900 B resident"),
        (2, 500, "3 slots of 500 B: 1.465 KiB resident"),
        (0, 1024, "1 slot of 1 KiB: 1 KiB resident"),
        (2, 3 * 2**19, "3 slots of 1.5 MiB: 4.5 MiB resident"),
        (1, 328 * 2**20, "2 slots of 328 MiB: 656 MiB resident"),
        (3, 2**30, "4 slots of 1 GiB: 4 GiB resident"),
        (1, {10: 2**20, 11: 2**21, 12: 5, 13: 6, 14: 7}, "2 slots of 2 MiB: 4 MiB resident"),
        (9, {10: 1, 11: 2, 12: 3, 13: 4, 14: 100}, "5 slots of 100 B: 500 B resident"),
    ],
)
@pytest.mark.parametrize("width", [80, 200])
def test_the_title_counts_slots_and_their_bytes_each_with_room_for_the_largest_layer(k, layer_bytes, title, width):
    text = drawn(weights.ring_schedule(5, start_layer=10, prefetch=k), width, layer_bytes=layer_bytes)
    assert text.splitlines()[0].rstrip() == title


def test_bytes_are_left_out_where_none_are_given():
    assert "resident" not in drawn(weights.ring_schedule(5))


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_an_empty_schedule_is_refused_in_one_line():
    with pytest.raises(ValueError) as error:
        weights.show_ring(())
    assert str(error.value) == "show_ring: the schedule must have at least one step; got 0"


def test_the_bytes_of_no_layer_are_refused_in_one_line():
    with pytest.raises(ValueError) as error:
        weights.show_ring(weights.ring_schedule(3), layer_bytes={})
    assert str(error.value) == "show_ring: layer_bytes must be of at least one layer; got {}"


def test_a_single_step_is_a_table_of_one_row():
    text = drawn([RingStep(3, 0, 4, 1, 2)])
    assert read_back(text, 2) == [([0, 3, 4, 1, 2], [4], ["<3>", ".4"])]
