#!/usr/bin/env bash
# Generates headway/pb from protos/. With --check: fails when what is committed differs.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="$out" protos/headway/v1/*.proto
# The generated modules live in headway.pb, flat.
sed -i -E 's/from headway\.v1 import/from headway.pb import/; s/headway\.v1\.([a-z]+_pb2)/headway.pb.\1/g; s/import headway\.v1\b/import headway.pb/' \
  "$out"/headway/v1/*.py "$out"/headway/v1/*.pyi
if [ "${1:-}" = "--check" ]; then
  for f in "$out"/headway/v1/*; do
    cmp -s "$f" "headway/pb/$(basename "$f")" || {
      echo "headway/pb/$(basename "$f") is not what protos/ generates: run make protos" >&2
      exit 1
    }
  done
else
  cp "$out"/headway/v1/* headway/pb/
fi
