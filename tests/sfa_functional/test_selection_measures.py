"""Attention mass and overlap of selections equal their definitions, query by query."""

import math

import pytest
import torch

import sfa_functional as sfa


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("pool", [False, True])
def test_attention_mass_is_the_selected_share_of_the_softmax(implementation, pool):
    q_THE, kv_SE = torch.randn(5, 3, 6, dtype=torch.float64), torch.randn(14, 6, dtype=torch.float64)
    row_S = torch.randperm(14)[:9] if pool else None
    start_T, end_T = torch.tensor([0, 2, 4, 5, -1]), torch.tensor([9, 6, 5, 5, 40])
    topk_TK = torch.tensor([[0, 8, 4], [5, -1, 3], [4, -1, -1], [-1, -1, -1], [2, 1, 0]], dtype=torch.int32)
    rows_SE = kv_SE if row_S is None else kv_SE[row_S]
    got_T = sfa.attention_mass(
        q_THE, kv_SE, topk_TK, start_T, end_T, scale=0.6, row_S=row_S, implementation=implementation
    )
    for t, mass in enumerate(got_T.tolist()):
        seen = range(max(int(start_T[t]), 0), min(int(end_T[t]), len(rows_SE)))
        if not seen:
            assert math.isnan(mass)
            continue
        weight_HS = torch.softmax(0.6 * q_THE[t] @ rows_SE[list(seen)].T, -1)
        kept = [seen.index(s) for s in topk_TK[t].tolist() if s >= 0]
        assert mass == pytest.approx(weight_HS[:, kept].sum(-1).mean().item(), rel=1e-12)
    assert got_T[2].item() == pytest.approx(1.0)


def test_nothing_selected_keeps_no_mass():
    q_THE, kv_SE, none_TK = torch.randn(1, 2, 3), torch.randn(4, 3), torch.full((1, 2), -1, dtype=torch.int32)
    got_T = sfa.attention_mass(q_THE, kv_SE, none_TK, torch.tensor([0]), torch.tensor([4]), scale=1.0)
    assert got_T.tolist() == [0.0]


@pytest.mark.parametrize(("width_a", "width_b"), [(5, 5), (3, 7), (8, 2), (0, 4), (4, 0), (0, 0)])
def test_selection_overlap_equals_pythons_sets(width_a, width_b):
    def draw(width):
        rows = [(torch.randperm(9)[:width] - 1).tolist() for _ in range(60)]
        return torch.tensor(rows, dtype=torch.int32).view(60, width)

    a_TK, b_TK = draw(width_a), draw(width_b)
    for got, a, b in zip(sfa.selection_overlap(a_TK, b_TK).tolist(), a_TK.tolist(), b_TK.tolist(), strict=True):
        a, b = {s for s in a if s >= 0}, {s for s in b if s >= 0}
        assert got == pytest.approx(len(a & b) / len(b) if b else 1.0, abs=1e-6)


def test_unused_entries_of_any_kind_do_not_overlap():
    a_TK = torch.tensor([[-1, 3, -5]], dtype=torch.int32)
    b_TK = torch.tensor([[-5, -1, 3, 4]], dtype=torch.int32)
    assert sfa.selection_overlap(a_TK, b_TK).tolist() == [0.5]


def test_selection_overlap_refuses_different_queries(unchecked):
    with pytest.raises(ValueError, match=r"^selection_overlap: a and b must have one length; got 3$"):
        sfa.selection_overlap(torch.zeros(2, 1, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32))
