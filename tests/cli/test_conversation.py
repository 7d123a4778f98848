"""The token ids that `ortolan chat` reads: those of the chat template for all messages, whatever answers were like."""

import contextlib
import random
import shutil

import pytest
from families import shared_checkpoint, shared_model
from letter_tokenizer import write_letter_tokenizer

import ortolan
from ortolan.cli.conversation import Conversation
from ortolan.errors import ConfigError, ContextLengthError, SessionInterruptedError

VOCABULARY, MAX_CONTEXT, CHUNK = 131, 512, 32
FAMILIES = ("llama", "mistral", "qwen3_next")  # full caches, rings, recurrent states
BEGIN = "<s>{% for m in messages %}{% if m.role == 'assistant' %}<a>"
END = "</s>\n{% else %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
TEMPLATES = {
    "plain": BEGIN + "{{ m.content }}" + END + "{% if add_generation_prompt %}<a>{% endif %}",
    "strips": BEGIN + "{{ m.content | trim }}" + END + "{% if add_generation_prompt %}<a>{% endif %}",
    "drops what comes before a b": BEGIN
    + "{{ m.content if loop.last else m.content.split('b')[-1] }}"
    + END
    + "<a>think:",
}


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    return open_model(request.param, tmp_path)


@pytest.fixture
def llama(tmp_path):
    return open_model("llama", tmp_path)


def open_model(family, tmp_path):
    checkpoint = shared_checkpoint(family, eos_token_id=[2, 40, 41, 42])
    folder = shared_model(checkpoint, max_context=MAX_CONTEXT, chunk_size=CHUNK)
    folder = shutil.copytree(folder, tmp_path / "model")
    write_letter_tokenizer(folder, VOCABULARY)
    (folder / "chat_template.jinja").write_text(TEMPLATES["plain"])
    return ortolan.load(folder, device="cpu")


