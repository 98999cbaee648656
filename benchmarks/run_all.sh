#!/usr/bin/env bash
# Runs the benchmarks one after another, writes their figures and docs/benchmarks.md.
#
#   ./benchmarks/run_all.sh                 what this CPU can, but for the trainings (about 30 minutes on two cores)
#   ./benchmarks/run_all.sh --only NAME     one of them (may be repeated); names: --list
#   ./benchmarks/run_all.sh --out FOLDER    figures and page go there instead of docs/
#
# Nothing else should run meanwhile: every figure says how busy the machine was before it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tiles=(optimizer_step profile newton_schulz) vectors=(optimizer_step_vectors newton_schulz_vectors)
neither=(newton_schulz_bf16)
always=(optimizer_step_fp32 newton_schulz_fp32 fsdp2 megatron_fsdp checkpoints start_up
    working_memory balance)
trainings=(momentum compare_optimizers)
names=("${tiles[@]}" "${vectors[@]}" "${neither[@]}" "${always[@]}" "${trainings[@]}")
only=() out=docs
while [[ $# -gt 0 ]]; do
    case "$1" in
        --only) only+=("${2:?--only needs a name, one of: ${names[*]}}"); shift 2 ;;
        --out) out="${2:?--out needs a folder}"; shift 2 ;;
        --list) printf '%s\n' "${names[@]}"; exit ;;
        *) sed -n '2,/^$/{s/^# \{0,1\}//p}' "$0"; [[ "$1" == --help ]] && exit || exit 2 ;;
    esac
done
for name in "${only[@]}"; do
    if [[ ! " ${names[*]} " == *" $name "* ]]; then
        echo "--only $name: must be one of ${names[*]}" >&2
        exit 2
    fi
done
source scripts/environment.sh
if [[ ${#only[@]} -eq 0 ]]; then
    # by how this machine multiplies bfloat16
    declare -n bf16="$(python -W ignore -c "
import torch
from megatron_eopt.math.products import has_instructions, multiplies_by_tiles
dtype, gpu = torch.bfloat16, torch.cuda.is_available()
narrow = 'tiles' if gpu or multiplies_by_tiles(dtype) else 'vectors'
print(narrow if gpu or has_instructions(dtype) else 'neither')")"
    only=("${bf16[@]}" "${always[@]}")
fi
figures="$out/benchmarks"
mkdir -p "$figures"

count=0
for name in "${only[@]}"; do
    count=$((count + 1))
    echo "== $count/${#only[@]} $name"
    json=(--json "$figures/$name.json") png=(--png "$figures/$name.png")
    case "$name" in
        optimizer_step | newton_schulz) python -m "benchmarks.$name" "${json[@]}" "${png[@]}" ;;
        optimizer_step_vectors | newton_schulz_vectors) python -m "benchmarks.${name%_vectors}" "${json[@]}" ;;
        optimizer_step_fp32)
            python -m benchmarks.optimizer_step --products fp32 --rounds 10 "${json[@]}" ;;
        newton_schulz_bf16)
            python -m benchmarks.newton_schulz --products bf16 --pairs 5 \
                --shapes 512x512 256x1024 512x2048 1024x1024 "${json[@]}" ;;
        newton_schulz_fp32) python -m benchmarks.newton_schulz --products fp32 "${json[@]}" ;;
        balance)
            [[ -e "$out/balance.md" ]] || cp docs/balance.md "$out/"
            python -m benchmarks.balance --write "$out/balance.md" "${json[@]}" ;;
        momentum) python -m benchmarks.momentum --out runs/momentum "${json[@]}" "${png[@]}" ;;
        compare_optimizers)
            ./scripts/compare_optimizers.sh --lr adam=3e-4,1e-3,3e-3 muon=1e-3,3e-3,1e-2 \
                --steps 120 --processes 1 --muon-fp32-matmul-prec highest "${json[@]}" "${png[@]}" ;;
        *) python -m "benchmarks.$name" "${json[@]}" ;;
    esac
done
python -m benchmarks.page --figures "$figures" --write "$out/benchmarks.md"
echo "wrote $out/benchmarks.md"
