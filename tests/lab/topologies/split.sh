#!/usr/bin/env bash
# Two hosts on two networks that cannot reach each other, numbered the other way round at b: rxa0 and rxb1 share
# 10.10.0.0/24, rxa1 and rxb0 share 10.20.0.0/24. "First with first" is wrong on both.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_network
add_wire va0 vb1
add_wire va1 vb0
connect va0 10.10.0.1 vb1 10.10.0.2
connect va1 10.20.0.1 vb0 10.20.0.2
for pair in "rxa0 va0 10.10.0.1" "rxa1 va1 10.20.0.1" "rxb0 vb0 10.20.0.2" "rxb1 vb1 10.10.0.2"; do
    read -r device netdev address <<<"$pair"
    add_device "$device" "$netdev"
    await_gid "$device" "$(mapped "$address")"
done
