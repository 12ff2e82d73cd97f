"""Measure a ring of layers: how much of the fetching is hidden behind compute, and how much memory it takes.

    python tests/benchmarks/ring.py             # overlap: sleep stands in for an accelerator's work
    python tests/benchmarks/ring.py --memory    # 8 layers of GLM-5 size; writes 2.8 GB and deletes them again

Overlap is measured from disk and from another process by gloo. A layer's compute is a sleep, longer than its fetch;
what the ring's calls take beside it is not hidden.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import sfa_functional as sfa
import weights
from sfa_functional import HF_NAMES, SFAConfig
from sfa_functional.params import NORM_FIELDS, named_fields, param_shapes
from sharding import distributed_collectives

GLM_5_LAYERS = replace(sfa.GLM_5, indexer_types=("full",) * 8)
"""Eight layers of GLM-5 size, 349 MB each in bfloat16."""

OVERLAP_LAYERS = replace(sfa.TINY, hidden_size=6144, num_attention_heads=64, v_head_dim=64, indexer_types=("full",) * 6)
"""Six layers of 104 MB in float32, a third of a GLM-5 layer: a fetch takes long against a sleep's own error."""

COMPUTE = 1.5
"""How many times as long as its fetch a layer's compute takes."""

ROUNDS = 5
"""Passes of which the quickest counts: the one least disturbed by what else the machine does."""


def write_layers(directory: Path, config: SFAConfig, dtype: torch.dtype) -> int:
    """Write a checkpoint file by file, one per layer, and never hold more than one; layer i is full of i + 1.

    Returns:
        The bytes of the largest layer.
    """
    directory.mkdir()
    weight_map, largest = {}, 0
    for layer in range(config.num_layers):
        tensors = {}
        for field, shape in param_shapes(config, layer=layer).items():
            kept = torch.float32 if field in NORM_FIELDS else dtype
            tensors[f"model.layers.{layer}.self_attn.{HF_NAMES[field]}"] = torch.full(shape, layer + 1.0, dtype=kept)
        largest = max(largest, sum(x.numel() * x.element_size() for x in tensors.values()))
        name = f"layer-{layer}.safetensors"
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return largest


def anonymous_bytes() -> int:
    """Return the bytes of this process's resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Growth:
    """By how many bytes anonymous memory had grown at most."""

    peak = 0


@contextmanager
def anonymous_growth(interval: float = 0.002) -> Iterator[Growth]:
    """Watch anonymous memory from another thread; memory that is free but was not given back doesn't hide growth."""
    growth, over = Growth(), threading.Event()
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()

    def sample() -> None:
        growth.peak = max(growth.peak, anonymous_bytes() - before)

    def watch() -> None:
        while not over.wait(interval):
            sample()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield growth
        sample()
    finally:
        over.set()
        watcher.join()


