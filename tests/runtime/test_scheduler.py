"""The scheduler's promises, over random arrivals, cancels, evictions and ends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import ADAKV, SNAPKV, Driver, actions, make_plan, make_sequence, play

from ortolan import Eviction
from ortolan.errors import CapacityError
from ortolan.runtime.engine.scheduler import Scheduler


@settings(max_examples=150, deadline=None)
@given(
    actions,
    st.sampled_from([0, 9]),
    st.sampled_from([10, 12, 16, 21, 40]),  # the longest sequence takes 16 where it does not evict
    st.sampled_from([3, 10, 100]),
    st.sampled_from([(64,), (20, 45, 64)]),
)
def test_whoever_is_admitted_finishes_and_nothing_leaks(actions, rings, pages, chunk_tokens, rope_limits):
    driver = play(actions, make_plan(pages, rings=rings, chunk_tokens=chunk_tokens, rope_limits=rope_limits), 1.0)
    assert driver.scheduler.preemptions == 0


@settings(max_examples=150, deadline=None)
@given(actions, st.sampled_from([0, 9]), st.sampled_from([10, 12, 16, 21]), st.sampled_from([(64,), (20, 45, 64)]))
def test_overcommitted_sequences_give_way_and_still_finish(actions, rings, pages, rope_limits):
    play(actions, make_plan(pages, rings=rings, rope_limits=rope_limits), 4.0)


@settings(max_examples=30, deadline=None)
@given(actions)
def test_equal_calls_give_equal_steps(actions):
    first, second = (play(actions, make_plan(18), 3.0) for _ in range(2))
    assert first.log == second.log
    assert first.finished == second.finished


def test_a_long_prompt_delays_no_decode():
    driver = Driver(make_plan(40, chunk_tokens=10))
    short, long = make_sequence(0, 3, new=30), make_sequence(1, 40, new=2)
    driver.scheduler.add(short)
    driver.step()
    driver.scheduler.add(long)
    generated = len(short.tokens)
    for _ in range(5):
        driver.step()
        assert len(short.tokens) == (generated := generated + 1)
    assert driver.log[1:] == [[(0, 3 + i, 4 + i), (1, 9 * i, min(9 * i + 9, 40))] for i in range(5)]


def test_a_chunk_is_shared_by_several_prompts():
    driver = Driver(make_plan(40, chunk_tokens=10))
    for number in range(4):
        driver.scheduler.add(make_sequence(number, 4))
    driver.step()
    assert driver.log == [[(0, 0, 4), (1, 0, 4), (2, 0, 2)]]


def test_nobody_overtakes_the_first_that_waits():
    driver = Driver(make_plan(16))
    for number, prompt in enumerate((40, 40, 2)):
        driver.scheduler.add(make_sequence(number, prompt, new=4))
    driver.step()
    assert [s.number for s in driver.scheduler.waiting] == [1, 2]
    driver.drain()
    assert driver.finished == [0, 1, 2] or driver.finished == [0, 2, 1]


def test_the_youngest_gives_way():
    driver = Driver(make_plan(16, max_sequences=3, chunk_tokens=64), overcommit=10.0)
    for number in range(3):
        driver.scheduler.add(make_sequence(number, 16, new=40))
    driver.step()
    assert len(driver.scheduler.admitted) == 3
    while not driver.scheduler.preemptions:
        driver.step()
    assert [s.number for s in driver.scheduler.admitted] == [0, 1]
    driver.drain()
    assert driver.finished == [0, 1, 2]


def test_a_request_larger_than_the_pool_is_refused():
    scheduler = Scheduler(make_plan(5))
    with pytest.raises(CapacityError, match="'full'"):
        scheduler.add(make_sequence(0, 10, new=12))
    scheduler.add(make_sequence(0, 10, new=11))
    scheduler.add(make_sequence(1, 20, new=11, eviction=SNAPKV))
    assert len(scheduler.waiting) == 2
    with pytest.raises(CapacityError, match="'full'"):
        scheduler.add(make_sequence(2, 20, new=2, eviction=ADAKV))


def test_a_long_prompt_is_promised_its_pages_before_the_eviction():
    driver = Driver(make_plan(18))
    for number in range(2):
        driver.scheduler.add(make_sequence(number, 40, new=20, eviction=SNAPKV))
    driver.step()
    assert [s.number for s in driver.scheduler.waiting] == [1]
    driver.drain()
    assert driver.scheduler.preemptions == 0


def test_an_eviction_frees_pages():
    driver = Driver(make_plan(24, chunk_tokens=64))
    sequence = make_sequence(0, 40, new=6, eviction=SNAPKV)
    driver.scheduler.add(sequence)
    driver.step()
    assert len(sequence.pages["full"]) == 2
    assert driver.scheduler.pools["full"].free == 22
    assert driver.scheduler.held_bytes == 200
    driver.step()
    assert len(sequence.pages["full"]) == 3


@pytest.mark.parametrize(("overcommit", "rope_limits"), [(1.0, (45, 64)), (2.0, (64,))])
def test_an_evicted_sequence_longer_than_the_pool_is_read_again(overcommit, rope_limits):
    """It fits in the pool only because it evicts, also when it comes back; the other one takes pages meanwhile."""
    driver = Driver(make_plan(11, chunk_tokens=64, rope_limits=rope_limits), overcommit)
    driver.scheduler.add(make_sequence(0, 4, new=28))
    evicted = make_sequence(1, 40, new=22, eviction=SNAPKV)
    driver.scheduler.add(evicted)
    driver.drain()
    assert sorted(driver.finished) == [0, 1]
    starts = [begin for step in driver.log for number, begin, _ in step if number == 1].count(0)
    assert starts == 2
    assert driver.scheduler.preemptions == (overcommit > 1)


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
def test_known_tokens_take_no_more_pages_than_all_that_are_to_come(policy):
    kind = make_plan(40).kinds[0]
    sequence = make_sequence(0, 40, new=22, eviction=Eviction(policy=policy, budget=8, window=4, sink=1))
    known = []
    while len(sequence.tokens) <= sequence.max_length:
        known.append(sequence.known_pages(kind))
        sequence.tokens.append(0)
    assert known == sorted(known)
    assert known[0] == 10
    assert sequence.known_pages(kind) == known[-1] == sequence.most_pages(kind) == (16 if policy == "adakv" else 10)


def test_more_decodes_than_a_chunk_has_tokens_get_one_each():
    driver = Driver(make_plan(40, max_sequences=4, chunk_tokens=2))
    for number in range(3):
        driver.scheduler.add(make_sequence(number, 1, new=30))
    while len(driver.step()) < 3:
        pass
    driver.scheduler.add(make_sequence(3, 9, new=2))
    driver.step()
    assert [(number, end - begin) for number, begin, end in driver.log[-1]] == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_promise_beyond_all_numbers_is_one_without_end():
    driver = Driver(make_plan(16), overcommit=1e308)
    for number in range(4):
        driver.scheduler.add(make_sequence(number, 20, new=40))
    driver.drain()
    assert driver.scheduler.preemptions > 0


def test_shared_prefixes_are_read_once():
    driver = Driver(make_plan(40, chunk_tokens=64))
    prompt = list(range(17))
    driver.scheduler.add(make_sequence(0, prompt))
    driver.step()
    driver.scheduler.add(make_sequence(1, [*prompt, 99]))
    driver.scheduler.add(make_sequence(2, prompt[:16]))
    driver.scheduler.add(make_sequence(3, [50, *prompt[1:]]))
    chunks = driver.step()
    assert [(c.sequence.number, c.begin) for c in chunks] == [(0, 17), (1, 16), (2, 12), (3, 0)]
    assert driver.scheduler.reused_tokens == 28
    driver.drain()
    assert driver.scheduler.pools["full"].kept > 0


def test_prefixes_are_private_where_pages_are_compacted():
    driver = Driver(make_plan(40, chunk_tokens=64))
    for number in range(2):
        driver.scheduler.add(make_sequence(number, range(30), eviction=SNAPKV))
        driver.drain()
    assert driver.scheduler.reused_tokens == 0
    assert driver.scheduler.pools["full"].kept == 0


def run_all(driver, prompts, begin=0):
    """Run prompts one after another; returns where each was first read from."""
    for number, prompt in enumerate(prompts, begin):
        driver.scheduler.add(make_sequence(number, prompt))
        driver.drain()
    return [next(b for step in driver.log for n, b, _ in step if n == number) for number in range(begin, number + 1)]


def test_a_snapshot_lies_at_the_end_of_a_prompt():
    """A ring of four pages takes as much as two pages of the others (spacing: 8 tokens)."""
    driver = Driver(make_plan(40, rings=12, chunk_tokens=64))
    assert driver.plan.snapshot_spacing == 8
    turn = list(range(30))
    assert run_all(driver, [turn, turn, [*turn, 77, 78], turn[:29], turn[:28], turn[:9]]) == [0, 28, 28, 28, 0, 0]
    assert driver.scheduler.prefixes.snapshots == 3  # at 28, of the first prompt; at 24 and 8, of the last two


def test_prompts_that_part_leave_a_snapshot_where_they_do():
    """The first prompt leaves pages, the second a snapshot where it leaves them, and all later ones begin there."""
    driver = Driver(make_plan(60, rings=20, chunk_tokens=64))
    system = list(range(22))
    tails = [[100 * tail + i for i in range(11)] for tail in range(1, 6)]
    assert run_all(driver, [[*system, *tail] for tail in tails]) == [0, 0, 20, 20, 20]


def test_chunks_leave_snapshots_while_pages_are_free():
    driver = Driver(make_plan(60, rings=20, chunk_tokens=10))
    prompt = list(range(50))
    run_all(driver, [prompt])
    assert [end for step in driver.log for _, _, end in step][:6] == [8, 16, 24, 32, 42, 48]
    assert driver.scheduler.prefixes.snapshots == 5  # the last took the place of the first
    assert run_all(driver, [[*prompt[:20], 99], [*prompt[:30], 99, 98]], 1) == [16, 24]


def test_snapshots_take_no_page_that_is_promised():
    """Two sequences may need all pages of both rings, so nothing is left to copy to; once one ends, there is."""
    driver = Driver(make_plan(60, rings=8, chunk_tokens=64, max_sequences=2))
    for number in range(2):
        driver.scheduler.add(make_sequence(number, 30))
    driver.drain()
    assert driver.scheduler.prefixes.snapshots == driver.scheduler.preemptions == 0
    run_all(driver, [list(range(30))], 2)
    assert driver.scheduler.prefixes.snapshots == 1
    assert driver.scheduler.pools["window_6"].kept == 4


def test_a_snapshot_without_room_for_its_copy_is_left_alone():
    driver = Driver(make_plan(60, rings=8, chunk_tokens=64, max_sequences=2))
    turn = list(range(30))
    run_all(driver, [turn])
    driver.scheduler.add(make_sequence(1, 20, new=30))
    driver.step()
    driver.scheduler.add(make_sequence(2, turn))
    driver.drain()
    assert next(b for step in driver.log for n, b, _ in step if n == 2) == 0
    assert driver.scheduler.preemptions == 0


def test_pages_are_offered_once_they_are_known_to_be_sound():
    driver = Driver(make_plan(40, chunk_tokens=64))
    sequence = make_sequence(0, range(9), new=9)
    scheduler = driver.scheduler
    scheduler.add(sequence)
    scheduler.advance(scheduler.next_step())
    assert (sequence.fed, sequence.offered_pages) == (9, 0)
    scheduler.prefixes.offer(sequence, 7)
    assert sequence.offered_pages == 1
    scheduler.prefixes.offer(sequence, 9)
    assert sequence.offered_pages == 2
    scheduler.prefixes.forget(sequence)
    scheduler.remove(sequence)
    assert scheduler.pools["full"].kept == 0


def test_rope_variants_share_no_prefix_and_are_read_anew():
    driver = Driver(make_plan(40, chunk_tokens=64, rope_limits=(20, 64)))
    driver.scheduler.add(make_sequence(0, range(18), new=10))
    driver.scheduler.add(make_sequence(1, range(30), new=2))
    driver.drain()
    assert driver.scheduler.reused_tokens in (0, 16, 20)
    assert sum(begin == 0 for step in driver.log for number, begin, _ in step if number == 0) >= 1
    assert np.any([(0, 0, 21) in step or (0, 20, 21) in step for step in driver.log])
