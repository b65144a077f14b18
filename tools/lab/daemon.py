"""A daemon of one's own: started for a demo or a measurement, gone afterwards."""

import json
import os
import re
import select
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

START_SECONDS = 20
STOP_SECONDS = 20
SETTLE_SECONDS = 60


class PrivateDaemon:
    """Starts on entry and sets MODELCACHE_SOCKET in `env`; stops on exit. One thread."""

    def __init__(self, build, *options):
        self.bin = Path(build) / "bin"
        self.options = options
        self.folder = None
        self.env = dict(os.environ)

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="modelcache-"))
        self.socket = self.folder / "socket"
        self.env.update(MODELCACHE_SOCKET=str(self.socket), MODELCACHE_AUTOSTART="0")
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(self.folder / "notify"))
        self.log = open(self.folder / "log", "wb")
        self.process = subprocess.Popen(
            [str(self.bin / "modelcached"), "--socket", str(self.socket), *self.options],
            env=dict(self.env, NOTIFY_SOCKET=str(self.folder / "notify")),
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )
        try:
            self._wait_ready(notify)
        except BaseException:
            self.__exit__()
            raise
        finally:
            notify.close()
        return self

    def _wait_ready(self, notify):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if select.select([notify], [], [], 0.2)[0] and b"READY=1" in notify.recv(4096):
                return
        raise RuntimeError(f"modelcached did not start:\n{self.log_text()}")

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self):
        return self.process.pid

    def log_text(self):
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def ctl(self, *arguments):
        """Output of `modelcachectl --json …` as Python objects. Raises RuntimeError."""
        done = subprocess.run(
            [str(self.bin / "modelcachectl"), "--json", *map(str, arguments)], env=self.env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"modelcachectl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return json.loads(done.stdout) if done.stdout.strip() else {}

    def settle(self):
        """Waits until no loader runs: what the daemon does after a reply (huge pages) is done."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        self._wait(lambda: not children.read_text().split())

    @staticmethod
    def _wait(condition):
        deadline = time.monotonic() + SETTLE_SECONDS
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)

    def forget(self):
        """Evicts every model. A client that has just closed one may still hold its lease a moment."""
        self._wait(lambda: not self.ctl("status")["leases"])
        for model in self.ctl("list")["models"]:
            self.ctl("evict", model["id"])


def pss_bytes(pid):
    """Memory of a process with shared pages divided among those that map them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE).group(1)) * 1024


def shmem_huge_bytes():
    """Kernel memory of shared files that is in huge pages, of the whole machine."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return int(re.search(r"^ShmemHugePages:\s+(\d+) kB", text, re.MULTILINE).group(1)) * 1024
