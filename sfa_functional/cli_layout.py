"""``sfa layout``: what layouts of a batch over ranks cost, side by side, and measured at sizes that fit."""

import argparse
import ctypes
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sharding import (
    EXAMPLE_MACHINE,
    Estimate,
    Measured,
    MeshShape,
    Rules,
    TokenSplit,
    WeightStrategy,
    estimate,
    fastest,
    measure_ranks,
    miniature,
    plot_estimates,
    show_estimates,
    show_ranks,
    split_tokens,
)
from sharding.token_ranges import Layout

from .config import DEEPSEEK_V32, GLM_5, GLM_52, TINY, SFAConfig
from .whole_file import moved_into_place

MODELS = {"deepseek-v3.2": DEEPSEEK_V32, "glm-5": GLM_5, "glm-5.2": GLM_52, "tiny": TINY}
LAYOUTS = get_args(Layout)
MOST_TOKENS = 2**22
MOST_RANKS = 1024
PAGE = 128
"""Rows of a cache's page."""
ROUNDS = 6


def add_layout(commands: Any) -> None:
    """Add ``sfa layout`` to the command's subcommands."""
    run = commands.add_parser(
        "layout",
        help="compare layouts of a batch over ranks",
        description="Count what a forward pass of a model's attention layers costs each rank: operations, bytes sent "
        "and resident, and seconds on a machine that is stated. Bytes and operations of a layout are those of the "
        "rank that has most; the seconds are a model.",
    )
    run.add_argument("--model", required=True, choices=list(MODELS), help="whose sizes and number of layers")
    run.add_argument(
        "--lengths", required=True, metavar="N[xTIMES],...", help="tokens of the requests: 65536,4096x8 is nine of them"
    )
    run.add_argument("--ranks", required=True, type=int, metavar="N", help="ranks over which tokens are dealt out")
    run.add_argument("--layout", choices=["all", *LAYOUTS], default="all", help="which layout; default: all")
    run.add_argument(
        "--owner", type=Path, metavar="FILE", help="also a layout of your own: a rank for every token, as text"
    )
    run.add_argument("--weights", choices=["replicated", "layer-sharded", "gathered"], default="replicated")
    run.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw tokens by rank and work by part")
    run.add_argument("--json", type=Path, metavar="OUT", help="also write the numbers to this file")
    run.add_argument(
        "--measure", action="store_true", help="also run every rank's maths here, on one core, at sizes that fit"
    )
    run.set_defaults(run=compare_layouts)


def compare_layouts(args: argparse.Namespace) -> None:
    """Run ``sfa layout``: count, print, draw and write."""
    config, lengths = MODELS[args.model], read_lengths(args.lengths)
    _require(1 <= args.ranks <= MOST_RANKS, "--ranks", f"must be in 1..{MOST_RANKS}", args.ranks)
    suffixes = (".png", ".svg", ".pdf")
    drawable = args.plot is None or args.plot.suffix in suffixes
    _require(drawable, f"--plot {args.plot}", f"must end in {', '.join(suffixes)}", args.plot and args.plot.suffix)
    names = LAYOUTS if args.layout == "all" else (args.layout,)
    splits = {name: split_tokens(lengths, args.ranks, layout=name, config=config) for name in names}
    if args.owner is not None:
        splits["own"] = read_owners(args.owner, sum(lengths), args.ranks)
    with moved_into_place("--json", args.json) as out, moved_into_place("--plot", args.plot) as picture:
        estimates = [_estimate(config, lengths, name, splits, args.weights) for name in splits]
        baseline = None
        if config.num_attention_heads % args.ranks == 0:
            named: dict[str, Any] = {"rules": Rules(heads="tp"), "block_size": PAGE}
            baseline = estimate(config, lengths, MeshShape(tp=args.ranks), **named)
        if picture is not None:
            plot_estimates(estimates, splits, lengths).savefig(picture, format=args.plot.suffix[1:], dpi=150)
        console = Console()
        _print_estimates(console, args, config, lengths, estimates, baseline)
        measured: Mapping[str, Measured] = {}
        if args.measure:
            measured = _measure(console, config, lengths, estimates, splits)
        if out is not None:
            result = _result(estimates, baseline, measured)
            out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_lengths(text: str) -> list[int]:
    """Read ``65536,4096x8`` as one request of 65536 tokens and eight of 4096."""
    lengths: list[int] = []
    for item in text.split(","):
        number, times, count = item.strip().partition("x")
        plain = all(part.isascii() and part.isdigit() for part in (number, count if times else "1"))
        _require(plain, "--lengths", "must be numbers of tokens like 65536,4096x8", repr(text))
        # numbers first: a list of 10^12 requests must not be made before it is refused
        many = sum(lengths) + int(number) * int(count or 1) > MOST_TOKENS or int(count or 1) > MOST_TOKENS
        _require(not many, "--lengths", f"must be at most {MOST_TOKENS} tokens in all", repr(text))
        lengths += [int(number)] * int(count or 1)
    _require(sum(lengths) > 0, "--lengths", "must be at least one token", repr(text))
    return lengths


