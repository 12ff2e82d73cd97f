"""`sfa layout`: tables, JSON, plot and a layout of one's own; bad input is one line and exit code 2."""

import json
import re
import sys
from pathlib import Path

import pytest

import sfa_functional as sfa
from sfa_functional import cli, cli_layout
from sharding import MeshShape, Rules, estimate, split_tokens

TINY = ("--model", "tiny", "--lengths", "90,7x3", "--ranks", "4")
LENGTHS = [90, 7, 7, 7]
KEYS = ["name", "max_over_mean", "predicted_seconds", "bytes_sent", "bytes_resident"]


def run(*args):
    cli.main(["layout", *map(str, args)])


def refusal(capsys, *args):
    """Run with bad input and return its one line."""
    with pytest.raises(SystemExit) as stop:
        run(*args)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


@pytest.mark.parametrize("strategy", ["replicated", "layer-sharded", "gathered"])
def test_json_has_the_numbers_of_estimate_and_nothing_else(tmp_path, capsys, strategy):
    out = tmp_path / "layout.json"
    run(*TINY, "--weights", strategy, "--json", out)
    got = json.loads(out.read_text())
    assert list(got) == ["layouts", "best", "cp_over_tp"]
    assert [one["name"] for one in got["layouts"]] == ["contiguous", "zigzag", "striped", "balanced"]
    for one in got["layouts"]:
        named = {"layout": one["name"], "weights": strategy, "block_size": 128}
        want = estimate(sfa.TINY, LENGTHS, MeshShape(cp=4), **named)
        numbers = (want.max_over_mean, want.seconds, want.bytes_sent, want.bytes_resident)
        assert list(one) == KEYS
        assert tuple(one.values()) == (one["name"], *numbers)
    seconds = {one["name"]: one["predicted_seconds"] for one in got["layouts"]}
    assert seconds[got["best"]] == min(seconds.values())
    heads = estimate(sfa.TINY, LENGTHS, MeshShape(tp=4), rules=Rules(heads="tp"))
    assert got["cp_over_tp"] == heads.seconds / min(seconds.values())


@pytest.mark.parametrize(
    ("model", "lengths"),
    [
        ("deepseek-v3.2", "65536,4096x8"),
        ("deepseek-v3.2", "3"),
        ("glm-5", "1x200,40000"),
        ("glm-5.2", "30000"),
        ("tiny", "3"),
        ("tiny", "1x200,9000"),
    ],
)
def test_tables_fit_eighty_columns(capsys, monkeypatch, model, lengths):
    monkeypatch.setenv("COLUMNS", "80")
    run("--model", model, "--lengths", lengths, "--ranks", 16, "--weights", "gathered")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    assert sum(line.startswith(f" {rank:4} ") for line in lines for rank in range(16)) == 16
    heads = [] if model == "tiny" else ["tensor parallel"]  # it has four
    for name in ["contiguous", "zigzag", "striped", "balanced", *heads]:
        assert sum(line.startswith(f" {name} ") for line in lines) == 1
    assert any("ring, on paper" in line for line in lines)


def test_the_seconds_are_said_to_be_a_model_and_of_which_machine(capsys):
    run(*TINY)
    assert "seconds are a model: 400 TFLOP/s and 100 GB/s a rank" in capsys.readouterr().out


