"""`ortolan chat` over the lines of a pipe: commands, Ctrl-C, saved conversations, and what is refused."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from chats import LONG, REFUSING, SHORT, TEMPLATE, WAIT, answers_of, start, written

import ortolan
from ortolan.cli import main


@pytest.fixture
def chat(chat_dir, monkeypatch, capsys):
    """Run the command over lines of a pipe; returns its exit code, output and errors."""

    def run(text: str, *options: str, folder=chat_dir) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capsys.readouterr()
        code = main(["chat", str(folder), *SHORT, "--device", "cpu", *options])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.mark.parametrize("system", [None, "be brief"])
def test_each_line_is_a_message(chat, chat_model, system):
    options = [] if system is None else ["--system", system]
    lines = ["def first(values):", "def last(values):", "why?"]
    expected = written(answers_of(chat_model, lines, system))
    assert chat("\n".join(lines), *options) == (0, expected, "")
    assert chat("\r\n\n".join(lines) + "\r\n \n", *options) == (0, expected, "")


def test_lines_are_utf8_without_a_byte_order_mark(chat_dir, chat_model, tmp_path):
    command = [sys.executable, "-m", "ortolan", "chat", str(chat_dir), *SHORT, "--device", "cpu"]
    given = "\ufeffdöf:\r\nwhy\n".encode()
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, timeout=WAIT, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("latin-1") == written(answers_of(chat_model, ["döf:", "why"]))
    done = subprocess.run(command, cwd=tmp_path, input=b"why\nd\xfff\n", capture_output=True, timeout=WAIT)
    assert done.returncode == 1
    assert done.stdout.decode() == written(answers_of(chat_model, ["why"]))
    assert done.stderr == b"ortolan: error: a line is not UTF-8 text: invalid start byte at byte 1\n"


def test_an_answer_comes_before_the_next_line_is_given(chat_dir, chat_model, tmp_path):
    process = start(chat_dir, tmp_path, *SHORT, stdin=subprocess.PIPE)
    for line, answer in zip(["hi", "so"], answers_of(chat_model, ["hi", "so"]), strict=True):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
        assert process.stdout.read(len(answer) + 1) == f"{answer}\n".encode()
    assert process.communicate(timeout=WAIT) == (b"", b"")
    assert process.returncode == 0


def test_one_turn_is_what_generate_makes(chat, chat_dir, capsys):
    config = {"do_sample": True, "temperature": 1.5, "top_k": 40}
    (chat_dir / "generation_config.json").write_text(json.dumps(config))
    options = ["--system", "be", "--seed", "3"]
    assert main(["generate", str(chat_dir), "--chat", *SHORT, *options, "--prompt", "def x", "--device", "cpu"]) == 0
    expected = capsys.readouterr().out
    assert chat("def x\n", *options)[1] == expected
    greedy = [*options[:2], "--temperature", "0"]
    assert chat("def x\n", *greedy)[1] != chat("def x\n", *options)[1]


def test_stops_end_an_answer_and_are_not_part_of_it(chat, chat_model):
    (whole,) = answers_of(chat_model, ["def f(x):"], max_new_tokens=20)
    stop = whole[4:7]
    expected = answers_of(chat_model, ["def f(x):", "so"], stop=[stop], max_new_tokens=20)
    assert expected[0] == whole[: whole.index(stop)]
    assert chat("def f(x):\nso\n", "--stop", stop, "--max-new-tokens", "20") == (0, written(expected), "")


@pytest.mark.parametrize("speculate", ["lookup", "folder"])
def test_drafts_change_no_answer(chat, chat_dir, chat_model, speculate):
    drafts = ["--speculate", speculate if speculate == "lookup" else str(chat_dir), "--max-new-tokens", "30"]
    lines = ["def first(values):", "def last(values):"]
    assert chat("\n".join(lines), *drafts)[1] == written(answers_of(chat_model, lines, max_new_tokens=30))


class TestCommands:
    def test_reset_begins_anew_with_the_system_message(self, chat, chat_model):
        (first,) = answers_of(chat_model, ["def f(x):"], "be")
        code, output, errors = chat("def f(x):\n/reset\ndef f(x):\n", "--system", "be")
        assert (code, output, errors) == (0, written([first, first]), "")

    def test_exit_leaves_the_rest(self, chat, chat_model):
        assert chat("hi\n /exit\n/exit\nso\n")[1] == written(answers_of(chat_model, ["hi", " /exit"]))

    def test_two_slashes_are_one_of_a_message(self, chat, chat_model):
        assert chat("//reset\n///x\n")[1] == written(answers_of(chat_model, ["/reset", "//x"]))

    def test_help_is_not_an_answer(self, chat):
        code, output, errors = chat("/help\n")
        assert (code, output) == (0, "")
        assert all(name in errors for name in ("/reset", "/save FILE", "/exit", "/help", "//"))

    @pytest.mark.parametrize("line", ["/quit", "/save", "/reset now", "/", "/etc/passwd is what?"])
    def test_an_unknown_one_says_what_there_is(self, chat, line):
        code, output, errors = chat(f"{line}\nhi\n")
        assert (code, output) == (1, "")
        assert errors.startswith(f"ortolan: error: {line} is not a command; there are /reset, /save FILE, /exit and")
        assert errors.count("\n") == 1

    def test_save_writes_what_load_session_goes_on_from(self, chat, chat_model, tmp_path):
        path = tmp_path / "a file"
        lines = ["def f(x):", "so", "and"]
        expected = answers_of(chat_model, lines)
        code, output, errors = chat(f"{lines[0]}\n/save {path}\n{lines[1]}\n")
        assert (code, output) == (0, written(expected[:2]))
        assert re.fullmatch(rf"ortolan: \d+ tokens were read: {re.escape(str(path))}\n", errors)
        assert chat("\n".join(lines[1:]), "--load-session", str(path)) == (0, written(expected[1:]), "")

    @pytest.mark.parametrize("name", ["none/a", ""])
    def test_a_file_that_cannot_be_is_one_line(self, chat, tmp_path, name):
        (tmp_path / "x").mkdir()
        code, output, errors = chat(f"/save {tmp_path / 'x' / name}\n")
        assert (code, output, errors.count("\n")) == (1, "", 1)
        assert "give" in errors


class TestSavedConversations:
    def test_they_are_saved_at_the_end_and_go_on(self, chat, chat_model, tmp_path):
        path = str(tmp_path / "talk")
        lines = ["def f(x):", "so", "and", "then"]
        expected = answers_of(chat_model, lines)
        assert chat("\n".join(lines[:2]), "--save-session", path) == (0, written(expected[:2]), "")
        options = ["--load-session", path, "--save-session", path]
        assert chat(lines[2], *options) == (0, written(expected[2:3]), "")
        assert chat(lines[3], *options) == (0, written(expected[3:]), "")

    def test_generate_goes_on_with_them(self, chat, chat_dir, chat_model, tmp_path, capsys):
        path = str(tmp_path / "talk")
        chat("def f(x):\n", "--save-session", path)
        options = ["--load-session", path, "--chat", "--prompt", "so", *SHORT]
        assert main(["generate", str(chat_dir), *options]) == 0
        assert capsys.readouterr().out == written(answers_of(chat_model, ["def f(x):", "so"])[1:])

    def test_a_conversation_without_messages_is_not_saved(self, chat, tmp_path):
        assert chat("/help\n", "--save-session", str(tmp_path / "talk"))[0] == 0
        assert not (tmp_path / "talk").exists()

    def test_a_system_message_comes_too_late(self, chat, chat_dir, refused, tmp_path):
        path = str(tmp_path / "talk")
        chat("hi\n", "--save-session", path)
        line = refused("chat", str(chat_dir), "--load-session", path, "--system", "x")
        assert "--system begins a chat" in line

    def test_they_are_saved_where_a_message_fails(self, chat, chat_model, tmp_path):
        path = str(tmp_path / "talk")
        assert chat("def f(x):\n/oops\n", "--save-session", path)[0] == 1
        expected = answers_of(chat_model, ["def f(x):", "so"])[1:]
        assert chat("so\n", "--load-session", path) == (0, written(expected), "")


def test_statistics_are_of_the_whole_conversation(chat):
    code, output, errors = chat("hi\nso\n", "--stats-json", "-", "--temperature", "0")
    stats = json.loads(errors)
    assert (code, output.count("\n") >= 2) == (0, True)
    assert stats["decode_tokens"] == 10
    assert stats["finish_reason"] == "length"


class TestFullContexts:
    def test_a_message_that_does_not_fit_ends_a_pipe(self, chat, chat_model):
        code, output, errors = chat("hi\n" + "x" * 100 + "\nso\n", "--max-context", "64")
        assert (code, output) == (1, written(answers_of(chat_model, ["hi"])))
        assert re.fullmatch(
            r"ortolan: error: with this message the conversation has \d+ tokens, past max_context = 64; send a shorter "
            r"one, or begin a new conversation \(/reset\)\n",
            errors,
        )

    def test_an_answer_that_ends_there_says_so(self, chat):
        code, output, errors = chat("def f(x):\n/reset\nhi\n", "--max-context", "40", "--max-new-tokens", "30")
        assert (code, output.count("\n") >= 2) == (0, True)
        warning = "ortolan: warning: the text ended at max_context = 40; make the session with a larger max_context"
        assert errors.count(warning) == 2


def test_an_evicted_conversation_goes_on(chat):
    lines = ["def f(x):" * 40, "so", "and"]
    options = ["--snapkv-budget", "128", "--stats-json", "-"]
    code, output, errors = chat("\n".join(lines), *options)
    stats = json.loads(errors)
    assert (code, output.count("\n") >= 3) == (0, True)
    assert stats["evictions"] >= 1
    assert stats["logical_length"] > 360


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--stop", ""], "--stop is an empty text"),
        (["--top-p", "2"], "top_p"),
        (["--speculate-tokens", "3"], "--speculate-tokens needs --speculate"),
        (["--speculate", "mtp"], "has no draft head"),
        (["--speculate", "/none/a"], "/none/a"),
        (["--budget", "3"], "--budget needs --evict"),
        (["--save-session", "/none/a"], "/none is not a folder"),
        (["--stats-json", "/none/a"], "/none is not a folder"),
        (["--load-session", "/none/a"], "/none/a"),
        (["--max-context", "5000"], "max_context 5000"),
        (["--chat-template", "/none/a"], "the chat template /none/a cannot be read"),
    ],
)
def test_options_that_cannot_be_are_one_line(options, named, chat_dir, refused, monkeypatch):
    monkeypatch.setattr("ortolan.cli.chat.read_line", lambda: pytest.fail("read a line"))
    assert named in refused("chat", str(chat_dir), "--device", "cpu", *options)


def test_a_model_without_a_template_is_refused_before_anything_is_read(model_dir, refused, monkeypatch):
    monkeypatch.setattr("ortolan.cli.chat.read_line", lambda: pytest.fail("read a line"))
    assert "this model has no chat template" in refused("chat", str(model_dir), "--device", "cpu")


def test_a_template_comes_from_a_file(chat, chat_model, model_dir, tmp_path):
    (tmp_path / "other.jinja").write_text(TEMPLATE)
    options = ["--chat-template", str(tmp_path / "other.jinja")]
    assert chat("hi\nso\n", *options, folder=model_dir) == (0, written(answers_of(chat_model, ["hi", "so"])), "")


def test_a_message_that_the_template_refuses_ends_a_pipe(chat, chat_dir):
    (chat_dir / "chat_template.jinja").write_text(REFUSING)
    code, output, errors = chat("bad\nso\n")
    assert (code, output) == (1, "")
    assert errors.startswith("ortolan: error: the chat template of ")
    assert errors.count("\n") == 1


def test_an_interrupt_ends_a_pipe_and_saves(endless_dir, tmp_path):
    process = start(endless_dir, tmp_path, *LONG, "--save-session", "talk", stdin=subprocess.PIPE)
    process.stdin.write(b"def f(x):\nso\n")
    process.stdin.flush()
    begin = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()  # all, while `communicate` would lose what the reading above has in its buffer
    _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    message = r"ortolan: \d+ tokens were read: talk\nortolan: interrupted\n"
    assert re.fullmatch(message, errors.decode())
    said = (begin + rest).decode().removesuffix("\n")
    model = ortolan.load(endless_dir, device="cpu")
    assert (
        model.tokenizer.decode(model.restore(tmp_path / "talk").state.tokens)
        == f"<user>def f(x):</>\n<assistant>{said}"
    )
