"""Operators: the same under every transform, differentiable once, and never larger than a tile."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sfa_functional as sfa
from sfa_functional import blockwise_dense, blockwise_indexer, blockwise_kl, blockwise_sparse, precision

ROOT = Path(__file__).parents[2]
NAMED = {"scale": 0.7, "value_dim": 4}
TOPK_TK = torch.tensor([[3, -1, 0], [-1, -1, 9], [1, 2, 3]], dtype=torch.int32)
RANGES = torch.tensor([0, 2, -1]), torch.tensor([2, 2, 9])


def _attend(kind, implementation=None):
    def run(q_THE, kv_SE):
        if kind == "sparse":
            return sfa.sparse_attention(q_THE, kv_SE, TOPK_TK, implementation=implementation, **NAMED).out_THL
        return sfa.dense_attention(q_THE, kv_SE, *RANGES, implementation=implementation, **NAMED).out_THL

    return run


TARGET = [torch.randn(*shape, dtype=torch.float64) for shape in ((3, 2), (3, 2, 5), (7, 5))]


def _kl(q_TJI, k_SI):
    return sfa.indexer_kl(q_TJI, k_SI, *TARGET, *RANGES, scale=0.5, topk_TK=TOPK_TK)


FUNCTIONS = {"sparse_attention": _attend("sparse"), "dense_attention": _attend("dense"), "indexer_kl": _kl}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def _inputs():
    return torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)


# --- transforms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_jacrev_equals_that_of_the_reference(kind):
    inputs = _inputs()
    got, want = (torch.func.jacrev(_attend(kind, name), argnums=(0, 1))(*inputs) for name in (None, "reference"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every_function
def test_gradients_of_a_batch_equal_those_of_its_members(name):
    """The gradient of shared rows is one per member under vmap, and their sum outside of it."""
    q_TXY, rows_SY = _inputs()
    q_BTXY = torch.stack([q_TXY, -q_TXY, 2 * q_TXY])

    def loss(q, rows):
        return FUNCTIONS[name](q, rows).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(q_BTXY, rows_SY)
    whole = torch.func.grad(lambda q, rows: torch.func.vmap(loss, (0, None))(q, rows).sum(), argnums=(0, 1))
    for b in range(3):
        for got, want in zip(each, torch.func.grad(loss, argnums=(0, 1))(q_BTXY[b], rows_SY), strict=True):
            torch.testing.assert_close(got[b], want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(whole(q_BTXY, rows_SY)[1], each[1].sum(0), rtol=1e-10, atol=1e-10)


def test_gradients_of_the_layer_equal_finite_differences():
    config = replace(sfa.TINY, index_topk=2, hidden_size=8, num_attention_heads=2, kv_lora_rank=6, q_lora_rank=5)
    params = sfa.init_params(config, dtype=torch.float64)
    batch, x_TD = sfa.Batch.from_lengths([3]), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    selection_TK = torch.tensor([[0, -1], [1, 0], [2, 0]], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda x: sfa.sfa_layer(params, x, batch, config=config, selection=selection_TK).y_TD, (x_TD,)
    )


@every_function
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where forward mode is set up
def test_what_cannot_be_differentiated_is_refused_in_one_line(name):
    q_TXY, rows_SY = _inputs()

    def once(q):
        return FUNCTIONS[name](q, rows_SY).square().sum()

    for forward in (lambda: torch.func.jvp(once, (q_TXY,), (q_TXY,)), lambda: torch.func.jacfwd(once)(q_TXY)):
        with pytest.raises(NotImplementedError, match=r"^You must implement the jvp function .* forward mode AD\.$"):
            forward()
    message = rf"^{name}: gradients must be taken once; got a second derivative$"
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda q: torch.func.grad(once)(q).sum())(q_TXY)
    leaf = q_TXY.requires_grad_()
    (gradient,) = torch.autograd.grad(once(leaf), leaf, create_graph=True)
    with pytest.raises(ValueError, match=message):
        gradient.sum().backward()


COMPILED = """
import warnings
import torch
import sfa_functional as sfa

