#!/usr/bin/env bash
# Puts the branch of results into a worktree at RESULTS; a branch that is missing starts as one empty commit of its own.
# Reads CHECKOUT, RESULTS, BRANCH.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/token.sh"

results="$PWD/$RESULTS"
cd "$CHECKOUT"
git check-ref-format --branch "$BRANCH" >/dev/null
if git rev-parse --verify --quiet "refs/remotes/origin/$BRANCH^{commit}" >/dev/null; then
  start=$(git rev-parse --verify "refs/remotes/origin/$BRANCH^{commit}")
  # A branch of code given by mistake would get nights among its files.
  if git merge-base HEAD "$start" >/dev/null; then
    echo "::error title=repro::results-branch $BRANCH is a branch of code: name one that holds nothing but results"
    exit 2
  fi
else
  start=$(git commit-tree -m "Results of repro" "$(git mktree </dev/null)")
fi
# A runner of one's own keeps its folders from night to night.
git worktree remove --force "$results" 2>/dev/null || rm -rf "$results"
git worktree prune
git worktree add --quiet --detach "$results" "$start"
mkdir -p "$results/nights"
