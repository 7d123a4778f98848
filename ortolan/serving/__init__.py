"""Serves a model by OpenAI's interface: over HTTP (`app`, with the extra `serve`) and from files (`batch`)."""

from __future__ import annotations

from ortolan.serving.service import Service

__all__ = ["Service"]
