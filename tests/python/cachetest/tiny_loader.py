"""A loader of Python calls that does what its payload says, in order. JSON: a list of [verb, …].

append PATH TEXT   writes a line at the end of a file
open PATH          opens a fifo, and so waits for the test
progress D T       says how far it is
storage HEX TIMES  a storage of these bytes, repeated
tensor …           a row of the tensor table
commit METADATA    hands over what was given so far
fail CODE MESSAGE DETAIL
raise TEXT · print TEXT · exit NUMBER · kill SIGNAL · spawn · environment PATH
"""

import ctypes
import json
import os
import subprocess
import sys

from modelcache import _fill


class Loader:
    def __init__(self, job):
        self._job = job
        self._storages = []
        self._tensors = []

    def append(self, path, text):
        with open(path, "a") as file:
            file.write(text + "\n")

    def open(self, path):
        with open(path, "rb") as fifo:
            fifo.read()

    def progress(self, done, total):
        self._job.progress(done, total)

    def storage(self, content, times=1):
        content = bytes.fromhex(content) * times
        self._storages.append((ctypes.create_string_buffer(content, len(content)), len(content)))

    def tensor(self, *row):
        self._tensors.append(_fill.Tensor(*row))

    def commit(self, metadata):
        storages = [(ctypes.addressof(buffer), size) for buffer, size in self._storages]
        self._job.commit(storages, self._tensors, metadata)

    def fail(self, code, message, detail=""):
        self._job.fail(code, message, bytes.fromhex(detail))

    def raise_(self, text):
        raise RuntimeError(text)

    def print(self, text):
        print(text, flush=True)

    def exit(self, number):
        os._exit(number)

    def kill(self, signal):
        os.kill(os.getpid(), signal)

    def spawn(self, path):
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        self.append(path, str(child.pid))

    def environment(self, path):
        state = {
            "variables": dict(os.environ),
            "folder": os.getcwd(),
            "arguments": sys.argv[1:],
            "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
        }
        with open(path, "w") as file:
            json.dump(state, file)


def main():
    job = _fill.Job.receive()
    loader = Loader(job)
    for verb, *arguments in json.loads(job.payload()):
        getattr(loader, "raise_" if verb == "raise" else verb)(*arguments)


if __name__ == "__main__":
    main()
