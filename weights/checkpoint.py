"""Attention layers out of safetensors checkpoints, one at a time, and into them; pickles are never read."""

import ctypes
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sfa_functional import DEEPSEEK_NAMES, HF_NAMES, LayerParams, SFAConfig, param_shapes
from sfa_functional.params import NORM_FIELDS, named_fields, params_from_fields
from sfa_functional.precision import require
from sfa_functional.quantize import BLOCK, dequantize_blocks

LAYOUTS = (("model.layers.{}.self_attn.", HF_NAMES), ("layers.{}.attn.", DEEPSEEK_NAMES))
"""The prefixes and name tables a layer is looked for under, in this order."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What may be stored: the names of the safetensors format."""

FP8 = "F8_E4M3"
"""The one further dtype that a projection may have, with a factor for every block of it beside it."""

SCALE = "_scale_inv"
"""What the key of the factors has more than the key of the codes; in spite of its name it multiplies."""

MAX_HEADER = 100_000_000
"""Bytes of the longest header that the safetensors library reads."""

MOST = 2**63 - 1
"""The largest size or offset: of what torch and files can have."""

CHUNK = 2**24
"""Bytes of one read."""

_KEY = re.compile(r"(?:model\.layers\.([0-9]{1,9})\.self_attn|layers\.([0-9]{1,9})\.attn)\.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What stands in a checkpoint: plain values, no open files and no weights."""

    path: Path
    config: Mapping[str, Any]  # config.json, parsed; `SFAConfig.from_hf` reads it
    files: Mapping[str, Path]  # key -> the file that holds it
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]  # key -> dtype as stored ("BF16", ...) and shape

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the model's layers whose attention it holds, in order."""
        return tuple(layer for layer in self._numbers() if layer < self._count())

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Numbers of the layers of multi-token prediction; they follow the model's and are no part of it."""
        return tuple(layer for layer in self._numbers() if layer >= self._count())

    def _count(self) -> int:
        count = self.config.get("num_hidden_layers")
        if type(count) is not int or count < 1:
            raise _refusal("Checkpoint", self.path, "num_hidden_layers must be an integer >= 1", repr(count))
        return count

    def _numbers(self) -> list[int]:
        return sorted({layer for key in self.tensors if (layer := _layer_of(key)) is not None})


class StoredTensor(NamedTuple):
    """Which file holds a tensor, and what it is."""

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def open_checkpoint(path: str | os.PathLike[str], *, layers: Iterable[int] | None = None) -> Checkpoint:
    """Read what a checkpoint holds, without its weights.

    The directory has a ``config.json`` and either ``model.safetensors`` or ``model.safetensors.index.json`` with the
    files that it names; where there are both, the single file counts, as in transformers. An index may only name
    files inside the directory. Links are followed before that is judged; the one place outside that they may lead to
    is the blob store of the Hugging Face cache that the directory is a snapshot of.

    Args:
        path: the directory.
        layers: numbers of the layers that will be read. Only files that hold attention weights of them are opened,
            and only these weights are in the result; None is everything.

    Returns:
        `Checkpoint`.

    Raises:
        ValueError: in one line with file, rule and value: no such directory, a file that is missing, unreadable,
            truncated or not what its name says, an index that names a file outside the directory or a key that the
            file lacks, or weights that are there only as pickles.

    Cost: reads config.json, the index and the header of every file that it opens; no tensor.
    Source: the format section of the safetensors README; Hugging Face transformers 5.24, modeling_utils.py, for the
    order of the names.
    """
    known = isinstance(path, str | os.PathLike)
    require(known, "open_checkpoint", "path must be a directory's, a str or os.PathLike", _short(repr(path)))
    directory = Path(path).absolute()
    named = layers is None or (isinstance(layers, Iterable) and not isinstance(layers, str))
    if not named:
        raise _refusal("open_checkpoint", directory, "layers must be a collection of numbers, or None", repr(layers))
    try:
        if not directory.is_dir():
            raise _refusal("open_checkpoint", directory, "must be a directory", _kind(directory))
        config = _read_object(directory / "config.json")
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        wanted = None if layers is None else frozenset(layers)
        if single.exists():
            entries = {key: (single, *entry) for key, entry in _read_header(single).items() if _is_wanted(key, wanted)}
        elif index.exists():
            entries = _read_index(index, wanted)
        else:
            raise _no_weights(directory)
        return Checkpoint(
            path=directory,
            config=config,
            files={key: file for key, (file, *_) in entries.items()},
            tensors={key: (dtype, shape) for key, (_, dtype, shape, _) in entries.items()},
        )
    except OSError as error:
        where = error.filename or directory
        raise _refusal("open_checkpoint", where, "must be readable", error.strerror or error) from error


