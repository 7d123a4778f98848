"""Runs the operators on tensors of odd shapes, types, numbers and places; where they lie changes no result.

The memory of each tensor is as large as it must be, so that AddressSanitizer sees every step beyond.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import devices
import numpy as np
import onnxruntime as ort
from harness import find_operator, open_session

Feeds = dict[str, np.ndarray]
EXTREMES = (0, 1, -1, -2, 7, 16, 17, 1000, 2**15, 2**30, 2**31 - 1, -(2**31))
FLOATS = (0.0, -0.0, np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-40)
ATTRIBUTES = {
    "RingKvAppend": ("sink", "capacity"),
    "SwaAttention": ("window", "sink", "capacity", "scale", "softcap"),
    "SnapKvScore": ("scale", "softcap"),
}


class Bindings:
    """Calls of the CPU operators, of which some are as they should be and most are not."""

    def __init__(self, folders: list[Path], scratch: Path) -> None:
        self._operators = list(DRAWS)

    def run(self, rng: random.Random) -> None:
        """Draw a call, change it, and run it with buffers of ONNX Runtime's and with others."""
        name = rng.choice(self._operators)
        numbers = np.random.default_rng(rng.getrandbits(64))
        feeds = DRAWS[name](rng, numbers)
        for _ in range(rng.choice((0, 1, 1, 2))):
            rng.choice((_change_numbers, _change_shape, _change_type))(rng, numbers, feeds)
        attributes = {key: _attribute(rng, key) for key in ATTRIBUTES.get(name, ()) if rng.random() < 0.3}
        try:
            session = open_session(name, feeds, attributes)
        except Exception as error:
            _check_refusal(error)
            return
        places = {key: array.copy() for key, array in feeds.items()}
        if rng.random() < 0.2:
            _overlay(rng, places)
        expected = _outcome(lambda: session.run(None, {key: array.copy() for key, array in places.items()}))
        actual = _outcome(lambda: _run_bound(rng, name, session, places, expected))
        pages = feeds.get("block_table", np.empty(0)).reshape(-1)
        if isinstance(actual, Exception) or len(set(pages.tolist())) < len(pages):  # pages of two are written by both
            return
        assert not isinstance(expected, Exception), f"{name} runs with some buffers only: {expected}"
        for one, other in zip(actual, expected, strict=True):
            devices.assert_same_bits(one, other)


def _outcome(call: Callable[[], list[np.ndarray]]) -> list[np.ndarray] | Exception:
    """Return what a call returns, or the error by which it was refused."""
    try:
        return call()
    except Exception as error:
        _check_refusal(error)
        return error


def _check_refusal(error: Exception) -> None:
    """Raise what is neither of ONNX Runtime's errors nor of its binding's."""
    if not (type(error).__module__.startswith("onnxruntime") or type(error) in (RuntimeError, ValueError)):
        raise error


