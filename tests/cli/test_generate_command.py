import io
import json
import os
import sys

import pytest
from unreadable import make_unwritable

import ortolan
from ortolan.cli import build_parser, main
from ortolan.cli.eviction import read_eviction
from ortolan.policies import POLICIES
from ortolan.retrieval import shipped_model

SNAPKV = ["--evict", "snapkv", "--evict-option"]
TOKENS = ["--max-new-tokens", "8", "--stop", "\n"]


def test_answer_is_all_that_goes_to_standard_output(model_dir, prompt_file, sample, capsys):
    assert main(["generate", str(model_dir), "--prompt-file", str(prompt_file), *TOKENS]) == 0
    output = capsys.readouterr()
    assert output.out == sample.answer + "\n"
    assert output.err == ""


def test_three_ways_to_give_a_prompt_agree(model_dir, prompt_file, sample, capsys, monkeypatch):
    main(["generate", str(model_dir), "--prompt-file", str(prompt_file), "--max-new-tokens", "6"])
    from_file = capsys.readouterr().out
    main(["generate", str(model_dir), "--prompt", sample.prompt, "--max-new-tokens", "6"])
    from_argument = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(sample.prompt))
    main(["generate", str(model_dir), "--max-new-tokens", "6"])
    from_input = capsys.readouterr().out
    assert len(from_file) > 1
    assert from_file == from_argument == from_input


@pytest.mark.parametrize(
    ("policy", "option"),
    [("snapkv", {"granularity": "layer"}), ("expected", {"queries": 300}), ("streaming", {"during_prefill": True})],
)
def test_command_says_what_the_api_says(model_dir, sample, capsys, policy, option):
    model = ortolan.load(model_dir, device="cpu")
    session = model.session(snapkv=ortolan.Eviction(policy=policy, budget=256, **option))
    expected = model.tokenizer.decode(list(session.generate(model.tokenizer.encode(sample.prompt), 20)))
    ((name, value),) = option.items()
    options = ["--evict", policy, "--budget", "256", "--evict-option", f"{name}={value}", "--max-new-tokens", "20"]
    main(["generate", str(model_dir), "--prompt", sample.prompt, *options])
    assert capsys.readouterr().out == expected + "\n"


def test_a_byte_order_mark_is_no_part_of_a_prompt(model_dir, tmp_path, capsys, monkeypatch):
    def counted(*arguments: str) -> tuple[str, int]:
        options = ["--max-new-tokens", "6", "--stats-json", "-"]
        assert main(["generate", str(model_dir), *arguments, *options]) == 0
        output = capsys.readouterr()
        return output.out, json.loads(output.err)["prefill_tokens"]

    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbfdef first():")
    expected = counted("--prompt", "def first():")
    assert expected[1] == len("def first():")
    assert counted("--prompt-file", str(marked)) == expected
    for stdin in (io.StringIO("\ufeffdef first():"), io.TextIOWrapper(io.BytesIO(marked.read_bytes()), "latin-1")):
        monkeypatch.setattr(sys, "stdin", stdin)  # UTF-8 in any locale
        assert counted() == expected


