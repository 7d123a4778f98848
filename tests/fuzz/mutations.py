"""Changes JSON values and bytes at random, as a hostile or a damaged file would have them."""

from __future__ import annotations

import copy
import random
from typing import Any

NUMBERS = (0, 1, -1, 2, 7, 63, 64, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 3.5, -0.0)
STRANGE = (
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    None,
    True,
    False,
    "",
    "x",
    "\0",
    "../..",
    "\ud800",
    [],
    {},
)
NESTED = ([[[]]], [None], [0] * 50, {"a": {}}, [-1, 2**31], "y" * 5000)


def mutated_json(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value with one to four changes."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change(rng, root)
    return root[0]


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with some flipped, cut out, doubled or overwritten."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 10))):
        begin = rng.randrange(len(result) + 1)
        end = min(len(result), begin + rng.choice((1, 1, 2, 8, 100)))
        piece = {
            "flip": bytes(byte ^ 1 << rng.randrange(8) for byte in result[begin:end]),
            "cut": b"",
            "double": bytes(result[begin:end] * 2),
            "random": rng.randbytes(end - begin),
            "ones": b"\xff" * (end - begin),
            "end": b"",
        }
        how = rng.choice(list(piece))
        result[begin : len(result) if how == "end" and rng.random() < 0.2 else end] = piece[how]
    return bytes(result)


def junk(rng: random.Random, like: Any = None) -> Any:
    """Return a value that is probably wrong in the place of another."""
    if isinstance(like, int | float) and not isinstance(like, bool) and rng.random() < 0.6:
        return rng.choice((*NUMBERS, like + 1, like - 1, like * 2, -like, rng.randrange(-300, 300)))
    return copy.deepcopy(rng.choice((*NUMBERS, *STRANGE, *NESTED)))


def _change(rng: random.Random, root: list[Any]) -> None:
    """Change one place, which is found by walking down at random."""
    parent: Any = root
    key: Any = 0
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.85:
        parent = parent[key]
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    how = rng.choice(("value", "value", "value", "remove", "double", "other", "rename"))
    if how == "remove" and parent is not root:
        del parent[key]
    elif how == "double" and isinstance(parent, list) and parent is not root:
        parent.insert(key, copy.deepcopy(parent[key]))
    elif how == "other" and parent is not root:
        values = list(parent.values()) if isinstance(parent, dict) else parent
        parent[key] = copy.deepcopy(rng.choice(values))
    elif how == "rename" and isinstance(parent, dict):
        parent[rng.choice((key + "x", "", "0", key.upper()))] = parent.pop(key)
    else:
        parent[key] = junk(rng, parent[key])
