"""Commits: the range of a bisect, and what a report says of one. Nothing here changes the repository."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from repro_bisect.axes.axis import Axis, PointInfo, short
from repro_bisect.axes.gitrule import git_tests
from repro_golden.base.errors import ReproError
from repro_golden.repository.checkout import Checkout, no_such_code
from repro_golden.repository.code_key import code_keys
from repro_golden.repository.git import Git, GitFailedError

__all__ = ["Commits", "History", "merge_bases", "refuse_cut_off", "resolve", "typed"]


def resolve(checkout: Checkout, revision: str) -> str:
    """The full id of the commit that a revision names.

    Raises:
        ReproError: there is none.
    """
    try:
        return checkout.git.text("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except (GitFailedError, ValueError):  # a NUL is in no revision
        shallow = (
            " (this clone is shallow: `git fetch --unshallow`, or fetch-depth: 0)" if checkout.git.cut_off() else ""
        )
        raise ReproError(
            f"git knows no commit {revision!r} here: check the spelling, or fetch it first{shallow}"
        ) from None


def typed(checkout: Checkout, *commits: str) -> str:
    """A commit, or a range, to be typed: as it is shown, or whole where git takes that for another, as a tag's name."""

    def one(commit: str) -> str:
        try:
            return short(commit) if resolve(checkout, short(commit)) == commit else commit
        except ReproError:
            return commit

    return "..".join(one(commit) for commit in commits)


def merge_bases(checkout: Checkout, a: str, b: str) -> list[str]:
    """The newest commits that two have in common: none, or one, or several where each was merged into the other."""
    return checkout.git.text("merge-base", "--all", a, b, none=1).split()


def refuse_cut_off(checkout: Checkout, *revisions: str) -> None:
    """See that a shallow clone left out nothing between some revisions, as ``git rev-list`` takes them.

    Raises:
        ReproError: it did. What a commit changes whose parents are not here, nobody knows.
    """
    git = checkout.git
    if cut := git.cut_off():
        left = [revision[1:] for revision in revisions if revision.startswith("^")]
        for commit in cut.intersection(git.text("rev-list", *revisions).split()):
            # as of GitHub's merge of a pull request, whose second parent begins at the first
            if not all(
                any(git.tells("merge-base", "--is-ancestor", p, end) for end in left)
                for p in _real_parents(git, commit)
            ):
                raise ReproError(
                    f"this clone is shallow, and what came before {commit[:10]} is not here: "
                    "`git fetch --unshallow` brings it (fetch-depth: 0)"
                )


def _real_parents(git: Git, commit: str) -> list[str]:
    """Those that a commit names, whether they are here or not."""
    head = git.text("cat-file", "commit", commit).partition("\n\n")[0]
    return [line.partition(" ")[2] for line in head.splitlines() if line.startswith("parent ")]


