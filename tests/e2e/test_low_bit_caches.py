"""Models whose caches hold int8 or fp8 codes: what steps, evictions, files and the engine make of them."""

import numpy as np
import onnx
import pytest
from families import shared_checkpoint
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan import Eviction
from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.graphs.verify import verify_model
from ortolan.policies import POLICIES

SIZES = {"max_context": 512, "chunk_size": 16}
CACHE_TYPES = ("int8", "fp8")
LARGEST_DIFFERENCE = {"int8": 0.1, "fp8": 0.35}  # of logits, relative to their deviation: random weights amplify


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4"])
def checkpoint(request):
    """A model of full attention alone, one whose other layers are rings, and one whose layers share caches."""
    return shared_checkpoint(request.param, seed=5, num_key_value_heads=2)


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """Model folders by (cache type, whether they are paged)."""
    made = {}
    for cache_dtype in (None, *CACHE_TYPES):
        for paged in (False, True):
            folder = tmp_path_factory.mktemp("models") / "model"
            ortolan.export(checkpoint, folder, cache_dtype=cache_dtype, paged=paged, page_size=16, **SIZES)
            made[cache_dtype, paged] = folder
    return made


@pytest.fixture(params=CACHE_TYPES)
def cache_dtype(request):
    return request.param


def load(folders, cache_dtype, *, paged=False):
    return ortolan.load(folders[cache_dtype, paged], device="cpu", num_threads=1)


def test_logits_stay_close_and_do_not_depend_on_chunks_or_pages(folders, cache_dtype):
    tokens = tokens_of(150)
    exact = load(folders, None).session().prefill(tokens)
    whole = load(folders, cache_dtype).session().prefill(tokens)
    assert np.abs(whole - exact).max() <= LARGEST_DIFFERENCE[cache_dtype] * exact.std()
    assert np.abs(whole - exact).max() > 0
    session = load(folders, cache_dtype, paged=True).session()
    for begin in range(0, 150, 50):
        parts = session.prefill(tokens[begin : begin + 50])
    np.testing.assert_allclose(parts, whole, rtol=0, atol=LOGITS_RELATIVE * whole.std())


def test_caches_are_smaller_and_the_plan_says_so(folders, cache_dtype):
    plans = {kind: load(folders, kind).plan() for kind in (None, cache_dtype)}
    model = load(folders, cache_dtype)
    for dense, coded, info in zip(plans[None].layers, plans[cache_dtype].layers, model.manifest.layers, strict=True):
        if info.cache_of is None:
            rows = dense.bytes // (4 * info.head_size)
            assert coded.bytes == rows * (info.head_size + 4)
    session = model.session()
    session.prefill(tokens_of(150))
    assert session.cache_bytes == plans[cache_dtype].bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_evict_codes_with_their_scales(folders, cache_dtype, policy):
    options = Eviction(policy=policy, budget=40, window=8, sink=2)
    results = []
    for paged in (False, True):
        session = load(folders, cache_dtype, paged=paged).session(snapkv=options)
        session.prefill(tokens_of(150))
        results.append([session.step(token) for token in tokens_of(5, seed=1)])
        assert session.stats.evictions == 1
    assert np.isfinite(results).all()
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=LOGITS_RELATIVE * np.std(results[0]))


def test_steps_after_an_eviction_read_what_was_kept(folders, cache_dtype):
    """A budget that holds everything changes nothing; a smaller one does."""
    logits = {}
    for budget in (None, 200, 40):
        options = None if budget is None else Eviction(policy="snapkv", budget=budget, window=8, sink=2)
        session = load(folders, cache_dtype).session(snapkv=options)
        session.prefill(tokens_of(150))
        logits[budget] = session.step(7)
    np.testing.assert_array_equal(logits[200], logits[None])
    assert np.abs(logits[40] - logits[None]).max() > 0


@pytest.mark.parametrize("paged", [False, True])
def test_saved_forked_and_rewound_sessions_continue_alike(folders, cache_dtype, paged, tmp_path):
    model = load(folders, cache_dtype, paged=paged)
    session = model.session()
    session.prefill(tokens_of(150))
    session.save(tmp_path / "session")
    restored, fork = model.restore(tmp_path / "session"), session.fork()
    expected = [session.step(token) for token in (5, 9, 11)]
    for other in (restored, fork):
        np.testing.assert_array_equal([other.step(token) for token in (5, 9, 11)], expected)
    session.rewind(150)
    np.testing.assert_array_equal([session.step(token) for token in (5, 9, 11)], expected)


