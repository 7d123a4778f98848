"""Long sequences and large pools: a small ring of 128 K positions, and pages past 2^31 elements."""

import resource

import devices
import numpy as np
import pytest
from attention_matrix import MatrixCase
from matrix_runs import check_against_oracle, run_case
from resident import Resident, run_resident

POSITIONS = 131_072
PAGE, KV_HEADS, SIZE = 64, 2, 128
FAR_PAGE = 2**31 // (KV_HEADS * PAGE * SIZE)  # starts at element 2^31
POOL_PAGES = FAR_PAGE + 4

TARGETS = [pytest.param("cpu-float16"), pytest.param("cuda-bfloat16", marks=pytest.mark.cuda)]


@pytest.fixture(params=TARGETS)
def element(request):
    """Run on a device, with one element type of two bytes."""
    with devices.using(devices.TARGETS[request.param]):
        yield devices.element()


@pytest.mark.slow
@pytest.mark.parametrize(("sink", "page_slots"), [(0, 0), (8, 32)])
def test_128_k_positions_in_a_small_ring(element, sink, page_slots):
    case = MatrixCase(
        window=512,
        sink=sink,
        group=1,
        head_size=64,
        length=POSITIONS,
        chunks="even",
        batch="one",
        page_slots=page_slots,
    )
    assert case.capacity <= 800
    check_against_oracle(run_case(case, element))


class Pools:
    """Key and value pools, of which two sequences own some pages."""

    def __init__(self, num_pages: int, table: list[list[int]], element: np.dtype) -> None:
        shape = (num_pages, KV_HEADS, PAGE, SIZE)
        self.table = table
        self.inputs = {
            "key_cache": Resident.reserve(shape, element),
            "value_cache": Resident.reserve(shape, element),
            "block_table": Resident.of(np.array(table, np.int32)),
        }

    def rows(self) -> list[np.ndarray]:
        """Return what the pages in use hold."""
        pages = [page for row in self.table for page in row]
        return [self.inputs[name].pages(pages) for name in ("key_cache", "value_cache")]


def run_everything(pools: Pools, element: np.dtype) -> list[np.ndarray]:
    """Append, attend, score and compact two sequences; returns all that came of it."""
    rng = np.random.default_rng(0)
    tokens, results = [150, 70], []

    def draw(*shape: int) -> Resident:
        return Resident.of(rng.standard_normal(shape).astype(element))

    lengths = {
        "query_start": Resident.of(np.cumsum([0, *tokens]).astype(np.int32)),
        "past_len": Resident.of(np.zeros(2, np.int32)),
    }
    new = {"key": draw(sum(tokens), KV_HEADS, SIZE), "value": draw(sum(tokens), KV_HEADS, SIZE)}
    run_resident("RingKvAppend", {**new, **pools.inputs, **lengths}, {})
    results += pools.rows()
    query = draw(sum(tokens), 2 * KV_HEADS, SIZE)
    output = Resident.of(np.full(query.shape, np.nan, element))
    run_resident("SwaAttention", {"query": query, **pools.inputs, **lengths}, {"output": output}, window=100, sink=3)
    results.append(output.numpy())
    score = Resident.of(np.full((2, KV_HEADS, PAGE * len(pools.table[0])), np.nan, np.float32))
    scored = {
        "capture": draw(2, 16, 2 * KV_HEADS, SIZE),
        "key_cache": pools.inputs["key_cache"],
        "kv_len": Resident.of(np.array(tokens, np.int32)),
        "block_table": pools.inputs["block_table"],
    }
    run_resident("SnapKvScore", scored, {"score": score})
    results.append(score.numpy())
    keep = np.full((2, KV_HEADS, 60), -1, np.int32)
    for (b, h), _ in np.ndenumerate(keep[:, :, 0]):
        keep[b, h, : 60 - h] = np.sort(rng.permutation(tokens[b])[: 60 - h])
    run_resident("KvCompact", {**pools.inputs, "keep": Resident.of(keep)}, {})
    return results + pools.rows()


def test_pages_past_two_to_the_31_elements(element):
    """Pages at both ends of a pool of 4 GiB give the bits that a small pool gives."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < 2**35:
        pytest.skip(f"the address space is limited to {limit} bytes, less than two pools of 4 GiB need")
    far = Pools(POOL_PAGES, [[FAR_PAGE + 1, 0, FAR_PAGE - 1], [FAR_PAGE, FAR_PAGE + 3, 2]], element)
    near = Pools(6, [[4, 0, 3], [1, 5, 2]], element)
    for got, want in zip(run_everything(far, element), run_everything(near, element), strict=True):
        assert np.isfinite(want.astype(np.float32)).all()
        devices.assert_same_bits(got, want)
    for name in ("key_cache", "value_cache"):
        assert not far.inputs[name].pages([1, FAR_PAGE + 2]).astype(np.float32).any(), "a page of nobody was written"
