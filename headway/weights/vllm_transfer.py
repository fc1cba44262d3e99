"""The receiving end inside a vLLM worker: joins epochs, stages versions, installs them.

Joining and receiving run in a thread of their own while the worker goes on
sampling; only the install, a copy from host memory into the model, needs a pause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from headway.errors import EpochBroken, HeadwayError, WeightMismatch
from headway.messages import EpochInvite, WeightManifest
from headway.weights import in_place
from headway.weights.adapter import AdaptedModel, adapted_weights, check_landed
from headway.weights.checkpoint import checkpoint_shapes, ties_embeddings
from headway.weights.group import WeightGroup
from headway.weights.landed import fused_with, verify_landed
from headway.weights.manifest import check_covers, check_digests
from headway.weights.transfer import Staging


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A seat in an epoch, in vLLM's terms."""

    invite: EpochInvite


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which staged version to load, in vLLM's terms."""

    version: int


class HeadwayTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight transfer interface over a Headway weight group."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        if self.parallel_config.world_size != 1:
            raise ValueError("Headway's weight transfer serves engines of one worker")
        self._device = str(device)
        self._group: WeightGroup | None = None
        self._staging = Staging()
        self._manifest: WeightManifest | None = None
        self._sent: Mapping[str, Tensor] = {}  # what the received version makes of the model
        self._in_place = False  # the next version can be written to where the last one is
        self._base = ""  # digest of the base that lies there, where adapters were added to it
        folder = self.model_config.model
        self._adapted = AdaptedModel(folder, self.model_config.dtype)
        self._expected = checkpoint_shapes(folder)
        self._tied = ties_embeddings(folder)
        self._needed: frozenset[str] = frozenset()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._task: Future[Any] | None = None
        self._then: Callable[[Any], str] = str

    # -- in the background, while the worker samples

    def begin_join(self, invite: EpochInvite) -> None:
        """Starts to take a seat; leaves any older epoch first."""
        self._hang_up()
        self._begin(lambda: WeightGroup.join(invite, self._device), self._seated)

    def begin_receive(self, manifest: WeightManifest) -> None:
        """Starts to receive one version into host memory and to verify it."""
        group = self._group
        if group is None:
            raise EpochBroken("this node has no seat in a weight group; invite it again")
        self._manifest = None
        # a model that does not fit still takes the broadcast to its end: the
        # other members of the epoch must not pay for it
        self._begin(
            lambda: self._take_in(manifest, lambda s: s.receive(group, manifest, group.device)),
            lambda digest: digest,
        )

    def begin_read(self, path: Path, manifest: WeightManifest) -> None:
        """Starts to read one version from a snapshot's file and to verify it."""
        self._manifest = None
        self._begin(
            lambda: self._take_in(manifest, lambda s: s.read(path, manifest)),
            lambda digest: digest,
        )

    def poll(self) -> tuple[bool, str]:
        """(done, result) of what was begun: a receive's result is its combined digest.

        Raises what it raised.
        """
        if self._task is None or not self._task.done():
            return False, ""
        task, self._task = self._task, None
        return True, self._then(task.result())

    def _begin(self, work: Callable[[], Any], then: Callable[[Any], str]) -> None:
        stale = self._task
        if stale is not None and not stale.done():
            # the thread of an older epoch ends by its own deadline; nobody waits for it,
            # and what it still makes or writes is not used
            self._pool.shutdown(wait=False)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights")
            self._staging = Staging()
            stale.add_done_callback(_discard)
        self._then = then
        self._task = self._pool.submit(work)

    def _seated(self, group: WeightGroup) -> str:
        self._group = group
        return ""

    def _take_in(self, manifest: WeightManifest, fill: Callable[[Staging], None]) -> str:
        staging = self._staging
        self._sent = {}
        fill(staging)
        arrived: Mapping[str, Tensor] = dict(staging.tensors())
        if manifest.base is None:
            check_covers(manifest, self._expected, self._tied, "the rollout node's model")
        digest = check_digests(manifest, staging.digests, "what arrived")
        if manifest.base is not None:
            arrived = self._adapted.merge(manifest, arrived)
        if staging is self._staging:  # and not of an older epoch
            self._sent, self._manifest = arrived, manifest
        return digest

    # -- vLLM's own interface, while generation is paused

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Takes a seat in an epoch and returns when the group stands."""
        self._hang_up()
        self._seated(WeightGroup.join(init_info.invite, self._device))

    def start_weight_update(self) -> None:
        """Opens the model's layers for new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # before the layers open: only then do tied parameters show as one
        self._needed = frozenset(name for name, _ in self.model.named_parameters())
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the staged version."""
        # not the base class's: that one synchronises an accelerator, which a CPU lacks
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the staged version into the layers opened by start_weight_update."""
        if self._manifest is None or self._manifest.version != update_info.version:
            raise WeightMismatch(f"version {update_info.version} was not received here")
        loaded = self.model.load_weights(
            (name, tensor.to(self.device, non_blocking=True)) for name, tensor in self._sent.items()
        )
        missing = sorted(self._needed - loaded) if loaded is not None else []
        if missing:
            raise WeightMismatch(
                f"version {update_info.version} leaves {missing[0]} of vLLM's model unset"
                f" ({len(missing)} tensors in all)"
            )

    def finish_weight_update(self) -> None:
        """Closes the layers; compares what now lies in the model where vLLM keeps it as sent."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied()
        if self._manifest is None:
            raise WeightMismatch("there is no received version to compare the model with")
        landed = verify_landed(self.model, self._sent, self._manifest.version)
        check_landed(self._manifest, landed)
        self._in_place = in_place.can_write(self.model, self._sent, landed)
        self._base = _digest_of_base(self._manifest)

    def write_in_place(self, version: int) -> bool:
        """Installs the staged version without a reload; False: that needs one.

        After an error a reload must follow, and does.
        """
        if not self._in_place or self._manifest is None or self._manifest.version != version:
            return False
        self._in_place = False
        manifest, sent, part = self._manifest, self._sent, in_place.VERIFIED_PART
        if manifest.base is not None:
            part = 1  # there is little, and it must be seen to have come
            if manifest.base.digest == self._base:
                adapted = adapted_weights(spec.name for spec in manifest.tensors)
                touched = fused_with(self.model, adapted)
                sent = {name: sent[name] for name in sent if name in touched}
        in_place.write(self.model, sent, self.model_config.dtype)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        landed = verify_landed(self.model, sent, version, part)
        check_landed(manifest, landed)
        self._in_place = True
        self._base = _digest_of_base(manifest)
        return True

    def _refresh_tied(self) -> None:
        """Processes again the layers that share another's parameter.

        A reload fills the shared parameter through its owner only; on a CPU the output
        head would keep a packed copy of the old embedding and sample from it.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        owners: set[int] = set()
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.nn.Parameter):
                continue
            method = getattr(module, "quant_method", None)
            if id(weight) in owners and isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)
            owners.add(id(weight))

    def abandon_update(self) -> None:
        """Puts the layers back as they were before a failed update; a full one must follow."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()

    def leave(self) -> None:
        """Leaves the epoch; safe to repeat."""
        self._hang_up()

    def shutdown(self) -> None:
        """Leaves the epoch; the worker goes on."""
        self._hang_up()

    def _hang_up(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(HeadwayError):
                group.close()


def _digest_of_base(manifest: WeightManifest) -> str:
    return "" if manifest.base is None else manifest.base.digest


def _discard(task: Future[Any]) -> None:
    if task.exception() is None and isinstance(task.result(), WeightGroup):
        task.result().close()
