#!/usr/bin/env bash
# Boot Debian's kernel in QEMU and run a command there: run-in-guest.sh [OPTION ...] -- COMMAND ...
#
# The guest sees the host's / read-only below a tmpfs overlay: the same Python, virtual environment and checkout,
# nothing to copy, and nothing it writes reaches the host. Needs no root, no /dev/kvm, no network. Two CPUs, emulated:
# Python runs 15 to 20 times slower than on the host. Options and exit status: below, or guest-common.sh; also
#   --kernel VERSION  a folder of build/lab/guest (the newest)       --cpus N (2)
#   --accel kvm       where /dev/kvm can be opened (tcg)             --verbose  the kernel's log in full, with --keep
set -Eeuo pipefail
machine=qemu
. "$(dirname "${BASH_SOURCE[0]}")/guest-common.sh"
kernel='' cpus=2 accel=tcg verbose=0

parse_option() {
    case $1 in
    --kernel) kernel=$2 && return 2 ;;
    --cpus) cpus=$2 && return 2 ;;
    --accel) accel=$2 && return 2 ;;
    --verbose) verbose=1 && return 1 ;;
    esac
}

parse_options "$@"
guests=${LAB_BUILD:-$lab/../../build/lab}/guest
[[ -n $kernel ]] || kernel=$(find "$guests" -mindepth 1 -maxdepth 1 -printf '%f\n' 2>/dev/null | sort -V | tail -n 1)
guest=$guests/$kernel
[[ -n $kernel && -s $guest/initramfs.cpio ]] || fail "there is no guest in $guests; build-guest.sh makes one"
command -v qemu-system-x86_64 >/dev/null || fail "there is no qemu-system-x86_64: apt-get install qemu-system-x86"
make_control_folder "modules=$(realpath "$guest/modules")"

mkfifo "$control/out" "$control/err"
cat "$control/out" &
pump_pids+=($!)
cat "$control/err" >&2 &
pump_pids+=($!)

case $accel in
# Left out: what TCG emulates slowly, or what makes page tables deeper for nothing.
tcg) cpu=(-accel tcg,thread=multi,tb-size=512 -cpu max,la57=off,erms=off,pclmulqdq=off) ;;
kvm) cpu=(-accel kvm -cpu host) ;;
*) fail "--accel is tcg or kvm, not $accel" ;;
esac
folders=(-virtfs "local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap"
    -virtfs "local,path=$control,mount_tag=control,security_model=none")
while read -r tag folder; do
    folders+=(-virtfs "local,path=$folder,mount_tag=$tag,security_model=none,multidevs=remap")
done <"$control/shared"
arguments="console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off no_timer_check random.trust_cpu=on"
arguments+=" tsc=reliable clocksource=tsc init_on_alloc=0"
if ((verbose)); then arguments+=" earlyprintk=serial ignore_loglevel"; fi

timeout -k 5 "$timeout_s" qemu-system-x86_64 -name kvxfer-lab -machine q35 -nodefaults -no-user-config -display none \
    -no-reboot "${cpu[@]}" -smp "$cpus" -m "$memory" \
    -kernel "$guest/vmlinux" -initrd "$guest/initramfs.cpio" -append "$arguments $append" \
    -serial "file:$control/console.log" -device virtio-serial-pci -device virtio-rng-pci \
    -chardev "file,id=out,path=$control/out" -device virtserialport,chardev=out,name=lab.out \
    -chardev "file,id=err,path=$control/err" -device virtserialport,chardev=err,name=lab.err \
    "${folders[@]}" 2>"$control/qemu.log" &
guest_pid=$!
end_with_status_of "$control/qemu.log" "$control/console.log"