def test_the_readme_shows_what_the_command_prints(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    command, said = re.search(r"```\nsfa layout (.*?)\n```\n\n```\n(.*?)```", readme, re.DOTALL).groups()
    run(*command.split())
    printed = capsys.readouterr().out.split("\nThe ranks of")[0]
    assert [line.rstrip() for line in printed.rstrip().splitlines()] == said.rstrip().splitlines()


def test_a_layout_of_ones_own_stands_beside_the_others(tmp_path, capsys):
    owners, out = tmp_path / "owners.txt", tmp_path / "layout.json"
    split = split_tokens(LENGTHS, 4, layout="striped")
    owners.write_text(",\n".join(map(str, (split.inverse_T // split.rows).tolist())) + "\n")
    run(*TINY, "--layout", "striped", "--owner", owners, "--json", out)
    striped, own = json.loads(out.read_text())["layouts"]
    assert own == striped | {"name": "own"}


def test_where_ranks_do_not_divide_the_heads_there_is_no_baseline(tmp_path, capsys):
    out = tmp_path / "layout.json"
    run("--model", "tiny", "--lengths", "30", "--ranks", 3, "--json", out)
    assert json.loads(out.read_text())["cp_over_tp"] is None
    assert "tensor parallel" not in capsys.readouterr().out


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_plot_is_a_picture_of_the_kind_that_its_name_says(tmp_path, capsys, suffix, magic):
    picture = tmp_path / f"layout.{suffix}"
    run(*TINY, "--layout", "zigzag", "--plot", picture)
    assert picture.read_bytes().startswith(magic)
    assert list(tmp_path.iterdir()) == [picture]


def test_measuring_adds_a_number_for_each_layout_and_that_of_the_best(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli_layout, "ROUNDS", 2)
    out = tmp_path / "layout.json"
    run(*TINY, "--measure", "--json", out)
    got = json.loads(out.read_text())
    assert list(got) == ["layouts", "best", "cp_over_tp", "measured_max_over_mean"]
    measured = {one["name"]: one["measured_max_over_mean"] for one in got["layouts"]}
    assert got["measured_max_over_mean"] == measured[got["best"]]
    assert all(0.3 < value < 4 for value in measured.values())
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("measured") >= 1


def test_lengths_are_numbers_with_times():
    assert cli_layout.read_lengths("65536,4096x8") == [65536] + [4096] * 8
    assert cli_layout.read_lengths(" 5 , 0x2,1x1") == [5, 0, 0, 1]


BAD = {
    ("--lengths", "5,"): "sfa layout: --lengths: must be numbers of tokens like 65536,4096x8; got '5,'",
    ("--lengths", "4096x"): "sfa layout: --lengths: must be numbers of tokens like 65536,4096x8; got '4096x'",
    ("--lengths", "-3"): "sfa layout: --lengths: must be numbers of tokens like 65536,4096x8; got '-3'",
    ("--lengths", "4k"): "sfa layout: --lengths: must be numbers of tokens like 65536,4096x8; got '4k'",
    ("--lengths", "1.5"): "sfa layout: --lengths: must be numbers of tokens like 65536,4096x8; got '1.5'",
    ("--lengths", "٣"): "sfa layout: --lengths: must be numbers of tokens like 65536,4096x8; got '٣'",
    ("--lengths", "0x5"): "sfa layout: --lengths: must be at least one token; got '0x5'",
    (
        "--lengths",
        "0x99999999999",
    ): "sfa layout: --lengths: must be at most 4194304 tokens in all; got '0x99999999999'",
    ("--lengths", "9x999999"): "sfa layout: --lengths: must be at most 4194304 tokens in all; got '9x999999'",
    ("--ranks", "0"): "sfa layout: --ranks: must be in 1..1024; got 0",
    ("--ranks", "1025"): "sfa layout: --ranks: must be in 1..1024; got 1025",
    ("--ranks", "two"): "sfa layout: argument --ranks: invalid int value: 'two'",
    ("--model", "gpt-2"): "sfa layout: argument --model: invalid choice: 'gpt-2' "
    "(choose from 'deepseek-v3.2', 'glm-5', 'glm-5.2', 'tiny')",
    ("--layout", "spiral"): "sfa layout: argument --layout: invalid choice: 'spiral' "
    "(choose from 'all', 'contiguous', 'zigzag', 'striped', 'balanced')",
    ("--weights", "local"): "sfa layout: argument --weights: invalid choice: 'local' "
    "(choose from 'replicated', 'layer-sharded', 'gathered')",
    ("--plot", "out.txt"): "sfa layout: --plot out.txt: must end in .png, .svg, .pdf; got .txt",
    ("--plot", "/nowhere/out.png"): "sfa layout: --plot /nowhere/out.png: must be a file that can be written; "
    "got No such file or directory",
    ("--json", "/nowhere/out"): "sfa layout: --json /nowhere/out: must be a file that can be written; "
    "got No such file or directory",
    ("--owner", "/nowhere/own"): "sfa layout: --owner /nowhere/own: must be a text file that can be read; "
    "got [Errno 2] No such file or directory: '/nowhere/own'",
}


@pytest.mark.parametrize("bad", BAD, ids="".join)
def test_bad_input_is_one_line_and_exit_code_2(capsys, bad):
    good = dict(zip(TINY[::2], TINY[1::2], strict=True))
    got = refusal(capsys, *(word for pair in (good | {bad[0]: bad[1]}).items() for word in pair))
    want = BAD[bad]
    if "choose from" in want:  # later Pythons spell the choices without quotes
        got, want = got.replace("'", ""), want.replace("'", "")
    assert got == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1 2", "must be a rank for each of 111 tokens; got 3"),
        ("0 " * 112, "must be a rank for each of 111 tokens; got 112"),
        ("4 " * 111, "must be ranks in 0..3; got '4'"),
        ("-1 " * 111, "must be ranks in 0..3; got '-1'"),
        ("rank0", "must be ranks in 0..3; got 'rank0'"),
        ("", "must be a rank for each of 111 tokens; got 0"),
    ],
)
def test_an_owner_file_that_does_not_fit_is_refused(tmp_path, capsys, text, message):
    path = tmp_path / "owners.txt"
    path.write_text(text)
    assert refusal(capsys, *TINY, "--owner", path) == f"sfa layout: --owner {path}: {message}"


def test_a_missing_argument_is_one_line(capsys):
    assert refusal(capsys, "--model", "tiny").startswith("sfa layout: the following arguments are required: --lengths")


def test_without_matplotlib_everything_but_the_plot_works(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(*TINY)
    capsys.readouterr()
    got = refusal(capsys, *TINY, "--plot", tmp_path / "x.png")
    assert got.startswith("sfa layout: matplotlib must be installed: pip install 'sfa-functional[plot]'; got")
    assert list(tmp_path.iterdir()) == []
