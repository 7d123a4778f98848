"""Reads how a checkpoint's authors sample from it: generation_config.json of a model folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.folders import GENERATION_FILE
from ortolan.runtime.options import Sampling

USED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# They say nothing of how a token is chosen, or are said elsewhere: lengths are the caller's, ids the manifest's.
OTHERS = {
    "_from_model_config",
    "assistant_early_exit",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "chat_format",
    "decoder_start_token_id",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "max_window_size",
    "min_length",
    "min_new_tokens",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "use_cache",
}
# Values of further keys that choose as if the key were absent.
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

_log = logging.getLogger(__name__)


def read_sampling(folder: Path) -> Sampling:
    """Return the sampling of a model folder's generation_config.json; what it leaves out is off.

    Without `do_sample` the most likely token is taken. Keys that ask for what Ortolan does not have are named in a
    warning of the log.

    Raises:
        ContractMismatchError: the file cannot be read, or has values that are not allowed.
    """
    path = folder / GENERATION_FILE
    keys = _read(path)
    unknown = sorted(key for key, value in keys.items() if _is_missed(key, value))
    if unknown:
        _log.warning("%s asks for %s, which Ortolan does not have; text is sampled without", path, ", ".join(unknown))
    chosen = {name: keys[name] for name in USED if keys.get(name) is not None}
    if keys.get("do_sample") is True:
        chosen.setdefault("temperature", 1.0)
    else:
        chosen = {name: value for name, value in chosen.items() if name == "repetition_penalty"}
    try:
        return Sampling(**chosen)
    except ConfigError as error:
        raise ContractMismatchError(f"{path}: {error}") from error


def _is_missed(key: str, value: object) -> bool:
    """Say whether a key changes how tokens are chosen, in a way that `Sampling` does not have."""
    if key in USED or key in OTHERS or value is None or value is False or value in ([], {}, ""):
        return False
    return key not in NEUTRAL or value != NEUTRAL[key]


def _read(path: Path) -> dict[str, Any]:
    try:
        keys = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ContractMismatchError(f"{path} cannot be read: {error}") from error
    if not isinstance(keys, dict):
        raise ContractMismatchError(f"{path} holds a {type(keys).__name__}, expected an object")
    return keys
