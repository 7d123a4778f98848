"""Ctrl-C while `ortolan generate` reads or writes: it ends soon, and what was read is saved."""

import re
import signal
import subprocess
import sys
import threading

import pytest

import ortolan
from ortolan.cli import main
from ortolan.cli.interrupts import interruptible
from ortolan.errors import NumericError

CHUNK = 256


@pytest.fixture
def start(model_dir, tmp_path):
    """Start the command as a process of its own, which takes Ctrl-C."""

    def started(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ortolan", "generate", str(model_dir), *arguments],
            cwd=tmp_path,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return started


def test_what_was_read_of_a_prompt_is_saved(start, model_dir, tmp_path):
    text = (tmp_path / "prompt.txt", "def first(values):\n    return values[0]\n" * 100)
    text[0].write_text(text[1])
    process = start("--prompt-file", str(text[0]), "--save-session", "a.session", "--log-level", "debug")
    assert any("read 256 tokens, 512 in all" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    output, errors = process.stdout.read(), process.stderr.read()
    assert (process.wait(60), output) == (130, "")
    assert errors.endswith("ortolan: interrupted\n")
    (count,) = re.findall(r"^ortolan: (\d+) tokens were read: a\.session$", errors, re.MULTILINE)
    assert 512 <= int(count) < len(text[1])
    assert int(count) % CHUNK == 0

    model = ortolan.load(model_dir, device="cpu")
    session = model.restore(tmp_path / "a.session")
    assert session.logical_length == int(count)
    tokens = model.tokenizer.encode(text[1])
    assert session.state.tokens == tokens[: int(count)]
    rest = "".join(session.stream_text(tokens[int(count) :], max_new_tokens=8))
    assert rest == "".join(model.stream(text[1], max_new_tokens=8))


def test_a_text_goes_on_where_it_was_interrupted(start, model_dir, tmp_path, capsys):
    arguments = ["--prompt", "def first(values):\n", "--max-new-tokens", "3000"]
    process = start(*arguments, "--save-session", "a.session")
    begin = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, errors = process.stdout.read(), process.stderr.read()  # communicate would pass over what is in their buffers
    assert process.wait(60) == 130
    assert "tokens were read: a.session" in errors
    path = str(tmp_path / "a.session")
    assert main(["generate", str(model_dir), "--load-session", path, "--prompt", "", "--max-new-tokens", "9"]) == 0
    more = capsys.readouterr().out.removesuffix("\n")
    assert len(more) == 9
    model = ortolan.load(model_dir, device="cpu")
    assert rest.endswith("\n")
    shown = begin + rest.removesuffix("\n")
    assert "".join(model.stream(arguments[1], max_new_tokens=len(shown) + 9)) == shown + more


def test_a_text_that_breaks_off_ends_its_line(model_dir, monkeypatch, capsys):
    def broken(*_, **__):
        yield "text"
        raise NumericError("logits contain NaN")

    monkeypatch.setattr(ortolan.Session, "stream_text", broken)
    assert main(["generate", str(model_dir), "--prompt", "def "]) == 1
    assert capsys.readouterr() == ("text\n", "ortolan: error: logits contain NaN\n")


def test_nothing_is_saved_where_nothing_was_read(model_dir, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ortolan.Session, "stream_text", interrupted)
    path = tmp_path / "a.session"
    assert main(["generate", str(model_dir), "--prompt", "def ", "--save-session", str(path)]) == 130
    assert capsys.readouterr().err == "ortolan: interrupted\n"
    assert not path.exists()


def test_a_signal_reaches_the_function_while_the_main_thread_is_away():
    """As it is while ONNX Runtime computes; a second one ends the block anywhere."""
    asked, reached = threading.Event(), []

    def press(times):
        with interruptible(asked.set):
            for number in range(times):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)
                assert asked.wait(timeout=30)

    for times in (1, 2):
        asked.clear()
        reached.clear()
        with pytest.raises(KeyboardInterrupt):
            press(times)
        assert reached == [0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_signal_nothing_happens():
    calls = []
    with interruptible(lambda: calls.append(1)):
        pass
    assert calls == []


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_handlers_of_others_stay(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interruptible(lambda: pytest.fail("called")):
            assert signal.getsignal(signal.SIGINT) is handler
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_get_no_signals():
    ended = []

    def block():
        with interruptible(lambda: None):
            ended.append(True)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert ended == [True]
