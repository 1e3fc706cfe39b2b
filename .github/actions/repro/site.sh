#!/usr/bin/env bash
# Builds the page of all nights at SITE, and sets `site` to its path if there was a night.
# Reads CHECKOUT, RESULTS, SITE, REPOSITORY.
set -euo pipefail

results="$PWD/$RESULTS/nights" site="$PWD/$SITE"
if [[ -z "$(find "$results" -name '*.json' -print -quit)" ]]; then
  echo "::notice title=repro::no nights yet, so no page"
  exit 0
fi
rm -rf "$site" # that of an earlier night, on a runner of one's own
cd "$CHECKOUT"
repro report publish --results "$results" --out "$site" --repository "$REPOSITORY"
printf 'site=%s\n' "$site" >>"$GITHUB_OUTPUT"
