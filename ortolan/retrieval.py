"""Make retrieval tasks for the shipped model: facts hidden in the standard library's sources, and one question.

A prompt is ASCII text of an exact length in bytes. Somewhere in Python source stands a line such as
`# The passkey of QKZD is 48213.`; the prompt ends in `Q: passkey of QKZD? A: ` on a line of its own, and the
answer is `48213`. The question is half of 64 bytes at most, so an eviction that scores by the last 64 tokens
sees all of it.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ortolan.errors import ConfigError, OrtolanError

SHIPPED_MODEL = "models/retriever"
KINDS = ("single", "multi_key", "multi_value")
ATTRIBUTES = ("passkey", "port", "badge", "locker")
SPLITS = ("train", "eval")
VALUE_DIGITS = 5
KEY_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEY_LENGTH = 4

_EVAL_SHARE = 10  # one file in ten is kept for evaluation
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
_MIN_FILE_BYTES = 2048
_DISTRACTORS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One hidden fact: `attribute` of `key` is `value`."""

    attribute: str
    key: str
    value: str

    @property
    def line(self) -> str:
        """The line that hides the fact in the text, with its newline."""
        return f"# The {self.attribute} of {self.key} is {self.value}.\n"

    @property
    def question(self) -> str:
        """The question that ends a prompt; the value follows it directly."""
        return f"\nQ: {self.attribute} of {self.key}? A: "


def check_kind_and_depth(kind: str, depth: float) -> None:
    """Check what a task asks for and where. Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}")
    if not 0.0 <= depth <= 1.0:
        raise ConfigError(f"depth is {depth}; it must lie in 0.0 .. 1.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to ask for.

    Attributes:
        length: bytes of the prompt, the question included.
        depth: where the asked fact stands, 0.0 (the start) to 1.0 (just before the question).
        kind: "single" (one fact), "multi_key" (eight keys, one attribute) or "multi_value" (two keys with
            four attributes each); the facts that are not asked for stand at random depths.
        seed: picks text, keys and values; the same task always gives the same sample.
    """

    length: int = 4096
    depth: float = 0.5
    kind: str = "single"
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind_and_depth(self.kind, self.depth)
        if self.length < 512:
            raise ConfigError(f"length is {self.length} bytes; the facts and the question need at least 512")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and what a model should continue it with.

    Attributes:
        prompt: ASCII text of exactly `Task.length` bytes.
        answer: the value asked for; a newline follows it in training.
        needle_start: byte offset of the asked fact's line in the prompt.
        fact: the fact asked for.
        task: what was asked for.
    """

    prompt: str
    answer: str
    needle_start: int
    fact: Fact
    task: Task


def shipped_model() -> Path:
    """Return the checkpoint folder of the model that comes with the package.

    Raises:
        OrtolanError: the installation lacks it.
    """
    folder = Path(__file__).resolve().parent / SHIPPED_MODEL
    if not (folder / "config.json").is_file():
        raise OrtolanError(f"{folder} does not contain a model; install ortolan again")
    return folder


@dataclass(frozen=True, slots=True)
class Corpus:
    """ASCII source files, each ending in a newline."""

    files: tuple[str, ...]

    def lines(self, rng: random.Random, length: int) -> list[str]:
        """Return consecutive lines of random files, newlines kept, of exactly `length` bytes in all.

        The last line of the first file is cut where the length asks for it.
        """
        chunks: list[str] = []
        missing = length
        while missing > 0:
            text = rng.choice(self.files)
            start = text.find("\n", rng.randrange(len(text) - 1)) + 1
            chunks.append(text[start : start + missing] if start < len(text) else text[:missing])
            missing -= len(chunks[-1])
        chunks.reverse()  # only the last one drawn was cut, at its end
        chunks[0] = chunks[0][:-1] + "\n"
        return "".join(chunks).splitlines(keepends=True)


@lru_cache(maxsize=4)
def load_corpus(split: str = "eval", root: Path | None = None) -> Corpus:
    """Read the sources of the running Python's standard library.

    Files fall to "train" or "eval" by a hash of their path below the root, so a file stays on its side
    between Python versions. Files with bytes beyond ASCII are left out, so a character is a byte is a token.

    Args:
        split: "train" or "eval".
        root: folder to read instead of the standard library's.

    Raises:
        ConfigError: an unknown split, or no usable file below the root.
    """
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; choose one of {', '.join(SPLITS)}")
    folder = root or Path(sysconfig.get_path("stdlib"))
    chosen = [path for path in _source_paths(folder) if _split_of(path) == split]
    texts = (_read_ascii(folder / path) for path in chosen)
    files = tuple(text for text in texts if len(text) >= _MIN_FILE_BYTES)
    if not files:
        raise ConfigError(f"{folder} does not contain an ASCII Python file for split {split!r}; pass another root")
    return Corpus(files)


def _source_paths(folder: Path) -> list[Path]:
    """List the Python files below the folder, relative to it; tests and installed packages are skipped."""
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        paths += (Path(parent, name).relative_to(folder) for name in names if name.endswith(".py"))
    return sorted(paths)


def _split_of(path: Path) -> str:
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return "eval" if digest[0] % _EVAL_SHARE == 0 else "train"


def _read_ascii(path: Path) -> str:
    """Return the file's text with Unix line ends, or an empty text where it is unreadable or not ASCII."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    if not data.isascii():
        return ""
    return data.decode("ascii").replace("\r", "").replace("\f", "").rstrip("\n") + "\n"


