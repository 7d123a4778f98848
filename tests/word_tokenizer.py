"""A tokenizer of words whose decoder, as SentencePiece's, takes the space off the first word of a text."""

from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers


def write_word_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer.json of words w1, w2, ..., and a special token before them."""
    pieces = {"<s>": 0} | {f"▁w{number}": number for number in range(1, vocabulary)}
    tokenizer = HfTokenizer(models.WordLevel(pieces, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
