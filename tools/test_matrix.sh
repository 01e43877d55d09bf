#!/bin/sh
# Build the wheel, install it under the Pythons of this machine (3.10 to 3.13), and run there the tests that need no torch:
#   sh tools/test_matrix.sh         all of them
#   sh tools/test_matrix.sh ends    the lowest and the highest
# The tests run beside a copy of the repository that has no package in it, so that they import the installed one.
set -eu

cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pythons=
for minor in 10 11 12 13; do
    # pyenv's command of a version that is not chosen is on the path and does not run
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null; then
            pythons="$pythons $candidate"
            break
        fi
    done
done
# shellcheck disable=SC2086 # a list of words
set -- "${1-all}" $pythons
wanted=$1
shift
if [ "$#" -eq 0 ]; then
    echo "test_matrix.sh: no Python from 3.10 to 3.13 was found" >&2
    exit 1
fi
if [ "$wanted" = ends ] && [ "$#" -gt 1 ]; then
    eval "last=\${$#}"
    set -- "$1" "$last"
fi

"$1" -m venv "$work/build"
"$work/build/bin/pip" install --quiet build
"$work/build/bin/python" -m build --wheel --outdir "$work" . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
wheel=$(ls "$work"/packfmt-*.whl)

mkdir "$work/copy"
cp -R tests tools docs examples README.md pyproject.toml "$work/copy"
for python in "$@"; do
    name=$("$python" -c "import sys; print('%d.%d' % sys.version_info[:2])")
    echo "test_matrix.sh: Python $name, $(basename "$wheel")"
    "$python" -m venv "$work/$name"
    # Of the extras all but torch.
    "$work/$name/bin/pip" install --quiet "$wheel[hdf5,parquet,convert]" pytest hypothesis psutil
    # Those left out look at the source tree, at names that need torch, or run the benchmarks: the main run has done that.
    (cd "$work/copy" && "../$name/bin/python" -m pytest --quiet -p no:cacheprovider \
        --ignore tests/test_layers.py --ignore tests/test_install.py --ignore tests/test_bench.py \
        --ignore tests/test_docs.py --ignore tests/test_public_api.py)
done
