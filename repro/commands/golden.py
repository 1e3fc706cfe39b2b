"""`repro golden`: record, verify and manage golden runs."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from repro.commands.choose import DashedCommand, command_options, say_python
from repro.commands.golden_verify import verify
from repro.commands.rollout.group import engine_options
from repro.lazy_group import LazyGroup
from repro.output import emit, json_option, parameters, progress, strict_names_option, vary_option

if TYPE_CHECKING:
    from repro_golden.case.command_line import CommandLine
    from repro_golden.case.file import Case
    from repro_golden.repository.checkout import Checkout
    from repro_golden.runs.record import Options
    from repro_golden.store.golden import Store
    from repro_golden.subjects.environments.builds import Who

__all__ = ["golden"]

_NAMED = 8


@click.group(cls=LazyGroup)
def golden() -> None:
    """Record, verify and manage golden runs."""


_recording_options = parameters(
    click.option(
        "--allow-failed-checks", is_flag=True,
        help="Keep a run that fails the on-policy checks of its first step, or [mismatch].",
    ),
    click.option("--allow-noise", is_flag=True, help="Keep a run that does not reproduce itself, with its noise."),
)  # fmt: skip


@golden.command(cls=DashedCommand, short_help="Record a case and let the run prove itself.")
@click.argument("case", required=False)
@command_options
@engine_options
@_recording_options
@json_option
def record(
    case: str | None,
    line: CommandLine,
    engine: str | None,
    sglang_url: str | None,
    pairs: tuple[str, ...],
    allow_noise: bool,
    allow_failed_checks: bool,
    as_json: bool,
) -> int:
    """Record the golden run of CASE on this machine, and let it prove itself before it is kept.

    With CMD, a training program that knows nothing of repro, golden/cases/CASE.toml is written once it has run.
    --engine, --sglang-url and --set say how rollouts are captured where there are none yet; the case stays as it is.
    """
    from repro_golden.runs.capture import Capture, settings_of
    from repro_golden.runs.record import Options

    line.check()
    capture = Capture(settings_of(engine, sglang_url, pairs))
    return _record(case, Options(allow_noise, allow_failed_checks, capture=capture), as_json, line)


@golden.command(short_help="Record anew; the old run stays beside it.")
@click.argument("case", required=False)
@click.option("--reason", required=True, help="Why the numbers may change; kept with the run.")
@_recording_options
@json_option
def approve(case: str | None, reason: str, allow_noise: bool, allow_failed_checks: bool, as_json: bool) -> int:
    """Record CASE anew and make that its golden run; the old one stays beside it as CASE~CHAIN."""
    from repro_golden.runs.record import Options

    return _record(case, Options(allow_noise, allow_failed_checks, reason), as_json)


def _record(case: str | None, options: Options, as_json: bool, line: CommandLine | None = None) -> int:
    from repro.doctor.quiet import before_recording
    from repro_golden.base.errors import ReproError
    from repro_golden.case.file import find_case
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.runs.record import record as run_record

    checkout = find_checkout(Path.cwd())
    if line and line.argv:
        if case is None:
            raise ReproError("a golden run needs a name: repro golden record NAME -- CMD")
        file, this_case = line.new_file(checkout.root, case), line.case(checkout.root, case)
        say_python(this_case, line)

        def written(steps: int) -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(line.text(checkout.root, this_case.name, steps), encoding="utf-8")

        options = replace(options, trained=written)
    else:
        this_case = find_case(checkout.root, case)
    with progress("recording") as say:
        for text in before_recording(checkout, this_case):
            say(text)
        golden_run, proved = run_record(checkout, this_case, options, say)
    data = {"run": str(golden_run.directory), "machine": golden_run.machine, "proofs": [p.to_mapping() for p in proved]}
    relative = golden_run.directory.relative_to(checkout.root)
    # without --sparse git adds nothing where it checks nothing out
    added = "--sparse " * checkout.is_sparse + os.path.relpath(checkout.root / "golden")
    text = (
        f"golden run of {this_case.name}: {relative}, {len(golden_run.trace.steps)} steps, {len(proved)} proofs\n"
        f"next: git add {added}{_elsewhere(checkout, this_case)}{_code(checkout, this_case)} && git commit; "
        f"`repro golden push` copies the content to the DVC remote{_beside(checkout, this_case)}\n"
        f"verify with: repro golden verify {this_case.name}"
    )
    emit(as_json, data, text)
    return 0


def _elsewhere(checkout: Checkout, case: Case) -> str:
    """What DVC wrote for rollouts that lie outside golden/, as words of a command; '' where they lie in it."""
    if case.case.rollouts is None or case.case.rollouts.startswith("golden/"):
        return ""
    pointer = (checkout.root / case.case.rollouts).with_name(f"{Path(case.case.rollouts).name}.dvc")
    written = [path for path in (pointer, pointer.with_name(".gitignore")) if pointer.exists() and path.exists()]
    return "".join(f" {shlex.quote(os.path.relpath(path))}" for path in written)


def _code(checkout: Checkout, case: Case) -> str:
    """The code that was recorded and that no commit has yet, as words of a command; '' where one has it."""
    names = checkout.uncommitted(case)
    paths = names if len(names) <= _NAMED else checkout.paths(case)
    arguments = "".join(f" {shlex.quote(os.path.relpath(checkout.root / path))}" for path in paths) if names else ""
    return f" && git add -u{arguments}" if len(names) > _NAMED else arguments


def _beside(checkout: Checkout, case: Case) -> str:
    """What is to be done about files that git does not track, which the program may need; '' without any."""
    from repro_golden.repository.linked import in_few_words

    names = in_few_words([os.path.relpath(checkout.root / name) for name in checkout.ran(case).untracked])
    return f"\nnot tracked: {names}; `git add` with it what the program needs" if names else ""


golden.add_command(verify)


@golden.command("list", short_help="Golden runs, and which verify here.")
@json_option
def list_runs(as_json: bool) -> int:
    """List golden runs, and which of them this machine can verify."""
    from repro.text import table
    from repro_golden.base.errors import ReproError
    from repro_golden.case.file import read_case
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.store.golden import CASE_LOST, Store, agreed
    from repro_golden.subjects import who_is

    checkout = find_checkout(Path.cwd())
    store = Store(checkout.root)
    here, why = {}, {}
    for name, path in store.guarded().items():
        if path is None:
            why[name] = CASE_LOST.format(name)
            continue
        try:
            golden_case = read_case(path)
            here[name] = golden_case, who_is(golden_case, checkout.root)
        except ReproError as error:  # no Python to train with here, say: nothing of it is verifiable
            why[name] = str(error)

    def row(machine: str, case: str, present: bool) -> dict[str, Any]:
        verifiable, damaged, refused = False, "", why.get(case, "")
        if case in here:
            verifiable, damaged, refused = _answered(store, machine, *here[case], present=present)
        answers = {"here": verifiable, "damaged": damaged, "why": refused}
        return {"case": case, "machine": machine, "present": present, **answers}

    rows = [row(*entry) for entry in store.entries()]
    for name, (golden_case, who) in here.items():
        serving = [r for r in rows if r["case"] == name and r["here"] and r["present"]]
        if len(serving) > 1 and who.identity.machine not in (r["machine"] for r in serving):
            try:
                agreed(golden_case, [store.read(r["machine"], name) for r in serving])
            except ReproError as error:  # by two of them the same run would pass and fail
                for r in serving:
                    r |= {"here": False, "why": str(error)}
    cells = [
        [
            r["case"],
            r["machine"],
            "damaged" if r["damaged"] else "here" if r["present"] else "to be pulled",
            "yes" if r["here"] else "no",
        ]
        for r in rows
    ]
    text = table(["case", "machine", "content", "verifiable here"], cells)
    problems = dict.fromkeys(f"{r['case']}: {r['damaged'] or r['why']}" for r in rows if r["damaged"] or r["why"])
    text = "\n".join([text, *problems])
    emit(as_json, rows, text if rows else "no golden runs: `repro golden record` records one")
    return 0


def _answered(store: Store, machine: str, case: Case, who: Who, *, present: bool) -> tuple[bool, str, str]:
    """Whether a golden run is verifiable here, what is damaged of it, and why else `golden verify` would refuse."""
    from repro_golden.base.errors import MachineFailureError, ReproError
    from repro_golden.runs.verify import refuse_unlike

    if not present:
        return who.identity.machine == machine, "", ""
    try:
        try:
            golden_run = store.load(machine, case.name)
        except MachineFailureError:  # DVC could not be asked
            golden_run = store.read(machine, case.name)
        if golden_run.differences(who.identity, who.versions):
            return False, "", ""
    except ReproError as error:  # of one run; the others are listed
        return False, str(error), ""
    try:
        refuse_unlike(golden_run, case)
    except ReproError as error:
        return False, "", str(error)
    return True, "", ""


@golden.command(short_help="One golden run: proofs, metrics, roots.")
@click.argument("run")
@json_option
def show(run: str, as_json: bool) -> int:
    """Show a golden run: RUN is CASE, CASE~CHAIN or MACHINE/CASE."""
    from repro.text import number, table
    from repro_golden.base.canonical import encode_float
    from repro_golden.store.rollouts import engine_text

    golden_run = _load(run)
    gaps = _mismatches(golden_run.trace)
    record = {k: v for k, v in golden_run.record.items() if k != "lock"}
    steps = [
        {"step": s.step, "root": s.root, "signals": s.signals} | {k: encode_float(v) for k, v in s.metrics.items()}
        for s in golden_run.trace.steps
    ]
    mismatch = [{"step": step} | gap.to_mapping() for step, gap in gaps.items()]
    names = list(golden_run.trace.steps[0].metrics)
    rows = [[str(s.step), *(number(s.metrics.get(n)) for n in names), s.root[:8]] for s in golden_run.trace.steps]
    lines = [
        f"{golden_run.directory.name} on {golden_run.machine}",
        f"recorded {record['recorded']['at']} by {record['recorded']['by']}",
        f"commit {record['commit'] or '(none: the files had changes of their own)'}",
        f"chain {record['chain']}, rollouts {record['rollouts']}",
    ]
    if record.get("engine"):
        lines.append(f"its rollouts are by {engine_text(record['engine'])}")
    if record.get("approved"):
        lines.append(f"approved because: {record['approved']['reason']}")
    if record.get("noise"):
        lines.append(
            f"does not reproduce itself; spread over {record['noise']['runs']} runs: {record['noise']['spread']}"
        )
    lines += [f"{'ok' if p['passed'] else 'NO'} {p['name']}: {p['detail']}" for p in record["proofs"]]
    notes = [f"mismatch at step {step}: {gap}" for step, gap in gaps.items()]
    notes = ["", "train/rollout mismatch: |trainer - rollout| of the tokens' log-probs", *notes] if notes else []
    text = "\n".join([*lines, "", table(["step", *names, "root"], rows), *notes])
    emit(as_json, record | {"steps": steps, "mismatch": mismatch}, text)
    return 0


def _mismatches(trace: Any) -> dict[int, Any]:
    """The mismatch of each step by its number; empty where the first step does not show the columns."""
    from repro_golden.compare.mismatch.measured import of_trace

    if not trace.steps or of_trace(trace, 0) is None:
        return {}
    gaps = {record.step: of_trace(trace, index) for index, record in enumerate(trace.steps)}
    return {step: gap for step, gap in gaps.items() if gap is not None}


@golden.command("diff", short_help="Compare two golden runs.")
@click.argument("a")
@click.argument("b")
@strict_names_option
@vary_option
@json_option
def diff_runs(a: str, b: str, strict_names: bool, vary: tuple[str, ...], as_json: bool) -> int:
    """Compare two golden runs: each is CASE, CASE~CHAIN or MACHINE/CASE."""
    from repro.report.mismatch import mismatch_text
    from repro.text import comparison_text
    from repro_golden.case.file import Compare
    from repro_golden.compare.mismatch.change import mismatch_change
    from repro_golden.compare.traces import check_identities, compare

    left, right = _load(a), _load(b)
    differences = check_identities(left.trace, right.trace, vary)
    comparison = compare(left.trace, right.trace, Compare(names="strict" if strict_names else "matched"))
    gap = None if comparison.equal else mismatch_change(left.trace, right.trace)
    data = comparison.to_mapping() | {"identity": differences, "mismatch": gap.to_mapping() if gap else None}
    gap_text = mismatch_text(data["mismatch"])
    parts = [
        comparison_text(comparison),
        *([f"\n{gap_text}"] if gap_text else []),
        *(f"identity differs: {d}" for d in differences),
    ]
    text = "\n".join(parts)
    options = "".join(f" --vary {part}" for part in vary) + (" --strict-names" if strict_names else "")
    emit(as_json, data, f"{text}\nreproduce with: repro golden diff {a} {b}{options}")
    return 0 if comparison.equal else 1


def _load(name: str) -> Any:
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.store.golden import Store

    checkout = find_checkout(Path.cwd())
    store = Store(checkout.root)
    machine, slash, run = name.rpartition("/")
    return store.load(machine if slash else _machine_of(checkout, store, run), run)


def _machine_of(checkout: Checkout, store: Store, run: str) -> str:
    """The machine whose golden run CASE or CASE~CHAIN is: that which serves here, this one, or the only one with it.

    Raises:
        ReproError: several others have it.
    """
    from repro_golden.base.errors import NotVerifiableError, ReproError
    from repro_golden.case.file import find_case, list_cases
    from repro_golden.subjects import who_is

    there = [machine for machine, name, _ in store.entries() if name == run]
    case_name = run.split("~")[0]
    why, chosen = f"no case {case_name!r}", list[str]()
    if not there or case_name in {path.stem for path in list_cases(checkout.root)}:
        recorded = find_case(checkout.root, case_name)
        who = who_is(recorded, checkout.root)
        why, chosen = f"no golden run of {run} for this machine ({who.identity.machine})", [who.identity.machine]
        with contextlib.suppress(NotVerifiableError):
            chosen.insert(0, store.find(recorded, who.identity, who.versions).machine)
    if known := [machine for machine in chosen if machine in there or store.run_path(machine, run).exists()]:
        return known[0]
    if len(there) > 1:
        runs = ", ".join(f"{machine}/{run}" for machine in there)
        raise ReproError(f"{why}, and golden runs of it on several machines: name one of {runs}")
    return (there or chosen)[0]


@golden.command(short_help="Fetch from the DVC remote.")
@click.argument("case", required=False)
@json_option
def pull(case: str | None, as_json: bool) -> int:
    """Fetch golden runs and rollouts from the DVC remote."""
    return _transfer("pull", case, as_json)


@golden.command(short_help="Copy to the DVC remote.")
@click.argument("case", required=False)
@json_option
def push(case: str | None, as_json: bool) -> int:
    """Copy golden runs and rollouts to the DVC remote."""
    return _transfer("push", case, as_json)


def _transfer(direction: str, case: str | None, as_json: bool) -> int:
    from repro_golden.base.errors import ReproError
    from repro_golden.repository.checkout import find_checkout, held_alone
    from repro_golden.store.golden import Store

    checkout = find_checkout(Path.cwd())
    store = Store(checkout.root)
    pointers = store.pointers(case)
    if not pointers:
        raise ReproError(f"nothing to {direction}: " + (f"no golden run of {case}" if case else "no golden runs yet"))
    if direction == "pull":
        with held_alone(checkout, *map(store.written_by, pointers)):
            output = store.dvc.pull(*pointers)
    else:
        output = store.push(pointers)
    last = output.strip().splitlines()[-1] if output.strip() else "nothing to do"
    emit(as_json, {"pointers": [str(p) for p in pointers], "dvc": last}, f"{len(pointers)} pointers: {last}")
    return 0
