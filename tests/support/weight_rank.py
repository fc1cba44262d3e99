"""One rank of a weight group that takes one version, in a process of its own.

    python -m tests.support.weight_rank BACKEND DEVICE PORT RANK WORLD

Reads the manifest from its input; prints the digest of what arrived.
"""

from __future__ import annotations

import sys

from headway.codec import manifest_from_pb
from headway.messages import EpochInvite
from headway.pb import rollout_pb2
from headway.weights.group import WeightGroup
from headway.weights.manifest import combined_digest
from headway.weights.transfer import Staging


def invite(backend: str, port: int, rank: int, world: int) -> EpochInvite:
    return EpochInvite("job", 1, "127.0.0.1", port, rank, world, backend, 60.0)


def main() -> None:
    backend, device, port, rank, world = sys.argv[1:]
    manifest = manifest_from_pb(rollout_pb2.WeightManifest.FromString(sys.stdin.buffer.read()))
    group = WeightGroup.join(invite(backend, int(port), int(rank), int(world)), device)
    staging = Staging()
    staging.receive(group, manifest, device)
    print(combined_digest(staging.digests), flush=True)
    group.close()


if __name__ == "__main__":
    main()
