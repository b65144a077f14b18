"""./dev demo: load once, map everywhere, on real weights."""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "bench")]

import modelcache  # noqa: E402
from lab import models, report  # noqa: E402
from lab.daemon import PrivateDaemon  # noqa: E402
from rows import machine  # noqa: E402

BUILD = Path(os.environ.get("MODELCACHE_BUILD", ROOT / "build" / "release"))
PYTHON_READERS = 3
CXX_READERS = 5
ROUNDS = 3  # every time shown is the median of these
NORM = "model.norm.weight"


class Demo:
    def __init__(self, daemon, out):
        self.daemon, self.out = daemon, out

    def json(self, *command):
        done = subprocess.run([str(word) for word in command], env=self.daemon.env, check=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    def start(self, *command):
        return subprocess.Popen([str(word) for word in command], env=self.daemon.env, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def python_open(self, way, path):
        return self.json(sys.executable, ROOT / "tests/bench/python_open.py", way, path)["seconds"]


def median(measure):
    return statistics.median(measure() for _ in range(ROUNDS))


def cold_load(demo, path):
    """(seconds, bytes, tensors) of a load by the daemon, which holds nothing before."""
    demo.daemon.settle()
    demo.daemon.forget()
    with modelcache.Client(str(demo.daemon.socket)) as client, demo.out.progress("cold load") as progress:
        start = time.perf_counter()
        model = client.open(str(path), progress=progress)
        return time.perf_counter() - start, model.nbytes, len(model)


def show_loads(demo, name, path):
    """One model: cold, then warm from fresh processes of two languages, then without the cache."""
    models.warm_page_cache(path if path.is_dir() else path.parent)
    demo.out.title(f"{name}: {path}")
    cold = [cold_load(demo, path) for _ in range(ROUNDS)]
    _, payload, tensors = cold[0]
    demo.daemon.settle()
    times = {
        "cold_s": statistics.median(seconds for seconds, *_ in cold),
        "cpp_warm_s": median(lambda: demo.json(BUILD / "bin" / "bench_tensors", path)["seconds"]),
        "python_warm_s": median(lambda: demo.python_open("modelcache", path)),
        "safetensors_s": median(lambda: demo.python_open("safetensors", path)),
        "touch_s": median(lambda: touch_seconds(demo, "touch", path)),
        "touch_mmap_s": median(lambda: touch_seconds(demo, "mmap", *weight_files(path))),
    }
    demo.out.bars([
        ("cold load, once per node", times["cold_s"]),
        ("warm, fresh C++ process, every at::Tensor", times["cpp_warm_s"]),
        ("warm, fresh Python process, every torch.Tensor", times["python_warm_s"]),
        ("  for scale: safetensors load_file", times["safetensors_s"]),
        ("warm, fresh C++ process, every page touched", times["touch_s"]),
        ("  for scale: the same over an mmap of the files", times["touch_mmap_s"]),
    ], report.seconds)
    return {"model": name, "path": str(path), "tensors": tensors, "bytes": payload, **times}


def weight_files(path):
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def touch_seconds(demo, *arguments):
    one = demo.json(BUILD / "bin" / "bench_client", *arguments)
    return one["open_s"] + one["touch_s"]


def process_memory(pid):
    """PSS of a process: what it maps from the cache, and everything else; and how much it can see."""
    cached = rest = visible = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(None, 5)[5] if len(line.split(None, 5)) > 5 else ""
        elif line.startswith(("Pss:", "Rss:")):
            size = int(line.split()[1]) * 1024
            if line.startswith("Rss:"):
                visible += size if "memfd:" in name else 0
            elif "memfd:" in name:
                cached += size
            else:
                rest += size
    return {"pid": pid, "model_pss_bytes": cached, "own_pss_bytes": rest, "model_rss_bytes": visible}


def ask(worker, words):
    worker.stdin.write(words + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended (exit {worker.wait()})")
    return json.loads(line)["sum"]


def show_processes(demo, path, payload):
    """Eight processes at once, each reading the whole model; returns the Python ones still alive."""
    demo.out.title(f"Eight processes at once, each reading all {report.size(payload)}")
    demo.out.line("  PSS: the memory a process maps, each page divided by the number of processes that map it.")
    demo.daemon.settle()  # backing memory with huge pages unmaps it for a moment
    cxx = [demo.start(BUILD / "bin" / "bench_client", "hold", path) for _ in range(CXX_READERS)]
    workers = [demo.start(sys.executable, ROOT / "tools/demo/worker.py", path)
               for _ in range(PYTHON_READERS)]
    for reader in cxx:
        if not reader.stdout.readline().startswith("ready"):
            raise RuntimeError("a C++ reader failed")
    for worker in workers:
        ask(worker, "use")
    rows = [dict(process_memory(p.pid), kind="C++") for p in cxx]
    rows += [dict(process_memory(p.pid), kind="Python") for p in workers]
    daemon = process_memory(demo.daemon.pid)
    shared = sum(row["model_pss_bytes"] for row in rows)
    bars = [(f"{row['kind']} {row['pid']}: PSS of the model", row["model_pss_bytes"]) for row in rows]
    demo.out.bars([*bars, ("all eight together", shared), ("eight copies would be", 8 * payload)], report.size)
    own = {kind: max(row["own_pss_bytes"] for row in rows if row["kind"] == kind) for kind in ("C++", "Python")}
    demo.out.line(f"  besides the model: {report.size(own['C++'])} per C++ process, "
                  f"{report.size(own['Python'])} per Python process (torch), "
                  f"{report.size(daemon['own_pss_bytes'])} for the daemon")
    for reader in cxx:
        reader.stdin.close()
        reader.wait()
        reader.stdout.close()
    return {"processes": rows, "model_pss_bytes": shared, "model_bytes": payload,
            "daemon_pss_bytes": daemon["own_pss_bytes"]}, workers


def show_edit(demo, path, workers):
    """One process doubles a tensor in place; the others, and a later one, must not see it."""
    demo.out.title(f"One process doubles {NORM} in place")
    before = [ask(worker, f"sum {NORM}") for worker in workers]
    edited = ask(workers[0], f"double {NORM}")
    others = [ask(worker, f"sum {NORM}") for worker in workers[1:]]
    later = demo.start(sys.executable, ROOT / "tools/demo/worker.py", path)
    fresh = ask(later, f"sum {NORM}")
    verified = demo.daemon.ctl("verify", path)
    for worker in [*workers, later]:
        worker.stdin.close()
        worker.wait()
        worker.stdout.close()
    isolated = others == before[1:] and fresh == before[0] and edited != before[0]
    demo.out.line(f"  sum in the editing process   {before[0]:12.4f} -> {edited:.4f}")
    demo.out.line(f"  sum in the other processes   {before[1]:12.4f} -> {others[0]:.4f}")
    demo.out.line(f"  sum in a process started now {fresh:12.4f}")
    demo.out.line(f"  daemon's verify              {'intact' if verified['ok'] else 'DAMAGED'}, "
                  f"disk: {verified['disk']}")
    return {"tensor": NORM, "before": before, "edited": edited, "others": others, "fresh": fresh,
            "verified": verified["ok"], "isolated": isolated}


def next_commands(path, tensor):
    """(command, what it does) for a shell in any folder."""
    code = f"import modelcache; print(modelcache.open({str(path)!r})[{tensor!r}])"
    return [
        (f'eval "$({shlex.quote(str(ROOT / "dev"))} env)"', "programs, library and Python package on the paths"),
        (f"modelcachectl load {shlex.quote(str(path))}", "starts a daemon of yours"),
        ("modelcachectl list", "what it holds"),
        (f'"$MODELCACHE_PYTHON" -c {shlex.quote(code)}', "a tensor of it"),
        ("modelcachectl shutdown", "ends your daemon; it stays until then"),
        (f"{shlex.quote(str(ROOT / 'dev'))} bench native", "every figure, with what it must reach"),
    ]


def show_next(out, path):
    out.title("The daemon of this demo is gone. To try next:")
    for command, meaning in next_commands(path, NORM):
        out.line(f"  # {meaning}")
        out.line(f"  {command}")


def run(daemon, out, minilm):
    demo = Demo(daemon, out)
    llama = models.llama()
    out.line(f"Each time is the median of {ROUNDS}, each in a fresh process except the cold load. Imports are not "
             "counted. The files are in the page cache: no time is the disk's.")
    loads = [show_loads(demo, "MiniLM, trained", minilm / "model.safetensors"),
             show_loads(demo, "Llama-shaped, random, bf16, sharded", llama)]
    memory, workers = show_processes(demo, llama, loads[1]["bytes"])
    edit = show_edit(demo, llama, workers)
    return {"loads": loads, "memory": memory, "edit": edit, "machine": machine()}


def main(arguments):
    parser = argparse.ArgumentParser(prog="./dev demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON; the talk goes to stderr")
    parser.add_argument("--minilm", type=Path, required=True, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    out = report.Printer(to_stderr=options.json)
    if not (models.FOLDER / "llama-1.5g").exists():
        out.line("making the 1.5 GB checkpoint (once)")
    models.llama()
    with PrivateDaemon(BUILD) as daemon:
        os.environ.update(MODELCACHE_SOCKET=str(daemon.socket), MODELCACHE_AUTOSTART="0")
        try:
            result = run(daemon, out, options.minilm)
        except (RuntimeError, modelcache.Error, subprocess.CalledProcessError) as error:
            print(f"demo: {error}\n{daemon.log_text()}", file=sys.stderr)
            return 1
    show_next(out, models.llama())
    if options.json:
        print(json.dumps(result, indent=1))
    return 0 if result["edit"]["isolated"] and result["edit"]["verified"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
