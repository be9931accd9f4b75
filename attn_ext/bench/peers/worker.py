"""One engine in a process of its own: reads requests, runs the model, answers with the time of every step.

    python worker.py ENGINE DIRECTORY DTYPE THREADS MAX_SEQS MAX_LEN

ENGINE is a file beside this one. It has a class `Engine(directory, dtype, threads, max_seqs, max_len)` with

    version                     "name 1.2.3", and settings worth knowing
    generate(prompts, n, step)  greedy: n tokens after each of the prompts (lists of token ids, equally long), with
                                end-of-text a token like any other; `step()` is called after each step of all
                                sequences, so n times, first after the prompts were read; -> n tokens per prompt

Requests and answers are lines of JSON on stdin and on the first stdout; what the engine itself prints goes to stderr.
A process of its own, because engines bring threads, memory and environment settings that would disturb each other; and
it may be another Python with other packages. So this file imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing but answers may reach the reader
    name, directory, dtype, threads, max_seqs, max_len = sys.argv[1:]
    # (before any engine is imported: OpenMP reads it once)
    os.environ["OMP_NUM_THREADS"] = threads
    del sys.path[0]  # this folder, whose files are named after the packages that they import
    try:
        spec = importlib.util.spec_from_file_location(f"{name}_engine", Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        engine = module.Engine(directory, dtype, int(threads), int(max_seqs), int(max_len))
    except Exception as error:
        import traceback

        traceback.print_exc()
        answers.write(json.dumps({"unavailable": f"{type(error).__name__}: {error}".splitlines()[0]}) + "\n")
        return
    answers.write(json.dumps({"version": engine.version}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        times = [time.perf_counter()]
        tokens = engine.generate(request["prompts"], request["n"], lambda: times.append(time.perf_counter()))  # noqa: B023
        steps = [after - before for before, after in zip(times, times[1:])]  # noqa: B905
        answers.write(json.dumps({"tokens": tokens, "seconds": steps}) + "\n")


if __name__ == "__main__":
    main()
