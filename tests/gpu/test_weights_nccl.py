"""A version over a real NCCL group; with two GPUs between two processes, one each."""

import subprocess
import sys

import torch

from headway.codec import manifest_to_pb
from headway.weights.group import Rendezvous, WeightGroup
from headway.weights.manifest import build_manifest, combined_digest
from headway.weights.transfer import send
from tests.support.weight_rank import invite

SHAPES = {"embed": (1000, 64), "norm": (64,), "empty": (0, 3), "head": (64, 1001)}


def test_what_arrives_over_nccl_is_what_was_sent(gpus):
    world = min(2, gpus)  # NCCL takes one rank a device
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()
    }
    manifest = build_manifest(7, tensors, bucket_bytes=1 << 16)
    meeting = Rendezvous("127.0.0.1", 60.0)
    receivers = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.weight_rank", "nccl", f"cuda:{rank}"),
                *(str(meeting.port), str(rank), str(world)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(1, world)
    ]
    for receiver in receivers:
        receiver.stdin.write(manifest_to_pb(manifest).SerializeToString())
        receiver.stdin.close()
    group = WeightGroup.join(invite("nccl", meeting.port, 0, world), "cuda:0", meeting.store)
    send(group, manifest, tensors, "cuda:0")
    wanted = combined_digest(spec.digest for spec in manifest.tensors)
    for receiver in receivers:
        assert receiver.stdout.read().decode().strip() == wanted
        assert receiver.wait() == 0
    group.close()
    meeting.close()