def test_an_engine_gives_the_tokens_of_a_session(folders, cache_dtype):
    model = load(folders, cache_dtype, paged=True)
    prompts = [tokens_of(count, seed=count) for count in (120, 40, 120)]
    expected = []
    for prompt in prompts:
        expected.append(list(model.session().generate(prompt, max_new_tokens=6)))
    with ortolan.Engine(model, max_sequences=3, chunk_tokens=16) as engine:
        streams = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
        assert [list(stream) for stream in streams] == expected
        again = engine.submit(prompts[0], max_new_tokens=6)
        assert list(again) == expected[0], "a prefix that is used again"


def test_an_engine_runs_twice_the_sequences_in_the_same_bytes(folders, cache_dtype):
    budget = 2 * load(folders, None, paged=True).plan().bytes
    prompts = [tokens_of(480, seed=count) for count in range(6)]
    most = {}
    for kind in (None, cache_dtype):
        model = load(folders, kind, paged=True)
        with ortolan.Engine(model, max_sequences=6, max_cache_bytes=budget, chunk_tokens=64) as engine:
            for stream in [engine.submit(prompt, max_new_tokens=16) for prompt in prompts]:
                list(stream)
            most[kind] = engine.stats().most_running
    assert 1 <= most[None] <= 3
    assert most[cache_dtype] >= 2 * most[None]


@pytest.mark.parametrize("paged", [False, True])
def test_caches_that_change_when_a_model_is_loaded_are_those_of_an_export(folders, cache_dtype, paged):
    """Logits agree to the bit: from elements to codes, from codes to elements, and from codes to other codes."""
    tokens, options = tokens_of(150), ortolan.SnapKv(budget=40, window=8)
    other = next(kind for kind in CACHE_TYPES if kind != cache_dtype)
    for begun, wanted in ((None, cache_dtype), (cache_dtype, None), (other, cache_dtype)):
        exported = load(folders, wanted, paged=paged)
        asked = wanted or "float32"
        model = ortolan.load(folders[begun, paged], device="cpu", num_threads=1, cache_dtype=asked)
        assert model.manifest.cache_dtype == exported.manifest.cache_dtype
        assert model.plan().bytes == exported.plan().bytes
        results = []
        for each in (exported, model):
            session = each.session(snapkv=options)
            results.append([session.prefill(tokens), session.step(5), session.step(7)])
            assert session.stats.evictions == 1
        np.testing.assert_array_equal(results[0], results[1])


def test_a_type_of_caches_that_a_load_does_not_know_is_refused(folders):
    with pytest.raises(ConfigError, match=r"cache_dtype is 'int4'; allowed: .*'fp8' or 'int8'"):
        ortolan.load(folders[None, False], device="cpu", cache_dtype="int4")
    with pytest.raises(ConfigError, match=r"caches of float32, not int8; open it with ortolan.load"):
        ortolan.runtime.load(folders[None, False], device="cpu", cache_dtype="int8")


def test_options_name_what_is_allowed(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"cache_dtype is 'int4'; allowed: .*'fp8' or 'int8'"):
        ortolan.export(checkpoint, tmp_path / "model", cache_dtype="int4")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("damage", ["other scales", "no scales"])
def test_a_graph_whose_attention_reads_other_scales_is_refused(folders, cache_dtype, damage):
    model = onnx.load(folders[cache_dtype, False] / "model.onnx", load_external_data=False)
    verify_model(model)
    node = next(node for node in model.graph.node if node.op_type == "SwaAttention")
    if damage == "no scales":
        del node.input[8:]
    else:
        node.input[8], node.input[9] = node.input[9], node.input[8]
    with pytest.raises(ContractMismatchError, match=r"rule 10: .* reads the scales"):
        verify_model(model)


def test_a_graph_whose_joint_attention_returns_no_scales_is_refused(folders, cache_dtype):
    model = onnx.load(folders[cache_dtype, False] / "model.fused.onnx", load_external_data=False)
    verify_model(model)
    node = next(node for node in model.graph.node if node.op_type == "QkvAttention")
    del node.input[12:]
    with pytest.raises(ContractMismatchError, match=r"rule 10: .* takes the scales \['', ''\] and returns"):
        verify_model(model)
