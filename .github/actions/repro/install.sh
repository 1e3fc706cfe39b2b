#!/usr/bin/env bash
# Makes a virtual environment with repro (and the trainer's requirements) and puts it on PATH for later steps.
# Reads CHECKOUT, PYTHON_VERSION, INSTALL, EXTRAS, TORCH_INDEX, REQUIREMENTS, SETUP.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source_root=$(cd "$here/../../.." && pwd)

# A Python that was not set up here is the runner's own: what it has (a torch for its GPU, say) is to be used.
options=()
[[ -n "${PYTHON_VERSION:-}" ]] || options+=(--system-site-packages)
python3 -m venv ${options[@]+"${options[@]}"} "$RUNNER_TEMP/repro-venv"
export PATH="$RUNNER_TEMP/repro-venv/bin:$PATH"
printf '%s\n' "$RUNNER_TEMP/repro-venv/bin" >>"$GITHUB_PATH"

[[ -z "${TORCH_INDEX:-}" ]] || export PIP_EXTRA_INDEX_URL="$TORCH_INDEX"
if [[ -n "${SETUP:-}" ]]; then
  (cd "$CHECKOUT" && bash -eo pipefail -c "$SETUP")
fi

wanted=() extras=${EXTRAS:-trainer,golden,report,doctor,fast}
if [[ -n "${INSTALL:-}" ]]; then
  read -r -d '' -a wanted <<<"$INSTALL" || true # read answers 1 at the end of the text
elif grep -qs '^name = "repro-harness"' "$source_root/pyproject.toml"; then
  wanted=("$source_root[$extras]") # the very commit that this action is of
else
  wanted=("repro-harness[$extras]") # the action was copied into another repository
fi
[[ -z "${REQUIREMENTS:-}" ]] || wanted+=(--requirement "$CHECKOUT/$REQUIREMENTS")
# One call, so that pip finds versions that suit both.
python -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
repro --version
