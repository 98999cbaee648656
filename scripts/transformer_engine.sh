#!/usr/bin/env bash
# Installs Transformer Engine on a GPU machine without network access, and tests this package with it.
usage() {
    cat <<'TEXT'
usage: scripts/transformer_engine.sh fetch DIR | build DIR | run OUT

  fetch DIR   on a machine with network access: download the packages, in pieces of 60 MB
  build DIR   on the GPU machine: join the pieces, install the packages, and compile the part that
              depends on torch (needs nvcc and a C++ compiler, takes several minutes)
  run OUT     on the GPU machine: run Transformer Engine's newton_schulz, train with its layers and
              its Adam in bfloat16 and fp8, and run the sections of gpu_check that use it

Environment variables: TE_VERSION (default 2.20.2), CUDA_MAJOR (default: that of torch), PYTHON
(default python), MAX_JOBS (number of compilers that run in parallel).
TEXT
}
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python}"
version="${TE_VERSION:-2.20.2}"

fetch() {
    local major="${CUDA_MAJOR:-$("$python" -c 'import torch; print(torch.version.cuda.split(".")[0])')}"
    local get=("$python" -m pip download --disable-pip-version-check --quiet --dest "$1" --no-deps)
    mkdir -p "$1"
    # the first is the package that is imported, the second has its libraries
    "${get[@]}" "transformer-engine==$version" "transformer-engine-cu$major==$version"
    "${get[@]}" --no-build-isolation "transformer-engine-torch==$version"
    # its dependencies at run time, except torch
    "${get[@]}" onnxscript onnx onnx-ir ml-dtypes pydantic pydantic-core annotated-types \
        typing-inspection nvdlfw-inspect nvidia-cudnn-frontend importlib-metadata zipp
    for large in $(find "$1" -type f -size +60M); do
        split --bytes=60M --numeric-suffixes "$large" "$large.part" && rm "$large"
    done
    (cd "$1" && sha256sum -- * >SHA256SUMS)
}

build() {
    (cd "$1" && sha256sum --check --quiet SHA256SUMS)
    for first in $(find "$1" -name '*.part00'); do
        cat "${first%00}"* >"${first%.part00}"
    done
    local put=("$python" -m pip install --disable-pip-version-check --no-deps --no-index)
    "${put[@]}" "$1"/*.whl
    NVTE_FRAMEWORK=pytorch "${put[@]}" --no-build-isolation "$1"/transformer_engine_torch-*.tar.gz
    "$python" -c 'import transformer_engine.pytorch'
}

run() {
    local train=("$root/scripts/pretrain_gpu.sh" --train-iters 20 --num-layers 8)
    mkdir -p "$1"
    torchrun --nproc-per-node 1 "$root/examples/te_newton_schulz.py" | tee "$1/newton_schulz.log"
    "${train[@]}" --out "$1/bf16" | tee "$1/bf16.log"
    "${train[@]}" --out "$1/fp8" --fp8-format hybrid | tee "$1/fp8.log"
    "$root/scripts/gpu_check.sh" --out "$1/gpu_check" --only no_sync step newton_schulz
}

case "${1:-}" in
    fetch | build | run)
        [[ $# -eq 2 ]] || { usage >&2; exit 2; }
        "$1" "$2"
        ;;
    -h | --help) usage ;;
    *) usage >&2; exit 2 ;;
esac
