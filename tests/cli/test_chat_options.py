"""`ortolan generate --chat`: system message, templates that may be edited, and the checkpoint's sampling."""

import json
import os
import pty
import shutil
import subprocess
import sys

import pytest

import ortolan
from ortolan.cli import main

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}def answer"


@pytest.fixture
def chat_dir(model_dir, tmp_path):
    """The shipped model with a chat template that its export knows nothing of."""
    folder = shutil.copytree(model_dir, tmp_path / "chat model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def run(capsys):
    def generate(folder, *arguments: str) -> str:
        assert main(["generate", str(folder), "--max-new-tokens", "8", *arguments]) == 0
        return capsys.readouterr().out

    return generate


def test_a_system_message_begins_the_chat(chat_dir, model_dir, run):
    expected = run(model_dir, "--prompt", "<user>hi\ndef answer")
    assert run(chat_dir, "--chat", "--prompt", "hi") == expected
    expected = run(model_dir, "--prompt", "<system>be brief\n<user>hi\ndef answer")
    assert run(chat_dir, "--chat", "--system", "be brief", "--prompt", "hi") == expected


def test_a_template_comes_from_a_file(model_dir, run, tmp_path):
    (tmp_path / "other.jinja").write_text("{{ messages[0].content | upper }}\n")
    expected = run(model_dir, "--prompt", "HI\n")
    assert run(model_dir, "--chat", "--chat-template", str(tmp_path / "other.jinja"), "--prompt", "hi\n") == expected


def test_an_edited_template_is_taken(chat_dir, model_dir, run, tmp_path):
    """Its size is in the manifest of an export that had one."""
    source = shutil.copytree(ortolan.retrieval.shipped_model(), tmp_path / "checkpoint")
    (source / "chat_template.jinja").write_text("old")
    folder = ortolan.export(source, tmp_path / "model", max_context=256)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert run(folder, "--chat", "--prompt", "hi") == run(model_dir, "--prompt", "<user>hi\ndef answer")


@pytest.mark.parametrize("where", ["folder", "option"])
def test_a_broken_template_is_named_with_its_line(chat_dir, tmp_path, refused, where):
    path = (chat_dir if where == "folder" else tmp_path) / "chat_template.jinja"
    path.write_text("{{ messages[0].content }}\n{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    options = [] if where == "folder" else ["--chat-template", str(path)]
    assert f"{path} is not a chat template: line 3: " in refused(
        "generate", str(chat_dir), "--chat", "--prompt", "x", *options
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--system", "x"], "--system is for chats; add --chat"),
        (["--chat-template", "x"], "--chat-template is for chats; add --chat"),
        (["--chat", "--chat-template", "/none/x.jinja"], "/none/x.jinja cannot be read"),
        (["--chat"], "give a template (chat_template=, --chat-template)"),
    ],
)
def test_chat_options_that_cannot_be_are_one_line(options, named, model_dir, refused):
    assert named in refused("generate", str(model_dir), "--prompt", "hi", *options)


def test_a_later_turn_has_no_system_message(chat_dir, refused, run, tmp_path):
    path = str(tmp_path / "session")
    run(chat_dir, "--chat", "--system", "be brief", "--prompt", "hi", "--save-session", path)
    assert run(chat_dir, "--load-session", path, "--chat", "--prompt", "why?")
    line = refused("generate", str(chat_dir), "--load-session", path, "--chat", "--system", "x", "--prompt", "why?")
    assert "--system begins a chat" in line


def test_a_chat_samples_as_the_checkpoint_says(chat_dir, model_dir, run):
    config = {"do_sample": True, "temperature": 1.7, "top_k": 30}
    (chat_dir / "generation_config.json").write_text(json.dumps(config))
    prompt = "<user>hi\ndef answer"
    sampled = run(model_dir, "--prompt", prompt, "--temperature", "1.7", "--top-k", "30", "--seed", "3")
    assert run(chat_dir, "--chat", "--prompt", "hi", "--seed", "3") == sampled
    greedy = run(model_dir, "--prompt", prompt)
    assert run(chat_dir, "--chat", "--prompt", "hi", "--temperature", "0") == greedy
    assert run(chat_dir, "--prompt", prompt) == greedy
    assert sampled != greedy


def test_a_terminal_is_asked_for_a_prompt(model_dir, tmp_path, run):
    """Nothing but the text goes to standard output."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ortolan", "generate", str(model_dir), "--max-new-tokens", "8"]
    pipes = {"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    os.close(theirs)
    assert process.stderr.read(2) == "> "
    os.write(ours, b"def first():\n")
    output, errors = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, errors) == (0, "")
    assert output == run(model_dir, "--prompt", "def first():")


def test_caches_that_do_not_fit_suggest_to_evict_while_reading(model_dir, monkeypatch, capsys, refused):
    """Before anything is read on the CPU, and where a device has no memory."""
    monkeypatch.setattr("ortolan.runtime.device.host_memory.free_memory_bytes", lambda: 1000)
    assert main(["generate", str(model_dir), "--prompt", "def ", "--max-new-tokens", "2"]) == 0
    line = capsys.readouterr().err
    assert line.startswith("ortolan: warning: the caches may take ")
    assert line.count("\n") == 1
    assert "--evict snapkv --evict-option during_prefill=true: then caches take " in line
    options = [
        "--evict",
        "snapkv",
        "--evict-option",
        "during_prefill=true",
        "--prompt",
        "def ",
        "--max-new-tokens",
        "2",
    ]
    assert main(["generate", str(model_dir), *options]) == 0
    assert "during_prefill" not in capsys.readouterr().err


def test_a_device_without_memory_suggests_it_too(model_dir, monkeypatch, capsys):
    def full(*_):
        raise ortolan.CapacityError("cuda:0 is full")

    monkeypatch.setattr(ortolan.Model, "session", full)
    options = ["--prompt", "def ", "--evict", "streaming"]
    assert main(["generate", str(model_dir), *options]) == 1
    line = capsys.readouterr().err
    assert line.startswith(
        "ortolan: error: cuda:0 is full; or evict while the prompt is read, by --evict-option during"
    )
