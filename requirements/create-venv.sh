#!/bin/sh
# Creates a virtual environment with Python 3.12 or 3.13; prints its folder and version, or in one sentence what is missing.
#   create-venv.sh VENV [PYTHON]
# Without PYTHON, the first of these that runs and can create environments: python3.12 and python3.13 on PATH, those of
# pyenv, python3. An environment of another version is replaced, one of the same version is kept.
set -eu
venv=$1
given=${2:-}

# A pyenv shim may exist and fail, and Debian's python3 may lack venv or ensurepip: only running tells.
fits() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

version() {
  "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true
}

series() {
  version "$1" | cut -d. -f1,2
}

of_pyenv() {
  for python in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do echo "$python"; done | sort -rV
}

if [ -n "$given" ]; then
  fits "$given" || {
    found=$(version "$given")
    echo "PYTHON=$given must be Python 3.12 or 3.13 with the modules venv and ensurepip; \
it ${found:+is Python }${found:-does not run}" >&2
    exit 1
  }
  python=$given
else
  python=
  for candidate in python3.12 $(of_pyenv 3.12) python3.13 $(of_pyenv 3.13) python3; do
    if fits "$candidate"; then python=$candidate && break; fi
  done
  [ -n "$python" ] || {
    echo "found no Python 3.12 or 3.13 with the modules venv and ensurepip: install one (on Debian and Ubuntu \
python3.12 and python3.12-venv), or set its path with PYTHON=..." >&2
    exit 1
  }
fi

if [ -e "$venv/bin/python" ] && [ "$(series "$venv/bin/python")" != "$(series "$python")" ]; then
  "$python" -m venv --clear "$venv"
else
  "$python" -m venv "$venv"
fi
echo "$venv, with Python $(version "$python")"