def _run_bound(
    rng: random.Random,
    name: str,
    session: ort.InferenceSession,
    places: Feeds,
    expected: list[np.ndarray] | Exception,
) -> list[np.ndarray]:
    """Run with outputs in place, over other tensors, or in memory of their own."""
    operator = find_operator(name)
    binding = session.io_binding()
    for key, array in places.items():
        binding.bind_input(key, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    outputs: list[np.ndarray | None] = []
    sources = {port.name: operator.inputs[port.alias].name for port in operator.outputs if port.alias >= 0}
    ports = [p for p in operator.outputs if not p.optional or sources.get(p.name, "") in ("", *places)]
    for index, port in enumerate(ports):
        source = operator.inputs[port.alias].name if port.alias >= 0 else None
        how = rng.choice(("in place", "in place", "own", "free", "over"))
        like = expected[index] if isinstance(expected, list) else places[source or rng.choice(list(places))]
        target = np.full_like(like, 1)
        if how == "in place" and source in places:
            target = places[source]
        elif how == "over":
            fitting = [each for each in places.values() if each.nbytes >= like.nbytes] or [target]
            target = rng.choice(fitting).reshape(-1).view(np.uint8)[: like.nbytes].view(like.dtype).reshape(like.shape)
        if how == "free":
            binding.bind_output(port.name)
            outputs.append(None)
        else:
            binding.bind_output(port.name, "cpu", 0, target.dtype, target.shape, target.ctypes.data)
            outputs.append(target)
    session.run_with_iobinding(binding)
    values = binding.get_outputs()
    return [value.numpy() if own is None else own for own, value in zip(outputs, values, strict=True)]


def _overlay(rng: random.Random, places: Feeds) -> None:
    """Let one input's memory be a part of another's."""
    inner, outer = rng.sample(list(places), 2)
    space = places[outer].reshape(-1).view(np.uint8)
    if places[inner].nbytes > space.nbytes:
        return
    begin = rng.randrange(0, space.nbytes - places[inner].nbytes + 1, 8)
    target = space[begin : begin + places[inner].nbytes].view(places[inner].dtype).reshape(places[inner].shape)
    target[...] = places[inner]
    places[inner] = target


def _change_numbers(rng: random.Random, numbers: np.random.Generator, feeds: Feeds) -> None:
    name = rng.choice(list(feeds))
    array = feeds[name].reshape(-1)
    for _ in range(rng.choice((1, 1, 3)) if array.size else 0):
        is_float = array.dtype.kind == "f"
        with np.errstate(over="ignore"):
            array[rng.randrange(array.size)] = rng.choice(FLOATS if is_float else EXTREMES)


def _change_shape(rng: random.Random, numbers: np.random.Generator, feeds: Feeds) -> None:
    name = rng.choice(list(feeds))
    shape = list(feeds[name].shape)
    axis = rng.randrange(len(shape))
    how = rng.choice(("more", "less", "none", "drop", "add", "swap"))
    if how == "drop" and len(shape) > 1:
        del shape[axis]
    elif how == "add":
        shape.insert(axis, 1)
    elif how == "swap":
        shape.reverse()
    else:
        shape[axis] = {"more": shape[axis] + 1, "none": 0}.get(how, max(0, shape[axis] - 1))
    feeds[name] = np.resize(feeds[name], shape) if feeds[name].size else np.zeros(shape, feeds[name].dtype)


def _change_type(rng: random.Random, numbers: np.random.Generator, feeds: Feeds) -> None:
    name = rng.choice(list(feeds))
    with np.errstate(all="ignore"):
        feeds[name] = feeds[name].astype(rng.choice((np.float16, np.float32, np.int32, np.int64)))


def _attribute(rng: random.Random, name: str) -> int | float:
    if name in ("scale", "softcap"):
        return rng.choice((0.0, 1.0, 0.3, -1.0, 1e30))
    return rng.choice((-1, 0, 1, 2, 5, 8, 16, 2**31, 2**62))


def _floats(rng: random.Random, numbers: np.random.Generator, *shape: int) -> np.ndarray:
    return numbers.standard_normal(shape).astype(np.float32)


def _step(rng: random.Random, tokens: list[int], slots: int) -> Feeds:
    return {
        "query_start": np.cumsum([0, *tokens]).astype(np.int32),
        "past_len": np.array([rng.randrange(slots) for _ in tokens], np.int32),
    }


def _table(rng: random.Random, sequences: int, pages: int) -> Feeds:
    if rng.random() < 0.5:
        return {}
    order = rng.sample(range(sequences * pages), sequences * pages)
    return {"block_table": np.array(order, np.int32).reshape(sequences, pages)}


def _cache(rng: random.Random, numbers: np.random.Generator, table: Feeds, sequences: int, size: int) -> Feeds:
    pages = table["block_table"].size if table else sequences
    shape = (pages, 2, rng.choice((4, 8, 16)), size)
    return {name: _floats(rng, numbers, *shape) for name in ("key_cache", "value_cache")}


def _append(rng: random.Random, numbers: np.random.Generator) -> Feeds:
    tokens, size = [rng.randrange(4) for _ in range(rng.randrange(1, 4))], rng.choice((8, 16))
    table = _table(rng, len(tokens), rng.choice((1, 2)))
    rows = {name: _floats(rng, numbers, sum(tokens), 2, size) for name in ("key", "value")}
    return rows | _cache(rng, numbers, table, len(tokens), size) | _step(rng, tokens, 12) | table


def _attend(rng: random.Random, numbers: np.random.Generator) -> Feeds:
    tokens, size = [rng.randrange(4) for _ in range(rng.randrange(1, 4))], rng.choice((8, 16, 64))
    table = _table(rng, len(tokens), rng.choice((1, 2)))
    query = {"query": _floats(rng, numbers, sum(tokens), 4, size)}
    sinks = {"sink_logits": _floats(rng, numbers, 4)} if rng.random() < 0.3 else {}
    return query | _cache(rng, numbers, table, len(tokens), size) | _step(rng, tokens, 4) | table | sinks


def _capture(rng: random.Random, numbers: np.random.Generator) -> Feeds:
    tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
    query, capture = _floats(rng, numbers, sum(tokens), 4, 8), _floats(rng, numbers, len(tokens), 4, 4, 8)
    return {"query": query, "capture": capture} | _step(rng, tokens, 1000)


def _score(rng: random.Random, numbers: np.random.Generator) -> Feeds:
    sequences, size = rng.randrange(1, 3), rng.choice((8, 64))
    table = _table(rng, sequences, rng.choice((1, 2)))
    keys = _cache(rng, numbers, table, sequences, size)["key_cache"]
    lengths = np.array([rng.randrange(keys.shape[2] + 1) for _ in range(sequences)], np.int32)
    return {"capture": _floats(rng, numbers, sequences, 4, 4, size), "key_cache": keys, "kv_len": lengths} | table


def _select(rng: random.Random, numbers: np.random.Generator) -> Feeds:
    sequences, slots = rng.randrange(1, 3), rng.choice((1, 16, 300))
    sizes = {
        name: np.array([rng.randrange(most)], np.int64) for name, most in (("budget", 40), ("window", 9), ("sink", 4))
    }
    lengths = numbers.integers(0, slots + 1, (sequences, 2)).astype(np.int32)
    return {"score": _floats(rng, numbers, sequences, rng.choice((1, 2)), slots), "kv_len": lengths} | sizes


def _compact(rng: random.Random, numbers: np.random.Generator) -> Feeds:
    sequences = rng.randrange(1, 3)
    table = _table(rng, sequences, rng.choice((1, 2)))
    caches = _cache(rng, numbers, table, sequences, 8)
    slots, count = caches["key_cache"].shape[2], rng.randrange(1, 5)
    lists = [sorted(rng.sample(range(slots), min(count, slots))) for _ in range(sequences)]
    return caches | {"keep": np.array(lists, np.int32)[:, None]} | table


DRAWS: dict[str, Callable[[random.Random, np.random.Generator], Feeds]] = {
    "RingKvAppend": _append,
    "SwaAttention": _attend,
    "SnapKvCapture": _capture,
    "SnapKvScore": _score,
    "KvSelect": _select,
    "KvCompact": _compact,
}
