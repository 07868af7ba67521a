"""What tests of runs share."""

import pytest

from finished import small_place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The small place; a file that needs another one has its own fixture of this name."""
    return small_place(tmp_path_factory.mktemp("place"))
