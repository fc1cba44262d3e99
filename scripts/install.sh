#!/usr/bin/env bash
# Makes the virtual environment $1 with all services and the development tools (CPU engine).
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:-.venv}"
python="${PYTHON:-python3}"

"$python" - <<'PY' || exit 1
import platform, sys
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    sys.exit(f"headway needs Python 3.11 to 3.13; this is {sys.version.split()[0]} (set PYTHON=...)")
if platform.system() != "Linux":
    sys.exit("headway runs on Linux")
PY

"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
# torch first: what follows must not pull another build of it.
"${pip[@]}" install --quiet torch==2.13.0
"${pip[@]}" install --quiet -e ".[coordinator,reward,learner,megatron,rollout-cpu,dev]"
# Text models need none of these, and beside a CPU-only torch they break transformers' imports.
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
touch "$venv/.ready"
echo "headway is installed in $venv"
