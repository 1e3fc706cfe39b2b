"""Golden runs and traces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from repro.doctor.artefacts.kinds import Golden, GoldenValues, TraceRun
from repro.doctor.facts.goldens import (
    REPRODUCED,
    Commits,
    changed_keys,
    damage,
    has_others_pointer,
    is_gradient,
    is_loss,
    is_schedule,
    nonfinite,
    nonfinite_numbers,
    pointer_md5,
    proofs_of,
    recorded_md5,
    rows,
)
from repro.doctor.facts.samples.rounding import narrow_dtype, rounded_decimals, rounded_digits
from repro_golden.base.checks import Found, Where, rule
from repro_golden.base.errors import ReproError
from repro_golden.case.identity import Identity


@rule(
    title="Golden runs that lack steps or training states",
    severity="error",
    certainty="certain",
    why="what happens in the steps that are missing is not guarded, and `repro golden verify` never agrees",
    fix="`dvc checkout golden/runs/MACHINE/CASE.dvc`, or record it again",
    sources=("docs/reference/formats.md (golden runs)",),
)
def _golden_incomplete(golden: Golden) -> Iterator[Found]:
    case, recorded = golden.record["case"], len(golden.trace.steps)
    wanted = case.get("steps") if isinstance(case, Mapping) else None
    if type(wanted) is int and recorded < wanted:
        yield Found(
            f"it has {recorded} of the {wanted} steps of its case",
            Where(str(golden.path / "trace" / "steps.jsonl"), item="steps", value=str(recorded)),
        )
    states = golden.record.get("states")
    lost = (
        [s for s in states if type(s) is int and not (golden.path / "states" / str(s)).is_dir()]
        if isinstance(states, list)
        else []
    )
    if lost:
        yield Found(
            f"the training states before steps {', '.join(map(str, lost[:8]))} are gone",
            Where(str(golden.path / "states"), item="states"),
            severity="warning",
            fix=f"`dvc checkout {golden.path}.dvc` brings them back; a bisect starts from step 0 without them",
        )


_COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy", "values")
_ENOUGH = 64
"""Different values of a column, of which some would need the bits that are all zero."""
_WIDE = ("float32", "float64")


def _columns(golden: Golden) -> Iterator[Found]:
    """Columns of wide floats whose values all fit a narrow dtype, in the last step."""
    from repro_golden.trace.tensor_difference import decode

    if damage(golden.trace) or not golden.trace.steps:
        return
    for row in rows(golden.trace, len(golden.trace.steps) - 1):
        if row.values is None or row.dtype not in _WIDE or row.name.partition("@")[0].split(".")[0] not in _COLUMNS:
            continue
        values = np.unique(decode(row.dtype, row.values))
        values = values[np.isfinite(values) & (values != 0)]
        if len(values) >= _ENOUGH and (dtype := narrow_dtype(values)):
            yield Found(
                f"all {len(values)} different values of {row.name} ({row.dtype}) are values of {dtype}",
                Where(str(golden.path / "trace"), item=f"{row.phase} {row.name}", value=repr(values[0].item())),
                certainty="likely",
                fix="keep the column in fp32 from the softmax on; where the program means to round, nothing",
            )


@rule(
    title="Golden values that were rounded",
    severity="warning",
    certainty="likely",
    why="what changes by less than the rounding passes unseen, and what lies at its edge fails for nothing",
    fix="keep all bits: print a metric with repr() or float.hex(), not with :.5f; `repro golden record` keeps the "
    "bits of every signal itself",
    sources=("NVIDIA/Megatron-LM tests/functional_tests (golden values of 5 decimals until 2026-09)",),
)
def _golden_rounded(values: GoldenValues) -> Iterator[Found]:
    by_rounding: dict[str, list[str]] = {}
    for name, steps in values.metrics.items():
        finite = [value for value in steps.values() if np.isfinite(value)]
        if is_schedule(name) or len(finite) < 2:
            continue
        decimals, digits = rounded_decimals(finite), rounded_digits(finite)
        if decimals is not None:
            by_rounding.setdefault(f"{decimals} decimals", []).append(name)
        elif digits is not None:
            by_rounding.setdefault(f"{digits} significant digits", []).append(name)
    for how, names in by_rounding.items():
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        value = next(iter(values.metrics[names[0]].values()))
        yield Found(
            f"rounded to {how}: {listed}",
            Where(str(values.path), item=names[0], value=f"{value!r}"),
            certainty="likely",
        )
    if values.golden is not None:
        yield from _columns(values.golden)


_BYTES = 1 << 28
"""Rollouts that are read for their digest; larger ones are left to `repro golden verify`."""


def _case(golden: Golden, root: Path, name: str, record: Where) -> Iterator[Found]:
    from repro_golden.case.file import CASES, find_case
    from repro_golden.store.rollouts import rollouts_of

    path = root / CASES / f"{name}.toml"
    if not path.is_file():
        yield Found(
            f"there is no case {name} any more ({CASES}/{name}.toml)",
            Where(record.path, item="case", value=name),
            severity="warning",
            fix=f"bring the case back, or remove the golden run and its pointer {golden.path}.dvc",
        )
        return
    try:
        case = find_case(root, name)
    except ReproError as error:
        yield Found(f"its case cannot be read: {error}", Where(str(path)), severity="warning")
        return
    if changed := changed_keys(golden.record["case"], case.canonical()):
        more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
        yield Found(
            f"the case was changed since it was recorded: {', '.join(changed[:6])}{more}",
            Where(str(path), item=changed[0]),
            fix=f"`repro golden approve {name} --reason ...` records it anew, or take the change of "
            f"{CASES}/{name}.toml back",
        )
    place = root / case.case.rollouts if case.case.rollouts else None
    if place is None or not place.is_dir() or _size(place) > _BYTES:
        return
    try:
        digest = rollouts_of(case, place).digest
    except ReproError as error:
        yield Found(f"its rollouts cannot be read: {error}", Where(str(place)), severity="warning")
        return
    if digest != golden.record["rollouts"]:
        yield Found(
            f"{case.case.rollouts} holds other rollouts than it was trained on",
            Where(str(place), item="digest", value=digest),
            fix=f"`dvc checkout {case.case.rollouts}.dvc` brings them back; or replace it with "
            f"`repro golden approve {name} --reason ...`",
        )


def _size(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:
        return _BYTES + 1


def _commit(golden: Golden, root: Path, record: Where) -> Iterator[Found]:
    commit = golden.record.get("commit")
    where = Where(record.path, item="commit", value=str(commit)[:40])
    if commit is None:
        yield Found(
            "it was recorded on files that no commit has",
            Where(record.path, item="commit", value="null"),
            severity="note",
            fix="commit first, then replace it: without a commit a bisect must be told where to begin",
        )
        return
    if not isinstance(commit, str) or not commit.isalnum():
        return
    commits = Commits(root)
    if commits.has(commit) and commits.reachable(commit):
        subject = golden.record["case"].get("subject") if isinstance(golden.record["case"], dict) else None
        path = subject.get("path") if isinstance(subject, dict) else None
        if isinstance(path, str) and path and (count := commits.since(commit, path)):
            yield Found(
                f"{count} commits have changed {path} since it was recorded at {commit[:9]}",
                where,
                severity="note",
                fix="`repro golden verify` tells whether its bits are still those of today's code",
            )
    elif not commits.shallow:  # a shallow clone lacks older commits by nature
        yield Found(
            f"its commit {commit[:9]} is " + ("not behind HEAD" if commits.has(commit) else "not in the repository"),
            where,
            severity="warning",
            fix="a rebase or squash dropped it: replace the golden run at a commit that stays, so that a bisect can "
            "begin there",
        )


@rule(
    title="Golden runs of another case, other rollouts or a commit that the repository no longer has",
    severity="error",
    certainty="certain",
    why="a golden run of something else than the repository has guards less than it seems",
    fix="replace it with `repro golden approve CASE --reason ...`",
    sources=("docs/how-to/guard-your-trainer.md", "NovaSky-AI/SkyRL#1965 (thresholds that were stale for months)"),
)
def _golden_stale(golden: Golden) -> Iterator[Found]:
    root, name = golden.root, golden.path.resolve().name
    if root is None or "~" in name:  # a baseline that was replaced is old on purpose
        return
    record = Where(str(golden.path / "run.json"))
    yield from _case(golden, root, name, record)
    yield from _commit(golden, root, record)


def _machine(raw: Mapping[str, object]) -> str:
    parts = [raw.get(part) for part in ("host", "environment", "layout")]
    if not all(isinstance(part, Mapping) and all(isinstance(v, str) for v in part.values()) for part in parts):
        return ""
    return Identity.from_mapping(raw).machine


@rule(
    title="Golden runs whose files were changed since they were proved",
    severity="error",
    certainty="certain",
    why="it says something else than what was recorded: whoever trusts it trusts an edit",
    fix="`dvc checkout golden/runs/MACHINE/CASE.dvc` brings the recorded files back",
    sources=("docs/reference/formats.md (roots, chain, golden runs)",),
)
def _golden_tampered(golden: Golden) -> Iterator[Found]:
    run, trace = str(golden.path / "run.json"), str(golden.path / "trace")
    record, header = golden.record, golden.trace.header
    if golden.trace.chain != record["chain"]:
        yield Found(
            f"its step log ends with the chain {golden.trace.chain}, and its record has {str(record['chain'])[:40]}",
            Where(trace, item="chain", value=golden.trace.chain),
        )
    if wrong := damage(golden.trace):
        yield Found(wrong, Where(trace, item="rows"))
    for name, ours in (("case", header.case), ("rollouts", header.rollouts), ("identity", header.identity)):
        if changed := changed_keys(record[name], ours):
            yield Found(
                f"run.json and the trace's header differ in {name}: {', '.join(changed[:4])}", Where(run, item=name)
            )
    known = recorded_md5(golden.path)
    if known is not None and (actual := pointer_md5(golden.path)) is not None and actual != known:
        yield Found(
            f"its files are not those of {golden.path.name}.dvc",
            Where(f"{golden.path}.dvc", item="md5", value=f"{known}.dir, files have {actual}.dir"),
        )
    if has_others_pointer(golden.path):
        yield Found(
            f"{golden.path.name}.dvc names other content than that of the golden run it was written for",
            Where(f"{golden.path}.dvc", item="meta"),
            fix="`git checkout` and `dvc checkout` of the pointer bring its own content back, `dvc add` does not",
        )
    known = record.get("expected", record["identity"])  # by which it is found again
    if golden.root is not None and isinstance(known, Mapping):
        machine, folder = _machine(known), golden.path.resolve().parent.name
        if machine and machine != folder:
            yield Found(
                f"it lies under {folder}, and was recorded on {machine}",
                Where(run, item="identity", value=machine),
                severity="warning",
                fix="move it back: a run is compared with the golden run of its own machine alone",
            )


_WANTED = ("all values finite", "gradients are not all zero")
"""What every golden run is asked, whatever its subject; the other proofs depend on what there is to show."""


def _where(golden: Golden, item: str) -> Where:
    return Where(str(golden.path / "run.json"), item=item)


@rule(
    title="Golden runs with failed or missing proofs",
    severity="warning",
    certainty="certain",
    why="it was kept all the same, and fixes in place what the proof was to refuse",
    fix="repair what the proof names and replace it with `repro golden approve CASE --reason ...`",
    sources=("docs/how-to/guard-your-trainer.md",),
)
def _golden_unproved(golden: Golden) -> Iterator[Found]:
    proofs = proofs_of(golden)
    for proof in proofs:
        name = str(proof.get("name", ""))
        if proof.get("passed") is True or name.startswith(REPRODUCED):
            continue
        if golden.record.get("noise") and name.startswith(("one ULP", "the recorder", "the replay")):
            continue  # without reproduction no proof over bits can hold
        yield Found(f"{name[:120]}: no: {str(proof.get('detail', ''))[:300]}", _where(golden, name[:120]))
    names = {str(proof.get("name", "")) for proof in proofs}
    if missing := [name for name in _WANTED if name not in names]:
        yield Found(f"its record does not say: {', '.join(missing)}", _where(golden, "proofs"), severity="note")
    if proofs and not any(name.startswith("one ULP") for name in names):
        yield Found("no planted change was looked for, so nothing shows that it sees one", _where(golden, "proofs"),
                    severity="note")  # fmt: skip


@rule(
    title="Golden runs that do not reproduce themselves",
    severity="warning",
    certainty="certain",
    why="no question about bits can be answered with it: `repro golden verify` and bisect see the noise as a change",
    fix="make the program deterministic and replace it with `repro golden approve CASE --reason ...`; until then "
    'compare metrics with [compare] mode = "bounds"',
    sources=("docs/reference/determinism.md", "areal-project/AReaL#1544 (flags that had no effect)"),
)
def _golden_unreproducible(golden: Golden) -> Iterator[Found]:
    proof = next((entry for entry in proofs_of(golden) if str(entry.get("name", "")).startswith(REPRODUCED)), None)
    detail = str(proof.get("detail", ""))[:300] if proof else ""
    if noise := golden.record.get("noise"):
        spread = noise.get("spread") if isinstance(noise, Mapping) else None
        moved = [str(name) for name, width in spread.items() if width != 0] if isinstance(spread, Mapping) else []
        names = f"; {len(moved)} metrics move by themselves: {', '.join(moved[:4])}" if moved else ""
        why = f" ({detail})" if detail else ""
        yield Found(
            f"it was kept with --allow-noise: a second process made other bits{why}{names}", _where(golden, "noise")
        )
    elif proof is None:
        yield Found("its record has no proof that a second process reproduces it", _where(golden, "proofs"))
    elif proof.get("passed") is not True:
        yield Found(f"a second process did not reproduce it: {detail}", _where(golden, "proofs"), severity="error")


_STEPS = 3
"""Steps from which a loss that is always the same is no chance; a single on-policy step may have a loss of 0."""


def _of_metrics(values: GoldenValues) -> Iterator[Found]:
    moving = any(value > 0 for name, steps in values.metrics.items() if is_gradient(name) for value in steps.values())
    for name, steps in values.metrics.items():
        loss, gradient = is_loss(name), is_gradient(name)
        if not (loss or gradient) or not steps:
            continue
        odd = [(step, value) for step, value in steps.items() if not math.isfinite(value)]
        if odd:
            step, value = odd[0]
            yield Found(
                f"{name} is {value} at step {step}, and not finite in {len(odd)} of {len(steps)} steps",
                _golden_vacuous_where(values, name, step, value),
            )
        elif len(steps) >= _STEPS and len(set(steps.values())) == 1:
            step, value = next(iter(steps.items()))
            text = f"{name} is {value:g} in all {len(steps)} steps"
            # on-policy losses without KL may be 0 while gradients are not
            excused = loss and value == 0 and moving
            yield Found(
                text + (", though gradients are not 0" if excused else ""),
                _golden_vacuous_where(values, name, step, value),
                severity="warning" if excused or value != 0 else None,
                certainty="possible" if excused else None,
            )


def _golden_vacuous_where(values: GoldenValues, name: str, step: int, value: float) -> Where:
    path = values.path if values.golden is None else values.path / "trace" / "steps.jsonl"
    return Where(str(path), item=f"step {step} {name}", value=f"{value:g}")


def _of_rows(golden: Golden, told: set[str]) -> Iterator[Found]:
    """The judgement that a golden run passes when it is recorded, made again."""
    from repro_golden.runs.proofs import not_vacuous

    if damage(golden.trace) or not golden.trace.steps:
        return  # another rule says so
    try:
        proofs = not_vacuous(golden.trace, recorded=_recorded(golden.record))
    except (ReproError, ValueError):
        return
    metrics = {item.split(" ", 2)[-1] for item in told}  # ``step 3 grad_norm`` is one of grad_norm
    for proof in proofs:
        if proof.passed or (proof.name == "all values finite" and any(metric in proof.detail for metric in metrics)):
            continue
        unseen = proof.detail.startswith("no gradient was observed") or proof.detail.startswith("0 of 0 ")
        yield Found(
            f"{proof.name}: no: {proof.detail}",
            Where(str(golden.path / "trace"), item=proof.name),
            severity="warning" if unseen else None,
        )


def _recorded(record: Mapping[str, object]) -> bool:
    """Whether a recorder looked at gradients and parameters; trainers may do without."""
    case = record.get("case")
    subject = case.get("subject") if isinstance(case, Mapping) else None
    return not isinstance(subject, Mapping) or subject.get("recorder", True) is not False


@rule(
    title="Golden runs that guard nothing: NaN or inf, all-zero losses or gradients, parameters that never move",
    severity="error",
    certainty="certain",
    why="every regression that leaves it as it is passes: 0 equals 0, and inf is within every tolerance of inf",
    fix="record it again on rollouts whose rewards differ, with gradients on; `repro golden record` refuses such runs",
    sources=(
        "pytorch/torchtitan#3474 (an all-zero loss for 100 steps)",
        "NVIDIA/Megatron-LM#5953 (golden values of inf)",
    ),
)
def _golden_vacuous(values: GoldenValues) -> Iterator[Found]:
    seen = list(_of_metrics(values))
    yield from seen
    if values.golden is not None:
        yield from _of_rows(values.golden, told={finding.where.item for finding in seen})


@rule(
    title="Traces that were cut off",
    severity="warning",
    certainty="certain",
    why="a comparison ends with its last step: what came later is not compared",
    fix="look for the end of the process in its log (killed, out of memory, out of time), and run it again",
    sources=("docs/reference/trace.md",),
)
def _trace_incomplete(run: TraceRun) -> Iterator[Found]:
    trace = run.trace
    if trace.complete:
        return
    made, wanted = len(trace.steps), trace.header.steps
    how = "without a closing line: its process was killed, or is still running" if trace.end is None else "early"
    yield Found(
        f"it has {made} of {wanted} steps and ends {how}",
        Where(str(run.path / "steps.jsonl"), made or None, item="steps", value=f"{made} of {wanted}"),
    )


_STEPS_READ = 200
"""Steps whose rows are looked at: the first ones. Metrics are looked at in all."""


def _not_finite(run: TraceRun) -> Iterator[Found]:
    trace = run.trace
    for index, record in enumerate(trace.steps):
        odd = [(name, record.metrics[name]) for name in nonfinite_numbers(trace, index)]
        if odd:
            name, value = odd[0]
            others = f", and {len(odd) - 1} more metrics with it" if len(odd) > 1 else ""
            yield Found(
                f"{name} is {value} at step {record.step}{others}",
                Where(str(run.path / "steps.jsonl"), index + 1, f"step {record.step} {name}", str(value)),
            )
            break
    for index, record in enumerate(trace.steps[:_STEPS_READ]):
        bad = [row for row in nonfinite(trace, index) if row.dtype != "metric"]
        if not bad:
            continue
        first = bad[0]
        # masks of attention are -inf on purpose; parameters and columns of tokens never are
        certain = first.phase != "forward" or first.values is not None
        yield Found(
            f"{first.nonfinite} values of {first.phase} {first.name} are not finite at step {record.step} (the first "
            f"of {len(bad)} signals)",
            Where(
                str(run.path),
                item=f"step {record.step} {first.phase} {first.name}",
                value=f"{first.nonfinite} non-finite",
            ),
            severity=None if certain else "warning",
            certainty=None if certain else "possible",
        )
        return


@rule(
    title="NaN or infinity in a trace",
    severity="error",
    certainty="certain",
    why="from there on every parameter is NaN, or will be with the next update",
    fix="the first signal that is named is where it began: look at that sample, layer or scale; `repro explain` "
    "against a run that is well names the operation",
    sources=("Miles guide: Debugging (gradient NaN/Inf)",),
)
def _trace_not_finite(run: TraceRun) -> Iterator[Found]:
    try:
        yield from _not_finite(run)
    except ReproError as error:
        yield Found(f"its rows cannot be read: {error}", Where(str(run.path)))
