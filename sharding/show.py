"""Pictures of a layout for a notebook or a terminal: who holds which tokens, and who has how much to do."""

import colorsys
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console, ConsoleOptions
from rich.jupyter import JupyterMixin
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from sfa_functional import DEEPSEEK_V32, SFAConfig
from sfa_functional.precision import require, require_lengths

from .costs import token_flops, visible_keys
from .token_ranges import TokenSplit

LABELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+/"
"""One character per rank, for terminals without colours; from rank 64 on they are used again."""

MIXED = "░"
LINES = 12  # cells are as small as they can be for this many full lines
REQUESTS = 16  # the rest is counted, not drawn


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
                bar.append(LABELS[rank % len(LABELS)], _style(rank, self._ranks))
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
            style = _style(rank, self._ranks)
            share = f"{flops / mean:.3f}" if mean else "-"
            bar = Text("█" * round(width * flops / most) if most else "", Style(color=style.bgcolor))
            label = Text.assemble(f"{rank} ", (LABELS[rank % len(LABELS)], style))
            table.add_row(label, str(tokens), str(self._rows - tokens), share, bar)
        table.add_row("max", str(int(self._tokens.max())), "", f"{most / mean:.3f}" if mean else "-", "", style="bold")
        return table


def _style(rank: int, ranks: int) -> Style:
    """Give neighbouring ranks hues that are far apart, black on light."""
    hue = rank * 0.618034 % 1.0
    red, green, blue = (round(255 * x) for x in colorsys.hls_to_rgb(hue, 0.72 if rank % 2 else 0.6, 0.75))
    return Style(color="black", bgcolor=f"rgb({red},{green},{blue})")
