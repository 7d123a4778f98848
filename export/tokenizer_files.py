"""Names and checks the files that travel from a checkpoint into a model folder as they are: the tokenizer's, mostly."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from ortolan.errors import CheckpointError
from ortolan.export.caller import warn_caller
from ortolan.export.reading import is_file, reading
from ortolan.folders import GENERATION_FILE, SPECIALS_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

_OBJECTS = (TOKENIZER_CONFIG_FILE, SPECIALS_FILE)
SIDE_FILES = (TOKENIZER_FILE, *_OBJECTS, TEMPLATE_FILE, GENERATION_FILE)
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


def check_tokenizer(folder: Path, *, is_wanted: bool = True) -> None:
    """Check the tokenizer before anything is written; where it is wanted and there is none, warn.

    Raises:
        CheckpointError: the tokenizer's files are damaged, or cannot be read.
    """
    path = folder / TOKENIZER_FILE
    if not is_file(path):
        if is_wanted:
            _warn_of_none(folder)
        return
    with reading(path):
        content = path.read_bytes()
    try:
        Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the binding is not an Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}; download it again, or remove it") from error
    for name in _OBJECTS:
        _check_object(folder / name)


def _check_object(path: Path) -> None:
    if not is_file(path):
        return
    try:
        with reading(path):
            value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again, or remove it") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")


def _warn_of_none(folder: Path) -> None:
    found = [name for name in _OTHER_FORMS if is_file(folder / name)]
    advice = (
        f"make one of {' and '.join(found)}: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of "
        "transformers"
        if found
        else "add the tokenizer's"
    )
    warn_caller(
        f"{folder} has no {TOKENIZER_FILE}, so that the model will take and give token ids alone; for text, {advice}, "
        "and export again"
    )
