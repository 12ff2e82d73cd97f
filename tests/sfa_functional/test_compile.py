"""``torch.compile(fullgraph=True)`` takes the public functions whole and gives what eager gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP = """
import warnings
from dataclasses import replace
import torch
import sfa_functional as sfa

warnings.simplefilter("error")
torch.manual_seed(0)
config = replace(sfa.TINY, index_topk=5)
params = sfa.init_params(config)
x_TD = torch.randn(12, 64)
batch = sfa.Batch.from_lengths([8, 4])
table = sfa.allocate_blocks([8, 4], 4)
paged = sfa.Batch.from_lengths([8, 4], block_table=table, block_size=4)
cache = sfa.init_cache(config, num_blocks=4, block_size=4, dtype=torch.float32)
rope = sfa.rope_cos_sin(batch.position_T, config)
q_THE, q_latent_TQ, kv_SE = sfa.latent_projections(params, x_TD, *rope, config=config)
q_TJI = sfa.index_queries(params.indexer, q_latent_TQ, *rope, config=config)
k_SI = sfa.index_keys(params.indexer, x_TD, *rope, config=config)
w_TJ = sfa.index_weights(params.indexer, x_TD, config=config)
topk_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, batch.start_T, batch.end_T, k=5)
named = {"scale": config.softmax_scale, "value_dim": 24}


def check(function, *tensors):
    eager, compiled = (
        [x for x in torch.utils._pytree.tree_leaves(f(*tensors)) if x is not None]
        for f in (function, torch.compile(function, fullgraph=True, backend="eager"))
    )
    assert len(eager) == len(compiled) > 0
    for a, b in zip(compiled, eager):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

"""
CHECKS = {
    "sparse_attention": "check(lambda q, kv, topk: sfa.sparse_attention(q, kv, topk, **named), q_THE, kv_SE, topk_TK)",
    "dense_attention": "check(lambda q, kv, a, b: sfa.dense_attention(q, kv, a, b, **named), q_THE, kv_SE, "
    "batch.start_T, batch.end_T)",
    "lightning_indexer": "check(lambda *xs: sfa.lightning_indexer(*xs, k=5), q_TJI, k_SI, w_TJ, batch.start_T, "
    "batch.end_T)",
    "sfa_layer": "check(lambda p, x, b: sfa.sfa_layer(p, x, b, config=config), params, x_TD, batch)",
    "sfa_layer with a cache": "check(lambda p, x, b, c: sfa.sfa_layer(p, x, b, config=config, cache=c), params, x_TD, "
    "paged, cache)",
    "indexer_kl": "check(lambda *xs: sfa.indexer_kl(*xs, scale=0.3), q_TJI, k_SI, w_TJ, q_THE, kv_SE, batch.start_T, "
    "batch.end_T)",
    "sfa_layer, gradients": """
def gradients(x):
    leaf = x.clone().requires_grad_()
    step = torch.compile(sfa.sfa_layer, fullgraph=True, backend="aot_eager") if compiled else sfa.sfa_layer
    return torch.autograd.grad(step(params, leaf, batch, config=config).y_TD.sin().sum(), leaf)[0]

warnings.filterwarnings("ignore", message=".*should not be instantiated")  # Dynamo's own, of any Function
compiled = False
want = gradients(x_TD)
compiled = True
torch.testing.assert_close(gradients(x_TD), want, rtol=1e-5, atol=1e-5)
""",
    "sfa_layer, decode": """
def decode(step):
    table, x = sfa.allocate_blocks([16, 12], 4), torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    pool = sfa.init_cache(config, num_blocks=7, block_size=4, dtype=torch.float32)
    steps, outputs = sfa.Batch.from_lengths([8, 4], block_table=table, block_size=4), []
    pool = sfa.sfa_layer(params, x_TD, steps, config=config, cache=pool, donate=True).cache
    for i in range(4):
        steps = steps.next([1, 1])
        with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            out = step(params, x, steps, config=config, cache=pool, donate=True)
        pool = out.cache
        outputs += [out.y_TD, out.selection_TK]
    return [*outputs, pool.kv, pool.index_k]

torch.compiler.reset()
compiled = decode(torch.compile(sfa.sfa_layer, fullgraph=True, backend="aot_eager"))
for a, b in zip(compiled, decode(sfa.sfa_layer)):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
""",
}


def test_compiled_functions_equal_eager_ones():
    """All in one process, without the annotations: those can't be traced."""
    script = SETUP + "\n".join(f"print({name!r}, flush=True)\n{check}" for name, check in CHECKS.items())
    environment = os.environ | {"SFA_UNCHECKED": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    assert done.stdout.split("\n")[:-1] == list(CHECKS)


def test_importing_the_packages_does_not_import_the_compiler():
    """It takes as long again as all the rest."""
    script = "import sys, sfa_functional, sharding, weights; print('torch._dynamo' in sys.modules)"
    environment = os.environ | {"SFA_UNCHECKED": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
