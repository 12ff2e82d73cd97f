"""The ``sfa`` command: ``sfa eval`` measures a checkpoint's sparse attention, ``sfa layout`` compares layouts.

Bad input ends with one line on standard error and exit code 2; a result file is written beside its place and moved.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from weights.checkpoint import DTYPES as STORED_DTYPES
from weights.checkpoint import Checkpoint, check_layers, open_checkpoint

from . import eval_report as report
from . import hf_evaluate as measure
from .bundled import TINY_CHECKPOINT, held_out_text
from .cli_layout import add_layout
from .config import SFAConfig
from .evaluate_model import evaluate_model
from .hf import layer_params
from .version import __version__
from .whole_file import moved_into_place

PARITY_WINDOWS = 2
"""Window batches on which `sfa eval` compares with transformers, whose dense masks are slow."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exits with 2 and one line on bad input.

    Args:
        argv: arguments without the program's name; None takes those of the process.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        sys.exit(_complain(f"sfa {args.command}: {line}"))
    except KeyboardInterrupt:
        sys.exit(130)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        sys.exit(_complain(f"{self.prog}: {message}"))


def _complain(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sfa", description="DeepSeek Sparse Attention as pure PyTorch functions.")
    parser.add_argument("--version", action="version", version=f"sfa-functional {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "eval",
        help="measure what sparse attention costs a checkpoint",
        description="Run a DSA checkpoint with this library's attention: perplexity dense and at each top-k, what the "
        "indexer and other selectors keep of dense attention, and the difference from transformers' own attention.",
    )
    run.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        default=TINY_CHECKPOINT,
        metavar="CHECKPOINT",
        help="Hugging Face directory of a deepseek_v32 or glm_moe_dsa model; default: the bundled tiny one",
    )
    run.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text; default: held-out topics of pydoc_data")
    run.add_argument("--context", type=int, metavar="N", help="tokens of a window; default: 512, or the model's most")
    run.add_argument(
        "--topk", type=int, nargs="+", metavar="K", help="keys per query; default: 1/16, 1/8 and 1/4 of the context"
    )
    run.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of weights and activations")
    run.add_argument("--json", type=Path, metavar="OUT", help="also write the numbers to this file")
    run.add_argument("--untrained", action="store_true", help="also with indexers re-initialised (seed 0)")
    run.add_argument(
        "--select",
        nargs="+",
        metavar="NAME",
        help="who chooses the keys: indexer, best, window, random, block:N, untrained, or module:function for your own "
        "selector; default: the indexer at every k, best, window and random at one",
    )
    run.add_argument("--index-dtype", choices=report.EIGHT_BITS, help="also with index queries and keys of eight bits")
    run.add_argument("--kv-dtype", choices=report.EIGHT_BITS, help="also with latent keys through packed rows")
    run.add_argument("--rows", type=int, metavar="N", help="measure N queries per layer and batch instead of all")
    run.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw mass, recall and perplexity over k")
    run.set_defaults(run=evaluate_checkpoint)
    add_layout(commands)
    return parser