def read_owners(path: Path, tokens: int, ranks: int) -> TokenSplit:
    """Read a rank for every token: numbers with blanks, line ends or commas between them."""
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
    except (OSError, ValueError) as error:
        raise ValueError(f"--owner {path}: must be a text file that can be read; got {error}") from error
    for word in words:
        plain = word.isascii() and word.isdigit() and int(word) < ranks
        _require(plain, f"--owner {path}", f"must be ranks in 0..{ranks - 1}", repr(word[:40]))
    _require(len(words) == tokens, f"--owner {path}", f"must be a rank for each of {tokens} tokens", len(words))
    return TokenSplit.from_owner(torch.tensor(list(map(int, words))), ranks)


def _estimate(
    config: SFAConfig, lengths: list[int], name: str, splits: Mapping[str, TokenSplit], weights: WeightStrategy
) -> Estimate:
    shape = MeshShape(cp=splits[name].num_ranks)
    found = estimate(config, lengths, shape, split=splits[name], weights=weights, block_size=PAGE)
    return replace(found, layout=name)


def _print_estimates(
    console: Console,
    args: argparse.Namespace,
    config: SFAConfig,
    lengths: list[int],
    estimates: list[Estimate],
    baseline: Estimate | None,
) -> None:
    requests = f"{len(lengths)} request{'s' if len(lengths) > 1 else ''}"
    best = fastest(estimates)
    lines = [
        f"{args.model}: {config.num_layers} layers, bfloat16, weights {args.weights}",
        f"{sum(lengths)} tokens in {requests} on {args.ranks} ranks, one forward pass",
        f"seconds are a model: {EXAMPLE_MACHINE.name}",
    ]
    console.print(*lines, sep="\n", highlight=False)
    console.print(show_estimates(estimates, baseline=baseline), highlight=False)
    if baseline is not None:
        ratio = baseline.seconds / best.seconds
        console.print(
            f"Tokens dealt out ({best.layout}) are {ratio:.2f} times as fast as heads dealt out.\n", highlight=False
        )
    console.print(f"The ranks of {best.layout}", show_ranks(best), sep="\n", highlight=False)


def _measure(
    console: Console,
    config: SFAConfig,
    lengths: list[int],
    estimates: list[Estimate],
    splits: Mapping[str, TokenSplit],
) -> Mapping[str, Measured]:
    _keep_freed_memory()
    small = {name: miniature(config, lengths, split) for name, split in splits.items()}
    columns = TextColumn("measuring"), BarColumn(), TimeRemainingColumn()
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=ROUNDS)
        measured, rates = measure_ranks(small, repeats=ROUNDS, tick=lambda: progress.advance(task))
    one = small[estimates[0].layout]
    console.print(
        "Measured: one layer of every rank, one after the other, on one core here;",
        f"{sum(map(len, one.sampled))} of {sum(lengths)} queries, {sum(one.lengths)} keys, "
        f"k = {one.config.index_topk}, {one.config.num_attention_heads} heads, {one.config.hidden_size} wide.",
        f"GFLOP/s: projections {_gflops(rates.projections)}, scoring and selection {_gflops(rates.scoring)}, "
        f"attention {_gflops(rates.attention)};",
        "each part of a layout counts, in all, as its operations do.",
        sep="\n",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layout", no_wrap=True)
    for heading in (
        "max/mean\npredicted",
        "max/mean\nmeasured",
        "\napart",
        "seconds of\nslowest rank",
        "of all\nranks",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for counted in estimates:
        seen = measured[counted.layout]
        apart = seen.max_over_mean / counted.max_over_mean - 1
        ratios = f"{counted.max_over_mean:.3f}", f"{seen.max_over_mean:.3f}", f"{apart:+.1%}"
        table.add_row(counted.layout, *ratios, f"{max(seen.seconds):.3f}", f"{sum(seen.seconds):.2f}")
    console.print(table, highlight=False)
    return measured


def _keep_freed_memory() -> None:
    """Tell glibc to hand freed memory out again instead of giving it back; elsewhere do nothing.

    At sizes like these, fresh pages were half of the time and half of the noise.
    """
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mmap_threshold, trim_threshold, top_pad = -3, -1, -2
        for option, value in ((mmap_threshold, 2**25), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
            mallopt(option, value)


def _gflops(rate: float) -> str:
    return f"{rate / 1e9:.3g}"


def _result(estimates: list[Estimate], baseline: Estimate | None, measured: Mapping[str, Measured]) -> dict[str, Any]:
    best = fastest(estimates)
    layouts = [
        {
            "name": one.layout,
            "max_over_mean": one.max_over_mean,
            "predicted_seconds": one.seconds,
            "bytes_sent": one.bytes_sent,
            "bytes_resident": one.bytes_resident,
        }
        for one in estimates
    ]
    result: dict[str, Any] = {
        "layouts": layouts,
        "best": best.layout,
        "cp_over_tp": None if baseline is None else baseline.seconds / best.seconds,
    }
    if measured:
        for entry, one in zip(layouts, estimates, strict=True):
            entry["measured_max_over_mean"] = measured[one.layout].max_over_mean
        result["measured_max_over_mean"] = measured[best.layout].max_over_mean
    return result


def _require(ok: bool, source: str, rule: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{source}: {rule}; got {got}")
