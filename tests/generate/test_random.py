"""Random numbers against the published vectors of Philox 4x32-10, and their independence of what else is drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.runtime.generate.random import philox, random_bits

# Source: kat_vectors of the Random123 library, "philox4x32 10": counter, key, block.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORDS = st.integers(0, 2**64 - 1)


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "block"), VECTORS)
def test_blocks_are_those_published(counter, key, block):
    np.testing.assert_array_equal(philox(words(counter)[None], words(key)[None])[0], words(block))


def test_many_blocks_are_those_of_each():
    counters, keys, blocks = (np.stack([words(vector[i]) for vector in VECTORS]) for i in range(3))
    np.testing.assert_array_equal(philox(counters, keys), blocks)


def test_seed_zero_at_position_zero_takes_the_first_words_of_the_first_vector():
    assert random_bits([0], [0]).tolist() == [0x6627E8D5E169C58D]


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
def test_bits_depend_on_seed_and_position_alone(pairs):
    seeds, positions = zip(*pairs, strict=True)
    assert random_bits(seeds, positions).tolist() == [int(random_bits([s], [p])[0]) for s, p in pairs]


def test_seeds_count_by_their_lowest_64_bits():
    assert random_bits([2**64 + 5], [3]) == random_bits([5], [3])
    assert len(set(random_bits([5, 2**32 + 5, 5, 2**63], [3, 3, 2**32 + 3, 3]).tolist())) == 4