torch.manual_seed(0)
q_THE, kv_SE = torch.randn(3, 2, 6), torch.randn(7, 6)
topk_TK = torch.tensor([[3, -1, 0], [-1, -1, 9], [1, 2, 3]], dtype=torch.int32)
ranges = torch.tensor([0, 2, -1]), torch.tensor([2, 2, 9])
named = {"scale": 0.7, "value_dim": 4}
losses = {
    "sparse": lambda q, kv: sfa.sparse_attention(q, kv, topk_TK, **named).out_THL.square().sum(),
    "dense": lambda q, kv: sfa.dense_attention(q, kv, *ranges, **named).out_THL.square().sum(),
    "kl": lambda q, kv: sfa.indexer_kl(q, kv, q[..., 0].detach(), q.detach(), kv.detach(), *ranges, scale=1.0).sum(),
}
for name, loss in losses.items():
    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = q_THE.clone().requires_grad_(), kv_SE.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(*leaves), leaves))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)
    try:
        torch.compile(torch.func.grad(loss), fullgraph=True, backend="eager")(q_THE, kv_SE)
        raise AssertionError("torch.func.grad inside of torch.compile gave a result")
    except torch._dynamo.exc.TorchRuntimeError as error:
        assert "torch.func.grad inside of torch.compile is not possible; use backward()" in str(error)


class Module(torch.nn.Module):
    def forward(self, q, kv, topk):
        return sfa.sparse_attention(q, kv, topk, **named).out_THL


exported = torch.export.export(Module(), (q_THE, kv_SE, topk_TK))
assert sum("sparse_attention" in str(node.target) for node in exported.graph.nodes) == 1
torch.testing.assert_close(exported.module()(q_THE, kv_SE, topk_TK), Module()(q_THE, kv_SE, topk_TK))
print("done")
"""


def test_compiled_gradients_equal_eager_ones_and_an_export_holds_one_node():
    """In a process without the annotations: those can't be traced."""
    environment = os.environ | {"SFA_UNCHECKED": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.stdout == "done\n", done.stderr


# --- bounds --------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Note the bytes of the largest tensor that any operation returns; it doesn't look inside of an operator."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() * x.element_size() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def test_attention_makes_no_tensor_of_all_queries_and_their_keys():
    """T·K·E, T·H·K and T·H·S are 16 MiB and more here; inputs, results and tiles stay below 5 MiB."""
    count, heads, keys, width = 256, 32, 512, 32
    q_THE, kv_SE = torch.randn(count, heads, width), torch.randn(keys, width)
    topk_TK = torch.stack([torch.randperm(keys) for _ in range(count)]).to(torch.int32)
    zero_T = torch.zeros(count, dtype=torch.int64)
    d_out, d_lse = torch.randn(count, heads, width), torch.randn(count, heads)
    named = {"scale": 0.3, "workspace_bytes": 64 << 20}
    ranges = zero_T, zero_T + keys, None
    with LargestTensor() as seen:
        blockwise_sparse.sparse_attention(q_THE, kv_SE, topk_TK, value_dim=width, **named)
        blockwise_sparse.sparse_attention_backward(q_THE, kv_SE, topk_TK, d_out, d_lse, **named)
        out_lse = blockwise_dense.dense_attention(q_THE, kv_SE, *ranges, value_dim=width, **named)
        blockwise_dense.dense_attention_backward(q_THE, kv_SE, *ranges, *out_lse, d_out, d_lse, **named)
    assert q_THE.numel() * 4 <= seen.largest <= 5 << 20


@pytest.mark.parametrize("selected", [False, True], ids=["all keys", "a selection"])
def test_indexer_and_loss_make_no_tensor_of_all_queries_keys_and_heads(selected):
    """T·S·J, T·K·I and T·H·K are 16 MiB and more here, T·S is 1 MiB; tiles stay below the workspace."""
    count, heads, keys, width = 256, 32, 1024, 32
    q_TJI, w_TJ, k_SI = torch.randn(count, heads, width), torch.randn(count, heads), torch.randn(keys, width)
    q_THE, kv_SE = torch.randn(count, heads, width), torch.randn(keys, width)
    ranges = torch.zeros(count, dtype=torch.int64), torch.arange(keys - count, keys)
    named = {"workspace_bytes": 4 << 20}
    topk_TK = torch.stack([torch.randperm(keys)[:512] for _ in range(count)]).to(torch.int32) if selected else None
    with LargestTensor() as seen:
        blockwise_indexer.lightning_indexer(q_TJI, k_SI, w_TJ, *ranges, None, k=512, **named)
        inputs = q_TJI, k_SI, w_TJ, q_THE, kv_SE, *ranges, topk_TK
        blockwise_kl.indexer_kl(*inputs, scale=0.3, **named)
        blockwise_kl.indexer_kl_backward(*inputs, torch.randn(count), scale=0.3, **named)
    assert q_TJI.numel() * 4 <= seen.largest <= 4 << 20


@pytest.mark.parametrize("workspace", [1, 10**5])
def test_a_smaller_workspace_makes_smaller_tensors_and_the_same_results(workspace):
    count, heads, keys, width = 9, 3, 65, 33
    q_THE, kv_SE = torch.randn(count, heads, width).double(), torch.randn(keys, width).double()
    topk_TK = torch.stack([torch.randperm(keys)[:41] for _ in range(count)]).to(torch.int32)
    want = sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.3, value_dim=31)
    got = sfa.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.3, value_dim=31, workspace_bytes=workspace)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with LargestTensor() as seen:
        blockwise_sparse.sparse_attention(q_THE, kv_SE, topk_TK, scale=0.3, value_dim=31, workspace_bytes=workspace)
    assert seen.largest <= max(41 * width * 8, q_THE.numel() * 8, workspace)