def check_layers(checkpoint: Checkpoint, config: SFAConfig) -> None:
    """Check that a checkpoint holds the attention of every layer, in the shapes and dtypes that `load_layer` reads.

    Args:
        checkpoint: from `open_checkpoint`.
        config: the model's sizes; its schedule decides which layers have an indexer.

    Raises:
        ValueError: the first key that is missing, has another shape or a dtype that can't be read, in one line.

    Cost: looks at the headers that `open_checkpoint` has read; opens no file.
    """
    for layer in range(config.num_layers):
        _layer_keys("check_layers", checkpoint, layer, config)


def load_layer(
    checkpoint: Checkpoint, layer: int, *, config: SFAConfig, dtype: torch.dtype = torch.float32
) -> LayerParams:
    """Read one layer's attention weights.

    Both spellings of the keys are known: Hugging Face's (``model.layers.{i}.self_attn.``) and that of DeepSeek's own
    inference code (``layers.{i}.attn.``).

    Args:
        checkpoint: from `open_checkpoint`.
        layer: 0-based number.
        config: the model's sizes; its schedule decides whether there is an indexer, not the keys present.
        dtype: of the projections: float64, float32, float16 or bfloat16. Norm weights are float32, or float64 for a
            float64 layer.

    Returns:
        `LayerParams` on the CPU in memory of their own: the files may change or go afterwards. Each tensor is
        contiguous, so that `split_kv_b` gives views. Weights stored as fp8 are multiplied out (`dequantize_blocks`).

    Raises:
        ValueError: in one line: the layer does not exist, another dtype, a key that is missing, has another shape or
            a stored dtype other than F64, F32, F16, BF16 and, with its factors beside it, F8_E4M3, or a file that
            changed since it was opened.

    Cost: reads this layer's bytes, from the files that hold them; one tensor more than the result in memory.
    Source: deepseek-ai/DeepSeek-V3.2-Exp, inference/convert.py, for the second spelling.
    """
    if dtype not in DTYPES.values():
        allowed = ", ".join(str(d) for d in DTYPES.values())
        raise _refusal("load_layer", checkpoint.path, f"dtype must be one of {allowed}", dtype)
    stored = stored_layer(checkpoint, layer, config=config)
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in stored.items()}
    read_stored(stored, tensors)
    return decode_layer(tensors, dtype)


def stored_layer(checkpoint: Checkpoint, layer: int, *, config: SFAConfig) -> dict[str, StoredTensor]:
    """Return where a layer's weights lie, once keys, shapes and dtypes are known to be right.

    Args:
        checkpoint: from `open_checkpoint`.
        layer: 0-based number.
        config: the model's sizes and schedule.

    Returns:
        Field -> where; beside a field that is fp8 its factors, as ``"<field>_scale_inv"``.

    Raises:
        ValueError: as `load_layer`.
    """
    found = {}
    for field, key in _layer_keys("load_layer", checkpoint, layer, config).items():
        name, shape = checkpoint.tensors[key]
        dtype = torch.float8_e4m3fn if name == FP8 else DTYPES[name]
        found[field] = StoredTensor(key, checkpoint.files[key], dtype, shape)
        if name == FP8:
            key = _scale_key(key)
            found[field + SCALE] = StoredTensor(key, checkpoint.files[key], torch.float32, checkpoint.tensors[key][1])
    return found


