"""Methods that vLLM's worker gains, called by name over `collective_rpc`.

Each answers a plain dict: vLLM turns exceptions into bare RuntimeErrors, so an
error travels as its kind and its message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError
from headway.messages import AdapterBase, EpochInvite, TensorSpec, WeightManifest
from headway.weights import vllm_plugin

vllm_plugin.register()  # also where the entry point is not installed
Reply = dict[str, Any]
Base = list[Any] | None  # an AdapterBase's fields


class WeightWorker:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool

    def headway_begin_join(self, invite: dict[str, Any]) -> Reply:
        """Starts to take a seat in an epoch."""
        engine = self.weight_transfer_engine
        return _reply(lambda: engine.begin_join(EpochInvite(**invite)))

    def headway_begin_receive(
        self, version: int, bucket_bytes: int, tensors: list[list[Any]], base: Base
    ) -> Reply:
        """Starts to receive a version; `tensors` are [name, dtype, shape, digest]."""
        manifest = _manifest(version, bucket_bytes, tensors, base)
        return _reply(lambda: self.weight_transfer_engine.begin_receive(manifest))

    def headway_begin_read(
        self, path: str, version: int, bucket_bytes: int, tensors: list[list[Any]], base: Base
    ) -> Reply:
        """Starts to read a version from a snapshot's file."""
        manifest = _manifest(version, bucket_bytes, tensors, base)
        return _reply(lambda: self.weight_transfer_engine.begin_read(Path(path), manifest))

    def headway_poll(self) -> Reply:
        """`done` and `digest` of what was begun."""

        def poll() -> Reply:
            done, digest = self.weight_transfer_engine.poll()
            return {"done": done, "digest": digest}

        return _reply(poll)

    def headway_install(self, version: int) -> Reply:
        """Loads the received version; generation must be paused. `in_place`: without a reload."""

        def install() -> Reply:
            if self.weight_transfer_engine.write_in_place(version):
                return {"in_place": True}
            try:
                self.start_weight_update()
                self.update_weights({"version": version})
                self.finish_weight_update()
            except Exception:  # whatever it was: the layers must not stay open
                self._weight_update_active = False
                self.weight_transfer_engine.abandon_update()
                raise
            return {"in_place": False}

        return _reply(install)

    def headway_leave(self) -> Reply:
        """Leaves the epoch."""
        return _reply(self.weight_transfer_engine.leave)


def _manifest(
    version: int, bucket_bytes: int, tensors: list[list[Any]], base: Base
) -> WeightManifest:
    specs = tuple(TensorSpec(n, d, tuple(s), h) for n, d, s, h in tensors)
    return WeightManifest(version, specs, bucket_bytes, AdapterBase(*base) if base else None)


def _reply(call: Callable[[], Reply | None]) -> Reply:
    try:
        return {"ok": True, **(call() or {})}
    except HeadwayError as error:
        return {"ok": False, "kind": error.kind, "message": str(error)}
    except Exception as error:
        return {"ok": False, "kind": "internal", "message": f"{type(error).__name__}: {error}"}
