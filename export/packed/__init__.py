"""Reads linear weights that a checkpoint publishes in low bits: codes are laid out anew, never rounded again."""

from __future__ import annotations

from ortolan.export.packed.published import Published, PublishedWeights, read_quantization

__all__ = ["Published", "PublishedWeights", "read_quantization"]
