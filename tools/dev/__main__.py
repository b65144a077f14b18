"""./dev: the one script of modelcached; `./dev help` lists its commands."""

import argparse
import os
import shlex
import shutil
import sys

import building
import checking
import environment
from shell import BUILD, ROOT, STATE, DevError, run, say

ENVIRONMENT = """\
`./dev COMMAND --help` says more about one command.

environment:
  MODELCACHE_PYTHON=/path/python   uses that interpreter and its torch instead of .venv"""


def _in_python(script, arguments):
    """Replaces this process by `script` under the interpreter that has torch."""
    command = [environment.python(), str(ROOT / script), *arguments]
    sys.stdout.flush()
    os.execve(command[0], command, environment.run_environment())


def _resolved(interpreter):
    """A path that means the same from every folder."""
    if os.sep in interpreter:
        return os.path.abspath(interpreter)
    return shutil.which(interpreter) or interpreter


def command_build(_options):
    building.build()
    return 0


def command_test(options):
    return checking.test(require_boot=options.require_boot)


def command_demo(options):
    environment.ensure_python(for_tests=True)
    building.build()
    minilm = environment.ensure_minilm()
    return _in_python("tools/demo/demo.py", ["--minilm", str(minilm), *(["--json"] if options.json else [])])


def command_bench(options):
    environment.ensure_python(for_tests=True)
    building.build()
    given = {"--json": options.json, "--only": options.only, "--rounds": options.rounds}
    words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    return _in_python("tests/bench/native.py", words)


def command_format(_options):
    checking.format_sources(check=False)
    return 0


def command_tidy(_options):
    building.build()
    checking.tidy()
    return 0


def command_fuzz(options):
    checking.fuzz(options.seconds)
    return 0


def command_env(_options):
    if not (BUILD / "release" / "bin").exists():
        raise DevError("nothing is built yet: ./dev build")
    try:
        building.install_prefix()
    except DevError as error:  # programs and package of a half-made build are of use all the same
        say(f"{error}\nfind_package(modelcache) needs a whole build: ./dev build")
    for name, (value, prepend) in environment.user_variables().items():
        text = shlex.quote(value)
        print(f'export {name}={text}"${{{name}:+:${name}}}"' if prepend else f"export {name}={text}")
    return 0


def command_install(options):
    building.build()
    run(["cmake", "--install", BUILD / "release", "--prefix", options.prefix])
    return 0


def command_clean(options):
    folders = [BUILD, STATE] + ([ROOT / ".venv"] if options.all else [])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


class Parser(argparse.ArgumentParser):
    """No abbreviations, and errors of one line that say where the help is."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"dev: {message}; `./dev help` lists what there is\n")


def _positive(text):
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_positive.__name__ = "positive number"  # argparse: invalid positive number value: '0'


def _path(text):
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return os.path.abspath(text)


def _add_commands(parser):
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    def add(name, action, text):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(action=action)
        return command

    add("build", command_build, "install what is missing, make .venv, build into build/release")
    test = add("test", command_test, "everything CI checks: format, clang-tidy, sanitizers, ctest, pytest")
    test.add_argument("--require-boot", action="store_true",
                      help="fail when the units could not be tested in a booted systemd (CI does)")
    demo = add("demo", command_demo, "load once, map everywhere: shown on real weights")
    demo.add_argument("--json", action="store_true", help="figures as JSON; the talk goes to stderr")
    bench = add("bench", command_bench, "measure; a table, and the rows as JSON")
    bench.add_argument("what", nargs="?", choices=["native"], help="native, the only one so far")
    bench.add_argument("--json", metavar="FILE", type=_path, help="write the rows to FILE as JSON")
    bench.add_argument("--only", metavar="PART", help="one part; a wrong one is told the parts")
    bench.add_argument("--rounds", metavar="N", type=_positive, help="fresh processes per figure")
    add("format", command_format, "clang-format every source in place")
    add("tidy", command_tidy, "clang-tidy on what changed since it was last clean")
    fuzz = add("fuzz", command_fuzz, "every fuzz target for its share of SECONDS")
    fuzz.add_argument("seconds", nargs="?", metavar="SECONDS", type=_positive, default=60, help="default: 60")
    add("env", command_env, 'exports for a shell: eval "$(./dev env)"')
    install = add("install", command_install,
                  "install programs, library, headers, Python package, CMake package, units")
    install.add_argument("prefix", metavar="PREFIX", type=_path, help="for example ~/.local or /usr/local")
    clean = add("clean", command_clean, "remove build/ and .dev/")
    clean.add_argument("--all", action="store_true", help="the .venv too")
    return commands


def _parser():
    parser = Parser(prog="./dev", description="The one script of modelcached.", epilog=ENVIRONMENT,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = _add_commands(parser)
    shown = commands.add_parser("help", help="this list, or the help of one command")
    shown.add_argument("topic", nargs="?", metavar="COMMAND", choices=list(commands.choices))

    def command_help(options):
        (commands.choices[options.topic] if options.topic else parser).print_help()
        return 0

    shown.set_defaults(action=command_help)
    parser.set_defaults(action=lambda _options: parser.print_help() or 0)
    return parser


def main(arguments):
    options = _parser().parse_args(arguments)
    if environment.own_python():
        os.environ["MODELCACHE_PYTHON"] = _resolved(environment.own_python())
    try:
        return options.action(options)
    except DevError as error:
        print(f"dev: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
