# Sourced. Lets git of this process, and of no other step, use TOKEN for the server: nothing is written to a file.
# Reads TOKEN (may be empty: then git uses what the runner has).
set -euo pipefail
if [[ -n "${TOKEN:-}" ]]; then
  basic=$(printf 'x-access-token:%s' "$TOKEN" | base64 | tr -d '\n')
  echo "::add-mask::$basic"
  export GIT_CONFIG_COUNT=1
  export GIT_CONFIG_KEY_0="http.${GITHUB_SERVER_URL}/.extraheader"
  export GIT_CONFIG_VALUE_0="AUTHORIZATION: basic $basic"
  unset TOKEN basic
fi
export GIT_AUTHOR_NAME="github-actions[bot]" GIT_COMMITTER_NAME="github-actions[bot]"
export GIT_AUTHOR_EMAIL="41898282+github-actions[bot]@users.noreply.github.com"
export GIT_COMMITTER_EMAIL="$GIT_AUTHOR_EMAIL"
