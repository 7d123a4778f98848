"""A tokenizer that reads one text in many ways: what a model writes is rarely what encoding its text gives."""

import itertools
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

SPECIAL = ("<pad>", "<s>", "</s>")  # the ids 0, 1 and 2
SINGLE = "\n <>/?!.:abcdefghijklmnopqrstuvwxyz"


def write_letter_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer.json of special tokens, single characters, and words of the letters a and b."""
    words = itertools.chain.from_iterable(itertools.product("ab", repeat=length) for length in itertools.count(2))
    pieces = [*SPECIAL, *SINGLE]
    merges = []
    for word in words:
        if len(pieces) == vocabulary:
            break
        pieces.append("".join(word))
        merges.append(("".join(word[:-1]), word[-1]))
    tokenizer = HfTokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
