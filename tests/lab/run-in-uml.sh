#!/usr/bin/env bash
# Boot a User-Mode Linux kernel and run a command there:
#   KVXFER_UML_KERNEL=FILE run-in-uml.sh [OPTION ...] -- COMMAND ...
#
# As run-in-guest.sh, but the kernel is a process of this host, so Python runs at nearly the host's pace; one CPU.
# The kernel is not part of this project: a Linux for ARCH=um with hostfs, overlayfs, veth, dummy, netem, policy
# routing, rdma_rxe and ib_uverbs built in. Needs no root. Options and exit status: below, or guest-common.sh; also
#   --cpu N|none   the host CPU it is pinned to (one chosen by process number)
set -Eeuo pipefail
machine=uml
. "$(dirname "${BASH_SOURCE[0]}")/guest-common.sh"
memory=2G cpu=auto

parse_option() {
    case $1 in
    --cpu) cpu=$2 && return 2 ;;
    esac
}

parse_options "$@"
[[ -n ${KVXFER_UML_KERNEL:-} ]] || fail "KVXFER_UML_KERNEL is not set: it names the kernel that run-in-uml.sh boots"
[[ -x $KVXFER_UML_KERNEL ]] || fail "KVXFER_UML_KERNEL=$KVXFER_UML_KERNEL cannot be executed"
make_control_folder

sed '/^$/q' /proc/cpuinfo >"$control/cpuinfo" # UML's own has no "cpu MHz": perftest would print 0 or inf
cat >"$control/init.sh" <<INIT
#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
die() {
    echo "lab: \$*"
    echo o >/proc/sysrq-trigger
    sleep 5
}
mount -t proc proc /proc
mount -t tmpfs -o size=75%,mode=755 tmpfs /mnt || die "no tmpfs"
mkdir /mnt/upper /mnt/work /mnt/new
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/new || die "no overlay"
cd /mnt/new
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir -p dev/pts dev/shm
mount -t devpts -o ptmxmode=666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
ln -sfn /proc/self/fd dev/fd
ln -sf fd/0 dev/stdin
ln -sf fd/1 dev/stdout
ln -sf fd/2 dev/stderr
mkdir -p run/lab
mount -t hostfs -o "$control" none run/lab || die "no control folder"
exec chroot /mnt/new /bin/bash /run/lab/main.sh
INIT
chmod 755 "$control/init.sh"

# UML switches between its kernel process and a traced one at every system call and fault. Across two idle CPUs such a
# switch takes 60 us, on one 2.4 us (measured): so both stay on one.
pin=()
if [[ $cpu != none ]] && command -v taskset >/dev/null; then
    if [[ $cpu == auto ]]; then
        mapfile -t usable < <(taskset -pc $$ | sed 's/.*: //' | tr ',' '\n' |
            while IFS=- read -r first last; do seq "$first" "${last:-$first}"; done)
        cpu=${usable[$$ % ${#usable[@]}]}
    fi
    pin=(taskset -c "$cpu")
fi

exec {out}>&1 {err}>&2 # numbers from 10 on: the kernel closes no low ones that a caller may have handed on
TMPDIR=/dev/shm setsid timeout -k 5 "$timeout_s" "${pin[@]}" "$KVXFER_UML_KERNEL" \
    "umid=kvxfer-lab-$$" "uml_dir=$control/uml" mem="$memory" \
    root=/dev/root rootfstype=hostfs rootflags=/ ro init="$control/init.sh" \
    con=null con0=null,fd:1 ssl=null "ssl0=null,fd:$out" "ssl1=null,fd:$err" quiet loglevel=4 panic=-1 $append \
    </dev/null >"$control/console.log" 2>"$control/uml.log" &
guest_pid=$!
end_with_status_of "$control/uml.log" "$control/console.log"
