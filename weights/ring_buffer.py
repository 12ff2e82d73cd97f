"""Slots of a ring: flat buffers made once, with a view for every tensor. The one place where tensors are written."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sfa_functional.precision import require

ALIGNMENT = 64
"""Bytes between the starts of tensors in a slot: a multiple of every dtype's size and of a cache line."""


class TensorSpec(NamedTuple):
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


Layout = Mapping[str, TensorSpec]
"""Name -> what travels under it, in the order in which it lies in a slot."""


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return what tensors are, without their values."""
    return {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in tensors.items()}


def slot_bytes(layout: Layout, *, multiple: int = 1) -> int:
    """Return the bytes of a slot that holds a layer: each tensor begins at a multiple of `ALIGNMENT`.

    Args:
        layout: of the layer.
        multiple: the result is rounded up to it, for slots that ranks cut into equal parts.

    Returns:
        Bytes, a multiple of both.
    """
    count = sum(_aligned(spec.num_bytes) for spec in layout.values())
    return -(-count // (multiple * ALIGNMENT)) * multiple * ALIGNMENT


def slot_views(slot: Tensor, layout: Layout) -> dict[str, Tensor]:
    """View a slot as the tensors of a layer, which are changed when the slot is filled anew.

    Args:
        slot: uint8, one-dimensional.
        layout: of the layer.

    Returns:
        Name -> view.

    Raises:
        ValueError: a slot that is too small or not uint8.
    """
    fits = slot.dtype == torch.uint8 and slot.ndim == 1 and slot.numel() >= slot_bytes(layout)
    got = (slot.dtype, tuple(slot.shape))
    require(fits, "slot_views", f"a slot must be uint8 of at least {slot_bytes(layout)} bytes", got)
    views, start = {}, 0
    for name, spec in layout.items():
        views[name] = slot[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
        start += _aligned(spec.num_bytes)
    return views


def make_slots(count: int, num_bytes: int, device: torch.device | str | None = None) -> list[Tensor]:
    """Allocate the slots of a ring, on the CPU where no device is named; nothing is allocated after that."""
    device = torch.device("cpu") if device is None else device  # a caller's default device is not asked
    return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]


def lay_out(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy a layer into one piece of memory, where it lies as in a slot, and return it as views of that."""
    layout = layout_of(tensors)
    device = next((x.device for x in tensors.values()), "cpu")
    whole = torch.zeros(slot_bytes(layout), dtype=torch.uint8, device=device)
    fill_slot(whole, tensors)
    return slot_views(whole, layout)


def laid_out(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the memory that tensors lie in as in a slot, or None where they lie elsewhere."""
    layout = layout_of(tensors)
    first = next(iter(tensors.values()), None)
    if first is None:
        return None
    memory, start = first.untyped_storage(), _first_byte(first)
    if start % ALIGNMENT or memory.nbytes() < start + slot_bytes(layout):
        return None
    expected = start
    for x in tensors.values():
        beside = x.numel() == 0 or _first_byte(x) == expected
        if not (beside and x.is_contiguous() and x.untyped_storage().data_ptr() == memory.data_ptr()):
            return None
        expected += _aligned(x.numel() * x.element_size())
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(memory, start, (slot_bytes(layout),), (1,))


def fill_slot(slot: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy a layer into a slot, bit for bit."""
    with torch.no_grad():
        for name, view in slot_views(slot, layout_of(tensors)).items():
            view.view(-1).view(torch.uint8).copy_(_bytes(tensors[name]))
    mark_written(slot)


def mark_written(slot: Tensor) -> None:
    """Tell autograd that a slot was written, after a collective or a file did it behind its back.

    Neither leaves a trace in the version counter, so that a backward pass which still needs the old values would take
    the new ones without a word. With it, the pass raises, in torch's words: the operation that saved a weight finds it
    changed before any node of ours could say whose it was. A node for the weight would come too late, and would make
    frozen weights cost their gradient; hooks on what is saved would displace the caller's and not work under func.grad.
    """
    if not slot.is_inference():  # those have no version, and no gradients
        increment_version(slot)


def version(x: Tensor) -> int | None:
    """Return how often a tensor's memory was written, by autograd's count; None where it keeps none."""
    return None if x.is_inference() else x._version


def spoil(slot: Tensor) -> None:
    """Fill a slot with bytes that are NaN in every floating dtype that weights have, so that a stale use shows."""
    slot.fill_(0xFF)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def _first_byte(x: Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
