"""A ring's plan as a table: what is used, what is under way, what lies where, who sends."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from sfa_functional.precision import require

from .ring_schedule import RingStep


def show_ring(schedule: Sequence[RingStep], *, layer_bytes: int | Mapping[int, int] | None = None) -> Table:
    """Draw a schedule, one row per step.

    Columns: the layer in use; the fetch that starts in this step, with its slot and the rank that sends; the layers
    under way while the layer is in use; and what each slot holds: ``<3>`` is in use, ``.4`` is under way.

    Args:
        schedule: from `ring_schedule`.
        layer_bytes: bytes of a layer, one number or one per layer: adds the bytes of all slots, each of which has
            room for the largest.

    Returns:
        A table to print with ``rich.print``, or to end a notebook cell with.

    Raises:
        ValueError: an empty schedule, or no layer's bytes.
    """
    require(len(schedule) > 0, "show_ring", "the schedule must have at least one step", 0)
    slots = 1 + max(max(step.slot, step.fetch_slot or 0) for step in schedule)
    holds = _at_the_start(schedule, slots)
    largest = None
    if layer_bytes is not None:
        named = isinstance(layer_bytes, int) or len(layer_bytes) > 0
        require(named, "show_ring", "layer_bytes must be of at least one layer", layer_bytes)
        largest = layer_bytes if isinstance(layer_bytes, int) else max(layer_bytes.values())
    title = f"{slots} slot{'s' if slots > 1 else ''}"
    if largest is not None:
        title += f" of {_size(largest)}: {_size(slots * largest)} resident"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("step", "uses", "fetches", "into\nslot", "from\nrank", "under\nway"):
        table.add_column(heading, justify="right", no_wrap=True)
    for slot in range(slots):
        table.add_column(f"slot\n{slot}", justify="right", no_wrap=True)
    waiting: list[int] = []  # slots whose layer is under way, in the order of use
    for i, step in enumerate(schedule):
        if step.fetch_slot is not None:
            holds[step.fetch_slot] = step.fetch_layer
            waiting.append(step.fetch_slot)
        waiting = [slot for slot in waiting if slot != step.slot]
        cells = [_cell(layer, slot == step.slot, slot in waiting) for slot, layer in enumerate(holds)]
        under_way = " ".join(str(holds[slot]) for slot in waiting)
        numbers = [step.fetch_layer, step.fetch_slot, step.owner]
        table.add_row(str(i), str(step.layer), *("-" if n is None else str(n) for n in numbers), under_way, *cells)
    return table


def _at_the_start(schedule: Sequence[RingStep], slots: int) -> list[int | None]:
    """Return what each slot holds before the first step: the first layer used from it, unless it is fetched first."""
    holds: list[int | None] = [None] * slots
    fetched: set[int] = set()
    for step in schedule:
        if step.fetch_slot is not None:
            fetched.add(step.fetch_slot)
        if step.slot not in fetched and holds[step.slot] is None:
            holds[step.slot] = step.layer
    return holds


def _cell(layer: int | None, used: bool, waiting: bool) -> str:
    text = "" if layer is None else str(layer)
    return f"[bold]<{text}>[/bold]" if used else f".{text}" if waiting else text


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
