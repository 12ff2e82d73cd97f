"""Where a ring's layers come from: memory, a checkpoint file, the rank that owns them, or all ranks' shards."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import Function

from sfa_functional import LayerParams, SFAConfig
from sfa_functional.params import named_fields, params_from_fields
from sfa_functional.precision import require
from sfa_functional.quantize import BLOCK, dequantize_blocks
from sharding import Collectives, Pending, layer_owners

from .checkpoint import (
    DTYPES,
    SCALE,
    Checkpoint,
    block_counts,
    decode_layer,
    open_checkpoint,
    read_stored,
    stored_layer,
)
from .ring_buffer import (
    Layout,
    TensorSpec,
    fill_slot,
    laid_out,
    lay_out,
    layout_of,
    make_slots,
    slot_bytes,
    slot_views,
    version,
)


@runtime_checkable
class Fetch(Protocol):
    """A layer under way into a slot.

    It may have a ``cancel()``, called in place of ``wait`` when a ring is closed, and a ``check()``, called at every
    `take` of the layer while it lies in the slot, which raises where the slot no longer holds what it should.
    """

    def wait(self) -> object:
        """Return once the slot holds the layer; raise what went wrong. Called once."""


@runtime_checkable
class Source(Protocol):
    """Where layers come from; a ring asks it for one after the other."""

    @property
    def layers(self) -> range:
        """Global numbers of the layers, consecutive."""

    @property
    def slot_multiple(self) -> int:
        """What the size of a slot must be a multiple of."""

    @property
    def device(self) -> torch.device | None:
        """Where the slots lie; None is the CPU."""

    def layout(self, layer: int) -> Layout:
        """Say what of a layer passes through a slot; nothing where it is there already."""

    def start(self, layer: int, slot: Tensor) -> Fetch:
        """Start filling a slot, by the views of `slot_views`; the slot belongs to the fetch until it was waited for."""

    def params(self, layer: int, views: Mapping[str, Tensor]) -> LayerParams:
        """Make a layer's parameters of what its slot holds and of what was there already."""

    def trained(self, layer: int) -> Mapping[str, Tensor]:
        """Return this rank's tensors of a layer that its parameters are made of, by field; none of a file's."""

    def retake(self, layer: int, trained: Mapping[str, Tensor]) -> tuple[LayerParams, list[Tensor]]:
        """Make a layer's parameters again, in memory of their own, as a function of tensors given for `trained`.

        Also returns what else must be differentiated, so that all ranks take part.
        """

    def close(self) -> None:
        """Stop threads that no other ring waits for; the source can be used again afterwards."""


def resident(layers: Sequence[LayerParams], *, start_layer: int = 0) -> Source:
    """Take layers from memory: the source that moves nothing.

    Args:
        layers: at least one, in order.
        start_layer: global number of the first.

    Returns:
        A source; its parameters are those given, gradients included.

    Raises:
        ValueError: no layers, or a negative number.
    """
    require(len(layers) > 0, "resident", "there must be at least one layer", 0)
    known = type(start_layer) is int and start_layer >= 0
    require(known, "resident", "start_layer must be an integer >= 0", repr(start_layer))
    return _Resident(tuple(layers), range(start_layer, start_layer + len(layers)))


def from_checkpoint(
    checkpoint: Checkpoint | str | os.PathLike[str],
    *,
    config: SFAConfig,
    dtype: torch.dtype = torch.float32,
    layers: range | None = None,
    device: torch.device | str | None = None,
) -> Source:
    """Read layers from a checkpoint, each when the ring asks for it, in a thread of its own.

    Bytes are read straight into the slot, as they are stored; a layer is cast, and fp8 multiplied out, when it is
    taken.

    Args:
        checkpoint: a directory, of which only the files that hold these layers are opened, or what `open_checkpoint`
            returned.
        config: the model's sizes and schedule.
        dtype: of the projections, as `load_layer` takes it. Where it is the stored one nothing is copied.
        layers: which of the model's layers, consecutive; None is all.
        device: where slots and parameters lie; None is the CPU.

    Returns:
        A source.

    Raises:
        ValueError: as `open_checkpoint` and `load_layer`, for every layer, here; as `load_layer` in `take` where a
            file has changed since.

    Cost: this call reads headers. Another device takes one slot's worth of CPU memory besides.
    """
    count = config.num_layers
    layers = range(count) if layers is None else layers
    fits = isinstance(layers, range) and layers.step == 1 and 0 <= layers.start < layers.stop <= count
    rule = f"layers must be a range of consecutive layers, of 0..{count - 1}"
    require(fits, "from_checkpoint", rule, f"{layers!r:.100}")
    rule = f"dtype must be one of {', '.join(map(str, DTYPES.values()))}"
    require(dtype in DTYPES.values(), "from_checkpoint", rule, dtype)
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint, layers=layers)
    return _FromCheckpoint(opened, config, dtype, layers, _known_device("from_checkpoint", device))