def read_stored(stored: Mapping[str, StoredTensor], into: Mapping[str, Tensor]) -> None:
    """Read tensors' bytes to where they are wanted, without mapping the file or holding it a second time.

    Args:
        stored: where they lie.
        into: for each name a contiguous tensor on the CPU of the dtype and shape stored; it is overwritten.

    Raises:
        ValueError: a file that is gone, can't be read or has changed since it was opened; what is overwritten by
            then is not said.

    Cost: reads these bytes, in the order in which they lie, and each file's header again.
    """
    for file in sorted({tensor.file for tensor in stored.values()}):
        held = {name: tensor for name, tensor in stored.items() if tensor.file == file}
        try:
            with file.open("rb", buffering=0) as stream:  # once: under its name there may soon be another file
                try:
                    header = _read_header(file, stream)
                except ValueError as error:
                    told = str(error).split(f"{file}: ", 1)[-1]
                    raise _refusal("load_layer", file, "must be as when it was opened", told) from error
                begins = {name: _begin(tensor, header) for name, tensor in held.items()}
                for name, begin in sorted(begins.items(), key=lambda item: item[1]):
                    _read_bytes(held[name], begin, into[name], stream)
        except OSError as error:
            got = error.strerror or error
            raise _refusal("load_layer", file, "must be as when it was opened", got) from error


