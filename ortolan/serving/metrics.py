"""Writes an engine's counters in the text format of Prometheus."""

from __future__ import annotations

import dataclasses

import ortolan

GAUGES = frozenset({"most_running"})


def render_metrics(engine: ortolan.Engine) -> str:
    """Return the counters and the bytes of an engine. Raises EngineClosedError."""
    lines: list[str] = []
    for described in (engine.stats(), engine.memory()):
        for name, value in dataclasses.asdict(described).items():
            is_gauge = name in GAUGES or name.endswith("_bytes")
            full = f"ortolan_{name}" if is_gauge else f"ortolan_{name}_total"
            lines += [f"# TYPE {full} {'gauge' if is_gauge else 'counter'}", f"{full} {value}"]
    return "\n".join(lines) + "\n"
