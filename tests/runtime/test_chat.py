"""Chat templates give the text that transformers gives, and refuse in one kind of error."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ortolan.errors import ConfigError
from ortolan.runtime.text.chat import choose_template, special_tokens
from ortolan.runtime.text.rendering import render_chat

MESSAGES = [
    {"role": "user", "content": "What is 1 < 2?"},
    {"role": "assistant", "content": 'It is "true" & more: äöü'},
    {"role": "user", "content": "And 3?"},
]
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}\n{% endfor %}",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}|{% endgeneration %}{% endfor %}",
    "day": "{{ strftime_now('%Y-%m-%d') }}",
    "tools": "{% if tools is not none %}tools{% endif %}{% if documents is none %}no documents{% endif %}",
    "space": "{% set ns = namespace(n=0) %}\n  {% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "prompt": "{{ messages[0].content | trim }}{% if add_generation_prompt %}<assistant>{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_that_of_transformers(name, prompt):
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=prompt)
    assert render_chat(TEMPLATES[name], MESSAGES, {"add_generation_prompt": prompt}) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% if",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].role }}",
        "{{ 1 // 0 }}",
        "{{ undefined_name() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_templates_that_fail_are_refused(template):
    with pytest.raises(ConfigError, match="template"):
        render_chat(template, MESSAGES, {})


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, ["hi"], [None]])
def test_messages_that_are_none_are_refused(messages):
    with pytest.raises(ConfigError, match="messages"):
        render_chat(TEMPLATES["plain"], messages, {})


def test_special_tokens_are_texts_in_either_spelling():
    tokens = special_tokens({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    assert tokens["bos_token"] == "<s>"
    assert tokens["eos_token"] == "</s>"
    assert tokens["pad_token"] == tokens["unk_token"] == ""


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("given", "tools", "chosen"),
    [
        ("one", [], "one"),
        (NAMED, None, "plain"),
        (NAMED, [], "tools"),
        (NAMED[:1], [{}], "plain"),
        (NAMED[1:], None, None),
        ([], None, None),
        ([5, {}], None, None),
        (None, None, None),
        (5, None, None),
    ],
)
def test_one_of_several_templates_is_chosen_as_transformers_does(given, tools, chosen):
    assert choose_template(given, tools) == chosen


def test_extra_special_tokens_have_names_too():
    config = {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<img>", "odd": 5}}
    tokens = special_tokens(config)
    assert (tokens["eos_token"], tokens["image_token"], tokens["odd"]) == ("</s>", "<img>", "")
    assert special_tokens({"extra_special_tokens": ["<a>"]})["bos_token"] == ""
