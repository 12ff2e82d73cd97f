"""A recording's file gives back every bit, and refuses in one line what it was not made for or what is broken."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sfa_functional as sfa
import weights.selections
from sfa_functional.replay import config_hash, config_text
from weights import load_selections, save_selections

CONFIG = replace(sfa.TINY, index_topk=3, indexer_types=("full", "shared", "full"))


def recorded(lengths=(4, 0, 2), layers=(0, 2), topk=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), topk)
    drawn = {i: torch.randint(-1, 2**31 - 1, shape, generator=generator, dtype=torch.int32) for i in layers}
    return sfa.Recording(lengths=lengths, selections=drawn)


def assert_same(got, want):
    """Equal lengths, layers in one order, dtypes and bits."""
    assert got.lengths == want.lengths
    assert list(got.selections) == sorted(want.selections)
    for layer, selection_TK in got.selections.items():
        assert selection_TK.dtype == torch.int32
        assert torch.equal(selection_TK, want.selections[layer])


def assert_refused(call, *parts):
    """One line of ValueError that holds every part, in order."""
    with pytest.raises(ValueError) as caught:
        call()
    message, place = str(caught.value), 0
    assert len(message.splitlines()) == 1
    for part in map(str, parts):
        assert part in message[place:], (part, message)
        place = message.index(part, place) + len(part)


@pytest.fixture
def file(tmp_path):
    """A right file, for a test to break."""
    save_selections(tmp_path / "right.safetensors", recorded(), CONFIG)
    return tmp_path / "right.safetensors"


def rewrite(file, *, tensors=None, drop=(), metadata=None):
    """Write a file anew with some of its tensors and metadata changed, without `save_selections`."""
    with safe_open(file, framework="pt") as stream:
        kept = stream.metadata() | (metadata or {})
    kept = {name: value for name, value in kept.items() if name not in drop}
    held = {name: x for name, x in (load_file(file) | (tensors or {})).items() if name not in drop}
    save_file(held, file, metadata=kept or None)


# --- what was stored comes back ---


@pytest.mark.parametrize("lengths", [(4, 0, 2), (1,), (0, 0), (), (5, 3, 0)])
@pytest.mark.parametrize("layers", [(0, 2), (2,), (2, 1, 0)])
def test_a_recording_comes_back_bit_for_bit(tmp_path, lengths, layers):
    want = recorded(lengths, layers)
    save_selections(tmp_path / "out", want, CONFIG)
    assert_same(load_selections(tmp_path / "out", CONFIG), want)
    assert_same(load_selections(str(tmp_path / "out"), CONFIG), want)


def test_a_run_is_replayed_from_its_file_to_the_bit(tmp_path):
    batch = sfa.Batch.from_lengths([9, 3, 5], [9, 3, 0])
    params, x_TD = sfa.init_params(CONFIG), torch.randn(17, 64)
    want = sfa.sfa_layer(params, x_TD, batch, config=CONFIG)
    save_selections(tmp_path / "out", sfa.record_selections([sfa.Step(0, batch, want.selection_TK)]), CONFIG)
    changed = replace(params, indexer=replace(params.indexer, wk=-params.indexer.wk))
    selection = sfa.replay_selection(load_selections(tmp_path / "out", CONFIG), 0, batch)
    got = sfa.sfa_layer(changed, x_TD, batch, config=CONFIG, selection=selection)
    assert torch.equal(got.y_TD, want.y_TD)
    assert not torch.equal(sfa.sfa_layer(changed, x_TD, batch, config=CONFIG).y_TD, want.y_TD)


def test_layers_come_back_in_the_order_of_their_numbers(tmp_path):
    config = replace(CONFIG, indexer_types=("full",) * 12)
    want = recorded(layers=(11, 2, 10, 0))
    save_selections(tmp_path / "out", want, config)
    assert list(load_selections(tmp_path / "out", config).selections) == [0, 2, 10, 11]


def test_the_file_is_plain_safetensors_with_the_config_and_its_hash(file):
    with safe_open(file, framework="pt") as stream:
        metadata, keys = stream.metadata(), set(stream.keys())
        shapes = {key: (stream.get_tensor(key).dtype, tuple(stream.get_tensor(key).shape)) for key in keys}
    assert shapes == {
        "lengths": (torch.int64, (3,)),
        "layer.0": (torch.int32, (6, 3)),
        "layer.2": (torch.int32, (6, 3)),
    }
    assert metadata.keys() == {"format", "config", "config_sha256"}
    assert json.loads(metadata["config"])["index_topk"] == 3
    assert metadata["config_sha256"] == config_hash(CONFIG)
    assert len(bytes.fromhex(metadata["config_sha256"])) == 32


def test_selections_that_share_memory_or_are_not_contiguous_are_saved(tmp_path):
    one, both = recorded().selections[0], torch.randint(9, (2, 6, 3), dtype=torch.int32)
    for selections in (
        {0: one, 2: one},
        {0: one, 2: one.T.contiguous().T},
        {0: both[0], 2: both[1]},
        {0: both.view(-1, 3)[:6], 2: both.view(-1, 3)[3:9]},
    ):
        want = sfa.Recording(lengths=(4, 0, 2), selections=selections)
        save_selections(tmp_path / "out", want, CONFIG)
        assert_same(load_selections(tmp_path / "out", CONFIG), want)


# --- another model ---

OTHER_MODELS = {
    "index_topk": (replace(CONFIG, index_topk=2), "index_topk 3", 2),
    "hidden_size": (replace(CONFIG, hidden_size=72, rope_theta=1e6), "hidden_size 64", 72),
    "rope_theta": (replace(CONFIG, rope_theta=1e6), "rope_theta 10000", 1000000),
    "index_rope_pairing": (replace(CONFIG, index_rope_pairing="interleaved"), "index_rope_pairing half", "interleaved"),
    "indexer_types": (replace(CONFIG, indexer_types=("full",) * 3), "indexer_types", "['full', 'full', 'full']"),
    "yarn": (replace(CONFIG, yarn=sfa.Yarn(factor=40.0, original_max_position_embeddings=64)), "yarn None", "factor"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused_by_the_first_field_that_differs(file, name):
    config, there, here = OTHER_MODELS[name]
    assert_refused(
        lambda: load_selections(file, config), "load_selections: ", file, f"was recorded with {there}", "; got ", here
    )


def test_an_equal_config_is_the_same_model(file):
    same = sfa.SFAConfig.from_hf(CONFIG.to_hf())
    assert same is not CONFIG
    assert_same(load_selections(file, same), recorded())


@pytest.mark.parametrize("text", ["", "{", "null", "[1, 2]", "7", "{}", '{"index_topk": 3}'])
def test_metadata_whose_config_says_nothing_is_refused_all_the_same(file, text):
    rewrite(file, metadata={"config": text, "config_sha256": "0" * 64})
    assert_refused(lambda: load_selections(file, CONFIG), "load_selections: ", file, "was recorded with ", "; got ")


def test_a_hash_that_does_not_fit_its_config_is_refused(file):
    rewrite(file, metadata={"config_sha256": "0" * 64})
    parts = "was recorded with the hash of config " + "0" * 64, "; got ", config_hash(CONFIG)
    assert_refused(lambda: load_selections(file, CONFIG), *parts)
    rewrite(file, drop=["config_sha256"])
    assert_refused(lambda: load_selections(file, CONFIG), "was recorded with the hash of config None; got ")


def test_a_recording_of_another_width_is_not_saved(tmp_path):
    rule = "the recording must hold index_topk 3 keys per query; got"
    for recording, got in ((recorded(topk=2), 2), (sfa.Recording(lengths=(2,), selections={}), 0)):
        assert_refused(
            lambda recording=recording: save_selections(tmp_path / "out", recording, CONFIG),
            f"save_selections: {tmp_path / 'out'}: {rule} {got}",
        )
    assert list(tmp_path.iterdir()) == []


# --- broken files ---


def test_what_is_no_file_is_refused(tmp_path):
    names = {"missing": "nothing", ".": "a directory", "missing/file": "nothing", "x" * 300: "nothing"}
    for name, got in names.items():
        path = tmp_path / name
        assert_refused(
            lambda path=path: load_selections(path, CONFIG), f"load_selections: {path}: must be a file; got {got}"
        )


def test_a_truncated_file_is_refused_wherever_it_ends(file):
    whole = file.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        parts = "load_selections: ", file, "must be a safetensors file; got "
        assert_refused(lambda: load_selections(file, CONFIG), *parts)
    file.write_bytes(whole)
    assert_same(load_selections(file, CONFIG), recorded())


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x95 a pickle of something else",
        b"\n\n  not\n  a\n file\n" * 9,
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 9) + b"{\n\n  oops",
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_a_damaged_file_is_refused_in_one_line(file, content):
    file.write_bytes(content)
    assert_refused(lambda: load_selections(file, CONFIG), "load_selections: ", file, "must be a safetensors file; got ")


def test_a_bit_of_the_header_turned_over_gives_one_line_or_a_whole_recording(file):
    """Layers may change places where a digit of a name does: names and numbers carry no hash."""
    whole, outcomes = file.read_bytes(), []
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for place in range(0, header, 5):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = load_selections(file, CONFIG)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(None)
            assert all(x.shape == (sum(found.lengths), 3) for x in found.selections.values())
    refused = [line for line in outcomes if line is not None]
    assert 20 < len(refused) < len(outcomes)  # the config's text is not looked at where its hash is right
    assert all(line.startswith(f"load_selections: {file}: ") and len(line.splitlines()) == 1 for line in refused)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "sfa-selections-2"}])
def test_another_kind_of_file_is_refused_before_its_tensors_are_read(tmp_path, monkeypatch, metadata):
    file = tmp_path / "model.safetensors"
    save_file({"q_proj.weight": torch.zeros(3, 2)}, file, metadata=metadata)

    class Unread:
        def __init__(self, *given, **named):
            self._opened = safe_open(*given, **named)

        def __enter__(self):
            self._opened = self._opened.__enter__()
            return self

        def __exit__(self, *error):
            return self._opened.__exit__(*error)

        def metadata(self):
            return self._opened.metadata()

    monkeypatch.setattr(weights.selections, "safe_open", Unread)
    got = None if metadata is None else metadata["format"]
    rule = f"load_selections: {file}: must have the format sfa-selections-1; got {got}"
    assert_refused(lambda: load_selections(file, CONFIG), rule)


WRONG_TENSORS = {
    "no lengths": ({}, ["lengths"], "lengths must be int64 [requests], >= 0; got None"),
    "lengths of another dtype": (
        {"lengths": torch.tensor([4, 0, 2]).int()},
        [],
        "lengths must be int64 [requests], >= 0",
    ),
    "lengths of two dims": ({"lengths": torch.tensor([[4, 0, 2]])}, [], "lengths must be int64 [requests], >= 0"),
    "a negative length": ({"lengths": torch.tensor([7, -1])}, [], "lengths must be int64 [requests], >= 0"),
    "fewer tokens": (
        {"lengths": torch.tensor([4, 0, 1])},
        [],
        "layer.0 must be int32 [5, 3]; got (torch.int32, (6, 3))",
    ),
    "lengths past all numbers": ({"lengths": torch.tensor([2**62, 2**62])}, [], "layer.0 must be int32 ["),
    "another dtype": ({"layer.2": torch.zeros(6, 3)}, [], "layer.2 must be int32 [6, 3]; got (torch.float32, (6, 3))"),
    "another width": (
        {"layer.2": torch.zeros(6, 4).int()},
        [],
        "layer.2 must be int32 [6, 3]; got (torch.int32, (6, 4))",
    ),
    "one dim": ({"layer.2": torch.zeros(18).int()}, [], "layer.2 must be int32 [6, 3]; got (torch.int32, (18,))"),
    "no layers": ({}, ["layer.0", "layer.2"], "must hold a layer; got none"),
    "a layer too many": ({"layer.3": torch.zeros(6, 3).int()}, [], "keys must be layer.0 .. layer.2; got layer.3"),
}
WRONG_TENSORS |= {
    f"a key {key!r}": ({key: torch.zeros(6, 3).int()}, [], f"keys must be layer.0 .. layer.2; got {key}".rstrip())
    for key in ("layer", "layer.", "layer.-1", "layer.01", "layer.1.", "Layer.1", "layer.1 ", "other", "layer.0x1")
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_refused(file, name):
    tensors, drop, message = WRONG_TENSORS[name]
    rewrite(file, tensors=tensors, drop=drop)
    assert_refused(lambda: load_selections(file, CONFIG), f"load_selections: {file}: ", message)


# --- writing ---

UNREADABLE = {
    "a layer of no number": ({-1: (6, 3, torch.int32)}, "keys must be layer.0 .. layer.2; got layer.-1"),
    "a layer that the config lacks": ({3: (6, 3, torch.int32)}, "keys must be layer.0 .. layer.2; got layer.3"),
    "another dtype": ({0: (6, 3, torch.int64)}, "layer.0 must be int32 [6, 3]; got (torch.int64, (6, 3))"),
    "other tokens": ({0: (5, 3, torch.int32)}, "layer.0 must be int32 [6, 3]; got (torch.int32, (5, 3))"),
    "a layer of another width": (
        {0: (6, 3, torch.int32), 2: (6, 4, torch.int32)},
        "layer.2 must be int32 [6, 3]; got (torch.int32, (6, 4))",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_could_not_be_read_again_is_not_saved(file, name, unchecked):
    """A layer of multi-token prediction, for one: the config does not count it."""
    sizes, message = UNREADABLE[name]
    before = file.read_bytes()
    selections = {i: torch.zeros(rows, topk, dtype=dtype) for i, (rows, topk, dtype) in sizes.items()}
    recording = sfa.Recording(lengths=(4, 0, 2), selections=selections)
    assert_refused(lambda: save_selections(file, recording, CONFIG), f"save_selections: {file}: {message}")
    assert file.read_bytes() == before


@pytest.mark.parametrize("step", ["save_file", "copymode", "replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(file, monkeypatch, step):
    def full(*given, **_):
        if step == "save_file":
            Path(given[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = file.read_bytes()
    owner = {"save_file": weights.selections, "copymode": weights.selections.shutil, "replace": Path}[step]
    monkeypatch.setattr(owner, step, full)
    parts = "save_selections: ", file, "must be writable; got ", "No space left on device"
    assert_refused(lambda: save_selections(file, recorded(seed=1), CONFIG), *parts)
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(file, monkeypatch):
    def interrupted(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    before = file.read_bytes()
    monkeypatch.setattr(weights.selections, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_selections(file, recorded(seed=1), CONFIG)
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before


def test_readers_find_the_old_recording_until_the_new_one_is_whole(file, monkeypatch):
    seen, write = [], weights.selections.save_file

    def watched(*given, **named):
        seen.append(load_selections(file, CONFIG))
        write(*given, **named)
        seen.append(load_selections(file, CONFIG))

    monkeypatch.setattr(weights.selections, "save_file", watched)
    save_selections(file, recorded(seed=1), CONFIG)
    for found in seen:
        assert_same(found, recorded())
    assert len(seen) == 2
    assert_same(load_selections(file, CONFIG), recorded(seed=1))
    assert list(file.parent.iterdir()) == [file]


def test_a_link_stays_one_and_its_target_is_replaced(file):
    link = file.parent / "link"
    link.symlink_to(file)
    save_selections(link, recorded(seed=1), CONFIG)
    assert link.is_symlink()
    assert_same(load_selections(file, CONFIG), recorded(seed=1))


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_selections(tmp_path / "out", recorded(), CONFIG)
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("text")
    for name in ("missing/out", "directory", "file/out", "x" * 300):
        path = tmp_path / name
        parts = f"save_selections: {path}: must be writable; got "
        assert_refused(lambda path=path: save_selections(path, recorded(), CONFIG), parts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory", "file"]
    assert list((tmp_path / "directory").iterdir()) == []


def test_saving_leaves_the_recording_alone(tmp_path):
    recording, want = recorded(), recorded()
    save_selections(tmp_path / "out", recording, CONFIG)
    assert list(recording.selections) == list(want.selections)
    assert_same(recording, want)
    loaded = load_selections(tmp_path / "out", CONFIG)
    (tmp_path / "out").unlink()
    assert_same(loaded, want)
    assert config_text(CONFIG) == config_text(replace(CONFIG))
