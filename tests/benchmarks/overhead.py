"""Measure what evaluation inside training costs: `evaluate_model` of a batch, over a training step on the same batch.

    python tests/benchmarks/overhead.py [--threads N]

The bundled checkpoint, four windows of 512 tokens, k = 64; the quickest of five turns each. A step is forward, backward
and AdamW with the model's attention through this library.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import DeepseekV32ForCausalLM

from sfa_functional import evaluate_model, use_sfa
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text

TURNS = 5
AT_MOST = 0.8
"""Of a training step: what an evaluation with ``rows=256`` may take; above it the exit status is 1."""


def quickest(*functions: Callable[[], object]) -> list[float]:
    """Return the seconds of each function's quickest turn, turns taken one after the other."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(TURNS):
        for function, seconds in zip(functions, times, strict=True):
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
    return [min(seconds) for seconds in times]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    model = DeepseekV32ForCausalLM.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.tensor(list(held_out_text().encode()[:2048])).view(4, 512)

    def step() -> None:
        with use_sfa(model, topk=64):
            model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluation(rows: int | None, layers: list[int] | None = None) -> Callable[[], object]:
        return lambda: evaluate_model(model, [ids], topk=64, rows=rows, layers=layers)

    kinds = {"loss alone": evaluation(1, []), "rows=256": evaluation(256), "all rows": evaluation(None)}
    training, *others = quickest(step, *kinds.values())
    table = Table("evaluation", "seconds", "over a training step", box=None)
    for name, seconds in zip(kinds, others, strict=True):
        table.add_row(name, f"{seconds:.3f}", f"{seconds / training:.2f}")
    Console().print(table, f"a training step: {training:.3f} s", highlight=False)
    sys.exit(others[1] / training > AT_MOST)


if __name__ == "__main__":
    main()
