#!/usr/bin/env bash
# As wire, with IPv6 addresses only: fd00:10:RAIL::1 is a, fd00:10:RAIL::2 is b. No GID is an IPv4 address.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_network
for rail in 0 1; do
    add_wire va$rail vb$rail
    connect va$rail fd00:10:$rail::1 vb$rail fd00:10:$rail::2
    add_device rxa$rail va$rail
    add_device rxb$rail vb$rail
    await_gid rxa$rail fd00:0010:000$rail:0000:0000:0000:0000:0001
    await_gid rxb$rail fd00:0010:000$rail:0000:0000:0000:0000:0002
done
