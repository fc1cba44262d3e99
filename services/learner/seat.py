"""A process's seat among the ranks of a job: their default process group, on this machine only."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headway.jobspec import JobSpec
from headway.weights.group import Rendezvous
from services.learner.collective import COLLECTIVE_TIMEOUT
from services.learner.train import RankSettings

_HERE = "127.0.0.1"


def seat(spec: JobSpec, settings: RankSettings) -> None:
    """Makes this process a rank of the job's process group; returns when all have come.

    torch's own meeting point would listen on every address of the machine, for whoever comes,
    and Gloo on whichever the machine's name stands for.
    """
    torch.manual_seed(spec.seed)
    if settings.world == 1:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # weight groups name their own address
    gpu = torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=_meeting_point(settings.rank, settings.store_port),
        rank=settings.rank,
        world_size=settings.world,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _meeting_point(rank: int, port: int) -> TCPStore:
    if rank > 0:
        return TCPStore(_HERE, port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    store = Rendezvous(_HERE, COLLECTIVE_TIMEOUT.total_seconds(), port).store
    assert store is not None  # until it is closed
    return store
