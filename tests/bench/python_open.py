"""Times one way to get all tensors of a model in a fresh process, imports not counted.

    python_open.py modelcache|safetensors|torch_mmap PATH
"""

import json
import sys
import time
from pathlib import Path

import torch


def with_modelcache(path):
    import modelcache

    return lambda: modelcache.open(path).state_dict()


def with_safetensors(path):
    from safetensors.torch import load_file

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path]
    return lambda: {name: tensor for file in files for name, tensor in load_file(file).items()}


def with_torch_mmap(path):
    return lambda: torch.load(path, mmap=True, weights_only=True)


def main(way, path):
    load = globals()[f"with_{way}"](path)
    torch.zeros(1)  # what torch sets up once is not part of any of them
    start = time.perf_counter()
    tensors = load()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "tensors": len(tensors)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
