# Sets up the Python environment .venv at the repository's root. The other scripts source this file.
# If .venv is up to date, it only compares a checksum.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

find_python() {
    local candidate
    for candidate in python3.12 python3 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.12 or later was not found. Install it, for example with: pyenv install 3.12" >&2
    return 1
}

install_packages() {
    local python="$1" index quiet
    "$python" -m pip install --quiet --disable-pip-version-check uv
    # uv does not read pip's settings, so pass it the index that pip uses
    index="${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}"
    if [[ -n "$index" && -z "${UV_DEFAULT_INDEX:-}" ]]; then
        export UV_DEFAULT_INDEX="$index"
    fi
    # bars of what it downloads, on a terminal
    [[ -t 2 ]] && quiet=() || quiet=(--quiet)
    "$python" -m uv pip install "${quiet[@]}" --python "$python" --requirement requirements.lock ||
        "$python" -m pip install --disable-pip-version-check --requirement requirements.lock
    "$python" -m uv pip install --quiet --python "$python" --no-deps --editable .
    # otherwise every process spends 15 seconds compiling the 3,000 modules that it imports
    if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then
        "$python" -W ignore -m compileall -qq -j 0 .venv/lib/python3*/site-packages || true
    fi
}

set_up_environment() {
    local checksum python
    checksum="$(cat requirements.lock pyproject.toml scripts/environment.sh | cksum)"
    if [[ -x .venv/bin/python && "$(cat .venv/checksum 2>/dev/null)" == "$checksum" ]]; then
        return
    fi
    python="$(find_python)"
    echo "Setting up .venv with $("$python" --version) and the exact versions in requirements.lock"
    echo "(about 6 GB with torch's CUDA build; once per checkout) ..."
    [[ -x .venv/bin/python ]] || "$python" -m venv .venv
    install_packages "$root/.venv/bin/python"
    echo "$checksum" >.venv/checksum
    echo "Environment ready."
}

set_up_environment
export PATH="$root/.venv/bin:$PATH"
# at each import, megatron-core warns about GPU packages that are not installed
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
# torch warns of a machine that has CUDA's compiler but no GPU
export TORCH_LOGS="${TORCH_LOGS:--torch.utils.cpp_extension}"
