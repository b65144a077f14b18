"""Waiting for a cold load: progress reports, and Ctrl-C while the library waits."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from typing import Any, Callable, Optional, Union

from modelcache import _ffi

Progress = Union[None, bool, Callable[[int, int], Any]]


class _Bar:
    """One line on standard error, shown for loads that take longer than half a second."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if not total or time.monotonic() - self._start < 0.5:
            return
        self._shown = True
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        sys.stderr.write(f"\rmodelcache: [{bar}] {done / 2**20:.0f} of {total / 2**20:.0f} MiB")
        sys.stderr.flush()

    def close(self) -> None:
        if self._shown:
            sys.stderr.write("\n")


class ProgressWatch:
    """Carries a progress function through C: what it raises cancels the load and is kept.

    `function` is what the library calls.
    """

    def __init__(self, progress: Progress) -> None:
        if progress is None:
            progress = os.environ.get("MODELCACHE_PROGRESS", "0") not in ("", "0")
        self._raised: Optional[BaseException] = None
        self._bar = _Bar() if progress is True else None
        self._report = self._bar if progress is True else progress
        # Always installed: it is how a load is given up after Ctrl-C.
        self.function: Any = _ffi.ProgressFunction(self._call)

    def run(self, call: Callable[[], Optional[BaseException]]) -> Optional[BaseException]:
        """Runs `call`, which waits inside the library and gives its failure, if any.

        Gives that, or what a progress function or Ctrl-C raised meanwhile.
        """
        try:
            failure = self._interruptible(call) if _handles_interrupts() else call()
            return self._raised or failure
        finally:
            if self._bar is not None:
                self._bar.close()
            self.function = self._raised = None  # they refer to self

    def _interruptible(
        self, call: Callable[[], Optional[BaseException]]
    ) -> Optional[BaseException]:
        """As run(), so that KeyboardInterrupt comes here while the library waits.

        Python runs signal handlers in the main thread alone, and would run them at the entry of a
        progress call, where an exception is lost in C. So the main thread waits in Python.
        """
        done = _thread.allocate_lock()
        failures = []

        def work() -> None:
            try:
                failures.append(call())
            except BaseException as raised:
                failures.append(raised)
            finally:
                done.release()

        done.acquire()
        _thread.start_new_thread(work, ())
        try:
            done.acquire()
        except BaseException as interrupted:
            self._raised = (
                interrupted  # the next progress call gives up; a second one leaves at once
            )
            done.acquire()
        return failures[0]

    def _call(self, _user: Any, done: int, total: int) -> int:
        try:
            if self._raised is None and callable(self._report):
                self._report(done, total)
        except BaseException as raised:
            self._raised = raised
        return 0 if self._raised is None else 1


def _handles_interrupts() -> bool:
    return threading.current_thread() is threading.main_thread() and callable(
        signal.getsignal(signal.SIGINT)
    )
