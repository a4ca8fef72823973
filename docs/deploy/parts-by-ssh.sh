#!/bin/sh
# Run a part of a sweep on each host, then fetch and merge the folders: docs/parts.md.
#   sh parts-by-ssh.sh EXPERIMENT "FLAGS" HOST…
# Each host needs `sweep` on its PATH, and the data at the same path. Repeat the command to resume.
set -eu
experiment=$1
flags=$2
shift 2
count=$#
part=0
runs=""
for host in "$@"; do
    part=$((part + 1))
    command="sweep run $experiment $flags --shard $part/$count --out part-$part --yes"
    ssh "$host" "$command" > "log-$part.txt" 2>&1 &
    runs="$runs $!"
done
for run in $runs; do
    wait "$run" || { echo "A part has failed: see log-*.txt, and repeat the command." >&2; exit 1; }
done
part=0
parts=""
for host in "$@"; do
    part=$((part + 1))
    rsync -a "$host:part-$part" .
    parts="$parts part-$part"
done
# shellcheck disable=SC2086  # one word per part
sweep merge $parts --out results/whole
