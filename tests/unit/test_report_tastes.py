"""Latent tastes on the page and the terminal, from a ``tastes.json`` written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finished import write_run
from prefed.runs.finished_run import RunError, read_run
from prefed.ui.pages import tastes
from prefed.ui.pages.page import write_page

MEASURED: dict[str, Any] = {
    "clients": ["ann", "bob", "cyd"],
    "own": 0.75,
    "another": 0.375,
    "population": 0.5,
    "collapsed": False,
    "accuracies": [[1.0, 0.5, 0.0], [0.75, 0.75, 0.25], [0.25, 0.5, 0.5]],
    "active_units": 2,
    "kl_per_dimension": [1.5, 0.25, 0.0],
    "map": {
        "clients": [[1.0, 0.0], [0.5, 0.25], [-1.5, -0.25]],
        "prototypes": [[2.0, 0.0], [-2.0, 0.0]],
        "shares": [0.9, 0.1],
    },
    "prototypes": {"ann": 0, "bob": 0, "cyd": 1},
    "trust": {"ann": {"bob": 0.75, "cyd": 0.25}, "cyd": {"ann": 0.5, "bob": 0.5}},
}
FEDBIS = {"choice_loss": 0.625, "margin": 0.125}


def tasty_run(path: Path, **changes: Any) -> Path:
    run = write_run(path, **FEDBIS)
    (run / "tastes.json").write_text(json.dumps({**MEASURED, **changes}))
    return run


def test_gains_by_hand() -> None:
    """Ann: 1 − (½ + 0)/2 = ¾; bob: ¾ − (¾ + ¼)/2 = ¼; cyd: ½ − (¼ + ½)/2 = ⅛."""
    assert tastes.gains(MEASURED) == {"ann": 0.75, "bob": 0.25, "cyd": 0.125}
    assert tastes.gains({**MEASURED, "accuracies": [[1.0]]}) == {}


def test_the_page_has_a_section_on_tastes(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(read_run(tasty_run(tmp_path / "run")), path)
    assert path.stat().st_mode & 0o777 == 0o600
    page = re.sub(r"</?t[hd][^>]*>", "|", path.read_text())
    assert '<h2 id="tastes"><a href="#tastes">Latent tastes</a></h2>' in page
    assert "only the owner of this file can read it" in page
    assert "yes: own z gains 37.5 points over another&#39;s" in page
    assert "2 of 3; neither necessary nor sufficient for informative tastes" in page
    assert "1.75 nats" in page
    assert "12.5 points (cyd) to 75.0 points (ann)." in page
    assert "2 with prototype 0, 1 with prototype 1." in page
    assert "explain 90% and 10% of the variance" in page
    # A tie goes to the first by name.
    assert "ann trusts bob most; cyd trusts ann most." in page
    assert "|ann||1.000||0.250||0||bob|" in page
    assert "|bob||0.750||0.500||0|||" in page


def test_one_client_without_prototypes_or_trust() -> None:
    """With one client there is no other z, no plane and no peer: only the KL is drawn."""
    alone = {
        **MEASURED,
        "clients": ["ann"],
        "another": None,
        "accuracies": [[0.75]],
        "map": {"clients": [[0.0, 0.0]], "prototypes": [], "shares": [0.0, 0.0]},
        "prototypes": {},
        "trust": {},
    }
    section = tastes.section(alone)
    assert [each.alt for each in section["plots"]] == [
        "KL per dimension of z: 1.75 nats in total, at most 1.50 (dimension 0)."
    ]
    assert ("are tastes informative", "unknown: there is only one client") in section["facts"]
    assert section["table"].rows == [("ann", ["0.750", "", "", ""])]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = tasty_run(tmp_path / "run", map={"clients": [[1.0]]})
    with pytest.raises(RunError, match=r"tastes\.json"):
        read_run(run).tastes  # noqa: B018 - reads the file