class Talk:
    """A conversation under test, and the messages of which it should consist."""

    def __init__(self, model, template=None, session=None, system=None):
        self.tokenizer, self.template = model.tokenizer, template
        self.session = model.session() if session is None else session
        self.conversation = Conversation(model.tokenizer, self.session, system=system, template=template)
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.before = list(self.session.state.tokens)

    def say(self, text, take=None, **choices):
        """Take a turn, and so many pieces of its answer at most; returns what was read, and why the answer ended."""
        turn = self.conversation.plan(text)
        options = {"max_new_tokens": 12, "sampling": ortolan.Sampling(temperature=1.0, seed=len(text))} | choices
        answer = self.conversation.read(turn, **options)
        read = list(self.session.state.tokens)
        pieces = []
        with contextlib.suppress(SessionInterruptedError):
            for piece in answer:
                pieces.append(piece)
                if len(pieces) == take:
                    self.session.interrupt()
            self.session.feeder.interrupt.check()  # where nothing was left to end
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(pieces)}]
        return read

    def expected(self, text):
        messages = [*self.messages, {"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, chat_template=self.template)


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_turn_reads_what_the_template_gives(model, template):
    talk, rng = Talk(model, TEMPLATES[template], system="so be it"), random.Random(5)
    ends = set()
    for number in range(8):
        text = "".join(rng.choices("ab c", k=rng.randint(1, 20))).strip() or "a"
        choices = rng.choice(
            [{}, {"max_new_tokens": 1}, {"stop": ["ab", "ba", "a\n"]}, {"take": 3}, {"max_new_tokens": 30}]
        )
        expected = talk.expected(text)
        assert talk.say(text, **choices) == expected, number
        ends.add(talk.session.finish_reason)
    assert {"length", "stop", None} <= ends


def test_an_end_token_is_read_once(llama):
    talk = Talk(llama)
    reasons = []
    for number in range(12):
        expected = talk.expected("a" * number)
        assert talk.say("a" * number, max_new_tokens=20) == expected
        reasons.append(talk.session.finish_reason)
    assert "eos" in reasons[:-1]


def test_an_answer_that_encodes_as_it_was_written_is_not_read_again(llama):
    talk = Talk(llama)
    talk.say("hi", max_new_tokens=1)
    assert talk.conversation.plan("so").kept == talk.session.logical_length > 0


def test_what_rings_cannot_go_back_to_is_read_anew(tmp_path):
    """The answer is longer than a ring, and the template writes only its end."""
    talk = Talk(open_model("mistral", tmp_path), TEMPLATES["drops what comes before a b"])
    begin = talk.say("hi")
    while talk.session.logical_length < len(begin) + 60:
        talk.conversation.reset()
        talk.messages.clear()
        talk.say("hi", max_new_tokens=100, sampling=ortolan.Sampling(temperature=1.0))
    turn, expected = talk.conversation.plan("so"), talk.expected("so")
    assert (turn.kept, turn.token_ids) == (0, expected)
    assert talk.say("so") == expected


def test_a_message_that_got_no_answer_is_not_part_of_it(model):
    talk = Talk(model)
    talk.say("first")
    expected = talk.expected("other")
    talk.session.interrupt()
    with pytest.raises(SessionInterruptedError):
        talk.say("never" * 20)
    assert talk.say("other") == expected


def test_an_interrupted_message_is_not_part_of_it_where_some_was_read(model):
    talk = Talk(model)
    talk.say("first")
    expected = talk.expected("other")
    with pytest.raises(SessionInterruptedError):
        talk.say("never" * 20, progress=lambda _: talk.session.interrupt())
    assert talk.say("other") == expected


def test_a_new_conversation_keeps_the_system_message(llama):
    talk = Talk(llama, system="be")
    first = talk.say("hi")
    talk.say("so")
    talk.conversation.reset()
    assert talk.session.logical_length == 0
    del talk.messages[1:]
    assert talk.say("hi") == first


def test_a_message_that_does_not_fit_changes_nothing(llama):
    talk = Talk(llama)
    talk.say("hi")
    before = list(talk.session.state.tokens)
    with pytest.raises(ContextLengthError, match=r"past max_context = 512; send a shorter one, or begin a new"):
        talk.say("c" * 600)
    assert talk.session.state.tokens == before
    expected = talk.expected("so")
    assert talk.say("so") == expected


def test_the_longest_message_fits(llama):
    talk = Talk(llama)
    room = MAX_CONTEXT - len(talk.expected(""))
    assert len(talk.say("c" * room)) == MAX_CONTEXT
    assert talk.session.finish_reason in ("context", "eos")


def test_a_saved_conversation_goes_on(model, tmp_path):
    """Behind all that was said; what was read or chosen of a stop is not among that."""
    talk = Talk(model, TEMPLATES["plain"])
    held = {"take": 2, "stop": ["ab" * 9, "ba" * 9], "max_new_tokens": 60}
    for number, choices in enumerate(({"max_new_tokens": 5}, {"stop": ["bb", "aba"]}, {"take": 2}, held)):
        read = talk.say("once" * number, **choices)
        said = model.tokenizer.decode(talk.session.state.tokens[len(read) :])
        assert talk.messages[-1]["content"].startswith(said)
        talk.session.save(tmp_path / "saved", rewind_tokens=64)
        again = Talk(model, TEMPLATES["plain"], model.restore(tmp_path / "saved"))
        said = model.tokenizer.encode("</s>\n<user>so\n<a>", add_special_tokens=False)
        assert again.say("so") == again.before + said
        read = again.session.state.history
        for text in ("and", "then"):
            following = again.conversation.plan(text)
            again.say(text)
            read = again.session.state.history
            assert read[: len(following.token_ids)] == following.token_ids
        assert read[: len(again.before)] == again.before


@pytest.mark.parametrize("template", ["plain", "drops what comes before a b"])
def test_an_evicted_conversation_appends(llama, template):
    eviction = ortolan.SnapKv(budget=24, window=8)
    talk = Talk(llama, TEMPLATES[template], llama.session(eviction=eviction))
    talk.say("cd" * 30)
    for text in ("more", "and more"):
        before = list(talk.session.state.tokens)
        expected = talk.expected(text)
        read = talk.say(text)
        assert talk.session.stats.evictions > 0
        if template == "plain":
            assert read == expected
        else:
            following = "</s>\n<user>" + text + "\n<a>think:"
            assert read == before + llama.tokenizer.encode(following, add_special_tokens=False)
    talk.conversation.reset()
    talk.messages.clear()
    expected = talk.expected("hi")
    assert talk.say("hi") == expected


def test_a_template_that_rewrites_answers_cannot_follow_a_saved_session(llama):
    session = llama.session()
    session.prefill([5, 6])
    shouting = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ConfigError, match="rewrites answers"):
        Conversation(llama.tokenizer, session, system=None, template=shouting).check()
