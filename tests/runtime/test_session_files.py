"""Files of saved sessions: refused unless whole and of this model, and written whole or not at all."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import stat
import struct

import numpy as np
import onnx
import pytest
import safetensors
from families import tiny_checkpoint
from saved_sessions import evicted_session

import ortolan
from ortolan.errors import ConfigError, ContractMismatchError, OrtolanError, SessionFileError, StorageError
from ortolan.runtime.saved import fingerprint
from ortolan.runtime.saved.file import CHECKSUM_BYTES, VERSION, SessionFile, Tensor, write_session_file
from ortolan.runtime.saved.reader import DESCRIPTION, SavedSequence


@pytest.fixture
def session(mixed_model, draw_tokens):
    return evicted_session(mixed_model, draw_tokens(120))


@pytest.fixture
def path(session, tmp_path):
    session.save(tmp_path / "chat.session")
    return tmp_path / "chat.session"


def parts(content: bytes) -> dict[str, tuple[int, int]]:
    """Return the half-open range of bytes of each part of a file: header length, header, each tensor."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    found = {"length": (0, 8), "header": (8, 8 + length)}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (8 + length + begin, 8 + length + end)
    return found


def rewrite(path, change) -> None:
    """Change the header's metadata, and make the checksum right again."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    description = json.loads(metadata["session"])
    change(metadata, description)
    metadata["session"] = json.dumps(description)
    text = json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + content[8 + length : -CHECKSUM_BYTES]
    path.write_bytes(body + hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest())


def test_every_part_is_under_the_checksum(mixed_model, path, tmp_path):
    """One bit is turned at either end and somewhere inside of every part."""
    content, rng, altered = path.read_bytes(), random.Random(0), tmp_path / "copy"
    ranges = parts(content)
    assert {"layer.0.key", "layer.1.capture", "layer.1.kept", "history", "checksum"} <= set(ranges)
    assert sum(end - begin for begin, end in ranges.values()) == len(content)
    for begin, end in ranges.values():
        for position in {begin, end - 1, rng.randrange(begin, end)}:
            changed = bytearray(content)
            changed[position] ^= 1 << rng.randrange(8)
            altered.write_bytes(changed)
            with pytest.raises(SessionFileError, match=r"altered|damaged|not a saved session"):
                mixed_model.restore(altered)


@pytest.mark.parametrize("seed", range(40))
def test_truncated_and_longer_files_are_refused(mixed_model, path, tmp_path, seed):
    content = path.read_bytes()
    end = [0, 1, 7, 8, 9, 39, 40, 41, len(content) - 1, len(content) - CHECKSUM_BYTES][seed : seed + 1]
    end = end[0] if end else random.Random(seed).randrange(len(content))
    (tmp_path / "cut").write_bytes(content[:end])
    with pytest.raises(SessionFileError, match=r"truncated|damaged"):
        mixed_model.restore(tmp_path / "cut")
    (tmp_path / "long").write_bytes(content + content[:end] + b"\0")
    with pytest.raises(SessionFileError, match="altered"):
        mixed_model.restore(tmp_path / "long")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"A text.\n" * 100,
        b"\0" * 400,
        struct.pack("<Q", 2**63) + b"x" * 400,
        struct.pack("<Q", 7) + b"[1,2,3]" + b"\0" * 400,
        struct.pack("<Q", 30000) + b"[" * 30000 + b"\0" * 400,
    ],
)
def test_other_files_are_refused(mixed_model, tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SessionFileError, match="not a saved session"):
        mixed_model.restore(tmp_path / "x")


def test_a_safetensors_file_of_another_kind_is_refused(mixed_model, tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(100, np.float32)}, tmp_path / "x")
    with pytest.raises(SessionFileError, match="not a saved session"):
        mixed_model.restore(tmp_path / "x")


def test_a_file_that_is_missing_is_named(mixed_model, tmp_path):
    with pytest.raises(SessionFileError, match="missing cannot be read"):
        mixed_model.restore(tmp_path / "missing")


@pytest.mark.parametrize("name", ["folder", "pipe", "device"])
def test_what_is_not_a_file_is_refused_at_once(mixed_model, tmp_path, name):
    """A pipe that nobody writes to would be waited for, and a device that never ends read for ever."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    with pytest.raises(SessionFileError, match=f"{name} is not a regular file"):
        mixed_model.restore(tmp_path / name)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
