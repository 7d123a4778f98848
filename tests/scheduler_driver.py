"""Runs the scheduler without a model: what an engine does with its steps, checked, and random lists of it."""

import collections
import contextlib

import numpy as np
from hypothesis import strategies as st

from ortolan import Eviction, SnapKv
from ortolan.errors import CapacityError
from ortolan.runtime.caches.plan import CachePlan, KindPlan, rope_variant
from ortolan.runtime.engine.scheduler import Scheduler
from ortolan.runtime.engine.sequence import TokenSequence

PAGE = 4
SNAPKV = SnapKv(budget=8, window=4, sink=1)
ADAKV = Eviction(policy="adakv", budget=8, window=4, sink=1)


def make_plan(pages=24, *, rings=0, max_sequences=4, chunk_tokens=10, rope_limits=(64,)):
    kinds = [KindPlan(name="full", window=-1, page_size=PAGE, table_pages=16, num_pages=pages, page_bytes=100)]
    if rings:
        ring = {"window": 6, "table_pages": 4, "grows": False}
        kinds.append(KindPlan(name="window_6", page_size=PAGE, num_pages=rings, page_bytes=30, **ring))
    return CachePlan(
        max_sequences=max_sequences,
        max_context=64,
        chunk_size=chunk_tokens,
        layers=(),
        page_size=PAGE,
        kinds=tuple(kinds),
        rope_limits=rope_limits,
    )


def make_sequence(number, prompt, new=4, eviction=None):
    tokens = list(prompt) if not isinstance(prompt, int) else [1000 * number + i for i in range(prompt)]
    return TokenSequence(
        number=number, tokens=tokens, prompt_length=len(tokens), max_length=len(tokens) + new - 1, eviction=eviction
    )


def store(sequence, plan, count, held=None):
    """Let a file hold a sequence's first tokens; `held` are what an eviction left of them in full attention."""
    lengths = sequence.lengths
    lengths.logical = lengths.highest = count
    sequence.is_stored, sequence.variant = True, rope_variant(plan.rope_limits, count)
    if held is not None:
        lengths.evicted_at, lengths.counts = count, {0: np.array([held], np.int32)}
        sequence.is_unrepeatable = True
    return sequence