def test_backward_keeps_inputs_selection_and_results_alone():
    q_THE, kv_SE = torch.randn(16, 4, 6, requires_grad=True), torch.randn(64, 6, requires_grad=True)
    topk_TK = torch.stack([torch.randperm(64)[:32] for _ in range(16)]).to(torch.int32)
    zero_T = torch.zeros(16, dtype=torch.int64)
    saved = []

    def note(x):
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        sfa.sparse_attention(q_THE, kv_SE, topk_TK, **NAMED)
        assert sorted(saved) == sorted([16 * 4 * 6, 64 * 6, 16 * 32])
        saved.clear()
        sfa.dense_attention(q_THE, kv_SE, zero_T, zero_T + 64, **NAMED)
        assert sorted(saved) == sorted([16 * 4 * 6, 64 * 6, 16, 16, 16 * 4 * 4, 16 * 4])


# --- sums and rounding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_the_gradient_of_a_key_sums_all_queries_in_float32(kind):
    """2048 queries share two keys: added up in bfloat16, the sum would stop growing at 256."""
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        q_THE, kv_SE = torch.zeros(2048, 1, 2, dtype=dtype), torch.eye(2, dtype=dtype).requires_grad_()
        if kind == "sparse":
            both = torch.tensor([[0, 1]] * 2048, dtype=torch.int32)
            out = sfa.sparse_attention(q_THE, kv_SE, both, scale=1.0, value_dim=2)
        else:
            zero_T = torch.zeros(2048, dtype=torch.int64)
            out = sfa.dense_attention(q_THE, kv_SE, zero_T, zero_T + 2, scale=1.0, value_dim=2)
        out.out_THL.sum().backward()
        assert kv_SE.grad.dtype == dtype
        gradients.append(kv_SE.grad.double())
    torch.testing.assert_close(gradients[0], torch.full((2, 2), 1024.0).double())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2**-8, atol=0)


