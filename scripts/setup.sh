# Sourced by run.sh and test.sh: a virtual environment with this checkout in it.
# shellcheck shell=bash

find_python() {
  local name
  for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "FreeToken needs Python 3.10 or newer; set PYTHON to one." >&2
  return 1
}

covers() {  # covers '.[a,b]' '.[b]': whether the first has all extras of the second
  local extra
  for extra in $(tr -c 'a-z0-9' ' ' <<<"$2"); do
    [[ "$1" =~ [^a-z0-9]"$extra"[^a-z0-9] ]] || return 1
  done
}

set_up() {  # set_up EXTRAS, like '.[fast]'
  # Installing again is a matter of seconds, but a demo should start at once: the stamp says what is there,
  # and with which extras; fewer are there already.
  # A checkout that was moved has to be installed again, so its folder is part of the stamp.
  # So are the native sources: what is compiled must be what lies here.
  local stamp=.venv/.installed state there
  state="$PWD $(cat constraints.txt pyproject.toml setup.py freetoken/native/*.{h,cpp} \
    freetoken/native/formats/* | cksum)"
  there="$(cat "$stamp" 2>/dev/null || true)"
  if [ "${there%%$'\n'*}" = "$state" ] && covers "${there##*$'\n'}" "$1"; then
    return
  fi
  # No environment yet, or one without pip: where python3-venv is missing, half of one is left behind.
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$(find_python)" -m venv .venv || {
      echo "Could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
      return 1
    }
  fi
  echo "Installing FreeToken and its packages into .venv (the first time some minutes, most of them compiling for the CPU) ..." >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$1"
  printf '%s\n%s\n' "$state" "$1" >"$stamp"
}
