#!/usr/bin/env bash
# Runs the ranks of one node: started once on every node by pretrain.sbatch.
#
# USR1 (before the time limit) and TERM (preemption) make all ranks of the run save and stop. They
# are passed to the ranks themselves, not to torchrun, which would kill ranks that save for longer
# than its shutdown timeout. The exit code is then 75, else torchrun's.
set -uo pipefail

cd "$REPOSITORY"
# our own script builds its optimizers itself; without the launcher, another one would get Megatron's
script="${SCRIPT:-scripts/pretrain_gpt.py}"
program=("$script")
if [[ ! "$script" -ef scripts/pretrain_gpt.py ]]; then
    # shellcheck disable=SC2206  # "-m module" is two words; a path is one, whatever is in it
    [[ "$script" == "-m "* ]] && program=($script)
    program=(-m megatron_eopt.launch "${program[@]}")
fi
[[ "${SLURM_PROCID:-0}" -ne 0 ]] || echo "training program: ${program[*]}"
# a --load of yours is for the first start: after a requeue the run goes on from its own checkpoint
own=()
if [[ -f "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" ]]; then
    own=(--load "$RUN_DIR/checkpoints")
fi
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

stopped=0
stop_ranks() {
    stopped=1
    pkill -TERM -P "$launcher" || true
}

# torchrun and the ranks ignore USR1, which Slurm may send to every process of a step
(
    trap '' USR1
    exec torchrun \
        --nnodes "${SLURM_JOB_NUM_NODES:-1}" \
        --nproc-per-node "$GPUS_PER_NODE" \
        --rdzv-backend c10d \
        --rdzv-id "${SLURM_JOB_ID}.${SLURM_RESTART_COUNT:-0}" \
        --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
        "${program[@]}" \
        --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --save-interval 500 \
        --tensorboard-dir "$RUN_DIR/tensorboard" \
        --ckpt-format torch_dist --exit-signal-handler \
        "$@" "${own[@]}"
) &
launcher=$!
trap stop_ranks USR1 TERM

# a trapped signal ends wait early
wait "$launcher"
status=$?
while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher"
    status=$?
done
# where Slurm signalled torchrun too, its code says so; the ranks have saved all the same
[[ $stopped -eq 0 ]] || exit 75
exit "$status"
