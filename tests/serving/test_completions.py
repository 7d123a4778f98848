"""Completions are what the engine and sessions give for the same ids."""

import openai
import pytest
from served import MAX_CONTEXT, NAME

import ortolan
from ortolan import Eviction, Sampling

PROMPT = "def first(values):"
TEXTS = ["one", "über €", "x" * 100]


def text_of(model, ids, max_new_tokens=16, **options):
    return "".join(model.session().stream_text(ids, max_new_tokens=max_new_tokens, **options))


def create(client, prompt=PROMPT, **options):
    return client.completions.create(model=NAME, prompt=prompt, **options)


def test_a_text_is_that_of_a_session(client, model):
    answer = create(client)
    (choice,) = answer.choices
    ids = model.tokenizer.encode(PROMPT)
    assert choice.text == text_of(model, ids)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", NAME, "cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), 16, len(ids) + 16)


def test_choices_have_seeds_one_after_another(client, model):
    answer = create(client, n=3, seed=5, temperature=1.5, top_p=0.9, max_tokens=20, extra_body={"top_k": 50})
    ids = model.tokenizer.encode(PROMPT)
    expected = [
        text_of(model, ids, 20, sampling=Sampling(temperature=1.5, top_p=0.9, top_k=50, seed=5 + i)) for i in range(3)
    ]
    assert len(set(expected)) == 3
    assert [(each.index, each.text) for each in answer.choices] == list(enumerate(expected))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 60)


def test_other_ways_to_sample(client, model):
    answer = create(client, seed=3, temperature=2.0, extra_body={"min_p": 0.1, "repetition_penalty": 1.3, "top_k": -1})
    sampling = Sampling(temperature=2.0, seed=3, min_p=0.1, repetition_penalty=1.3)
    assert answer.choices[0].text == text_of(model, model.tokenizer.encode(PROMPT), sampling=sampling)


@pytest.mark.parametrize("as_ids", [False, True])
def test_each_prompt_of_a_list_has_its_choices(client, model, as_ids):
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    answer = create(client, ids if as_ids else TEXTS, n=2, seed=1, temperature=1.0, max_tokens=9)
    expected = [
        text_of(model, prompt, 9, sampling=Sampling(temperature=1.0, seed=seed)) for prompt in ids for seed in (1, 2)
    ]
    assert [each.text for each in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == 54


def test_a_prompt_of_token_ids(client, model):
    ids = [7, 9, 11, 200]
    assert create(client, ids).choices[0].text == text_of(model, ids)
    assert create(client, [ids]).choices[0].text == text_of(model, ids)


def test_echo(client, model):
    assert create(client, echo=True).choices[0].text == PROMPT + text_of(model, model.tokenizer.encode(PROMPT))
    parts = [part.choices[0] for part in create(client, TEXTS, echo=True, stream=True)]
    for index, text in enumerate(TEXTS):
        shown = "".join(part.text for part in parts if part.index == index)
        assert shown == text + text_of(model, model.tokenizer.encode(text))


def test_stops(client, model):
    ids = model.tokenizer.encode(PROMPT)
    tokens = list(model.session().generate(ids, 40))
    text = text_of(model, ids, 40)
    stop = next(text[i : i + 3] for i in range(6, 30) if text.find(text[i : i + 3]) == i)
    answer = create(client, stop=["never there", stop], max_tokens=40)
    assert answer.choices[0].text == text_of(model, ids, 40, stop=["never there", stop]) == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert create(client, stop=stop, max_tokens=40).choices[0].text == text[: text.index(stop)]
    token = next(token for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    answer = create(client, max_tokens=40, extra_body={"stop_token_ids": [token]})
    assert answer.choices[0].text == text_of(model, ids, 40, stop=[token])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == tokens.index(token)


@pytest.fixture
def ending(model):
    """The prompt, temperature and seed of an answer that an end token ends early."""
    (eos,) = model.manifest.eos_token_ids
    for seed in range(200):
        sampling = Sampling(temperature=3.0, seed=seed)
        tokens = list(model.session().generate([5, 6], 40, sampling))
        if 3 < len(tokens) < 30:
            assert eos not in tokens
            return {"prompt": [5, 6], "temperature": 3.0, "seed": seed}, tokens
    raise AssertionError


def test_an_end_token(client, ending):
    options, tokens = ending
    answer = create(client, max_tokens=40, **options)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", len(tokens))
    answer = create(client, max_tokens=40, extra_body={"ignore_eos": True}, **options)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 40)


def test_the_end_of_the_context(client):
    answer = create(client, [5] * (MAX_CONTEXT - 3), max_tokens=40)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, [5] * (MAX_CONTEXT + 1))
    assert refused.value.code == "context_length_exceeded"


def test_eviction(client, server, model):
    ids = [i % 200 for i in range(300)]
    given = {"policy": "snapkv", "budget": 40, "window": 8}
    before = server.engine.stats().evictions
    answer = create(client, ids, max_tokens=24, extra_body={"eviction": given})
    assert server.engine.stats().evictions == before + 1
    expected = list(server.engine.submit(ids, 24, eviction=Eviction(**given)))
    assert answer.choices[0].text == model.tokenizer.decode(expected)
    assert expected != list(server.engine.submit(ids, 24))


def test_what_a_request_leaves_out_is_as_the_model_recommends(server, client, model, monkeypatch):
    recommended = Sampling(temperature=1.2, top_k=30, repetition_penalty=1.1)
    monkeypatch.setattr(ortolan.Sampling, "from_model", lambda given: recommended if given is model else None)
    ids = model.tokenizer.encode(PROMPT)
    chosen = Sampling(temperature=1.2, top_k=30, repetition_penalty=1.1, seed=4)
    assert create(client, seed=4).choices[0].text == text_of(model, ids, sampling=chosen)
    assert create(client, temperature=0).choices[0].text == text_of(
        model, ids, sampling=Sampling(top_k=30, repetition_penalty=1.1)
    )


def test_fields_that_are_null_or_change_nothing(client, model):
    neutral = {
        "best_of": 1,
        "suffix": None,
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "user": "somebody",
        "stop": None,
        "max_tokens": None,
        "n": None,
        "logprobs": None,
        "seed": None,
    }
    answer = create(client, **neutral)
    assert answer.choices[0].text == text_of(model, model.tokenizer.encode(PROMPT))


def test_models(client, http):
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    assert http.get(f"/v1/models/{NAME}").json()["max_model_len"] == MAX_CONTEXT