def from_owners(
    comm: Collectives,
    local_layers: Mapping[int, LayerParams | Mapping[str, Tensor]],
    *,
    fields: Sequence[str] | None = None,
    device: torch.device | str | None = None,
) -> Source:
    """Take layers from the ranks that own them, `layer_owners`' rule, by a broadcast each.

    Args:
        comm: a mesh axis, or a group of its own: then small collectives do not queue behind large broadcasts.
        local_layers: by global number: the layers that this rank owns, and of all others the fields that are not
            broadcast; what it has of others' broadcast fields is not used. `owned_layers` makes it.
        fields: field paths (``"q_b_proj"``, ``"indexer.wq_b"``) that only the owner keeps; None is all.
        device: where the slots of a rank lie that holds no tensor at all; None is the CPU. All other ranks' lie where
            their tensors do.

    Returns:
        A source, alike on every rank. Of an owner's own layer `take` returns its own tensors, which stay valid. The
        other ranks have what was sent when the fetch started: an owner that changes a layer must fetch it again.

    Raises:
        ValueError: the same on every rank: an unknown field, layers that are not consecutive, an owner without its
            layer, a field that is missing on a rank or not the same everywhere in dtype and shape, or another number
            of an fp8 field's factors than it has blocks.
            On the owner alone, in `take` or `checkpoint_layer`: a layer that lies in its slot, or whose fetch is under
            way, and that was changed since the fetch started (a step of an optimizer: open a new ring after it); a
            broadcast field that requires grad and did not when the source was made, or the reverse. Others then fail
            in their next collective with it.

    Gradients: none to what is broadcast; where that requires grad, a backward pass that needs it raises and names
        `checkpoint_layer`.
    Cost: this call gathers a description of every rank's tensors. Resident: 1/N of the layers' fields that are
        broadcast, and all of the others. The owner sends from where `owned_layers` laid its tensors; others, such as
        those that learn, it first copies into the slot.
    Source: the layer-sharded linear weights of vllm-project/vllm-ascend.
    """
    local = {layer: _by_field(layer_) for layer, layer_ in local_layers.items()}
    return _FromOwners(comm, local, fields, _known_device("from_owners", device))


