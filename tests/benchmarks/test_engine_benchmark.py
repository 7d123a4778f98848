"""The engine benchmark exports what it measures."""

import argparse
import json

import engine_cuda
import pytest


@pytest.mark.parametrize("weight_format", [None, "int4"])
def test_it_exports_a_paged_model_of_random_weights(tmp_path, weight_format):
    options = argparse.Namespace(
        shape="tiny", context=200, decode=10, mixed=False, capacity=None, chunk_tokens=64, page_size=64,
        weight_format=weight_format, no_peer=True,
    )  # fmt: skip
    ((name, folder),) = engine_cuda.export_all(tmp_path, options).items()
    manifest = json.loads((folder / "ortolan.json").read_text())
    assert (name, manifest["paged"], manifest["page_size"]) == ("ortolan", True, 64)
