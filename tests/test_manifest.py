"""A manifest that no export writes is refused, whatever is wrong with it."""

import dataclasses
import json

import pytest

from ortolan.errors import ContractMismatchError
from ortolan.manifest import MANIFEST_FILE, LayerInfo, Manifest, cache_kinds, read_description

LAYERS = tuple(
    LayerInfo(window=w, num_heads=4, num_kv_heads=2, head_size=8, evictable=w < 0, rope="all") for w in (-1, 12, -1)
)
PAGED = Manifest(
    architecture="Tiny",
    dtype="float32",
    vocab_size=131,
    max_context=64,
    chunk_size=16,
    sink=0,
    snapkv_window=8,
    paged=True,
    page_size=16,
    cache_kinds=cache_kinds(LAYERS),
    layers=LAYERS,
    rope_limits=(32, 64),
    ropes={"all": ((1.0, 0.5), (1.0, 0.25))},
    eos_token_ids=(2,),
    files={"model.onnx": 17},
)
JUNK = ("x", -7, 1.5, True, [None], {"a": []})
KEYS = json.loads(PAGED.to_json())
FREE = [("architecture", "x"), ("ortolan_version", "x"), ("fused_model", "x"), ("cpu_model", "x"), ("bos_token_id", -7)]
FREE += [("operator_version", -7), ("paged", True), ("chunk_chosen", True), ("ropes", {"a": []})]
FREE += [("weight_format", "x")]
REFUSED = [(name, junk) for name in KEYS for junk in JUNK if (name, junk) not in FREE]


def test_a_manifest_comes_back_as_it_was():
    assert Manifest.from_json(PAGED.to_json()) == PAGED


@pytest.mark.parametrize(("name", "junk"), REFUSED)
def test_values_of_another_kind_are_refused(name, junk):
    with pytest.raises(ContractMismatchError):
        Manifest.from_json(json.dumps(KEYS | {name: junk}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", []),
        ("layers", [KEYS["layers"][0] | {"cache_of": 0}]),
        ("layers", [KEYS["layers"][0], KEYS["layers"][0] | {"cache_of": 2}]),
        ("layers", [KEYS["layers"][0] | {"num_heads": 0}]),
        ("rope_limits", [64, 32]),
        ("rope_limits", [32]),
        ("max_context", 2**31),
        ("vocab_size", 0),
        ("sink", 2**31),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ContractMismatchError, match=name):
        Manifest.from_json(json.dumps(KEYS | {name: value}))


def test_folders_of_the_first_format_are_refused():
    with pytest.raises(ContractMismatchError, match=r"format version 1, .* export the model again"):
        Manifest.from_json(json.dumps(KEYS | {"format_version": 1}))


def test_layers_that_share_a_cache_take_no_pages():
    layers = (*LAYERS, dataclasses.replace(LAYERS[0], cache_of=0))
    assert [kind.layers for kind in cache_kinds(layers)] == [(0, 2), (1,)]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"", b"null"])
def test_files_that_are_no_manifest_are_refused(tmp_path, content):
    (tmp_path / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(ContractMismatchError, match=MANIFEST_FILE):
        read_description(tmp_path)
