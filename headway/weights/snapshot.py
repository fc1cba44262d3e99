"""One version for a single node: streamed by the learner, or a file in a shared folder.

Both hold the same bytes, the packed buckets of the version's manifest one after the other.
Each part of a stream has a checksum; the whole is verified by the manifest's digests where
it is installed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import xxhash

from headway.errors import DeadlineExceeded, InvalidSpec, NotFound, Unavailable
from headway.messages import WeightManifest
from headway.pb import learner_pb2, learner_pb2_grpc
from headway.rpc import channel, raise_headway
from headway.weights.manifest import Bucket, bucket_layout, combined_digest

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """One version as the learner keeps it; nobody writes to the tensors."""

    manifest: WeightManifest
    tensors: Mapping[str, Tensor]
    digest: str  # over the manifest's, in order


class Offers(Protocol):
    """How nodes get at snapshots."""

    def offer(self, staged: Staged) -> AbstractAsyncContextManager[str]:
        """Keeps a version to be fetched inside the block; gives the address to fetch it from,
        or "" for the shared folder. Unavailable when it cannot be offered.
        """


class SnapshotServer(learner_pb2_grpc.SnapshotServiceServicer):
    """Streams the versions on offer. `address` is set by whoever runs the gRPC server."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._on_offer: list[Staged] = []
        self.address = ""

    @asynccontextmanager
    async def offer(self, staged: Staged) -> AsyncIterator[str]:
        """See `Offers`."""
        self._on_offer.append(staged)
        try:
            yield self.address
        finally:
            self._on_offer.remove(staged)

    async def FetchWeights(
        self, request: learner_pb2.FetchWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[learner_pb2.FetchWeightsResponse]:
        """The packed buckets. NotFound: another job, or a version that is not on offer."""
        if request.job_id != self._job_id:
            raise NotFound(f"this is job {self._job_id}, not {request.job_id}")
        found = [s for s in self._on_offer if s.manifest.version == request.version]
        if not found:
            raise NotFound(f"version {request.version} is not on offer")
        for bucket in bucket_layout(found[0].manifest):
            data = memoryview(await asyncio.to_thread(_packed, bucket, found[0].tensors))
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = bytes(data[start : start + _CHUNK_BYTES])
                yield learner_pb2.FetchWeightsResponse(
                    data=chunk, checksum=xxhash.xxh3_64_intdigest(chunk)
                )

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds the service to a server; its full name."""
        learner_pb2_grpc.add_SnapshotServiceServicer_to_server(self, server)
        return (learner_pb2.DESCRIPTOR.services_by_name["SnapshotService"].full_name,)


class SharedFolder:
    """Versions as files in a folder that the learner and all nodes can reach."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self._folder = folder
        self._job_id = job_id
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def offer(self, staged: Staged) -> AsyncIterator[str]:
        """See `Offers`. The newest file stays; older ones go when it is written."""
        async with self._writing:
            await asyncio.to_thread(write_snapshot, self._folder, self._job_id, staged)
        yield ""


async def fetch(
    address: str, job_id: str, manifest: WeightManifest, path: Path, timeout_s: float
) -> None:
    """Writes a streamed version to `path`.

    NotFound: it is not on offer. DeadlineExceeded: nothing came for `timeout_s`.
    Unavailable: the stream broke, was damaged, or the disk is full.
    """
    wanted = sum(bucket.num_bytes for bucket in bucket_layout(manifest))
    request = learner_pb2.FetchWeightsRequest(job_id=job_id, version=manifest.version)
    peer = f"snapshot of version {manifest.version} from {address}"
    num_bytes = 0
    try:
        async with channel(address) as link:
            stub: Any = learner_pb2_grpc.SnapshotServiceStub(link)
            parts = stub.FetchWeights(request)
            with path.open("wb") as file:
                while num_bytes < wanted:
                    async with asyncio.timeout(timeout_s):
                        part = await parts.read()
                    if part is grpc.aio.EOF:
                        break
                    if xxhash.xxh3_64_intdigest(part.data) != part.checksum:
                        raise Unavailable(f"{peer}: damaged after {num_bytes} bytes")
                    num_bytes += len(part.data)
                    await asyncio.to_thread(file.write, part.data)
    except grpc.aio.AioRpcError as error:
        raise_headway(error, peer)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{peer}: nothing came for {timeout_s:g} s after {num_bytes} of {wanted} bytes"
        ) from error
    except OSError as error:
        raise Unavailable(f"{peer}: {path} cannot be written: {error.strerror}") from error
    if num_bytes != wanted:
        raise Unavailable(f"{peer}: {num_bytes} bytes came instead of {wanted}")


@asynccontextmanager
async def snapshot_at_hand(
    job_id: str, manifest: WeightManifest, address: str, folder: str | None, timeout_s: float
) -> AsyncIterator[Path]:
    """A node's file with a version, inside the block: fetched, or in the shared folder.

    Errors are those of `fetch`; InvalidSpec when there is neither an address nor a folder.
    """
    if address:
        with tempfile.TemporaryDirectory(prefix="headway-") as own:
            path = Path(own, "weights")
            await fetch(address, job_id, manifest, path, timeout_s)
            yield path
    elif folder:
        yield snapshot_file(folder, job_id, manifest)
    else:
        raise InvalidSpec(f"job {job_id} has no rollout.snapshot_dir to read version from")


def snapshot_file(folder: Path | str, job_id: str, manifest: WeightManifest) -> Path:
    """Where a version lies in a shared folder.

    Its digest is in the name: a learner that was resumed may make the version anew.
    """
    digest = combined_digest(spec.digest for spec in manifest.tensors)
    return Path(folder) / job_id / f"version-{manifest.version}-{digest}.weights"


def write_snapshot(folder: Path | str, job_id: str, staged: Staged) -> Path:
    """Puts a version into a shared folder, whole or not at all; older ones of the job go.

    Unavailable when the folder takes nothing.
    """
    path = snapshot_file(folder, job_id, staged.manifest)
    draft = path.with_suffix(f".tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return path
        with draft.open("wb") as file:
            for bucket in bucket_layout(staged.manifest):
                file.write(_packed(bucket, staged.tensors))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        for older in path.parent.iterdir():
            if older != path:
                older.unlink(missing_ok=True)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise Unavailable(f"the snapshot {path} cannot be written: {error.strerror}") from error
    return path


def _packed(bucket: Bucket, tensors: Mapping[str, Tensor]) -> Any:
    """One bucket's bytes as a uint8 array."""
    from headway.weights.packing import packed

    return packed(bucket, tensors).numpy()