def test_a_file_is_its_owners_alone(mixed_model, session, tmp_path, umask):
    before = os.umask(umask)
    try:
        session.save(tmp_path / "new")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new") == 0o600 & ~umask
    mixed_model.restore(tmp_path / "new")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(session, tmp_path, mode):
    (tmp_path / "old").write_bytes(b"before")
    (tmp_path / "old").chmod(mode)
    (tmp_path / "link").symlink_to("old")
    session.save(tmp_path / "link")
    assert mode_of(tmp_path / "old") == mode
    assert (tmp_path / "link").is_symlink()


def test_another_version_is_named(mixed_model, path):
    for version in ("1", str(VERSION + 1)):
        rewrite(path, lambda metadata, _, version=version: metadata.update(version=version))
        with pytest.raises(ContractMismatchError, match=f"version '{version}'.*reads {VERSION}"):
            mixed_model.restore(path)


INNER = ("lengths.logical", "plan.slot_tile", "generation.turn", "generation.chosen", "generation.ready")
TURN = ("sampling", "max_new_tokens", "eos_token_ids", "count", "tokens", "held")


@pytest.mark.parametrize("name", [*DESCRIPTION, *INNER, *(f"generation.turn.{name}" for name in TURN)])
def test_descriptions_of_another_form_are_refused(mixed_model, path, name):
    """Also where the checksum is right."""
    *outer, inner = name.split(".")
    content = path.read_bytes()
    for value in (None, True, ["x"], {"x": 1}):  # none: taken out

        def change(_, description, value=value):
            target = description
            for name in outer:
                target = target[name]
            target[inner] = value
            if value is None:
                del target[inner]

        path.write_bytes(content)
        rewrite(path, change)
        with pytest.raises((SessionFileError, ContractMismatchError)):
            mixed_model.restore(path)


def test_a_stop_text_without_a_tokenizer_is_refused(mixed_model, path):
    rewrite(path, lambda _, description: description["generation"]["turn"].update(stop=["x"]))
    with pytest.raises(ConfigError, match="no tokenizer"):
        mixed_model.restore(path)


def test_unknown_options_are_named(mixed_model, path):
    rewrite(path, lambda _, description: description["eviction"].update(policy="clairvoyant"))
    with pytest.raises(ContractMismatchError, match="clairvoyant"):
        mixed_model.restore(path)
    rewrite(path, lambda _, description: description["eviction"].update(policy="snapkv", depth=3))
    with pytest.raises(ContractMismatchError, match="depth"):
        mixed_model.restore(path)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("architecture", "llama", "architecture is 'llama'"),
        ("dtype", "float16", "dtype is 'float16', this model's 'float32'"),
        ("sink", 4, "sink is 4"),
        ("layers", [], "0 layers, this model 4"),
        ("weights", "0", "weights"),
        ("graph", "0", "graph"),
    ],
)
def test_what_differs_from_the_model_is_named(mixed_model, path, name, value, named):
    rewrite(path, lambda _, description: description["model"].update({name: value}))
    with pytest.raises(ContractMismatchError, match=f"another model: .*{named}"):
        mixed_model.restore(path)


def test_a_layer_that_differs_is_named(mixed_model, path):
    rewrite(path, lambda _, description: description["model"]["layers"][2].update(window=99))
    with pytest.raises(ContractMismatchError, match=r"layer 2 is .*99.*20"):
        mixed_model.restore(path)


@pytest.mark.parametrize("other", ["weights", "graph", "family"])
def test_other_models_are_refused(mixed_model, full_model, tmp_path, path, other):
    if other == "family":
        model, named = full_model, "architecture"
    else:
        changes = {"rms_norm_eps": 0.01} if other == "graph" else {}
        seed = 6 if other == "weights" else 5
        checkpoint = tiny_checkpoint("gemma3", tmp_path / "hf", seed=seed, num_key_value_heads=2, **changes)
        folder = ortolan.export(checkpoint, tmp_path / "model", max_context=512, chunk_size=16, sink=2)
        model, named = ortolan.load(folder, device="cpu"), other
    with pytest.raises(ContractMismatchError, match=named):
        model.restore(path)


def test_the_same_export_elsewhere_is_the_same_model(mixed_model, path, tmp_path, session, draw_tokens):
    folder = shutil.copytree(mixed_model.folder, tmp_path / "model")
    restored = ortolan.load(folder, device="cpu", num_threads=1).restore(path)
    np.testing.assert_array_equal(restored.prefill(draw_tokens(9)), session.prefill(draw_tokens(9)))


