"""A throw-away machine for the unit tests: this system under an overlay, booted with its own systemd."""

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import time
from pathlib import Path

BOOT_SECONDS = 120


def unavailable():
    """Why nspawn cannot run here, or None."""
    if os.geteuid() != 0:
        return "booting a machine needs root"
    if not shutil.which("systemd-nspawn"):
        return "systemd-nspawn is missing (package systemd-container)"
    return None


class Machine:
    """Boots on entry, powers off on exit; nothing of it stays. Needs root."""

    def __init__(self, folder):
        self.root = Path(folder) / "root"
        self._layers = Path(folder) / "layers"
        self._log_path = Path(folder) / "console.log"
        self._notify_path = Path(folder) / "notify"
        self._undo = contextlib.ExitStack()
        self._leader = None

    def mount(self):
        """Makes `root`: a writable copy of this system, so that a test can install into it."""
        self.root.mkdir()
        self._layers.mkdir()
        # A tmpfs of its own: an overlay must not keep its upper layer inside its lower one.
        self._mount("-t", "tmpfs", "tmpfs", self._layers)
        (self._layers / "upper").mkdir()
        (self._layers / "work").mkdir()
        options = f"lowerdir=/,upperdir={self._layers}/upper,workdir={self._layers}/work"
        self._mount("-t", "overlay", "overlay", "-o", options, self.root)

    def _mount(self, *arguments):
        subprocess.run(["mount", *map(str, arguments)], check=True)
        self._undo.callback(subprocess.run, ["umount", "-l", str(arguments[-1])], check=False)

    def __enter__(self):
        self.mount()
        return self

    def boot(self):
        """Returns when the machine's systemd says it is up. Raises with its console otherwise."""
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(self._notify_path))
        self._undo.callback(notify.close)
        console = open(self._log_path, "wb")
        self._undo.callback(console.close)
        process = subprocess.Popen(
            ["systemd-nspawn", "--register=no", "--keep-unit", "--private-network",
             "--notify-ready=yes", "--console=pipe", "-b", "-D", str(self.root)],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(self._notify_path)},
        )
        self._undo.callback(self._stop, process)
        self._wait_ready(notify, process)

    def _wait_ready(self, notify, process):
        deadline = time.monotonic() + BOOT_SECONDS
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or process.poll() is not None:
                raise RuntimeError(f"the machine did not boot:\n{self.console()}")
            if not select.select([notify], [], [], min(left, 1))[0]:
                continue
            text = notify.recv(4096).decode()
            found = re.search(r"^X_NSPAWN_LEADER_PID=(\d+)$", text, re.MULTILINE)
            if found:
                self._leader = found.group(1)
            if re.search(r"^READY=1$", text, re.MULTILINE) and self._leader:
                return

    def _stop(self, process):
        process.terminate()  # nspawn answers SIGTERM with an orderly poweroff
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __exit__(self, *_):
        self._undo.close()

    def console(self):
        return self._log_path.read_text(errors="replace")[-4000:]

    def run(self, *command, user=None, env=(), check=True):
        """Runs a program inside; returns the finished process with its text output."""
        inside = [*(["runuser", "-u", user, "--"] if user else []), "env", *env, *command]
        done = subprocess.run(
            ["nsenter", "-t", self._leader, "-a", "--", *inside],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=60, check=False,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}")
        return done

    def properties(self, unit, *names, manager=("systemctl",), **kwargs):
        """Properties of a unit as a dictionary of texts."""
        text = self.run(*manager, "show", unit, "-p", ",".join(names), **kwargs).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
