import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import ortolan
from ortolan.cli import main
from ortolan.cli.engines import read_bytes
from ortolan.errors import EngineClosedError, NumericError
from ortolan.serving import batch

PROMPTS = {f"id {i}": "def run(self, " + "x" * i for i in range(7)}
SMALL = ["--device", "cpu", "--max-sequences", "3", "--max-cache-bytes", "64MiB"]


def request(custom_id, body, url="/v1/completions", **more):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


def written(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def requests(tmp_path):
    lines = [request(name, {"prompt": prompt, "max_tokens": 9}) for name, prompt in PROMPTS.items()]
    return written(tmp_path / "requests.jsonl", lines)


def run(paged_dir, requests, *options):
    return main(["batch", str(paged_dir), str(requests), str(requests.parent / "results.jsonl"), *SMALL, *options])


def read_results(requests):
    lines = (requests.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = {result["custom_id"]: result for result in map(json.loads, lines)}
    assert len(results) == len(lines)
    return results


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_request_gets_the_text_of_a_session(paged_dir, requests, capsys):
    assert run(paged_dir, requests) == 0
    assert capsys.readouterr() == ("", "")
    model, results = ortolan.load(paged_dir, device="cpu"), read_results(requests)
    assert set(results) == set(PROMPTS)
    for name, prompt in PROMPTS.items():
        response = results[name]["response"]
        assert (response["status_code"], results[name]["error"]) == (200, None)
        assert response["body"]["choices"][0]["text"] == "".join(model.stream(prompt, max_new_tokens=9))
        assert response["body"]["usage"]["completion_tokens"] == 9
    assert len({result["id"] for result in results.values()}) == len(PROMPTS)
    assert names(requests.parent) == ["requests.jsonl", "results.jsonl"]


def test_drafts_and_kept_prefixes_change_no_text(paged_dir, requests, tmp_path):
    assert run(paged_dir, requests) == 0
    plain = {name: result["response"]["body"]["choices"] for name, result in read_results(requests).items()}
    options = ["--speculate", "lookup", "--host-cache-bytes", "8MiB", "--disk-cache", str(tmp_path / "prefixes")]
    for _ in range(2):
        assert run(paged_dir, requests, "--overwrite", *options) == 0
        results = read_results(requests)
        assert {name: result["response"]["body"]["choices"] for name, result in results.items()} == plain


def test_a_drafter_that_the_model_cannot_have_is_refused(paged_dir, requests, refused):
    command = ["batch", str(paged_dir), str(requests), str(requests.parent / "results.jsonl"), *SMALL]
    assert "draft head" in refused(*command, "--speculate", "mtp")
    assert "--speculate-tokens needs" in refused(*command, "--speculate-tokens", "3")
    assert names(requests.parent) == ["requests.jsonl"]


def test_what_one_request_asks_for_wrongly_is_its_own_result(paged_dir, tmp_path, capsys):
    lines = [
        request("right", {"prompt": "def ", "max_tokens": 3}),
        request("streamed", {"prompt": "def ", "stream": True}),
        request("misspelt", {"prompt": "def ", "max_token": 3}),
        request("other model", {"prompt": "def ", "model": "gpt"}),
        request("too long", {"prompt": "x" * 5000}),
        request("chat", {"messages": [{"role": "user", "content": "Hi"}]}, "/v1/chat/completions"),
    ]
    requests = written(tmp_path / "requests.jsonl", [*lines, "", "  "])
    assert run(paged_dir, requests) == 1
    assert "5 of 6 requests have no answer" in capsys.readouterr().err
    results = read_results(requests)
    statuses = {name: result["response"]["status_code"] for name, result in results.items()}
    others = dict.fromkeys(("streamed", "misspelt", "too long", "chat"), 400)
    assert statuses == {"right": 200, "other model": 404, **others}
    assert "'max_token'" in results["misspelt"]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "the body is not JSON"),
        ("[]", "must be a JSON object"),
        (request(None, {}), "custom_id must be a text"),
        (request("", {}), "custom_id must be a text"),
        (request("id 0", {}), "custom_id 'id 0' is that of an earlier line"),
        (request("a", {}, "/v1/embeddings"), "url is '/v1/embeddings'; allowed: /v1/completions, /v1/chat/completions"),
        (request("a", {}, method="GET"), "method is 'GET'; it must be POST"),
        (request("a", []), "body must be an object"),
        (request("a", {}, extra=1), "there is no field 'extra'"),
    ],
)
def test_a_line_that_is_not_a_request_is_refused_by_its_number(line, problem, requests, tmp_path, refused):
    with requests.open("a") as file:
        file.write("\n" + line + "\n")
    message = refused("batch", str(tmp_path / "no model"), str(requests), str(tmp_path / "results.jsonl"))
    assert f"requests.jsonl, line {len(PROMPTS) + 2}: " in message
    assert problem in message
    assert names(tmp_path) == ["requests.jsonl"]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe", None])
def test_a_file_without_requests_is_refused(content, tmp_path, refused):
    if content is not None:
        (tmp_path / "in").write_bytes(content)
    message = refused("batch", "no model", str(tmp_path / "in"), str(tmp_path / "out"))
    assert "has no requests" in message or "cannot be read" in message
    assert str(tmp_path / "in") in message


