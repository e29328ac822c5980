"""The command `latentwatch <command> [arguments]`: each command is one recipe with a `main(argv)`."""

from __future__ import annotations

import importlib
import os
import sys

# The recipe's module is imported only when its command is run: the others may need packages or seconds it does not.
COMMANDS = {
    "demo": "watch a small model forget a concept, start to end",
    "unlearn": "unlearn a forget set while the measures watch",
    "audit": "read every measure once on a model, without training",
    "attack": "try to get back what a model was made to forget",
    "merge": "mix two checkpoints or adapters at given ratios, or subtract a task vector",
    "check": "validate a forget-set file and say what is wrong with it, line by line",
    "study": "re-run an experiment of the detectability paper, or MAxBench, on a model",
    "power": "plan a bias audit: from purity and effect size to the sample size, and back",
    "models": "list the embedded models, or fetch one",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: latentwatch COMMAND [arguments]", "", "commands:", *lines, ""]
        + ["latentwatch COMMAND --help shows a command's arguments; latentwatch --version the version."]
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("latentwatch")
    except PackageNotFoundError:
        return "(not installed)"


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : list of str, optional
        The arguments after the program's name; those of the process by default.

    Returns
    -------
    int
        The exit status: 0 done, 1 an error the command explains, 2 a command or argument that does not exist,
        130 interrupted.

    Notes
    -----
    Errors a recipe raises about its input are printed as a message, without a traceback; set `LATENTWATCH_DEBUG=1` to
    see it. Anything else is a defect and keeps its traceback.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        print(_usage(), file=sys.stderr)
        return 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help"):
        print(_usage())
        return 0
    if command == "--version":
        print(f"latentwatch {_version()}")
        return 0
    if command not in COMMANDS:
        print(f"latentwatch: unknown command {command!r}: expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return _run(command, rest)


def _run(command: str, arguments: list[str]) -> int:
    from recipes.embedded import ModelError

    debug = os.environ.get("LATENTWATCH_DEBUG", "") not in ("", "0")
    recipe = importlib.import_module(f"recipes.{command}")
    try:
        recipe.main(arguments)
    except BrokenPipeError:  # the reader of our output went away, as in `latentwatch models | head -1`
        sys.stdout = open(os.devnull, "w")  # the interpreter flushes it at exit
        return 0
    except (ValueError, OSError, ModelError) as error:
        if debug:
            raise
        print(f"latentwatch {command}: error: {error}", file=sys.stderr)
        print("(LATENTWATCH_DEBUG=1 shows where it was raised)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"latentwatch {command}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
