"""Predicted and measured time of strategies, for tests/hosts/strategies.

usage: python3 tests/hosts/strategies.py plan HOSTS N     a plan's JSON -> a line for each strategy
       python3 tests/hosts/strategies.py names [NAME...]  a plan's JSON -> names of the strategies:
                                                          of all, or of NAME and the chosen one
       python3 tests/hosts/strategies.py bench HOSTS NAME a line of `annulus bench` -> a line
       python3 tests/hosts/strategies.py undecided        all lines -> names of the strategies that
                                                          need another round in the last case
       python3 tests/hosts/strategies.py table            all lines -> a Markdown table

Reads standard input, writes standard output.
"""

import json
import math
import statistics
import sys
from typing import NamedTuple

# A prediction is good within this share of the measurement, and a choice if it loses no more than
# the second to any other strategy. Both are compared within a round, because the machine may be
# slower in another minute: the rates of a virtual machine differed by a fifth within ten minutes.
NEAR = 0.15
LATE = 0.1

# Rounds after which a loss is reported as undecided.
MOST_ROUNDS = 15

Case = tuple[int, int, int]  # hosts, ranks, N


class Times(NamedTuple):
    """Times of a strategy in one case, in milliseconds and in the order of rounds."""

    predicted: list[float]
    chosen: bool
    measured: list[float]


class Loss(NamedTuple):
    """Loss of the choice to a strategy: the median of rounds, and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    def is_decided(self) -> bool:
        return self.high <= LATE or self.low > LATE


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


def read_cases() -> dict[Case, dict[str, Times]]:
    cases: dict[Case, dict[str, Times]] = {}
    for line in filter(None, map(str.strip, sys.stdin)):
        of = json.loads(line)
        case = cases.setdefault((of["hosts"], of["ranks"], of["n"]), {})
        # the choice is that of the first prediction
        times = case.setdefault(of["strategy"], Times([], of.get("chosen", False), []))
        if "predicted_ms" in of:
            times.predicted.append(of["predicted_ms"])
        else:
            times.measured.append(of["measured_ms"])
    return cases


def times_of_choice(strategies: dict[str, Times]) -> list[float]:
    return next(times.measured for times in strategies.values() if times.chosen)


def loss_of(choice: list[float], other: list[float]) -> Loss:
    # A strategy that needs no further round has fewer than the choice: the first ones.
    losses = sorted(mine / its - 1 for mine, its in zip(choice, other, strict=False))
    rounds = len(losses)
    # The k-th smallest and the k-th largest enclose the median of all possible rounds unless fewer
    # than k of them are on one side of it. With fewer than six rounds no k makes that rarer
    # than 5 %; the interval is then all of them.
    outside, k = 0.0, 0
    while True:
        outside += 2 * math.comb(rounds, k) / 2**rounds
        if outside > 0.05:
            break
        k += 1
    k = max(k, 1)
    return Loss(statistics.median(losses), losses[k - 1], losses[rounds - k])


def undecided() -> None:
    *_, strategies = read_cases().values()
    choice = times_of_choice(strategies)
    if len(choice) >= MOST_ROUNDS:
        return
    names = [
        name
        for name, times in strategies.items()
        if times.measured
        and not times.chosen
        and not loss_of(choice, times.measured).is_decided()
    ]
    if names:
        names += [name for name, times in strategies.items() if times.chosen]
        print("\n".join(names))


def table() -> None:
    print(
        "| hosts | ranks | N | strategy | predicted ms | measured ms | rounds | ratio | loss "
        "| 95 % |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    near = total = good = unsure = 0
    largest = []
    for (hosts, ranks, n), strategies in read_cases().items():
        choice = times_of_choice(strategies)
        losses = []
        for name, (predicted, chosen, measured) in strategies.items():
            if not measured:
                continue
            # further rounds have no prediction
            pairs = zip(predicted, measured, strict=False)
            ratio = statistics.median(expected / actual for expected, actual in pairs)
            loss = loss_of(choice, measured)
            losses.append(loss)
            total += 1
            near += abs(ratio - 1) <= NEAR
            shown = f"**{name}**" if chosen else name
            print(
                f"| {hosts} | {ranks} | {n} | {shown} | {statistics.median(predicted):.1f} "
                f"| {statistics.median(measured):.1f} "
                f"| {len(measured)} | {ratio:.3f} | {loss.median:+.1%} "
                f"| {loss.low:+.1%} to {loss.high:+.1%} |"
            )
        largest.append(max(loss.median for loss in losses))
        good += largest[-1] <= LATE
        unsure += not all(loss.is_decided() for loss in losses)
    print(
        f"\n{near} of {total} predictions are within {NEAR:.0%} of the measurement. "
        f"The choice (bold) loses at most {LATE:.0%} to any other strategy in {good} of "
        f"{len(largest)} cases ({unsure} undecided after {MOST_ROUNDS} rounds), and "
        f"{max(largest):.1%} at most."
    )


COMMANDS = {
    "plan": plan,
    "names": names,
    "bench": bench,
    "undecided": undecided,
    "table": table,
}
COMMANDS[sys.argv[1]](*sys.argv[2:])
