"""Hub sets, with the library's loader replaced: the requests to it, and the errors from its failures."""

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import prefed.core.huggingface
from prefed.data import DataConfig, DataError, Source
from prefed.data.errors import ErrorCollector
from prefed.data.sources import ReadCounts, huggingface, read_records
from prefed.models import ModelError, load_pretrained
from preferences import jsonl, pairs


@pytest.fixture
def loader(monkeypatch):
    """Answers every call with one HH row, and keeps the calls."""
    calls = []

    def load_dataset(path, **options):
        calls.append((path, {name: value for name, value in options.items() if value is not None}))
        start = "\n\nHuman: Hi\n\nAssistant:"
        return datasets.Dataset.from_list([{"chosen": start + " Hello", "rejected": start + " Go"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def read(source, role="train", **settings):
    config = DataConfig(train=source, partition={"by": "iid", "clients": 1}, **settings)
    assert isinstance(config.train, Source)
    return list(read_records(config.train, config, role, None, ErrorCollector(), ReadCounts()))


def test_a_role_takes_its_own_split(loader):
    """HH's subsets are folders, so they are passed as data_dir. They become the domain of their rows."""
    source = {"path": "Anthropic/hh-rlhf", "subset": "harmless-base", "revision": "main"}
    ((record, location),) = read(source, "test")
    assert loader == [
        ("Anthropic/hh-rlhf", {"data_dir": "harmless-base", "split": "test", "revision": "main"})
    ]
    assert (record.prompt, record.chosen, record.domain) == (
        "\n\nHuman: Hi\n\nAssistant:",
        " Hello",
        "harmless-base",
    )
    assert str(location) == "Anthropic/hh-rlhf/harmless-base (test), row 1"
    read({"path": "Anthropic/hh-rlhf", "split": "train[:10]"}, "test")
    assert loader[-1] == ("Anthropic/hh-rlhf", {"split": "train[:10]"})


def test_a_set_with_configurations_names_its_own(loader):
    read("openai/summarize_from_feedback")
    assert loader == [("openai/summarize_from_feedback", {"name": "comparisons", "split": "train"})]


def test_sets_published_as_scripts_come_from_their_parquet_copy(monkeypatch):
    calls = []

    def load_dataset(path, **options):
        calls.append(options)
        if len(calls) == 1:
            raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        return [{"chosen": "A a", "rejected": "A b"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = {"subset": "comparisons", "subset_is_folder": False, "split": "train", "revision": None}
    rows = list(huggingface.read_rows("openai/x", **options))
    assert calls[1] == {"data_dir": "comparisons", "split": "train", "revision": "refs/convert/parquet"}
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (True, "Couldn't reach"),
        (False, r"no answer \(or HF_HUB_OFFLINE is set\), and the dataset is not in the local cache"),
    ],
)
def test_a_failure_says_what_to_do(monkeypatch, answers, reason):
    def load_dataset(path, **options):
        raise ConnectionError("Couldn't reach 'some/set' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(prefed.core.huggingface, "_answers", lambda endpoint: answers)
    start = r"could not load some/set \(train\) from the Hugging Face hub: "
    with pytest.raises(DataError, match=rf"{start}{reason}(.|\n)*Offline, copy"):
        read("some/set")


def test_no_library_asks_a_hub_that_does_not_answer(monkeypatch):
    """``datasets`` and transformers find nothing in an empty cache and give up, without one request: the
    transport is replaced by one that counts. Afterwards they may ask again."""
    requests = []

    def handle(transport, request):
        requests.append(str(request.url))
        raise OSError("no network")

    from huggingface_hub import constants, get_session

    monkeypatch.setattr(prefed.core.huggingface, "_answers", lambda endpoint: False)
    monkeypatch.setattr(type(get_session()), "send", handle)
    with pytest.raises(DataError, match=r"could not load nobody/nothing \(train\) from the Hugging Face hub"):
        read("nobody/nothing")
    for loader, what in ((AutoTokenizer, "tokenizer"), (AutoModelForCausalLM, "causal language model")):
        with pytest.raises(ModelError) as caught:
            load_pretrained(loader, "m", "nobody/nothing", what)
        assert str(caught.value) == (
            "m = 'nobody/nothing': the Hugging Face hub is not reachable (or HF_HUB_OFFLINE is set), its "
            f"local cache has no {what} with this name, and there is no such folder; give one with "
            "config.json, weights and tokenizer, or run once with network access"
        )
    assert requests == []
    assert constants.HF_HUB_OFFLINE is False


def test_the_hub_is_asked_once(monkeypatch):
    """Any HTTP answer counts, also a refusal. An error of the transport does not."""
    from huggingface_hub import get_session

    failures = iter([None, OSError("no route"), TimeoutError()])
    waited = []

    def head(session, url, timeout):
        waited.append(timeout)
        failure = next(failures)
        if failure:
            raise failure

    monkeypatch.setattr(type(get_session()), "head", head)
    results = []
    for _ in range(3):
        with prefed.core.huggingface.in_reach() as answers:
            results.append(answers)
    assert results == [True, False, False]
    assert waited == [prefed.core.huggingface.PATIENCE] * 3


def test_a_local_path_comes_before_the_hub(tmp_path, loader, monkeypatch):
    (tmp_path / "owner").mkdir()
    jsonl(tmp_path / "owner" / "name.jsonl", pairs(2))
    (tmp_path / "owner" / "name").mkdir()
    jsonl(tmp_path / "owner" / "name" / "x.jsonl", pairs(3))
    monkeypatch.chdir(tmp_path)
    assert len(read("owner/name")) == 3
    assert loader == []
