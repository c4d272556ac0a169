#!/usr/bin/env bash
# Install what bench/peers.py compares kvxfer with. Run as `make peers` or `bash bench/install_peers.sh`.
#
# Mooncake and NIXL each get a virtual environment of their own under bench/.peers/, so that neither can touch the
# packages kvxfer is developed with. iperf3, a C compiler and the shared libraries Mooncake links against come from apt,
# and only those that are missing. Running it again installs nothing that is already there.
#
# PYTHON=python3.12 bash bench/install_peers.sh   uses another interpreter for the two environments.
set -euo pipefail

bench_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
peers_folder=$bench_folder/.peers
python=${PYTHON:-python3}

say() { printf 'install_peers: %s\n' "$*" >&2; }

# ---- system packages -------------------------------------------------------

install_system_packages() {
    (($#)) || return 0
    local as_root=()
    if ((EUID != 0)); then
        command -v sudo >/dev/null || { say "missing: $*. Install them as root: apt-get install $*"; exit 1; }
        as_root=(sudo)
    fi
    command -v apt-get >/dev/null || { say "missing: $*. No apt-get here; install the equivalents by hand"; exit 1; }
    say "apt-get install $*"
    "${as_root[@]}" apt-get update -qq
    # Without the variable the iperf3 package asks whether to start a daemon; it must not.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

missing_packages=()
command -v iperf3 >/dev/null || missing_packages+=(iperf3)
command -v cc >/dev/null || missing_packages+=(gcc libc6-dev)
"$python" -c 'import ensurepip' 2>/dev/null || missing_packages+=(python3-venv)

# Mooncake's wheel leaves these to the system: `ldd engine.so` names them. NIXL's wheel brings its own UCX.
# Not `grep -q`: it would close the pipe early, and pipefail would take that for a missing library.
has_library() { PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -F "$1" >/dev/null; }
has_library libibverbs.so.1 || missing_packages+=(libibverbs1)
has_library libnuma.so.1 || missing_packages+=(libnuma1)
has_library libcurl.so.4 || missing_packages+=(libcurl4)
install_system_packages "${missing_packages[@]}"

# ---- virtual environments --------------------------------------------------

# install_peer NAME IMPORT_CHECK PIP_ARGUMENTS... : skips the work where the import already succeeds.
install_peer() {
    local name=$1 import_check=$2 environment=$peers_folder/$1
    shift 2
    if [[ -x $environment/bin/python ]] && "$environment/bin/python" -c "$import_check" >/dev/null 2>&1; then
        say "$name is already there"
        return
    fi
    say "installing $name in ${environment#"$PWD"/}"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check numpy
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    if ! "$environment/bin/python" -c "$import_check"; then
        say "$name is installed but does not import; \`ldd\` on its .so files names a library that is missing"
        exit 1
    fi
}

mkdir -p "$peers_folder"
install_peer mooncake 'from mooncake.engine import TransferEngine' mooncake-transfer-engine-non-cuda
# --no-deps: with its dependencies NIXL pulls 6 GB of CUDA, which transfers between host memories never load.
install_peer nixl 'from nixl._api import nixl_agent; import numpy' --no-deps nixl-cu12 nixl

say "versions: $("$peers_folder/mooncake/bin/python" -m pip list --disable-pip-version-check 2>/dev/null | grep -i mooncake | tr -s ' ')," \
    "$("$peers_folder/nixl/bin/python" -m pip list --disable-pip-version-check 2>/dev/null | grep -i '^nixl ' | tr -s ' ')," \
    "$(iperf3 --version | head -n 1), $(cc --version | head -n 1)"
