"""Record what every query selected and give it back later: a training run that attends to what a rollout attended to.

A recording speaks of requests and of positions within them, so that it fits the same tokens however they are cut into
steps, chunks or ranks, and wherever a batch pads them.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from .batch import Batch
from .config import SFAConfig
from .precision import require


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """Selections of whole requests, one after the other."""

    lengths: tuple[int, ...]  # tokens of each request
    selections: dict[int, Int32[Tensor, "T K"]]  # by layer that chose; positions within the request, unused entries -1

    @property
    def topk(self) -> int:
        """K, the width of every selection."""
        return next(iter(self.selections.values())).shape[1] if self.selections else 0


class Step(NamedTuple):
    """What one layer selected for the tokens of one batch."""

    layer: int
    batch: Batch
    selection_TK: Int32[Tensor, "T K"]


def record_selections(steps: Iterable[Step]) -> Recording:
    """Put together what layers selected, step by step, into a recording of whole requests.

    Tokens that belong to no request, or do not see themselves, are padding and left out. A request begins at its first
    token that is none: positions count from there.

    Args:
        steps: of every layer that chose, in any order: one step for the whole batch, or one for each chunk or decoded
            token of the same requests. Tokens may come again, as in decoding without a cache, with the same selection.

    Returns:
        `Recording`, on the CPU.

    Raises:
        ValueError: no steps, selections that are not int32 [T, K] of one width, a token that is missing or selected
            other keys when it came again, or layers that recorded different tokens. Waits for the device.

    Gradients: none (integers).
    Cost: 4·K bytes per token and layer.
    """
    by_layer: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    count = 0
    for layer, batch, selection_TK in steps:
        fits = selection_TK.dtype == torch.int32 and selection_TK.ndim == 2
        fits = fits and selection_TK.shape[0] == batch.position_T.shape[0]
        got = (selection_TK.dtype, tuple(selection_TK.shape))
        rule = f"a selection must be int32 [{batch.position_T.shape[0]}, K]"
        require(fits, "record_selections", rule, got)
        by_layer.setdefault(layer, []).append(_tokens(batch, selection_TK))
        count = max(count, batch.key_start_B.shape[0])  # the last requests may have no tokens
    require(bool(by_layer), "record_selections", "there must be at least one step", 0)
    widths = sorted({part[2].shape[1] for parts in by_layer.values() for part in parts})
    require(len(widths) == 1, "record_selections", "all selections must have one width K", widths)
    selections, lengths = {}, None
    for layer in sorted(by_layer):
        request_T, position_T, selection_TK = map(torch.cat, zip(*by_layer[layer], strict=True))
        found, order = _whole(layer, request_T, position_T, selection_TK, count)
        rule = f"layer {layer} must have recorded the tokens that layer {min(by_layer)} did"
        require(lengths in (None, found), "record_selections", rule, f"requests of {list(found)} tokens")
        lengths, selections[layer] = found, selection_TK[order]
    assert lengths is not None
    return Recording(lengths=lengths, selections=selections)


def replay_selection(recording: Recording, layer: int, batch: Batch) -> Int32[Tensor, "T K"]:
    """Return what the tokens of a batch selected when they were recorded, for ``selection=`` of a layer function.

    A request begins at the first key row that any of its tokens in this batch sees: what lies before is padding. Where
    tokens of one request see different first rows (packed documents in a row), give the request whole.

    Args:
        recording: of the requests that the batch goes through, in the same order; of a layer that shares a selection,
            that of the layer it shares with is taken.
        layer: number of the layer, as it was recorded.
        batch: all tokens of the requests, or some: a chunk, a decoded token, one rank's part.

    Returns:
        int32 [T, K] positions within each query's request, on the batch's device; -1 for tokens of no request.

    Raises:
        ValueError: no selection recorded at or before the layer, another number of requests, or a token that was not
            recorded. Waits for the device.

    Gradients: none (integers).
    Cost: a copy of T·K integers.
    """
    before = [number for number in recording.selections if number <= layer]
    rule = f"layer {layer}, or one before it, must be recorded"
    require(bool(before), "replay_selection", rule, sorted(recording.selections))
    selection_TK = recording.selections[max(before)]
    request_T, position_T, offset_T = _places(batch)
    count = batch.seq_len_B.shape[0]
    rule = f"the batch must have the {len(recording.lengths)} requests recorded"
    require(count == len(recording.lengths), "replay_selection", rule, count)
    lengths = torch.tensor(recording.lengths, dtype=torch.int64)
    known_T = request_T >= 0
    length_T = lengths[request_T.clamp(min=0)] if count else torch.zeros_like(position_T)
    past_T = known_T & (position_T >= length_T)
    if bool(past_T.any()):
        t = int(past_T.nonzero()[0, 0])
        rule = f"request {int(request_T[t])} has {int(length_T[t])} tokens recorded"
        raise ValueError(f"replay_selection: {rule}; got position {int(position_T[t])}")
    first = lengths.cumsum(0) - lengths
    row_T = torch.where(known_T, first[request_T.clamp(min=0)] + position_T, 0) if count else position_T
    found_TK = selection_TK[row_T] if len(selection_TK) else selection_TK.new_full((len(row_T), recording.topk), -1)
    used_TK = known_T[:, None] & (found_TK >= 0)
    return torch.where(used_TK, found_TK + offset_T[:, None].int(), -1).to(batch.position_T.device)


def config_hash(config: SFAConfig) -> str:
    """Return a hash of everything in a config, alike on every machine: SHA-256 of its fields as JSON."""
    return hashlib.sha256(config_text(config).encode()).hexdigest()


def config_text(config: SFAConfig) -> str:
    """Spell a config as JSON, fields in the order of their names; equal configs alike, be it 1e4 or 10000."""
    return json.dumps(_spelt(asdict(config)), sort_keys=True)


def different_field(text: str, config: SFAConfig) -> tuple[str, Any, Any] | None:
    """Return the first field in which a config differs from one spelt by `config_text`: name, there, here; or None."""
    told, mine = json.loads(text), json.loads(config_text(config))
    require(isinstance(told, dict), "different_field", "text must be a JSON object", type(told).__name__)
    for name in sorted({*told, *mine}):
        if told.get(name) != mine.get(name):
            return name, told.get(name), mine.get(name)
    return None


def _spelt(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spelt(inner) for name, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tokens(batch: Batch, selection_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    request_T, position_T, offset_T = _places(batch)
    selection_TK = selection_TK.cpu()
    selection_TK = torch.where(selection_TK >= 0, selection_TK - offset_T[:, None].int(), -1)
    known_T = request_T >= 0
    return request_T[known_T], position_T[known_T], selection_TK[known_T]


def _places(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's request, its position after the request's padding in front, and the length of that."""
    request_T, position_T = batch.request_T.cpu(), batch.position_T.cpu()
    start_T, end_T, key_start_B = batch.start_T.cpu(), batch.end_T.cpu(), batch.key_start_B.cpu()
    count = key_start_B.shape[0]
    if count == 0:
        return request_T, position_T, torch.zeros_like(position_T)
    place_T = request_T.clamp(min=0)
    own_T = key_start_B[place_T] + position_T  # padding behind a request sees the request, but not itself
    known_T = (request_T >= 0) & (start_T <= own_T) & (own_T < end_T)
    first_T = torch.where(known_T, start_T.long() - key_start_B[place_T], torch.iinfo(torch.int64).max)
    offset_B = torch.full((count,), torch.iinfo(torch.int64).max).scatter_reduce(0, place_T, first_T, "amin")
    offset_T = torch.where(known_T, offset_B[place_T], 0)
    return torch.where(known_T, request_T, -1), torch.where(known_T, position_T - offset_T, -1), offset_T


