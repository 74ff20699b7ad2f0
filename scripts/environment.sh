# Sourced by ./run and ./test. `prepare EXTRA` leaves in $python a Python that has the package with that extra: the private one in
# .venv, made on first use and brought up to date when pyproject.toml or constraints.txt change. INPLACE_ABN_PYTHON names another
# Python to use just as it is, with src/ on its path; nothing is installed then.

say() { printf '%s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

prepare() {
    local extra=$1 base stamp
    if [ -n "${INPLACE_ABN_PYTHON:-}" ]; then
        python=$INPLACE_ABN_PYTHON
        export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
        "$python" -c 'import torch' || fail "INPLACE_ABN_PYTHON=$python has no torch: install torch there, or unset the variable."
        return
    fi
    base=${PYTHON:-python3}
    command -v "$base" >/dev/null || fail "No $base here. Install Python 3.10 or newer, or name one: PYTHON=/path/to/python $0"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$base" --version) is too old. Python 3.10 or newer is needed; name one: PYTHON=/path/to/python $0"
    stamp=$(cat pyproject.toml constraints.txt | cksum | tr -d ' ')-$extra
    python=$PWD/.venv/bin/python
    [ -x "$python" ] && [ -e ".venv/ready-$stamp" ] && return
    if ! "$python" -c '' 2>/dev/null; then
        say "Making a private Python environment in .venv"
        "$base" -m venv --clear .venv || fail "$base cannot make environments. On Debian and Ubuntu: apt install python3-venv"
    fi
    say "Installing torch and what else the '$extra' extra needs into .venv (once; some minutes)"
    # Torch first and by exact version: a range would bring whatever is newest.
    install "$(grep "^torch==" constraints.txt)" && install -c constraints.txt -e ".[$extra]" ||
        fail "The installation failed. Is there a network, and room on the disk? Then run $0 again."
    touch ".venv/ready-$stamp"
}

# What is imported is compiled on its first import; most of torch never is.
install() { "$python" -m pip install --no-compile --quiet --disable-pip-version-check --no-input "$@"; }
