"""./dev: the one script of modelcached.

  build                    install what is missing, make .venv, build into build/release
  test                     everything CI checks: format, clang-tidy, sanitizers, ctest, pytest
  demo [--json]            load once, map everywhere: shown on real weights
  bench [native] [--json FILE]
                           measure; a table, and the rows as JSON
  format | tidy            clang-format in place | clang-tidy on what changed
  fuzz [SECONDS]           every fuzz target for its share of SECONDS (60)
  env                      exports for a shell: eval "$(./dev env)"
  install PREFIX           install programs, library, headers, Python package, units
  clean                    remove build/ and .dev/ (the .venv stays; clean --all removes it too)

Environment: MODELCACHE_PYTHON=/path/python uses that interpreter and its torch instead of .venv.
"""

import os
import shlex
import shutil
import sys

import building
import checking
import environment
from shell import BUILD, ROOT, STATE, DevError, run


def _in_python(script, arguments):
    """Replaces this process by `script` under the interpreter that has torch."""
    command = [environment.python(), str(ROOT / script), *arguments]
    sys.stdout.flush()
    os.execve(command[0], command, environment.run_environment())


def _resolved(interpreter):
    return interpreter if os.sep in interpreter else shutil.which(interpreter) or interpreter


def command_build(arguments):
    if arguments:
        raise DevError("build takes no arguments")
    building.build()
    return 0


def command_test(_arguments):
    return checking.test()


def command_demo(arguments):
    environment.ensure_python(for_tests=True)
    building.build()
    minilm = environment.ensure_minilm()
    return _in_python("tools/demo/demo.py", ["--minilm", str(minilm), *arguments])


def command_bench(arguments):
    names = [word for word in arguments[:1] if not word.startswith("-")]
    if names not in ([], ["native"]):
        raise DevError(f"no bench called {names[0]}; there is: native")
    environment.ensure_python(for_tests=True)
    building.build()
    return _in_python("tests/bench/native.py", arguments[len(names):])


def command_format(_arguments):
    checking.format_sources(check=False)
    return 0


def command_tidy(_arguments):
    building.build()
    checking.tidy()
    return 0


def command_fuzz(arguments):
    try:
        seconds = int(arguments[0]) if arguments else 60
    except ValueError:
        raise DevError("usage: ./dev fuzz [SECONDS]") from None
    checking.fuzz(seconds)
    return 0


def command_env(_arguments):
    if not (BUILD / "release" / "bin").exists():
        raise DevError("nothing is built yet: ./dev build")
    for name, (value, prepend) in environment.user_variables().items():
        text = shlex.quote(value)
        print(f'export {name}={text}"${{{name}:+:${name}}}"' if prepend else f"export {name}={text}")
    return 0


def command_install(arguments):
    if len(arguments) != 1:
        raise DevError("usage: ./dev install PREFIX")
    building.build()
    run(["cmake", "--install", BUILD / "release", "--prefix", os.path.abspath(arguments[0])])
    return 0


def command_clean(arguments):
    folders = [BUILD, STATE] + ([ROOT / ".venv"] if "--all" in arguments else [])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def command_help(_arguments):
    print(__doc__.strip())
    return 0


def main(arguments):
    name = arguments[0] if arguments else "help"
    if name in ("-h", "--help"):
        name = "help"
    action = globals().get(f"command_{name}")
    if action is None:
        print(f"dev: no command {name!r}; ./dev help lists them", file=sys.stderr)
        return 2
    if environment.own_python():
        os.environ["MODELCACHE_PYTHON"] = _resolved(environment.own_python())
    try:
        return action(arguments[1:])
    except DevError as error:
        print(f"dev: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
