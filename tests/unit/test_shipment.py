"""Files of a run on another machine: whole, once, for nobody else, and not for longer than needed."""

import os
import stat
import tempfile

import pytest

from prefed.engines.backends.ray import pack, unpack


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder for temporary files of its own, and something to ship: a file, and a folder with a link."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").symlink_to(tmp_path / "blob")
    (tmp_path / "trace.csv").write_text("a,b\n")
    return tmp_path


def test_files_arrive_under_their_names_once(machine):
    """The second process of a machine fetches nothing. A link arrives as what it leads to."""
    array = pack({"model.name": machine / "model", "fleet.trace": machine / "trace.csv"})
    fetched = []
    folder, held = unpack("run", lambda: fetched.append(1) or array)
    again, also = unpack("run", lambda: fetched.append(2) or array)
    (machine / "blob").unlink()
    assert (folder / "model.name/weights").read_bytes() == b"weights"
    assert not (folder / "model.name/weights").is_symlink()
    assert (folder / "fleet.trace").read_text() == "a,b\n"
    assert (again, fetched) == (folder, [1])
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    os.close(held)
    os.close(also)


def test_what_a_killed_run_left_over_is_removed(machine):
    """The kernel closes the handles of a killed process. A folder that is still held stays."""
    array = pack({"fleet.trace": machine / "trace.csv"})
    kept, held = unpack("kept", lambda: array)
    gone, closed = unpack("gone", lambda: array)
    os.close(closed)
    torn = kept.with_name("torn.partial")
    torn.mkdir()
    _, last = unpack("next", lambda: array)
    assert [path.exists() for path in (kept, gone, torn)] == [True, False, False]
    os.close(held)
    os.close(last)


def test_a_folder_that_others_can_reach_is_refused(machine):
    base = machine / "tmp" / f"prefed-ray-{os.getuid()}"
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(PermissionError, match="other users can access this folder, which would contain"):
        unpack("run", lambda: pack({}))
