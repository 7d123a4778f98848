"""Log-probabilities, in the form of completions and in that of chats, are the engine's."""

import shutil

import pytest
from served import NAME, load, make_folder, serving_engine
from word_tokenizer import write_word_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A server of a model whose tokens are words, which have a space before them unless they begin the text."""
    folder = shutil.copytree(make_folder(), tmp_path_factory.mktemp("words") / "model", symlinks=True)
    (folder / "tokenizer.json").unlink()
    write_word_tokenizer(folder, 256)
    with serving_engine(load(folder)) as served:
        yield served


def streamed(parts):
    """Return the text, and the lists of logprobs joined."""
    parts = [part.choices[0] for part in parts]
    joined = {}
    for part in parts:
        assert part.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined[name] = joined.get(name, []) + getattr(part.logprobs, name)
    return "".join(part.text for part in parts), joined


def test_completions(server, client, model):
    ids = model.tokenizer.encode("abc")
    answer = client.completions.create(model=NAME, prompt="abc", max_tokens=20, logprobs=3)
    stream = server.engine.submit(ids, 20, logprobs=3)
    tokens = stream.result()
    given = answer.choices[0].logprobs
    assert given.tokens == [model.tokenizer.decode(token) for token in tokens]
    assert given.token_logprobs == pytest.approx([each.logprob for each in stream.logprobs])
    for described, each in zip(given.top_logprobs, stream.logprobs, strict=True):
        best = {}
        for token, value in each.top:
            best.setdefault(model.tokenizer.decode(token), value)
        assert described == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_streams_of_completions(client, seed):
    options = {"model": NAME, "prompt": "abc", "max_tokens": 50, "logprobs": 2, "temperature": 30.0, "seed": seed}
    whole = client.completions.create(**options).choices[0]
    text, joined = streamed(client.completions.create(**options, stream=True))
    assert text == whole.text
    assert joined == whole.logprobs.model_dump(include=set(joined))


def test_offsets_where_characters_span_tokens(client):
    """Tokens of one character begin where it begins."""
    options = {"temperature": 30.0, "seed": 5, "ignore_eos": True}
    answer = client.completions.create(
        model=NAME, prompt="abc", max_tokens=200, logprobs=0, extra_body=options
    ).choices[0]
    given, text = answer.logprobs, answer.text
    ends = [*given.text_offset[1:], len(text)]
    assert given.text_offset[0] == 0
    assert ends == sorted(ends)
    for token, begin, end in zip(given.tokens, given.text_offset, ends, strict=True):
        assert token == "\ufffd" or text[begin:end].endswith(token)


def test_words_keep_their_spaces(words):
    given = words.client().completions.create(model=NAME, prompt="w5 w7", max_tokens=20, logprobs=2).choices[0]
    assert all(token.startswith(" w") for token in given.logprobs.tokens)
    assert "".join(given.logprobs.tokens) == given.text
    starts = [sum(map(len, given.logprobs.tokens[:i])) for i in range(20)]
    assert given.logprobs.text_offset == starts
    for token, top in zip(given.logprobs.tokens, given.logprobs.top_logprobs, strict=True):
        assert len(top) == 2
        assert max(top, key=top.get) == token


def test_chats(server, client, model):
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 15, "logprobs": True, "top_logprobs": 2}
    given = client.chat.completions.create(**options).choices[0].logprobs.content
    stream = server.engine.submit(model.tokenizer.apply_chat_template(MESSAGES), 15, logprobs=2)
    stream.result()
    for described, each in zip(given, stream.logprobs, strict=True):
        pairs = [(each.token, each.logprob), *each.top]
        for entry, (token, value) in zip([described, *described.top_logprobs], pairs, strict=True):
            text = model.tokenizer.decode(token)
            assert (entry.token, entry.logprob) == (text, pytest.approx(value))
            assert entry.bytes == (None if text == "\ufffd" else list(text.encode()))
    told = [part.choices[0].logprobs for part in client.chat.completions.create(**options, stream=True)]
    assert [each for logprobs in told if logprobs is not None for each in logprobs.content] == given


def test_chats_without_alternatives(client):
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 3}
    given = client.chat.completions.create(**options, logprobs=True).choices[0].logprobs.content
    assert [each.top_logprobs for each in given] == [[], [], []]
    assert client.chat.completions.create(**options, logprobs=False).choices[0].logprobs is None
