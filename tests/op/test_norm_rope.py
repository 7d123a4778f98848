"""NormRope: the queries of QkvRopeAppend, without what else it does."""

import devices
import numpy as np
import pytest
from fused_cases import QkvCase, norm_rope_feeds, plain_heads, qkv_feeds, qkv_outputs, run_expanded, run_fused
from tolerances import FLOAT32_SUMS, assert_as_good_as_plain

from ortolan.custom_ops import fused_reference

pytestmark = pytest.mark.usefixtures("target")

CASES = {
    "one-token": QkvCase(heads=32, kv_heads=8, size=64, pairs=32),
    "normed": QkvCase(tokens=(70,), heads=8, kv_heads=1, size=256, pairs=128, norms=("query",)),
    "head-512": QkvCase(tokens=(3,), heads=8, kv_heads=1, size=512, pairs=256, norms=("query",)),
    "partial-rotary": QkvCase(tokens=(20,), size=80, pairs=30, norms=("query",)),
    "odd-pairs": QkvCase(tokens=(20,), size=72, pairs=7),
    "nothing": QkvCase(tokens=(0,)),
}


def run(feeds: dict[str, np.ndarray]) -> np.ndarray:
    return run_fused("NormRope", feeds, {"rotated": (feeds["heads"].shape, devices.element())}, epsilon=1e-6)["rotated"]


@pytest.mark.parametrize("name", CASES)
def test_heads_have_the_bits_of_queries_that_are_appended_with(name, isa):
    feeds = qkv_feeds(CASES[name])
    queries = run_fused("QkvRopeAppend", feeds, qkv_outputs(CASES[name], feeds), **CASES[name].attributes)["query"]
    devices.assert_same_bits(run(norm_rope_feeds(CASES[name], feeds)), queries)


@pytest.mark.parametrize("name", [name for name in CASES if name != "nothing"])
def test_heads_are_as_good_as_plain_operators(name):
    feeds = qkv_feeds(CASES[name])
    own = norm_rope_feeds(CASES[name], feeds)
    assert_as_good_as_plain(run(own), plain_heads(CASES[name], feeds)[0], fused_reference.norm_rope(**own))


@pytest.mark.parametrize("name", ["normed", "partial-rotary"])
def test_the_reference_is_that_of_standard_operators(name):
    feeds = norm_rope_feeds(CASES[name], {k: v.astype(np.float32) for k, v in qkv_feeds(CASES[name]).items()})
    rotated = run_expanded("NormRope", feeds, {"rotated": (feeds["heads"].shape, np.dtype(np.float32))}, epsilon=1e-6)
    np.testing.assert_allclose(
        rotated["rotated"], fused_reference.norm_rope(**feeds), rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS
    )


WRONG = {
    "wide-angles": ("cosine", (1, 3, 12), "cosine.* has shape"),
    "other-sines": ("sine", (1, 3, 4), "sine.* has shape"),
    "other-tokens": ("cosine", (1, 2, 8), "cosine.* has shape"),
    "narrow-weight": ("norm_weight", (8,), "norm_weight.* has shape"),
    "odd-heads": ("heads", (3, 2, 20), "multiple of 8"),
    "rows": ("heads", (3, 32), "heads.* has shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_refused(name):
    port, shape, problem = WRONG[name]
    shapes = {"heads": (3, 2, 16), "cosine": (1, 3, 8), "sine": (1, 3, 8), "norm_weight": (16,)} | {port: shape}
    if name == "wide-angles":
        shapes["sine"] = shape
    types = {"cosine": np.float32, "sine": np.float32}
    feeds = {k: np.zeros(v, types.get(k, devices.element())) for k, v in shapes.items()}
    with pytest.raises(Exception, match=problem) as error:
        run_fused("NormRope", feeds, {"rotated": ((3, 2, 16), devices.element())}, epsilon=1e-6)
    assert "NormRope" in str(error.value)
