"""Products in a dtype that the device has no instructions for: taken in float32, rounded once, casts not kept."""

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from sfa_functional import precision


def _whole(*shape):
    """Make small whole numbers: their sums are exact in float32, whatever the order."""
    return torch.randint(-8, 9, shape).bfloat16()


@pytest.mark.parametrize("cast_bytes", [1, 1000, precision.CAST_BYTES])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_bfloat16_products_are_the_exact_ones_rounded_once(monkeypatch, batch, cast_bytes):
    monkeypatch.setattr(precision, "CAST_BYTES", cast_bytes)
    a, b, d = _whole(*batch, 40, 300), _whole(*batch, 300, 70), _whole(*batch, 40, 70)
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    y = precision.matmul(*leaves)
    got = y, *torch.autograd.grad(y, leaves, d)
    want = [x.bfloat16() for x in (a.double() @ b.double(), d.double() @ b.double().mT, a.double().mT @ d.double())]
    # dA is rounded as each part of B has given its share, in float32: these numbers are exact there too
    assert all(torch.equal(x, exact) for x, exact in zip(got, want, strict=True))
    assert (want[0].double() != a.double() @ b.double()).any()


def test_a_projection_is_the_product_with_the_transposed_weight():
    x, w = _whole(33, 20), _whole(9, 20)
    assert torch.equal(precision.linear(x, w), (x.double() @ w.double().T).bfloat16())
    x, w = torch.randn(33, 20), torch.randn(9, 20)
    assert torch.equal(precision.linear(x, w), linear(x, w))


def test_no_cast_is_kept_for_the_backward():
    x, w = _whole(40, 30).requires_grad_(), _whole(20, 30).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.dtype) or x, lambda x: x):
        precision.linear(x, w)
    assert saved == [torch.bfloat16] * 2


def test_few_rows_and_devices_with_instructions_are_left_to_torch(monkeypatch):
    a, b = _whole(precision.CAST_ROWS, 30), _whole(20, 30).mT
    assert precision._worth_casting(a, b)
    assert not precision._worth_casting(a[1:], b)
    assert precision._worth_casting(a[1:], b.contiguous())
    assert not precision._worth_casting(a.float(), b.float())
    assert not precision._worth_casting(a, b.float())
    monkeypatch.setattr(precision, "_multiplies_bfloat16", lambda device: True)
    assert not precision._worth_casting(a, b)


def test_a_traced_projection_has_no_guard_on_its_rows():
    class Projection(torch.nn.Module):
        def forward(self, x, w):
            return precision.linear(x, w)

    rows = torch.export.Dim("T", min=2, max=64)
    traced = torch.export.export(Projection(), (_whole(40, 8), _whole(6, 8)), dynamic_shapes=({0: rows}, None)).module()
    x, w = _whole(20, 8), _whole(6, 8)
    assert torch.equal(traced(x, w), linear(x, w))


def test_the_backward_casts_no_more_at_a_time_than_the_forward(monkeypatch):
    monkeypatch.setattr(precision, "CAST_BYTES", 4 * 512 * 16)
    x, w = _whole(32, 512).requires_grad_(), _whole(256, 512).requires_grad_()
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                largest.append(result.numel() * 4)
            return result

    with Watch():
        precision.linear(x, w).sum().backward()
    assert max(largest) <= max(precision.CAST_BYTES, 4 * 32 * 512)


def test_gradients_of_a_batch_are_those_of_its_members():
    a, b = _whole(4, 40, 8), _whole(4, 8, 6)

    def loss(a, b):
        return precision.matmul(a, b).float().square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(a, b)
    want = [torch.func.grad(loss, argnums=(0, 1))(*pair) for pair in zip(a, b, strict=True)]
    for x, parts in zip(got, zip(*want, strict=True), strict=True):
        assert torch.equal(x, torch.stack(parts))
