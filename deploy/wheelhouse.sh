#!/usr/bin/env bash
# deploy/wheelhouse.sh DIR [PYTHON]: collect the wheels that a host without a network and without the compiler
# installs. Run it with the host's Python version, with a network. On the host, whose torch stays as it is:
#
#     pip install --no-index --find-links DIR -r DIR/requirements-serve.txt
#     pip install --no-index --find-links DIR --no-deps --force-reinstall cute-kernels
#
# Between releases the version does not change, so that without --force-reinstall pip keeps what is installed.
set -euo pipefail
out=${1:?usage: deploy/wheelhouse.sh DIR [PYTHON]}
python=${2:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out"
# From a copy of what makes the wheel: setuptools would put an old build/ of the checkout into it, and the package's
# sources would then not be those that bundles are built for.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
tar --create --directory "$root" --exclude=__pycache__ pyproject.toml README.md LICENSE cute_kernels kvcache |
  tar --extract --directory "$copy"
"$python" -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir "$out" "$copy"
"$python" -m pip download --disable-pip-version-check --quiet --only-binary :all: --dest "$out" \
  --requirement "$root/deploy/requirements-serve.txt"
cp "$root/deploy/requirements-serve.txt" "$out/"
echo "$(find "$out" -name '*.whl' | wc -l) wheels in $out"
