"""The schemas that the tests declare are those of the vendor's wheel; `make npu-drift` downloads it and runs this."""

import functools
from pathlib import Path

import pytest
import torch

from sfa_functional import npu
from tests.sfa_functional.npu_standins import SCHEMAS


def schemas_in(library: bytes, names: list[str]) -> dict[str, list[str]]:
    """Find every schema of these operators among the strings of a shared library."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for piece in library.split(b"\0"):
        name = piece.split(b"(", 1)[0].decode("ascii", "replace")
        if name in found and b"->" in piece:
            found[name].append(str(torch._C.parse_schema(f"npu::{piece.decode()}")))
    return found


@functools.cache
def _schemas_of_wheel(wheel: Path) -> dict[str, list[str]]:
    return schemas_in((wheel / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes(), list(SCHEMAS))


def test_schemas_are_found_between_zero_bytes_whatever_their_spelling():
    said = "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
    library = b"\x7fELF\0npu_rms_norm\0" + said.encode() + b"\0npu_rms_norm_grad(Tensor x) -> Tensor\0\xff\xfe(\0"
    assert schemas_in(library, ["npu_rms_norm"]) == {"npu_rms_norm": [str(torch._C.parse_schema(f"npu::{said}"))]}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_wheel_declares_an_operator_as_the_vectors_do(name, request):
    wheel = request.config.getoption("--torch-npu-wheel")
    if wheel is None:
        pytest.skip("no --torch-npu-wheel PATH: `make npu-drift` downloads one")
    want = str(torch._C.parse_schema(f"npu::{SCHEMAS[name]['schema']}"))
    assert set(_schemas_of_wheel(Path(wheel))[name]) == {want}


def test_what_the_adapter_calls_is_among_them():
    assert {name for names in npu.OPERATORS.values() for name in names} <= SCHEMAS.keys()
