"""`ortolan chat` on a terminal: its prompt, editing, Ctrl-C, Ctrl-D, and what goes to standard output."""

import os
import pty
import re
import select
import signal
import time

import pytest
from chats import LONG, REFUSING, SHORT, WAIT, answers_of, start, written

import ortolan


class Terminal:
    """The command on a terminal of its own; standard output goes there, or to a file."""

    def __init__(self, folder, place, *options, output=None):
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        streams = {"stdin": theirs, "stdout": output or theirs, "stderr": theirs, "env": environment}
        self.process = start(folder, place, *options, start_new_session=True, **streams)
        os.close(theirs)
        self.seen = ""

    def expect(self, pattern):
        """Read until the pattern comes; returns what came before it."""
        while not (found := re.search(pattern, self.seen)):
            if not select.select([self.ours], [], [], WAIT)[0]:
                pytest.fail(f"{pattern} does not come: {self.seen!r}")
            try:
                self.seen += os.read(self.ours, 4096).decode()
            except OSError:  # the other end is closed
                pytest.fail(f"it ended: {self.seen!r}")
        before, self.seen = self.seen[: found.start()], self.seen[found.end() :]
        return before

    def type(self, text):
        os.write(self.ours, text.encode())

    def press(self):
        """Do what a terminal does at Ctrl-C, in whose foreground the process would be."""
        self.process.send_signal(signal.SIGINT)

    def end(self):
        """Wait for the end; returns the exit code and the rest of what was shown."""
        try:
            while select.select([self.ours], [], [], WAIT)[0]:
                self.seen += os.read(self.ours, 4096).decode()
        except OSError:  # the other end is closed
            pass
        os.close(self.ours)
        return self.process.wait(timeout=WAIT), self.seen


def wait_for(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


PROMPT = r"(?:^|[\r\n])> $"


@pytest.fixture
def terminal(chat_dir, tmp_path):
    opened = []

    def open_terminal(*options, folder=chat_dir, **streams):
        opened.append(Terminal(folder, tmp_path, *options, **streams))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.process.kill()
        each.process.wait()


class TestTerminals:
    def test_a_conversation(self, terminal, chat_model):
        shell = terminal(*SHORT)
        shell.expect(PROMPT)
        for line, answer in zip(["hi", "so"], answers_of(chat_model, ["hi", "so"]), strict=True):
            shell.type(f"{line}\r")
            shown = answer.replace("\n", "\r\n")
            assert shell.expect(PROMPT).endswith(f"{line}\r\n{shown}\r")
        shell.type("\x04")
        assert shell.end() == (0, "\r\n")

    def test_only_answers_go_to_standard_output(self, terminal, chat_model, tmp_path):
        with open(tmp_path / "answers", "w") as output:
            shell = terminal(*SHORT, output=output)
        for line in ("hi", "/help", "so", "/exit"):
            shell.expect(PROMPT)
            shell.type(f"{line}\r")
        assert shell.end()[0] == 0
        assert (tmp_path / "answers").read_text() == written(answers_of(chat_model, ["hi", "so"]))

    def test_an_earlier_line_comes_back(self, terminal, chat_model):
        pytest.importorskip("readline", reason="the lines of this Python cannot be edited")
        shell = terminal(*SHORT)
        shell.expect(PROMPT)
        shell.type("hi\r")
        shell.expect(PROMPT)
        shell.type("\x10\x7fey\r")  # the line before without its last letter, and with others
        answer = answers_of(chat_model, ["hi", "hey"])[1].replace("\n", "\r\n")
        assert shell.expect(PROMPT).endswith(f"\r\n{answer}\r")

    def test_an_interrupt_ends_an_answer_which_counts(self, terminal, endless_dir, tmp_path):
        path = tmp_path / "answers"
        with open(path, "w") as output:
            options = [*LONG, "--stop", "</>", "--save-session", "talk"]
            shell = terminal(*options, folder=endless_dir, output=output)
        said = []
        shell.expect(PROMPT)
        for line in ("def f(x):", "so"):
            shown = path.stat().st_size
            shell.type(f"{line}\r")
            wait_for(lambda size=shown + 20: path.stat().st_size >= size)
            shell.press()
            shell.expect(PROMPT)
            said.append(path.read_text()[shown:].removesuffix("\n"))
        shell.press()
        shell.type("\r")  # Python's readline may note the press after the next key only, right behind the prompt
        code, rest = shell.end()
        assert code == 130
        assert re.fullmatch(r"\s+ortolan: \d+ tokens were read: talk\s+ortolan: interrupted\s+", rest)
        model = ortolan.load(endless_dir, device="cpu")
        text = model.tokenizer.decode(model.restore(tmp_path / "talk").state.tokens)
        assert text == f"<user>def f(x):</>\n<assistant>{said[0]}</>\n<user>so</>\n<assistant>{said[1]}"

    def test_an_interrupt_of_reading_takes_the_message_back(self, terminal, chat_model, tmp_path):
        shell = terminal(*SHORT, "--chunk-size", "16", "--log-level", "debug", "--save-session", "talk")
        shell.expect(PROMPT)
        shell.type("def f(x):" * 300 + "\r")
        shell.expect("read 16 tokens, 64 in all")
        shell.press()
        shell.expect(PROMPT)
        shell.type("hi\r")
        shell.expect(PROMPT)
        shell.type("\x04")
        assert shell.end()[0] == 0
        text = chat_model.tokenizer.decode(chat_model.restore(tmp_path / "talk").state.tokens)
        assert text == "<user>hi</>\n<assistant>" + answers_of(chat_model, ["hi"])[0]

    def test_what_goes_wrong_ends_nothing(self, terminal, chat_dir, chat_model):
        (chat_dir / "chat_template.jinja").write_text(REFUSING)
        shell = terminal(*SHORT, "--max-context", "64")
        for line, message in (
            ("bad", "refuses the messages"),
            ("/oops", "is not a command"),
            ("/save /none/a", "is not a folder"),
            ("x" * 100, r"past max_context = 64; send a shorter"),
        ):
            shell.expect(PROMPT)
            shell.type(f"{line}\r")
            shell.expect(message)
        shell.expect(PROMPT)
        shell.type("hi\r")
        answer = answers_of(chat_model, ["hi"])[0].replace("\n", "\r\n")
        assert shell.expect(PROMPT).endswith(f"hi\r\n{answer}\r")
