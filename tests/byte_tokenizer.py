"""A tokenizer whose tokens are bytes."""

from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from ortolan.runtime.text.tokenizer import Tokenizer


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json of 256 byte tokens."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def byte_tokenizer(folder: Path) -> Tokenizer:
    write_byte_tokenizer(folder)
    return Tokenizer(folder)