def _whole(
    layer: int, request_T: Tensor, position_T: Tensor, selection_TK: Tensor, count: int
) -> tuple[tuple[int, ...], Tensor]:
    """Return each request's length and the order that puts tokens where they belong; refuse gaps and contradictions."""
    if len(request_T) == 0:
        return (0,) * count, request_T
    order = torch.argsort(request_T * (int(position_T.max()) + 1) + position_T, stable=True)
    request_T, position_T, selection_TK = request_T[order], position_T[order], selection_TK[order]
    again_T = torch.zeros_like(request_T, dtype=torch.bool)
    again_T[1:] = (request_T[1:] == request_T[:-1]) & (position_T[1:] == position_T[:-1])
    other_T = (selection_TK != selection_TK.roll(1, 0)).any(-1) & again_T
    if bool(other_T.any()):
        t = int(other_T.nonzero()[0, 0])
        where = f"position {int(position_T[t])} of request {int(request_T[t])} in layer {layer}"
        raise ValueError(f"record_selections: a token must select the same keys each time; got others at {where}")
    order, request_T, position_T = order[~again_T], request_T[~again_T], position_T[~again_T]
    lengths_B = torch.bincount(request_T, minlength=count)
    place_T = torch.arange(len(order)) - (lengths_B.cumsum(0) - lengths_B)[request_T]
    missing_T = position_T != place_T
    if bool(missing_T.any()):
        t = int(missing_T.nonzero()[0, 0])
        where = f"position {int(place_T[t])} of request {int(request_T[t])} in layer {layer}"
        raise ValueError(f"record_selections: every token must be recorded; got none at {where}")
    return tuple(lengths_B.tolist()), order
