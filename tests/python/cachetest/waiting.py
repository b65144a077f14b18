"""Waiting for a condition on observable state, never for a length of time."""

import time


def eventually(condition, seconds=10.0, what="the condition"):
    """Polls until `condition()` is true and returns its value; fails with the last value seen."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {seconds} s; last value: {value!r}")
        time.sleep(0.002)
