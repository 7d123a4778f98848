"""Tokenizer files that the tokenizers library panics on: when it reads them, when it encodes, when it decodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTS: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
}
STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 5}  # panics on a token of fewer than five letters "a"
AT_LOAD: dict[str, dict[str, Any]] = {
    "prefix": {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2},
            "merges": ["a b"],
            "continuing_subword_prefix": "##########",
        }
    },
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "decoder": {"decoder": STRIP},
}
AT_ENCODE: dict[str, dict[str, Any]] = {
    "chunks of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "unknown special token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "no token for what is unknown": {"model": {"type": "Unigram", "unk_id": None, "vocab": []}},
}


def write_tokenizer(folder: Path, changes: Mapping[str, Any], vocab_size: int = 3, letter: int = 0) -> Path:
    """Write a tokenizer.json of words, of which one is the letter "a", with some of its parts changed."""
    vocab = {"a" if token == letter else f"word{token}": token for token in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "word1"}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(PARTS | {"model": model} | dict(changes)))
    return path
