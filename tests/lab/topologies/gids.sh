#!/usr/bin/env bash
# One wire, long GID tables with traps. The pair that works is 10.10.0.1 (a) and 10.10.0.2 (b). Around it:
# a second link-local row, an IPv4 link-local address, networks of one side only, rows of another netdev (a VLAN on
# top of va0, where the kernel has 8021q: not in User-Mode Linux), and holes where addresses were deleted again.
# The rows of the two sides have different indices.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_network
add_wire va0 vb0
add_device rxa0 va0
add_device rxb0 vb0

# a: in this order
ip addr add 169.254.7.1/16 dev va0
ip addr add 192.168.77.1/24 dev va0
ip addr add 10.99.0.1/32 dev va0 # deleted below
ip addr add fe80::7/64 dev va0 nodad
ip addr add fd00:77::1/64 dev va0 nodad
for address in 169.254.7.1 192.168.77.1 10.99.0.1; do await_gid rxa0 "$(mapped $address)"; done
await_gid rxa0 fd00:0077:0000:0000:0000:0000:0000:0001

connect va0 10.10.0.1 vb0 10.10.0.2
await_gid rxa0 "$(mapped 10.10.0.1)"
await_gid rxb0 "$(mapped 10.10.0.2)"
for host in {1..8}; do # more of the same, on other networks
    ip addr add 172.16.$host.1/24 dev va0
    ip addr add 172.17.$host.1/24 dev vb0
done
await_gid rxa0 "$(mapped 172.16.8.1)"
await_gid rxb0 "$(mapped 172.17.8.1)"

if [[ $LAB_MACHINE == qemu ]]; then
    ip link add link va0 name va0.100 type vlan id 100
    ip link set va0.100 up
    ip addr add 10.10.0.3/24 dev va0.100 # the network of the wire, behind another netdev
    await_gid rxa0 "$(mapped 10.10.0.3)"
fi
ip addr del 10.99.0.1/32 dev va0
await_no_gid rxa0 "$(mapped 10.99.0.1)"
ip addr del 172.17.4.1/24 dev vb0
await_no_gid rxb0 "$(mapped 172.17.4.1)"
