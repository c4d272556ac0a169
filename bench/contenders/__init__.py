"""One module for each program that bench/peers.py compares: how its two processes open, connect and transfer."""
