"""Takes a seat among two ranks, says where it listens, and takes part in a broadcast."""

import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from headway.jobspec import parse_job
from services.learner.seat import seat
from services.learner.train import RankSettings
from tests.support.fleet import SPEC

if __name__ == "__main__":
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    settings = RankSettings("j", "", Path(), rank, 2, port, "127.0.0.1")
    seat(parse_job(SPEC), settings)
    group = dist.new_group(backend="gloo")  # as checkpoints have one
    told = torch.tensor([41 + rank])
    dist.broadcast(told, src=0, group=group)
    listening = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    print(sorted({c.laddr.ip for c in listening}), int(told))
