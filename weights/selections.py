"""Recorded selections in a file: one safetensors file, with the config that they belong to."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sfa_functional import SFAConfig
from sfa_functional.replay import Recording, config_hash, config_text, different_field

FORMAT = "sfa-selections-1"
"""Names the format in a file's metadata."""
LENGTHS = "lengths"
LAYER = re.compile(r"layer\.(0|[1-9]\d*)")


def save_selections(path: str | os.PathLike[str], recording: Recording, config: SFAConfig) -> None:
    """Write a recording into one safetensors file, under another name first, so that ``path`` holds all or nothing.

    The file holds ``lengths`` (int64 [requests]) and ``layer.{i}`` (int32 [tokens, K], positions within the request)
    of every layer that chose; its metadata the config as JSON and the SHA-256 hash of that.

    Args:
        path: the file; one that exists is replaced.
        recording: from `record_selections`.
        config: of the model, with the ``index_topk`` that was used.

    Raises:
        ValueError: a recording whose K is not ``config.index_topk``, of layers that the config does not count (those
            of multi-token prediction), or whose selections are not int32 [tokens, K]; a path that can't be written.

    Cost: 4·K bytes per token and layer that chose.
    """
    target = Path(os.path.realpath(path))
    if recording.topk != config.index_topk:
        rule = f"the recording must hold index_topk {config.index_topk} keys per query"
        raise _refusal("save_selections", target, rule, recording.topk)
    tensors, stored = {}, set()
    for layer, selection_TK in recording.selections.items():
        selection_TK = selection_TK.contiguous()
        memory = selection_TK.untyped_storage().data_ptr()  # safetensors refuses what shares it
        tensors[f"layer.{layer}"] = selection_TK.clone() if memory in stored else selection_TK
        stored.add(memory)
    tensors[LENGTHS] = torch.tensor(recording.lengths, dtype=torch.int64)
    _recording("save_selections", target, tensors, config)
    metadata = {"format": FORMAT, "config": config_text(config), "config_sha256": config_hash(config)}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            written, plain = Path(scratch) / "selections", Path(scratch) / "mode"
            plain.touch()
            save_file(tensors, written, metadata=metadata)
            shutil.copymode(plain, written)  # safetensors writes for the owner only
            written.replace(target)
    except (OSError, SafetensorError) as error:
        raise _refusal("save_selections", target, "must be writable", error) from error


def load_selections(path: str | os.PathLike[str], config: SFAConfig) -> Recording:
    """Read a recording back, for the model that it was made with.

    Args:
        path: a file that `save_selections` wrote.
        config: of the model that is to replay it.

    Returns:
        The recording, on the CPU.

    Raises:
        ValueError: a file that is missing, damaged or of another format; another model or another ``index_topk``: the
            message names the first field that differs.

    Cost: reads the whole file.
    """
    source = Path(path)
    if not os.path.isfile(source):  # Path.is_file raises where a name is too long
        got = "a directory" if os.path.isdir(source) else "nothing"
        raise _refusal("load_selections", source, "must be a file", got)
    try:
        with safe_open(source, framework="pt") as stream:
            _check_origin(source, stream.metadata() or {}, config)
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise _refusal("load_selections", source, "must be a safetensors file", error) from error
    return _recording("load_selections", source, tensors, config)


def _check_origin(source: Path, metadata: dict[str, str], config: SFAConfig) -> None:
    """Refuse a file of another format, or one made with another config: the first field that differs is named."""
    if metadata.get("format") != FORMAT:
        raise _refusal("load_selections", source, f"must have the format {FORMAT}", metadata.get("format"))
    if metadata.get("config_sha256") != config_hash(config):
        try:
            found = different_field(metadata.get("config", ""), config)
        except ValueError:
            found = None
        name, there, here = found or ("the hash of config", metadata.get("config_sha256"), config_hash(config))
        raise _refusal("load_selections", source, f"was recorded with {name} {there}", here)


def _recording(function: str, where: Path, tensors: dict[str, Tensor], config: SFAConfig) -> Recording:
    lengths = tensors.get(LENGTHS)
    if lengths is None or lengths.dtype != torch.int64 or lengths.ndim != 1 or bool((lengths < 0).any()):
        got = None if lengths is None else (lengths.dtype, tuple(lengths.shape))
        raise _refusal(function, where, f"{LENGTHS} must be int64 [requests], >= 0", got)
    selections, shape = {}, (int(lengths.sum()), config.index_topk)
    for key, selection_TK in tensors.items():
        if key == LENGTHS:
            continue
        named = LAYER.fullmatch(key)
        if named is None or int(named[1]) >= config.num_layers:
            raise _refusal(function, where, f"keys must be layer.0 .. layer.{config.num_layers - 1}", key)
        if selection_TK.dtype != torch.int32 or tuple(selection_TK.shape) != shape:
            got = (selection_TK.dtype, tuple(selection_TK.shape))
            raise _refusal(function, where, f"{key} must be int32 {list(shape)}", got)
        selections[int(named[1])] = selection_TK
    if not selections:
        raise _refusal(function, where, "must hold a layer", "none")
    return Recording(lengths=tuple(lengths.tolist()), selections=dict(sorted(selections.items())))


def _refusal(function: str, where: object, rule: str, got: object) -> ValueError:
    return ValueError(" ".join(f"{function}: {where}: {rule}; got {got}".split()))