class Driver:
    """Runs a scheduler's steps as an engine does, without a model, and checks each."""

    def __init__(self, plan, overcommit=1.0):
        self.scheduler = Scheduler(plan, overcommit)
        self.plan = plan
        self.finished = []
        self.log = []
        self.rings = {}  # the same of rings: (kind, page, row) -> token
        self.contents = {}  # what each slot of the full pool holds: (page, row) -> token

    def step(self):
        plan, scheduler = self.plan, self.scheduler
        ready = [s for s in scheduler.admitted if s.needs_one]
        before, unrepeatable = scheduler.preemptions, {s for s in scheduler.admitted if s.is_unrepeatable}
        chunks = scheduler.next_step()
        assert set(scheduler.admitted) >= unrepeatable, "what cannot be read again gave its pages back"
        self.log.append([(c.sequence.number, c.begin, c.end) for c in chunks])
        counts = collections.Counter(c.end - c.begin for c in chunks)
        assert sum(size * n for size, n in counts.items()) <= max(plan.chunk_size, len(ready) + 1)
        if scheduler.preemptions == before and len(plan.rope_limits) == 1:
            assert {s.number for s in ready} <= {c.sequence.number for c in chunks}
        for chunk in chunks:
            self.check_chunk(chunk)
        scheduler.advance(chunks)
        for chunk in chunks:
            scheduler.prefixes.finish_resume(chunk.sequence)
            if (snapshot := chunk.sequence.snapshot) is not None:
                assert snapshot.length == chunk.end
                self.copy(chunk.sequence.pages, snapshot.pages)
            scheduler.prefixes.offer(chunk.sequence, chunk.end)
            self.finish_chunk(chunk)
        self.check_pages()
        return chunks

    def check_chunk(self, chunk):
        sequence = chunk.sequence
        assert chunk.begin == sequence.fed < chunk.end <= min(len(sequence.tokens), sequence.max_length)
        for kind in self.plan.kinds:
            pages = sequence.pages[kind.name]
            assert len(pages) >= kind.pages_for(sequence.slots_at(kind, chunk.end))
            assert len(set(pages)) == len(pages)
        if sequence.is_stored:
            self.load(sequence)
        self.copy(sequence.resumes, sequence.pages)
        self.check_rings(chunk)
        if sequence.evicted_at:
            return
        for position in range(chunk.begin, chunk.end):
            page = sequence.pages["full"][position // PAGE]
            assert self.scheduler.pools["full"].holders(page) == 1, "a shared page is written"
            self.contents[page, position % PAGE] = (sequence.tokens[position], sequence.variant)
        for position in range(chunk.end):  # all that it attends to is its own
            page = sequence.pages["full"][position // PAGE]
            assert self.contents[page, position % PAGE] == (sequence.tokens[position], sequence.variant)

    def check_rings(self, chunk):
        """Write and read the rings of a chunk, slot by slot."""
        sequence = chunk.sequence
        for kind in [kind for kind in self.plan.kinds if not kind.grows]:
            for position in range(chunk.begin, chunk.end):
                self.rings[self.ring_slot(kind, sequence, position)] = sequence.tokens[position]
            for position in range(max(0, chunk.end - kind.window), chunk.end):
                assert self.rings[self.ring_slot(kind, sequence, position)] == sequence.tokens[position]

    def ring_slot(self, kind, sequence, position):
        slot = position % (kind.table_pages * PAGE)
        return kind.name, sequence.pages[kind.name][slot // PAGE], slot % PAGE

    def copy(self, source, target):
        for kind in [kind for kind in self.plan.kinds if not kind.grows and kind.name in source]:
            for before, after in zip(source[kind.name], target[kind.name], strict=False):
                assert before != after
                for row in range(PAGE):
                    self.rings[kind.name, after, row] = self.rings.get((kind.name, before, row))

    def load(self, sequence):
        sequence.is_stored = False
        for kind in [kind for kind in self.plan.kinds if not kind.grows]:
            for position in range(max(0, sequence.fed - kind.window), sequence.fed):
                self.rings[self.ring_slot(kind, sequence, position)] = sequence.tokens[position]
        for position in range(sequence.fed if not sequence.evicted_at else 0):
            page = sequence.pages["full"][position // PAGE]
            self.contents[page, position % PAGE] = (sequence.tokens[position], sequence.variant)

    def finish_chunk(self, chunk):
        sequence = chunk.sequence
        if chunk.evicts:
            assert chunk.captures
            extra = 3 if sequence.eviction.policy == "adakv" else 0
            kept = min(sequence.eviction.budget + extra, sequence.lengths.held(0))
            sequence.lengths.record_eviction({0: np.arange(kept, dtype=np.int32)[None]}, {0: 1})
            self.scheduler.release_evicted(sequence)
        if not chunk.samples:
            return
        if len(sequence.tokens) > sequence.max_length:
            raise AssertionError("fed past the limit")
        sequence.tokens.append(7 * sequence.number + len(sequence.tokens))
        if len(sequence.tokens) > sequence.max_length:
            self.scheduler.remove(sequence)
            self.finished.append(sequence.number)

    def check_pages(self):
        for name, pool in self.scheduler.pools.items():
            holders = collections.Counter(p for s in self.scheduler.admitted for p in s.pages[name])
            holders += collections.Counter(p for s in self.scheduler.admitted for p in s.resumes.get(name, ()))
            assert [pool.holders(p) for p in range(pool.num_pages)] == [holders[p] for p in range(pool.num_pages)]
            assert pool.free + pool.kept + pool.held == pool.num_pages
        assert all(not s.pages for s in self.scheduler.waiting)
        assert len(self.scheduler.admitted) <= self.plan.max_sequences

    def drain(self, most=3000):
        for _ in range(most):
            if not (self.scheduler.waiting or self.scheduler.admitted):
                return
            assert self.step(), "nothing runs, but sequences are left"
        raise AssertionError("the sequences do not end")


EVICTIONS = [None, None, SNAPKV, ADAKV]
STORED = [None, None, "whole", "evicted"]  # what of a prompt's first half a file holds
requests = st.tuples(
    st.integers(1, 40), st.integers(1, 24), st.sampled_from(EVICTIONS), st.booleans(), st.sampled_from(STORED)
)
short_lists = st.lists(st.one_of(requests, st.integers(0, 40), st.just("step"), st.just("step")), max_size=60)


def draw_actions(seed):
    """Draw a long list, in which many requests run at once."""
    rng = np.random.default_rng(seed)
    draws = []
    for kind in rng.integers(0, 10, 80):
        if kind < 4:
            eviction, stored, shares = EVICTIONS[rng.integers(4)], STORED[rng.integers(4)], rng.integers(3) == 0
            draws.append((int(rng.integers(1, 41)), int(rng.integers(1, 25)), eviction, bool(shares), stored))
        else:
            draws.append("step" if kind < 9 else int(rng.integers(0, 40)))
    return draws


actions = st.one_of(short_lists, st.integers(0, 10**6).map(draw_actions))


def play(actions, plan, overcommit):
    driver = Driver(plan, overcommit)
    sequences = []
    for action in actions:
        if action == "step":
            driver.step()
        elif isinstance(action, int):
            live = [*driver.scheduler.waiting, *driver.scheduler.admitted]
            if live:
                driver.scheduler.remove(live[action % len(live)])
                driver.check_pages()
        else:
            prompt, new, eviction, shares, stored = action
            new = min(new, 64 - prompt + 1)
            tokens = range(5000, 5000 + prompt) if shares else prompt
            sequence = make_sequence(len(sequences), tokens, new, eviction)
            if stored and prompt > 1:
                read = prompt // 2
                store(sequence, plan, read, min(read, SNAPKV.budget) if stored == "evicted" else None)
            with contextlib.suppress(CapacityError):  # it could not finish alone
                driver.scheduler.add(sequence)
                sequences.append(sequence)
    driver.drain()
    assert all(pool.held == 0 for pool in driver.scheduler.pools.values())
    assert driver.scheduler.held_bytes == 0
    assert all(not s.pages for s in sequences)
    return driver
