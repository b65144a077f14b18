"""Rows of a benchmark: values with what they must and should reach, as a table and as JSON."""

import json
import os
import platform
import re
import statistics
from pathlib import Path


class Row:
    """One figure. `samples` are what the median was taken of; without `must` it only informs."""

    def __init__(self, id, what, samples, unit, *, must=None, aim=None, lower_is_better=False):
        self.id, self.what, self.unit = id, what, unit
        self.samples = [float(sample) for sample in samples]
        self.value = statistics.median(self.samples)
        self.must, self.aim, self.lower_is_better = must, aim, lower_is_better

    def meets(self, limit):
        if limit is None:
            return None
        return self.value <= limit if self.lower_is_better else self.value >= limit

    def as_json(self):
        return {
            "id": self.id, "what": self.what, "value": self.value, "unit": self.unit,
            "must": self.must, "aim": self.aim, "meets_must": self.meets(self.must),
            "meets_aim": self.meets(self.aim), "samples": self.samples,
        }


def number(value):
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _verdict(row):
    if row.must is None:
        return ""
    if not row.meets(row.must):
        return "MISSED"
    return "aim met" if row.meets(row.aim) else "must met"


def table(rows):
    """Lines of a table that a person can read without the JSON."""
    sign = {True: "≤", False: "≥"}
    cells = [("what", "value", "must", "aim", "")]
    for row in rows:
        limits = [f"{sign[row.lower_is_better]} {number(x)}" if x is not None else ""
                  for x in (row.must, row.aim)]
        cells.append((row.what, f"{number(row.value)} {row.unit}", *limits, _verdict(row)))
    widths = [max(len(cell[i]) for cell in cells) for i in range(5)]
    for cell in cells:
        yield (f"{cell[0]:<{widths[0]}}  {cell[1]:>{widths[1]}}  {cell[2]:>{widths[2]}}  "
               f"{cell[3]:>{widths[3]}}  {cell[4]}").rstrip()


def machine():
    """What the numbers were taken on."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.group(1)) * 1024,
        "kernel": platform.release(),
        "shmem_huge_pages": huge.read_text().strip() if huge.exists() else "none",
    }


def write_json(path, rows, extra=None):
    text = json.dumps({"rows": [row.as_json() for row in rows], "machine": machine(), **(extra or {})},
                      indent=1)
    Path(path).write_text(text + "\n")