def evaluate_checkpoint(args: argparse.Namespace) -> None:
    """Run ``sfa eval``: check everything that can be checked from headers, then load, measure, print and write."""
    console = Console()
    _require(args.topk is None or min(args.topk) >= 1, "--topk", "must be >= 1", args.topk and min(args.topk))
    checkpoint = open_checkpoint(args.checkpoint)
    config = _read_config(checkpoint)
    check_layers(checkpoint, config)
    _check_dtypes(checkpoint)
    longest = config.max_position_embeddings
    context = min(512, longest) if args.context is None else args.context
    _require(2 <= context <= longest, "--context", f"must be in 2..{longest}, the model's most", context)
    topks = list(dict.fromkeys(args.topk or [max(1, context // part) for part in (16, 8, 4)]))
    _require(args.rows is None or args.rows >= 1, "--rows", "must be >= 1", args.rows)
    if args.plot is not None:
        report.require_matplotlib()
        _require(args.plot != args.json, "--plot", "must be another file than that of --json", args.plot)
    names = report.names_at(
        topks,
        args.select,
        usual=config.index_topk,
        index_dtype=args.index_dtype,
        kv_dtype=args.kv_dtype,
        untrained=args.untrained,
    )
    runs = {name: report.named_run(name, config) for some in names.values() for name in some}
    with moved_into_place("--json", args.json) as out, moved_into_place("--plot", args.plot) as picture:
        ids = _read_tokens(checkpoint, args.text)
        model = _load_model(checkpoint, DTYPES[args.dtype])
        try:
            result = _measure(model, ids, config=config, context=context, names=names, runs=runs, rows=args.rows)
        except RuntimeError as error:  # whatever torch can't do with this model
            raise ValueError(f"{checkpoint.path}: the model can't be run in {args.dtype}: {error}") from error
        perplexities = [result["perplexity_dense"]]
        perplexities += [run["perplexity"] for runs in result["selectors"].values() for run in runs.values()]
        _require(
            all(map(math.isfinite, perplexities)), str(checkpoint.path), "perplexities must be finite", perplexities
        )
        result = {"checkpoint": str(args.checkpoint), "dtype": args.dtype} | result
        for title, table in _tables(result):
            console.print(title, table, sep="\n", highlight=False)
        if out is not None:
            out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if picture is not None:
            report.plot_report(picture, result)


def _measure(
    model: nn.Module,
    ids: Tensor,
    *,
    config: SFAConfig,
    context: int,
    names: dict[int, list[str]],
    runs: dict[str, report.Run],
    rows: int | None,
) -> dict[str, Any]:
    windows = measure.token_windows(ids, context)
    compared = windows[:PARITY_WINDOWS]
    fresh = measure.untrained_indexers(model, config=config, seed=0)
    steps = len(windows) * (1 + sum(map(len, names.values()))) + len(compared) * len(names)
    columns = TextColumn("{task.description:28}"), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("dense", total=steps)
        tick: Callable[[], None] = lambda: progress.advance(task)  # noqa: E731
        dense = measure.dense_perplexity(model, windows, config=config, tick=tick)
        found: dict[str, dict[str, Any]] = {}
        pairs = []
        for k, some in names.items():
            within = min(k, context)  # more keys than there are tokens are no other computation
            found[str(k)] = {}
            for name in some:
                progress.update(task, description=f"top-{k}, {name}"[:28])
                stats = evaluate_model(
                    model,
                    _ticking(windows, tick),
                    select=runs[name].select,
                    other=runs[name].other,
                    implementation=runs[name].implementation,
                    topk=within,
                    rows=rows,
                    config=config,
                    params_of=fresh if name == report.UNTRAINED else layer_params,
                )
                found[str(k)][name] = report.shares(stats)
            progress.update(task, description=f"top-{k}, transformers")
            pairs.append(measure.parity(model, compared, k=within, tick=tick))
    pooled = measure.combine(pairs)
    trained, untrained = (_by_name(found, name) for name in (report.INDEXER, report.UNTRAINED))
    return {
        "context": context,
        "tokens": sum(w.numel() for w in windows),
        "rows": rows,
        "perplexity_dense": dense,
        "perplexity_at_k": {k: run["perplexity"] for k, run in trained.items()},
        "perplexity_untrained_at_k": {k: run["perplexity"] for k, run in untrained.items()},
        "layers": {k: run["layers"] for k, run in trained.items()},
        "layers_untrained": {k: run["layers"] for k, run in untrained.items()},
        "selectors": found,
        "parity": {
            "max_rel": pooled.max_rel,
            "logits_max_rel": pooled.logits_max_rel,
            "selection_overlap": pooled.selection_overlap,
            "tokens": sum(w.numel() for w in compared),
        },
        "seconds": {"ours": pooled.seconds_ours, "transformers": pooled.seconds_transformers},
    }


def _ticking(windows: Sequence[Tensor], tick: Callable[[], None]) -> Iterator[Tensor]:
    for window in windows:
        yield window
        tick()


def _by_name(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return {k: by_name[name] for k, by_name in found.items() if name in by_name}


def _tables(result: dict[str, Any]) -> list[tuple[str, Table]]:
    """Lay the numbers out for a terminal of 80 columns, each table with its title."""
    pair = result["parity"]
    same = Table(box=box.SIMPLE_HEAD)
    same.add_column("quantity")
    same.add_column("value", justify="right")
    same.add_row("largest difference of a layer, on the same selections", f"{pair['max_rel']:.1e}")
    same.add_row("of the logits, after all layers", f"{pair['logits_max_rel']:.1e}")
    same.add_row("share of its selected keys that ours selects", f"{pair['selection_overlap']:.5f}")
    same.add_row("seconds in attention layers, ours", f"{result['seconds']['ours']:.2f}")
    same.add_row("seconds in attention layers, transformers", f"{result['seconds']['transformers']:.2f}")
    name = Path(result["checkpoint"]).name
    sampled = "" if result["rows"] is None else f"\nqueries measured per layer and batch: {result['rows']}"
    title = f"{name}, {result['tokens']} tokens in windows of {result['context']}, {result['dtype']}{sampled}"
    first, *others = report.selector_tables(result["selectors"], result["perplexity_dense"])
    masses = report.mass_tables("Attention mass kept by the indexer/by the best k keys", result["layers"])
    return [
        (f"{title}\n\n{first[0]}", first[1]),
        *others,
        *masses,
        (f"Beside transformers, {pair['tokens']} tokens", same),
    ]


def _read_config(checkpoint: Checkpoint) -> SFAConfig:
    try:
        return SFAConfig.from_hf(checkpoint.config)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path / 'config.json'}: {error}") from error


def _check_dtypes(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with weights of any layer that would be read as other numbers than they stand for."""
    for key, (dtype, _shape) in checkpoint.tensors.items():
        allowed = f"{key} must be {', '.join(STORED_DTYPES)} (fp8 and integers are not supported in this version)"
        _require(dtype in STORED_DTYPES, str(checkpoint.files[key]), allowed, dtype)


def _read_tokens(checkpoint: Checkpoint, path: Path | None) -> Tensor:
    """Read a text as token numbers: by the checkpoint's tokenizer.json, or byte by byte where it has none."""
    source = "--text" if path is None else f"--text {path}"
    try:
        text = held_out_text() if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source}: must be UTF-8; got byte {error.object[error.start]:#x} at {error.start}"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: must be a file that can be read; got {error}") from error
    tokenizer_file = checkpoint.path / "tokenizer.json"
    if tokenizer_file.exists():
        try:
            from tokenizers import Tokenizer  # comes with transformers
        except ImportError as error:
            raise _without_transformers(error) from error
        try:
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises its base class
            raise ValueError(f"{tokenizer_file}: not a tokenizer that can be read: {error}") from error
        numbers = tokenizer.encode(text, add_special_tokens=False).ids
    else:
        numbers = list(text.encode())
    _require(len(numbers) >= 2, source, "must hold at least two tokens", len(numbers))
    vocabulary = checkpoint.config.get("vocab_size")
    known = isinstance(vocabulary, int) and max(numbers) < vocabulary
    _require(known, source, f"tokens must be below vocab_size {vocabulary}", max(numbers))
    return torch.tensor(numbers)


def _load_model(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """Load a checkpoint into transformers' model class: safetensors only, no code of the checkpoint's own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise _without_transformers(error) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    classes = {
        "deepseek_v32": transformers.DeepseekV32ForCausalLM,
        "glm_moe_dsa": transformers.GlmMoeDsaForCausalLM,
    }
    try:
        model, loading = classes[checkpoint.config["model_type"]].from_pretrained(
            checkpoint.path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="sdpa",
            **({"experts_implementation": "eager"} if dtype == torch.float64 else {}),  # grouped_mm has no float64
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except Exception as error:  # whatever transformers makes of a broken checkpoint, it is one line here
        raise ValueError(f"{checkpoint.path}: transformers can't load it: {error}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(f"{checkpoint.path}: key {missing[0]} is missing ({len(missing)} in all)")
    for key, stored, wanted in sorted(loading["mismatched_keys"]):
        raise ValueError(f"{checkpoint.path}: {key} must have shape {list(wanted)}; got {list(stored)}")
    return model.eval()


def _without_transformers(error: ImportError) -> ValueError:
    return ValueError(f"transformers must be installed: pip install 'sfa-functional[hf]'; got {error}")


def _require(ok: bool, source: str, rule: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{source}: {rule}; got {got}")


if __name__ == "__main__":
    main()
