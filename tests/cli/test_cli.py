"""The command line: output where it belongs, one clear line for every error, and exit codes."""

import json
import subprocess
import sys

import pytest
from byte_tokenizer import write_byte_tokenizer
from families import tiny_checkpoint

import ortolan
from ortolan.__main__ import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    checkpoint = tiny_checkpoint("gemma3", root / "hf", vocab_size=256, eos_token_id=0)
    write_byte_tokenizer(checkpoint)
    model = root / "model"
    assert main(["export", str(checkpoint), str(model), "--max-context", "256", "--chunk-size", "32"]) == 0
    return checkpoint, model


def run(arguments, capsys):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", [[], ["export"], ["generate"], ["inspect"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage: ortolan" in capsys.readouterr().out


def test_generate_prints_the_text_alone(folders, capsys, tmp_path):
    _, folder = folders
    stats = tmp_path / "stats.json"
    arguments = [
        "generate",
        folder,
        "--prompt",
        "hello there " * 12,
        "--max-new-tokens",
        12,
        "--stats-json",
        stats,
    ]
    code, out, err = run([*arguments, "--snapkv-budget", 64, "--snapkv-window", 16, "--device", "cpu"], capsys)
    assert code == 0, err
    model = ortolan.load(folder, device="cpu")
    session = model.session(snapkv=ortolan.SnapKv(budget=64, window=16))
    tokens = list(session.generate(model.tokenizer.encode("hello there " * 12), 12))
    assert out == model.tokenizer.decode(tokens) + "\n"
    written = json.loads(stats.read_text())
    assert written["prefill_tokens"] == 144
    assert written["evictions"] == 1
    assert written["cache_bytes"] < written["full_length_cache_bytes"]


def test_prompts_come_from_files_and_standard_input(folders, capsys, tmp_path, monkeypatch):
    _, folder = folders
    file = tmp_path / "prompt.txt"
    file.write_text("abc")
    _, from_file, _ = run(["generate", folder, "--prompt-file", file, "--max-new-tokens", 5], capsys)
    result = subprocess.run(
        [sys.executable, "-m", "ortolan", "generate", str(folder), "--max-new-tokens", "5"],
        input="abc",
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert result.stdout == from_file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-file", "/nonexistent"], "cannot be read"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--snapkv-window", "8"], "--snapkv-budget"),
        (["--prompt", "x", "--snapkv-budget", "8"], "budget 8"),
        (["--prompt", "x", "--max-context", "9999"], "max_context 9999"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--prompt", "x", "--device", "tpu"], "tpu"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(folders, capsys, arguments, message):
    code, out, err = run(["generate", folders[1], *arguments], capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_other_failures_exit_1(folders, capsys):
    assert run(["generate", folders[1], "--prompt", "x" * 300], capsys)[0] == 1
    assert run(["generate", folders[1], "--prompt", "x", "--device", "cuda"], capsys)[0] == 1


def test_a_checkpoint_is_no_model_folder(folders, capsys):
    code, _, err = run(["generate", folders[0], "--prompt", "x"], capsys)
    assert code == 2
    assert "run `ortolan export`" in err


def test_export_refuses_and_writes_nothing(folders, capsys, tmp_path):
    code, _, err = run(["export", folders[0], tmp_path / "m", "--dtype", "int4"], capsys)
    assert code == 2
    assert "allowed: float32, float16, bfloat16" in err
    assert list(tmp_path.iterdir()) == []


def test_inspect_shows_caches_and_needs_no_weights(folders, capsys, tmp_path):
    for name in ("model.onnx", "ortolan.json"):
        (tmp_path / name).write_bytes((folders[1] / name).read_bytes())
    code, out, _ = run(["inspect", tmp_path, "--context", "128", "256"], capsys)
    assert code == 0
    assert "RingKvAppend, SnapKvCapture, SwaAttention" in out
    assert "graph: ok" in out
    code, out, _ = run(["inspect", tmp_path, "--context", "256", "--json"], capsys)
    described = json.loads(out)
    assert [x["kind"] for x in described["plans"][0]["layers"]] == ["ring", "full", "ring", "ring"]
    assert described["plans"][0]["bytes"] < described["plans"][0]["full_length_bytes"]


def test_inspect_refuses_a_broken_graph(folders, capsys, tmp_path):
    (tmp_path / "ortolan.json").write_bytes((folders[1] / "ortolan.json").read_bytes())
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    code, _, err = run(["inspect", tmp_path], capsys)
    assert code == 2
    assert "cannot be read as an ONNX model" in err
