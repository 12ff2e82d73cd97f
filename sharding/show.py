"""Tables of a layout for a notebook or a terminal: who holds which tokens, who has how much to do, what it costs."""

import colorsys
from collections.abc import Iterator, Sequence

import torch
from rich import box
from rich.console import Console, ConsoleOptions
from rich.jupyter import JupyterMixin
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from sfa_functional import DEEPSEEK_V32, SFAConfig
from sfa_functional.precision import require, require_lengths

from .costs import token_flops, visible_keys
from .estimate import Estimate, RankEstimate
from .ring_attention import RingOnPaper
from .token_ranges import TokenSplit

LABELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+/"
"""One character per rank, for terminals without colours; from rank 64 on they are used again."""

MIXED = "░"
LINES = 12  # cells are as small as they can be for this many full lines
REQUESTS = 16  # the rest is counted, not drawn
UNITS = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
PARTS = ("projections", "indexer", "attention", "output")
"""What a rank's work consists of; the indexer is scoring and selection."""


def show_split(
    split: TokenSplit,
    lengths: Sequence[int] | Tensor,
    *,
    seq_lens: Sequence[int] | Tensor | None = None,
    config: SFAConfig | None = None,
) -> "SplitPicture":
    """Draw who holds which tokens: one bar per request, one character per cell, coloured by rank; and each rank's work.

    A cell stands for as many tokens (a power of two) as it takes for the picture to fit about a dozen lines; one in
    which several ranks have tokens is drawn as ░.

    Args:
        split: who holds which tokens.
        lengths: new tokens of each request.
        seq_lens: context + new tokens of each; None is ``lengths``.
        config: sizes by which work is counted; None is DeepSeek-V3.2.

    Returns:
        A value to print with ``rich.print``, or to end a notebook cell with.

    Raises:
        ValueError: lengths that are not those of the split's tokens.

    Source: the picture is after jax.debug.visualize_array_sharding; work is `token_flops`.
    """
    counts = require_lengths("show_split", lengths=lengths)
    total = counts if seq_lens is None else require_lengths("show_split", seq_lens=seq_lens)
    require(len(total) == len(counts), "show_split", "lengths and seq_lens must have one length", len(total))
    require(sum(counts) == split.num_tokens, "show_split", f"lengths must add up to {split.num_tokens}", sum(counts))
    flops_T = token_flops(DEEPSEEK_V32 if config is None else config, visible_keys(counts, total))
    return SplitPicture(split, counts, flops_T)


