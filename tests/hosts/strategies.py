"""Predicted and measured time of strategies, for tests/hosts/strategies.

usage: python3 tests/hosts/strategies.py plan HOSTS N     a plan's JSON -> a line for each strategy
       python3 tests/hosts/strategies.py names [NAME...]  a plan's JSON -> names of the strategies:
                                                          of all, or of NAME and the chosen one
       python3 tests/hosts/strategies.py bench HOSTS NAME a line of `annulus bench` -> a line
       python3 tests/hosts/strategies.py table            all lines -> a Markdown table

Reads standard input, writes standard output.
"""

import json
import statistics
import sys

# A prediction is good within this share of the measurement, and a choice if it loses no more than
# the second to any other strategy. A loss is measured between runs of one round, which follow each
# other, because the machine may be slower in another minute.
NEAR = 0.15
LATE = 0.05


def plan(hosts: str, n: str) -> None:
    figures = json.load(sys.stdin)
    for strategy in figures["strategies"]:
        line = {
            "hosts": int(hosts),
            "ranks": figures["ranks"],
            "n": int(n),
            "strategy": strategy["name"],
            "chosen": strategy["name"] == figures["strategy"],
            "predicted_ms": strategy["time_predicted"] * 1e3,
        }
        print(json.dumps(line))


def names(*wanted: str) -> None:
    figures = json.load(sys.stdin)
    for strategy in figures["strategies"]:
        name = strategy["name"]
        if not wanted or name in wanted or name == figures["strategy"]:
            print(name)


def bench(hosts: str, name: str) -> None:
    measured = json.load(sys.stdin)
    line = {
        "hosts": int(hosts),
        "ranks": measured["ranks"],
        "n": measured["n"],
        "strategy": name,
        "measured_ms": measured["ms"],
    }
    print(json.dumps(line))


def table() -> None:
    cases: dict[tuple[int, int, int], dict[str, tuple[float, bool, list[float]]]] = {}
    for line in filter(None, map(str.strip, sys.stdin)):
        of = json.loads(line)
        case = cases.setdefault((of["hosts"], of["ranks"], of["n"]), {})
        if "predicted_ms" in of:
            case[of["strategy"]] = (of["predicted_ms"], of["chosen"], [])
        else:
            case[of["strategy"]][2].append(of["measured_ms"])
    print("| hosts | ranks | N | strategy | predicted ms | measured ms | spread | ratio | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    near = total = good = 0
    losses = []
    for (hosts, ranks, n), strategies in cases.items():
        of_choice = next(measured for _, chosen, measured in strategies.values() if chosen)
        largest = 0.0
        for name, (predicted, chosen, measured) in strategies.items():
            if not measured:
                continue
            median = statistics.median(measured)
            spread = (max(measured) - min(measured)) / median
            ratio = predicted / median
            rounds = zip(of_choice, measured, strict=True)
            loss = statistics.median(choice / other for choice, other in rounds) - 1
            largest = max(largest, loss)
            total += 1
            near += abs(ratio - 1) <= NEAR
            shown = f"**{name}**" if chosen else name
            print(
                f"| {hosts} | {ranks} | {n} | {shown} | {predicted:.1f} | {median:.1f} "
                f"| {spread:.0%} | {ratio:.3f} | {loss:+.1%} |"
            )
        good += largest <= LATE
        losses.append(largest)
    print(
        f"\n{near} of {total} predictions are within {NEAR:.0%} of the measurement. "
        f"The choice (bold) loses at most {LATE:.0%} to any other strategy in {good} of "
        f"{len(losses)} cases, and {max(losses):.1%} at most."
    )


COMMANDS = {"plan": plan, "names": names, "bench": bench, "table": table}
COMMANDS[sys.argv[1]](*sys.argv[2:])
