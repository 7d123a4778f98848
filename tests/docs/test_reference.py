"""The Python reference of the site names all that is public; of the errors it shows the whole module."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT

import ortolan

SHOWN = (ROOT / "docs" / "reference.rst").read_text(encoding="utf-8")
NAMES = [name for name in ortolan.__all__ if not name.endswith("Error") and name != "custom_ops"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_facade_is_in_the_reference(name):
    assert re.search(rf"(:: (\w+\.)*|[ ,]){name}\b", SHOWN), f"add {name} to docs/reference.rst"


@pytest.mark.parametrize("name", ortolan.custom_ops.__all__)
def test_every_name_of_the_operators_package_is_in_the_reference(name):
    assert f":: ortolan.custom_ops.{name}\n" in SHOWN
