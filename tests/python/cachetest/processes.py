"""Fresh Python processes that use the client, talked to line by line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from cachetest.daemon import ROOT, clean_environment

PACKAGE = ROOT / "client" / "python"

# Runs with `client`, `say(value)` (one JSON line) and `wait()` (until the test says go).
_PRELUDE = """
import json, os, sys
import modelcache
arguments = json.loads(sys.argv[1])
client = modelcache.Client(arguments["socket"], autostart=False)
def say(value):
    print(json.dumps(value), flush=True)
def wait():
    return sys.stdin.readline().strip()
"""


class Worker:
    """A Python process that runs `code`. Ends with the `with` block, by force if it must."""

    def __init__(self, daemon, code, prefix=(), environment=None, **arguments):
        arguments["socket"] = daemon.socket
        script = _PRELUDE + textwrap.dedent(code)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", script, json.dumps(arguments, default=os.fspath)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=client_environment(**(environment or {})),
        )

    @property
    def pid(self):
        return self.process.pid

    def hear(self):
        """The next value the process says; fails with its traceback when it ended instead."""
        line = self.process.stdout.readline()
        assert line, f"the worker ended: {self.process.communicate()[1]}"
        return json.loads(line)

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self, seconds=60):
        """Lets it end by itself and gives its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(timeout=seconds)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def client_environment(**changes):
    """The environment a fresh process needs to import the package under test."""
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return clean_environment(PYTHONPATH=path, **changes)


def ask(daemon, code, **arguments):
    """Runs `code` in a fresh process and gives what it says first."""
    with Worker(daemon, code, **arguments) as worker:
        value = worker.hear()
        assert worker.finish() == 0, worker.process.stderr.read()
        return value


def exists(pid):
    """True while the process runs (a zombie does not)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
