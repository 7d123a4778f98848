"""Session files under a right checksum whose numbers do not fit are refused, before anything is made of them."""

import hashlib
import json
import struct

import pytest
from saved_sessions import evicted_session

from ortolan.errors import SessionFileError
from ortolan.runtime.saved.file import CHECKSUM_BYTES


@pytest.fixture(scope="module")
def content(mixed_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "session"
    evicted_session(mixed_model, list(range(3, 123))).save(path)
    return path.read_bytes()


def write(path, content, change):
    """Write a file whose description and header a function has changed."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    described = json.loads(header["__metadata__"]["session"])
    change(described, header)
    header["__metadata__"]["session"] = json.dumps(described)
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + content[8 + length : -CHECKSUM_BYTES]
    path.write_bytes(whole + hashlib.blake2b(whole, digest_size=CHECKSUM_BYTES).digest())


def setting(*keys):
    """Return a change of one number of the description; the last key is its value."""

    def change(described, header):
        *path, name, value = keys
        for key in path:
            described = described[key]
        described[name] = value

    return change


def shaping(name, key, value):
    """Return a change of a tensor's entry."""
    return lambda described, header: header[name].update({key: value})


CHANGES = {
    "a length below 0": setting("lengths", "logical", -1),
    "a length beyond the context": setting("lengths", "logical", 2**31 - 1),
    "a length of more than 64 bits": setting("lengths", "logical", 10**30),
    "an eviction after the end": setting("lengths", "evicted_at", 10**6),
    "captured queries after the end": setting("lengths", "captured_from", 10**6),
    "a variant that is not there": setting("variant", 1),
    "a variant below 0": setting("variant", -1),
    "a token outside the vocabulary": setting("pending", [131]),
    "no context": setting("plan", "max_context", 0),
    "no slots": setting("layers", 1, "capacity", -1),
    "a first position after the end": setting("layers", 0, "first", 10**6),
    "counts of another layer": setting("lengths", "counts", {"0": [1, 1]}),
    "counts that are not numbers": setting("lengths", "counts", {"1": [None, 1]}),
    "counts of other heads": setting("lengths", "counts", {"1": [1]}),
    "counts of nothing": setting("lengths", "counts", {}),
    "rows of another size": shaping("layer.1.key", "shape", [80, 8]),
    "rows beyond the file": shaping("layer.1.key", "data_offsets", [0, 2**40]),
    "rows before the file": shaping("layer.1.key", "data_offsets", [-2560, 0]),
    "more rows than bytes": shaping("layer.1.key", "shape", [2**40, 16]),
    "history of another length": shaping("history", "shape", [60, 2]),
    "queries of other heads": shaping("layer.1.capture", "shape", [16, 2, 16]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_that_do_not_fit_are_refused(mixed_model, content, tmp_path, name):
    write(tmp_path / "session", content, CHANGES[name])
    with pytest.raises(SessionFileError, match="session"):
        mixed_model.restore(tmp_path / "session")


def test_a_file_that_was_not_changed_is_restored(mixed_model, content, tmp_path):
    write(tmp_path / "session", content, lambda described, header: None)
    assert mixed_model.restore(tmp_path / "session").logical_length == 120
