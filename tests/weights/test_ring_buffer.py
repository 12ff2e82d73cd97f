"""Slots give back what was put in, bit for bit; what lay there before is never taken for what lies there now."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.vectors import read_vectors
from weights.ring_buffer import (
    TensorSpec,
    fill_slot,
    laid_out,
    lay_out,
    layout_of,
    make_slots,
    mark_written,
    slot_bytes,
    slot_views,
    spoil,
)

RING = read_vectors("peers.json")["ring"]
FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
DTYPES = [*FLOATING, torch.uint8, torch.int8, torch.bool]
SHAPES = [(7,), (3, 5), (1, 1), (2, 3, 5), (129,), (64,), (0,), (4, 0), (0, 3)]


def drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Draw bytes: every pattern of a dtype, infinities and all kinds of NaN included; a bool has two."""
    high = 2 if dtype == torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).view(shape)


def mixed() -> dict[str, Tensor]:
    """Draw a layer of every dtype in every shape, in scrambled order."""
    pairs = list(itertools.product(DTYPES, SHAPES))
    order = torch.randperm(len(pairs)).tolist()
    return {f"{i}": drawn(*pairs[i]) for i in order}


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def filled(tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Put tensors into a slot of their size, which held something else."""
    (slot,) = make_slots(1, slot_bytes(layout_of(tensors)))
    spoil(slot)
    fill_slot(slot, tensors)
    return slot, slot_views(slot, layout_of(tensors))


# ---- a round trip ----------------------------------------------------------------------------------------------------


def test_a_layer_of_every_dtype_and_shape_comes_back_bit_for_bit():
    tensors = mixed()
    _, views = filled(tensors)
    assert list(views) == list(tensors)
    for name, x in tensors.items():
        assert (views[name].dtype, views[name].shape) == (x.dtype, x.shape)
        assert views[name].is_contiguous()
        assert bits(views[name]) == bits(x)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_signs_of_zero_and_payloads_of_nan_survive(dtype):
    """All patterns of one or two bytes; of wider dtypes quiet and signalling NaN, both zeros, the smallest number."""
    width = dtype.itemsize
    if width <= 2:
        patterns = [i.to_bytes(width, "little") for i in range(256**width)]
    else:
        special = [0, 1, 2 ** (8 * width - 1)] + [(0xFFF << (8 * width - 12)) + payload for payload in (0, 1, 12345)]
        patterns = [i.to_bytes(width, "little") for i in special]
    x = torch.frombuffer(bytearray(b"".join(patterns)), dtype=dtype)
    assert x.isnan().any()
    assert (x.double() == 0).sum() >= 2
    _, views = filled({"before": drawn(torch.uint8, (1,)), "x": x})
    assert bits(views["x"]) == b"".join(patterns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_without_dims_comes_back(dtype):
    x = drawn(dtype, ())
    _, views = filled({"x": x, "after": torch.ones(3)})
    assert (views["x"].dtype, views["x"].shape) == (dtype, ())
    assert bits(views["x"]) == bits(x)
    assert views["after"].tolist() == [1, 1, 1]


def test_sources_may_be_views_transposed_strided_or_want_gradients():
    x = torch.randn(6, 10)
    tensors = {
        "transposed": x.T,
        "strided": x[::2, 1::3],
        "expanded": x[0].expand(4, 10),
        "part": x.flatten()[7:11],
        "parameter": x.clone().requires_grad_(),
    }
    _, views = filled(tensors)
    for name, source in tensors.items():
        assert torch.equal(views[name], source), name
        assert not views[name].requires_grad


def test_tensors_laid_out_are_found_to_lie_as_in_a_slot():
    tensors = mixed()
    laid = lay_out(tensors)
    whole = laid_out(laid)
    assert whole is not None
    assert (whole.dtype, whole.numel()) == (torch.uint8, slot_bytes(layout_of(tensors)))
    first = next(x for x in laid.values() if x.numel())
    assert whole.data_ptr() == first.data_ptr()  # the memory itself, no copy
    for name, x in slot_views(whole, layout_of(tensors)).items():
        assert bits(x) == bits(laid[name]) == bits(tensors[name])


LAID = {"a": torch.arange(3.0), "b": torch.arange(32.0).view(4, 8), "c": torch.arange(5, dtype=torch.int8)}


@pytest.mark.parametrize(
    "change",
    [
        lambda x: {},
        lambda x: {**x, "b": x["b"].clone()},
        lambda x: {"b": x["b"], "a": x["a"], "c": x["c"]},
        lambda x: {"a": x["a"], "c": x["c"]},
        lambda x: {**x, "b": x["b"].T},
        lambda x: {**x, "a": x["a"][1:]},
        lambda x: {**x, "c": x["c"][1:]},
        lambda x: {"c": x["c"][1:]},
        lambda x: {name: y.clone() for name, y in x.items()},
        lambda x: {**x, "d": torch.arange(2.0)},
    ],
    ids=["none", "one apart", "order", "a gap", "transposed", "cut", "shifted", "unaligned", "all apart", "one more"],
)
def test_tensors_that_lie_elsewhere_are_found_out(change):
    assert laid_out(change(lay_out(LAID))) is None


def test_a_later_part_of_what_was_laid_out_lies_as_in_a_slot_too():
    laid = lay_out(LAID)
    whole = laid_out({"b": laid["b"], "c": laid["c"]})
    assert whole is not None
    assert whole.data_ptr() == laid["b"].data_ptr()


def test_tensors_at_the_end_of_their_memory_have_no_room_for_a_slots_padding():
    """A slot ends on a whole line of 64 bytes; what would be sent must not reach past the memory."""
    assert laid_out({"a": torch.zeros(64, dtype=torch.uint8)}) is not None
    assert laid_out({"a": torch.zeros(65, dtype=torch.uint8)}) is None


def test_layers_of_different_shape_pass_through_one_slot():
    """The largest decides the size; a smaller one uses the front and leaves the rest as it was."""
    large, small = mixed(), {"x": torch.randn(3, 5), "y": drawn(torch.float8_e4m3fn, (130,))}
    slot, _ = filled(large)
    used = slot_bytes(layout_of(small))
    rest = bits(slot[used:])
    for _ in range(2):
        fill_slot(slot, small)
        views = slot_views(slot, layout_of(small))
        assert all(bits(views[name]) == bits(x) for name, x in small.items())
        assert bits(slot[used:]) == rest
        fill_slot(slot[:used], small)
    fill_slot(slot, large)
    assert all(bits(slot_views(slot, layout_of(large))[name]) == bits(x) for name, x in large.items())


def test_a_slot_may_be_empty():
    (slot,) = make_slots(1, slot_bytes({}))
    fill_slot(slot, {})
    assert slot.shape == (0,)
    assert slot_views(slot, {}) == {}
    nothing = {"x": torch.zeros(0, 3)}
    fill_slot(slot, nothing)
    assert slot_views(slot, layout_of(nothing))["x"].shape == (0, 3)


def test_make_slots_gives_apart_and_of_the_size_asked_for_what_it_is_asked_for():
    slots = make_slots(3, 192)
    assert [(slot.dtype, slot.shape, slot.device.type) for slot in slots] == [(torch.uint8, (192,), "cpu")] * 3
    assert len({slot.untyped_storage().data_ptr() for slot in slots}) == 3
    assert [slot.device.type for slot in make_slots(2, 64, "meta")] == ["meta", "meta"]
    assert make_slots(0, 64) == []


# ---- where things lie ------------------------------------------------------------------------------------------------


def test_views_share_the_memory_of_the_slot_lie_in_order_aligned_and_do_not_overlap():
    tensors = mixed()
    slot, views = filled(tensors)
    last = 0
    for name, view in views.items():
        assert view.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()
        if view.numel():
            start = view.data_ptr() - slot.data_ptr()
            assert start % 64 == 0, name
            assert start >= last
            last = start + view.nbytes
    assert last <= slot.numel()


def test_a_view_changes_with_its_slot_and_the_slot_with_its_view():
    slot, views = filled({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
    fill_slot(slot, {"a": torch.tensor([1.0, 2, 3]), "b": torch.tensor([4.0, 5], dtype=torch.bfloat16)})
    assert views["a"].tolist() == [1, 2, 3]
    assert views["b"].tolist() == [4, 5]
    views["a"][1] = torch.nan
    assert slot[4:8].view(torch.float32).isnan().all()


def test_a_layout_is_what_tensors_are():
    tensors = {"b": torch.zeros(2, 3, dtype=torch.float16), "a": torch.zeros(5, dtype=torch.bool)}
    layout = layout_of(tensors)
    assert list(layout.items()) == [("b", TensorSpec(torch.float16, (2, 3))), ("a", TensorSpec(torch.bool, (5,)))]
    assert [spec.num_bytes for spec in layout.values()] == [12, 5]
    assert TensorSpec(torch.float64, (0, 7)).num_bytes == 0
    assert TensorSpec(torch.float64, ()).num_bytes == 8


def test_slot_bytes_are_whole_lines_of_64_for_each_tensor_and_a_multiple_for_all():
    """Counted line by line; the result is the least that holds them all and can be cut into equal runs of lines."""
    for sizes in ([], [0], [1], [63, 64, 65], [1, 0, 128, 129], [1000, 3]):
        layout = {f"{i}": TensorSpec(torch.uint8, (size,)) for i, size in enumerate(sizes)}
        lines = sum(len(range(0, size, 64)) for size in sizes)
        assert slot_bytes(layout) == 64 * lines
        for multiple in (1, 2, 3, 7, 16, 64):
            got = slot_bytes(layout, multiple=multiple)
            whole = next(n for n in itertools.count() if n % multiple == 0 and n >= lines)
            assert got == 64 * whole
            parts = torch.zeros(got, dtype=torch.uint8).chunk(multiple) if got else []
            assert len(parts) == (multiple if got else 0)
            assert len({part.numel() for part in parts}) <= 1


def test_dtypes_of_several_bytes_count_with_all_of_them():
    for dtype in DTYPES:
        size = torch.zeros(33, dtype=dtype).nbytes
        assert slot_bytes({"x": TensorSpec(dtype, (3, 11))}) == 64 * -(-size // 64)


def test_two_slots_of_the_large_matrices_of_deepseek_v32_have_the_bytes_of_the_vectors():
    memory = RING["memory_v32"]
    q_b, o = (128 * (128 + 64), 1536), (7168, 128 * 128)
    for dtype, scale in ((torch.int8, 1), (torch.bfloat16, 2)):
        layout = {"q_b_proj": TensorSpec(dtype, q_b), "o_proj": TensorSpec(dtype, o)}
        assert [spec.num_bytes / 2**20 for spec in layout.values()] == [
            scale * memory["q_b_MiB_int8"],
            scale * memory["o_MiB_int8"],
        ]
        assert 2 * slot_bytes(layout) / 2**30 == pytest.approx(scale * memory["ring_of_2_GiB_int8"], abs=0.005 * scale)
        all_layers = memory["layers"] * slot_bytes(layout)
        assert all_layers / 2**30 == pytest.approx(scale * memory["replicated_GiB_int8"], abs=0.005 * scale)
        share = memory["one_of_16_ranks_GiB_int8"]
        assert all_layers / 16 / 2**30 == pytest.approx(scale * share, abs=0.005 * scale)


# ---- autograd --------------------------------------------------------------------------------------------------------


FACTOR = {"factor": TensorSpec(torch.float32, (1,))}


def written_behind_autograd(slot: Tensor, value: float) -> None:
    """Write a number to the front of a slot as a file or a collective does: no version is counted."""
    slot.numpy()[:4] = torch.tensor([value]).view(torch.uint8).numpy()


def through_one_slot(refill) -> tuple[Tensor, Tensor]:
    """Return x = 1 and y = x · 2 · 3, both factors taken from one slot that is refilled between."""
    (slot,) = make_slots(1, 64)
    x = torch.ones(1, requires_grad=True)
    y = x
    for value in (2.0, 3.0):
        refill(slot, value)
        y = y * slot_views(slot, FACTOR)["factor"]
    return x, y


def test_a_slot_that_was_refilled_and_marked_makes_backward_raise():
    """H4: 6 and 6, or an error, never 9."""

    def refill(slot: Tensor, value: float) -> None:
        written_behind_autograd(slot, value)
        mark_written(slot)

    x, y = through_one_slot(refill)
    assert y.item() == RING["gradient_through_a_reused_slot"]["out"] == 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    assert x.grad is None


def test_a_slot_that_was_refilled_and_not_marked_gives_a_wrong_gradient_without_a_word():
    """H4: why `mark_written` exists."""
    x, y = through_one_slot(written_behind_autograd)
    y.backward()
    assert y.item() == 6
    assert x.grad.item() == RING["gradient_through_a_reused_slot"]["grad_if_overwritten"] == 9


def test_fill_slot_marks_what_it_writes():
    """H4."""
    _, y = through_one_slot(lambda slot, value: fill_slot(slot, {"factor": torch.tensor([value])}))
    assert y.item() == 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_copies_of_what_lay_in_a_slot_give_the_right_gradient():
    """H4: what ``copy=True`` of a ring rests on."""
    (slot,) = make_slots(1, 64)
    x = torch.ones(1, requires_grad=True)
    y = x
    for value in (2.0, 3.0):
        fill_slot(slot, {"factor": torch.tensor([value])})
        y = y * slot_views(slot, FACTOR)["factor"].clone()
    y.backward()
    assert y.item() == 6
    assert x.grad.item() == RING["gradient_through_a_reused_slot"]["grad"] == 6


def test_spoiling_a_slot_marks_it_too():
    (slot,) = make_slots(1, 64)
    fill_slot(slot, {"factor": torch.tensor([2.0])})
    x = torch.ones(1, requires_grad=True)
    y = x * slot_views(slot, FACTOR)["factor"]
    spoil(slot)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_slot_that_nothing_was_written_to_since_can_be_differentiated_through():
    """Reading a view, or filling another slot, is no writing."""
    here, there = make_slots(2, 64)
    fill_slot(here, {"factor": torch.tensor([2.0])})
    x = torch.ones(1, requires_grad=True)
    y = x * slot_views(here, FACTOR)["factor"]
    fill_slot(there, {"factor": torch.tensor([3.0])})
    slot_views(here, FACTOR)
    y.backward()
    assert x.grad.item() == 2


def test_a_mark_reaches_every_view_of_a_slot_whatever_its_dtype():
    tensors = {f"{dtype}": torch.ones(3).to(dtype) for dtype in DTYPES}
    slot, views = filled(tensors)
    before = {name: view._version for name, view in views.items()}
    mark_written(slot)
    assert all(view._version > before[name] for name, view in views.items())
    mark_written(slot[:64])  # a part of a slot counts for all of it: they share a counter
    assert all(view._version > before[name] + 1 for name, view in views.items())


# ---- what lay there before -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATING, torch.float8_e5m2], ids=str)
def test_a_spoiled_slot_is_nan_in_every_floating_dtype(dtype):
    slot, views = filled({"a": torch.zeros(5, dtype=torch.bool), "x": torch.ones(3, 7).to(dtype)})
    spoil(slot)
    assert views["x"].float().isnan().all()
    assert slot.view(dtype).float().isnan().all()


# ---- inference mode --------------------------------------------------------------------------------------------------


def test_slots_made_in_inference_mode_work_in_it():
    tensors = mixed()
    with torch.inference_mode():
        slot, views = filled(tensors)
        assert slot.is_inference()
        assert all(bits(views[name]) == bits(x) for name, x in tensors.items())
        mark_written(slot)
        spoil(slot)
        assert (slot == 0xFF).all()
    mark_written(slot)  # they have no version; this is no error outside either


def test_slots_made_outside_are_filled_in_inference_mode_and_still_marked():
    (slot,) = make_slots(1, 64)
    fill_slot(slot, {"factor": torch.tensor([2.0])})
    x = torch.ones(1, requires_grad=True)
    y = x * slot_views(slot, FACTOR)["factor"]
    with torch.inference_mode():
        fill_slot(slot, {"factor": torch.tensor([3.0])})
        assert slot_views(slot, FACTOR)["factor"].item() == 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_inference_tensors_can_be_put_into_an_ordinary_slot():
    with torch.inference_mode():
        x = torch.randn(3, 5)
    _, views = filled({"x": x})
    assert bits(views["x"]) == bits(x)


# ---- bad input -------------------------------------------------------------------------------------------------------

LAYOUT = {"a": TensorSpec(torch.float32, (3, 5)), "b": TensorSpec(torch.bool, (1,))}


@pytest.mark.parametrize(
    ("slot", "got"),
    [
        (torch.zeros(127, dtype=torch.uint8), "(torch.uint8, (127,))"),
        (torch.zeros(0, dtype=torch.uint8), "(torch.uint8, (0,))"),
        (torch.zeros(128, dtype=torch.int8), "(torch.int8, (128,))"),
        (torch.zeros(128), "(torch.float32, (128,))"),
        (torch.zeros(2, 128, dtype=torch.uint8), "(torch.uint8, (2, 128))"),
        (torch.zeros((), dtype=torch.uint8), "(torch.uint8, ())"),
    ],
)
def test_a_slot_that_is_too_small_or_no_row_of_bytes_is_refused(slot, got):
    message = f"slot_views: a slot must be uint8 of at least 128 bytes; got {got}"
    with pytest.raises(ValueError) as error:
        slot_views(slot, LAYOUT)
    assert str(error.value) == message
    with pytest.raises(ValueError) as error:
        fill_slot(slot, {"a": torch.zeros(3, 5), "b": torch.zeros(1, dtype=torch.bool)})
    assert str(error.value) == message


def test_a_refused_slot_is_not_written_to():
    slot = torch.zeros(127, dtype=torch.uint8)
    with pytest.raises(ValueError):
        fill_slot(slot, {"a": torch.ones(3, 5), "b": torch.ones(1, dtype=torch.bool)})
    assert not slot.any()
