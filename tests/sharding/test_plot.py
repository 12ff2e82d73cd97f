"""A picture of splits shows what the split is: every cell, every bar, in whatever style is current."""

import builtins

import matplotlib
import numpy
import pytest
import torch

import sharding
from sfa_functional import TINY
from sharding.plot import COLUMNS, LINES, NOTHING, REQUESTS, SEVERAL, WIDTH


def panels(figure, count):
    axes = figure.axes
    return axes[:count], axes[count:]


def image(axis):
    return numpy.asarray(axis.images[0].get_array())


def test_a_token_has_the_colour_of_its_ranks_bar():
    lengths = [5, 0, 3, 40]
    split = sharding.split_tokens(lengths, 4, layout="striped")
    (cells,), (bars,) = panels(sharding.plot_splits({"striped": split}, lengths), 1)
    colors = numpy.array([patch.get_facecolor() for patch in bars.patches])
    ranks = [[t % 4 for t in range(first, last)] for first, last in ((0, 5), (5, 8), (8, 40), (40, 48))]
    assert image(cells).shape == (4, WIDTH, 4)
    for line, owners in zip(image(cells), ranks, strict=True):
        assert line[: len(owners)] == pytest.approx(colors[owners])
        assert line[len(owners) :] == pytest.approx(numpy.tile(NOTHING, (WIDTH - len(owners), 1)))
    assert len({tuple(color) for color in colors}) == 4


def test_a_cell_of_several_ranks_is_grey_and_cells_are_no_larger_than_it_takes():
    lengths = [2000]
    split = sharding.TokenSplit.from_owner([0] * 1001 + [1] * 999, 2)
    (cells,), _ = panels(sharding.plot_splits({"mine": split}, lengths), 1)
    assert cells.get_xlabel() == "a cell is 2 tokens"  # one token each would be 63 lines
    grey = (image(cells) == SEVERAL).all(-1)
    assert grey.nonzero() == ([1001 // 2 // WIDTH], [1001 // 2 % WIDTH])
    assert len(image(cells)) == -(-1000 // WIDTH) <= LINES


def test_bars_are_the_work_of_ranks_over_its_mean():
    lengths, seq_lens = [6, 3], [10, 3]
    split = sharding.TokenSplit.from_owner([0, 1, 1, 1, 0, 1, 1, 1, 1], 3)
    (cells,), (bars,) = panels(sharding.plot_splits({"mine": split}, lengths, seq_lens=seq_lens), 1)
    base, key = 402128896, 16384 + 278528
    work = [2 * base + key * (5 + 9), 7 * base + key * (6 + 7 + 8 + 10 + 1 + 2 + 3), 0]
    assert [patch.get_height() for patch in bars.patches] == pytest.approx([x / (sum(work) / 3) for x in work])
    assert cells.get_title() == f"mine: the slowest rank has {work[1] / (sum(work) / 3):.3f} of the mean work"


def test_equal_requests_share_a_label_and_the_seventeenth_is_not_drawn():
    lengths = [64, *[32] * 8]
    splits = {name: sharding.split_tokens(lengths, 16, layout=name) for name in ("contiguous", "balanced")}
    (cells, _), _ = panels(sharding.plot_splits(splits, lengths), 2)
    assert [label.get_text() for label in cells.get_yticklabels()] == ["64", "32 × 8"]
    assert list(cells.get_yticks()) == [0, 2]
    many = [3] * 40
    (cells,), (bars,) = panels(
        sharding.plot_splits({"all": sharding.split_tokens(many, 3, layout="contiguous")}, many), 1
    )
    assert len(image(cells)) == REQUESTS
    assert [patch.get_height() for patch in bars.patches] == pytest.approx([1, 1, 1], abs=0.01)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens_make_an_empty_picture(lengths):
    figure = sharding.plot_splits({"none": sharding.split_tokens(lengths, 2, layout="zigzag")}, lengths)
    figure.canvas.draw()
    assert (image(figure.axes[0]) == NOTHING).all()


def test_lines_have_the_colour_of_the_current_style():
    lengths = [400]
    split = sharding.split_tokens(lengths, 4, layout="contiguous")
    estimates = [sharding.estimate(TINY, lengths, sharding.MeshShape(cp=4), layout="contiguous")]
    with matplotlib.rc_context({"axes.labelcolor": "#abcdef"}):
        pictures = (
            sharding.plot_splits({"contiguous": split}, lengths),
            sharding.plot_estimates(estimates, {"contiguous": split}, lengths),
        )
    for figure in pictures:
        dashed = [line for axis in figure.axes for line in axis.lines if line.get_linestyle() == "--"]
        assert [line.get_color() for line in dashed] == ["#abcdef"]


def test_a_map_of_shares_has_a_column_for_every_token_of_a_small_batch():
    lengths = [30, 34]
    split = sharding.split_tokens(lengths, 4, layout="zigzag")
    one = sharding.estimate(TINY, lengths, sharding.MeshShape(cp=4), layout="zigzag")
    tokens, work = sharding.plot_estimates([one], {"zigzag": split}, lengths).axes
    owner_T = split.inverse_T // split.rows
    assert torch.equal(torch.from_numpy(image(tokens)).argmax(0), owner_T)
    assert sum(lengths) <= COLUMNS
    widths = numpy.array([patch.get_width() for patch in work.patches]).reshape(4, 4).sum(0)
    flops = numpy.array([rank.flops.total for rank in one.ranks])
    ends = [patch.get_x() + patch.get_width() for patch in work.patches[-4:]]
    assert ends == pytest.approx(widths)
    assert widths / widths.sum() == pytest.approx(flops / flops.sum())


def test_lengths_of_other_tokens_no_splits_and_no_matplotlib_are_refused(monkeypatch):
    split = sharding.split_tokens([5, 3], 2, layout="contiguous")
    with pytest.raises(ValueError, match=r"^plot_splits: lengths must add up to 8; got 9$"):
        sharding.plot_splits({"one": split}, [5, 4])
    with pytest.raises(ValueError, match=r"^plot_splits: lengths and seq_lens must have one length; got 1$"):
        sharding.plot_splits({"one": split}, [5, 3], seq_lens=[8])
    with pytest.raises(ValueError, match=r"^plot_splits: there must be at least one split; got 0$"):
        sharding.plot_splits({}, [])
    real = builtins.__import__

    def without(name, *args, **named):
        if name.startswith("matplotlib"):
            raise ImportError("none here")
        return real(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ValueError, match=r"^matplotlib must be installed: pip install 'sfa-functional\[plot\]'; got none"
    ):
        sharding.plot_splits({"one": split}, [5, 3])
