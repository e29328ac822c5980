"""Programs in processes of their own, forked from a server that has imported the packages once.

Importing transformers, trl and peft takes longer than most tests do; a fresh interpreter a process would spend a test
run's time on it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["recipes.unlearn", "recipes.audit", "datasets"])


@dataclass(frozen=True)
class Done:
    """What all ranks together wrote."""

    stdout: str
    stderr: str


def start(
    program: str | Path, arguments: Sequence[str | Path], output: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start a script (a path that ends with .py) or a module as __main__, on one thread.

    Its standard output and error are appended to `output` with the suffixes .stdout and .stderr.
    """
    process = _SERVER.Process(
        target=_main, args=(str(program), [str(a) for a in arguments], str(output), dict(environment or {}))
    )
    process.start()
    return process


def run(
    program: str | Path,
    arguments: Sequence[str | Path],
    folder: Path,
    *,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> Done:
    """Run a program on one rank, or on several as torchrun does, and fail where it fails; logs go into `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [folder / f"{Path(program).stem}-{ranks}-rank{rank}" for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        of_rank = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        } if ranks > 1 else {}  # fmt: skip
        of_rank = {name: str(value) for name, value in of_rank.items()} | dict(environment or {})
        processes.append(start(program, arguments, output, of_rank))
    end = time.monotonic() + timeout
    while any(p.is_alive() for p in processes) and time.monotonic() < end and not any(p.exitcode for p in processes):
        time.sleep(0.05)
    for process in processes:
        # The others of a rank that failed would wait for it.
        if process.is_alive():
            process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    said, errors = (
        "".join(Path(f"{output}.{stream}").read_text() for output in outputs) for stream in ("stdout", "stderr")
    )
    assert codes == [0] * ranks, f"exit codes {codes}\n{errors[-4000:]}"
    return Done(said, errors)


def _main(program: str, arguments: list[str], output: str, environment: dict[str, str]) -> None:
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    sys.argv = [program, *arguments]
    code = 1
    try:
        # What the program leaves behind is kept: gloo's process groups, when they are freed, now and then wait for a
        # thread that waits for them.
        if program.endswith(".py"):
            _ = runpy.run_path(program, run_name="__main__")
        else:
            _ = runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without freeing it at the interpreter's end either
