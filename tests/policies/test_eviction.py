"""Eviction options: one value for every policy, which refuses what it cannot mean."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from evict_cases import SLOTS, manifest

from ortolan import Eviction, SnapKv
from ortolan.errors import ConfigError
from ortolan.policies import POLICIES
from ortolan.policies.eviction import CacheShape

OTHER_VALUES = {  # than the defaults, of every option that some policy has
    "budget": 300,
    "window": 40,
    "sink": 0,
    "during_prefill": True,
    "kernel": 7,
    "pool": "max",
    "group_reduce": "sum",
    "granularity": "layer",
    "queries": 90,
    "piece": 100,
    "lead": 0,
}
BAD_VALUES = [
    {"budget": 0},
    {"budget": 2048.0},
    {"budget": 67},
    {"window": 0},
    {"window": 2**31, "budget": 2**40},
    {"window": None},
    {"kernel": 4},
    {"kernel": 0},
    {"sink": -1},
    {"pool": "mean"},
    {"pool": np.array(["avg", "max"])},
    {"granularity": "head"},
    {"group_reduce": "avg"},
    {"policy": "expect"},
    {"policy": ["snapkv"]},
    {"policy": 1},
    {"queries": 0, "policy": "expected"},
    {"queries": 9.0, "policy": "expected"},
    {"during_prefill": 1},
    {"during_prefill": True, "policy": "adakv"},
    {"during_prefill": True, "policy": "pyramidkv"},
    {"granularity": "model", "policy": "pyramidkv"},
]
MISSING_OPTIONS = [
    ({"windows": 3}, "did you mean 'window'"),
    ({"policy": "streaming", "kernel": 5}, "policies that have it: snapkv, pyramidkv, adakv"),
    ({"policy": "expected", "pool": "avg"}, "its options: budget, window, sink, during_prefill, queries"),
    ({"policy": "adakv", "granularity": "kv_head"}, "policies that have it: snapkv, streaming, pyramidkv, expected"),
    ({"queries": 9}, "policies that have it: expected"),
    ({"keep": 9}, "eviction policy 'snapkv' does not have option 'keep'"),
    ({"cls": 9}, "eviction policy 'snapkv' does not have option 'cls'"),
    ({"self": 9}, "eviction policy 'snapkv' does not have option 'self'"),
]


def every_option(policy: str) -> Eviction:
    """Give each option of a policy another value than its default."""
    cls = POLICIES[policy]
    options = {name: OTHER_VALUES[name] for name in cls.declared_options()}
    if cls.keeps_uneven:
        options["during_prefill"] = False
    return Eviction(policy=policy, **options)


@pytest.mark.parametrize("options", BAD_VALUES, ids=str)
def test_a_bad_value_is_refused_by_name(options):
    with pytest.raises(ConfigError, match=f"eviction {next(iter(options))} is "):
        Eviction(**options)


@pytest.mark.parametrize(("options", "message"), MISSING_OPTIONS, ids=str)
def test_an_option_that_the_policy_lacks_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Eviction(**options)


def test_an_unknown_policy_is_refused_with_the_list_and_the_nearest():
    with pytest.raises(ConfigError, match=f"is 'snapvk'; allowed: {', '.join(POLICIES)}; did you mean 'snapkv'"):
        Eviction(policy="snapvk", budget=100)


def test_snapkv_is_one_policy_of_them():
    options = {"budget": 100, "window": 32, "kernel": 7, "pool": "max", "sink": 2, "granularity": "model"}
    special, general = SnapKv(**options), Eviction(policy="snapkv", **options)
    assert special == general
    assert hash(special) == hash(general)
    assert isinstance(special, Eviction)
    assert isinstance(general, SnapKv)
    assert special != SnapKv(**{**options, "sink": 3})
    assert Eviction() == SnapKv()
    assert (special.policy, special.budget, special.granularity) == ("snapkv", 100, "model")


@pytest.mark.parametrize(("options", "named"), [({"policy": "adakv"}, "adakv"), ({"policy": []}, "policy")])
def test_snapkv_takes_no_other_policy(options, named):
    with pytest.raises(ConfigError, match=rf"SnapKv does not take .*{named}.*; use ortolan\.Eviction\(policy="):
        SnapKv(**options)
    with pytest.raises(ConfigError, match=r"have it: expected; choose one with ortolan\.Eviction\(policy=\.\.\.\)"):
        SnapKv(queries=9)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_has_its_options_as_attributes(policy):
    eviction = every_option(policy)
    assert type(eviction) is POLICIES[policy]
    for name in eviction.declared_options():
        wanted = name != "during_prefill" or not eviction.keeps_uneven
        assert getattr(eviction, name) == (OTHER_VALUES[name] if wanted else False)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(eviction, name, 5)
    with pytest.raises(TypeError):
        Eviction(policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_survives_json_pickle_and_copies(policy):
    for eviction in (every_option(policy), Eviction(policy=policy)):
        saved = json.loads(json.dumps(eviction.options_dict()))
        assert saved == {"policy": policy, **{name: getattr(eviction, name) for name in eviction.declared_options()}}
        again = [
            Eviction.from_dict(saved),
            pickle.loads(pickle.dumps(eviction)),
            copy.deepcopy(eviction),
            dataclasses.replace(eviction),
        ]
        assert {eviction, *again} == {eviction}
        assert {type(each) for each in again} == {type(eviction)}
        assert dataclasses.replace(eviction, budget=999).budget == 999


@pytest.mark.parametrize("policy", POLICIES)
def test_incomplete_or_unknown_saved_options_are_refused(policy):
    saved = Eviction(policy=policy).options_dict()
    for name in saved:
        if (policy, name) != ("snapkv", "policy"):
            with pytest.raises(ConfigError):
                Eviction.from_dict({key: value for key, value in saved.items() if key != name})
    with pytest.raises(ConfigError, match="missing: policy"):
        Eviction.from_dict({key: value for key, value in SnapKv().options_dict().items() if key != "policy"})
    with pytest.raises(ConfigError, match="does not have option 'depth'"):
        Eviction.from_dict({**saved, "depth": 3})


def test_numbers_of_numpy_become_plain_ones():
    eviction = SnapKv(budget=np.int64(300), window=np.uint8(8), kernel=np.int32(7))
    assert eviction == SnapKv(budget=300, window=8, kernel=7)
    assert {type(eviction.budget), type(eviction.window), type(eviction.kernel)} == {int}


def test_the_smallest_budget_holds_window_and_sink():
    assert SnapKv(budget=68, window=64, sink=4).budget == 68
    with pytest.raises(ConfigError, match="at least 68, because window 64 and sink 4 are always kept"):
        SnapKv(budget=67, window=64, sink=4)


@pytest.mark.parametrize(
    ("policy", "shaping"),
    [
        ("snapkv", {"kernel": 7, "pool": "max", "group_reduce": "sum", "granularity": "layer"}),
        ("streaming", {"granularity": "layer"}),
        ("pyramidkv", {"kernel": 7, "pool": "max", "group_reduce": "sum", "granularity": "layer"}),
        ("adakv", {"kernel": 7, "pool": "max", "group_reduce": "sum"}),
        ("expected", {"granularity": "layer", "group_reduce": "sum"}),
    ],
)
def test_only_some_options_shape_the_graph(policy, shaping):
    assert every_option(policy).structure == {"policy": policy, **shaping}


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 64),
        ({"policy": "streaming", "window": 32}, 32),
        ({"policy": "expected"}, 256),
        ({"policy": "expected", "window": 300}, 300),
        ({"policy": "expected", "queries": 40}, 40),
    ],
)
def test_a_policy_says_how_many_queries_it_needs(options, rows):
    assert Eviction(**options).captured_queries == rows


def test_policies_say_what_they_need():
    assert [name for name, policy in POLICIES.items() if policy.keeps_uneven] == ["pyramidkv", "adakv", "kvzip"]
    assert [name for name, policy in POLICIES.items() if policy.needs_rope] == ["expected"]
    assert [name for name in POLICIES if Eviction(policy=name).second_reading is not None] == ["kvzip"]
    shared = {policy: Eviction(policy=policy).shares_lists for policy in POLICIES}
    assert not any(shared.values())
    assert all(SnapKv(granularity=each).shares_lists for each in ("layer", "model"))


def test_the_workspace_grows_with_the_cache():
    shape = CacheShape(slots=512, num_heads=4, num_kv_heads=2, head_size=8)
    scores = SnapKv().workspace_bytes(shape)
    assert scores == 32 * 512 * 2 * 4  # [Hkv, C] float32
    assert Eviction(policy="expected").workspace_bytes(shape) - scores == 2 * 4 * 512 * 8 * 4  # two [Hq, C, D]


def test_a_model_is_checked_for_what_the_policy_needs():
    bare = dataclasses.replace(manifest(), ropes=None)
    for policy in POLICIES:
        Eviction(policy=policy).check(manifest())
        with pytest.raises(ConfigError, match=r"no layer of this model can evict.*snapkv_window=0"):
            Eviction(policy=policy).check(manifest(evictable=False))
        if policy != "expected":
            Eviction(policy=policy).check(bare)
    with pytest.raises(ConfigError, match=r"'expected' needs RoPE frequencies.*choose another policy"):
        Eviction(policy="expected").check(bare)
    widest = 2 * SLOTS + 1
    SnapKv(kernel=widest).check(manifest())
    with pytest.raises(ConfigError, match=f"kernel is {widest + 2}; it must be at most {widest}"):
        SnapKv(kernel=widest + 2).check(manifest())