def decode_layer(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> LayerParams:
    """Turn a layer as it is stored into parameters: norms wide, fp8 multiplied out, the rest in ``dtype``.

    Args:
        tensors: by field, factors as ``"<field>_scale_inv"``.
        dtype: of the projections.

    Returns:
        `LayerParams`; a tensor that has its dtype already is not copied.
    """
    norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    fields = {}
    for field, tensor in tensors.items():
        if field + SCALE in tensors:
            fields[field] = dequantize_blocks(tensor, tensors[field + SCALE], dtype)
        elif not field.endswith(SCALE):
            fields[field] = tensor.to(norm_dtype if field in NORM_FIELDS else dtype)
    return params_from_fields(fields)


def save_checkpoint(path: str | os.PathLike[str], layers: Sequence[LayerParams], config: SFAConfig) -> None:
    """Write the attention weights of all layers as a checkpoint in Hugging Face's layout.

    The directory gets ``config.json`` (`SFAConfig.to_hf`, and the projections' ``dtype``) and ``model.safetensors``.
    It is written under another name beside ``path`` and renamed when complete, so that ``path`` holds all or nothing.

    Args:
        path: a directory that does not exist or is empty: nothing is ever overwritten. Missing parents are made.
        layers: one `LayerParams` per layer of the config, in order; stored bit for bit, each tensor in its dtype.
        config: the model's sizes; must be one that config.json can hold.

    Raises:
        ValueError: in one line: another number of layers, an indexer where the schedule has none or the reverse, a
            wrong shape or dtype, projections of several dtypes, a directory with files in it, or one that can't be
            written.

    Cost: writes every weight once; copies to the CPU what is not there.
    Source: the format section of the safetensors README.
    """
    target = Path(os.path.realpath(path))
    tensors, dtype = _collect(target, layers, config)
    try:
        written_config = config.to_hf() | {"dtype": dtype}
    except ValueError as error:
        raise _refusal("save_checkpoint", target, "config must be one that config.json can hold", error) from error
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            got = "a directory with files in it" if target.is_dir() else "a file"
            raise _refusal("save_checkpoint", target, "must not exist or be an empty directory", got)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            complete = Path(scratch) / "checkpoint"
            complete.mkdir()
            written = complete / "config.json"
            written.write_text(json.dumps(written_config, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, complete / "model.safetensors", metadata={"format": "pt"})
            shutil.copymode(written, complete / "model.safetensors")  # safetensors writes for the owner only
            complete.replace(target)
    except (OSError, SafetensorError) as error:
        raise _refusal("save_checkpoint", target, "must be writable", error) from error


def _refusal(function: str, where: object, rule: str, got: object) -> ValueError:
    line = f"{function}: {_short(where, 1000)}: {rule}; got {_short(got, 500)}"
    return ValueError(" ".join(line.split()))  # keys, paths and the errors of others may hold line breaks


def _short(text: object, most: int = 200) -> str:
    """Return a text's begin: what stands in a file may be as long as the file."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}... of {len(whole)} characters"


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a directory"
    if path.is_symlink() and not path.exists():
        return f"a link whose target is missing, {_short(repr(os.readlink(path)))}"
    return "a file" if path.exists() else "nothing of that name"


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise _refusal("open_checkpoint", file, "must be a file", _kind(file))
    return _parse_object(file, file.read_bytes())


def _parse_object(file: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_distinct)
    except _Twice as error:
        raise _refusal("open_checkpoint", file, "must hold each key once", f"{error} twice") from error
    except (ValueError, RecursionError) as error:
        raise _refusal("open_checkpoint", file, "must hold JSON", error) from error
    if not isinstance(parsed, dict):
        raise _refusal("open_checkpoint", file, "must hold a JSON object", type(parsed).__name__)
    return parsed


class _Twice(Exception):
    """A key that stands twice in an object; JSON's own reader would take the last."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Twice(_short(repr(name)))
            seen.add(name)
    return found


def _no_weights(directory: Path) -> ValueError:
    for file in (directory / "model.safetensors", directory / "model.safetensors.index.json"):
        if file.is_symlink():
            return _refusal("open_checkpoint", file, "must be a file", _kind(file))
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        rule = "weights must be safetensors: reading a pickle can run code that is in it"
        return _refusal("open_checkpoint", directory, rule, pickles[0])
    rule = "must hold model.safetensors or model.safetensors.index.json"
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    return _refusal("open_checkpoint", directory, rule, others[0] if others else "neither")


def _read_header(file: Path, opened: IO[bytes] | None = None) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Read dtype, shape and first byte of every tensor of a file, and check that its data is all there.

    A file is the header's length in 8 bytes, little endian, the header as JSON, and the tensors without gaps.
    """
    if opened is None:
        if not file.is_file():
            raise _refusal("open_checkpoint", file, "must be a file", _kind(file))
        with file.open("rb") as stream:
            return _read_header(file, stream)
    size = os.fstat(opened.fileno()).st_size
    length = int.from_bytes(opened.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        rule = f"the header must fit into the file's {size} bytes and {MAX_HEADER}"
        raise _refusal("open_checkpoint", file, rule, f"a header of {length} bytes")
    header = _parse_object(file, _read_exactly(opened, length))
    header.pop("__metadata__", None)
    tensors, ranges = {}, []
    for key, entry in header.items():
        dtype, shape, (begin, end) = _read_entry(file, key, entry)
        tensors[key] = dtype, shape, 8 + length + begin
        ranges.append((begin, end, key))
    last = 0
    for begin, end, key in sorted(ranges):
        if begin != last:
            rule = f"data of {_short(repr(key))} must begin at byte {last}"
            raise _refusal("open_checkpoint", file, rule, begin)
        last = end
    if last != size - 8 - length:
        rule = f"must hold the {last} bytes of data that its header names"
        raise _refusal("open_checkpoint", file, rule, f"{size - 8 - length} bytes")
    return tensors


def _read_entry(file: Path, key: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Read one tensor's dtype, shape and range of bytes."""
    found = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (found.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _counts(shape) and _counts(span) and len(span) == 2 and span[0] <= span[1]):
        rule = f"header of {_short(repr(key))} must give a dtype, a shape and data_offsets [begin, end]"
        raise _refusal("open_checkpoint", file, rule, _short(repr(entry)))
    itemsize = 1 if dtype == FP8 else DTYPES[dtype].itemsize if dtype in DTYPES else None
    if itemsize is not None and span[1] - span[0] != (size := math.prod(shape) * itemsize):
        want = size if size < MOST else f"more than {MOST}"
        rule = f"{_short(repr(key))} must have {want} bytes, {dtype} {_short(shape)}"
        raise _refusal("open_checkpoint", file, rule, span[1] - span[0])
    return dtype, tuple(shape), (span[0], span[1])


def _counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(n) is int and 0 <= n <= MOST for n in values)


def _read_index(index: Path, layers: frozenset[int] | None) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """Read which file holds each key, and the headers of those files."""
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _refusal("open_checkpoint", index, "weight_map must be an object", type(weight_map).__name__)
    for key, name in weight_map.items():
        if not isinstance(name, str):
            rule = f"weight_map of {_short(repr(key))} must be a file name"
            raise _refusal("open_checkpoint", index, rule, _short(repr(name)))
        _inside(index, name)
    weight_map = {key: name for key, name in weight_map.items() if _is_wanted(key, layers)}
    headers = {name: _read_header(_inside(index, name)) for name in sorted(set(weight_map.values()))}
    for key, name in weight_map.items():
        if key not in headers[name]:
            rule = f"must hold {_short(repr(key))}, as the index says"
            raise _refusal("open_checkpoint", index.parent / name, rule, "no such key")
    return {key: (index.parent / name, *headers[name][key]) for key, name in weight_map.items()}


def _inside(index: Path, name: str) -> Path:
    """Return the path of a file that an index names, once it is certain that it lies where it may."""
    directory = Path(os.path.realpath(index.parent))
    # the Hugging Face cache: <cache>/<repository>/snapshots/<commit> links to blobs, the repository's or the cache's
    around = directory.parents[1:3] if directory.parent.name == "snapshots" else ()
    allowed = [directory, *(parent / "blobs" for parent in around)]
    plain = _can_be_path(name) and not Path(name).is_absolute() and ".." not in Path(name).parts
    if not plain or not any(Path(os.path.realpath(directory / name)).is_relative_to(root) for root in allowed):
        raise _refusal("open_checkpoint", index, "weight_map must name files inside the directory", repr(name))
    return index.parent / name


def _can_be_path(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False


def _layer_keys(function: str, checkpoint: Checkpoint, layer: int, config: SFAConfig) -> dict[str, str]:
    """Return the key of every field of a layer, once keys, shapes and dtypes are known to be right."""
    if not (type(layer) is int and 0 <= layer < config.num_layers):
        raise _refusal(function, checkpoint.path, f"layer must be in 0..{config.num_layers - 1}", repr(layer))
    shapes = param_shapes(config, layer=layer)
    spelled = [{field: prefix.format(layer) + names[field] for field in shapes} for prefix, names in LAYOUTS]
    keys = next((keys for keys in spelled if any(key in checkpoint.tensors for key in keys.values())), spelled[0])
    for field, key in keys.items():
        if key not in checkpoint.tensors:
            raise _refusal(function, checkpoint.path, f"must hold {key}", "no such key")
        dtype, shape = checkpoint.tensors[key]
        if dtype not in DTYPES and (dtype != FP8 or field in NORM_FIELDS):
            rule = f"{key} must be {', '.join(DTYPES)}{'' if field in NORM_FIELDS else f' or {FP8}'}"
            raise _refusal(function, checkpoint.files[key], rule, dtype)
        if shape != shapes[field]:
            raise _refusal(function, checkpoint.files[key], f"{key} must be {list(shapes[field])}", list(shape))
        if dtype == FP8:
            factors = _scale_key(key)
            if factors not in checkpoint.tensors:
                raise _refusal(function, checkpoint.path, f"must hold {factors}, as {key} is fp8", "no such key")
            want = "F32", block_counts(shape)
            if checkpoint.tensors[factors] != want:
                got_dtype, got_shape = checkpoint.tensors[factors]
                rule = f"{factors} must be F32 {list(want[1])}, one factor per block of {BLOCK}"
                raise _refusal(function, checkpoint.files[factors], rule, f"{got_dtype} {list(got_shape)}")
    return keys


def _scale_key(key: str) -> str:
    """Return the key of a weight's factors: DeepSeek's own code writes ``wq_a.scale`` beside ``wq_a.weight``."""
    return key + SCALE if key.startswith("model.") else key.removesuffix("weight") + "scale"


def block_counts(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the factors of a weight, one for each block, the last ones partial."""
    return tuple(-(-count // BLOCK) for count in shape)


def _begin(tensor: StoredTensor, header: Mapping[str, tuple[str, tuple[int, ...], int]]) -> int:
    """Return where a tensor's bytes begin, once it is certain that it is still what it was."""
    name = next(name for name, dtype in {**DTYPES, FP8: torch.float8_e4m3fn}.items() if dtype == tensor.dtype)
    if tensor.key not in header:
        raise _refusal("load_layer", tensor.file, f"must hold {tensor.key} as when it was opened", "no such key")
    dtype, shape, begin = header[tensor.key]
    if (dtype, shape) != (name, tensor.shape):
        rule = f"{tensor.key} must be {name} {list(tensor.shape)} as when it was opened"
        raise _refusal("load_layer", tensor.file, rule, f"{dtype} {list(shape)}")
    return begin


def _read_bytes(tensor: StoredTensor, begin: int, target: Tensor, stream: IO[bytes]) -> None:
    """Fill a tensor with its bytes of the file."""
    count = target.numel() * target.element_size()
    if count == 0:
        return
    memory = memoryview((ctypes.c_char * count).from_address(target.data_ptr())).cast("B")
    done = 0
    while done < count:
        read = os.preadv(stream.fileno(), [memory[done : done + CHUNK]], begin + done)
        if read == 0:
            raise _refusal("load_layer", tensor.file, f"must have {begin + count} bytes", begin + done)
        done += read


def _read_exactly(stream: IO[bytes], count: int) -> bytes:
    """Read as many bytes as there are up to ``count``; one call may return fewer."""
    parts = []
    while count > 0 and (part := stream.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _layer_of(key: str) -> int | None:
    """Return the number of the layer whose attention a key belongs to, in either spelling; None for any other key."""
    found = _KEY.match(key)
    return int(found[1] or found[2]) if found else None


def _is_wanted(key: str, layers: frozenset[int] | None) -> bool:
    return layers is None or _layer_of(key) in layers


def _collect(target: Path, layers: Sequence[LayerParams], config: SFAConfig) -> tuple[dict[str, Tensor], str]:
    """Return all layers' tensors by key, ready to be written, and the name of the projections' dtype."""
    if len(layers) != config.num_layers:
        raise _refusal("save_checkpoint", target, f"layers must be {config.num_layers}", len(layers))
    prefix, names = LAYOUTS[0]
    tensors: dict[str, Tensor] = {}
    dtypes, seen = set(), set()
    for layer, params in enumerate(layers):
        shapes, given = param_shapes(config, layer=layer), dict(named_fields(params))
        if shapes.keys() != given.keys():
            rule = f"layer {layer} must {'have an' if 'indexer.wk' in shapes else 'have no'} indexer"
            raise _refusal("save_checkpoint", target, rule, sorted(given))
        for field, tensor in given.items():
            if tuple(tensor.shape) != shapes[field]:
                rule = f"{field} of layer {layer} must be {list(shapes[field])}"
                raise _refusal("save_checkpoint", target, rule, list(tensor.shape))
            if tensor.dtype not in DTYPES.values():
                rule = f"{field} of layer {layer} must be stored as {', '.join(DTYPES)}"
                raise _refusal("save_checkpoint", target, rule, tensor.dtype)
            if field not in NORM_FIELDS:
                dtypes.add(str(tensor.dtype).removeprefix("torch."))
            own = tensor.detach().cpu().contiguous()
            place = own.untyped_storage().data_ptr()
            tensors[prefix.format(layer) + names[field]] = own.clone() if place in seen else own  # no two share memory
            seen.add(place)
    if len(dtypes) != 1:
        raise _refusal("save_checkpoint", target, "projections must have one dtype", sorted(dtypes))
    return tensors, dtypes.pop()
