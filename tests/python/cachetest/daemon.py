"""A daemon of the tests' own, and what can be seen of it from outside."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import modelcache

from cachetest.files import GOOD
from cachetest.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("MODELCACHE_BUILD", ROOT / "build" / "release"))
DAEMON = BUILD / "bin" / "modelcached"
CTL = BUILD / "bin" / "modelcachectl"


def clean_environment(**changes):
    """This process's environment without what would point a child at another daemon."""
    drop = ("MODELCACHE_SOCKET", "XDG_RUNTIME_DIR", "LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET")
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment.update(changes)
    return environment


def unused(client, model):
    return not any(m["leases"] for m in client.list() if m["id"] == model)


class Daemon:
    """Runs `modelcached` on a socket in `folder`. Stop it with stop(), or use it in a `with`."""

    def __init__(self, folder, *options, prefix=(), socket=None, environment=None, start=True):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket = str(socket or self.folder / "socket")
        self.log_path = self.folder / "daemon.log"
        self._command = [*prefix, str(DAEMON), "--socket", self.socket, *options]
        self._environment = environment or clean_environment()
        self.process = None
        if start:
            self.start()

    def start(self):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        eventually(self._answers, what=f"an answer of the daemon (log: {self.log_path})")
        return self

    def _answers(self):
        assert self.process.poll() is None, f"the daemon ended: {self.log()}"
        with contextlib.suppress(modelcache.UnavailableError):
            self.client().close()
            return True
        return False

    @property
    def pid(self):
        """Of the process that was started, which is the daemon unless a prefix forked."""
        return self.process.pid

    def _serving(self):
        """The pid of the daemon itself: a prefix such as unshare passes no signals on."""
        pid = self.pid
        while not command_line(pid).startswith(str(DAEMON)):
            (pid,) = children(pid)
        return pid

    def log(self):
        return self.log_path.read_text(errors="replace")

    def client(self):
        return modelcache.Client(self.socket, autostart=False)

    def status(self):
        with self.client() as client:
            return client.status()

    def resting_figures(self):
        """figures() once no process of the daemon's works on, or holds, an arena."""
        eventually(lambda: not children(self.pid), what="rest")
        return self.figures()

    def figures(self):
        """What must be as before once everything that was started has ended."""
        status = self.status()
        names = (
            "arena_bytes",
            "resident_bytes",
            "reserved_bytes",
            "entries",
            "loading",
            "leases",
            "clients",
        )
        return {name: status[name] for name in names}

    def comes_back_to(self, before, seconds=10.0):
        """Waits until figures() are those of `before` again; a client of before may have left."""
        last = {}

        def same():
            last.update(self.figures())
            last["clients"] = max(last["clients"], before["clients"])
            return last == before

        with contextlib.suppress(AssertionError):
            eventually(same, seconds)
        assert last == before

    def loaders(self, path):
        """The loaders that have the file open; others may be backing arenas with huge pages."""
        found = [pid for pid in children(self.pid) if "loader" in command_line(pid)]
        return [pid for pid in found if str(path) in open_descriptors(pid).values()]

    def stopped_loader(self, path):
        """Waits until the load of a file has its memory and stops its loader; gives the pid."""
        with self.client() as client:
            eventually(lambda: client.status()["reserved_bytes"], what="a load with its memory")
            (pid,) = self.loaders(path)
            os.kill(pid, signal.SIGSTOP)
            assert client.status()["loading"] == 1, "the load ended before it could be stopped"
        return pid

    def evict_all(self):
        with self.client() as client:
            for model in client.list():
                if model["pinned"]:
                    client.unpin(model["id"])
                eventually(lambda m=model: unused(client, m["id"]), what="the end of the leases")
                client.evict(model["id"])
            eventually(lambda: not client.status()["resident_bytes"], what="the return of memory")

    def alive_probe(self):
        """Another model still loads and has the right values."""
        path = self.folder / "good.safetensors"
        if not path.exists():
            path.write_bytes(GOOD)
        with self.client() as client, client.open(path) as model:
            assert model.raw("w").cast("f").tolist() == [1.0, 2.0]

    def ctl(self, *arguments, check=None):
        return run_ctl("--socket", self.socket, *arguments, check=check)

    def stop(self):
        """SIGTERM; every child must be gone with it."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            os.kill(self._serving(), signal.SIGTERM)
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def run_ctl(*arguments, check=None, environment=None):
    """Runs modelcachectl; `check` is the exit code it must have."""
    done = subprocess.run(
        [str(CTL), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment or clean_environment(),
    )
    if check is not None:
        assert done.returncode == check, (done.returncode, done.stdout, done.stderr)
    return done


def ctl_json(daemon, *arguments):
    return json.loads(daemon.ctl("--json", *arguments, check=0).stdout)


def children(pid):
    result = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                result += [int(child) for child in text.split()]
    return result


def command_line(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def lasting_descriptors(pid):
    """How many descriptors a process has, those of connections and processes left out."""
    passing = ("socket:", "anon_inode:[pidfd]", "pipe:")
    return sum(not what.startswith(passing) for what in open_descriptors(pid).values())


def open_descriptors(pid):
    """Descriptor number to what it is, of a process."""
    result = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                result[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
    return result


def memory_of(pid, field="Rss"):
    """A figure of /proc/<pid>/smaps_rollup in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} of {pid}")