def owned_layers(
    layers: Sequence[LayerParams | Mapping[str, Tensor]],
    rank: int,
    num_ranks: int,
    *,
    start_layer: int = 0,
    fields: Sequence[str] | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Keep what one rank needs for `from_owners`: its own layers, and of the others what is not broadcast.

    What this rank will broadcast of a layer is copied into one piece of memory, from which it can be sent; tensors
    that require grad stay the caller's own, and so does all that is not broadcast.

    Args:
        layers: all layers, in order.
        rank: whose part.
        num_ranks: N.
        start_layer: global number of the first layer.
        fields: as `from_owners` takes them.

    Returns:
        By global number, fields by path, in the order given.

    Raises:
        ValueError: a number out of range, or fields that are one text.

    Cost: a copy of 1/N of what is broadcast, which replaces the caller's where that is let go.
    """
    require(not isinstance(fields, str), "owned_layers", _FIELDS, repr(fields))
    owners = layer_owners(len(layers), num_ranks, start_layer=start_layer)
    _require_rank("owned_layers", rank, num_ranks)
    kept = {}
    for i, (layer, owner) in enumerate(zip(layers, owners, strict=True)):
        tensors = _by_field(layer)
        moved = {name: x for name, x in tensors.items() if name in _moved(tensors, fields)}
        if owner != rank:
            kept[start_layer + i] = {name: x for name, x in tensors.items() if name not in moved}
        elif any(x.requires_grad for x in moved.values()):
            kept[start_layer + i] = tensors
        else:
            kept[start_layer + i] = {**tensors, **lay_out(moved)}
    return kept


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerShard:
    """One rank's part of a layer: an equal run of the bytes of its slot."""

    layout: Layout
    data: Tensor  # uint8
    rank: int
    num_ranks: int


def shard_layer(layer: LayerParams | Mapping[str, Tensor], rank: int, num_ranks: int) -> LayerShard:
    """Cut a layer into N equal runs of bytes and keep one, for `from_shards`.

    Args:
        layer: all of it.
        rank: whose part.
        num_ranks: N.

    Returns:
        The part: 1/N of the layer, in memory of its own.

    Raises:
        ValueError: a number out of range.

    Gradients: none: a part is bytes. Weights that require grad are copied as they are now and learn no more.
    """
    _require_rank("shard_layer", rank, num_ranks)
    tensors = _by_field(layer)
    layout = layout_of(tensors)
    slot = torch.zeros(slot_bytes(layout, multiple=num_ranks), dtype=torch.uint8, device=_device(tensors, None))
    fill_slot(slot, tensors)
    return LayerShard(layout=layout, data=slot.chunk(num_ranks)[rank].clone(), rank=rank, num_ranks=num_ranks)


def from_shards(comm: Collectives, shards: Mapping[int, LayerShard]) -> Source:
    """Take layers from all ranks, of which each keeps 1/N, by a gather each.

    Args:
        comm: a mesh axis, or a group of its own.
        shards: by global number, from `shard_layer`.

    Returns:
        A source, alike on every rank.

    Raises:
        ValueError: the same on every rank: layers that are not consecutive, shards that are not of one layer, or that
            were cut for another rank or number of ranks, or another number of an fp8 field's factors than it has
            blocks.

    Gradients: none to the weights, which a `LayerShard` holds as bytes: from here they are frozen, also where those
        that were cut require grad. To train them, use `from_owners`.
    Cost: this call gathers a description of every rank's shards. Resident: 1/N of every layer.
    Source: fully sharded data parallelism: Zhao et al., "PyTorch FSDP" (2023), section 3.2.
    """
    return _FromShards(comm, dict(shards))


class _Collective:
    """A fetch in which other ranks take part."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.wait()

    def cancel(self) -> None:
        """Leave it: it keeps the slot alive, and the others may never come."""


class _Sent(_Collective):
    """An owner's part of a broadcast. The others keep what was sent for as long as it lies in their slots."""

    def __init__(self, pending: Pending, layer: int, sent: Sequence[Tensor]) -> None:
        super().__init__(pending)
        self._layer, self._sent = layer, [(x, version(x)) for x in sent]

    def check(self) -> None:
        """Raise where the owner's tensors are no longer what the others have."""
        same = all(version(x) == before for x, before in self._sent)
        rule = f"layer {self._layer} must be as it was sent; to change it, close the ring and open a new one"
        require(same, "from_owners", rule, "tensors changed since")


class _Untrained(Function):
    """A tensor that its owner trains, where no gradient finds the way back: without a word it would not learn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise RuntimeError(f"take: weights of layer {ctx.layer} require grad; run the layer by checkpoint_layer")


class _Done:
    def wait(self) -> None:
        pass


class _Resident:
    slot_multiple, device = 1, None

    def __init__(self, params: tuple[LayerParams, ...], layers: range) -> None:
        self._params, self.layers = params, layers

    def layout(self, layer: int) -> Layout:
        return {}

    def start(self, layer: int, slot: Tensor) -> Fetch:
        return _Done()

    def params(self, layer: int, views: Mapping[str, Tensor]) -> LayerParams:
        return self._params[self.layers.index(layer)]

    def trained(self, layer: int) -> Mapping[str, Tensor]:
        return _by_field(self._params[self.layers.index(layer)])

    def retake(self, layer: int, trained: Mapping[str, Tensor]) -> tuple[LayerParams, list[Tensor]]:
        return params_from_fields({**self.trained(layer), **trained}), []

    def close(self) -> None:
        pass


class _FromCheckpoint:
    slot_multiple = 1

    def __init__(
        self, checkpoint: Checkpoint, config: SFAConfig, dtype: torch.dtype, layers: range, device: torch.device | None
    ) -> None:
        self.layers, self.device, self._dtype = layers, device, dtype
        self._stored = {layer: stored_layer(checkpoint, layer, config=config) for layer in layers}
        self._reader: ThreadPoolExecutor | None = None
        self._reads: list[Future[None]] = []

    def layout(self, layer: int) -> Layout:
        return {name: TensorSpec(tensor.dtype, tensor.shape) for name, tensor in self._stored[layer].items()}

    def start(self, layer: int, slot: Tensor) -> Fetch:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="layer-reader")
        self._reads = [read for read in self._reads if not read.done()]
        self._reads.append(self._reader.submit(self._read, layer, slot, _queued_until_here(slot.device)))
        return _Reading(self._reads[-1])

    def _read(self, layer: int, slot: Tensor, queued: torch.Event | None) -> None:
        near = slot if slot.device.type == "cpu" else torch.empty(slot.shape, dtype=torch.uint8, device="cpu")
        read_stored(self._stored[layer], slot_views(near, self.layout(layer)))
        if near is not slot:
            if queued is not None:
                queued.synchronize()
            with torch.inference_mode(slot.is_inference()):  # a mode of the thread that made the slot, not of this one
                slot.copy_(near)

    def params(self, layer: int, views: Mapping[str, Tensor]) -> LayerParams:
        return decode_layer(views, self._dtype)

    def trained(self, layer: int) -> Mapping[str, Tensor]:
        return {}

    def retake(self, layer: int, trained: Mapping[str, Tensor]) -> tuple[LayerParams, list[Tensor]]:
        return _fetched(self, layer), []

    def close(self) -> None:
        if self._reader is not None and all(read.done() for read in self._reads):
            self._reader.shutdown()
            self._reader = None


class _Reading:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def cancel(self) -> None:
        if not self._future.cancel():
            self._future.result()


class _FromOwners:
    slot_multiple = 1

    def __init__(
        self,
        comm: Collectives,
        local: Mapping[int, dict[str, Tensor]],
        fields: Sequence[str] | None,
        device: torch.device | None,
    ) -> None:
        self._comm = comm
        tensors = {f"{layer}.{name}": x for layer, by_field in local.items() for name, x in by_field.items()}
        self.device = _device(tensors, device)
        layouts = {layer: layout_of(by_field) for layer, by_field in local.items()}
        trains = {layer: [name for name, x in by_field.items() if x.requires_grad] for layer, by_field in local.items()}
        named = fields if fields is None or isinstance(fields, str) else list(fields)
        told = {"fields": named, "layers": _spell(layouts), "trains": trains}
        answers = _exchange(comm, told, self.device)
        others = [rank for rank, answer in enumerate(answers) if answer["fields"] != answers[0]["fields"]]
        rule = "fields must be the same on every rank"
        require(not others, "from_owners", rule, f"others on rank {others[0] if others else None}")
        require(not isinstance(fields, str), "from_owners", _FIELDS, repr(fields))
        everyones = [_read_layouts(answer["layers"]) for answer in answers]
        self.layers = _consecutive("from_owners", [layer for layouts in everyones for layer in layouts])
        self._owners = layer_owners(len(self.layers), comm.size, start_layer=self.layers.start)
        names = {name for layouts in everyones for layout in layouts.values() for name in layout}
        known = {name for name in names if not name.endswith(SCALE)}
        for field in fields or ():
            require(field in known, "from_owners", f"a field must be of {sorted(known)}", repr(field))
        self._layouts: dict[int, Layout] = {}
        self._trains: dict[int, list[str]] = {}
        for layer, owner in zip(self.layers, self._owners, strict=True):
            whole = everyones[owner].get(layer, {})
            rule = f"rank {owner} must have layer {layer}, which it owns"
            require(bool(whole), "from_owners", rule, "no field of it")
            _require_factors("from_owners", layer, whole)
            moved = _moved(whole, fields)
            self._trains[layer] = answers[owner]["trains"][str(layer)]
            self._layouts[layer] = {name: spec for name, spec in whole.items() if name in moved}
            for rank, held in enumerate(everyones):
                for name in held.get(layer, {}):
                    rule = f"{name} of layer {layer}, not broadcast, must be missing on rank {rank}, as on its owner"
                    require(name in whole, "from_owners", rule, _show(held[layer][name]))
                for name, spec in whole.items():
                    found = held.get(layer, {}).get(name)
                    if name not in moved:
                        rule = f"{name} of layer {layer}, not broadcast, must be {_show(spec)} on rank {rank}"
                        require(found == spec, "from_owners", rule, _show(found))
        # what others broadcast is not this rank's to use, though it may have been given all layers
        self._local = {
            layer: {name: x for name, x in by_field.items() if self._owns(layer) or name not in self._layouts[layer]}
            for layer, by_field in local.items()
        }

    def _owns(self, layer: int) -> bool:
        return self._owners[self.layers.index(layer)] == self._comm.rank

    def _require_as_made(self, layer: int) -> None:
        """Refuse weights that learn now and did not when all ranks agreed on it, or the reverse."""
        for name in self._layouts[layer] if self._owns(layer) else ():
            learns, learned = self._local[layer][name].requires_grad, name in self._trains[layer]
            must = "must require grad" if learned else "must not require grad"
            rule = f"{name} of layer {layer} {must}, as when the source was made; to switch it, make a new source"
            require(learns == learned, "from_owners", rule, f"requires_grad={learns}")

    def layout(self, layer: int) -> Layout:
        return self._layouts[layer]

    def start(self, layer: int, slot: Tensor) -> Fetch:
        owner = self._owners[self.layers.index(layer)]
        used = slot[: slot_bytes(self._layouts[layer])]
        if owner != self._comm.rank:
            return _Collective(self._comm.broadcast_start(used, owner, out=used))
        self._require_as_made(layer)
        sent = {name: self._local[layer][name] for name in self._layouts[layer]}
        laid = laid_out(sent)
        if laid is None:
            fill_slot(used, sent)
        else:
            used = laid
        return _Sent(self._comm.broadcast_start(used, owner, out=used), layer, list(sent.values()))

    def params(self, layer: int, views: Mapping[str, Tensor]) -> LayerParams:
        self._require_as_made(layer)
        tensors = {**views, **self._local.get(layer, {})}  # an owner's tensors lie where they lay
        for name in views:
            tensors[name] = tensors[name].detach()
            if name in self._trains[layer]:
                token = torch.empty(0, device="cpu", requires_grad=True)
                tensors[name] = _Untrained.apply(tensors[name], token, layer)  # type: ignore[no-untyped-call]
        return _decoded(tensors)

    def trained(self, layer: int) -> Mapping[str, Tensor]:
        self._require_as_made(layer)
        local = self._local.get(layer, {})
        elsewhere = [name for name in self._trains[layer] if name in self._layouts[layer] and name not in local]
        if not elsewhere:
            return local
        # where the owner's weights learn, every rank must run the backward pass: nothing of a tensor that learns here
        # sees to it
        learning = (x for by_field in self._local.values() for x in by_field.values() if x.requires_grad)
        nothing = next((x.flatten()[:0] for x in learning), None)
        if nothing is None:
            nothing = torch.empty(0, device=self.device).requires_grad_()
        return {**local, **dict.fromkeys(elsewhere, nothing)}

    def retake(self, layer: int, trained: Mapping[str, Tensor]) -> tuple[LayerParams, list[Tensor]]:
        self._require_as_made(layer)
        owner, further = self._owners[self.layers.index(layer)], []
        tensors = {**self._local.get(layer, {}), **trained}
        for name, spec in self._layouts[layer].items():
            brought = tensors.get(name)
            if owner != self._comm.rank or brought is None:
                brought = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
                if name in self._trains[layer]:
                    further.append(brought.requires_grad_())
            tensors[name] = self._comm.broadcast(brought, owner)
        return _decoded(tensors), further

    def close(self) -> None:
        pass


class _FromShards:
    def __init__(self, comm: Collectives, shards: Mapping[int, LayerShard]) -> None:
        self._comm, self._shards, self.slot_multiple = comm, shards, comm.size
        self.device = _device({str(layer): shard.data for layer, shard in shards.items()}, None)
        layouts = _spell({layer: shard.layout for layer, shard in shards.items()})
        data = {
            layer: [str(shard.data.dtype), list(shard.data.shape), shard.rank, shard.num_ranks]
            for layer, shard in shards.items()
        }
        told = _exchange(comm, {"layouts": layouts, "data": data}, self.device)
        for rank, answer in enumerate(told):
            same = json.dumps(answer["layouts"]) == json.dumps(told[0]["layouts"])  # the order of fields too
            require(same, "from_shards", "shards must be of one model", f"others on rank {rank}")
        self._layouts = _read_layouts(told[0]["layouts"])
        self.layers = _consecutive("from_shards", list(self._layouts))
        for layer, layout in self._layouts.items():
            want = slot_bytes(layout, multiple=comm.size) // comm.size
            for rank, answer in enumerate(told):
                rule = f"the shard of layer {layer} must be uint8 of {want} bytes on rank {rank}"
                *got, part, of = answer["data"][str(layer)]
                whose = f"the shard of layer {layer} on rank {rank} must be cut for rank {rank} of {comm.size}"
                require((part, of) == (rank, comm.size), "from_shards", whose, f"rank {part} of {of}")
                require(got == ["torch.uint8", [want]], "from_shards", rule, got)
            _require_factors("from_shards", layer, self._layouts[layer])

    def layout(self, layer: int) -> Layout:
        return self._layouts[layer]

    def start(self, layer: int, slot: Tensor) -> Fetch:
        used = slot[: slot_bytes(self._layouts[layer], multiple=self._comm.size)]
        return _Collective(self._comm.all_gather_start(self._shards[layer].data, out=used))

    def params(self, layer: int, views: Mapping[str, Tensor]) -> LayerParams:
        return _decoded(views)

    def trained(self, layer: int) -> Mapping[str, Tensor]:
        return {}

    def retake(self, layer: int, trained: Mapping[str, Tensor]) -> tuple[LayerParams, list[Tensor]]:
        return _fetched(self, layer), []

    def close(self) -> None:
        pass


def _queued_until_here(device: torch.device) -> torch.Event | None:
    """Mark, on an accelerator, the end of the work queued so far, which may still read a slot that is to be refilled.

    The copy into the slot runs in another thread, on a stream of its own that would not wait for it.
    """
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != device.type:
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _fetched(source: Source, layer: int) -> LayerParams:
    """Fetch a layer by itself, into a slot of its own."""
    layout = source.layout(layer)
    (slot,) = make_slots(1, slot_bytes(layout, multiple=source.slot_multiple), source.device)
    try:
        source.start(layer, slot).wait()
    finally:
        source.close()
    return source.params(layer, slot_views(slot, layout))


def _by_field(layer: LayerParams | Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(named_fields(layer)) if isinstance(layer, LayerParams) else dict(layer)


def _decoded(tensors: Mapping[str, Tensor]) -> LayerParams:
    """Multiply fp8 weights out to bfloat16, the published models' dtype; leave all others as they are."""
    plain = {name: x for name, x in tensors.items() if not name.endswith(SCALE)}
    for name in plain:
        if name + SCALE in tensors:
            plain[name] = dequantize_blocks(plain[name], tensors[name + SCALE], torch.bfloat16)
    return params_from_fields(plain)


def _moved(tensors: Mapping[str, Any], fields: Sequence[str] | None) -> set[str]:
    return {name for name in tensors if fields is None or name.removesuffix(SCALE) in fields}


def _device(tensors: Mapping[str, Tensor], otherwise: torch.device | None) -> torch.device:
    return next((x.device for x in tensors.values()), otherwise or torch.device("cpu"))


def _known_device(function: str, device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{function}: device must be one that torch knows; got {device!r}") from error


_FIELDS = "fields must be a sequence of names, or None"


def _require_factors(function: str, layer: int, layout: Layout) -> None:
    """Refuse fp8 fields with another number of factors than they have blocks."""
    for name, spec in layout.items():
        if name + SCALE in layout:
            want, found = block_counts(spec.shape), layout[name + SCALE].shape
            rule = f"{name}{SCALE} of layer {layer} must be {list(want)}, one factor per block of {BLOCK}"
            require(found == want, function, rule, list(found))


def _exchange(comm: Collectives, told: Any, device: torch.device) -> list[Any]:
    """Tell every rank what every other one tells; plain values."""
    text = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8, device=device)
    sizes = comm.all_gather(torch.tensor([text.numel()], device=device)).tolist()
    padded = torch.cat([text, text.new_zeros(max(sizes) - text.numel())])
    rows = comm.all_gather(padded).view(comm.size, -1).cpu()
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def _spell(layouts: Mapping[int, Layout]) -> dict[str, Any]:
    return {
        str(layer): {name: [str(spec.dtype).removeprefix("torch."), list(spec.shape)] for name, spec in layout.items()}
        for layer, layout in layouts.items()
    }


def _read_layouts(told: Mapping[str, Any]) -> dict[int, Layout]:
    return {
        int(layer): {name: TensorSpec(getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in layout.items()}
        for layer, layout in told.items()
    }


def _consecutive(function: str, layers: Sequence[int]) -> range:
    found = sorted(set(layers))
    rule = "layers must be consecutive, at least one"
    require(bool(found) and found == list(range(found[0], found[0] + len(found))), function, rule, found)
    return range(found[0], found[-1] + 1)


def _show(spec: TensorSpec | None) -> str:
    return "missing" if spec is None else f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def _require_rank(function: str, rank: int, num_ranks: int) -> None:
    known = type(rank) is int and type(num_ranks) is int and 0 <= rank < num_ranks
    require(known, function, "rank must be in 0..num_ranks - 1", (rank, num_ranks))
