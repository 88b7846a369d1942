"""The environment variables that a server on 310P wants, each with its reason.

Names and values are the deployment guide's, except where a reason says otherwise. A start script exports
them only when the user has not set them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """An environment variable of the server: its default, why it is wanted, and from how many ranks on."""

    name: str
    default: str
    why: str
    from_ranks: int = 1


VARIABLES = (
    Variable(
        "PYTORCH_NPU_ALLOC_CONF",
        "expandable_segments:True",
        "Less fragmentation; excludes max_split_size_mb.",
    ),
    Variable("OMP_PROC_BIND", "false", "OpenMP threads are not pinned to cores that other ranks use too."),
    Variable("OMP_NUM_THREADS", "1", "One OpenMP thread a process: vLLM's own threads need the cores."),
    Variable("TASK_QUEUE_ENABLE", "1", "Operators are handed to the chip from a queue of their own."),
    Variable("HCCL_BUFFSIZE", "512", "MiB of buffer for the traffic between chips.", from_ranks=2),
    Variable(
        "HCCL_OP_EXPANSION_MODE",
        "HOST",
        # CANN's page on this variable (envref_07_0096): the 300I Duo takes AI_CPU and HOST, anything else
        # means HOST, and AI_CPU excludes static graphs and everything but AllReduce.
        "The 300I Duo does not know the guide's AIV and takes it for HOST; AI_CPU excludes graphs.",
        from_ranks=2,
    ),
)

JEMALLOC = "/usr/lib64/libjemalloc.so.2"
"""Where the openEuler bases have jemalloc; they preload it only in root's .bashrc, unseen by a server."""

ASCEND_ROOT = "/usr/local/Ascend"
SET_ENV = ("ascend-toolkit/set_env.sh", "nnal/atb/set_env.sh")
"""Under ASCEND_ROOT: what the base's entrypoint sources too, and `docker exec` does not."""
