"""Measure how near the library comes to the machine's limit; every row first checks its result against the reference.

    python tests/benchmarks/run.py                      # all rows, some of minutes (make bench)
    python tests/benchmarks/run.py --quick              # without the long ones
    python tests/benchmarks/run.py --only indexer       # rows whose name holds the word
    python tests/benchmarks/run.py --json results.json

What is compared is measured in turns, and the quickest turn of each counts: other work on the machine slows both. A row
that fails its check stops the run. README.md beside this file says what the rows mean and what they last gave.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sfa_functional as sfa
from sfa_functional import blockwise_indexer

E, L, K = 576, 512, 2048
SCALE = 0.1
MEASURED = Path(__file__).with_name("measured.py")
"""What is measured in a process of its own."""


class Row(NamedTuple):
    """One measured number and its bound, if it has one."""

    name: str
    measure: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ok(self) -> bool:
        """Say whether the value keeps its bound; a value without one is reported."""
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    def as_json(self) -> dict[str, Any]:
        """Return the row without the bound that it doesn't have."""
        bounds = {"at_least": self.at_least, "at_most": self.at_most}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return {"name": self.name, "measure": self.measure, "value": self.value, **given, "ok": self.ok}


CLOCK: Callable[[], float] = time.perf_counter
"""The clock, or with --cpu-time what this process has used: for one thread on a machine that others use too."""


def seconds(*functions: Callable[[], Any], turns: int = 5) -> list[float]:
    """Run functions in turns and return the quickest run of each."""
    best = [float("inf")] * len(functions)
    for _ in range(turns + 1):
        for i, function in enumerate(functions):
            begin = CLOCK()
            function()
            best[i] = min(best[i], CLOCK() - begin)
    return best


def square_products(dtype: torch.dtype, flops: float) -> tuple[Callable[[], Any], float]:
    """Return products of two square matrices, and their FLOPs.

    About as many as what they are compared with: a short run finds a quiet moment more easily than a long one.
    """
    side = square(dtype)
    a, b = torch.randn(2, side, side).to(dtype)
    count = max(1, round(flops / (2 * side**3))) if dtype == torch.float32 else 1
    return lambda: [a @ b for _ in range(count)], 2 * side**3 * count


def square(dtype: torch.dtype) -> int:
    """Return the side of the square matrices; a CPU without bfloat16 instructions takes long for those."""
    return 2048 if dtype == torch.float32 else 768


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Refuse a result that is further from the reference than rounding."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error < 10 * torch.finfo(dtype).eps, f"off by {error}"


# --- attention -----------------------------------------------------------------------------------------------------


