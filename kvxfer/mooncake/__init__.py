"""Processes that run the real Mooncake, as peers of kvxfer's: `wire/` has their bytes, `directory/` finds them.

`service.py` answers them, its rows in `rows.py`. `peer.py` reaches them over tcp, by the connections of `lane.py`;
`rdma/` reaches and answers them over RDMA. What makes a drop-in of all this is `kvxfer/compat/mooncake/`.
"""
