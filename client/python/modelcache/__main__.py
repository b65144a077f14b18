"""`python -m modelcache`: what is installed, and whether a daemon answers."""

from __future__ import annotations

import argparse
import json
import sys

import modelcache
from modelcache import _ffi


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m modelcache",
        description="Python client of modelcached. `modelcachectl` controls the daemon.",
    )
    parser.add_argument("--version", action="store_true", help="versions of package and library")
    parser.add_argument("--status", action="store_true", help="counters of the daemon as JSON")
    arguments = parser.parse_args()
    if arguments.version:
        print(f"modelcache {modelcache.__version__}")
        print(f"library {_ffi.library().mc_version().decode()} ({_ffi.library()._name})")
        return 0
    if arguments.status:
        with modelcache.Client(autostart=False) as client:
            print(json.dumps(client.status(), indent=2))
        return 0
    parser.print_help()
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except modelcache.UnavailableError as failure:
        print(f"modelcache: {failure}", file=sys.stderr)
        sys.exit(3)
    except (modelcache.Error, ImportError) as failure:
        print(f"modelcache: {failure}", file=sys.stderr)
        sys.exit(1)
