"""Python calls made by the tiny loader, and waiting for what it does."""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import threading
from pathlib import Path

from modelcache import _entry

from cachetest.processes import client_environment

LOADER = Path(__file__).with_name("tiny_loader.py")
numbers = itertools.count()
TEXT = b"what a pickle would be"
HELLO = ["storage", TEXT.hex()]


def fresh_key():
    return hashlib.md5(f"{os.getpid()} {next(numbers)}".encode()).hexdigest()


def make(client, key, *steps, **changes):
    """The entry of a loader that takes these steps."""
    options = {
        "name": f"tests.call({key[:4]!r})",
        "arguments": [sys.executable, str(LOADER)],
        "environment": client_environment(),
        "folder": str(LOADER.parent),
        "payload": json.dumps(steps).encode(),
    }
    return _entry.make(client, key, **{**options, **changes})


def fifo_at(path):
    os.mkfifo(path)
    return str(path)


def let_go(fifo):
    """Lets a loader that opens the fifo go on; waits until it is there."""
    with open(fifo, "wb"):
        pass


@contextlib.contextmanager
def in_thread(call):
    """Runs `call` meanwhile; gives a list that has its result or exception after the block."""
    results = []

    def run():
        try:
            results.append(call())
        except Exception as failure:
            results.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join(30)
        assert not thread.is_alive()
