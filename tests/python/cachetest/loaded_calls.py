"""Functions that the loader's tests call through it."""

import os
import sys

import torch


class Net(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = torch.nn.Parameter(w)


def net_from(path):
    return Net(torch.load(path))


def surroundings():
    import only_here

    return {
        "folder": os.getcwd(),
        "variable": os.environ["SOMETHING_OF_MINE"],
        "disabled": os.environ["MODELCACHE_DISABLE"],
        "argv": sys.argv,
        "import": only_here.f(),
    }


def new_tensor():
    return torch.zeros(2)


class Made:
    @classmethod
    def made(cls):
        return cls()


class Other(Made):
    pass


class Config:
    def __init__(self, size):
        self.size = size


def keeps(nested, config=None):
    own = torch.tensor([5])
    return {"config": config, "first": nested, "tensor": nested[1]["deep"], "own": own}


def changes(options):
    options["b"] = 2
    return torch.ones(1)


def first_weight(module):
    return [module.weight]


class Special(ValueError):
    def __str__(self):
        return f"{self.args[0]} ({self.args[1]})"


def raises(text):
    raise Special(text, 2)


class Stubborn(Exception):
    def __init__(self, one, *, two):
        super().__init__(one)
        self.two = two


def raises_stubborn():
    raise Stubborn("a", two="b")


def exits():
    sys.exit(3)


class Log:
    pass


def holds_file(path):
    net = Net(torch.ones(1))
    net.parts = {"log": Log()}
    net.parts["log"].stream = open(path)
    return net


class OnlyHere:
    def __reduce__(self):
        return _at, (os.getpid(),)


def _at(pid):
    if pid != os.getpid():
        raise RuntimeError("not here")
    return OnlyHere()
