#!/usr/bin/env bash
# Ends with the report's exit code. 3 (something could not be judged) is a warning unless STRICT is true.
# Reads EXIT_CODE, STRICT.
set -euo pipefail

if [[ ! "${EXIT_CODE:-}" =~ ^[0-9]+$ ]]; then
  echo "::error title=repro::the report did not run to its end"
  exit 2
fi
if [[ "$EXIT_CODE" == 3 && "${STRICT:-}" != true ]]; then
  echo "::warning title=repro::not verifiable here: something could not be judged (exit code 3); strict: true makes this fail"
  exit 0
fi
exit "$EXIT_CODE"
