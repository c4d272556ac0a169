#!/usr/bin/env bash
# Two hosts; only rxa1 and rxb0 share a wire. rxa0, the first at a, has its port down; rxb1, the last at b, is up
# but nobody answers there.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_network
add_dummy va0
add_wire va1 vb0
add_dummy vb1
connect va1 10.10.0.1 vb0 10.10.0.2
ip addr add 10.10.1.1/24 dev va0
ip addr add 10.10.1.2/24 dev vb1
add_device rxa0 va0
add_device rxa1 va1
add_device rxb0 vb0
add_device rxb1 vb1
await_gid rxa0 "$(mapped 10.10.1.1)"
await_gid rxa1 "$(mapped 10.10.0.1)"
await_gid rxb0 "$(mapped 10.10.0.2)"
await_gid rxb1 "$(mapped 10.10.1.2)"
ip link set va0 down
await grep -q DOWN /sys/class/infiniband/rxa0/ports/1/state
