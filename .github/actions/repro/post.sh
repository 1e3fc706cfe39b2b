#!/usr/bin/env bash
# Posts the comment of a downloaded artefact. The artefact may be anybody's: it is text of limited size and nothing else.
# Reads FOLDER, NUMBER, GITHUB_REPOSITORY, GITHUB_TOKEN.
set -euo pipefail

comment="$FOLDER/comment.md"
refuse() {
  echo "::error title=repro::the artefact's comment.md $1: not posted"
  exit 2
}
[[ "$NUMBER" =~ ^[1-9][0-9]*$ ]] || refuse "has no pull request"
[[ ! -L "$FOLDER" && ! -L "$comment" && -f "$comment" ]] || refuse "is no file"
# 65,536 characters is GitHub's limit of a comment; a character has at most four bytes.
(($(wc -c <"$comment") <= 4 * 65536)) || refuse "is longer than 65536 characters"
iconv -f UTF-8 -t UTF-32LE "$comment" >/dev/null 2>&1 || refuse "is not UTF-8"
(($(iconv -f UTF-8 -t UTF-32LE "$comment" | wc -c) <= 4 * 65536)) || refuse "is longer than 65536 characters"
repro report post "$comment" --pr "$NUMBER" --repo "$GITHUB_REPOSITORY"
