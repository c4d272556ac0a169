# shellcheck shell=bash
# What the topologies are made of. Sourced by each; runs as root in the guest, in its one network namespace (soft-RoCE
# receives nothing in another), where routing policy keeps the two "hosts" apart: host a has the netdevs va0, va1, ...
# and the devices rxa0, rxa1, ...; host b vb0, ... and rxb0, ...
set -Eeuo pipefail
trap 'echo "lab: ${BASH_SOURCE[0]##*/} line $LINENO: $BASH_COMMAND" >&2' ERR

roce_mtu=4200 # carries RoCE packets of 4096 bytes and their headers

# accept_local: a packet of this guest's own address, coming in from a wire, is welcome. accept_dad=0: addresses are
# usable at once. The table of local addresses is searched last, or the kernel would short-cut over lo, which has no
# device.
prepare_network() {
    local family
    sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
        net.ipv4.conf.all.accept_local=1 net.ipv4.conf.default.accept_local=1 \
        net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 \
        net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0
    for family in -4 -6; do
        ip "$family" rule add pref 1000 lookup local
        ip "$family" rule del pref 0
    done
}

mac() { # NETDEV: va0 -> 02:00:00:00:0a:00
    printf '02:00:00:00:0%s:%02d\n' "${1:1:1}" "${1:2}"
}

# LEFT RIGHT [LEFT_MTU RIGHT_MTU]: two netdevs with a wire between them
add_wire() {
    ip link add "$1" type veth peer name "$2"
    ip link set "$1" mtu "${3:-$roce_mtu}" address "$(mac "$1")" up
    ip link set "$2" mtu "${4:-$roce_mtu}" address "$(mac "$2")" up
}

add_dummy() { # NETDEV: an interface that goes nowhere
    ip link add "$1" type dummy
    ip link set "$1" mtu "$roce_mtu" address "$(mac "$1")" up
}

# LEFT LEFT_ADDRESS RIGHT RIGHT_ADDRESS [PREFIX_LENGTH]: give both ends of a wire an address, IPv4 or IPv6, and the
# routes over the wire.
connect() {
    local length=${5:-24} left right here there flags=()
    [[ $2 != *:* ]] || length=${5:-64} flags=(nodad)
    ip addr add "$2/$length" dev "$1" "${flags[@]}"
    ip addr add "$4/$length" dev "$3" "${flags[@]}"
    route_over "$1" "$2" "$3" "$4"
    route_over "$3" "$4" "$1" "$2"
}

route_over() { # NETDEV ADDRESS PEER_NETDEV PEER_ADDRESS
    local family=-4 table
    [[ $2 != *:* ]] || family=-6
    table=$((100 + $(cat "/sys/class/net/$1/ifindex")))
    ip neigh replace "$4" lladdr "$(mac "$3")" dev "$1" nud permanent
    ip "$family" route add "$4" dev "$1" src "$2" table "$table"
    ip "$family" rule add pref 10 iif "$1" lookup local
    ip "$family" rule add pref 20 to "$4" from "$2" lookup "$table"
    ip "$family" rule add pref 21 to "$4" oif "$1" lookup "$table"
}

add_device() { # DEVICE NETDEV
    rdma link add "$1" type rxe netdev "$2"
}

# DEVICE GID: wait until the GID, in the long form of sysfs, is in the table; the kernel adds them in the background.
await_gid() {
    await has_gid "$@" || { echo "lab: $1 has no GID $2" >&2 && return 1; }
}

await_no_gid() { # DEVICE GID
    await lacks_gid "$@" || { echo "lab: $1 still has the GID $2" >&2 && return 1; }
}

has_gid() {
    grep -qxs "$2" /sys/class/infiniband/"$1"/ports/1/gids/{0..31}
}

lacks_gid() {
    ! has_gid "$@"
}

await() { # COMMAND ...: up to 30 s, which an emulated machine may need
    local attempts
    for ((attempts = 0; attempts < 300; attempts++)); do
        if "$@"; then return 0; fi
        sleep 0.1
    done
    return 1
}

mapped() { # IPV4_ADDRESS: its GID as sysfs prints it
    local a b c d
    IFS=. read -r a b c d <<<"$1"
    printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x\n' "$a" "$b" "$c" "$d"
}
