#!/usr/bin/env bash
# Two hosts with two rails each, on wires, so that tc netem and link down work: 10.10.RAIL.1 is a, 10.10.RAIL.2 is b.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_network
for rail in 0 1; do
    add_wire va$rail vb$rail
    connect va$rail 10.10.$rail.1 vb$rail 10.10.$rail.2
    add_device rxa$rail va$rail
    add_device rxb$rail vb$rail
    await_gid rxa$rail "$(mapped 10.10.$rail.1)"
    await_gid rxb$rail "$(mapped 10.10.$rail.2)"
done
