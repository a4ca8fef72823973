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
for host in "$@"; do
    part=$((part + 1))
    command="sweep run $experiment $flags --shard $part/$count --out part-$part --yes"
    ssh "$host" "$command" > "log-$part.txt" 2>&1 &
done
wait
part=0
for host in "$@"; do
    part=$((part + 1))
    rsync -a "$host:part-$part" .
done
sweep merge part-* --out results/whole
