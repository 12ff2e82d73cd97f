"""A machine as a few numbers, and the seconds that a layer takes on it: a model, not a measurement."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from sfa_functional.precision import require

from .costs import FlopParts
from .traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank and of its link, by which counts become seconds.

    Rates are those that are reached, not those of a data sheet. A part's own rate that is None is ``flops``.

    Raises:
        ValueError: a rate that is not a number > 0, or a latency that is not one >= 0.
    """

    name: str
    flops: float  # FLOP/s of matrix products
    link: float  # bytes/s that a rank receives, while it sends as much
    latency: float = 0.0  # seconds of a collective that moves nothing
    scoring: float | None = None  # FLOP/s of the indexer's scores
    selection: float | None = None  # comparisons/s
    attention: float | None = None  # FLOP/s of attention to selected keys

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (value is None and field.default is None):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            zero = field.name == "latency"
            rule = f"{field.name} must be a number {'>=' if zero else '>'} 0"
            require(number and (value > 0 or (zero and value == 0)), "Machine", rule, repr(value))

    def on_link(self, bytes_moved: int) -> float:
        """Return the seconds of one collective, ``latency + bytes / link``; none where nothing moves."""
        return self.latency + bytes_moved / self.link if bytes_moved else 0.0


EXAMPLE_MACHINE = Machine(
    name="400 TFLOP/s and 100 GB/s a rank, 20 µs a collective", flops=4e14, link=1e11, latency=2e-5
)
"""Round numbers of an accelerator with bfloat16 products and a fast link between ranks; nobody's measurement."""


class RankLayer(NamedTuple):
    """What one rank does in one layer."""

    flops: FlopParts
    key_flops: int  # of the projections, those that the gather of keys waits for
    traffic: tuple[Traffic, ...]


def layer_seconds(ranks: Sequence[RankLayer], machine: Machine, *, prefetch: int = 1) -> list[float]:
    """Return when each rank is done with a layer that all begin together.

    The order is that of `context_parallel_layer`. Keys are projected and their gather starts when every rank has them;
    queries are projected meanwhile. Scores, selection and attention follow the gather, then the output's projection.
    The link carries one collective after the other: keys, matrices, the next layer's weights. A fetch of a
    whole layer that does not end within the layer before it holds that up; with ``prefetch`` 0 nothing hides it.

    Args:
        ranks: every rank's part, the same collectives in each.
        machine: rates.
        prefetch: layers ahead that a layer's fetch starts; 0 is when it is needed.

    Returns:
        Seconds, one number per rank.

    Source: the schedule of sharding over context in vllm-project/vllm-ascend; times are flops / rate and
        latency + bytes / link.
    """
    link = {moved.what: machine.on_link(_most(ranks, place)) for place, moved in enumerate(ranks[0].traffic)}
    scoring, selection = machine.scoring or machine.flops, machine.selection or machine.flops
    attention = machine.attention or machine.flops
    fetch = link.get("layer", 0.0)
    start = fetch if prefetch == 0 else 0.0
    keys_done = start + max(rank.key_flops for rank in ranks) / machine.flops + link.get("keys", 0.0)
    queries_may = keys_done + link["q_b_proj"] + link["kv_b_proj"] if "q_b_proj" in link else start
    output_may = queries_may + link.get("o_proj", 0.0)
    attended = []
    for rank in ranks:
        keys = start + rank.key_flops / machine.flops
        queries = max(keys, queries_may) + (rank.flops.projections - rank.key_flops) / machine.flops
        pairs = rank.flops.scoring / scoring + rank.flops.selection / selection + rank.flops.attention / attention
        attended.append(max(max(queries, keys_done) + pairs, output_may))
    if "values" in link:
        attended = [max(attended) + link["values"]] * len(ranks)
    done = [time + rank.flops.output / machine.flops for time, rank in zip(attended, ranks, strict=True)]
    for what in ("sums", "heads"):
        if what in link:
            done = [max(done) + link[what]] * len(ranks)
    held = keys_done + fetch if prefetch > 0 and "layer" in link else 0.0
    return [max(time, held) for time in done]


def _most(ranks: Sequence[RankLayer], place: int) -> int:
    """Return what the rank receives that receives most: a broadcast is passed on while it arrives."""
    return max(rank.traffic[place].bytes_received for rank in ranks)
