#!/usr/bin/env bash
# Runs `repro report pr` or `repro report nightly`, writes the step's summary and sets exit-code, verdict and report.
# Reads CHECKOUT, MODE, CASES, BASE, HEAD, RESULTS, BISECT, ARGUMENTS. Ends with 0 however the report ends: verdict.sh judges.
set -euo pipefail

cases=() extra=()
read -r -d '' -a cases <<<"${CASES:-}" || true # read answers 1 at the end of the text
read -r -d '' -a extra <<<"${ARGUMENTS:-}" || true
results=${RESULTS:-}
[[ -z "$results" || "$results" == /* ]] || results="$PWD/$results"
out=$(mktemp -d "$RUNNER_TEMP/repro-report.XXXXXX")
cd "$CHECKOUT"

# A name is looked up here; a branch that only the remote has is found too.
commit_of() {
  git rev-parse --verify --quiet --end-of-options "$1^{commit}" ||
    git rev-parse --verify --quiet --end-of-options "refs/remotes/origin/$1^{commit}" || {
    echo "::error title=repro::no such commit in the checkout: check it out with fetch-depth 0" >&2
    return 2
  }
}

command=(repro report)
case "${MODE:-}" in
  pr)
    head=$(commit_of "$HEAD")
    base=$(commit_of "$BASE")
    # A run by hand may judge anybody's code: what it leaves behind serves no run of a branch.
    case "${GITHUB_EVENT_NAME:-}" in
      pull_request | push) ;;
      *) export REPRO_TRUST="${REPRO_TRUST:-judging $head}" ;;
    esac
    text="$out/comment.md"
    command+=(pr --out "$out")
    [[ "${BISECT:-}" != true ]] || command+=(--bisect)
    for name in ${cases[@]+"${cases[@]}"}; do command+=(--case "$name"); done
    command+=(${extra[@]+"${extra[@]}"} "$base..$head")
    ;;
  nightly)
    text="$out/report.md"
    command+=(nightly --out "$out")
    [[ -z "$results" ]] || command+=(--results "$results")
    [[ "${BISECT:-}" != false ]] || command+=(--no-bisect)
    command+=(${extra[@]+"${extra[@]}"} -- ${cases[@]+"${cases[@]}"})
    ;;
  *)
    echo "::error title=repro::mode is pr or nightly"
    exit 2
    ;;
esac

code=0
"${command[@]}" || code=$?
# An answer always comes with a report. Python, too, ends with 1 when it breaks, and that is no answer.
[[ "$code" == 2 || -s "$text" ]] || code=2
case "$code" in
  0) verdict=agrees ;;
  1) verdict=differs ;;
  3) verdict="not verifiable" ;;
  *) verdict=error ;;
esac
{
  printf 'exit-code=%s\n' "$code"
  printf 'verdict=%s\n' "$verdict"
  printf 'report=%s\n' "$out"
} >>"$GITHUB_OUTPUT"

# GitHub drops a summary of more than 1 MiB as a whole; a cut one is better. The last line of the cut is dropped, since it
# may end within a character.
limit=1000000
if [[ ! -s "$text" ]]; then
  printf 'repro: %s (exit code %s), and no report was written: the log says why.\n' "$verdict" "$code"
elif (($(wc -c <"$text") <= limit)); then
  cat "$text"
else
  head -c "$limit" "$text" | sed '$d'
  printf '\n\nCut here: the whole is in the artefact.\n'
fi >>"$GITHUB_STEP_SUMMARY"
