"""Prints the JSON lines of `mpi-timing overlap` as a Markdown table: python3 tests/hosts/table.py FILE."""

import json
import sys


def main() -> None:
    print("| hosts | pass | tiles | compute s | communication s | sent MiB | moved by | ring s | hidden | spread |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with open(sys.argv[1], encoding="utf-8") as lines:
        for line in filter(None, map(str.strip, lines)):
            case = json.loads(line)
            tiles = "paced" if case["paced_ms"] else "cpu"
            for name, way in case["moved_by"].items():
                print(
                    f"| {case['ranks']} | {case['what']} | {tiles} | {case['compute_seconds']:.3f} | {case['communication_seconds']:.3f}"
                    f" | {case['bytes_sent'] / 2**20:.1f} | {name} | {way['ring_seconds']:.3f} | {way['hidden']:.0%}"
                    f" | ±{way['hidden_spread']:.0%} |"
                )
            cost = case["ticks_cost"]
            print(f"\nticks without messages, {case['ranks']} hosts, {case['what']}: {cost:+.2%} of the time of tiles that never tick\n", file=sys.stderr)


main()
