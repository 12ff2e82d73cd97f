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
