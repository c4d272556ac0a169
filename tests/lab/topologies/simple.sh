#!/usr/bin/env bash
# One host with two rails that go nowhere: queue pairs of one device reach each other inside the device.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for rail in 0 1; do
    add_dummy va$rail
    ip addr add 10.10.$rail.1/24 dev va$rail
    add_device rxa$rail va$rail
    await_gid rxa$rail "$(mapped 10.10.$rail.1)"
done
