"""Measure index scores on bfloat16, fp8 and int8 keys: seconds, bytes of a key, and recall of the float32 selection.

    python tests/benchmarks/index_scores.py

16 queries of V3.2's indexer (64 heads of 128) against 16384 keys, one thread. Codes are cast to float32 for the
product: this is what scoring on quantised keys costs here, not what an eight-bit matrix unit would make of it.
"""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import sfa_functional as sfa
from sfa_functional.quantize import quantize_index, quantized_index_scores

QUERIES, KEYS, HEADS, WIDTH, K = 16, 16_384, 64, 128, 2048
ROUNDS = 5


def quickest(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the seconds of the quickest of several calls, and the result."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
    return min(seconds), result


def main() -> None:
    """Print one row per format."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q_TJI, k_SI = torch.randn(QUERIES, HEADS, WIDTH), torch.randn(KEYS, WIDTH)
    w_TJ = torch.randn(QUERIES, HEADS)
    ranges = torch.zeros(QUERIES).long(), torch.full((QUERIES,), KEYS)
    want_TK = sfa.select_topk(sfa.index_scores(q_TJI, k_SI, w_TJ), *ranges, k=K)
    narrow = q_TJI.bfloat16(), k_SI.bfloat16()
    calls: dict[str, tuple[int, Callable[[], torch.Tensor]]] = {
        "bfloat16": (2 * WIDTH, lambda: sfa.index_scores(*narrow, w_TJ))
    }
    for name in ("fp8", "int8"):
        q, k = (quantize_index(x, dtype=name) for x in narrow)
        calls[name] = WIDTH + 4, lambda q=q, k=k: quantized_index_scores(q, k, w_TJ)
    table = Table("keys", "ms", "over bfloat16", "bytes a key", "recall", title="Index scores, 16 by 16384")
    first = None
    for name, (size, call) in calls.items():
        seconds, score_TS = quickest(call)
        first = seconds if first is None else first
        recall = sfa.selection_overlap(sfa.select_topk(score_TS, *ranges, k=K), want_TK).mean()
        table.add_row(name, f"{seconds * 1e3:.0f}", f"{seconds / first:.2f}", str(size), f"{recall:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
