"""Every public function runs under its jaxtyping annotations: shapes are checked at each call of each test.

``torch.compile(fullgraph=True)`` can't trace the checks, so a process that sets ``SFA_UNCHECKED`` goes without.

Nothing heavy is imported here: the process that deals tests out to others reads this file too, before it starts them.
"""

import importlib
import os

import jaxtyping
import pytest

from tests.annotations import check_annotations

if "SFA_UNCHECKED" not in os.environ:
    check_annotations()


def pytest_addoption(parser):
    """Add what `make npu-drift` passes."""
    parser.addoption("--torch-npu-wheel", metavar="PATH", help="folder of an unzipped torch_npu wheel, read, never run")


def pytest_collectstart():
    """Import what the packages would import first, before them.

    While the hook loads one of the packages' modules it hides all bytecode files, so that everything which that module
    is first to import is compiled from source: half the time of collecting, where that is ``torch._dynamo``.
    """
    importlib.import_module("torch._dynamo")


def pytest_collection_modifyitems(config, items):
    """Leave out tests marked ``everything`` unless ``SFA_ALL=1`` asks for them, as `make test-all` does."""
    if os.environ.get("SFA_ALL") != "1":
        left_out = [item for item in items if item.get_closest_marker("everything")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def _one_seed():
    """Give every test the same random state, and one thread: `make test` runs one process per core."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _wide_products():
    """Take bfloat16's products in float32 on every CPU, so that one tolerance holds; test_operators has the others."""
    from sfa_functional import precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "_multiplies_bfloat16", lambda device: False)
        yield


@pytest.fixture
def unchecked():
    """Switch the annotations off, so that a test reaches the library's own one-line errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
