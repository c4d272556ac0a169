#!/usr/bin/env bash
# `make lab`: install what the lab needs, build the guest, then boot one guest for each topology and run its tests.
#
#   LAB=uml             in User-Mode Linux, with the kernel that KVXFER_UML_KERNEL names (qemu)
#   LAB_TOPOLOGIES=...  which guests, by the names of topologies/*.sh (all, wire first)
#   LAB_TESTS=...       what pytest runs (tests/lab, and in the guest wire the conformance suite over rdma: all of it in
#                       User-Mode Linux, a part of it in QEMU); LAB_ARGS=... more of its options
#   LAB_MARKS=...       which of them by their marks: in User-Mode Linux all (rdma and not interop), in QEMU not the
#                       slow ones, above all the faults; "rdma and interop": those with the real Mooncake (make peers)
#   LAB_ROUNDS=...      how often each fault comes (50; in QEMU 5)
#   LAB_TIMEOUT_S=...   what all guests together may take (1080; in User-Mode Linux, with its 50 rounds, 2400)
# Ends with the status of the first guest that failed; a guest that does not boot is a failure.
set -Eeuo pipefail
lab=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$lab/../.."
python=$PWD/.venv/bin/python
machine=${LAB:-qemu}
if [[ $machine == uml ]]; then timeout_s=2400; else timeout_s=1080; fi
deadline=$((SECONDS + ${LAB_TIMEOUT_S:-$timeout_s}))
read -ra topologies <<<"${LAB_TOPOLOGIES:-wire simple ipv6 mtu gids port-down split}"
read -ra tests <<<"${LAB_TESTS:-tests/lab}"
conformance=()
if [[ -z ${LAB_TESTS:-} ]]; then
    case $machine in
    uml) conformance=(tests/conformance) ;;
    qemu) conformance=(tests/conformance/test_notifications.py tests/conformance/test_transfers.py) ;;
    esac
fi
case $machine in
uml) marks="rdma and not interop" ;;
*) marks="rdma and not interop and not slow" ;;
esac
marks=${LAB_MARKS:-$marks}
read -ra options <<<"${LAB_ARGS:-}"

say() { printf 'lab: [%4ds] %s\n' "$SECONDS" "$*"; }
fail() {
    echo "lab: $*" >&2
    exit 1
}

# What the guest's programs are, on the host: it sees the host's files. libibverbs-dev and gcc: for tests that compile
# against verbs.h.
packages=(rdma-core libibverbs1 ibverbs-providers ibverbs-utils libibverbs-dev python3-pyverbs iproute2 procps
    busybox-static gcc libc6-dev)
qemu_packages=(qemu-system-x86 cpio kmod xz-utils zstd)

install_missing() {
    local package missing=()
    command -v dpkg-query >/dev/null ||
        fail "this is not Debian: the lab boots Debian's kernel and runs programs of Debian 12 (${packages[*]})"
    for package in "${packages[@]}"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    ((EUID == 0)) && command -v apt-get >/dev/null ||
        fail "missing: ${missing[*]}. Install them as root: apt-get install --no-install-recommends ${missing[*]}"
    say "apt-get install ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

run_tests() { # TOPOLOGY: its pytest, in a guest. A line for each test as it ends, so that a failure shows at once, and
    # also where the guest dies; after ten the guest ends and shows them in full. LAB_ARGS come last and so win.
    local left_s=$((deadline - SECONDS)) chosen=("${tests[@]}")
    [[ $1 != wire ]] || chosen+=("${conformance[@]}")
    ((left_s > 0)) || { say "no time is left for $1" && return 124; }
    bash "$lab/$runner" --topology "$1" --timeout "$left_s" -- "$python" -m pytest -v --tb=short --maxfail=10 \
        -p no:cacheprovider -o timeout=300 -m "$marks" "${chosen[@]}" "${options[@]}"
}

case $machine in
qemu)
    runner=run-in-guest.sh
    packages+=("${qemu_packages[@]}")
    ;;
uml)
    runner=run-in-uml.sh
    [[ -n ${KVXFER_UML_KERNEL:-} ]] ||
        fail "LAB=uml needs KVXFER_UML_KERNEL, the User-Mode Linux kernel to boot; docs/lab.md says what must be in it"
    ;;
*) fail "LAB is qemu or uml, not $machine" ;;
esac

install_missing
"$python" -m pytest -q -p no:cacheprovider -m "$marks" --collect-only "${tests[@]}" "${conformance[@]}" >/dev/null ||
    fail "the tests cannot be collected: $python -m pytest --collect-only ${tests[*]} ${conformance[*]}"
if [[ $machine == qemu ]]; then bash "$lab/build-guest.sh"; fi

first_failure=0 report=()
for topology in "${topologies[@]}"; do
    say "guest $topology ($machine)"
    started=$SECONDS status=0
    run_tests "$topology" || status=$?
    verdict=passed
    ((status == 0)) || verdict="FAILED ($status)"
    report+=("$(printf '%-10s %4ds  %s' "$topology" $((SECONDS - started)) "$verdict")")
    ((first_failure)) || first_failure=$status
done
say "done"
printf '  %s\n' "${report[@]}"
exit $first_failure
