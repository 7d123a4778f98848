"""Conversations by `ortolan chat`: a template, what the answers must be, and the command as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ortolan

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSING = "{% if 'bad' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
SHORT = ["--max-new-tokens", "6"]
LONG = ["--max-new-tokens", "60000"]
WAIT = 20  # seconds


def answers_of(
    model: ortolan.Model,
    lines: Iterable[str],
    system: str | None = None,
    stop: Iterable[str] = (),
    max_new_tokens: int = 6,
) -> list[str]:
    """Return the answers that the model gives, each from a rendering of the whole conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        prompt = model.tokenizer.apply_chat_template(messages)
        answers.append("".join(model.stream(prompt, max_new_tokens=max_new_tokens, stop=stop)))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def written(answers: Iterable[str]) -> str:
    """Return the answers as the command writes them."""
    return "".join(f"{answer}\n" for answer in answers)


def start(folder: Path, place: Path, *options: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start the command as a process of its own, which takes Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, "-m", "ortolan", "chat", str(folder), "--device", "cpu", *options],
        cwd=place,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams,
    )
