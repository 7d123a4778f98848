"""Page pools: every page is free, held or kept, whatever is taken, shared and released."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ortolan.errors import CapacityError, OrtolanError
from ortolan.runtime.caches.pages import DigestChain, PagePool, PrefixIndex, extend_chain

NUM_PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    """Holds pages as sequences do, and counts them on the side."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.pool = PagePool("full", NUM_PAGES, self.index)
        self.held = collections.Counter()
        self.contents = {}
        self.serial = 0

    @rule()
    def take(self):
        if self.pool.available:
            page = self.pool.take()
            assert not self.held[page]
            self.held[page] = 1
            self.contents.pop(page, None)
        else:
            with pytest.raises(CapacityError, match="full"):
                self.pool.take()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data):
        page = data.draw(st.sampled_from(sorted(self.held)))
        if page not in self.contents:
            self.serial += 1
            self.contents[page] = extend_chain(b"", [self.serial])
            self.index.add(self.contents[page], page)

    @rule(data=st.data())
    def share_what_the_index_finds(self, data):
        if self.contents:
            page = data.draw(st.sampled_from(sorted(self.contents)))
            assert self.index.find([self.contents[page]]) == [page]
            self.pool.share(page)
            self.held[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(page)
        self.held[page] -= 1
        self.held += collections.Counter()  # drops zeros

    @invariant()
    def counts_agree(self):
        pool = self.pool
        assert pool.free + pool.kept + pool.held == NUM_PAGES
        assert pool.held == len(self.held)
        assert [pool.holders(page) for page in range(NUM_PAGES)] == [self.held[page] for page in range(NUM_PAGES)]
        assert len(self.index) == len(self.contents)
        self.held += collections.Counter()


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_page_cannot_be_released_twice():
    pool = PagePool("full", 2)
    page = pool.take()
    pool.release(page)
    for wrong in (page, -1, 2):
        with pytest.raises(OrtolanError, match="nobody holds"):
            pool.release(wrong)
    assert pool.free == 2


def test_only_known_pages_are_shared():
    pool = PagePool("full", 2, PrefixIndex())
    with pytest.raises(OrtolanError, match="shared"):
        pool.share(pool.take())


def test_the_longest_unused_page_is_given_out_first():
    index = PrefixIndex()
    pool = PagePool("full", 3, index)
    pages = [pool.take() for _ in range(3)]
    for number, page in enumerate(pages):
        index.add(extend_chain(b"", [number]), page)
    for page in (pages[1], pages[0], pages[2]):
        pool.release(page)
    pool.share(pages[1])
    pool.release(pages[1])
    assert [pool.take() for _ in range(3)] == [pages[0], pages[2], pages[1]]
    assert len(index) == 0


def test_digests_depend_on_all_tokens_before():
    first = DigestChain().first(2, [1, 2, 3, 4], 2)
    assert len(set(first + DigestChain().first(2, [9, 2, 3, 4], 2))) == 4
    assert DigestChain().first(2, [1, 2, 3, 4, 5], 2) == first
    assert DigestChain().first(1, [1, 2], 2, root=b"\x01") != first[:1]
    assert PrefixIndex().find(first) == []


def test_a_chain_continues_what_it_has_and_begins_anew_with_another_root():
    chain, tokens = DigestChain(), list(range(12))
    for root in (b"", b"\x01", b""):
        for pages in (2, 4, 1, 4):
            assert chain.first(pages, tokens[: pages * 3], 3, root) == DigestChain().first(pages, tokens, 3, root)
