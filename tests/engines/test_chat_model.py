"""Two rounds on a small Llama with the tokenizer and the chat template of SmolLM2."""

import json
from functools import partial

import pytest
import torch

from finished import small_experiment
from plain_dpo import PlainDPO, flat, unflat
from prefed import Experiment, load_run, run
from prefed.core import Key
from prefed.data import synthetic, synthetic_chat
from small_models import save_llama

PAIRS, STEPS, LR, CLIP = 2, 2, 0.1, 1.0


@pytest.fixture(scope="module")
def place(smollm2_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    records = synthetic_chat.generate(Key(7), train=PAIRS, test=1)
    synthetic.write(folder, [record for record in records if record.client in ("ada", "ben")])
    ends = {name: getattr(smollm2_tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    shape = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    save_llama(folder / "model", smollm2_tokenizer, **shape, **ends)
    return folder


def finish(place, path, method, text=0, **settings):
    tables = small_experiment(place, "client", evaluate={"text": text})
    tables["model"]["lora"]["dropout"] = 0.0
    rates = {"lr": LR, "clip": CLIP, "optimizer": "sgd", "weight_decay": 0.0, "batch_size": 64}
    tables["method"] |= {"name": method, "local_steps": STEPS, **rates, **settings}
    run(Experiment.model_validate(tables), path)
    return load_run(path, data=True)


@pytest.fixture(scope="module")
def feddpo(place, tmp_path_factory):
    return finish(place, tmp_path_factory.mktemp("runs") / "feddpo", "feddpo")


@pytest.mark.rare
def test_a_run_of_a_chat_model_ends_with_the_health_of_its_text(place, tmp_path):
    """On the one test prompt of each client, after the last of two rounds."""
    feddpo = finish(place, tmp_path / "run", "feddpo", text=None)
    text = feddpo.record.summary["text"]
    assert {model: health["answers"] for model, health in text.items()} == {"base": 2, "shared": 2}
    assert ["text" in record["evaluation"] for record in feddpo.record.rounds] == [False, True]


def test_the_model_reads_what_the_template_writes(feddpo, place, smollm2_tokenizer):
    """A prompt's tokens are those of ``apply_chat_template``, and a response's those that it adds, of which
    the mark that closes a turn is the last and only there; the line break after it is nobody's."""
    render, expected = partial(smollm2_tokenizer.apply_chat_template, return_dict=False), set()
    for line in (place / "train.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        start = render(row["prompt"], add_generation_prompt=True)
        turns = (
            [*row["prompt"], {"role": "assistant", "content": row[which]}] for which in ("chosen", "rejected")
        )
        whole = [render(messages) for messages in turns]
        assert all(ids[: len(start)] == start for ids in whole)
        expected.add((tuple(start), *(tuple(ids[len(start) : -1]) for ids in whole)))
    pairs = [pair for own in PlainDPO(feddpo).pairs.values() for pair in own]
    found = {tuple(tuple(map(int, ids)) for ids in (p.prompt, p.chosen, p.rejected)) for p in pairs}
    assert found == expected
    assert len(pairs) == 2 * PAIRS
    end = smollm2_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert {(ids[-1], ids.count(end)) for _, *responses in found for ids in responses} == {(end, 1)}


def test_the_closing_mark_is_scored(feddpo):
    """The log-probability of a response, as runs evaluate it, is that of all of its tokens."""
    plain = PlainDPO(feddpo)
    for client, data in feddpo.trainers.dataset.clients.items():
        pair = feddpo.trainers.dataset.tokens.pair(int(data.test[0]))
        scores = feddpo.trainers.score(client, feddpo.backbone.reference, "test")
        with torch.no_grad():
            whole = [plain._logprob(plain.first, pair.prompt, ids) for ids in (pair.chosen, pair.rejected)]
        assert scores.policy[0].tolist() == pytest.approx([*map(float, whole)], rel=1e-5)


def near(found, expected):
    """Float32 against float64: to 1e-5 of how far the models have moved."""
    return float((found.double() - expected).norm()) < 1e-5 * float(expected.norm())


def test_two_rounds_of_feddpo_are_those_of_plain_torch(feddpo):
    """Clients take clipped gradient steps on all their pairs, and the server the mean of their models."""
    plain = PlainDPO(feddpo)
    first = model = flat(plain.first)
    for _ in range(2):
        visits = [
            plain.train(unflat(model, plain.first), c, steps=STEPS, lr=LR, clip=CLIP) for c in plain.pairs
        ]
        model = torch.stack([flat(each) for each in visits]).mean(0)
    assert near(feddpo.published_model.flat - first.float(), model - first)


def test_two_rounds_of_fedper_are_those_of_plain_torch(place, tmp_path):
    """The first block's LoRA is the mean; the second's and the head, untied, stay with each client."""
    fedper = finish(place, tmp_path / "run", "fedper", shared_layers=1, personal_lr=LR, schedule="constant")
    plain = PlainDPO(fedper)
    first = flat(plain.first)
    shared = torch.cat(
        [torch.full((value.numel(),), name.startswith("lora/0/")) for name, value in plain.first.items()]
    )
    own, mean = dict.fromkeys(plain.pairs, first), first
    for _ in range(2):
        for client in own:
            start = unflat(torch.where(shared, mean, own[client]), plain.first)
            own[client] = flat(plain.train(start, client, steps=STEPS, lr=LR, clip=CLIP))
        mean = torch.stack([*own.values()]).mean(0)
    for client, state in own.items():
        expected = torch.where(shared, mean, state)
        assert near(fedper.model(client).flat - first.float(), expected - first)
