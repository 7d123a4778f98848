"""The command as a process: help, exit codes, a closed pipe, Ctrl-C."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ortolan.cli import generate as generate_command
from ortolan.cli import main
from ortolan.retrieval import shipped_model

COMMANDS = ("export", "convert", "generate", "chat", "serve", "batch", "inspect", "bench", "demo", "perplexity")


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ortolan", *arguments],
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs deaf to interrupts, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"  ortolan {command}" in capsys.readouterr().out.split("examples:")[1]


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = set(re.findall(r"^ {4}(\w+)", capsys.readouterr().out, re.MULTILINE))
    assert listed == set(COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["fly"], ["generate"], ["inspect", "x", "--context", "many"]])
def test_usage_errors_are_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith("ortolan: error: ")
    assert output.err.count("\n") == 1
    assert "--help" in output.err


def test_process_exit_code_and_streams(tmp_path):
    process = start("inspect", str(tmp_path / "absent"), folder=tmp_path)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("ortolan: error: ")
    assert "Traceback" not in errors


def test_closed_pipe_is_quiet(model_dir, tmp_path):
    process = start("inspect", str(model_dir), folder=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(timeout=60)
    process.stderr.close()
    assert errors == ""
    assert process.returncode == 1


def test_full_disk_behind_standard_output_is_one_line(model_dir, tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ortolan", "inspect", str(model_dir)]
        process = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert process.returncode == 1
    assert process.stderr.startswith("ortolan: error: ")
    assert process.stderr.count("\n") == 1


def test_output_that_the_terminal_cannot_encode_is_replaced(tmp_path):
    command = ["export", str(shipped_model()), "mödel", "--weights", "random", "--max-context", "64"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run(
        [sys.executable, "-m", "ortolan", *command], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, b"m?del\n", b"")


def test_a_closed_standard_input_is_an_empty_prompt(model_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", str(model_dir)]) == 2
    assert "prompt is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_output_is_no_error(name, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, name, None)
    assert main(["inspect", str(model_dir)]) == 0
    assert main(["inspect", str(tmp_path)]) == 2


def test_no_file_takes_the_place_of_a_closed_standard_error(model_dir, tmp_path):
    command = [sys.executable, "-m", "ortolan", "generate", str(model_dir), "--prompt", "def ", "--max-new-tokens", "2"]
    closed = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), text=True, timeout=60
    )
    assert (closed.returncode, len(closed.stdout)) == (0, 3)


def test_a_failure_behind_closed_output_is_one_line(monkeypatch, capsys):
    def broken(_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(generate_command, "run", broken)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "ortolan: error: [Errno 5] broken\n"


def test_interrupt_ends_with_130(model_dir, tmp_path):
    process = start("generate", str(model_dir), "--prompt", "def ", "--max-new-tokens", "4000", folder=tmp_path)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "ortolan: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_cleans_up(monkeypatch, number):
    unwound = []

    def killed(options: object) -> int:
        try:
            signal.raise_signal(number)
        finally:
            unwound.append(options)
        return 0

    monkeypatch.setattr(generate_command, "run", killed)
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "x"])
    assert (stopped.value.code, len(unwound)) == (128 + number, 1)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_an_interrupt_while_libraries_load_is_one_line(model_dir, tmp_path):
    program = f"""
import signal, sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "numpy._core._multiarray_umath":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
from ortolan.cli import main
sys.exit(main(["generate", {str(model_dir)!r}, "--prompt", "def "]))"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "ortolan: interrupted\n")


def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    monkeypatch.setattr(generate_command, "run", lambda _: signal.raise_signal(signal.SIGHUP) or 0)
    try:
        assert main(["generate", "x"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_unexpected_errors_are_not_swallowed(monkeypatch):
    def broken(options: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(generate_command, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "x"])
