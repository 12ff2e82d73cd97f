"""Batches: every vector of every small ragged batch equals a plain loop over its tokens; misfits are refused."""

import itertools

import pytest
import torch

import sfa_functional as sfa


def _table(requests, columns):
    """Give every request ``columns`` pages in a scrambled order."""
    return torch.randperm(requests * columns).view(requests, columns).to(torch.int32)


def _tokens(query_lens, seq_lens):
    """Yield request and position of every token, -1 and -1 for padding."""
    for b, (n, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        yield from ((b, s - n + i) if s else (-1, -1) for i in range(n))


def _lists(batch, *names):
    return tuple(getattr(batch, name).tolist() for name in names)


def test_the_worked_example_of_packed_prompts():
    batch = sfa.Batch.from_lengths([3, 2])
    assert _lists(batch, "position_T", "request_T") == ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
    assert _lists(batch, "start_T", "end_T") == ([0, 0, 0, 3, 3], [1, 2, 3, 4, 5])
    assert _lists(batch, "query_start_B1", "seq_len_B", "key_start_B") == ([0, 3, 5], [3, 2], [0, 3])
    assert batch.row_S is batch.slot_T is batch.block_table_BU is None


def test_the_worked_example_of_a_decode_step_with_padding():
    table = torch.tensor([[5, 2], [-1, -1], [0, 7]], dtype=torch.int32)
    batch = sfa.Batch.from_lengths([1, 2, 2], [6, 0, 3], block_table=table, block_size=4)
    assert _lists(batch, "position_T", "request_T") == ([5, -1, -1, 1, 2], [0, -1, -1, 2, 2])
    assert _lists(batch, "start_T", "end_T") == ([0, 0, 0, 16, 16], [6, 0, 0, 18, 19])
    assert _lists(batch, "slot_T", "key_start_B") == ([9, -1, -1, 1, 2], [0, 8, 16])
    assert batch.row_S.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, *[-1] * 8, 0, 1, 2, 3, 28, 29, 30, 31]


LENGTHS = [(n, s) for n in range(3) for s in range(5) if s == 0 or s >= n]


