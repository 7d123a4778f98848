"""Sessions: turns, rewinds, evictions and failures leave the sequence as they say they do."""

import numpy as np
import pytest
from families import tiny_checkpoint
from parity import relative_difference
from tolerances import LOGITS_RELATIVE, SAME_LOGITS

import ortolan
from ortolan import SnapKv
from ortolan.errors import CapacityError, ConfigError, ContractMismatchError, NumericError, OpLibraryError
from ortolan.manifest import MANIFEST_FILE, read_manifest

CONTEXT = 400
EVICTING = SnapKv(budget=48, window=16, sink=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Gemma-3-shaped model: rings of window 20, and one full-attention layer."""
    root = tmp_path_factory.mktemp("session")
    checkpoint = tiny_checkpoint("gemma3", root / "hf", seed=1)
    return ortolan.load(
        ortolan.export(checkpoint, root / "model", max_context=CONTEXT, chunk_size=16), device="cpu"
    )


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


FULL = 1  # the full-attention layer


def test_turns_equal_one_prompt(model):
    prompt = tokens(150)
    whole, turns = model.session(), model.session()
    want = whole.prefill(prompt)
    for begin, end in ((0, 33), (33, 34), (34, 120), (120, 150)):
        got = turns.prefill(prompt[begin:end])
    assert relative_difference(got, want) <= LOGITS_RELATIVE
    assert turns.logical_length == whole.logical_length == 150


def test_steps_equal_prefill(model):
    prompt = tokens(60)
    session = model.session()
    session.prefill(prompt[:30])
    for token in prompt[30:]:
        got = session.step(token)
    assert relative_difference(got, model.session().prefill(prompt)) <= LOGITS_RELATIVE


def test_returned_logits_are_not_overwritten(model):
    session = model.session()
    first = session.prefill(tokens(5))
    kept = first.copy()
    session.step(7)
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("length", [0, 100, 120, 129])
def test_rewinding_equals_never_having_gone(model, length):
    prompt, other = tokens(130), tokens(40, seed=1)
    session = model.session()
    session.prefill(prompt)
    session.rewind(length)
    assert session.logical_length == length
    got = session.prefill(other)
    want = model.session().prefill(prompt[:length] + other)
    assert relative_difference(got, want) <= LOGITS_RELATIVE


def test_rewinding_into_an_overwritten_ring_is_refused(model):
    session = model.session()
    session.prefill(tokens(130))
    before = session.logical_length
    with pytest.raises(CapacityError, match="overwritten"):
        session.rewind(40)
    assert session.logical_length == before
    session.rewind(110)
    with pytest.raises(CapacityError, match="overwritten"):
        session.rewind(80)
    for length in (-1, 111):
        with pytest.raises(ConfigError, match="rewind"):
            session.rewind(length)


@pytest.mark.parametrize("granularity", ["kv_head", "layer", "model"])
def test_eviction_keeps_the_budget_and_leaves_prefill_alone(model, granularity):
    prompt = tokens(200)
    plain = model.session()
    options = SnapKv(budget=48, window=16, sink=4, granularity=granularity)
    session = model.session(snapkv=options)
    full_bytes = session.cache_bytes
    np.testing.assert_array_equal(session.prefill(prompt), plain.prefill(prompt))
    assert session.physical_length(FULL) == 48
    assert session.logical_length == 200
    assert session.cache_bytes < full_bytes
    kept = session.kept_positions(FULL)
    assert kept.shape == (1, 48)
    assert (np.diff(kept) > 0).all()
    assert {*range(4), *range(184, 200)} <= set(kept[0].tolist())
    assert session.kept_positions(0) is None
    assert plain.kept_positions(FULL) is None


def test_decode_after_eviction_equals_a_cache_of_the_kept_rows(model):
    """Compact a full session's cache by hand, at the kept positions, and decode both."""
    prompt, following = tokens(200), tokens(10, seed=2)
    session, plain = model.session(snapkv=EVICTING), model.session(snapkv=SnapKv(budget=CONTEXT, window=16))
    session.prefill(prompt)
    plain.prefill(prompt)
    kept = session.kept_positions(FULL)
    cache = plain._caches.layers[FULL]
    for buffer in (cache.key, cache.value):
        buffer[0, :, : kept.shape[1]] = np.take_along_axis(buffer[0], kept[:, :, None], axis=1)
        buffer[0, :, kept.shape[1] :] = np.nan
    plain._lengths.record_eviction({FULL: kept})
    for token in following:
        assert relative_difference(session.step(token), plain.step(token)) <= SAME_LOGITS
    assert session.physical_length(FULL) == 48 + len(following)


def test_an_eviction_that_is_not_due_changes_nothing(model):
    prompt = tokens(40)
    session, plain = model.session(snapkv=EVICTING), model.session()
    np.testing.assert_array_equal(session.prefill(prompt), plain.prefill(prompt))
    assert session.kept_positions(FULL) is None
    assert session.cache_bytes == plain.cache_bytes
    np.testing.assert_array_equal(session.step(5), plain.step(5))


def test_later_turns_evict_again_and_positions_stay_logical(model):
    session = model.session(snapkv=EVICTING)
    session.prefill(tokens(200))
    first = set(session.kept_positions(FULL)[0].tolist())
    for token in tokens(5, seed=3):
        session.step(token)
    session.prefill(tokens(50, seed=4))
    second = session.kept_positions(FULL)[0].tolist()
    assert session.physical_length(FULL) == 48
    assert session.logical_length == 255
    assert set(second) <= first | set(range(200, 255))
    assert set(range(239, 255)) <= set(second)
    assert session.stats.evictions == 2


def test_second_eviction_scores_the_newest_queries(model):
    """Queries captured by logical position must meet keys by physical position."""
    session = model.session(snapkv=EVICTING)
    session.prefill(tokens(201))
    turn = tokens(33, seed=5)
    session._evict_if_due = lambda: None
    session.prefill(turn)
    physical, logical = int(session._lengths.physical[FULL][0]), session.logical_length
    capture = session._caches.captures[FULL][0]
    rows = np.stack([capture[p % 16] for p in range(logical - 16, logical)])  # oldest first
    keys = session._caches.layers[FULL].key[0, :, :physical]
    scale = read_manifest(model.folder).attention_scale
    logits = scale * np.einsum("qhd,kd->hqk", rows.astype(np.float64), keys[0].astype(np.float64))
    hidden = np.arange(physical)[None] > np.arange(physical - 16, physical)[:, None]
    logits[:, hidden] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    score = (weights / weights.sum(-1, keepdims=True)).mean(axis=(0, 1))
    score[physical - 16 :] = 0
    pooled = np.convolve(score, np.ones(5) / 5, mode="same")
    forced = set(range(4)) | set(range(physical - 16, physical))
    best = sorted((j for j in range(physical) if j not in forced), key=lambda j: (-pooled[j], j))[
        : 48 - len(forced)
    ]
    positions = session._lengths._logical_of(FULL)[0]
    del session._evict_if_due
    session._evict_if_due()
    assert session.kept_positions(FULL)[0].tolist() == positions[sorted(forced | set(best))].tolist()


def test_rewind_after_an_eviction(model):
    session = model.session(snapkv=EVICTING)
    session.prefill(tokens(200))
    after = session.step(9)
    session.step(10)
    session.rewind(201)
    assert session.physical_length(FULL) == 49
    session.rewind(200)
    np.testing.assert_array_equal(session.step(9), after)
    with pytest.raises(CapacityError, match="evicted"):
        session.rewind(199)
    session.rewind(0)
    assert (
        relative_difference(session.prefill(tokens(30)), model.session().prefill(tokens(30)))
        <= LOGITS_RELATIVE
    )


def test_stale_captures_are_read_again(model):
    prompt, other = tokens(120), tokens(3, seed=6)
    went = model.session(snapkv=SnapKv(budget=90, window=16))
    went.prefill(prompt[:85])
    went.step(5)
    for token in tokens(4, seed=7):
        went.step(token)
    went.rewind(85)
    went.prefill(prompt[85:88] + other)
    never = model.session(snapkv=SnapKv(budget=90, window=16))
    never.prefill(prompt[:85])
    never.prefill(prompt[85:88] + other)
    np.testing.assert_array_equal(went.kept_positions(FULL), never.kept_positions(FULL))


def test_bad_input_reads_nothing(model):
    session = model.session(max_context=50)
    session.prefill(tokens(10))
    for bad in ([], [131], [-1], [[1, 2]], [1.5], ["a"]):
        with pytest.raises(ConfigError, match="token"):
            session.prefill(bad)
    with pytest.raises(CapacityError, match="max_context = 50"):
        session.prefill(tokens(41))
    assert session.logical_length == 10
    session.prefill(tokens(40))
    with pytest.raises(CapacityError, match="past max_context"):
        session.step(5)


@pytest.mark.parametrize("layer", [-1, 4])
def test_layers_are_checked(model, layer):
    with pytest.raises(ConfigError, match="layer"):
        model.session().physical_length(layer)


def test_generate_continues_and_stops(model):
    prompt = tokens(20)
    session = model.session()
    produced = list(session.generate(prompt, max_new_tokens=8))
    assert len(produced) == 8
    assert session.finish_reason == "length"
    assert session.logical_length == 27, "the last token is fed with what comes next"
    expected = model.session()
    expected.prefill(prompt)
    for token in produced:
        logits = expected.step(token)
    again = model.session()
    again.prefill(prompt + produced[:-1])
    assert relative_difference(again.step(produced[-1]), logits) <= LOGITS_RELATIVE


@pytest.mark.parametrize("taken", [1, 3, 8])
def test_a_generation_that_was_broken_off_keeps_what_it_yielded(model, taken):
    prompt, turn = tokens(20), tokens(9, seed=1)
    session = model.session()
    produced = []
    for token in session.generate(prompt, max_new_tokens=8):
        produced.append(token)
        if len(produced) == taken:
            break
    got = session.prefill(turn)
    assert relative_difference(got, model.session().prefill(prompt + produced + turn)) <= LOGITS_RELATIVE


def test_generation_ends_at_the_context_and_at_the_end_token(model):
    session = model.session(max_context=25)
    assert len(list(session.generate(tokens(20), max_new_tokens=50))) == 6
    assert session.finish_reason == "context"
    eos = next(iter(model.session().generate(tokens(20), max_new_tokens=1)))
    session = model.session()
    object.__setattr__(session, "_manifest", _with_eos(session._manifest, eos))
    assert list(session.generate(tokens(20))) == []
    assert session.finish_reason == "eos"
    with pytest.raises(ConfigError, match="max_new_tokens"):
        session.generate(tokens(2), max_new_tokens=0)


def _with_eos(manifest, token):
    import dataclasses

    return dataclasses.replace(manifest, eos_token_ids=(token,))


def test_nan_logits_are_an_error_and_rewind_recovers(model):
    session = model.session()
    want = session.prefill(tokens(30))
    session.rewind(0)
    session.prefill(tokens(29))
    cache = session._caches.layers[FULL].value
    saved = cache.copy()
    cache[:, :, 3] = np.nan
    with pytest.raises(NumericError, match="NaN"):
        session.step(tokens(30)[-1])
    assert session.logical_length == 29
    cache[:] = saved
    assert relative_difference(session.step(tokens(30)[-1]), want) <= LOGITS_RELATIVE


def test_options_and_devices_are_refused(model, tmp_path_factory):
    with pytest.raises(ConfigError, match="budget 20"):
        SnapKv(budget=20, window=16, sink=8)
    for name, value in (
        ("kernel", 4),
        ("pool", "sum"),
        ("granularity", "x"),
        ("window", 0),
        ("group_reduce", "x"),
    ):
        with pytest.raises(ConfigError, match=name):
            SnapKv(**{name: value})
    with pytest.raises(ConfigError, match="tpu"):
        ortolan.load(model.folder, device="tpu")
    with pytest.raises(OpLibraryError, match="CUDA"):
        ortolan.load(model.folder, device="cuda")
    with pytest.raises(ContractMismatchError, match="not an exported model"):
        ortolan.load(tmp_path_factory.mktemp("empty"))


def test_sessions_without_anything_to_evict(tmp_path):
    checkpoint = tiny_checkpoint("mistral", tmp_path / "hf")
    mistral = ortolan.load(ortolan.export(checkpoint, tmp_path / "model", max_context=64), device="cpu")
    with pytest.raises(ConfigError, match="no layer of this model can evict"):
        mistral.session(snapkv=SnapKv())


@pytest.mark.parametrize("damage", ["version", "key", "json", "size", "missing", "operators"])
def test_damaged_folders_are_refused(model, tmp_path, damage):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest = (folder / MANIFEST_FILE).read_text()
    if damage == "version":
        manifest = manifest.replace('"format_version": 1', '"format_version": 99')
    elif damage == "key":
        manifest = manifest.replace('"dtype"', '"dtipe"')
    elif damage == "json":
        manifest = manifest[:-5]
    elif damage == "operators":
        manifest = manifest.replace('"operator_version": 1', '"operator_version": 7')
    elif damage == "size":
        with (folder / "model.onnx.data").open("ab") as stream:
            stream.write(b"x")
    else:
        (folder / "evict.onnx").unlink()
    (folder / MANIFEST_FILE).write_text(manifest)
    with pytest.raises(ContractMismatchError, match=r"ortolan.json|export the model again"):
        ortolan.load(folder)


def test_longrope_reads_anew_when_the_short_factors_end(tmp_path):
    """Past the pretrained length transformers rotates the whole sequence by the long factors."""
    from families import FAMILIES
    from parity import oracle_logits

    rope = FAMILIES["phi3"]["rope_parameters"] | {"original_max_position_embeddings": 40}
    checkpoint = tiny_checkpoint("phi3", tmp_path / "hf", rope_parameters=rope)
    phi3 = ortolan.load(
        ortolan.export(checkpoint, tmp_path / "model", max_context=128, chunk_size=16), device="cpu"
    )
    prompt = tokens(60)
    for length in (30, 60):
        want = oracle_logits(checkpoint, prompt[:length])[-1]
        assert relative_difference(phi3.session().prefill(prompt[:length]), want) <= LOGITS_RELATIVE
    session = phi3.session()
    session.prefill(prompt[:38])
    for token in prompt[38:]:
        got = session.step(token)
    assert relative_difference(got, oracle_logits(checkpoint, prompt)[-1]) <= LOGITS_RELATIVE