class SplitPicture(JupyterMixin):
    """What `show_split` returns; draws itself in the width that there is."""

    def __init__(self, split: TokenSplit, counts: list[int], flops_T: Tensor) -> None:
        self._counts, self._ranks, self._rows = counts, split.num_ranks, split.rows
        self._owner_T = (split.inverse_T // max(1, split.rows)).cpu()
        self._tokens = torch.bincount(self._owner_T, minlength=split.num_ranks)
        self._flops = torch.bincount(self._owner_T, weights=flops_T, minlength=split.num_ranks).double()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | str]:
        yield from self._bars(max(8, options.max_width - 20))
        yield ""
        yield self._table(max(8, min(40, options.max_width - 44)))

    def _bars(self, width: int) -> Iterator[Table]:
        size = 1
        while sum(-(-n // size) for n in self._counts) > LINES * width:
            size *= 2
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(width=width)
        legend = "one cell is one token" if size == 1 else f"one cell is {size} tokens, {MIXED} has several ranks'"
        table.add_row("request", Text(legend, style="dim"))
        pieces = self._owner_T.split(self._counts)
        for b, owners in enumerate(pieces[:REQUESTS]):
            table.add_row(f"{b} ({self._counts[b]})", self._bar(owners, size))
        if len(pieces) > REQUESTS:
            table.add_row("...", Text(f"and {len(pieces) - REQUESTS} more requests", style="dim"))
        yield table

    def _bar(self, owners: Tensor, size: int) -> Text:
        bar = Text(overflow="fold")
        for cell in owners.split(size):
            if len(cell) == 0:
                continue
            rank = int(cell[0])
            if bool((cell == rank).all()):
                bar.append(LABELS[rank % len(LABELS)], _style(rank))
            else:
                bar.append(MIXED, "dim")
        return bar

    def _table(self, width: int) -> Table:
        mean = float(self._flops.mean())
        most = float(self._flops.max())
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for heading in ("rank", "tokens", "padding", "work/mean"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("work", no_wrap=True)
        for rank in range(self._ranks):
            tokens, flops = int(self._tokens[rank]), float(self._flops[rank])
            style = _style(rank)
            share = f"{flops / mean:.3f}" if mean else "-"
            bar = Text("█" * round(width * flops / most) if most else "", Style(color=style.bgcolor))
            label = Text.assemble(f"{rank} ", (LABELS[rank % len(LABELS)], style))
            table.add_row(label, str(tokens), str(self._rows - tokens), share, bar)
        table.add_row("max", str(int(self._tokens.max())), "", f"{most / mean:.3f}" if mean else "-", "", style="bold")
        return table


def show_estimates(estimates: Sequence[Estimate], *, baseline: Estimate | None = None) -> Table:
    """Put layouts side by side: imbalance, operations, bytes that move and stay, seconds; each of the rank with most.

    Below them stands the fastest one with ring attention, on paper, beside its gather; then a baseline.

    Args:
        estimates: of the same tokens, from `estimate`.
        baseline: another way to run them, such as ``Rules(heads="tp")``.

    Returns:
        A table to print with ``rich.print``, or to end a notebook cell with. It fits 80 columns.

    Raises:
        ValueError: no estimates.
    """
    best = fastest(estimates)
    rows: list[tuple[str, Estimate, Estimate | RingOnPaper]] = [
        (one.layout + (" (best)" if one is best else ""), one, one) for one in estimates
    ]
    if best.ring is not None:
        rows.append((f"{best.layout}, ring, on paper", best, best.ring))
    if baseline is not None:
        rows.append((baseline.layout, baseline, baseline))
    flop, flops = in_unit([counted.flops for _, counted, _ in rows], "FLOP")
    sent_in, sent = in_unit([moved.bytes_sent for _, _, moved in rows], "B")
    kept_in, kept = in_unit([moved.bytes_resident for _, _, moved in rows], "B")
    time_in, seconds = in_unit([moved.seconds for _, _, moved in rows], "s")
    headings = ("max/mean\nof work", f"\n{flop}", f"{sent_in}\nsent", f"{kept_in}\nresident", f"{time_in}\npredicted")
    table = _numbers(*headings, first="\nlayout")
    for i, (name, counted, moved) in enumerate(rows):
        style = "bold" if counted is best and moved is best else ""
        table.add_row(name, f"{counted.max_over_mean:.3f}", flops[i], sent[i], kept[i], seconds[i], style=style)
        if i == len(estimates) - 1:
            table.add_section()
    return table


def fastest(estimates: Sequence[Estimate]) -> Estimate:
    """Return the estimate with the fewest predicted seconds, the first of equals.

    Raises:
        ValueError: no estimates.
    """
    require(len(estimates) > 0, "fastest", "there must be at least one estimate", 0)
    return min(estimates, key=lambda one: one.seconds)


def show_ranks(estimate: Estimate) -> Table:
    """List the ranks of a layout: tokens, padding, work over the mean, operations by part, bytes, seconds.

    Args:
        estimate: of the layout.

    Returns:
        A table to print with ``rich.print``, or to end a notebook cell with. It fits 80 columns.
    """
    ranks, parts = estimate.ranks, [work_parts(rank) for rank in estimate.ranks]
    mean = sum(rank.flops.total for rank in ranks) / len(ranks)
    columns = [
        [part["projections"] + part["output"] for part in parts],
        [part["indexer"] for part in parts],
        [part["attention"] for part in parts],
    ]
    flop, flops = in_unit([count for column in columns for count in column], "FLOP")
    sent_in, sent = in_unit([rank.bytes_sent for rank in ranks], "B")
    kept_in, kept = in_unit([rank.resident.total for rank in ranks], "B")
    time_in, seconds = in_unit([rank.seconds for rank in ranks], "s")
    headings = ("tokens", "pad", "work/\nmean", f"{flop}\nproj.", "\nindex", "\nattend")
    table = _numbers(*headings, f"{sent_in}\nsent", f"{kept_in}\nkept", f"{time_in}\ntaken", first="\nrank")
    table.columns[0].justify = "right"
    for i, rank in enumerate(ranks):
        share = f"{rank.flops.total / mean:.3f}" if mean else "-"
        counts = str(rank.rank), str(rank.tokens), str(rank.rows - rank.tokens), share
        table.add_row(*counts, *flops[i :: len(ranks)], sent[i], kept[i], seconds[i])
    return table


def work_parts(rank: RankEstimate) -> dict[str, int]:
    """Return a rank's operations by the parts of `PARTS`."""
    flops = rank.flops
    counts = (flops.projections, flops.scoring + flops.selection, flops.attention, flops.output)
    return dict(zip(PARTS, counts, strict=True))


def _numbers(*headings: str, first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def in_unit(values: Sequence[float | int], unit: str) -> tuple[str, list[str]]:
    """Write a column of numbers in the unit in which the largest one has one to three digits before its point."""
    usable = [(size, prefix) for prefix, size in UNITS.items() if size >= 1 or unit == "s"]
    size, prefix = next((one for one in usable if max(values) >= one[0]), usable[-1])
    return prefix + unit, [_three(value / size) for value in values]


def _three(value: float) -> str:
    """Write a number with three digits, or with all that stand before its point."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}" if value else "0"


def _style(rank: int) -> Style:
    """Give neighbouring ranks hues that are far apart, black on light."""
    hue = rank * 0.618034 % 1.0
    red, green, blue = (round(255 * x) for x in colorsys.hls_to_rgb(hue, 0.72 if rank % 2 else 0.6, 0.75))
    return Style(color="black", bgcolor=f"rgb({red},{green},{blue})")
