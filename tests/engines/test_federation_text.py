"""What clients' models write at the sites of a federation, next to the run in one process."""

import json
import stat
from pathlib import Path

import pytest

from federating import Here, Within, experiment, site_config
from prefed import read_run, run
from prefed.networks.federation import site as site_module
from prefed.networks.federation.audit_log import status_lines
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.site import Site
from prefed.networks.federation.unix_socket import unpack
from prefed.train.metrics import health_sentence
from workers import place as place

TERMS = Terms("wards", ("one", "two"), wait=0.0)
CLIENTS = {"one": {"w0"}, "two": {"w1", "w2"}}


class Recorded(Within):
    """Keeps every answer, and asks for each evaluation twice, as after an answer that was lost."""

    def __init__(self, sites):
        super().__init__(sites)
        self.answers = []

    def call(self, site, request, timeout, most):
        if unpack(request)[0]["kind"] == "evaluate":
            self.sites[site].answer(request)
            self.sites[site]._answers.clear()
        answer = super().call(site, request, timeout, most)
        self.answers.append(answer)
        return answer


def rows(path):
    return [json.loads(line) for line in (path / "answers.jsonl").read_text("utf-8").splitlines()]


def by_content(some):
    return sorted(json.dumps(row, sort_keys=True) for row in some)


@pytest.mark.parametrize(
    "method", ["fedper", *(pytest.param(name, marks=pytest.mark.rare) for name in ("feddpo", "local"))]
)
def test_each_site_has_the_answers_and_the_health_of_its_own_clients(place, tmp_path, monkeypatch, method):
    """A method with a shared and personal models, one without personal ones, and one that shares none.

    With six prompts all held-out ones are answered, two of each client, so the rows of the sites together
    are those of the run in one process, and a client's health is the same. No message to the hub holds a
    prompt or an answer, and the hub's results are those of a run that measures no text.
    """
    asked = experiment(place, method, rounds=2)
    asked = asked.model_copy(update={"evaluate": asked.evaluate.model_copy(update={"text": 6})})
    run(asked, tmp_path / "alone")
    alone, summary = rows(tmp_path / "alone"), read_run(tmp_path / "alone").summary
    made = {
        name: site_config(place, tmp_path, data, name=name) for name, data in (("one", "w0"), ("two", "w1w2"))
    }
    said = []
    sites = {name: Site(config, said.append) for name, config in made.items()}
    transport = Recorded(sites)
    monkeypatch.setattr(site_module, "Worker", Here)
    federate(asked, tmp_path / "over", transport, TERMS)
    together = []
    for name, config in made.items():
        sites[name].close()
        (folder,) = Path(config.state).glob("runs/*")
        here = rows(folder)
        together += here
        assert {row["holder"] for row in here} == CLIENTS[name]
        assert stat.S_IMODE((folder / "answers.jsonl").stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "text.json").stat().st_mode) == 0o600
        kept = json.loads((folder / "text.json").read_text())
        assert kept["round"] == 2
        assert kept["text"]["base"]["answers"] == 2 * len(CLIENTS[name])
        if method != "feddpo":
            theirs = summary["text"]["own"]["per_client"]
            assert kept["text"]["own"]["per_client"] == {c: theirs[c] for c in CLIENTS[name]}
        assert kept["text"].keys() == summary["text"].keys()
        for model, health in summary["text"].items():
            answers = [row for row in alone if row["model"] == {"base": "untouched"}.get(model, model)]
            some = [row for row in answers if row["round"] in (0, 2) and row["holder"] in CLIENTS[name]]
            assert health["answers"] == 6
            assert kept["text"][model]["ends"] == sum(row["ended"] for row in some) / len(some)
        assert (
            f"  text after round 2: {health_sentence(kept['text'])}; {folder / 'answers.jsonl'}"
        ) in status_lines(config, 0)
    assert by_content(together) == by_content(alone)
    assert len([line for line in said if "text of w1" in line]) == 2 * 2
    texts = {row["prompt"] for row in alone} | {row["text"] for row in alone if len(row["text"]) > 5}
    assert not [text for text in texts for answer in transport.answers if text.encode() in answer]
    assert not (tmp_path / "over" / "answers.jsonl").exists()
    assert "text" not in read_run(tmp_path / "over").summary
