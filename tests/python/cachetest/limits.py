"""Limits of the kernel around a process: control groups, descriptors, namespaces."""

import contextlib
import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group with a memory limit; skips the test where none can be made."""

    def __init__(self, limit_bytes):
        self.version = 2 if (ROOT / "cgroup.controllers").exists() else 1
        base = ROOT if self.version == 2 else ROOT / "memory"
        self.folder = base / f"modelcache-test-{uuid.uuid4().hex[:8]}"
        names = (
            ("memory.max", "memory.swap.max")
            if self.version == 2
            else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        )
        try:
            self.folder.mkdir()
            (self.folder / names[0]).write_text(str(limit_bytes))
        except OSError as failure:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            pytest.skip(f"no control group with a memory limit can be made here: {failure}")
        with contextlib.suppress(OSError):  # absent where the kernel does not count swap
            (self.folder / names[1]).write_text(str(limit_bytes if self.version == 1 else 0))

    @property
    def prefix(self):
        """Put before a command, runs it in the group."""
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")

    def charged_bytes(self):
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        from cachetest.waiting import eventually

        def gone():
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            return not self.folder.exists()

        eventually(gone, what=f"the end of {self.folder}")


def descriptor_limit(count):
    """Put before a command, runs it with `ulimit -n count`."""
    return ("sh", "-c", f'ulimit -n {count} && exec "$@"', "sh")


def pid_namespace(setup="true"):
    """Put before a command, runs it as a child of a new PID namespace, which ends with it.

    `setup` is a shell command that runs inside first.
    """
    command = (
        "unshare",
        "--fork",
        "--pid",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        f'{setup} && exec "$@"',
        "sh",
    )
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("a PID namespace needs root and unshare")
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("unshare cannot make a PID namespace here")
    return command
