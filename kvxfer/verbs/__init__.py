"""What this machine has for RDMA: the facts, without a call into libibverbs. `probe.py` gathers them."""

from kvxfer.verbs.probe import LibraryReport, PortReport, VerbsReport, find_ports, probe_library, probe_verbs

__all__ = ["LibraryReport", "PortReport", "VerbsReport", "find_ports", "probe_library", "probe_verbs"]