def test_lines_of_standard_input_end_as_those_of_a_file(model_dir, tmp_path, capsys, monkeypatch):
    file = tmp_path / "windows.txt"
    file.write_bytes(b"def first():\r\n    return 1\r\n")
    texts = []
    for arguments in (["--prompt", file.read_text()], ["--prompt-file", str(file)], []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
        assert main(["generate", str(model_dir), *arguments, "--max-new-tokens", "1", "--stats-json", "-"]) == 0
        output = capsys.readouterr()
        texts.append((output.out, json.loads(output.err)["prefill_tokens"]))
    assert texts == [texts[0]] * 3


def test_standard_input_that_is_not_utf8_is_refused(model_dir, monkeypatch, refused):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve".encode("latin-1")), "latin-1"))
    assert "'utf-8' codec can't decode" in refused("generate", str(model_dir))


def test_a_byte_order_mark_alone_is_an_empty_prompt(model_dir, monkeypatch, refused):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff"))
    assert "prompt is empty" in refused("generate", str(model_dir))


@pytest.mark.parametrize("options", [[], ["--evict", "snapkv", "--budget", "256"]], ids=["whole", "evicted"])
def test_pages_change_no_answer(model_dir, paged_dir, prompt_file, sample, capsys, options):
    texts = []
    for folder in (model_dir, paged_dir):
        arguments = ["--prompt-file", str(prompt_file), "--max-new-tokens", "40", "--stats-json", "-", *options]
        assert main(["generate", str(folder), *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_seed_fixes_the_text(model_dir, capsys):
    def text(seed: str) -> str:
        options = ["--temperature", "1.5", "--seed", seed, "--max-new-tokens", "40"]
        assert main(["generate", str(model_dir), "--prompt", "def ", *options]) == 0
        return capsys.readouterr().out

    assert text("1") == text("1")
    assert text("1") != text("2")


@pytest.mark.parametrize("target", ["file", "-"])
def test_statistics_tell_of_the_eviction(target, model_dir, prompt_file, sample, tmp_path, capsys):
    path = tmp_path / "stats.json"
    options = ["--snapkv-budget", "256", "--stats-json", str(path) if target == "file" else "-"]
    assert main(["generate", str(model_dir), "--prompt-file", str(prompt_file), *TOKENS, *options]) == 0
    output = capsys.readouterr()
    stats = json.loads(path.read_text() if target == "file" else output.err)
    assert output.out == sample.answer + "\n"
    assert stats["prefill_tokens"] == len(sample.prompt)
    assert stats["evictions"] == 1
    assert 0 < stats["cache_bytes"] < stats["full_length_cache_bytes"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--seed", "-1"], "seed"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--max-new-tokens", "-1"], "max_new_tokens is -1; it must be a whole number, at least 1"),
        (
            ["--max-new-tokens", "-1", "--save-session", "a"],
            "max_new_tokens is -1; it must be a whole number, at least 0",
        ),
        (["--max-context", "999999"], "max_context"),
        (["--snapkv-budget", "10"], "budget"),
        (["--snapkv-window", "32"], "--snapkv-window"),
        (["--snapkv-budget", "512", "--evict", "snapkv"], "--evict snapkv --budget N"),
        (["--snapkv-budget", "512", "--budget", "512"], "--evict snapkv --budget N"),
        (["--budget", "512"], "--budget needs --evict POLICY; policies: snapkv, streaming"),
        (["--evict-option", "sink=2"], "--evict-option needs --evict POLICY"),
        (["--evict", "snapvk"], "did you mean 'snapkv'"),
        (["--evict", "snapvk", "--evict-option", "sink=2"], "did you mean 'snapkv'"),
        (["--evict", "snapkv", "--budget", "many"], "--budget: invalid int value: 'many'"),
        ([*SNAPKV, "window"], "'window'; it must be NAME=VALUE"),
        ([*SNAPKV, "=3"], "'=3'; it must be NAME=VALUE"),
        ([*SNAPKV, "kernel=4"], "--evict-option kernel is 4; it must be an odd number"),
        ([*SNAPKV, "kernel=wide"], "--evict-option kernel is 'wide'; it must be a whole number"),
        ([*SNAPKV, "pool=sum"], "--evict-option pool is 'sum'; allowed: avg, max"),
        ([*SNAPKV, "during_prefill=yes"], "--evict-option during_prefill is 'yes'; it must be True or False"),
        ([*SNAPKV, "queries=9"], "'snapkv' does not have option 'queries'"),
        ([*SNAPKV, "kernal=9"], "did you mean 'kernel'"),
        ([*SNAPKV, "budget=9"], "--evict-option budget is not allowed; use --budget"),
        ([*SNAPKV, "policy=adakv"], "--evict-option policy is not allowed; use --evict"),
        ([*SNAPKV, "sink=2", "--evict-option", "sink=3"], "--evict-option sink is given twice"),
        (["--evict", "adakv", "--evict-option", "during_prefill=true"], "during_prefill"),
        (["--device", "tpu"], "tpu"),
        (["--stop", ""], "stop"),
        (["--chat"], "chat template"),
        (["--prompt-file", "x"], "--prompt"),
        (["--stats-json", "/none/stats.json"], "/none"),
        (["--stats-json", "/tmp"], "/tmp"),
        (["--stats-json", ""], "has no name"),
    ],
)
def test_bad_option_is_one_line(arguments, named, model_dir, refused):
    assert named in refused("generate", str(model_dir), "--prompt", "def f():", *arguments)


