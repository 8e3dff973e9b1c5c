"""Compares attention implementations over the model classes of transformers; see
scripts/transformers-sweep.

Each class is built tiny from its own configuration. Its outputs and gradients with
``attn_implementation="annulus"`` are compared with those of ``eager`` and ``sdpa``. A worker
process compares one class after another. A worker that takes too much CPU time for a class ends,
and another one goes on after that class.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import Any

SECONDS = 60
KINDS = ("equal", "refused", "differs", "crash", "eager only", "not built")


def work(seconds: float) -> None:
    """Compares the classes that are named on stdin, one line of JSON for each.

    Args:
        seconds: CPU time of a class, after which the process ends.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from transformers_cases import Sweep

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        sweep = Sweep(name)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                kind = sweep.compare()
            except Exception as error:
                kind = "not built"
                sweep.rows = {"": f"{type(error).__name__}: {str(error)[:1500]}"}
        answer = {
            "name": name,
            "kind": kind,
            "rows": sweep.rows,
            "keywords": sorted(sweep.keywords),
        }
        print(json.dumps(answer), flush=True)


class Worker:
    """A process that compares classes, and lines that it has written."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", "--seconds", str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        # the imports of a worker are not the time of a class
        assert self.lines.get(timeout=600) == "ready\n", "a worker ended as it began"

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def compare(self, name: str) -> dict[str, Any] | None:
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=20 * self.seconds)  # a worker that waits
        except queue.Empty:
            line = ""
        if line:
            return json.loads(line)
        self.process.kill()
        return None


def table(known: dict[str, Any]) -> str:
    """Returns the page of all results."""
    import torch
    import transformers
    from tiny_transformers import decoder_only

    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted(known):
        kinds[known[name]["kind"]].append(name)
    calling = [*kinds["equal"], *kinds["refused"], *kinds["differs"], *kinds["crash"]]
    decoders = [name for name in calling if name in decoder_only()]
    equal = set(kinds["equal"])
    lines = [
        "# Model classes of transformers",
        "",
        "`scripts/transformers-sweep` wrote this page, with transformers"
        f" {transformers.__version__} and torch {torch.__version__}.",
        "It builds one class of each model type tiny from its own configuration, and compares",
        '`attn_implementation="annulus"` with `eager` and `sdpa`: outputs, gradients, padding on',
        "either side, packed positions, `generate` with a growing and with a static cache.",
        "",
        "| result | classes | causal language models |",
        "|---|---:|---:|",
    ]
    names = {
        "equal": "equal",
        "refused": "a case is refused, by the name of an argument",
        "differs": "a case differs silently",
        "crash": "another error",
        "eager only": "never calls the attention interface",
        "not built": "not built from its default configuration, or without inputs",
    }
    for kind, text in names.items():
        few = len([name for name in kinds[kind] if name in decoder_only()])
        lines.append(f"| {text} | {len(kinds[kind])} | {few} |")
    lines += [
        "",
        f"Of {len(calling)} classes that call the attention interface {len(equal)} are equal; of"
        f" {len(decoders)}",
        f"causal language models among them {len(equal & set(decoders))}.",
    ]
    for kind in ("refused", "differs", "crash"):
        lines += ["", f"## {names[kind].capitalize()}", ""]
        for name in kinds[kind]:
            rows = known[name]["rows"]
            bad = {case: text for case, text in rows.items() if text.startswith(kind)}
            what = sorted(
                {text.split("|")[0].removeprefix(kind + ":").strip() for text in bad.values()}
            )
            cases = "all cases" if len(bad) == len(rows) else ", ".join(bad)
            lines += textwrap.wrap(
                f"* {name}: {'; '.join(what)} ({cases})", 100, subsequent_indent="  "
            )
        if not kinds[kind]:
            lines.append("None.")
    for kind in ("equal", "eager only", "not built"):
        lines += ["", f"## {names[kind].capitalize()}", ""]
        lines += textwrap.wrap(", ".join(kinds[kind]) + ".", 100)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", help="default: all")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="file of results, one class a line")
    parser.add_argument("--again", nargs="*", help="kinds of --json that are compared again")
    parser.add_argument("--table", help="file of the table")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth class")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time of each class")
    given = parser.parse_args()
    if given.work:
        work(given.seconds)
        return
    from tiny_transformers import names

    classes = given.classes or names()
    index, count = map(int, given.part.split("/"))
    classes = classes[index::count]
    known: dict[str, Any] = {}
    if given.json and os.path.exists(given.json):
        with open(given.json) as file:
            known = {one["name"]: one for one in map(json.loads, file)}
        if given.again is not None:
            known = {k: v for k, v in known.items() if v["kind"] not in given.again}
        elif not given.classes:
            known = {}
    worker = Worker(given.seconds)
    for name in classes:
        if name in known and not given.classes:
            continue
        answer = worker.compare(name)
        if answer is None:
            answer = {"name": name, "kind": "not built", "rows": {"": "no answer"}, "keywords": []}
            worker = Worker(given.seconds)
        known[name] = answer
        bad = [f"{k} → {v}" for k, v in answer["rows"].items() if v != "equal"]
        print(answer["kind"].ljust(10), name, *bad[:6], sep="  ", flush=True)
        if given.json:
            with open(given.json, "w") as file:
                file.writelines(json.dumps(one) + "\n" for one in known.values())
    worker.process.stdin.close()
    print(collections.Counter(one["kind"] for one in known.values()))
    if given.table:
        with open(given.table, "w") as file:
            file.write(table(known))


if __name__ == "__main__":
    main()
