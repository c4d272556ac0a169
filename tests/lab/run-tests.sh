#!/usr/bin/env bash
# `make lab`: install what the lab needs, build the guest, then boot the guests and run the tests of each.
#
#   LAB=uml             in User-Mode Linux, with the kernel that KVXFER_UML_KERNEL names (qemu)
#   LAB_GUESTS=...      which, in this order: topologies, by the names of topologies/*.sh; faults and conformance, which
#                       are the rest of wire's tests (all)
#   LAB_PARALLEL=...    how many at once (as many as there are CPUs, at most 2; in User-Mode Linux 1)
#   LAB_TESTS=...       what pytest runs, in each (tests/lab; in conformance all of that suite over rdma in User-Mode
#                       Linux, a part of it in QEMU); LAB_ARGS=... more of its options
#   LAB_MARKS=...       which of them by their marks: in User-Mode Linux all (rdma and not interop), in QEMU not the
#                       slow ones; "rdma and interop": those with the real Mooncake (make peers)
#   LAB_ROUNDS=...      how often each fault comes (50; in QEMU 1)
#   LAB_TIMEOUT_S=...   what all guests together may take (1080; in User-Mode Linux, with its 50 rounds, 3600)
# Ends with the status of the first guest that failed; a guest that does not boot is a failure.
set -Eeuo pipefail
lab=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$lab/../.."
python=$PWD/.venv/bin/python
machine=${LAB:-qemu}
faults=tests/lab/test_rdma_faults.py
guests="wire faults conformance simple ipv6 mtu gids port-down split"
case $machine in
uml)
    timeout_s=3600 parallel=1 marks="rdma and not interop"
    conformance=(tests/conformance)
    ;;
*)
    timeout_s=1080 parallel=$(($(nproc) > 1 ? 2 : 1)) marks="rdma and not interop and not slow"
    conformance=(tests/conformance/test_notifications.py tests/conformance/test_transfers.py)
    ;;
esac
deadline=$((SECONDS + ${LAB_TIMEOUT_S:-$timeout_s}))
parallel=${LAB_PARALLEL:-$parallel}
marks=${LAB_MARKS:-$marks}
[[ -z ${LAB_TESTS:-} ]] || guests="wire simple ipv6 mtu gids port-down split"
read -ra guests <<<"${LAB_GUESTS:-$guests}"
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

choose_tests() { # GUEST: sets `topology` and `tests`
    topology=$1 tests=(tests/lab)
    case $1 in
    faults) topology=wire tests=("$faults") ;;
    conformance) topology=wire tests=("${conformance[@]}") ;;
    wire) tests+=("--ignore=$faults") ;; # the longest of all: a guest of its own
    esac
    [[ -z ${LAB_TESTS:-} ]] || read -ra tests <<<"$LAB_TESTS"
}

run_guest() { # GUEST: become its pytest. A line for each test as it ends, so that a failure shows at once, and also
    # where the guest dies; after ten the guest ends and shows them in full. LAB_ARGS come last and so win.
    local left_s=$((deadline - SECONDS)) topology tests
    choose_tests "$1"
    ((left_s > 0)) || { say "no time is left for $1" && return 124; }
    exec bash "$lab/$runner" --topology "$topology" --timeout "$left_s" -- "$python" -m pytest -v --tb=short --maxfail=10 \
        -p no:cacheprovider -o timeout=300 -m "$marks" "${tests[@]}" "${options[@]}"
}

report_guest() { # GUEST: run it, with its name before each line, and leave its status and its line of the report
    local started=$SECONDS status=0 verdict=passed output namer guest
    say "guest $1 ($machine)"
    exec {output}> >(sed -u "s/^/$1: /")
    namer=$!
    run_guest "$1" >&"$output" 2>&1 &
    guest=$!
    trap 'kill $guest' TERM
    wait "$guest" || status=$?
    exec {output}>&-
    wait "$namer"
    ((status == 0)) || verdict="FAILED ($status)"
    echo "$status" >"$results/$1.status"
    printf '  %-12s %4ds  %s\n' "$1" $((SECONDS - started)) "$verdict" >"$results/$1"
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
collected=()
for guest in "${guests[@]}"; do
    choose_tests "$guest"
    collected+=("${tests[@]}")
done
"$python" -m pytest -q -p no:cacheprovider -m "$marks" --collect-only "${collected[@]}" >/dev/null ||
    fail "the tests cannot be collected: $python -m pytest --collect-only ${collected[*]}"
if [[ $machine == qemu ]]; then bash "$lab/build-guest.sh"; fi

results=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$results"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
running=0
for guest in "${guests[@]}"; do
    if ((running == parallel)); then
        wait -n
        running=$((running - 1))
    fi
    report_guest "$guest" &
    running=$((running + 1))
done
wait

say "done"
first_failure=0
for guest in "${guests[@]}"; do
    cat "$results/$guest"
    ((first_failure)) || first_failure=$(<"$results/$guest.status")
done
exit "$first_failure"