def attention_inputs(heads: int, dtype: torch.dtype, queries: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries, 16K key rows and a selection of 2048 of them for each query."""
    q_THE, kv_SE = torch.randn(queries, heads, E).to(dtype) / 8, torch.randn(16384, E).to(dtype)
    topk_TK = torch.stack([torch.randperm(16384)[:K].sort().values for _ in range(queries)]).to(torch.int32)
    return q_THE, kv_SE, topk_TK


def sparse_attention(heads: int, dtype: torch.dtype, at_least: float) -> Iterator[Row]:
    """Compare with the two products alone, on rows already gathered."""
    q_THE, kv_SE, topk_TK = attention_inputs(heads, dtype)
    named = {"scale": SCALE, "value_dim": L}
    got = sfa.sparse_attention(q_THE, kv_SE, topk_TK, **named).out_THL[:2]
    close(got, sfa.sparse_attention(q_THE[:2], kv_SE, topk_TK[:2], implementation="reference", **named).out_THL, dtype)
    rows = [kv_SE[topk_K.long()] for topk_K in topk_TK]
    p_HK = torch.rand(heads, K).to(dtype)

    def products() -> None:
        for q_HE, rows_KE in zip(q_THE, rows, strict=True):
            _ = q_HE @ rows_KE.T
            _ = p_HK @ rows_KE[:, :L]

    turns = 5 if dtype == torch.float32 else 1
    flops = 2 * len(q_THE) * heads * K * (E + L)
    squares, square_flops = square_products(dtype, flops)
    bare, ours, square_time = seconds(
        products, lambda: sfa.sparse_attention(q_THE, kv_SE, topk_TK, **named), squares, turns=turns
    )
    name = f"sparse attention H={heads} {str(dtype)[6:]}"
    yield Row(name, "time of the two products over ours", bare / ours, at_least)
    yield Row(name, "rate over square matmul", (flops / ours) / (square_flops / square_time))


def backward() -> Iterator[Row]:
    """Compare forward and backward with forward."""
    q_THE, kv_SE, topk_TK = attention_inputs(128, torch.float32, queries=32)
    leaves = q_THE.requires_grad_(), kv_SE.requires_grad_()

    def gradients(queries: slice, implementation: Any = None) -> tuple[Tensor, ...]:
        out = sfa.sparse_attention(
            q_THE[queries], kv_SE, topk_TK[queries], scale=SCALE, value_dim=L, implementation=implementation
        )
        return torch.autograd.grad(out.out_THL.square().sum() + out.lse_TH.sum(), leaves)

    for got, want in zip(gradients(slice(2)), gradients(slice(2), "reference"), strict=True):
        close(got, want, torch.float32)
    with torch.no_grad():
        alone, _ = attention_inputs(128, torch.float32, queries=32)[:2]
    forward, both = seconds(
        lambda: sfa.sparse_attention(alone, kv_SE.detach(), topk_TK, scale=SCALE, value_dim=L),
        lambda: gradients(slice(None)),
        turns=3,
    )
    yield Row("sparse attention, gradients", "forward and backward over forward", both / forward, at_most=4.2)


# --- the indexer ---------------------------------------------------------------------------------------------------


def indexer(keys: int, dtype: torch.dtype, at_least: float) -> Iterator[Row]:
    """Compare scoring and exact selection with a square product."""
    heads, width, queries = 64, 128, 64
    q_TJI, k_SI = torch.randn(queries, heads, width).to(dtype), torch.randn(keys, width).to(dtype)
    w_TJ = torch.randn(queries, heads)
    start_T, end_T = torch.zeros(queries, dtype=torch.int64), keys - queries + 1 + torch.arange(queries)
    got_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=K)
    want_TK = sfa.lightning_indexer(q_TJI[:2], k_SI, w_TJ[:2], start_T[:2], end_T[:2], k=K, implementation="reference")
    overlap = sfa.selection_overlap(got_TK[:2], want_TK).min()
    assert overlap > (0.999 if dtype == torch.float32 else 0.997), f"overlap {overlap}"
    turns = 3 if dtype == torch.float32 else 1
    flops = 2 * queries * keys * heads * width
    squares, square_flops = square_products(dtype, flops)
    ours, square_time = seconds(
        lambda: sfa.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=K), squares, turns=turns
    )
    name = f"indexer and top-k S={keys // 1024}K {str(dtype)[6:]}"
    yield Row(name, "rate over square matmul", (flops / ours) / (square_flops / square_time), at_least)


def decode_pairs() -> Iterator[Row]:
    """Count the pairs scored for 64 requests that decode one token each."""
    lengths = torch.linspace(100, 4000, 64).long().tolist()
    config = replace(sfa.TINY, index_topk=64)
    table = sfa.allocate_blocks(lengths, 64)
    batch = sfa.Batch.from_lengths([1] * 64, lengths, block_table=table, block_size=64)
    pool_SI = torch.randn(int(table.max() + 1) * 64, config.index_head_dim)
    q_TJI = torch.randn(64, config.index_n_heads, config.index_head_dim)
    w_TJ = torch.randn(64, config.index_n_heads)
    inputs = q_TJI, pool_SI, w_TJ, batch.start_T, batch.end_T
    got_TK = sfa.lightning_indexer(*inputs, k=64, row_S=batch.row_S)
    some = [x if x is pool_SI else x[-2:] for x in inputs]
    want_TK = sfa.lightning_indexer(*some, k=64, row_S=batch.row_S, implementation="reference")
    assert sfa.selection_overlap(got_TK[-2:], want_TK).min() > 0.98
    scored, score = 0, blockwise_indexer.tile_scores

    def count(q: Tensor, k: Tensor, w: Tensor, span: tuple[int, int], row_S: Tensor | None) -> Tensor:
        nonlocal scored
        scored += len(q) * (span[1] - span[0])
        return score(q, k, w, span, row_S)

    blockwise_indexer.tile_scores = count
    sfa.lightning_indexer(*inputs, k=64, row_S=batch.row_S)
    blockwise_indexer.tile_scores = score
    visible = int((batch.end_T - batch.start_T).sum())
    yield Row("64 decode requests", "scored over visible pairs", scored / visible, at_most=1.3)


# --- the layer -----------------------------------------------------------------------------------------------------


def decode(length: int) -> Iterator[Row]:
    """Compare one decode step's bytes per second with a copy's."""
    config, dtype, block = sfa.GLM_5, torch.bfloat16, 64
    params = sfa.init_params(config, dtype=dtype)
    table = sfa.allocate_blocks([length], block)
    batch = sfa.Batch.from_lengths([1], [length], block_table=table, block_size=block)
    cache = sfa.init_cache(config, num_blocks=table.shape[1], block_size=block, dtype=dtype)
    for pool in (cache.kv, cache.index_k):
        pool.normal_()
    x_TD = torch.randn(1, config.hidden_size).to(dtype)

    def step(implementation: Any = None) -> sfa.LayerOutput:
        return sfa.sfa_layer(
            params, x_TD, batch, config=config, cache=cache, donate=True, implementation=implementation
        )

    with torch.no_grad():
        got, want = step(), step("reference")
        close(got.y_TD, want.y_TD, dtype)
        read = sum(x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(params))
        read += 2 * (length * config.index_head_dim + K * E)
        source = torch.zeros(2**26, dtype=torch.int32)
        copied = torch.empty_like(source)
        ours, copying = seconds(step, lambda: copied.copy_(source), turns=5)
    rate, limit = read / ours, source.numel() * 4 / copying
    yield Row(
        f"decode, GLM-5 layer, S={length // 1024}K bfloat16", "bytes read per second over copy", rate / limit, 0.5
    )


def cache_write() -> Iterator[Row]:
    """Compare a step's write with the same through sorted slots, each row written twice."""
    pages, rows = torch.zeros(1024, 64, E), torch.randn(4096, E)
    cache = sfa.JointCache(kv=pages, index_k=None)
    slot_T = torch.randperm(65536)[:4096]
    written = sfa.write_cache(cache, rows, None, slot_T, donate=True)
    assert torch.equal(written.kv.flatten(0, 1)[slot_T], rows)

    def twice() -> None:
        order = slot_T.argsort()
        pool = pages.flatten(0, 1)
        pool.index_copy_(0, slot_T[order], rows[order])
        pool.index_copy_(0, slot_T[order], rows[order])

    ours, sorted_twice = seconds(lambda: sfa.write_cache(cache, rows, None, slot_T, donate=True), twice, turns=20)
    yield Row("cache write", "time over two writes through sorted slots", ours / sorted_twice, at_most=0.6)


# --- processes of their own ----------------------------------------------------------------------------------------


def measured(*arguments: object, **environment: str) -> float:
    """Run `measured.py` in a process of its own and return the number that it prints last."""
    clock = ["--cpu-time"] if CLOCK is time.process_time else []
    command = [sys.executable, str(MEASURED), *map(str, arguments), *clock]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1])


