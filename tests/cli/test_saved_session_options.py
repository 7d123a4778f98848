"""`ortolan generate --save-session` and `--load-session`."""

import io
import sys

import pytest
from byte_tokenizer import write_byte_tokenizer
from unreadable import make_unwritable

import ortolan
from ortolan.cli import main
from ortolan.cli.prompts import chat_turn
from ortolan.runtime.saved import file as session_file
from ortolan.runtime.text.tokenizer import Tokenizer

PROMPT = "def first(values):\n"


@pytest.fixture
def run(model_dir, capsys):
    """Run the command; returns its standard output without the last line's end."""

    def generate(*arguments: str) -> str:
        assert main(["generate", str(model_dir), *arguments]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        return output.out.removesuffix("\n")

    return generate


@pytest.fixture
def refuse(model_dir, capsys):
    """Run the command, which must fail; returns its exit code and its one line."""

    def generate(*arguments: str) -> tuple[int, str]:
        try:
            code = main(["generate", str(model_dir), *arguments])
        except SystemExit as stopped:
            code = stopped.code
        output = capsys.readouterr()
        assert output.err.startswith("ortolan: error: ")
        assert output.err.count("\n") == 1
        return code, output.err

    return generate


@pytest.fixture
def saved(run, tmp_path):
    run("--prompt", PROMPT, "--max-new-tokens", "5", "--save-session", str(tmp_path / "a"))
    return str(tmp_path / "a")


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1.3", "--seed", "5"]])
def test_a_text_is_resumed(run, tmp_path, sampling):
    whole = run("--prompt", PROMPT, *sampling, "--max-new-tokens", "30")
    path = str(tmp_path / "chat")
    pieces = [run("--prompt", PROMPT, *sampling, "--max-new-tokens", "9", "--save-session", path)]
    for count in ("4", "17"):
        pieces.append(run("--load-session", path, "--prompt", "", "--max-new-tokens", count, "--save-session", path))
    assert "".join(pieces) == whole
    assert len(whole) > 10


@pytest.mark.parametrize("cut", [1, 5, 9, 10, 11])
def test_a_resumed_text_ends_at_its_own_stop(run, refuse, tmp_path, cut):
    """A token is a byte here; what was shown of a stop before it was whole cannot be taken back."""
    path, begin = str(tmp_path / "chat"), 9
    whole = run("--prompt", PROMPT, "--max-new-tokens", "30")
    stop = whole[begin : begin + 3]
    assert whole.index(stop) == begin
    first = run("--prompt", PROMPT, "--stop", stop, "--max-new-tokens", str(cut), "--save-session", path)
    assert first == whole[:cut]
    rest = run("--load-session", path, "--prompt", "", "--max-new-tokens", "30", "--save-session", path)
    assert first + rest == whole[: max(begin, cut)]
    code, line = refuse("--load-session", path, "--prompt", "")
    assert code == 2
    assert "no generation can be resumed" in line


def test_a_stop_that_was_read_is_not_in_the_saved_session(run, model_dir, tmp_path):
    """Its last token was chosen, and is not fed."""
    path = str(tmp_path / "chat")
    text = run("--prompt", PROMPT, "--stop", "\n", "--max-new-tokens", "30", "--save-session", path)
    model = ortolan.load(model_dir, device="cpu")
    state = model.restore(path).state
    assert model.tokenizer.decode(state.tokens) == PROMPT + text


def test_the_next_turn_follows_the_first(run, model_dir, prompt_file, sample, tmp_path):
    path = str(tmp_path / "chat")
    options = ["--snapkv-budget", "256", "--max-new-tokens", "8", "--stop", "\n"]
    assert run("--prompt-file", str(prompt_file), *options, "--save-session", path) == sample.answer
    said = run("--load-session", path, "--prompt", "\nx = ", "--max-new-tokens", "12")

    model = ortolan.load(model_dir, device="cpu")
    session = model.restore(path)
    assert {256} == {
        len(kept[0]) for layer in range(len(session.plan.layers)) if (kept := session.kept_positions(layer)) is not None
    }
    tokens = list(session.generate(model.tokenizer.encode("\nx = ", add_special_tokens=False), 12))
    assert model.tokenizer.decode(tokens) == said


def test_a_prompt_is_only_read(run, model_dir, sample, tmp_path):
    """The session is that of a prefill: nothing waits to be fed, and no generation goes on."""
    path = str(tmp_path / "read")
    assert run("--prompt", sample.prompt, "--max-new-tokens", "0", "--save-session", path) == ""
    model = ortolan.load(model_dir, device="cpu")
    session = model.restore(path)
    assert session.state.tokens == session.state.history == model.tokenizer.encode(sample.prompt)
    assert run("--load-session", path, "--prompt", "\n", "--max-new-tokens", "9") == "".join(
        model.stream(sample.prompt + "\n", max_new_tokens=9)
    )


def test_reading_alone_needs_a_session_to_save(refuse):
    code, line = refuse("--prompt", PROMPT, "--max-new-tokens", "0")
    assert code == 2
    assert "add --save-session FILE" in line


@pytest.mark.parametrize("eviction", [["--snapkv-budget", "256"], ["--evict", "expected", "--budget", "256"]])
def test_a_question_evicts_behind_itself(run, model_dir, prompt_file, tmp_path, eviction):
    """The text was read without an eviction, so each question may have its own."""
    path, question = str(tmp_path / "read"), "\nx = "
    run("--prompt-file", str(prompt_file), "--max-new-tokens", "0", "--save-session", path)
    said = run("--load-session", path, "--prompt", question, "--max-new-tokens", "12", *eviction)
    model = ortolan.load(model_dir, device="cpu")
    policy = "snapkv" if eviction[0] == "--snapkv-budget" else "expected"
    session = model.restore(path, eviction=ortolan.Eviction(policy=policy, budget=256))
    tokens = list(session.generate(model.tokenizer.encode(question, add_special_tokens=False), 12))
    assert model.tokenizer.decode(tokens) == said
    assert session.stats.evictions == 1


def test_an_empty_standard_input_resumes(run, saved, monkeypatch):
    expected = run("--load-session", saved, "--prompt", "", "--max-new-tokens", "6")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("--load-session", saved, "--max-new-tokens", "6") == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-context", "8"], "max_context"),
        (["--prompt", "", "--temperature", "1"], "own sampling"),
        (["--chat"], "chat template"),
        (["--prompt", "", "--stop", "x"], "own sampling and stops"),
        (["--prompt", "", "--chat"], "--chat"),
    ],
)
def test_options_that_a_saved_session_has_itself(refuse, saved, arguments, named):
    prompt = [] if "--prompt" in arguments else ["--prompt", "x"]
    code, line = refuse("--load-session", saved, *prompt, *arguments)
    assert code == 2
    assert named in line


