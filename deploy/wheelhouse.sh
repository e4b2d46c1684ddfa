#!/usr/bin/env bash
# deploy/wheelhouse.sh DIR [PYTHON]: collect the wheels that a host without a network and without the compiler
# installs. Run it with the host's Python version, with a network. On the host, whose torch stays as it is:
#
#     pip install --no-index --find-links DIR -r DIR/requirements-serve.txt
#     pip install --no-index --find-links DIR --no-deps cute-kernels
set -euo pipefail
out=${1:?usage: deploy/wheelhouse.sh DIR [PYTHON]}
python=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out"
"$python" -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir "$out" "$root"
"$python" -m pip download --disable-pip-version-check --quiet --only-binary :all: --dest "$out" \
  --requirement "$root/deploy/requirements-serve.txt"
cp "$root/deploy/requirements-serve.txt" "$out/"
echo "$(find "$out" -name '*.whl' | wc -l) wheels in $out"