def draw_facts(rng: random.Random, keys: int, attributes: tuple[str, ...]) -> list[Fact]:
    """Return one fact for each pair of `keys` distinct random keys and the attributes."""
    names: set[str] = set()
    while len(names) < keys:
        names.add("".join(rng.choices(KEY_LETTERS, k=KEY_LENGTH)))
    return [
        Fact(attribute=attribute, key=key, value="".join(rng.choices("0123456789", k=VALUE_DIGITS)))
        for key in sorted(names)
        for attribute in attributes
    ]


def hide(lines: list[str], facts: list[Fact], depths: list[float]) -> tuple[str, list[int]]:
    """Put each fact's line between the lines, at the boundary nearest to its depth.

    Args:
        lines: the text, newlines kept.
        facts: what to hide.
        depths: for each fact, 0.0 (before the text) to 1.0 (after it), as a share of the text's bytes.

    Returns:
        The text, and the byte offset of each fact's line in it.
    """
    boundaries = [0]
    for line in lines:
        boundaries.append(boundaries[-1] + len(line))
    text = "".join(lines)
    pieces: list[str] = []
    starts = [0] * len(facts)
    done = written = 0
    for index in sorted(range(len(facts)), key=depths.__getitem__):
        boundary = _nearest(boundaries, depths[index] * len(text))
        pieces += (text[done:boundary], facts[index].line)
        starts[index] = written + boundary - done
        written = starts[index] + len(facts[index].line)
        done = boundary
    return "".join((*pieces, text[done:])), starts


def _nearest(sorted_values: list[int], target: float) -> int:
    return min(sorted_values, key=lambda value: abs(value - target))


def make_sample(corpus: Corpus, task: Task) -> Sample:
    """Make one prompt and its answer.

    Args:
        corpus: where the text comes from; use the "eval" split for anything that is reported.
        task: length, depth, kind and seed.
    """
    rng = random.Random(f"{task.length}/{task.depth}/{task.kind}/{task.seed}")
    facts = _facts_of_kind(rng, task.kind)
    rng.shuffle(facts)
    depths = [task.depth, *(rng.random() for _ in facts[1:])]
    asked = facts[0]
    filler = task.length - len(asked.question) - sum(len(fact.line) for fact in facts)
    text, starts = hide(corpus.lines(rng, filler), facts, depths)
    return Sample(prompt=text + asked.question, answer=asked.value, needle_start=starts[0], fact=asked, task=task)


def _facts_of_kind(rng: random.Random, kind: str) -> list[Fact]:
    if kind == "multi_value":
        return draw_facts(rng, 2, ATTRIBUTES)
    keys = 1 if kind == "single" else 1 + _DISTRACTORS
    return draw_facts(rng, keys, (rng.choice(ATTRIBUTES),))


def is_correct(sample: Sample, generated: str) -> bool:
    """Tell whether a continuation of the prompt starts with the answer and ends the number there."""
    rest = generated.removeprefix(sample.answer)
    return len(rest) < len(generated) and not rest[:1].isdigit()
