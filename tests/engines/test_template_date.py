"""A chat template that contains today's date: a run keeps the date of its first start."""

import shutil
from datetime import date

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prefed import Experiment, load_run, run
from prefed.data import Message, Template
from preferences import CHATML, jsonl, tokenizer

DATED = "{{ strftime_now('%d %b %Y %H:%M') }}" + CHATML


class Tomorrow(date):
    @classmethod
    def today(cls):
        return cls(2031, 2, 1)


class Today(date):
    @classmethod
    def today(cls):
        return cls(2031, 1, 31)


def model(folder, template):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=261, **sizes, bos_token_id=0, eos_token_id=0))
    made.save_pretrained(folder)
    tokenizer(chat=template).save_pretrained(folder)
    return str(folder)


def test_a_run_keeps_the_date_of_its_first_start(tmp_path, monkeypatch):
    """Continued on another day without its cache, it has the same tokens, and its date is that of prompts."""
    rows = [
        {"prompt": [{"role": "user", "content": f"Q{k}"}], "chosen": "yes", "rejected": "no"}
        for k in range(4)
    ]
    path = jsonl(tmp_path / "pairs.jsonl", rows)

    def experiment(rounds, template):
        return Experiment.model_validate(
            {
                "rounds": rounds,
                "data": {"train": str(path), "partition": {"by": "iid", "clients": 1}, "test_fraction": 0.5},
                "model": {"name": model(tmp_path / "model", template), "lora": {"rank": 1}},
                "method": {"name": "feddpo", "lr": 0.01, "local_steps": 1},
                "evaluate": {"text": 0},
            }
        )

    monkeypatch.setattr("prefed.runs.start_or_resume.date", Today)
    run(experiment(1, DATED), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "cache")
    monkeypatch.setattr("prefed.runs.start_or_resume.date", Tomorrow)
    run(experiment(2, DATED), tmp_path / "run", resume=True)
    loaded = load_run(tmp_path / "run", data=True)
    assert loaded.experiment.data.today == "2031-01-31"
    tokens, made = loaded.trainers.dataset.tokens, loaded.backbone.tokenizer
    assert made.decode(tokens.pair(0).prompt).startswith("31 Jan 2031 00:00<|im_start|>user")
    again = Template.of(made, loaded.experiment.data).prompt_ids(tokens.record(0).prompt)
    assert again == tokens.pair(0).prompt.tolist()
    # Another template has no date, and the settings of its runs do not depend on the day.
    run(experiment(1, CHATML), tmp_path / "plain")
    assert load_run(tmp_path / "plain").experiment.data.today is None
    assert Template(made, today="2024-07-26").prompt((Message("user", "a"),)).startswith("26 Jul 2024 00:00")
