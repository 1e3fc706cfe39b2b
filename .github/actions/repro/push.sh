#!/usr/bin/env bash
# Commits the night's new files and pushes them. Where another night was pushed in between, the commit is put on top of
# it: every night has files of its own, so there is nothing to merge.
# Reads RESULTS, BRANCH, TOKEN.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/token.sh"
cd "$RESULTS"

git add --ignore-removal -- nights
if git diff --cached --quiet; then
  echo "::notice title=repro::this night has no new results"
  exit 0
fi
git commit --quiet -m "Night of $(date -u +%Y-%m-%d)"
for attempt in 1 2 3 4 5; do
  if git push --quiet origin "HEAD:refs/heads/$BRANCH"; then
    exit 0
  fi
  echo "push $attempt was refused; trying again on top of what is there"
  sleep "$attempt"
  # A branch that is still missing was not refused because of another night: the next push says why.
  if git fetch --quiet --no-tags origin "refs/heads/$BRANCH"; then
    git rebase --quiet --onto FETCH_HEAD HEAD~1
  fi
done
echo "::error title=repro::the results could not be pushed to $BRANCH: the job needs \`permissions: contents: write\`"
exit 2
