"""Turns a Hugging Face checkpoint folder, or a model that another exporter made, into a model folder.

The module is callable, so that `ortolan.export(...)` works although `ortolan.export` is this subpackage.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from ortolan.export.api import export
from ortolan.export.conversion import convert

__all__ = ["convert", "export"]


class _CallableModule(ModuleType):
    __signature__ = inspect.signature(export)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward to `export`."""
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
