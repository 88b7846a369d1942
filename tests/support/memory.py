"""The peak memory of a process, asked by itself.

Not `getrusage`: a child's ru_maxrss starts at what its parent had when it forked, and pytest has much.
"""

from __future__ import annotations

PEAK = """
def peak():
    '''KiB that this process had at most.'''
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
"""
"""Source that defines `peak()`, to put before a script."""