def test_where_bfloat16_is_multiplied_results_stay_within_its_rounding(monkeypatch):
    """As on a device with such instructions: logits come rounded to 8 bits, sums go on in float32."""
    q_THE, kv_SE = torch.randn(20, 4, 32).bfloat16() / 4, torch.randn(50, 32).bfloat16()
    topk_TK = torch.stack([torch.randperm(50)[:24] for _ in range(20)]).to(torch.int32)
    zero_T = torch.zeros(20, dtype=torch.int64)
    q_TJI, k_SI, w_TJ = torch.randn(20, 16, 32).bfloat16(), torch.randn(400, 32).bfloat16(), torch.randn(20, 16)

    def results():
        q, kv = q_THE.clone().requires_grad_(), kv_SE.clone().requires_grad_()
        sparse = sfa.sparse_attention(q, kv, topk_TK, scale=0.3, value_dim=30)
        dense = sfa.dense_attention(q, kv, zero_T, zero_T + 50, scale=0.3, value_dim=30)
        loss = sparse.out_THL.float().square().sum() + dense.out_THL.float().square().sum()
        grads = torch.autograd.grad(loss, (q, kv))
        chosen = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, zero_T, zero_T + 400, k=50)
        return [*sparse, *dense, *grads], chosen

    exact, exact_TK = results()
    monkeypatch.setattr(precision, "_multiplies_bfloat16", lambda device: True)
    rounded, rounded_TK = results()
    assert any(not torch.equal(a, b) for a, b in zip(rounded, exact, strict=True))
    for a, b in zip(rounded, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()
    assert sfa.selection_overlap(rounded_TK, exact_TK).mean() > 0.98


# --- determinism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_the_same_run_after_run(dtype):
    q_THE, kv_SE = torch.randn(40, 4, 32).to(dtype), torch.randn(300, 32).to(dtype)
    topk_TK = torch.stack([torch.randperm(300)[:100] for _ in range(40)]).to(torch.int32)
    zero_T = torch.zeros(40, dtype=torch.int64)

    def run():
        q, kv = q_THE.clone().requires_grad_(), kv_SE.clone().requires_grad_()
        sparse = sfa.sparse_attention(q, kv, topk_TK, scale=0.3, value_dim=24)
        dense = sfa.dense_attention(q, kv, zero_T, zero_T + 300, scale=0.3, value_dim=24)
        kl_T = sfa.indexer_kl(q, kv, q[..., 0].detach(), q, kv, zero_T, zero_T + 300, scale=0.3, topk_TK=topk_TK)
        loss = sparse.out_THL.sum() + dense.lse_TH.sum() + kl_T.sum()
        return [*sparse, *dense, kl_T, *torch.autograd.grad(loss, (q, kv))]

    for again in (run(), run()):
        assert all(torch.equal(a, b) for a, b in zip(again, run(), strict=True))


def test_selections_do_not_depend_on_threads_or_on_how_queries_are_split():
    """Scores are sums of small integers, exact in any order, so that many keys tie."""
    q_TJI, k_SI = torch.randint(-2, 3, (40, 16, 8)).float(), torch.randint(-2, 3, (3001, 8)).float()
    w_TJ, start_T = torch.randint(-1, 2, (40, 16)).float(), torch.zeros(40, dtype=torch.int64)
    end_T = torch.arange(2000, 2040)
    inputs = q_TJI, w_TJ, start_T, end_T

    def select(rows):
        q, w, start, end = (x[rows] for x in inputs)
        return sfa.lightning_indexer(q, k_SI, w, start, end, k=700)

    want_TK = sfa.lightning_indexer(q_TJI, k_SI, w_TJ, start_T, end_T, k=700, implementation="reference")
    torch.set_num_threads(2)
    for parts in ([slice(0, 40)], [slice(0, 7), slice(7, 40)], [slice(t, t + 1) for t in range(40)]):
        assert torch.equal(torch.cat([select(rows) for rows in parts]), want_TK)
    torch.set_num_threads(1)
    assert torch.equal(select(slice(0, 40)), want_TK)


def test_the_quick_choice_equals_the_general_one():
    """Where nothing ties at the cut the k-th value decides; a tie, a NaN or a short range takes the other way."""
    zero_T, end_T = torch.zeros(4, dtype=torch.int64), torch.tensor([50, 50, 50, 50])
    for change in (None, "tie", "nan", "inf", "short"):
        score_TS, ends = torch.randn(4, 50), end_T.clone()
        if change == "tie":
            score_TS[1, 7:30] = score_TS[1, 7]
        elif change == "short":
            ends[2] = 5
        elif change is not None:
            score_TS[0, 3], score_TS[2, 10:45] = -math.inf, math.nan if change == "nan" else -math.inf
        got_TK = blockwise_indexer.choose(score_TS.clone(), zero_T, ends, k=12)
        want_TK = sfa.select_topk(score_TS, zero_T, ends, k=12)
        assert torch.equal(got_TK.to(torch.int32), want_TK)
