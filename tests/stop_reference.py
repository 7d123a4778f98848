"""What stops are held against, and a tokenizer whose tokens are parts of words and of characters."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from ortolan.runtime.text.tokenizer import Tokenizer

PIECES = ("a", "b", "c", "ab", "bca", "cc", "abcabc")


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write and open a tokenizer of bytes, some longer pieces behind them, and one special token."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in PIECES:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = HfTokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def expected_stop(tokenizer, tokens, strings, sequences):
    """Find the first number of tokens at which something stops, by decoding all beginnings; then where it is cut."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        begins = [text.find(s) for s in strings if s in text]
        cuts = [count - len(s) for s in sequences if tokens[:count][-len(s) :] == s]
        if begins:
            inside = max(n for n in range(count) if ends_before(tokenizer, tokens[:n], min(begins)))
            if inside <= min(cuts, default=count):
                return tokens[:inside], text[: min(begins)], count
        if cuts:
            return tokens[: min(cuts)], tokenizer.decode(tokens[: min(cuts)]), count
    return tokens, tokenizer.decode(tokens), None


def ends_before(tokenizer, tokens, offset):
    """Say whether tokens are whole characters, none of them past an offset."""
    text = tokenizer.decode(tokens)
    return len(text) <= offset and not text.endswith("\ufffd")
