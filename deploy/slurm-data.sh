#!/usr/bin/env bash
# A data run on Slurm: Ray on every node of the job, the driver on the first.
#
#   sbatch deploy/slurm-data.sh configs/fineweb-en.yaml run_dir=/shared/runs/NAME 'sources.0.paths=/shared/crawl/*.warc.gz'
#
# run_dir and the inputs must be on a file system that all nodes share, or on an object store. A job that ran out of time
# or lost its first node is submitted again with the same arguments and goes on; another lost node costs nothing but itself.
#SBATCH --job-name=quern-data
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --no-kill
#SBATCH --output=quern-data-%j.log
set -euo pipefail

export OMP_NUM_THREADS=1
# Ray runs whatever code it is sent: only this job's processes know the token. It goes by the environment, not by arguments.
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
port=$((20000 + SLURM_JOB_ID % 20000))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{ print $1 }')
# Each job has a folder of its own: two jobs on a node must not meet in /tmp/ray, and socket names are short.
session="/tmp/ray-$SLURM_JOB_ID"

start_ray() {
    local node=$1
    shift
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap --kill-on-bad-exit=0 \
        ray start "$@" --temp-dir="$session" --num-cpus="$SLURM_CPUS_PER_TASK" --object-store-memory=1000000000 \
        --disable-usage-stats --block &
    rays+=("$!")
}

rays=()
finish() {
    kill "${rays[@]}" 2> /dev/null || true
    wait "${rays[@]}" 2> /dev/null || true
}
trap finish EXIT

start_ray "$head" --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false
until srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap ray health-check --address "$head_ip:$port" 2> /dev/null; do
    kill -0 "${rays[0]}"
    sleep 2
done
for node in "${nodes[@]:1}"; do
    start_ray "$node" --address="$head_ip:$port"
done

workers=$((SLURM_JOB_NUM_NODES * SLURM_CPUS_PER_TASK))
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    quern data run "$@" "workers=$workers" "ray.address=$head_ip:$port"
