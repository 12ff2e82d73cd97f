"""What ``sfa eval`` shows: selectors by name, tables for 80 columns, and a picture of mass, recall and perplexity."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table

from .config import SFAConfig
from .evaluate_model import ModelStats
from .implementation import Implementation
from .packed import packed_attention
from .precision import require
from .selection_stats import SelectionStats
from .selectors import Selector, best_keys, block_topk, quantized_indexer, random_keys, window

INDEXER, UNTRAINED = "indexer", "untrained"
"""Names of what is no selector of its own: the model's indexers, and fresh ones in their place."""
BESIDE = ("best", "window", "random")
"""What `sfa eval` compares the indexer with, at one k, where nothing else is asked for."""
EIGHT_BITS = ("fp8", "int8")
COLUMNS = ("mass", "best_mass", "recall", "kl", "overlap")


class Run(NamedTuple):
    """What one row of the report runs."""

    select: Selector | None = None
    other: Selector | None = None  # for the overlap
    implementation: Implementation = None


def names_at(
    topks: list[int],
    asked: list[str] | None,
    *,
    usual: int,
    index_dtype: str | None,
    kv_dtype: str | None,
    untrained: bool,
) -> dict[int, list[str]]:
    """Say which selectors are run at which k, in the order shown.

    Args:
        topks: numbers of keys.
        asked: names that are run at every k; None is the indexer everywhere, and `BESIDE` at one k.
        usual: the k for `BESIDE`, if it is among them; else the middle one.
        index_dtype: add the indexer on keys of eight bits everywhere, as they are and rotated.
        kv_dtype: add attention to packed latent keys of eight bits everywhere.
        untrained: add fresh indexers everywhere.
    """
    added = [f"indexer:{index_dtype}", f"hadamard:{index_dtype}"] if index_dtype else []
    added += [f"kv:{kv_dtype}"] if kv_dtype else []
    added += [UNTRAINED] if untrained else []
    one = usual if usual in topks else sorted(topks)[len(topks) // 2]
    names = {}
    for k in topks:
        some = [INDEXER, *(BESIDE if k == one else ())] if asked is None else asked
        names[k] = list(dict.fromkeys([*some, *added]))
    return names


def named_run(name: str, config: SFAConfig) -> Run:
    """Return what is run under a name.

    Args:
        name: ``indexer``, ``untrained``, ``best``, ``window``, ``random``, ``block:N`` (blocks of N keys),
            ``indexer:fp8`` or ``indexer:int8`` (index queries and keys of eight bits), ``hadamard:fp8`` or
            ``hadamard:int8`` (the same, rotated first), ``kv:fp8`` or ``kv:int8`` (latent keys through the packed row),
            or ``module:function`` for a selector of the user's own, imported from the working directory or the path.
        config: gives `best_keys` the softmax's scale.

    Returns:
        `Run`; `random_keys` with seed 0.

    Raises:
        ValueError: an unknown name, or a function that can't be imported.
    """
    head, _, rest = name.partition(":")
    match head:
        case "indexer" | "untrained" if not rest:
            return Run()
        case "best" if not rest:
            return Run(best_keys(config.softmax_scale))
        case "window" if not rest:
            return Run(window)
        case "random" if not rest:
            return Run(random_keys(torch.Generator().manual_seed(0)))
        case "block":
            known = rest.isascii() and rest.isdigit() and len(rest) < 10 and int(rest) >= 1
            require(known, "--select", "a block must have its number of keys, as in block:16", name)
            return Run(block_topk(int(rest)))
        case "indexer" | "hadamard" | "kv":
            require(rest in EIGHT_BITS, "--select", f"must be {head}:fp8 or {head}:int8", name)
            code: Any = rest
            if head == "kv":
                return Run(implementation=packed_attention(dtype=code))
            return Run(quantized_indexer(code, hadamard=head == "hadamard"), other=_unrounded)
    rule = "must be indexer, best, window, random, untrained, block:N or module:function"
    require(bool(rest), "--select", rule, name)
    return Run(_imported(name, head, rest))


def _unrounded(**compared: Any) -> Any:
    """Choose as the indexer does on what was not rounded; a layer that shares a selection has nothing to compare."""
    return None if compared["q_TJI"] is None else block_topk(1)(**compared)


def _imported(name: str, module: str, function: str) -> Selector:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise ValueError(f"--select: {name} must be importable; got {type(error).__name__}: {error}") from error
    finally:
        sys.path[:] = before
    if not callable(found):
        raise ValueError(f"--select: {name} must be a function of its module; got {type(found).__name__}")

    def select(**compared: Any) -> Any:
        try:
            return found(**compared)
        except Exception as error:
            raise ValueError(f"--select: {name} must run; got {type(error).__name__}: {error}") from error

    return select


def shares(stats: ModelStats) -> dict[str, Any]:
    """Return the numbers of one run: perplexity, and over all layers and for each, the metrics that are defined.

    Where no query sees more than k keys, the selection is all that there is: masses and recall are 1, kl is left out.
    """
    return {
        "perplexity": stats.perplexity,
        **_metrics(stats.all_layers),
        "layers": [_metrics(part) for part in stats.layers.values()],
    }


def _metrics(stats: SelectionStats) -> dict[str, float]:
    defined, found = stats.means(), {}
    for metric in COLUMNS:
        if metric in defined:
            found[metric], error = stats.mean(metric)
            if error > 0:
                found[f"{metric}_standard_error"] = error
        elif metric in ("mass", "best_mass", "recall"):
            found[metric] = 1.0
    return found


def selector_tables(selectors: Mapping[str, Mapping[str, Any]], dense: float) -> list[tuple[str, Table]]:
    """Lay out one table per k: a row per selector, dense attention first.

    Args:
        selectors: by k, then by name, as `shares` returns them.
        dense: perplexity of dense attention.
    """
    tables = []
    for k, runs in selectors.items():
        rounded = any("overlap" in run for run in runs.values())
        headings = "keys chosen by", "perplexity", "vs dense", "mass", "recall", "KL"
        table = plain_table(*headings, *(["overlap"] if rounded else []))
        table.add_row("all (dense)", f"{dense:.3f}", "", "1.0000", "", "", *([""] if rounded else []))
        for name, run in runs.items():
            kl = f"{run['kl']:.4f}" if "kl" in run and name in (INDEXER, UNTRAINED) else ""
            over = f"{run['perplexity'] / dense - 1:+.2%}"
            numbers = [f"{run['perplexity']:.3f}", over, f"{run['mass']:.4f}", f"{run['recall']:.4f}", kl]
            if rounded:
                numbers.append(f"{run['overlap']:.4f}" if "overlap" in run else "")
            table.add_row(name if len(name) <= 15 else f"…{name[-14:]}", *numbers)
        tables.append((f"k = {k}", table))
    return tables


def mass_tables(title: str, layers: Mapping[str, list[dict[str, float]]]) -> list[tuple[str, Table]]:
    """Lay out the mass kept and the best possible, a row per layer, a column per k, at most four to a table."""
    tables, ks = [], list(layers)
    for some in (ks[first : first + 4] for first in range(0, len(ks), 4)):
        table = plain_table("layer", *(f"k = {k}" for k in some))
        for layer, rows in enumerate(zip(*(layers[k] for k in some), strict=True)):
            table.add_row(str(layer), *(f"{row['mass']:.4f}/{row['best_mass']:.4f}" for row in rows))
        tables.append((title, table))
    return tables


def plain_table(*headings: str) -> Table:
    """Return an empty table whose columns are set flush right."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def require_matplotlib() -> None:
    """Refuse to draw where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: matplotlib must be installed: pip install 'sfa-functional[plot]'; got none")


def plot_report(path: Path, result: Mapping[str, Any]) -> None:
    """Draw mass kept and recall over k by layer, and perplexity over k by selector, into one PNG.

    Args:
        path: where to.
        result: what `sfa eval` writes as JSON.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    selectors = result["selectors"]
    ks = [int(k) for k in selectors]
    names = list(dict.fromkeys(name for runs in selectors.values() for name in runs))
    first = INDEXER if INDEXER in names else names[0]  # what is run everywhere
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    mass, recall, perplexity = figure.subplots(1, 3)
    layers = len(result["selectors"][str(ks[0])][first]["layers"])
    for layer in range(layers):
        runs = [selectors[str(k)][first]["layers"][layer] for k in ks]
        color = f"C{layer % 10}" if layers <= 10 else (0.2, 0.3, 0.9 * layer / layers)
        label = f"layer {layer}" if layers <= 10 or layer in (0, layers - 1) else None
        mass.plot(ks, [run["mass"] for run in runs], "o-", color=color, label=label)
        mass.plot(ks, [run["best_mass"] for run in runs], "--", color=color, linewidth=1)
        recall.plot(ks, [run["recall"] for run in runs], "o-", color=color, label=label)
    for name in names:
        some = [k for k in ks if name in selectors[str(k)]]
        perplexity.plot(some, [selectors[str(k)][name]["perplexity"] for k in some], "o-", label=name)
    perplexity.axhline(result["perplexity_dense"], color="gray", linestyle=":", label="dense")
    titles = f"attention mass kept by {first} (dashed: best k)", "share of the best k chosen", "perplexity"
    for axis, title in zip((mass, recall, perplexity), titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("keys per query")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    perplexity.set_yscale("log")
    low, high = perplexity.get_ylim()
    ticks = [value for value in (1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500) if low <= value <= high]
    perplexity.set_yticks(ticks, [f"{value:g}" for value in ticks])
    perplexity.minorticks_off()
    figure.savefig(path, dpi=130, format="png")
