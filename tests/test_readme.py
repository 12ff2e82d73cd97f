"""README and CONTRIBUTING print what they say: their Python blocks run, and numbers and files stand as they are."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import sfa_functional as sfa
from sfa_functional import cli

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
README = PAGES["README.md"]
BLOCKS = [
    pytest.param(code, said, id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, (code, said) in enumerate(re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL))
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def output(*command):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text):
    return [float(x) for x in NUMBER.findall(text)]


def compare(printed, said):
    """Words must be equal; numbers may differ by a thousandth, for another machine's rounding."""
    printed, said = ("\n".join(map(str.rstrip, text.strip().splitlines())) for text in (printed, said))
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", said)
    assert numbers(printed) == pytest.approx(numbers(said), rel=1e-3, abs=1e-6)


def changed(code, before, after):
    assert code.count(before) == 1, (before, code.count(before))
    return code.replace(before, after)


def test_every_python_block_is_followed_by_what_it_prints():
    assert len(BLOCKS) == sum(page.count("```python") for page in PAGES.values()) == 12


@pytest.mark.parametrize(("code", "said"), BLOCKS)
def test_a_python_block_prints_what_stands_below_it(code, said):
    compare(output("-c", code), said)


def test_the_first_block_is_about_twelve_lines():
    assert len([line for line in PYTHON[0].splitlines() if line]) <= 12


CHANGES = re.findall(r"^\| `(.+?)` to `(.+?)` \| (.*) \|$", README, re.MULTILINE)


def test_two_rows_change_one_argument_and_the_first_row_none():
    assert len(CHANGES) == 2
    (plain,) = re.findall(r"^\| nothing \| (.*) \|$", README, re.MULTILINE)
    (said,) = re.findall(r"perplexity 3.389\n.*?```", README, re.DOTALL)
    assert numbers(plain) == numbers(said)


@pytest.mark.parametrize(("before", "after", "said"), CHANGES)
def test_one_changed_argument_prints_its_row(before, after, said):
    printed = output("-c", changed(PYTHON[0], before, after))
    assert numbers(printed) == pytest.approx(numbers(said), rel=1e-3)


def test_one_changed_word_prints_another_layout():
    before, after, said = re.search(r"With `(.+?)` changed to `(.+?)`:\n\n```\n(.*?)```", README, re.DOTALL).groups()
    compare(output("-c", changed(PYTHON[1], before, after)), said)


def test_make_pictures_prints_the_table_of_selectors_and_draws_every_picture_of_readme(tmp_path):
    printed = output("notebooks/pictures.py", "--out", str(tmp_path))
    table = README[README.index("| `use_sfa(model, topk=32") : README.index("selectors-dark")]
    rows = re.findall(r"^\| (.*) \| ([\d.]+) \|$", table, re.MULTILINE)
    order = ["best keys", "lightning indexer", "blocks of 8", "window", "random"]
    assert [line.split("  ")[0] for line in printed.splitlines()] == order
    assert numbers(printed) == pytest.approx([float(said) for _, said in rows], rel=1e-3)
    named = {Path(name).name for name in re.findall(r"notebooks/pictures/[\w-]+\.png", README)}
    assert named == {path.name for path in tmp_path.iterdir()}
    assert named == {path.name for path in (ROOT / "notebooks" / "pictures").iterdir()}


def test_pictures_come_in_light_and_dark_and_are_small_files():
    light, dark = (re.findall(rf"([\w-]+)-{theme}\.png", README) for theme in ("light", "dark"))
    assert light == dark
    assert len(light) == README.count("<picture>") == 2
    for path in (ROOT / "notebooks" / "pictures").iterdir():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG"), path
        assert 10_000 < len(content) < 150_000, path
        assert not any(chunk in content for chunk in (b"tIME", b"tEXt", b"iTXt")), path


def anchors(page):
    """Return the names under which GitHub links a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_and_files_that_are_named_exist(name):
    page = PAGES[name]
    targets = re.findall(r"\]\(([^)]+)\)", page) + re.findall(r'(?:src|srcset)="([^"]+)"', page)
    for target in targets:
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        assert (ROOT / (path or name)).is_file(), target
        assert not anchor or anchor in anchors(PAGES[path or name]), target
    for path in re.findall(r"`(?:python )?([\w/]+\.py)`", page):
        assert (ROOT / path).exists() or (ROOT / "sfa_functional" / path).exists(), path


def test_every_notebook_is_linked():
    linked = set(re.findall(r"\(notebooks/([\w]+\.ipynb)\)", README))
    assert {name[:2] for name in linked} == {"01", "02", "03", "04", "05", "06"}
    assert {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} <= linked


@pytest.mark.parametrize("name", PAGES)
def test_make_targets_that_are_named_exist(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", PAGES[name], re.MULTILINE))
    named |= set(re.findall(r"; make ([a-z-]+)", PAGES[name]))
    assert named <= targets


def test_options_that_are_named_exist():
    helps = ""
    for command in ("eval", "layout"):
        with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
            cli.main([command, "--help"])
        helps += printed.getvalue()
    helps += output("-m", "torch.distributed.run", "--help")
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)):
        assert re.search(rf"{option}\b(?!-)", helps), option


def test_letters_have_the_sizes_of_the_configs():
    sizes = {
        "K": ("index_topk",),
        "H": ("num_attention_heads",),
        "J, I": ("index_n_heads", "index_head_dim"),
        "L, R": ("kv_lora_rank", "qk_rope_head_dim"),
        "E": ("key_width",),
        "P, V": ("qk_nope_head_dim", "v_head_dim"),
        "Q": ("q_lora_rank",),
        "D": ("hidden_size",),
    }
    from sfa_functional.bundled import TINY_CHECKPOINT

    bundled = sfa.SFAConfig.from_hf(json.loads((TINY_CHECKPOINT / "config.json").read_text()))
    for letters, names in sizes.items():
        (row,) = re.findall(rf"^\| {letters} \| .* \| (.*) \| (.*) \| (.*) \|$", README, re.MULTILINE)
        for said, config in zip(row, (sfa.DEEPSEEK_V32, sfa.GLM_5, bundled), strict=True):
            assert said == ", ".join(str(getattr(config, name)) for name in names), letters
    halves = ", ".join(str(config.qk_rope_head_dim // 2) for config in (sfa.DEEPSEEK_V32, sfa.GLM_5, bundled))
    assert f"| F | rotated pairs, R/2 | {halves.replace(', ', ' | ')} |" in README


@pytest.mark.everything
def test_the_table_of_sfa_eval_is_what_it_prints():
    """The perplexities, masses and overlaps; the block's rounding differences and seconds are of one run."""
    said = re.search(r"```\n(tiny-dsa, .*?)```", README, re.DOTALL)[1]
    printed = output("-m", "sfa_functional.cli", "eval", "--untrained")
    compare(*(text.split("  largest difference")[0] for text in (printed, said)))


def test_the_description_of_the_package_is_the_first_sentence():
    sentence = README.split("\n\n")[1].replace("\n", " ")
    assert f'description = "{sentence}"' in (ROOT / "pyproject.toml").read_text()
