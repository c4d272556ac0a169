"""libibverbs from Python: devices, memory regions, queue pairs. Nothing is opened before it is asked for.

    >>> from kvxfer.verbs.device import list_devices
    >>> for device in list_devices():
    ...     with device.open() as context:
    ...         print(device.name, context.ports())

`library.py` is the table of functions, everything else stands on it; docs/verbs.md tells how a queue pair is connected.
"""