def memory(function: str) -> Iterator[Row]:
    """Watch anonymous memory during one call at S = 65536, beyond inputs and result."""
    grown = measured("memory", function, MALLOC_MMAP_THRESHOLD_="65536")
    yield Row(f"memory of {function}, S=64K, T=512", "MB beyond inputs and result", grown, at_most=256)


def prefill(tokens: int, at_least: float) -> Iterator[Row]:
    """Compare the layer's part between the projections with transformers'."""
    value = measured("transformers", tokens) / measured("ours", tokens)
    yield Row(f"GLM-5 prefill {tokens} float32, between projections", "transformers' time over ours", value, at_least)


def growth() -> Iterator[Row]:
    """Compare twice the tokens with half of them."""
    value = measured("ours", 16384) / measured("ours", 8192)
    yield Row("growth, GLM-5 prefill 8K to 16K", "time over time", value, at_most=2.6)


def whole_layer(dtype: str) -> Iterator[Row]:
    """Compare the whole layer with transformers'."""
    value = measured("transformers", 8192, "--whole", "--dtype", dtype)
    value /= measured("ours", 8192, "--whole", "--dtype", dtype)
    yield Row(f"GLM-5 layer, 8192 {dtype}", "transformers' time over ours", value, 2.0)


FLOAT, BF16 = torch.float32, torch.bfloat16
QUICK: dict[str, Callable[[], Iterator[Row]]] = {
    "sparse 128": lambda: sparse_attention(128, FLOAT, 0.80),
    "sparse 64": lambda: sparse_attention(64, FLOAT, 0.75),
    "backward": backward,
    "indexer 16K": lambda: indexer(16384, FLOAT, 0.75),
    "pairs": decode_pairs,
    "cache write": cache_write,
    "decode 8K": lambda: decode(8192),
}
LONG: dict[str, Callable[[], Iterator[Row]]] = {
    "sparse 128 bfloat16": lambda: sparse_attention(128, BF16, 0.75),
    "sparse 64 bfloat16": lambda: sparse_attention(64, BF16, 0.70),
    "indexer 64K": lambda: indexer(65536, FLOAT, 0.75),
    "indexer 16K bfloat16": lambda: indexer(16384, BF16, 0.60),
    "indexer 64K bfloat16": lambda: indexer(65536, BF16, 0.60),
    "decode 64K": lambda: decode(65536),
    "memory indexer": lambda: memory("lightning_indexer"),
    "memory sparse": lambda: memory("sparse_attention"),
    "prefill 4096": lambda: prefill(4096, 2.5),
    "prefill 8192": lambda: prefill(8192, 4.0),
    "growth": growth,
    "whole layer": lambda: whole_layer("float32"),
    "whole layer bfloat16": lambda: whole_layer("bfloat16"),
}


def machine() -> str:
    """Name the machine, its threads and torch."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    threads, instructions = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{model}, {threads} threads, {instructions}, torch {torch.__version__}"


def main() -> int:
    """Run the rows asked for, print each as it comes, and return 1 if one misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="leave out the long rows")
    parser.add_argument("--only", default="", help="rows whose name holds this word")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--cpu-time", action="store_true", help="count this process's seconds, not the clock's")
    options = parser.parse_args()
    global CLOCK
    CLOCK = time.process_time if options.cpu_time else time.perf_counter
    torch.manual_seed(0)
    chosen = QUICK if options.quick else QUICK | LONG
    rows = []
    print(machine(), flush=True)
    for name, measure in chosen.items():
        if options.only not in name:
            continue
        for row in measure():
            bound = f">= {row.at_least}" if row.at_least is not None else f"<= {row.at_most}" if row.at_most else ""
            mark = "ok" if row.ok else "MISSED"
            print(f"{row.name:48} {row.measure:42} {row.value:8.3f} {bound:8} {mark if bound else ''}", flush=True)
            rows.append(row)
    if options.json:
        content = {"machine": machine(), "rows": [row.as_json() for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