@pytest.mark.parametrize("damage", ["missing", "folder", "truncated", "altered", "text"])
def test_a_damaged_file_is_one_line(refuse, saved, tmp_path, damage):
    path = tmp_path / "damaged"
    content = bytearray((tmp_path / "a").read_bytes())
    if damage == "folder":
        path.mkdir()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "altered":
        content[-1000] ^= 4
        path.write_bytes(content)
    elif damage == "text":
        path.write_text("hello")
    code, line = refuse("--load-session", str(path), "--prompt", "x")
    assert code == 2
    assert str(path) in line


def test_another_model_is_one_line(refuse, tmp_path, capsys):
    from families import tiny_checkpoint

    folder = ortolan.export(tiny_checkpoint("llama", tmp_path / "hf"), tmp_path / "model", max_context=64)
    ortolan.load(folder, device="cpu").session().save(tmp_path / "other")
    capsys.readouterr()
    code, line = refuse("--load-session", str(tmp_path / "other"), "--prompt", "x")
    assert code == 2
    assert "another model" in line


@pytest.mark.parametrize("name", ["no/such/folder", ""])
def test_a_bad_name_is_found_before_the_work(refuse, tmp_path, monkeypatch, name):
    monkeypatch.setattr(ortolan, "load", lambda *_, **__: pytest.fail("loaded a model"))
    code, line = refuse("--prompt", "x", "--save-session", str(tmp_path / name))
    assert code == 2
    assert str(tmp_path) in line


def test_a_folder_that_takes_no_files_is_found_before_the_work(refuse, tmp_path, monkeypatch):
    monkeypatch.setattr(ortolan, "load", lambda *_, **__: pytest.fail("loaded a model"))
    make_unwritable(tmp_path, monkeypatch)
    code, line = refuse("--prompt", "x", "--save-session", str(tmp_path / "a"))
    assert code == 2
    assert f"{tmp_path} may not be written" in line


def test_a_link_out_of_a_folder_that_takes_no_files_is_written_through(run, tmp_path, monkeypatch):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a").symlink_to(tmp_path / "a")
    make_unwritable(tmp_path / "links", monkeypatch)
    run("--prompt", PROMPT, "--max-new-tokens", "2", "--save-session", str(tmp_path / "links" / "a"))
    assert (tmp_path / "a").is_file()


@pytest.mark.parametrize("option", ["--save-session", "--load-session"])
def test_statistics_do_not_replace_a_session(refuse, saved, tmp_path, option):
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "link").symlink_to("a")
    code, line = refuse("--prompt", "x", option, saved, "--stats-json", str(tmp_path / "link"))
    assert code == 2
    assert option in line
    assert (tmp_path / "a").read_bytes() == content


def test_a_full_disk_fails_behind_the_text(model_dir, capsys, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_file.os, "fsync", full)
    options = ["--prompt", PROMPT, "--max-new-tokens", "5", "--save-session", str(tmp_path / "a")]
    assert main(["generate", str(model_dir), *options]) == 1
    output = capsys.readouterr()
    assert output.out.endswith("\n")
    assert output.err.startswith("ortolan: error: ")
    assert "No space left" in output.err
    assert list(tmp_path.iterdir()) == []


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "^"}')
    return Tokenizer(tmp_path)


def test_turns_of_a_chat_join_to_the_conversation(chat_tokenizer):
    first, second = (
        chat_tokenizer.decode(chat_turn(chat_tokenizer, text, is_first=n == 0))
        for n, text in enumerate(["Hi.", "Why?"])
    )
    messages = [("user", "Hi."), ("assistant", "So."), ("user", "Why?")]
    conversation = [{"role": role, "content": content} for role, content in messages]
    assert first + "So." + second == chat_tokenizer.apply_chat_template(conversation, tokenize=False)


def test_a_template_that_rewrites_answers_is_refused(chat_tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ortolan.errors.ConfigError, match="rewrites answers"):
        chat_turn(Tokenizer(tmp_path), "x", is_first=False)
