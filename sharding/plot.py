"""Pictures of layouts, drawn with matplotlib in its current style: tokens by rank, and work."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfa_functional import DEEPSEEK_V32, SFAConfig
from sfa_functional.precision import require, require_lengths

from .costs import token_flops, visible_keys
from .estimate import Estimate
from .show import PARTS, UNITS, in_unit, work_parts
from .token_ranges import TokenSplit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Color = tuple[float, float, float, float]  # red, green, blue, opacity
NOTHING, SEVERAL = (0.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.5, 0.5)  # a cell of no tokens, and of several ranks' tokens
COLUMNS = 512  # of a map of shares, at most
WIDTH, LINES, REQUESTS = 32, 32, 16  # of a map of cells: cells a line, lines and requests at most
COLORS = dict(zip(PARTS, ("#8da0cb", "#fc8d62", "#66c2a5", "#c9cdd8"), strict=True))


def plot_splits(
    splits: Mapping[str, TokenSplit],
    lengths: Sequence[int] | Tensor,
    *,
    seq_lens: Sequence[int] | Tensor | None = None,
    config: SFAConfig | None = None,
) -> "Figure":
    """Draw splits side by side with matplotlib: tokens coloured by rank, and below them each rank's work.

    Tokens stand like text, requests from top to bottom, each from the start of a line. A cell stands for as many
    tokens (a power of two) as it takes for the picture to fit about 32 lines of 32 cells; one in which several ranks
    have tokens is grey. Work is that of `token_flops`, over the mean of all ranks.

    Args:
        splits: of the same tokens over the same ranks, by name.
        lengths: new tokens of each request; from the 17th request on they are left out, but for their work.
        seq_lens: context + new tokens of each; None is ``lengths``.
        config: sizes by which work is counted; None is DeepSeek-V3.2.

    Returns:
        A figure; ``savefig`` writes it. Text and lines have the colours of matplotlib's current style.

    Raises:
        ValueError: matplotlib is missing, no splits, or lengths that are not those of a split's tokens.

    Source: `show_split`, which draws the same in a terminal.
    """
    counts = require_lengths("plot_splits", lengths=lengths)
    total = counts if seq_lens is None else require_lengths("plot_splits", seq_lens=seq_lens)
    require(len(splits) > 0, "plot_splits", "there must be at least one split", 0)
    require(len(total) == len(counts), "plot_splits", "lengths and seq_lens must have one length", len(total))
    for split in splits.values():
        same = sum(counts) == split.num_tokens
        require(same, "plot_splits", f"lengths must add up to {split.num_tokens}", sum(counts))
    figure = _figure((5.0 * len(splits), 5.4))
    flops_T = token_flops(DEEPSEEK_V32 if config is None else config, visible_keys(counts, total))
    axes = figure.subplots(2, len(splits), squeeze=False, sharex="row", sharey="row", height_ratios=(2, 1))
    for name, split, (cells, bars) in zip(splits, splits.values(), axes.T, strict=True):
        owner_T = (split.inverse_T // max(1, split.rows)).cpu()
        size = _draw_cells(cells, owner_T, counts[:REQUESTS], _rank_colors(split.num_ranks))
        cells.set_xlabel("a cell is one token" if size == 1 else f"a cell is {size} tokens")
        work_N = torch.bincount(owner_T, weights=flops_T, minlength=split.num_ranks).double()
        share_N = work_N / work_N.mean().clamp(min=1)
        bars.bar(range(split.num_ranks), share_N.tolist(), color=_rank_colors(split.num_ranks), width=0.9)
        bars.axhline(1, color=bars.xaxis.label.get_color(), linewidth=1, linestyle="--")
        bars.set_xticks(range(0, split.num_ranks, -(-split.num_ranks // 16)))
        bars.set_xlabel("rank")
        cells.set_title(f"{name}: the slowest rank has {float(share_N.max()):.3f} of the mean work")
    axes[0, 0].set_ylabel("requests, by length")
    axes[1, 0].set_ylabel("work / mean")
    return figure


def plot_estimates(
    estimates: Sequence[Estimate], splits: Mapping[str, TokenSplit], lengths: Sequence[int] | Tensor
) -> "Figure":
    """Draw layouts with matplotlib, a row for each: tokens by rank, and the work of every rank by part.

    Args:
        estimates: of the same tokens.
        splits: each layout's tokens, by its name.
        lengths: new tokens of each request; a line stands where one ends.

    Returns:
        A figure; ``savefig`` writes it.

    Raises:
        ValueError: matplotlib is missing, or lengths that are not those of a split's tokens.
    """
    counts = require_lengths("plot_estimates", lengths=lengths)
    for split in splits.values():
        same = sum(counts) == split.num_tokens
        require(same, "plot_estimates", f"lengths must add up to {split.num_tokens}", sum(counts))
    time_in, seconds = in_unit([one.seconds for one in estimates], "s")
    flop, _ = in_unit([one.flops for one in estimates], "FLOP")
    figure = _figure((10.0, 0.6 + 2.3 * len(estimates)))
    axes = figure.subplots(len(estimates), 2, squeeze=False, sharey="row", sharex="col")
    for i, (left, right) in enumerate(axes):
        _draw_tokens(left, splits[estimates[i].layout], counts)
        _draw_work(right, estimates[i], flop)
        left.yaxis.get_major_locator().set_params(integer=True)
        left.set_ylabel(f"{estimates[i].layout}\nrank")
        right.annotate(
            f"max/mean {estimates[i].max_over_mean:.3f}, {seconds[i]} {time_in}",
            (0.99, 1.02),
            xycoords="axes fraction",
            ha="right",
            fontsize="small",
        )
    axes[0, 0].set_title("tokens by rank", loc="left")
    axes[0, 1].set_title("work by part", loc="left")
    axes[-1, 0].set_xlabel("token of the batch; shade: share of the tokens there")
    axes[-1, 1].set_xlabel(f"{flop} of a rank, all layers; dashed: mean")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize="small")
    return figure


def _draw_cells(axis: "Axes", owner_T: Tensor, counts: Sequence[int], colors: Sequence[Color]) -> int:
    size = 1
    while sum(-(-n // (size * WIDTH)) for n in counts) > max(LINES, len(counts)):
        size *= 2
    lines: list[list[Color]] = []
    starts = []
    for owners in owner_T[: sum(counts)].split(list(counts)):
        pieces = [piece for piece in owners.split(size) if len(piece)]
        cells = [colors[int(piece[0])] if bool((piece == piece[0]).all()) else SEVERAL for piece in pieces]
        starts.append(len(lines))
        lines += [cells[i : i + WIDTH] for i in range(0, len(cells), WIDTH)]
    width = max(map(len, lines), default=1)
    image = [line + [NOTHING] * (width - len(line)) for line in lines] or [[NOTHING]]
    axis.imshow(image, interpolation="nearest", aspect="auto")
    axis.set_xticks([])
    runs = [(n, len(list(same))) for n, same in groupby(counts)]
    firsts = [sum(many for _, many in runs[:i]) for i in range(len(runs))]
    axis.set_yticks([starts[b] for b in firsts], [f"{n} × {many}" if many > 1 else str(n) for n, many in runs])
    return size


def _rank_colors(ranks: int) -> list[Color]:
    """Spread ranks over a rainbow whose ends stand out from black and from white."""
    from matplotlib import colormaps

    return [colormaps["turbo"](0.07 + 0.86 * (rank + 0.5) / ranks) for rank in range(ranks)]


def _figure(inches: tuple[float, float]) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"matplotlib must be installed: pip install 'sfa-functional[plot]'; got {error}") from error
    return Figure(figsize=inches, layout="constrained")


def _draw_tokens(axis: "Axes", split: TokenSplit, counts: list[int]) -> None:
    owner_T = (split.inverse_T // max(1, split.rows)).cpu()
    columns = max(1, min(COLUMNS, len(owner_T)))
    column_T = torch.arange(len(owner_T)) * columns // max(1, len(owner_T))
    held = torch.bincount(owner_T * columns + column_T, minlength=split.num_ranks * columns).view(-1, columns)
    share = held / held.sum(0).clamp(min=1)
    edges = (-0.5, max(1, len(owner_T)) - 0.5, split.num_ranks - 0.5, -0.5)
    axis.imshow(share.tolist(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=edges)
    ends = torch.tensor(counts).cumsum(0).tolist()
    if len(ends) <= COLUMNS // 8:  # more lines than that would hide the tokens
        for end in ends[:-1]:
            axis.axvline(end - 0.5, color="black", linewidth=0.8, linestyle=":")


def _draw_work(axis: "Axes", estimate: Estimate, unit: str) -> None:
    size = UNITS[unit.removesuffix("FLOP")]
    starts = [0.0] * len(estimate.ranks)
    for name, color in COLORS.items():
        widths = [work_parts(rank)[name] / size for rank in estimate.ranks]
        axis.barh(range(len(widths)), widths, left=starts, height=0.85, color=color, label=name)
        starts = [a + b for a, b in zip(starts, widths, strict=True)]
    axis.axvline(sum(starts) / len(starts), color=axis.xaxis.label.get_color(), linewidth=1, linestyle="--")
