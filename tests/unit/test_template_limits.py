"""What a chat template may take: memory, time, and length of its text."""

import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from prefed.data import DataError, Message, PolicyEncoder, Record, Template, template_limits
from prefed.models.pretrained import ModelError, load_pretrained
from preferences import tokenizer

MIB = 2**20
GREEDY = {
    "product": "{{ 'x' * 201326592 }}",
    "text": "{% set x = 'x' * 1048576 %}{% for i in range(192) %}{{ x }}{% endfor %}",
    "lists": "{% set s = namespace(x=[]) %}{% for i in range(250) %}"
    "{% set s.x = s.x + [range(100000)|list] %}{% endfor %}",
    "folded": "{{ ('x' * 201326592)|length }}",
}
"""Each takes 192 MiB; jinja computes the last when it reads the template."""
CHILD = """
import json, os, sys
from prefed.data import Message, Template, template_limits
from preferences import tokenizer
talk, plain = (Message("user", "Hi"),), [{"role": "user", "content": "Hi"}]
def measured(render):
    read, write = os.pipe()
    if not (child := os.fork()):
        try: answer = f"{len(render())} characters"
        except Exception as error: answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 4096).decode()
    return answer, os.wait4(child, 0)[2].ru_maxrss * 1024
print(json.dumps(measured(lambda: Template(tokenizer(chat="{{ 'x' * 1610612736 }}")).prompt(talk))))
template_limits.MEMORY = 128 << 20
for text in json.load(sys.stdin):
    made = tokenizer(chat=text)
    rows = measured(lambda: ""), measured(lambda: Template(made).prompt(talk)), measured(
        lambda: made.apply_chat_template(plain, tokenize=False))
    print(json.dumps(rows), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_the_memory_of_a_template_is_limited():
    """The peak of a separate process; in the control, transformers renders without the limit."""
    made = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([*GREEDY.values()]),
        text=True,
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    (answer, _), *rows = map(json.loads, made.stdout.splitlines())
    assert "needs more than 1 GiB of memory" in answer
    for name, ((_, before), (answer, bounded), (control, free)) in zip(GREEDY, rows, strict=True):
        assert "needs more than 0.125 GiB of memory" in answer, name
        assert bounded - before < 140 * MIB, name
        assert control.endswith("characters"), name
        assert free - before > 180 * MIB, name


LOOP = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
TALK = (Message("user", "Hi"),)


def test_the_time_of_a_template_is_limited(monkeypatch):
    before = time.process_time()
    assert Template(tokenizer(chat=LOOP)).prompt(TALK) == ""
    monkeypatch.setattr(template_limits, "SECONDS", (time.process_time() - before) / 1000)
    with pytest.raises(DataError, match=r"chat template .* needs more than .* s of CPU time"):
        Template(tokenizer(chat=LOOP)).prompt(TALK)
    # It is the template's fault, not that of one row, of which several may be left out.
    made = tokenizer(chat=LOOP)
    encoder = PolicyEncoder(made, Template(made), max_length=9, too_long="drop")
    with pytest.raises(DataError, match="CPU time"):
        encoder.encode([Record(TALK, "a", "b")])


def test_the_text_of_a_template_is_limited():
    """A million characters and ten times the conversation."""
    long = "{{ messages[0].content * 11 }}{{ 'x' * 1000000 }}"
    assert len(Template(tokenizer(chat=long.replace("11", "10"))).prompt(TALK)) == 1_000_020
    with pytest.raises(DataError, match="makes 1,000,022 characters of one conversation"):
        Template(tokenizer(chat=long)).prompt(TALK)


def test_every_template_is_rendered_within_the_limits(tmp_path):
    """The code has one place that renders a chat template. That of a model's folder goes through it. That of
    an adapter's folder is never read: such a folder is no model, and a policy has its model's tokenizer."""
    source = Path(template_limits.__file__).parents[1]
    places = [
        path.name for path in source.rglob("*.py") if ".apply_chat_template(" in path.read_text("utf-8")
    ]
    assert places == ["encoding.py"]
    tokenizer(chat="{{ 'x' * 1000021 }}").save_pretrained(tmp_path)

    def load():
        return load_pretrained(AutoTokenizer, "[model] name", str(tmp_path), "tokenizer")

    with pytest.raises(DataError, match="makes 1,000,021 characters of one conversation"):
        Template(load()).prompt(TALK)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="the folder has an adapter"):
        load()


@pytest.mark.parametrize("raises", [False, True])
def test_limits_end_with_the_block(raises):
    """Also in a thread, where time is not limited."""

    def body():
        try:
            with template_limits.limited("it"):
                assert resource.getrlimit(resource.RLIMIT_AS)[0] > 0 or sys.platform != "linux"
                if raises:
                    raise KeyError
        except KeyError:
            pass
        seen.append(resource.getrlimit(resource.RLIMIT_AS))

    seen, before = [], resource.getrlimit(resource.RLIMIT_AS)
    body()
    (thread := threading.Thread(target=body)).start()
    thread.join()
    assert seen == [before, before]
