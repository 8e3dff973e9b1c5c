"""Prints the JSON lines of `mpi-timing overlap` as a Markdown table.

usage: python3 tests/hosts/table.py FILE
"""

import json
import sys

COLUMNS = (
    "hosts",
    "pass",
    "tiles",
    "compute s",
    "communication s",
    "sent MiB",
    "moved by",
    "ring s",
    "hidden",
    "spread",
)


def row(cells):
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    print(row(COLUMNS))
    print("|---" * len(COLUMNS) + "|")
    with open(sys.argv[1], encoding="utf-8") as lines:
        for line in filter(None, map(str.strip, lines)):
            case = json.loads(line)
            for name, moved in case["moved_by"].items():
                cells = [
                    str(case["ranks"]),
                    case["what"],
                    "paced" if case["paced_ms"] else "cpu",
                    f"{case['compute_seconds']:.3f}",
                    f"{case['communication_seconds']:.3f}",
                    f"{case['bytes_sent'] / 2**20:.1f}",
                    name,
                    f"{moved['ring_seconds']:.3f}",
                    f"{moved['hidden']:.0%}",
                    f"±{moved['hidden_spread']:.0%}",
                ]
                print(row(cells))
            print(
                f"\nticks without messages, {case['ranks']} hosts, {case['what']}: "
                f"{case['ticks_cost']:+.2%} of the time of tiles that never tick\n",
                file=sys.stderr,
            )


main()
