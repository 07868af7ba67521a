import pytest

from prefed.data import DataError, Message, Template, dialogue, instruction
from prefed.data.errors import RowError
from preferences import CHATML, tokenizer

TALK = (
    Message("system", "Be kind."),
    Message("user", "Hi"),
    Message("assistant", "Hello"),
    Message("user", "Bye"),
)


def test_text_is_used_unchanged():
    for chat in (None, CHATML):
        template = Template(tokenizer(chat=chat))
        assert template.pair("Q:", " a", "b") == ("Q:", " a", "b")


def test_dialogue_form():
    """The form of HH-RLHF: a response starts with one blank, never with two."""
    assert dialogue(TALK) == "Be kind.\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"
    template = Template(tokenizer())
    assert template.pair(TALK, "See you", "\nGo") == (dialogue(TALK), " See you", "\nGo")


def test_chat_template_of_the_tokenizer():
    """Prompt and response together are the rendered conversation."""
    made = tokenizer(chat=CHATML)
    prompt, chosen, rejected = Template(made).pair(TALK, "See you", "Go")
    assert prompt.endswith("<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")
    assert (chosen, rejected) == ("See you<|im_end|>", "Go<|im_end|>")
    assert Template(made).pair(TALK, "See you", "Go", (False, True))[1:] == ("See you", "Go<|im_end|>")
    plain = [{"role": m.role, "content": m.content} for m in TALK]
    whole = made.apply_chat_template([*plain, {"role": "assistant", "content": "See you"}], tokenize=False)
    assert prompt + chosen + "\n" == whole


def test_kinds():
    assert Template(tokenizer(chat=CHATML), "dialogue").prompt(TALK) == dialogue(TALK)
    with pytest.raises(DataError, match="no chat template"):
        Template(tokenizer(), "chat")


def test_instruction_form():
    """FedBiscuit's figure 4, with and without an input, also for a tokenizer with a chat template."""
    template = Template(tokenizer(chat=CHATML), "instruction")
    asked = Message("user", "Shorten it.\n\n### Input:\nA long text.")
    prompt, chosen, _ = template.pair((asked,), "Text.", " T.")
    assert prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nShorten it.\n\n### Input:\nA long text.\n\n### Response:"
    )
    assert chosen == " Text."
    assert template.prompt((Message("user", "Hi"),)) == instruction("Hi")
    with pytest.raises(RowError, match="requires prompts of a single user turn"):
        template.prompt(TALK)


def test_a_template_that_rewrites_the_past_leaves_the_response_alone():
    """This template drops the system message once there is a response. So the response is used unchanged."""
    rewriting = (
        "{% for m in messages %}{% if m.role != 'system' or add_generation_prompt %}[{{ m.content }}]"
        "{% endif %}{% endfor %}"
    )
    prompt, chosen, _ = Template(tokenizer(chat=rewriting)).pair(TALK, "See you", "Go")
    assert prompt == "[Be kind.][Hi][Hello][Bye]"
    assert chosen == "See you"


def test_a_template_that_refuses_is_an_error_of_the_row():
    refusing = "{{ raise_exception('system messages are not supported') }}"
    with pytest.raises(RowError, match="system messages are not supported"):
        Template(tokenizer(chat=refusing)).prompt(TALK)
