#!/usr/bin/env bash
# One wire whose ends differ: a has the usual 1500 bytes (RoCE MTU 1024), b 4200 (RoCE MTU 4096).
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_network
add_wire va0 vb0 1500 4200
connect va0 10.10.0.1 vb0 10.10.0.2
add_device rxa0 va0
add_device rxb0 vb0
await_gid rxa0 "$(mapped 10.10.0.1)"
await_gid rxb0 "$(mapped 10.10.0.2)"
