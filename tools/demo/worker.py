"""A Python process that uses a model and does what its standard input says, one JSON line each.

    use          touches every page          -> {"sum": …}
    sum NAME     sum of one tensor           -> {"sum": …}
    double NAME  doubles it in place         -> {"sum": …}
"""

import json
import sys

import modelcache


def touch(model):
    total = 0.0
    for tensor in model.state_dict().values():
        total += float(tensor.sum(dtype=float_type(tensor)))
    return total


def float_type(tensor):
    import torch

    return torch.float32 if tensor.dtype.is_floating_point else torch.int64


def main(path):
    model = modelcache.open(path)
    for line in sys.stdin:
        word, _, name = line.strip().partition(" ")
        if word == "use":
            total = touch(model)
        else:
            tensor = model[name]
            if word == "double":
                tensor.mul_(2)
            total = float(tensor.double().sum())
        print(json.dumps({"sum": total}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
