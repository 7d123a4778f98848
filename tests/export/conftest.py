"""Sources of conversions, and their conversions."""

from __future__ import annotations

import foreign
import pytest
from conversions import CHUNK, SPECS
from foreign import Foreign

import ortolan


@pytest.fixture(params=sorted(SPECS))
def converted(request, tmp_path):
    spec = SPECS[request.param]
    source = foreign.write(spec, tmp_path / "source")
    return spec, source, ortolan.convert(source, tmp_path / "model", max_context=512, chunk_size=CHUNK)


@pytest.fixture
def source(tmp_path):
    return foreign.write(Foreign(), tmp_path / "source")
