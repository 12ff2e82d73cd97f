"""The tests run under annotations: of arrays' shapes in a call, and of everything else."""

from typing import Any

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int
from torch import Tensor

import sfa_functional as sfa
from sfa_functional.precision import require
from sharding import split_tokens
from tests.annotations import has_shapes

SCALED = {"scale": 1.0, "value_dim": 2}


def test_a_tensor_of_another_shape_than_its_annotation_is_refused():
    kv_SE, topk_TK = torch.zeros(5, 4), torch.zeros(3, 2, dtype=torch.int32)
    assert sfa.sparse_attention(torch.zeros(3, 1, 4), kv_SE, topk_TK, **SCALED).out_THL.shape == (3, 1, 2)
    for q_THE in (torch.zeros(3, 4), torch.zeros(2, 1, 4), torch.zeros(3, 1, 5)):
        with pytest.raises(jaxtyping.TypeCheckError):
            sfa.sparse_attention(q_THE, kv_SE, topk_TK, **SCALED)


def test_another_type_than_that_of_an_annotation_without_shapes_is_refused():
    with pytest.raises(BeartypeCallHintViolation):
        require(True, 3, "rule", "got")


def test_unchecked_functions_raise_their_own_errors(unchecked):
    require(True, 3, "rule", "got")
    with pytest.raises(ValueError, match=r"^split_tokens: "):
        split_tokens([3], "two", layout="zigzag")


@pytest.mark.parametrize(
    ("annotation", "shapes"),
    [
        (int, False),
        (Any, False),
        (dict[str, Tensor], False),
        (tuple[int, ...] | None, False),
        ("Float[Tensor, 'T']", True),
        ("Axes", True),
        (Int[Tensor, "T K"], True),
        (list[int] | Int[Tensor, "T K"] | None, True),
        (dict[str, tuple[Float[Tensor, "T"], ...]], True),
    ],
)
def test_shapes_are_found_in_annotations(annotation, shapes):
    assert has_shapes(annotation) == shapes
