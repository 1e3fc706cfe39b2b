#!/usr/bin/env bash
# Fetches golden runs and rollouts from the DVC remote. What cannot be fetched is a warning: the report says what it misses.
# Reads CHECKOUT and REMOTE_ENVIRONMENT (lines KEY=VALUE, which no other step gets).
set -euo pipefail
cd "$CHECKOUT"

if [[ -z "$(git ls-files -- 'golden/*.dvc')" ]]; then
  echo "no golden runs to pull"
  exit 0
fi
if ! grep -Eqs "^\['?remote " .dvc/config .dvc/config.local; then
  echo "::warning title=repro::there are golden runs, but no DVC remote to pull them from: \`repro init --remote URL\` sets one"
  exit 0
fi
while IFS= read -r line; do
  line=${line%$'\r'}
  [[ -n "$line" ]] || continue
  name=${line%%=*}
  if [[ "$line" != *=* || ! "$name" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
    echo "::error title=repro::remote-environment takes lines KEY=VALUE; one of its lines is none"
    exit 2
  fi
  value=${line#*=}
  [[ -z "$value" ]] || echo "::add-mask::$value"
  export "$name=$value"
done <<<"${REMOTE_ENVIRONMENT:-}"
unset REMOTE_ENVIRONMENT
if ! repro golden pull; then
  echo "::warning title=repro::golden runs were not pulled (a fork's pull request has no secrets); going on without them"
fi
