#!/usr/bin/env bash
# Trains a GPT with Muon on the GPUs of one machine.
usage() {
    cat <<'TEXT'
usage: scripts/pretrain_gpu.sh [--out DIR] [--dry-run] [FLAG ...]

Trains a GPT in bfloat16 with Muon on all GPUs of this machine. It saves to DIR/checkpoints and
resumes from there. Every other FLAG is passed to scripts/pretrain_gpt.py and overrides the defaults:
the model's size, --train-data-path, --optimizer, ...

  --out DIR    folder for checkpoints and logs (default: runs/gpu)
  --dry-run    print the command instead of running it

Defaults: 24 layers, hidden size 1024, sequences of 2048 tokens, one learning rate for Muon and AdamW.
The data is random unless you pass --data-path, --train-data-path,
--data-args-path or --per-split-data-args-path. Transformer Engine's layers are used if it is
installed.

Environment variables: GPUS (number of processes; default: all visible GPUs), OMP_NUM_THREADS,
CUDA_DEVICE_MAX_CONNECTIONS. Run it in an environment with this package installed: put .venv/bin first
in PATH, or use the container of docker/Dockerfile.
TEXT
}
set -euo pipefail

visible_gpus() {
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        # CUDA ignores the first entry that is not a GPU, such as -1, and all entries after it
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed -nE '/^ *([0-9]|GPU-|MIG-)/!q;p' | grep -c . || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

out=runs/gpu
dry_run=0
passed=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry_run=1; shift ;;
        --out=*) set -- --out "${1#*=}" "${@:2}" ;;
        --out)
            [[ -n "${2-}" ]] || { echo "--out: pass a folder" >&2; exit 2; }
            out="$2"; shift 2 ;;
        *) passed+=("$1"); shift ;;
    esac
done

if [[ -n "${GPUS-}" && ! "$GPUS" =~ ^[1-9][0-9]*$ ]]; then
    echo "GPUS=$GPUS: must be a whole number of at least 1. Unset it to use all visible GPUs." >&2
    exit 2
fi
gpus="${GPUS:-$(visible_gpus)}"
if [[ "$gpus" -lt 1 ]]; then
    echo "No GPU found (nvidia-smi, CUDA_VISIBLE_DEVICES). On a CPU, use ./scripts/quickstart.sh." >&2
    exit 1
fi

model=(
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --seq-length 2048
    --max-position-embeddings 2048 --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights
)
if python -c 'import transformer_engine.pytorch' 2>/dev/null; then
    layers=(--transformer-impl transformer_engine)
else
    echo "Transformer Engine is not installed, so slower layers of megatron-core are used." >&2
    layers=(
        --transformer-impl local --attention-backend unfused --no-masked-softmax-fusion
        --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
    )
fi
training=(
    --bf16 --micro-batch-size 4 --global-batch-size "$((gpus * 32))" --train-iters 5000
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 200
    --weight-decay 0.1 --clip-grad 1.0
    --optimizer muon --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
)
data=(--mock-data --split 98,1,1 --tokenizer-type NullTokenizer --vocab-size 32000)
for flag in ${passed[@]+"${passed[@]}"}; do
    case "${flag%%=*}" in
        --data-path | --train-data-path | --data-args-path | --per-split-data-args-path) data=() ;;
    esac
done
files=(
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval 500
    --ckpt-format torch_dist --exit-signal-handler --tensorboard-dir "$out/tensorboard"
    --log-interval 10 --eval-interval 500 --eval-iters 10
)
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
command=(
    torchrun --standalone --nproc-per-node "$gpus" "$scripts/pretrain_gpt.py"
    "${model[@]}" "${layers[@]}" "${training[@]}" ${data[@]+"${data[@]}"} "${files[@]}"
    ${passed[@]+"${passed[@]}"}
)
if [[ $dry_run -eq 1 ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
mkdir -p "$out"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${command[@]}"
