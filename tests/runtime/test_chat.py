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


# What templates in the manner of gpt-oss's use: macros that write types and call themselves, namespaces, the date,
# channels of a message, thinking, calls of tools and their results, and names that the caller gives.
CHANNELS = """
{%- macro type_of(spec) -%}
  {%- if spec.type == "array" -%}{{ type_of(spec["items"]) + "[]" }}
  {%- elif spec.enum is defined -%}"{{ spec.enum | join('" | "') }}"
  {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(" | ") }}
  {%- else -%}{{ spec.type | default("any") }}
  {%- endif -%}
{%- endmacro -%}
{%- macro tool_text(name, tools) -%}
  {{- "namespace " + name + "\\n" }}
  {%- for tool in tools %}
    {%- set function = tool.function %}
    {{- "// " + function.description + "\\n" + function.name }}
    {%- for field, spec in function.parameters.properties.items() %}
      {{- " " + field + ("" if field in (function.parameters.required or []) else "?") + ": " + type_of(spec) }}
    {%- endfor %}
    {{- "\\n" }}
  {%- endfor %}
{%- endmacro -%}
{{- "<|start|>system\\n" + strftime_now("%Y-%m-%d") + " effort " + (reasoning_effort | default("medium")) }}
{%- if tools %}{{- "\\n" }}{{- tool_text("functions", tools) }}{% endif %}
{{- "<|end|>" }}
{%- set last = namespace(call=none) %}
{%- for message in messages -%}
  {%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls %}
    {%- if message.content and message.thinking %}{{ raise_exception("content and thinking beside a call") }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {%- set last.call = call.name %}
    {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary<|message|>" }}
    {{- call.arguments | tojson }}
    {{- "<|call|>" }}
  {%- elif message.role == "assistant" %}
    {%- if loop.last and not add_generation_prompt and message.thinking is defined %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif %}
    {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
    {{- "<|return|>" if loop.last else "<|end|>" }}
  {%- elif message.role == "tool" %}
    {%- if last.call is none %}{{ raise_exception("a result without a call") }}{% endif %}
    {{- "<|start|>functions." + last.call + " to=assistant<|message|>" + message.content | tojson + "<|end|>" }}
  {%- else %}
    {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
  {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif -%}
"""
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2}}}
CHANNEL_MESSAGES = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes.", "thinking": "It says so."},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": ["integer", "null"]},
                "units": {"type": "array", "items": {"type": "string", "enum": ["C", "F"]}},
            },
            "required": ["place"],
        },
    },
}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"reasoning_effort": "high"}, {"tools": [WEATHER]}])
def test_templates_with_channels_and_tools_give_the_text_of_transformers(variables, prompt):
    messages = CHANNEL_MESSAGES[:3] if prompt else CHANNEL_MESSAGES
    names = {"add_generation_prompt": prompt, **variables}
    (expected,), _ = render_jinja_template([messages], chat_template=CHANNELS, **names)
    assert render_chat(CHANNELS, messages, names) == expected
    assert "to=functions.weather<|channel|>commentary" in expected
    assert ("<|channel|>analysis" in expected) != prompt
    assert ('units?: "C" | "F"[]' in expected) == ("tools" in variables)


def test_a_template_with_channels_may_refuse_messages():
    with pytest.raises(ConfigError, match="a result without a call"):
        render_chat(CHANNELS, CHANNEL_MESSAGES[2:3], {"add_generation_prompt": True})


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