class Commits(Axis):
    """Some commits, the good one first, and how they follow each other.

    Attributes:
        what: What a point is.
        good: Full id of the good end.
        bad: Full id of the bad end.
        named: Full id of what was named as the good end: the good end, but for a `History`.
        parents: Every commit after the good end, newest first, with those before it.
        paths: What holds the subject's code.
    """

    def __init__(
        self,
        checkout: Checkout,
        good: str,
        parents: Mapping[str, Sequence[str]],
        paths: Sequence[str],
        walk: Sequence[str] = (),
        named: str = "",
    ) -> None:
        """Look up the subject's `paths` in every commit.

        Args:
            checkout: The repository.
            good: Full id of the good end.
            parents: Full ids of those after it, newest first, each with those before it.
            paths: Folders or files, relative to the root, that hold all that matters: commits in which they are
                identical are one.
            walk: Options of ``git rev-list`` that the parents were read with.
            named: Full id of what was named as the good end, where that is another one.
        """
        self._git, self.paths, self.what, self._walk = checkout.git, paths, "commit", walk
        self.good, self.bad, self.parents, self.named = good, next(iter(parents), good), parents, named or good
        every = [good, self.named, *parents, *(p for ps in parents.values() for p in ps)]
        self._keys = code_keys(self._git, every, paths)
        self._trees = {c: self._keys.of(c) for c in dict.fromkeys(every)}

    def tree(self, commit: str) -> str | None:
        """Key of the subject's code in a commit: equal keys are equal code. None when the commit has none of it."""
        return self._trees[commit]

    def require(self, paths: Iterable[str]) -> None:
        """Refuse paths that neither end has: that two commits lack the same says nothing of their code.

        Args:
            paths: Those of `self.paths` that must be there.

        Raises:
            ReproError: one is at neither end.
        """
        endpoints = list(dict.fromkeys((self.good, self.bad)))
        absent = self._keys.absent(endpoints)
        if missing := [path for path in paths if path in absent]:
            raise no_such_code(missing, " nor ".join(short(commit) for commit in endpoints))

    def descendants(self, commit: str) -> set[str]:
        """The commits of the range that contain `commit`, without itself."""
        descendants: set[str] = set()
        for child in reversed(list(self.parents)):  # parents first
            if any(parent == commit or parent in descendants for parent in self.parents[child]):
                descendants.add(child)
        return descendants

    def holds(self, path: str) -> str | None:
        """A commit of the range that has a file or folder; None where none has."""
        commits = [self.good, *self.parents]
        keys = code_keys(self._git, commits, [path])
        return next((commit for commit in commits if keys.of(commit)), None)

    def git_tests(self, culprit: str, verdicts: Mapping[str, str]) -> int | None:
        """See `repro_bisect.axes.gitrule.git_tests`."""
        return git_tests(
            self._git, self.good, self.parents, {culprit, *self.descendants(culprit)}, verdicts, self._walk
        )

    def subjects(self, commits: Sequence[str]) -> dict[str, str]:
        """The first line of each commit's message."""
        stdin = "".join(f"{c}\n" for c in dict.fromkeys(commits)).encode()
        lines = self._git.text("log", "--no-walk=unsorted", "--stdin", "--format=%H %s", given=stdin).split("\n")
        return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines if line}

    def info(self, commit: str) -> PointInfo:
        """Author, date, subject and diffstat."""
        fields = self._git.text("log", "-1", "--format=%an <%ae>%x00%aI%x00%s%x00%P", commit).split("\0")
        stat = self._git.text(
            "show", "--stat=100", "--no-ext-diff", "--format=", "-m", "--first-parent", commit, "--"
        ).strip("\n")
        return PointInfo(commit, fields[0], fields[1], fields[2], tuple(fields[3].split()), stat)


class History(Commits):
    """The commits of a range GOOD..BAD: the `Axis` that a search goes along unless another one is asked for.

    Attributes:
        other_bases: Merge bases of the ends beside the good end, where each was merged into the other's branch.
    """

    def __init__(
        self,
        checkout: Checkout,
        spec: str,
        paths: Sequence[str],
        *,
        first_parent: bool = False,
        from_base: bool = False,
    ) -> None:
        """Resolve ``GOOD..BAD`` (an empty BAD means HEAD) and look up the subject's `paths` in every commit.

        Args:
            checkout: The repository.
            spec: The range.
            paths: See `Commits`.
            first_parent: Follow only the first parent of merges, so that a merge stands for all that it brought.
            from_base: Where GOOD is no ancestor of BAD, as releases are that were cut on a branch, take their merge
                base for the good end.

        Raises:
            ReproError: not a range, an unknown revision, GOOD no ancestor of BAD, or nothing between them.
        """
        left, dots, right = spec.partition("..")
        if not dots or not left or right.startswith("."):
            raise ReproError(f"{spec!r} is no range: write GOOD..BAD, such as v1.2..HEAD")
        good, bad = resolve(checkout, left), resolve(checkout, right or "HEAD")
        if good == bad:
            raise ReproError(f"{left} and {right or 'HEAD'} are the same commit: there is nothing between them")
        bases, named = merge_bases(checkout, good, bad), good
        base, self.other_bases = next(iter(bases), None), bases[1:]
        if from_base and base not in (None, bad):
            good = base or good
        elif base != good:
            if base != bad:  # else they are given the wrong way round, whatever is not here
                refuse_cut_off(checkout, good, bad)
            fix = f"; their merge base is {base[:10]}, try {base[:10]}..{right or 'HEAD'}" if base else ""
            fix = f": it comes after it, so write {right or 'HEAD'}..{left}" if base == bad else fix
            raise ReproError(f"GOOD {left} is not an ancestor of BAD {right or 'HEAD'}{fix}")
        how = ["--first-parent"] if first_parent else []
        refuse_cut_off(checkout, *how, bad, f"^{good}")
        lines = checkout.git.text("rev-list", "--parents", "--topo-order", *how, f"{good}..{bad}").splitlines()
        most = 1 if first_parent else None
        cut = checkout.git.cut_off()
        parents = {
            c: (_real_parents(checkout.git, c) if c in cut else p)[:most] for c, *p in (line.split() for line in lines)
        }
        if first_parent and not any(good in p for p in parents.values()):
            raise ReproError(
                f"GOOD {left} is not on the first-parent line of {right or 'HEAD'}: leave --first-parent out"
            )
        super().__init__(checkout, good, parents, paths, how, named)