@pytest.fixture
def sampled(full_folder, tmp_path, monkeypatch):
    """A copy of a model whose weight file counts as large; returns its folder and its manifest."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 100_000)
    monkeypatch.setattr(fingerprint, "STRIDE_BYTES", 8192)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 64)
    folder = shutil.copytree(full_folder, tmp_path / "model")
    return folder, ortolan.load(folder, device="cpu").manifest


def tensor_offsets(folder) -> list[int]:
    tensors = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors]
    return [int(place["offset"]) for place in places if "offset" in place]


def test_large_weight_files_are_sampled_in_every_tensor(sampled):
    folder, manifest = sampled
    path = folder / "model.onnx.data"
    before, weights = fingerprint.take_fingerprint(folder, manifest), path.read_bytes()
    offsets = tensor_offsets(folder)
    assert len(offsets) > 4 * 7
    assert any(offset % 8192 for offset in offsets)
    for position in (*offsets, 3 * 8192 + 63, len(weights) - 1):
        changed = bytearray(weights)
        changed[position] ^= 1
        path.write_bytes(changed)
        after = fingerprint.take_fingerprint(folder, manifest)
        assert fingerprint.difference(before, after) == "its weights are others than this model's"
    path.write_bytes(weights)
    assert fingerprint.difference(before, fingerprint.take_fingerprint(folder, manifest)) is None


def test_a_model_whose_files_are_gone_is_named(full_folder, tmp_path):
    folder = shutil.copytree(full_folder, tmp_path / "model")
    session = ortolan.load(folder, device="cpu").session()
    shutil.rmtree(folder)
    with pytest.raises(ContractMismatchError, match="model cannot be read any more"):
        session.save(tmp_path / "x")


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"max_context": 100}, "120 tokens"), ({"max_context": 0}, "at least 1"), ({"max_context": 1024}, "export"),
     ({"chunk_size": 0}, "chunk_size")],
)  # fmt: skip
def test_plans_that_do_not_hold_the_session_are_refused(mixed_model, path, changes, named):
    with pytest.raises(ConfigError, match=named):
        mixed_model.restore(path, **changes)


def test_caches_that_do_not_hold_the_session_are_refused(mixed_model, path):
    plan = mixed_model.plan()
    small = plan.with_capacities([layer.capacity if layer.kind == "ring" else 39 for layer in plan.layers])
    with contextlib.closing(SavedSequence(path)) as saved, pytest.raises(ConfigError, match="layer 1 holds 40 tokens"):
        saved.capacities(small, sink=2)


def test_the_file_is_a_safetensors_file(mixed_model, session, path):
    """So that the format's own library lists and reads it."""
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["format"] == "ortolan-session"
        assert file.get_tensor("history").tolist() == session.state.history
        held = file.get_tensor("layer.1.key").reshape(2, 40, 16)
    np.testing.assert_array_equal(held, session.feeder.caches.store.tensors[1]["key"][0, :, :40])


def test_nothing_is_restored_where_there_is_no_memory(mixed_model, path, monkeypatch):
    from ortolan.errors import CapacityError
    from ortolan.runtime.device.buffers import HostBuffers

    def refuse(*_):
        raise CapacityError("no memory")

    monkeypatch.setattr(HostBuffers, "empty", refuse)
    with pytest.raises(CapacityError):
        mixed_model.restore(path)


def test_rows_are_read_as_they_are_asked_for(tmp_path):
    values = np.arange(24, dtype=np.int32).reshape(6, 4)
    tensors = [
        Tensor(name="none", element_type="F16", shape=(0, 4), parts=list),
        Tensor(name="x", element_type="I32", shape=(6, 4), parts=lambda: [values[:2], values[2:]]),
    ]
    write_session_file(tmp_path / "x", {"a": [1]}, tensors)
    with contextlib.closing(SessionFile(tmp_path / "x")) as file:
        assert file.description == {"a": [1]}
        assert file.shape("none") == (0, 4)
        assert "y" not in file
        np.testing.assert_array_equal(file.read("x", np.int32, 1, 5), values[1:5])
        assert file.read("none", np.float16).shape == (0, 4)
        with pytest.raises(SessionFileError, match="6 rows"):
            file.read("x", np.int32, 3, 7)
        with pytest.raises(SessionFileError, match="'y'"):
            file.read("y", np.int32)


def test_errors_are_of_one_family():
    assert issubclass(SessionFileError, OrtolanError)
    assert issubclass(SessionFileError, ValueError)
    assert issubclass(StorageError, OrtolanError)
