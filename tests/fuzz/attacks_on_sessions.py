"""Changes saved sessions at random: bytes, and, under a checksum that is right, descriptions and tensors."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

from fuzz.models import check_logits
from fuzz.mutations import mutated_bytes, mutated_json

import ortolan
from ortolan.runtime.saved.file import CHECKSUM_BYTES

SNAPKV = ortolan.SnapKv(budget=24, window=8, sink=2)


class Sessions:
    """Files of sessions: with and without eviction, a generation under way or not, of several models."""

    def __init__(self, folders: list[Path], scratch: Path) -> None:
        self._path = scratch / "session"
        self._files: list[tuple[ortolan.Model, bytes]] = []
        for folder in folders:
            model = ortolan.load(folder, device="cpu", num_threads=1)
            for eviction in (None, SNAPKV):
                session = model.session(eviction=eviction)
                session.prefill(list(range(3, 60)))
                self._keep(model, session)
                sampling = ortolan.Sampling(temperature=1.0, seed=4)
                next(session.generate([5, 6], 6, sampling, stop=[[7, 8]], logprobs=2), None)
                self._keep(model, session)

    def run(self, rng: random.Random) -> None:
        """Change a file, restore it, and go on from there."""
        model, content = rng.choice(self._files)
        changed = mutated_bytes(rng, content) if rng.random() < 0.2 else changed_file(rng, content)
        self._path.write_bytes(changed)
        if model.manifest.paged and rng.random() < 0.5:
            with ortolan.Engine(model, max_sequences=2) as engine:
                engine.submit([5, 6], 4, session=self._path).result()
                engine.restore(self._path).result()
            return
        go_on(model, model.restore(self._path), rng)

    def _keep(self, model: ortolan.Model, session: ortolan.Session) -> None:
        session.save(self._path, rewind_tokens=8)
        self._files.append((model, self._path.read_bytes()))


def go_on(model: ortolan.Model, session: ortolan.Session, rng: random.Random) -> None:
    """Use what was restored, in an order drawn at random; what is refused hides nothing of the rest."""
    calls = [
        lambda: check_logits(session.prefill([5, 6, 7]), model),
        lambda: list(session.resume()),
        lambda: list(session.generate([9], 3, stop="x" if rng.random() < 0.2 else ())),
        lambda: session.rewind(max(0, session.logical_length - rng.choice((0, 1, 5)))),
        lambda: session.prefill(list(range(3, 70))),
        lambda: session.fork().step(5),
        lambda: [session.kept_positions(layer) for layer in range(len(model.manifest.layers))],
        lambda: [session.physical_length(layer) for layer in range(len(model.manifest.layers))],
    ]
    rng.shuffle(calls)
    for call in calls:
        try:
            call()
        except ortolan.OrtolanError:
            continue


def changed_file(rng: random.Random, content: bytes) -> bytes:
    """Change the description, the tensors' places or their contents, and make the checksum fit."""
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    data = content[8 + length : -CHECKSUM_BYTES]
    how = rng.random()
    if how < 0.7:
        described = json.loads(header["__metadata__"]["session"])
        part = rng.choice([name for name in described if name != "model"]) if rng.random() < 0.9 else None
        changed = mutated_json(rng, described if part is None else described[part])
        described = changed if part is None else described | {part: changed}
        header["__metadata__"]["session"] = json.dumps(described)
    elif how < 0.85:
        header = mutated_json(rng, header)
    else:
        data = mutated_bytes(rng, data)
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    return whole + hashlib.blake2b(whole, digest_size=CHECKSUM_BYTES).digest()