def test_the_short_form_and_the_long_one_are_one():
    def read(*arguments: str) -> ortolan.Eviction | None:
        return read_eviction(build_parser().parse_args(["generate", "model", *arguments]))

    assert read() is None
    assert read("--snapkv-budget", "300") == read("--evict", "snapkv", "--budget", "300") == ortolan.SnapKv(budget=300)
    options = ["--evict-option", "kernel=7", "--evict-option", "during_prefill=true"]
    expected = ortolan.SnapKv(budget=300, kernel=7, during_prefill=True)
    for form in (["--snapkv-budget", "300"], ["--evict", "snapkv", "--budget", "300"]):
        assert read(*form, *options) == expected
    assert read("--evict", "adakv") == ortolan.Eviction(policy="adakv")


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_help_lists_every_policy_and_what_its_options_may_be(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "pool: pooling along positions (avg | max; default: avg)" in lines
    for policy, cls in POLICIES.items():
        assert f"{policy}: {cls.summary}" in lines
        for name, declared in cls.declared_options().items():
            start = f"{name}: {declared.help} ({declared.allowed}"
            assert name == "budget" or any(line.startswith(start) for line in lines)


def test_an_empty_stop_is_refused_before_the_model_is_opened(tmp_path, refused):
    assert "stop" in refused("generate", str(tmp_path / "none"), "--prompt", "def f():", "--stop", "")


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_report_that_may_not_be_written_is_refused_before_the_work(tmp_path, refused, monkeypatch, what):
    target = tmp_path / "stats.json"
    if what == "file":
        target.touch()
    make_unwritable(tmp_path if what == "folder" else target, monkeypatch)
    assert "may not be written" in refused(
        "generate", str(tmp_path / "none"), "--prompt", "x", "--stats-json", str(target)
    )


def test_a_report_may_go_to_a_device_in_a_folder_that_takes_no_files(model_dir, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev" and access(path, mode))
    options = ["--prompt", "x", "--max-new-tokens", "2", "--stats-json", "/dev/null"]
    assert main(["generate", str(model_dir), *options]) == 0


@pytest.mark.parametrize(("stop", "reason"), [("e", "stop"), ("\0never", "length")])
def test_statistics_tell_why_the_text_ended(stop, reason, model_dir, capsys):
    options = ["--prompt", "def ", "--max-new-tokens", "12", "--stop", stop, "--stats-json", "-"]
    assert main(["generate", str(model_dir), *options]) == 0
    assert json.loads(capsys.readouterr().err)["finish_reason"] == reason


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_prompt_that_is_no_text(prompt, model_dir, capsys):
    assert main(["generate", str(model_dir), "--prompt", prompt]) == 2
    assert "prompt" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_prompt_file_that_cannot_be_read(content, model_dir, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["generate", str(model_dir), "--prompt-file", str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_checkpoint_folder_gets_a_hint_to_export(capsys):
    assert main(["generate", str(shipped_model()), "--prompt", "x"]) == 2
    assert "ortolan export" in capsys.readouterr().err


def test_prompt_longer_than_the_context_is_one_line(model_dir, refused):
    assert "max_context" in refused("generate", str(model_dir), "--prompt", "x" * 65, "--max-context", "64")


def test_a_device_that_is_not_there_is_one_line(model_dir, refused, monkeypatch):
    monkeypatch.setattr("ortolan.runtime.device.providers.cuda_problem", lambda: "no kernels")
    assert "no kernels" in refused("generate", str(model_dir), "--prompt", "x", "--device", "cuda")


@pytest.mark.parametrize("speculate", ["lookup", "folder"])
def test_drafts_change_no_text(model_dir, prompt_file, capsys, speculate):
    arguments = ["generate", str(model_dir), "--prompt-file", str(prompt_file), "--max-new-tokens", "40"]
    drafts = ["--speculate", speculate if speculate == "lookup" else str(model_dir), "--speculate-tokens", "6"]
    assert main(arguments) == 0
    expected = capsys.readouterr().out
    assert main([*arguments, *drafts, "--stats-json", "-"]) == 0
    output = capsys.readouterr()
    assert output.out == expected
    stats = json.loads(output.err)
    assert stats["draft_checks"] > 0
    assert stats["drafted_tokens"] >= stats["accepted_tokens"]


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (["--speculate-tokens", "3"], "--speculate-tokens needs --speculate"),
        (["--speculate", "lookup", "--speculate-tokens", "16"], "PromptLookup tokens is 16"),
        (["--speculate", "nowhere"], "nowhere"),
    ],
)
def test_drafts_that_cannot_be_made_are_refused(model_dir, capsys, drafts, message):
    assert main(["generate", str(model_dir), "--prompt", "a", *drafts]) == 2
    assert message in capsys.readouterr().err


def test_batch_invariant_reaches_the_model(model_dir, tmp_path, sample, capsys):
    model = ortolan.load(model_dir, device="cpu", batch_invariant=True)
    expected = model.tokenizer.decode(list(model.session().generate(model.tokenizer.encode(sample.prompt), 20)))
    options = ["--prompt", sample.prompt, "--max-new-tokens", "20", "--device", "cpu", "--batch-invariant"]
    assert main(["generate", str(model_dir), *options]) == 0
    assert capsys.readouterr().out == expected + "\n"
    folder = tmp_path / "int4"
    ortolan.export(shipped_model(), folder, max_context=512, weight_format="int4")
    assert main(["generate", str(folder), *options, "--plain"]) == 2
    assert "batch_invariant=True cannot be kept on the CPU" in capsys.readouterr().err
