# Sourced by demo.sh and test.sh. Makes the virtual environment `.venv` at the top of the repository, with SGLang and this
# package in it, and leaves its Python's path in PYTHON. A second call with the same inputs installs nothing.
#
#   prepare_environment                 SGLang and the package
#   prepare_environment dev             the same and the test tools
#   prepare_environment dev 0.5.23      with another SGLang, in an environment of its own: .venv-0.5.23
#
# PYTHON_VERSION chooses the Python of a new environment (default: python3 if it is 3.10 to 3.13, else 3.12).

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SGLANG_VERSION=0.5.17
# Moves caches between prefill and decode servers; the build for CUDA 12 also works without.
NIXL=1.5.1
REQUIREMENTS=$REPOSITORY/scripts/requirements-cpu.txt

# Of the environment with this SGLang.
choose_sglang() {
    ENVIRONMENT=$REPOSITORY/.venv
    OVERRIDES=
    if [ "${1:-$SGLANG_VERSION}" != "$SGLANG_VERSION" ]; then
        ENVIRONMENT=$REPOSITORY/.venv-$1
        OVERRIDES=$REPOSITORY/scripts/requirements-cpu-$1.txt
    fi
    SGLANG=sglang==${1:-$SGLANG_VERSION}
    PYTHON=$ENVIRONMENT/bin/python
}
choose_sglang

say() {
    if [ -t 1 ]; then printf '\033[1m==> %s\033[0m\n' "$*"; else printf '==> %s\n' "$*"; fi
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# Puts uv's path in UV; installs uv beside the environment if there is none.
find_uv() {
    local bootstrap=$REPOSITORY/.venv-uv
    if UV=$(command -v uv); then return; fi
    UV=$bootstrap/bin/uv
    if [ -x "$UV" ]; then return; fi
    say "Installing uv into .venv-uv"
    python3 -m venv "$bootstrap"
    "$bootstrap/bin/python" -m pip install --quiet uv
}

suitable_python() {
    python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

make_environment() {
    if "$PYTHON" -c '' 2>/dev/null; then return; fi
    local version=${PYTHON_VERSION:-}
    if [ -z "$version" ]; then
        if suitable_python; then version=$(python3 -c 'import sys; print(sys.executable)'); else version=3.12; fi
    fi
    say "Making the virtual environment $(basename "$ENVIRONMENT") (Python: $version)"
    "$UV" venv --quiet --clear --python "$version" "$ENVIRONMENT"
}

# A folder of wheels that pip is configured with and that has a CPU build of torch for this Python; empty if none.
torch_wheelhouse() {
    local tag folder folders
    tag=$("$PYTHON" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')
    folders=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
    for folder in $folders; do
        if compgen -G "$folder/torch-$1+cpu-$tag-*.whl" >/dev/null; then
            echo "$folder"
            return
        fi
    done
}

install_on_cpu() {
    local torch folder
    say "Installing $SGLANG for a machine without a GPU (about 2 GB)"
    torch=$(sed -n 's/^torch==//p' "$REQUIREMENTS")
    folder=$(torch_wheelhouse "$torch")
    # uv does not read pip's configuration, so a folder named there is passed on.
    if [ -n "$folder" ]; then
        uv_install --find-links "$folder" "torch==$torch+cpu"
    else
        uv_install --torch-backend=cpu "torch==$torch" "$(grep '^torchvision==' "$REQUIREMENTS")"
    fi
    uv_install -r "$REQUIREMENTS" ${OVERRIDES:+--override "$OVERRIDES"}
    uv_install --no-deps "$SGLANG"
}

# With a torchvision that is not built for the CPU every `import sglang` fails. Needs the package, so it comes last.
let_torchvision_import() {
    local packages
    if "$PYTHON" -c 'import torchvision' 2>/dev/null; then return; fi
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo 'import sglang_mla_ext.adapter.cpu.on_import' >"$packages/sglang_mla_ext_on_cpu.pth"
}

install_on_gpu() {
    say "Installing $SGLANG (several GB)"
    uv_install --prerelease=allow "$SGLANG"
}

# NIXL's own package asks for its builds for CUDA 12 and 13.
install_nixl() {
    uv_install --no-deps "nixl==$NIXL" "nixl-cu12==$NIXL" || say "There is no NIXL for this machine: its tests are skipped"
}

uv_install() { "$UV" pip install --python "$PYTHON" "$@"; }

# What an installation depends on, as one word.
inputs() {
    { echo "$1"; "$PYTHON" -VV; cat "${BASH_SOURCE[0]}" "$REQUIREMENTS" "$REPOSITORY/pyproject.toml" $OVERRIDES; echo "$SGLANG"; } | sha256sum | cut -d' ' -f1
}

prepare_environment() {
    local kind=${1:-run} machine=cpu package=$REPOSITORY stamp
    choose_sglang "${2:-}"
    if has_gpu; then machine=gpu; fi
    find_uv
    make_environment
    stamp=$ENVIRONMENT/.installed-$machine
    if [ "$(cat "$stamp" 2>/dev/null)" != "$(inputs "$machine")" ]; then
        "install_on_$machine"
        say "Installing this package"
        uv_install -e "$package"
        if [ "$machine" = cpu ]; then let_torchvision_import; fi
        inputs "$machine" >"$stamp"
    fi
    if [ "$kind" = dev ] && [ "$(cat "$stamp-dev" 2>/dev/null)" != "$(inputs "$machine dev $NIXL")" ]; then
        say "Installing the test tools"
        uv_install -e "$package[dev]"
        if [ "$machine" = cpu ]; then install_nixl; fi
        inputs "$machine dev $NIXL" >"$stamp-dev"
    fi
}
