#!/usr/bin/env bash
# Eight workers on one study as a job array, without `--engine slurm`: sbatch examples/cluster/slurm_workers.sh
# Set AUTOPREC_STORAGE to postgresql://USER@HOST/DATABASE, and put the password into ~/.pgpass. The search itself, which
# proves what the workers found, is the same command with `search` for `worker`, on any machine with such a GPU.
#SBATCH --job-name=autoprec
#SBATCH --array=0-7
#SBATCH --gpus-per-node=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
set -euo pipefail
: "${AUTOPREC_STORAGE:?the URL of the study database is needed}"

autoprec worker --storage "$AUTOPREC_STORAGE" --study-name resnet50-a100 --model resnet50 --n-trials 60 &
worker=$!
# 60 s before the time is up SLURM sends TERM: the worker lets its trial go, which another one runs again.
trap 'kill -TERM "$worker"; wait "$worker"' TERM
wait "$worker"
