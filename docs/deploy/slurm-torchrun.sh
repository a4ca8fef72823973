#!/bin/sh
# Start torchrun on each node of a SLURM job: docs/slurm.md. The arguments are those of torchrun.
setsid srun --overlap --nodes "$SLURM_JOB_NUM_NODES" --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 \
    sh -c 'trap "" USR2; exec torchrun "$@"' sh \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$SLURMD_NODENAME:$((20000 + SLURM_JOB_ID % 10000))" "$@" &
srun=$!
# SIGTERM is how sweep asks for a checkpoint. It must reach torchrun, and not srun, which would kill
# its tasks. The step of srun is the one after that of this script.
trap 'scancel --signal=TERM "$SLURM_JOB_ID.$((SLURM_STEP_ID + 1))"' TERM
wait "$srun"
while kill -0 "$srun" 2>/dev/null; do wait "$srun"; done
wait "$srun"