@pytest.mark.parametrize("paged", [False, True])
def test_every_small_batch_equals_a_loop_over_its_tokens(paged):
    for pairs in itertools.product(LENGTHS, repeat=2):
        new, total = zip(*pairs, strict=True)
        table = _table(2, 2) if paged else None
        batch = sfa.Batch.from_lengths(new, total, block_table=table, block_size=2 if paged else None)
        key_start = [0, 4] if paged else [0, max(new[0], total[0])]
        want = list(_tokens(new, total))
        ranges = [(key_start[b], key_start[b] + p + 1) if b >= 0 else (0, 0) for b, p in want]
        assert list(zip(*_lists(batch, "request_T", "position_T"), strict=True)) == want
        assert list(zip(*_lists(batch, "start_T", "end_T"), strict=True)) == ranges
        assert _lists(batch, "query_start_B1", "seq_len_B", "key_start_B") == (
            [0, new[0], sum(new)],
            list(total),
            key_start,
        )
        if paged:
            slots = [int(table[b, p // 2]) * 2 + p % 2 if b >= 0 else -1 for b, p in want]
            assert batch.slot_T.tolist() == slots
            assert batch.row_S.tolist() == [int(page) * 2 + i for page in table.flatten() for i in (0, 1)]
        else:
            assert batch.slot_T is None
            has_context = any(s > n for n, s in pairs)
            keys = list(range(sum(map(max, new, total))))
            assert (batch.row_S is None) != has_context
            assert batch.row_S is None or batch.row_S.tolist() == keys


def test_vectors_are_int64_and_lengths_may_be_tensors():
    batch = sfa.Batch.from_lengths(torch.tensor([2, 1]), torch.tensor([4, 1]), block_table=_table(2, 2), block_size=2)
    names = ("position_T", "request_T", "start_T", "end_T", "query_start_B1", "seq_len_B", "key_start_B", "slot_T")
    assert {getattr(batch, name).dtype for name in (*names, "row_S")} == {torch.int64}
    assert batch.block_table_BU.dtype == torch.int32
    assert batch.position_T.tolist() == [2, 3, 0]


def test_no_requests_make_an_empty_batch():
    batch = sfa.Batch.from_lengths([])
    assert batch.position_T.shape == batch.start_T.shape == (0,)
    assert batch.query_start_B1.tolist() == [0]


def test_vectors_lie_on_the_device_that_is_asked_for():
    assert sfa.Batch.from_lengths([2], device="meta").position_T.device.type == "meta"


def test_next_is_the_batch_of_the_grown_lengths():
    table = _table(3, 3)
    named = {"block_table": table, "block_size": 4}
    batch = sfa.Batch.from_lengths([5, 0, 2], [5, 0, 7], **named).next([2, 3, 0])
    want = sfa.Batch.from_lengths([2, 3, 0], [7, 0, 7], **named)
    for name in want.__dataclass_fields__:
        assert torch.equal(getattr(batch, name), getattr(want, name)), name


REFUSED = [
    (([2, -1],), {}, "query_lens must be integers >= 0; got -1"),
    (([2.0],), {}, "query_lens must be integers >= 0; got 2.0"),
    (([True],), {}, "query_lens must be integers >= 0; got True"),
    (([2], ["3"]), {}, "seq_lens must be integers >= 0; got '3'"),
    (([2, 1], [2]), {}, "query_lens and seq_lens must have one length; got (2, 1)"),
    (([1, 3], [1, 2]), {}, "seq_len must be 0 or >= query_len 3 of request 1; got 2"),
    (([1],), {"block_size": 4}, "block_table and block_size go together; got 4"),
    (([1],), {"block_table": _table(1, 2)}, "block_table and block_size go together; got None"),
    (([1],), {"block_table": _table(1, 2), "block_size": 0}, "block_size must be >= 1; got 0"),
    (
        ([1],),
        {"block_table": _table(2, 2), "block_size": 4},
        "block_table must be int32 [1, U]; got (torch.int32, (2, 2))",
    ),
    (
        ([1],),
        {"block_table": _table(1, 2).long(), "block_size": 4},
        "block_table must be int32 [1, U]; got (torch.int64, (1, 2))",
    ),
    (
        ([1, 5],),
        {"block_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32), "block_size": 4},
        "validate_block_table: position 4 of request 1 must have a page; got -1",
    ),
    (([9],), {"block_table": _table(1, 2), "block_size": 4}, "a sequence must fit its 8 rows of the table; got 9"),
]


@pytest.mark.parametrize(("arguments", "named", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_lengths_that_do_not_fit_are_refused(arguments, named, message, unchecked):
    with pytest.raises(ValueError) as error:
        sfa.Batch.from_lengths(*arguments, **named)
    assert str(error.value) == (
        message if message.startswith("validate_block_table:") else f"Batch.from_lengths: {message}"
    )


def test_next_refuses_a_batch_without_a_table_and_wrong_lengths():
    with pytest.raises(ValueError, match=r"^Batch.next: the batch must have a block table; got none$"):
        sfa.Batch.from_lengths([2]).next([1])
    batch = sfa.Batch.from_lengths([2], block_table=_table(1, 2), block_size=2)
    with pytest.raises(ValueError, match=r"^Batch.next: new_lens must have 1 entries; got 2$"):
        batch.next([1, 1])
    with pytest.raises(ValueError, match=r"^Batch.from_lengths: a sequence must fit its 4 rows of the table; got 5$"):
        batch.next([3])


@pytest.mark.parametrize("paged", [False, True])
def test_selections_survive_the_way_to_positions_and_back(paged):
    table = {"block_table": _table(3, 2), "block_size": 4} if paged else {}
    batch = sfa.Batch.from_lengths([3, 2, 4], [3, 0, 4], **table)
    visible = zip(*_lists(batch, "start_T", "end_T"), strict=True)
    rows = [[s for s in range(-2, 30) if start <= s < end] for start, end in visible]
    key_TK = torch.tensor([row + [-1] * (6 - len(row)) for row in rows], dtype=torch.int32)
    position_TK = sfa.local_selection(key_TK, batch)
    tokens = _tokens([3, 2, 4], [3, 0, 4])
    assert position_TK.tolist() == [[*range(p + 1), *[-1] * (5 - p)] for _, p in tokens]
    assert torch.equal(sfa.global_selection(position_TK, batch), key_TK)
    assert position_TK.dtype == sfa.global_selection(position_TK, batch).dtype == torch.int32


def test_positions_that_a_query_does_not_see_become_unused():
    batch = sfa.Batch.from_lengths([3, 1, 2], [3, 0, 2])
    position_TK = torch.tensor([[1, 0, -1, 5, -7, 2**31 - 1]] * 6, dtype=torch.int32)
    assert sfa.global_selection(position_TK, batch).tolist() == [
        [-1, 0, -1, -1, -1, -1],
        [1, 0, -1, -1, -1, -1],
        [1, 0, -1, -1, -1, -1],
        [-1] * 6,
        [-1, 4, -1, -1, -1, -1],
        [5, 4, -1, -1, -1, -1],
    ]
    key_TK = torch.tensor([[0, 3, 4, -1, -7, 2**31 - 1]] * 6, dtype=torch.int32)
    assert sfa.local_selection(key_TK, batch).tolist() == [
        [0, -1, -1, -1, -1, -1],
        [0, -1, -1, -1, -1, -1],
        [0, -1, -1, -1, -1, -1],
        [-1] * 6,
        [-1, -1, 0, -1, -1, -1],
        [-1, -1, 0, -1, -1, -1],
    ]


def test_an_empty_batch_has_nothing_to_select():
    batch, none_TK = sfa.Batch.from_lengths([]), torch.zeros(0, 3, dtype=torch.int32)
    assert sfa.local_selection(none_TK, batch).shape == sfa.global_selection(none_TK, batch).shape == (0, 3)
