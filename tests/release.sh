#!/usr/bin/env bash
# The second command of CI: what takes longer than the tests, or needs more packages. It runs the quickstart in a copy,
# trains fifty steps in every kind of layout, builds the kernels with sanitizers and for all GPUs, builds and checks the
# files of a release (with real wheels of NVIDIA's if the index has them), and the documentation site (in a browser, if
# there is one).
#   bash tests/release.sh
set -euo pipefail
cd "$(dirname "$0")/.."
{ : <&0; } 2> /dev/null || exec < /dev/null # the first file that a process opens would be its standard input
. examples/setup.sh
setup_environment --extra test --extra release --extra docs
export PATH=$ROOT/.venv/bin:$PATH

neighbours=$(mktemp -d)
trap 'rm -rf "$neighbours"' EXIT
if "$PYTHON" -m pip --version > /dev/null 2>&1 && "$PYTHON" -m pip -q download --no-deps --dest "$neighbours" megatron-core megatron-bridge; then
    export NVIDIA_WHEELS=$neighbours
else
    echo "release: the index has no wheels of megatron-core and megatron-bridge; stand-ins are tested"
fi
"$PYTHON" -m pytest -q tests/release
"$PYTHON" tools/release.py --check --allow-changes
"$PYTHON" tools/build_docs.py --check
if command -v chromium chromium-browser google-chrome google-chrome-stable > /dev/null; then
    "$PYTHON" tools/screenshot_docs.py
else
    echo "release: no Chromium here; the site was not opened in a browser"
fi