def stream(source: weights.Source, *, prefetch: int) -> None:
    """Look at every layer of a checkpoint that `write_layers` wrote."""
    for layer, params in weights.stream_layers(source, prefetch=prefetch):
        for name, x in named_fields(params):
            corners = x.flatten()[[0, x.numel() // 2, -1]]
            assert corners.eq(layer + 1).all(), (layer, name)


class Overlap(NamedTuple):
    """Mean seconds per layer: of a fetch that nothing hides, and what the ring's calls took beside compute."""

    prefetch: int
    fetch: float
    take: float
    start_next: float

    @property
    def hidden(self) -> float:
        """Share of a fetch that took no time of the caller's."""
        return 1 - (self.take + self.start_next) / self.fetch


def one_pass(
    source: weights.Source, *, prefetch: int, compute: float, before: Callable[[], object]
) -> tuple[float, float]:
    """Return what `take` and `start_next` took per layer; compute is a sleep in between.

    A pass without compute goes first, so that no slot's memory is new to the system; then ``before()`` prepares the
    pass that counts.
    """
    count = len(source.layers)
    ring = weights.open_ring(source, prefetch=prefetch, passes=2)
    taking = starting = 0.0
    for step in range(2 * count):
        if step == count:
            before()
        begin = time.perf_counter()
        _, ring = weights.take(ring, ring.layer)
        taken = time.perf_counter()
        ring = weights.start_next(ring)
        if step >= count:
            taking, starting = taking + taken - begin, starting + time.perf_counter() - taken
        if step >= count - prefetch:
            time.sleep(compute)
    weights.close_ring(ring)
    return taking / count, starting / count


def measure_overlap(
    source: weights.Source, *, before: Callable[[], object], agree: Callable[[float], float] = float
) -> list[Overlap]:
    """Measure a source at prefetch 0, 1 and 2.

    Args:
        source: of the layers.
        before: prepares a pass.
        agree: makes one number of what each rank brings.
    """

    def quickest(prefetch: int, compute: float) -> tuple[float, float]:
        passes = (one_pass(source, prefetch=prefetch, compute=compute, before=before) for _ in range(ROUNDS))
        return min(passes, key=sum)

    fetch = agree(sum(quickest(0, 0.0)))
    return [Overlap(prefetch, fetch, *quickest(prefetch, COMPUTE * fetch)) for prefetch in (0, 1, 2)]


def from_disk(directory: Path) -> list[Overlap]:
    """Measure reading from files that the page cache has dropped, where the system lets go of them."""
    write_layers(directory, OVERLAP_LAYERS, torch.float32)
    source = weights.from_checkpoint(directory, config=OVERLAP_LAYERS)

    def drop_cache() -> None:
        for file in directory.glob("*.safetensors"):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    return measure_overlap(source, before=drop_cache)


def from_process(directory: Path) -> list[Overlap]:
    """Measure broadcasts by gloo between two processes, as rank 0 sees them."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=_rank, args=(rank, directory / "store", sender)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        if not receiver.poll(300):
            raise TimeoutError("the two processes have not answered for 300 s")
        return receiver.recv()
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(rank: int, store: Path, sender: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    config = OVERLAP_LAYERS
    layers = [sfa.init_params(config, layer=layer) for layer in range(config.num_layers)]
    group = distributed_collectives(dist.new_group())
    source = weights.from_owners(group, weights.owned_layers(layers, rank, 2))
    del layers

    def longest(seconds: float) -> float:
        bar = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(bar, dist.ReduceOp.MAX)
        return bar.item()

    rows = measure_overlap(source, before=dist.barrier, agree=longest)
    if rank == 0:
        sender.send(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(directory: Path, config: SFAConfig, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Return (prefetch, growth of anonymous memory, bytes of a layer)."""
    largest = write_layers(directory, config, dtype)
    source = weights.from_checkpoint(directory, config=config, dtype=dtype)
    rows = []
    for prefetch in (0, 1, 2):
        with anonymous_growth() as growth:
            stream(source, prefetch=prefetch)
        rows.append((prefetch, growth.peak, largest))
    return rows


def main() -> None:
    """Measure one of the two and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of overlap")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if wanted.memory:
            table = Table("prefetch", "growth, MB", "slots, MB", "growth / slots", title="anonymous memory", box=None)
            for prefetch, growth, layer in measure_memory(Path(scratch) / "model", GLM_5_LAYERS, torch.bfloat16):
                slots = (prefetch + 1) * layer
                numbers = f"{growth / 1e6:.1f}", f"{slots / 1e6:.1f}", f"{growth / slots:.3f}"
                table.add_row(str(prefetch), *numbers)
        else:
            headings = "from", "prefetch", "a fetch, ms", "take, ms", "start_next, ms", "hidden"
            table = Table(*headings, title="fetching behind compute", box=None)
            for name, measure in (("disk", from_disk), ("gloo, 2 processes", from_process)):
                for row in measure(Path(scratch) / "model"):
                    times = (f"{seconds * 1e3:.1f}" for seconds in (row.fetch, row.take, row.start_next))
                    table.add_row(name, str(row.prefetch), *times, f"{row.hidden:.1%}")
        Console().print(table)


if __name__ == "__main__":
    main()
