"""README prints what it says: its Python blocks run, and their numbers stand below them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def output(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compare(printed, said):
    """Words must be equal; numbers may differ by a thousandth, for another machine's rounding."""
    printed, said = ("\n".join(map(str.rstrip, text.strip().splitlines())) for text in (printed, said))
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", said)
    got, want = ([float(x) for x in NUMBER.findall(text)] for text in (printed, said))
    assert got == pytest.approx(want, rel=1e-3, abs=1e-6)


def test_every_python_block_is_followed_by_what_it_prints():
    assert len(BLOCKS) == README.count("```python") == 7


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_python_block_prints_what_stands_below_it(number):
    code, said = BLOCKS[number]
    compare(output("-c", code), said)


def test_the_table_of_selectors_is_what_its_script_prints(tmp_path):
    printed = output("notebooks/compare_selectors.py", "--out", str(tmp_path / "picture.png"))
    table = README[README.index("| `use_sfa(model, topk=32") : README.index("All come from")]
    assert [float(x) for x in NUMBER.findall(printed)] == pytest.approx(
        [float(x) for x in NUMBER.findall(table)], rel=1e-3
    )
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_links_and_files_that_are_named_exist():
    for name in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`([\w/]+\.py)`", README):
        assert (ROOT / name).exists() or (ROOT / "sfa_functional" / name).exists(), name
