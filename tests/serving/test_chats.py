"""Chats are rendered by the model's template, and answered as the engine answers the ids."""

import pytest
from served import NAME, TEMPLATE, serving

from ortolan import Sampling
from ortolan.serving import Service

USER = {"role": "user", "content": "What is 1 < 2?"}
SYSTEM = {"role": "system", "content": "Be brief: äöü €."}


def expected(model, messages, max_new_tokens=24, sampling=None, **variables):
    ids = model.tokenizer.apply_chat_template(messages, **variables)
    return "".join(model.session().stream_text(ids, max_new_tokens=max_new_tokens, sampling=sampling))


def create(client, messages=(USER,), **options):
    return client.chat.completions.create(model=NAME, messages=list(messages), **options)


def test_a_message_is_the_text_of_a_session(client, model):
    answer = create(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected(model, [USER]))
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", NAME, "chatcmpl-")
    assert answer.usage.prompt_tokens == len(model.tokenizer.apply_chat_template([USER]))
    assert answer.usage.completion_tokens == 24


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_number_of_tokens(client, name):
    assert create(client, **{name: 5}).usage.completion_tokens == 5


def test_all_messages_are_read(client, model):
    messages = [SYSTEM, USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert create(client, messages).choices[0].message.content == expected(model, messages)


def test_contents_of_parts(client, model):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 < 2?"}]
    answer = create(client, [{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == expected(model, [USER])


def test_names_for_the_template(client, model):
    named = {**USER, "name": "Ada"}
    answer = create(client, [named], extra_body={"chat_template_kwargs": {"flavour": "sweet"}})
    assert answer.choices[0].message.content == expected(model, [named], flavour="sweet")
    answer = create(client, reasoning_effort="low")
    assert answer.choices[0].message.content == expected(model, [USER], reasoning_effort="low")
    begun = create(client, extra_body={"chat_template_kwargs": {"add_generation_prompt": False}})
    assert begun.choices[0].message.content == expected(model, [USER], add_generation_prompt=False)


def test_choices_have_seeds_one_after_another(client, model):
    answer = create(client, n=2, seed=7, temperature=1.0, max_tokens=12)
    texts = [expected(model, [USER], 12, Sampling(temperature=1.0, seed=seed)) for seed in (7, 8)]
    assert [each.message.content for each in answer.choices] == texts


def test_fields_that_change_nothing(client, model):
    answer = create(
        client, tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"], store=False
    )
    assert answer.choices[0].message.content == expected(model, [USER])


@pytest.mark.parametrize("name", ["self", "cls", "args", "template", "context"])
def test_names_that_are_parameters_somewhere_are_names_like_others(client, model, name):
    answer = create(client, extra_body={"chat_template_kwargs": {name: 1}})
    assert answer.choices[0].message.content == expected(model, [USER])


def test_a_template_of_the_services(server, model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("<", "["))
    service = Service(model=model, engine=server.engine, name=NAME, max_new_tokens=24, chat_template=template)
    with serving(service) as other:
        answer = create(other.client())
    assert answer.choices[0].message.content == expected(model, [USER], chat_template=template)


def test_a_template_that_refuses(server, model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('only users') }}")
    service = Service(model=model, engine=server.engine, name=NAME, chat_template=template)
    with serving(service) as other, other.http() as client:
        refused = client.post("/v1/chat/completions", json={"messages": [USER]})
    assert refused.status_code == 400
    assert "only users" in refused.json()["error"]["message"]
