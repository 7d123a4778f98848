"""Generates what derives from the operator table: C++ definitions and registration, the emitters, the docs."""

from ortolan.custom_ops.codegen.files import generated_files
from ortolan.custom_ops.codegen.names import snake_case

__all__ = ["generated_files", "snake_case"]
