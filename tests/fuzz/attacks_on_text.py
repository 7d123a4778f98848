"""Changes a tokenizer's files at random."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fuzz.mutations import junk, mutated_bytes, mutated_json
from hostile_tokenizers import AT_ENCODE, AT_LOAD, PARTS
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import ortolan
from ortolan.runtime.text.tokenizer import Tokenizer

TEXTS = ("", "a b", "word1 a\u00fc\U0001f600\0", " " * 50, "<bos>a<bos>", "x" * 300, "\ud800")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ bos_token }}"
CONFIG = {"bos_token": {"content": "<bos>"}, "eos_token": "</s>", "chat_template": TEMPLATE, "extra_special_tokens": {}}


class Tokenizers:
    """Tokenizers of several kinds, of which parts are changed, or exchanged for parts that are known to panic."""

    def __init__(self, folders: list[Path], scratch: Path) -> None:
        self._folder = scratch
        self._files = [json.loads(text) for text in _tokenizers()]
        self._parts = [*AT_LOAD.values(), *AT_ENCODE.values()]

    def run(self, rng: random.Random) -> None:
        """Change a file, and turn texts into tokens and back."""
        content = mutated_json(rng, rng.choice(self._files) | (rng.choice(self._parts) if rng.random() < 0.2 else {}))
        text = json.dumps(content).encode()
        (self._folder / "tokenizer.json").write_bytes(mutated_bytes(rng, text) if rng.random() < 0.1 else text)
        config = mutated_json(rng, CONFIG) if rng.random() < 0.5 else CONFIG
        (self._folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        tokenizer = Tokenizer(self._folder)
        calls = [lambda text=text: tokenizer.encode(text) for text in TEXTS]
        ids = [rng.choice((0, 1, 2, 5, 300, 2**32 - 1, junk(rng, 1))) for _ in range(rng.randrange(8))]
        calls += [lambda: tokenizer.decode(ids), lambda: _stream(tokenizer, ids)]
        calls += [lambda: tokenizer.apply_chat_template([{"role": "user", "content": "a"}])]
        for call in calls:
            try:
                call()
            except ortolan.OrtolanError:
                continue


def _stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream()
    for token in ids:
        stream.push(token)
    stream.finish()


def _tokenizers() -> list[str]:
    """Return the files of a byte-level BPE, words, word pieces and a unigram model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("x", "x"), ("o", "r")]
    vocab = {letter: place for place, letter in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    bytewise = HfTokenizer(models.BPE(vocab, merges))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<bos>", "</s>"])
    bytewise.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 259)])
    pieces = HfTokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2, "word": 3, "##1": 4}, unk_token="[UNK]"))
    pieces.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    unigram = HfTokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0), ("b", -2.0)], 0, True))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = PARTS | {"model": {"type": "WordLevel", "vocab": {"a": 0, "word1": 1, "b": 2}, "unk_token": "word1"}}
    return [*(each.to_str() for each in (bytewise, pieces, unigram)), json.dumps(words)]
