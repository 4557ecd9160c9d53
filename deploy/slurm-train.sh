#!/usr/bin/env bash
# Training on Slurm: torchrun on every node, one rank a GPU.
#
#   sbatch deploy/slurm-train.sh configs/llama3-8b.yaml run_dir=/shared/runs/NAME
#
# The run's folder must be on a file system that all nodes share. Two minutes before the job's time is up every rank gets
# SIGTERM, saves and ends with exit code 3; the job is put back into the queue and goes on from that checkpoint.
#
# A rank that fails ends the others, and torchrun starts all of them again, twice at most. Where that does not help, the
# job is put back into the queue without the node whose task ended first, as long as no three attempts in a row have
# lasted less than half an hour: then it is not a machine's fault. (Tried with a Slurm of shell scripts, not a real one.)
# DOCTOR=1 sbatch … checks every node first (docs/doctor.md), and ends the job where something is found.
#SBATCH --job-name=quern-train
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
#SBATCH --output=quern-train-%j.log
set -euo pipefail

export OMP_NUM_THREADS=1
# torchrun starts ranks by `python -m`, which would import a file such as torch.py from the folder of the job.
export PYTHONSAFEPATH=1
# Else ranks that torchrun starts again read what the last ones left in its store (torch 2.13; pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))

if [ "${DOCTOR:-0}" = 1 ]; then
    MASTER_ADDR="${nodes[0]}" srun --kill-on-bad-exit=0 quern doctor "$@"
fi

log=$(mktemp)
exec {errors}> >(tee "$log" >&2)
copying=$!
began=$SECONDS
srun --kill-on-bad-exit=1 --wait=60 \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=2 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$port" \
    -m quern.train "$@" 2>&"$errors" &
ranks=$!
ended_early=0
trap 'ended_early=1; kill -TERM "$ranks" 2> /dev/null' TERM
code=0
wait "$ranks" || code=$?
if [ "$ended_early" = 1 ]; then
    wait "$ranks" || code=$? # the first wait ended with the signal, not with the ranks
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" != 0 ]; then
    exec {errors}>&-
    wait "$copying" # all that was said is in the log then
    short="quern-train-$SLURM_JOB_ID.short" # a line for every attempt in a row that failed early
    [ $((SECONDS - began)) -lt 1800 ] || rm -f "$short"
    date >> "$short"
    if [ "$(wc -l < "$short")" -lt 3 ]; then
        # srun: error: node7: task 6: Exited with exit code 1
        bad=$(sed -n 's/^srun: error: \([A-Za-z0-9._-]*\): tasks\{0,1\} .*/\1/p' "$log" | head -n 1)
        scontrol requeue "$SLURM_JOB_ID"
        [ -z "$bad" ] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad" || true
    fi
fi
exit "$code"
