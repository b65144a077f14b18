"""Fixtures: one daemon for each module, checked after every test."""

import os
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "client" / "python")]
BUILD = Path(os.environ.setdefault("MODELCACHE_BUILD", str(ROOT / "build" / "release")))
os.environ.setdefault("MODELCACHE_LIBRARY", str(BUILD / "lib" / "libmodelcache.so"))
os.environ["MODELCACHE_AUTOSTART"] = "0"  # a test that wants one started says so

if not Path(os.environ["MODELCACHE_LIBRARY"]).exists():
    pytest.exit(f"nothing is built in {BUILD}: run ./dev build, or set MODELCACHE_BUILD", 2)

pytest.register_assert_rewrite("cachetest")
import modelcache  # noqa: E402
from cachetest.daemon import Daemon  # noqa: E402
from cachetest.waiting import eventually  # noqa: E402


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """The module's daemon, with nothing special about it."""
    with Daemon(tmp_path_factory.mktemp("daemon"), "--memory-budget", "8GiB") as running:
        yield running


@pytest.fixture(autouse=True)
def unharmed(request):
    """After each test the daemon is the same process and still serves others."""
    if "daemon" not in request.fixturenames:
        yield
        return
    running = request.getfixturevalue("daemon")
    pid = running.pid
    yield
    assert running.process.poll() is None, f"the daemon ended: {running.log()}"
    assert running.status()["daemon_pid"] == pid
    running.alive_probe()


@pytest.fixture
def client(daemon):
    with daemon.client() as connected:
        yield connected


@pytest.fixture
def refused(daemon, client):
    """refused(path, *needles, code=…): opening fails clearly, at once, and leaves nothing.

    A needle is a text that the message must have, or a tuple of which it must have one. Gives the
    exception.
    """

    def check(path, *needles, status=("bad_file",), **options):
        before = daemon.resting_figures()
        start = time.monotonic()
        with pytest.raises(modelcache.Error) as caught:
            client.open(path, **options)
        assert time.monotonic() - start < 5
        message = str(caught.value)
        lowered = message.lower()
        for needle in (Path(path).name, *needles):
            choices = needle if isinstance(needle, tuple) else (needle,)
            assert any(str(choice).lower() in lowered for choice in choices), (needle, message)
        assert caught.value.status in status, (caught.value.status, message)
        # Arenas that a load had reserved are closed off the event loop.
        eventually(lambda: daemon.figures() == before, what=f"{before}, now {daemon.figures()}")
        return caught.value

    return check
