"""A small manifest, random caches and captures for the eviction graph, and a way to run it."""

import numpy as np
import onnxruntime

import ortolan.custom_ops
from ortolan.manifest import LayerInfo, Manifest

SLOTS, WINDOW, HEADS, KV_HEADS, SIZE = 96, 8, 4, 2, 16


INV_FREQ = tuple(float(f) for f in 100.0 ** -np.linspace(0, 1, SIZE // 2, endpoint=False))


def manifest(evictable: bool = True, rope: str | None = "rope", variants=(INV_FREQ,)) -> Manifest:
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    full = LayerInfo(window=-1, **heads, evictable=evictable, rope=rope)
    ring = LayerInfo(window=12, **heads, evictable=False)
    return Manifest(
        architecture="test",
        dtype="float32",
        vocab_size=10,
        max_context=SLOTS,
        chunk_size=8,
        sink=0,
        snapkv_window=WINDOW,
        paged=False,
        layers=(full, ring, full),
        rope_limits=(SLOTS,),
        ropes={"rope": variants},
    )


def draw_feeds(rng, lengths, layers=(0, 2)):
    feeds = {"budget": np.array([30]), "window": np.array([WINDOW]), "sink": np.array([3])}
    for layer in layers:
        shape = (len(lengths), KV_HEADS, SLOTS, SIZE)
        feeds[f"layer.{layer}.capture"] = rng.standard_normal((len(lengths), WINDOW, HEADS, SIZE)).astype(np.float32)
        feeds[f"layer.{layer}.key_cache"] = rng.standard_normal(shape).astype(np.float32)
        feeds[f"layer.{layer}.value_cache"] = rng.standard_normal(shape).astype(np.float32)
        feeds[f"layer.{layer}.score"] = rng.random((len(lengths), KV_HEADS, SLOTS)).astype(np.float32)
        feeds[f"layer.{layer}.kv_len"] = np.repeat(np.array(lengths, np.int32)[:, None], KV_HEADS, axis=1)
    return feeds


def run(model, feeds):
    options = onnxruntime.SessionOptions()
    ortolan.custom_ops.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {each.name for each in session.get_inputs()}
    feeds = {name: array for name, array in feeds.items() if name in wanted}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
