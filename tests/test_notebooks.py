"""Notebooks are stored without outputs, say what they claim, and use public names only; `make notebooks` runs them."""

import ast
import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = ("sfa_functional", "sharding", "weights")
BESIDE = ("sfa_functional.hf", "sfa_functional.bundled")
"""Modules whose public names may be imported from where they are; all others come from a package's top."""


def faults(notebook, name, readme):
    """Return every rule that a notebook breaks, one line each."""
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    found = []
    if any(cell["outputs"] for cell in code):
        found.append("outputs are stored")
    if any(cell["execution_count"] is not None for cell in code):
        found.append("an execution count is stored")
    if not 10 <= len(cells) <= 20:
        found.append(f"there are {len(cells)} cells")
    if not cells or cells[0]["cell_type"] != "markdown" or not source(cells[0]).startswith("# "):
        found.append("the first cell is no title")
    if f"(notebooks/{name})" not in readme:
        found.append("README does not link it")
    trees = [ast.parse(plain(source(cell))) for cell in code]
    if not trees or not any(isinstance(node, ast.Assert) for node in ast.walk(trees[-1])):
        found.append("the last code cell asserts nothing")
    return found + [fault for tree in trees for fault in private(tree)] + unknown(trees)


def source(cell):
    """Return a cell's text, which is stored as one string or as lines."""
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def plain(text):
    """Return a cell's Python without the lines that are IPython's own."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in text.splitlines())


def private(tree):
    """Return the names with a leading underscore; a lone one, for what is not used, is none, nor is ``__file__``."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=found) | ast.Attribute(attr=found) | ast.alias(name=found) | ast.keyword(arg=str(found)):
                pass
            case _:
                continue
        for part in found.split("."):
            if part.startswith("_") and part.strip("_") and not part.endswith("__"):
                yield f"{part} is private"


def unknown(trees):
    """Return imports of modules that are not for users, and names that a package does not export."""
    found, packages = [], {}
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] not in OURS:
                    continue
                if alias.name not in OURS + BESIDE:
                    found.append(f"{alias.name} is not for users")
                packages[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            if node.module not in OURS + BESIDE:
                found.append(f"{node.module} is not for users")
                continue
            for alias in node.names:
                if f"{node.module}.{alias.name}" in BESIDE:
                    packages[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                elif alias.name not in public(node.module):
                    found.append(f"{node.module} has no public {alias.name}")
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in packages:
            module = packages[ast.unparse(node.value)]
            if node.attr not in public(module) and f"{module}.{node.attr}" not in BESIDE:
                found.append(f"{module} has no public {node.attr}")
    return found


def public(module):
    """Return what a module exports; of those without ``__all__``, what is defined there."""
    loaded = importlib.import_module(module)
    if module in OURS:
        return set(loaded.__all__)
    own = {name for name, value in vars(loaded).items() if getattr(value, "__module__", module) in (module, "pathlib")}
    own |= {name for name, value in vars(loaded).items() if isinstance(value, Path)}
    return {name for name in own if not name.startswith("_")}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_every_rule(path):
    assert faults(json.loads(path.read_text(encoding="utf-8")), path.name, README) == []


def code(text, **changed):
    return {"cell_type": "code", "source": text, "outputs": [], "execution_count": None} | changed


def made(*middle, first="# A title\n", last="assert 1 < 2", count=12):
    title = {"cell_type": "markdown", "source": [first]}
    fill = [code("x = 1")] * (count - 2 - len(middle))
    return {"cells": [title, *fill, *middle, code(last)]}


GOOD = """%matplotlib inline
import sfa_functional as sfa
import sfa_functional.hf
import sharding, weights, torch
from sfa_functional import hf, use_sfa
from sfa_functional.bundled import TINY_CHECKPOINT, held_out_text
from sfa_functional.hf import module_config
from sharding import split_tokens

sfa.sfa_layer, sharding.P, weights.take, hf.module_config, sfa.hf.layer_params, torch.nn.functional, __name__
_, (first, *_) = 1, (2, 3)
"""
LINKED = "[mine](notebooks/mine.ipynb)"


def test_a_good_notebook_breaks_no_rule():
    assert faults(made(code(GOOD)), "mine.ipynb", LINKED) == []
    assert faults(made(count=10), "mine.ipynb", LINKED) == faults(made(count=20), "mine.ipynb", LINKED) == []


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (made(code("x = 1", outputs=[{"output_type": "stream"}])), "outputs are stored"),
        (made(code("x = 1", execution_count=3)), "an execution count is stored"),
        (made(count=9), "there are 9 cells"),
        (made(count=21), "there are 21 cells"),
        (made(first="## No title\n"), "the first cell is no title"),
        ({"cells": [code("assert True")] * 10}, "the first cell is no title"),
        (made(code("assert 1 < 2"), last="print(1)"), "the last code cell asserts nothing"),
        (made(code("import sfa_functional as sfa\nsfa._version")), "_version is private"),
        (made(code("import torch\ntorch._C._x")), "_C is private"),
        (made(code("from sharding.show import _style")), "_style is private"),
        (made(code("_hidden = 1")), "_hidden is private"),
        (made(code("dict(_hidden=1)")), "_hidden is private"),
        (made(code("import sfa_functional.tiles")), "sfa_functional.tiles is not for users"),
        (made(code("from sharding.show import show_split")), "sharding.show is not for users"),
        (made(code("from sharding import show")), "sharding has no public show"),
        (made(code("from weights import shard_tensor")), "weights has no public shard_tensor"),
        (made(code("import sharding as s\ns.simulate")), "sharding has no public simulate"),
        (made(code("import sfa_functional\nsfa_functional.tiles")), "sfa_functional has no public tiles"),
        (made(code("from sfa_functional.hf import Tensor")), "sfa_functional.hf has no public Tensor"),
        (made(code("from sfa_functional import hf\nhf.Tensor")), "sfa_functional.hf has no public Tensor"),
    ],
)
def test_a_notebook_that_breaks_a_rule_is_found_out(bad, fault):
    assert fault in faults(bad, "mine.ipynb", LINKED)


def test_a_notebook_that_readme_does_not_link_is_found_out():
    assert faults(made(), "other.ipynb", LINKED) == ["README does not link it"]
