"""Real torchrun, over loopback: the script of the README's cell, and what happens when one of its ranks fails.

Four ranks of the README's script run in every ``make test``; ``SFA_ALL=1`` adds two ranks, faults, and a sample of the
tests of simulated ranks. Starting Python and torch in each process takes most of the time.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 300.0


def torchrun(size: int, script: str, tmp_path: Path) -> tuple[int, list[tuple[str, str]]]:
    """Run a script on so many ranks; return the exit code and each rank's stdout and stderr. Nothing may be left."""
    path = tmp_path / f"script_{time.monotonic_ns()}.py"
    path.write_text(script)
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["--redirects=3", f"--log-dir={logs}", str(path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(path).encode() in _read(p)]
    assert not left, left
    outputs = [
        tuple(next(iter(logs.glob(f"*/attempt_0/{rank}/{name}.log"))).read_text() for name in ("stdout", "stderr"))
        for rank in range(size)
    ]
    assert outputs, done.stderr
    return done.returncode, outputs


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def cell() -> str:
    """Return the README's cell that runs the layer on simulated ranks."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if "context_parallel_layer" in block]
    return found


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.everything), 4])
def test_the_notebook_cell_prints_the_same_under_torchrun(size, tmp_path):
    """No line is changed but the mesh."""
    line, imagined = "mesh = sharding.{}\n", f"simulated_mesh(MeshShape(cp={size}))"
    before = cell().replace(line.format("simulated_mesh(MeshShape(cp=16))"), line.format(imagined))
    after = before.replace(line.format(imagined), line.format(f'distributed_mesh(MeshShape(cp={size}), "cpu")'))
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    assert sum(a != b for a, b in pairs) == 1
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(before, {})
    code, outputs = torchrun(size, after, tmp_path)
    assert code == 0, outputs
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert size != 4 or f"```\n{printed.getvalue()}```" in readme  # what it says below the command
    for stdout, stderr in outputs:
        assert stdout == printed.getvalue()
        assert stderr == ""


SAMPLE = """
import sys
from tests.sharding.processes import run_here
from tests.sharding.test_real_ranks import PLACES, sample
size = {size}
for place in PLACES:
    print(len(run_here(size, sample(place, size)[:6])), place)
"""


@pytest.mark.everything
@pytest.mark.parametrize("size", [2, 4])
def test_tests_of_simulated_ranks_pass_under_torchrun(size, tmp_path):
    code, outputs = torchrun(size, SAMPLE.format(size=size), tmp_path)
    assert code == 0, outputs
    assert all(stdout == outputs[0][0] and stdout.count("\n") == 6 for stdout, _ in outputs)


FAULTY = """
import os, signal, sys, time
import torch
from sharding import MeshShape, P, distributed_mesh, shard_map

mesh = distributed_mesh(MeshShape(cp=3), "cpu", timeout=20.0)


def body(comm, x):
    if comm["cp"].rank == 1:
        {fault}
    return comm["cp"].all_reduce(x)


begin = time.monotonic()
try:
    print(shard_map(body, mesh, in_specs=P(), out_specs=P())(torch.ones(1)))
finally:
    print(f"ended after {{time.monotonic() - begin:.0f}} s", flush=True)
"""


@pytest.mark.everything
@pytest.mark.parametrize("fault", ["raise ValueError('no luck')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_fault_ends_all_ranks_and_torchrun(fault, tmp_path):
    """Who raises is named; who is killed is torchrun's to report, which ends the others with SIGTERM."""
    begin = time.monotonic()
    code, outputs = torchrun(3, FAULTY.format(fault=fault), tmp_path)
    assert code == 1
    assert time.monotonic() - begin < 120  # most of it is starting Python
    for rank in (0, 2):
        stdout, stderr = outputs[rank]
        assert "tensor" not in stdout
        if "raise" in fault and stdout:  # else torchrun was faster
            assert f"rank 1 raised ValueError: no luck in the forward pass of body; rank {rank} waited" in stderr