def test_results_are_not_overwritten_unasked(paged_dir, requests, refused):
    (requests.parent / "results.jsonl").write_text("mine")
    message = refused("batch", str(paged_dir), str(requests), str(requests.parent / "results.jsonl"), *SMALL)
    assert "--overwrite" in message
    assert (requests.parent / "results.jsonl").read_text() == "mine"
    assert run(paged_dir, requests, "--overwrite") == 0
    assert len(read_results(requests)) == len(PROMPTS)


@pytest.mark.parametrize("end", ["", '{"custom_id": "id 5", "respo', "{}\n"])
def test_a_batch_goes_on_where_it_was_left(end, paged_dir, requests, monkeypatch, capsys):
    add, lost = batch.Results.add, []

    def interrupted_at_the_fourth(results, line, *result):
        if len(results.statuses) < 3:
            add(results, line, *result)
            return
        lost.append(line)
        if len(lost) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(batch.Results, "add", interrupted_at_the_fourth)
    assert run(paged_dir, requests) == 130
    assert capsys.readouterr().err == "ortolan: interrupted\n"
    (part,) = requests.parent.glob(".results.jsonl.*.part")
    before = part.read_text().splitlines()
    assert len(before) == 3
    with part.open("a") as file:
        file.write(end)  # as a process that is killed leaves it
    monkeypatch.setattr(batch.Results, "add", add)
    assert run(paged_dir, requests) == 0
    assert capsys.readouterr().err == "ortolan: 3 requests were answered before\n"
    assert (requests.parent / "results.jsonl").read_text().splitlines()[:3] == before
    assert set(read_results(requests)) == set(PROMPTS)
    assert names(requests.parent) == ["requests.jsonl", "results.jsonl"]


def test_another_file_of_requests_begins_anew(paged_dir, requests, monkeypatch):
    monkeypatch.setattr(batch, "answer_lines", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(batch.Results, "finish", lambda _: None)
    assert run(paged_dir, requests) == 0
    monkeypatch.undo()
    with requests.open("a") as file:
        file.write(request("one more", {"prompt": "def ", "max_tokens": 2}))
    assert run(paged_dir, requests) == 0
    assert set(read_results(requests)) == {*PROMPTS, "one more"}


def test_a_full_disk_is_one_line_and_keeps_what_there_is(paged_dir, requests, monkeypatch, capsys):
    class Full:
        def __init__(self, file):
            self.file, self.left = file, 2

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

    start = batch.Results.__init__

    def on_a_full_disk(results, *arguments):
        start(results, *arguments)
        results._file = Full(results._file)

    monkeypatch.setattr(batch.Results, "__init__", on_a_full_disk)
    assert run(paged_dir, requests) == 1
    error = capsys.readouterr().err
    assert "cannot be written: No space left on device" in error
    assert error.count("\n") == 1
    monkeypatch.undo()
    assert run(paged_dir, requests) == 0
    assert "2 requests were answered before" in capsys.readouterr().err
    assert set(read_results(requests)) == set(PROMPTS)


def test_a_failure_of_one_request_is_its_result(paged_dir, requests, monkeypatch, capsys):
    submit = ortolan.Engine.submit

    def broken(engine, token_ids, **options):
        if len(token_ids) == len(PROMPTS["id 3"]):
            raise NumericError("logits contain NaN")
        return submit(engine, token_ids, **options)

    monkeypatch.setattr(ortolan.Engine, "submit", broken)
    assert run(paged_dir, requests) == 1
    statuses = {name: result["response"]["status_code"] for name, result in read_results(requests).items()}
    assert statuses == dict.fromkeys(PROMPTS, 200) | {"id 3": 500}


def test_a_failure_of_the_engine_ends_the_batch(paged_dir, requests, monkeypatch, capsys):
    def broken(*_, **__):
        raise EngineClosedError("the engine failed: out of memory")

    monkeypatch.setattr(ortolan.Engine, "submit", broken)
    assert run(paged_dir, requests) == 1
    assert capsys.readouterr().err == "ortolan: error: the engine failed: out of memory\n"
    assert not (requests.parent / "results.jsonl").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_answered(number, code, paged_dir, tmp_path):
    lines = [request(str(i), {"prompt": "def f():", "max_tokens": 400}) for i in range(200)]
    requests = written(tmp_path / "requests.jsonl", lines)
    command = [sys.executable, "-m", "ortolan", "batch", str(paged_dir), str(requests), str(tmp_path / "results.jsonl")]
    process = subprocess.Popen([*command, *SMALL], stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob(".results.jsonl.*.part")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    error = process.communicate(timeout=30)[1]
    assert process.returncode == code
    assert "Traceback" not in error
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize(("text", "count"), [("5", 5), ("2GiB", 2**31), ("1.5MiB", 3 * 2**19), ("8KiB", 8192)])
def test_bytes_have_units(text, count):
    assert read_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "2GB", "infGiB", "many"])
def test_other_bytes_are_refused(text, refused):
    assert "is not a number of bytes" in refused("batch", "m", "in", "out", "--max-cache-bytes", text)


def test_an_unpaged_model_is_refused(model_dir, requests, refused):
    message = refused("batch", str(model_dir), str(requests), str(requests.parent / "results.jsonl"), *SMALL)
    assert "paged" in message
    assert names(requests.parent) == ["requests.jsonl"]
