#!/usr/bin/env bash
# The first program in the guest's root, for QEMU and for User-Mode Linux: set up the topology, run the command, say how
# it ended. It lies as main.sh in the control folder /run/lab, which guest-common.sh made; its answer is the file
# `status` there.
# Not -e: whatever happens, the guest must write its status and power off.
set -uo pipefail
control=/run/lab
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. "$control/settings.sh" # machine topology cwd modules

mount_shared() { # the folders of --rw
    local tag folder
    while read -r tag folder; do
        case $machine in
        qemu) mount -t 9p -o rw,trans=virtio,version=9p2000.L,msize=524288,cache=none,access=client "$tag" "$folder" ;;
        uml) mount -t hostfs -o "$folder" none "$folder" ;;
        esac
    done <"$control/shared"
}

find_port() { # NAME: the device of a virtio port
    local name
    for name in /sys/class/virtio-ports/*/name; do
        [[ $(<"$name") == "$1" ]] || continue
        name=${name%/name}
        echo "/dev/${name##*/}"
    done
}

prepare_machine() { # sets `output` and `errors`, the devices that lead to the host's stdout and stderr
    case $machine in
    qemu)
        mkdir -p "/lib/modules/$(uname -r)"
        mount --bind "$modules" "/lib/modules/$(uname -r)"
        output=$(find_port lab.out) errors=$(find_port lab.err)
        ;;
    uml)
        mount --bind "$control/cpuinfo" /proc/cpuinfo
        output=/dev/ttyS0 errors=/dev/ttyS1
        stty raw -echo <"$output"
        stty raw -echo <"$errors"
        ;;
    esac
}

drain_output() { # until the host has all of it
    wait "$output_pump" "$errors_pump"
    if [[ $machine == uml ]]; then # setting a terminal waits for its output
        stty raw <"$output"
        stty raw <"$errors"
    fi
}

set_up_topology() {
    [[ $topology != none ]] || return 0
    bash "$topology" >"$control/topology.log" 2>&1 && return
    echo "lab: the topology ${topology##*/} could not be set up" >&2
    cat "$control/topology.log" >&2
    return 1
}

hostname kvxfer-lab
ip link set lo up
ulimit -l unlimited
ulimit -n 65536
mount_shared
prepare_machine
mkfifo /run/out /run/err # the command's children may hold these open; the devices stay with the two pumps
cat </run/out >"$output" &
output_pump=$!
cat </run/err >"$errors" &
errors_pump=$!
exec >/run/out 2>/run/err </dev/null
. "$control/environment.sh"
export PATH=$PATH:/usr/sbin:/sbin
if set_up_topology; then
    (cd "$cwd" && eval "$(<"$control/command.sh")")
    status=$?
else
    status=125
fi
exec >/dev/null 2>&1
drain_output
dmesg >"$control/dmesg"
echo $status >"$control/status.part"
mv "$control/status.part" "$control/status"
sync
echo o >/proc/sysrq-trigger
sleep 100
