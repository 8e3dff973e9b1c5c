#!/usr/bin/env bash
# Measures how long the ranks of a ring wait for each other on packed documents: wall time of
# `annulus bench` on MPI ranks, each of which has a fixed share of a core, so that a rank that waits
# leaves its share to nobody. So a machine with fewer cores than ranks can measure it, if their
# shares together are below its cores. Needs Linux control groups, as root.
#
#   usage: benches/packed-waits.sh [rounds=3] [ranks=4] [share=0.3] [strategies=ring,heads:2]
#                                  [ahead=1,4] [what=fwd,fwd+bwd] [rows=16384] [annulus=PATH]
#
# `annulus` is a command with MPI (Open MPI) of another build. Without it that of this tree is
# built.
#
# Prints a JSON line for each round, batch, pass, strategy and number of ring steps by which
# receives are posted ahead. `ms` is the least wall time of a pass. `busy` is the least CPU time of
# all ranks, divided by what their shares permit in that wall time: 1 if no rank waits or is idle.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=3 ranks=4 share=0.3 strategies=ring,heads:2 ahead=1,4 what=fwd,fwd+bwd rows=16384
annulus=
for setting in "$@"; do
  case $setting in
    rounds=* | ranks=* | share=* | strategies=* | ahead=* | what=* | rows=* | annulus=*)
      declare "$setting"
      ;;
    *)
      sed -n '/^#   usage/,/^#$/s/^# *//p' "$0" >&2
      exit 2
      ;;
  esac
done
if [ -z "$annulus" ]; then
  MPICC=mpicc.openmpi CARGO_TARGET_DIR=target/openmpi cargo build -q --release -p annulus-cli \
    --features mpi
  annulus=$PWD/target/openmpi/release/annulus
fi
export ANNULUS=$annulus
name_of_groups=annulus-$$

# a control group of each rank: 10 ms are short beside a ring step
groups=()
remove() {
  local group
  for group in "${groups[@]}"; do rmdir "$group"; done
}
trap remove EXIT
for ((rank = 0; rank < ranks; rank++)); do
  if [ -d /sys/fs/cgroup/cpu ]; then
    group=/sys/fs/cgroup/cpu/$name_of_groups-$rank
    mkdir "$group"
    echo 10000 >"$group/cpu.cfs_period_us"
    awk "BEGIN { printf \"%d\n\", 10000 * $share }" >"$group/cpu.cfs_quota_us"
  else
    group=/sys/fs/cgroup/$name_of_groups-$rank
    mkdir "$group"
    awk "BEGIN { printf \"%d 10000\n\", 10000 * $share }" >"$group/cpu.max"
  fi
  groups+=("$group")
done
export GROUPS_OF_RANKS=${groups[0]%-0}

# lengths DISTRIBUTION: documents that fill the rows
lengths() {
  python3 - "$1" "$rows" <<'END'
import random, sys
name, rows = sys.argv[1], int(sys.argv[2])
draw = random.Random(5)
of = {
    "log-normal": lambda: draw.lognormvariate(6, 1.1),
    "uniform": lambda: draw.randint(1, 4000),
    "Zipf": lambda: 8192 / draw.randint(1, 64) ** 1.2,
    "equal": lambda: 3277,
}[name]
lengths = []
while sum(lengths) < rows:
    lengths.append(min(max(1, round(of())), rows - sum(lengths)))
print(",".join(map(str, lengths)))
END
}

# the shell of a rank enters its group, which the program inherits
# shellcheck disable=SC2016  # the shell of a rank expands it
enter='echo $$ >"$GROUPS_OF_RANKS-$OMPI_COMM_WORLD_RANK/cgroup.procs"; exec "$ANNULUS" "$@"'
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
measure() {
  local line
  line=$(timeout -k 5 600 mpirun.openmpi --oversubscribe --bind-to none -n "$ranks" \
    bash -c "$enter" annulus bench --causal true --heads 8 --ds 64 --threads 1 \
    --layout balanced "$@")
  python3 - "$line" "$share" "$name" "$round" "$@" <<'END'
import json, sys
of = json.loads(sys.argv[1].splitlines()[-1])
busy = of["gflops"] / (of["gflops_cpu"] * float(sys.argv[2]))
ahead = int(sys.argv[sys.argv.index("--receive-ahead") + 1])
print(json.dumps({"documents": sys.argv[3], "round": int(sys.argv[4]), "what": of["what"],
                  "strategy": of["strategy"], "ahead": ahead, "ms": of["ms"],
                  "busy": round(busy, 3)}), flush=True)
END
}
for ((round = 1; round <= rounds; round++)); do
  for name in log-normal uniform Zipf equal; do
    documents=$(lengths "$name")
    for pass in ${what//,/ }; do
      for strategy in ${strategies//,/ }; do
        for steps in ${ahead//,/ }; do
          measure --what "$pass" --documents "$documents" --strategy "$strategy" \
            --receive-ahead "$steps"
        done
      done
    done
  done
done
