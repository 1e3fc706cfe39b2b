#!/usr/bin/env bash
# Pushes SITE to BRANCH as one commit without history, for GitHub Pages ("Deploy from a branch").
# Reads CHECKOUT, SITE, BRANCH, TOKEN.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/token.sh"

site="$PWD/$SITE"
cd "$CHECKOUT"
git check-ref-format --branch "$BRANCH" >/dev/null
# What is overwritten must be a page of ours, which has that file. Pages runs Jekyll unless .nojekyll is there.
old=$(git ls-remote origin "refs/heads/$BRANCH" | cut -f1)
if [[ -n "$old" ]]; then
  git fetch --quiet --no-tags origin "refs/heads/$BRANCH"
  if ! git cat-file -e FETCH_HEAD:repro-site.json 2>/dev/null; then
    echo "::error title=repro::pages-branch $BRANCH holds something else than a page of repro: it is not overwritten"
    exit 2
  fi
fi
touch "$site/.nojekyll"
export GIT_INDEX_FILE="$RUNNER_TEMP/repro-pages-index"
rm -f "$GIT_INDEX_FILE"
git --work-tree="$site" add --all --force -- "$site"
commit=$(git commit-tree -m "Page of repro" "$(git write-tree)")
git push --quiet --force-with-lease="refs/heads/$BRANCH:$old" origin "$commit:refs/heads/$BRANCH"
