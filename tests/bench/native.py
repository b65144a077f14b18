"""./dev bench native: the figures of the native path, each the median of fresh processes.

Where a figure is a ratio, both sides run in turn in the same run, so that a busy machine slows both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "bench")]

from lab import models  # noqa: E402
from lab.daemon import PrivateDaemon, pss_bytes, shmem_huge_bytes  # noqa: E402
from rows import Row, table, write_json  # noqa: E402

BUILD = Path(os.environ.get("MODELCACHE_BUILD", ROOT / "build" / "release"))
BIN = BUILD / "bin"
ROUNDS = 7


class Bench:
    def __init__(self, daemon, rounds):
        self.daemon, self.rounds = daemon, rounds
        self.rows = []

    def add(self, *arguments, **limits):
        self.rows.append(Row(*arguments, **limits))

    def json(self, *command):
        """The line of JSON that a program prints."""
        done = subprocess.run([str(word) for word in command], env=self.daemon.env, check=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    def python(self, way, path):
        return self.json(sys.executable, ROOT / "tests/bench/python_open.py", way, path)["seconds"]

    def load(self, path):
        """A cold load by a fresh modelcachectl; returns its wall time."""
        start = time.perf_counter()
        self.daemon.ctl("load", path)
        return time.perf_counter() - start


def bench_open(bench):
    path = models.thousand() / "model.safetensors"
    bench.load(path)
    samples = [bench.json(BIN / "bench_client", "open", path, 2000)["p50_us"]
               for _ in range(bench.rounds)]
    bench.add("warm_open_p50", "warm open of a 1,000-tensor model by a connected C++ client, p50",
              samples, "µs", must=200, aim=60, lower_is_better=True)


def bench_tensors(bench):
    folder = models.thousand()
    path, checkpoint = folder / "model.safetensors", folder / "model.pt"
    bench.load(path)
    ways = {"cpp": [], "modelcache": [], "safetensors": [], "torch_mmap": []}
    for _ in range(bench.rounds):
        ways["cpp"].append(bench.json(BIN / "bench_tensors", path)["seconds"])
        ways["modelcache"].append(bench.python("modelcache", path))
        ways["safetensors"].append(bench.python("safetensors", path))
        ways["torch_mmap"].append(bench.python("torch_mmap", checkpoint))
    ratio = lambda slow, fast: [a / b for a, b in zip(ways[slow], ways[fast])]  # noqa: E731
    bench.add("cpp_vs_safetensors", "C++ connect + open + 1,000 at::Tensors, against safetensors load_file",
              ratio("safetensors", "cpp"), "x", must=10, aim=25)
    bench.add("cpp_vs_torch_mmap", "C++ connect + open + 1,000 at::Tensors, against torch.load(mmap=True)",
              ratio("torch_mmap", "cpp"), "x", must=50, aim=100)
    bench.add("python_vs_safetensors", "Python modelcache.open + 1,000 tensors, against safetensors load_file",
              ratio("safetensors", "modelcache"), "x", must=4, aim=6)
    names = {"cpp": "C++ connect + open + 1,000 at::Tensors", "modelcache": "Python modelcache.open + 1,000 tensors",
             "safetensors": "safetensors.torch.load_file, 1,000 tensors",
             "torch_mmap": "torch.load(mmap=True), 1,000 tensors"}
    for way, name in names.items():
        bench.add(f"{way}_ms", f"  of which: {name}", [s * 1e3 for s in ways[way]], "ms")


def bench_cold(bench):
    folder = models.llama()
    models.warm_page_cache(folder)
    files = sorted(folder.glob("*.safetensors"))
    copies, loads = [], []
    for _ in range(bench.rounds):
        bench.daemon.forget()
        bench.daemon.settle()
        with tempfile.TemporaryDirectory(dir="/dev/shm") as target:
            start = time.perf_counter()
            subprocess.run(["cp", *map(str, files), target], check=True)
            copies.append(time.perf_counter() - start)
        loads.append(bench.load(folder))
        bench.daemon.settle()
    bench.add("cold_vs_cp", "cold load of the 1.5 GB checkpoint, against cp of its files to /dev/shm",
              [copy / load for copy, load in zip(copies, loads)], "x", must=0.9, aim=1.25)
    bench.add("cold_s", "  of which: cold load", loads, "s")
    bench.add("cp_s", "  of which: cp", copies, "s")
    parts = [bench.json(BIN / "bench_copy", *files) for _ in range(bench.rounds)]
    cold = statistics.median(loads)
    bench.add("sample_share", "looking for equal storages (sampled hash), share of a cold load",
              [100 * part["sample_s"] / cold for part in parts], "%", must=5, aim=1, lower_is_better=True)
    bench.add("hash_share", "  for scale: hashing every byte by one thread, share of a cold load",
              [100 * part["hash_s"] / cold for part in parts], "%")


def bench_touch(bench):
    folder = models.llama()
    files = sorted(folder.glob("*.safetensors"))
    models.warm_page_cache(folder, from_disk=True)
    bench.load(folder)
    bench.daemon.settle()
    warm, plain = [], []
    for _ in range(bench.rounds):
        warm.append(bench.json(BIN / "bench_client", "touch", folder))
        plain.append(bench.json(BIN / "bench_client", "mmap", *files))
    total = lambda one, *parts: sum(one[part] for part in parts)  # noqa: E731
    bench.add("first_touch", "open + first touch of every page by a fresh warm client, against a fresh mmap of the files",
              [total(b, "open_s", "touch_s") / total(a, "open_s", "touch_s") for a, b in zip(warm, plain)],
              "x", must=2.5, aim=5)
    bench.add("first_touch_ms", "  of which: warm client", [1e3 * total(a, "open_s", "touch_s") for a in warm], "ms")
    bench.add("first_touch_mmap_ms", "  of which: fresh mmap", [1e3 * total(b, "open_s", "touch_s") for b in plain], "ms")
    bench.add("read_again", "  for scale: reading every byte once the pages are mapped, same two",
              [b["read_s"] / a["read_s"] for a, b in zip(warm, plain)], "x")
    bench.add("huge_share", "  for scale: part of the model that lies in huge pages",
              [100 * min(1, shmem_huge_bytes() / models.size_bytes(folder))], "%")


def bench_memory(bench):
    folder = models.llama()
    bench.load(folder)
    bench.daemon.settle()
    samples = []
    for _ in range(max(3, bench.rounds // 2)):
        readers = [subprocess.Popen([str(BIN / "bench_client"), "hold", str(folder)], env=bench.daemon.env,
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                   for _ in range(8)]
        for reader in readers:
            assert reader.stdout.readline().startswith("ready"), "a reader failed"
        used = sum(pss_bytes(pid) for pid in [bench.daemon.pid, *(r.pid for r in readers)])
        samples.append(used / models.size_bytes(folder))
        for reader in readers:
            reader.stdin.close()
            reader.wait()
            reader.stdout.close()
    bench.add("eight_readers_pss", "eight processes reading everything: sum of PSS + daemon, in model sizes",
              samples, "x", must=1.05, aim=1.02, lower_is_better=True)


def bench_requests(bench):
    path = models.thousand() / "model.safetensors"
    bench.load(path)
    for kind, what, limits in (
        ("open", "warm requests per second, 64 clients: open by file descriptor + release", {"must": 25000, "aim": 60000}),
        ("resident", "  for scale: open by name + release", {}),
        ("status", "  for scale: status", {}),
    ):
        samples = [bench.json(BIN / "bench_requests", bench.daemon.socket, path, 64, 2, kind)["per_second"]
                   for _ in range(max(3, bench.rounds // 2 + 2) if limits else 3)]
        bench.add(f"requests_{kind}", what, samples, "/s", **limits)


def bench_idle(bench):
    status = Path(f"/proc/{bench.daemon.pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    bench.add("daemon_rss", "daemon at rest, resident memory", [int(resident.split()[1]) / 1024], "MiB",
              must=10, aim=8, lower_is_better=True)


PARTS = (bench_idle, bench_open, bench_tensors, bench_requests, bench_cold, bench_touch, bench_memory)


def main(arguments):
    parser = argparse.ArgumentParser(prog="./dev bench native", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fresh processes per figure (7)")
    parser.add_argument("--only", metavar="PART", help="one part: " + ", ".join(p.__name__[6:] for p in PARTS))
    options = parser.parse_args(arguments)
    rows, failed = [], []
    for part in PARTS:
        name = part.__name__[6:]
        if options.only not in (None, name):
            continue
        print(f"bench: {name} …", file=sys.stderr, flush=True)
        # A daemon of its own for each part: none inherits the memory or the history of another.
        with PrivateDaemon(BUILD) as daemon:
            bench = Bench(daemon, max(1, options.rounds))
            try:
                part(bench)
            except (RuntimeError, subprocess.CalledProcessError, AssertionError) as error:
                failed.append(name)
                print(f"bench: {name} failed: {error}\n{daemon.log_text()}", file=sys.stderr)
        rows += bench.rows
    for line in table(rows):
        print(line)
    if options.json:
        write_json(options.json, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
