"""What a call read from disk: recorded while it runs, compared before its result is given again."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from modelcache import _files

PACKAGE = os.path.dirname(os.path.dirname(_files.__file__))
CHECKOUT = Path(__file__).resolve().parents[2]


def record(function, *paths):
    """The records of a call, as they come back from an entry."""
    with _files.Recorder(map(str, paths)) as recorder:
        function()
    return json.loads(json.dumps(recorder.records()))


def read(path):
    with open(path, "rb") as file:
        return file.read()


def files_of(records):
    """The recorded files, without the modules of the tests that run in this process."""
    return [row[0] for row in records["files"] if not row[0].startswith(f"{CHECKOUT}/")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"one")
    return path


def test_unchanged_file_is_as_it_was(file):
    records = record(lambda: read(file))
    assert files_of(records) == [str(file)]
    assert _files.check(records) is None


@pytest.mark.parametrize("how", ["in place", "replaced", "link"])
def test_same_size_and_times_do_not_hide_a_change(file, how):
    """F2: the inode and the time of change are compared, which no program can set."""
    records = record(lambda: read(file))
    before = file.stat()
    if how == "in place":
        file.write_bytes(b"two")
    elif how == "replaced":
        new = file.with_name("new")
        new.write_bytes(b"two")
        os.replace(new, file)
    else:
        target = file.with_name("target")
        target.write_bytes(b"two")
        file.unlink()
        file.symlink_to(target)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size and file.stat().st_mtime_ns == before.st_mtime_ns
    assert str(file) in _files.check(records)


def test_change_of_size_says_both(file):
    records = record(lambda: read(file))
    file.write_bytes(b"longer")
    assert _files.check(records) == f"{file} changed (3 bytes before, 6 now)"


def test_file_that_is_gone_is_named(file):
    """F3: what an uncached call would say follows from the load that this leads to."""
    records = record(lambda: read(file))
    file.unlink()
    assert str(file) in _files.check(records) and "No such file" in _files.check(records)


def test_link_that_moves_to_another_snapshot_is_seen(tmp_path):
    """F1: a branch name of a hub cache, and the link to its blob."""
    for name, text in (("x1", "[1,2]"), ("x2", "[3,4]")):
        (tmp_path / name).write_text(text)
    link = tmp_path / "main"
    link.symlink_to("x1")
    records = record(lambda: read(link))
    assert _files.check(records) is None
    link.unlink()
    link.symlink_to("x2")
    assert str(link) in _files.check(records)


def test_file_that_changes_while_it_is_read_is_stale_at_once(file):
    def call():
        read(file)
        file.write_bytes(b"two")

    assert str(file) in _files.check(record(call))


def test_what_was_looked_for_and_not_there_is_remembered(tmp_path):
    wanted = [tmp_path / name for name in ("a", "b", "c", "d")]

    def call():
        os.path.exists(wanted[0])
        wanted[1].is_file()
        for path, look in ((wanted[2], read), (wanted[3], os.listdir)):
            with pytest.raises(FileNotFoundError):
                look(path)

    records = record(call)
    assert set(map(str, wanted[:3])) <= set(records["absent"])
    for path in wanted[:3]:
        assert _files.check(records) is None
        path.write_bytes(b"")
        assert _files.check(records) == f"{path} was not there"
        path.unlink()


def test_broken_link_stays_broken(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    records = record(lambda: os.path.exists(link))
    assert _files.check(records) is None


def test_names_in_a_folder_of_the_arguments_are_compared_and_its_times_are_not(tmp_path):
    (tmp_path / "inner").mkdir()
    for path in ("a", "inner/b"):
        (tmp_path / path).write_bytes(b"x")
    records = record(lambda: read(tmp_path / "inner" / "b"), tmp_path)
    assert [row[0] for row in records["folders"]] == [str(tmp_path), str(tmp_path / "inner")]
    (tmp_path / "new").write_bytes(b"")
    assert _files.check(records) == f"the files in {tmp_path} are others"
    (tmp_path / "new").unlink()
    assert _files.check(records) is None
    (tmp_path / "inner" / "b2").write_bytes(b"")
    assert _files.check(records) == f"the files in {tmp_path / 'inner'} are others"


def test_neighbours_of_a_single_file_do_not_matter(file):
    records = record(lambda: read(file), file)
    file.with_name("neighbour").write_bytes(b"")
    assert _files.check(records) is None


def test_listed_folder_is_compared_by_its_names(tmp_path):
    records = record(lambda: os.listdir(tmp_path))
    assert _files.check(records) is None
    (tmp_path / "new").write_bytes(b"")
    assert "are others" in _files.check(records)


def test_readers_in_rust_and_c_are_seen(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), tmp_path / "w.ts")

    def call():
        with safe_open(tmp_path / "w.safetensors", "pt") as opened:
            opened.get_tensor("w")
        torch.load(tmp_path / "w.pt", mmap=True)
        torch.jit.load(tmp_path / "w.ts")

    found = files_of(record(call))
    assert [str(tmp_path / name) for name in ("w.pt", "w.safetensors", "w.ts")] == found
    assert files_of(record(lambda: load_file(tmp_path / "w.safetensors"))) == found[1:2]


def test_tokenizer_files_are_seen(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(path))
    assert files_of(record(lambda: tokenizers.Tokenizer.from_file(str(path)))) == [str(path)]


def test_files_of_the_arguments_count_whatever_reads_them(file):
    assert files_of(record(lambda: None, file)) == [str(file)]


def test_files_that_the_call_writes_do_not_count(tmp_path):
    def call():
        (tmp_path / "made").write_bytes(b"x")
        read(tmp_path / "made")

    records = record(call)
    assert files_of(records) == [] and _files.check(records) is None
    (tmp_path / "made").write_bytes(b"other")
    assert _files.check(records) is None


def test_files_of_other_threads_are_seen(file):
    def call():
        thread = threading.Thread(target=read, args=(file,))
        thread.start()
        thread.join()

    assert files_of(record(call)) == [str(file)]


def test_nothing_is_seen_after_the_end(file):
    with _files.Recorder() as recorder:
        pass
    read(file)
    os.stat(file)
    assert str(file) not in files_of(recorder.records())


def test_relative_paths_are_those_of_the_folder_then(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    records = record(lambda: read(file.name))
    monkeypatch.chdir("/")
    assert files_of(records) == [str(file)] and _files.check(records) is None


def test_modules_of_the_user_count(tmp_path, monkeypatch):
    (tmp_path / "module_of_the_user.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    records = record(lambda: __import__("module_of_the_user"))
    monkeypatch.delitem(sys.modules, "module_of_the_user")
    assert str(tmp_path / "module_of_the_user.py") in files_of(records)
    (tmp_path / "module_of_the_user.py").write_text("x = 22\n")
    assert "module_of_the_user" in _files.check(records)


def test_package_that_is_installed_anew_is_a_change_of_version(tmp_path):
    """One look at the library folder while nothing is installed; the packages in use otherwise."""
    library = tmp_path / "site-packages"
    for name in ("used-1.0", "unused-1.0"):
        (library / f"{name}.dist-info").mkdir(parents=True)
        (library / f"{name}.dist-info" / "METADATA").write_text(name)
    (library / "used.py").write_text("")
    script = (
        "import json, sys; sys.path[:0] = sys.argv[1:3]\n"
        "import used\n"
        "from modelcache import _files\n"
        "with _files.Recorder() as recorder: pass\n"
        "print(json.dumps(recorder.records()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, PACKAGE, str(library)], capture_output=True, text=True, check=True
    )
    records = json.loads(done.stdout)
    assert _files.check(records) is None
    (library / "unused-1.0.dist-info").rename(library / "unused-2.0.dist-info")
    assert _files.check(records) is None
    (library / "used-1.0.dist-info").rename(library / "used-2.0.dist-info")
    assert _files.check(records) == "version: used-1.0.dist-info is not installed any more"


def test_shutil_and_glob_work_while_recording(tmp_path):
    import glob
    import shutil

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "f").write_bytes(b"x")

    def call():
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        assert glob.glob(str(tmp_path / "two" / "*")) == [str(tmp_path / "two" / "f")]
        shutil.rmtree(tmp_path / "two")

    record(call)
    assert not (tmp_path / "two").exists()
