"""The picture of a split says what the split is: every cell, every row of the table, in any width."""

import io
import re

import pytest
from rich.console import Console

import sharding
from sharding.show import LABELS, LINES, MIXED


def drawn(picture, width=80, **options):
    console = Console(width=width, file=io.StringIO(), **options)
    console.print(picture)
    return console.file.getvalue()


def bars(text, requests):
    """Read the cells of each request back from the picture."""
    cells, current = {}, None
    for line in text.split("\n\n")[0].splitlines()[1:]:
        head = re.match(r" *(\d+) \(\d+\)", line)
        current = int(head[1]) if head else current
        cells[current] = cells.get(current, "") + line[head.end() if head else 0 :].strip()
    return [cells.get(b, "") for b in range(requests)]


def test_small_batches_are_drawn_token_by_token():
    lengths = [5, 0, 3, 7]
    split = sharding.split_tokens(lengths, 4, layout="striped")
    text = drawn(sharding.show_split(split, lengths))
    assert "one cell is one token" in text
    assert bars(text, 4) == ["01230", "", "123", "0123012"]


@pytest.mark.parametrize("width", [48, 80, 200])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_a_cell_shows_its_only_rank_or_that_there_are_several(layout, width):
    lengths = [5000, 300, 2892]
    split = sharding.split_tokens(lengths, 16, layout=layout)
    text = drawn(sharding.show_split(split, lengths), width)
    size = int(re.search(r"one cell is (\d+) tokens", text)[1])
    owner_T = (split.inverse_T // split.rows).split(lengths)
    for cells, owners in zip(bars(text, 3), owner_T, strict=True):
        want = [set(piece.tolist()) for piece in owners.split(size)]
        assert cells == "".join(LABELS[min(ranks)] if len(ranks) == 1 else MIXED for ranks in want)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.split("\n\n")[0].splitlines()) <= LINES + len(lengths) + 1


def test_the_table_gives_tokens_padding_and_work_of_each_rank():
    lengths, seq_lens = [6, 3], [10, 3]
    split = sharding.TokenSplit.from_owner([0, 1, 1, 1, 0, 1, 1, 1, 1], 3)
    text = drawn(sharding.show_split(split, lengths, seq_lens=seq_lens)).split("\n\n")[1]
    rows = [line.split()[:5] for line in text.splitlines()[1:5]]
    base, key = 402128896, 16384 + 278528
    work = [2 * base + key * (5 + 9), 7 * base + key * (6 + 7 + 8 + 10 + 1 + 2 + 3), 0]
    mean = sum(work) / 3
    assert rows[0] == ["0", "0", "2", "5", f"{work[0] / mean:.3f}"]
    assert rows[1] == ["1", "1", "7", "0", f"{work[1] / mean:.3f}"]
    assert rows[2] == ["2", "2", "0", "7", "0.000"]
    assert rows[3][:3] == ["max", "7", f"{work[1] / mean:.3f}"]


def test_many_requests_are_counted_rather_than_drawn():
    lengths = [1] * 40
    text = drawn(sharding.show_split(sharding.split_tokens(lengths, 3, layout="contiguous"), lengths))
    assert "and 24 more requests" in text


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens_make_an_empty_picture(lengths):
    assert "rank" in drawn(sharding.show_split(sharding.split_tokens(lengths, 2, layout="zigzag"), lengths))


def test_sixty_four_ranks_have_different_labels_and_colours():
    lengths = [640]
    split = sharding.split_tokens(lengths, 64, layout="contiguous")
    text = drawn(sharding.show_split(split, lengths), color_system="truecolor", force_terminal=True)
    assert len(set(re.findall(r"48;2;(\d+;\d+;\d+)m", text))) == 64
    assert bars(drawn(sharding.show_split(split, lengths)), 1) == ["".join(x * 10 for x in LABELS)]


def test_lengths_of_other_tokens_are_refused():
    split = sharding.split_tokens([5, 3], 2, layout="contiguous")
    with pytest.raises(ValueError, match=r"^show_split: lengths must add up to 8; got 9$"):
        sharding.show_split(split, [5, 4])
    with pytest.raises(ValueError, match=r"^show_split: lengths and seq_lens must have one length; got 1$"):
        sharding.show_split(split, [5, 3], seq_lens=[8])
