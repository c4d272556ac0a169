"""Two engines agree on who they are and what carries their data; sans-IO.

`frames.py` turns bytes into frames, `machine.py` decides, `events.py` is what it tells its owner, `bodies.py` is what
the frames hold, `faults.py` what can be wrong, `keepalive.py` watches the session afterwards. Sockets, threads and
clocks are in `kvxfer.session`.
"""
