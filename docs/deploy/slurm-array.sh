#!/bin/sh
# A sweep in three parts, one task of an array each: docs/parts.md.
#SBATCH --array=1-3
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
set -eu
part=$SLURM_ARRAY_TASK_ID
sweep run quick --lr tuned --shard "$part/3" --out "$HOME/part-$part" --yes
# When all have ended, where $HOME is shared (else copy the folders to one machine first):
# sweep merge ~/part-1 ~/part-2 ~/part-3 --out results/whole
