"""`repro rollout show`: what recorded rollouts hold, and what a doctor finds in dumps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from repro.commands.rollout.files import Reading, dump_options, dumps_at, is_ours
from repro.output import emit, json_option

if TYPE_CHECKING:
    from repro_golden.base.checks import Finding
    from repro_golden.dumps.rollout.files import RolloutDump
    from repro_golden.store.rollouts import RolloutSet

__all__ = ["facts", "facts_text", "show"]


@click.command(short_help="What recorded rollouts hold; checks dumps.")
@click.argument("rollouts")
@dump_options
@click.option("--group-size", type=click.IntRange(1), help="Samples of a prompt, for the checks of dumps.")
@click.option("--layers", type=click.IntRange(1), help="Layers that routed experts must have.")
@click.option("--topk", type=click.IntRange(1), help="Experts that each token must have.")
@json_option
def show(
    rollouts: str,
    allow: tuple[str, ...],
    limit: str | None,
    system: str | None,
    group_size: int | None,
    layers: int | None,
    topk: int | None,
    as_json: bool,
) -> int:
    """Show recorded rollouts: ROLLOUTS is a folder, a dump of slime, Miles or Relax, or the name of a case.

    Dumps are checked as well: lengths, groups, indices, log-probs, masks, rewards, weight versions, routed experts.

    Exit codes: 0; 1 where a check finds an error; 2 where something cannot be read.
    """
    path = Path(rollouts)
    place = path if path.exists() else _of_case(rollouts)
    if is_ours(place):
        return _ours(place, as_json)
    reading = Reading(allow, limit, system)
    sizes = {"group_size": group_size, "layers": layers, "topk": topk}
    return _dumps(place, reading, sizes, as_json)


def facts(rollouts: RolloutSet) -> dict[str, Any]:
    """How the first rollout was sampled."""
    meta = rollouts.read(0).meta if len(rollouts) else {}
    return {key: meta.get(key) for key in ("engine", "sampling", "weights")}


def facts_text(facts: dict[str, Any]) -> str:
    """`facts` for people."""
    engine, sampling = facts["engine"], facts["sampling"]
    lines = ["engine: the trained policy itself"]
    if engine:
        flags = " ".join(f"{key}={value}" for key, value in engine["flags"].items())
        lines = [f"engine: {engine['name']} {engine['version']} on {engine['device']}", f"flags: {flags}"]
        lines += [f"rests on a stand-in: {text}" for text in engine["stand_ins"]]
        lines.append(f"weights of the first rollout: {facts['weights'] or 'not known'}")
    if sampling:
        lines.append("sampling: " + " ".join(f"{key}={value}" for key, value in sampling.items()))
    return "\n".join(lines)


def _of_case(name: str) -> Path:
    from repro_golden.base.errors import ReproError
    from repro_golden.case.file import find_case
    from repro_golden.dumps.rollout.files import dump_files
    from repro_golden.repository.checkout import find_checkout
    from repro_golden.store.golden import Store
    from repro_golden.store.rollouts import RolloutSet

    checkout = find_checkout(Path.cwd())
    rollouts = Store(checkout.root).rollouts(find_case(checkout.root, name))
    if rollouts.directory is None or not (isinstance(rollouts, RolloutSet) or dump_files(rollouts.directory)):
        raise ReproError(
            f"the rollouts of {name} are its command's own files: `repro rollout show` reads ours and dumps N.pt"
        )
    return rollouts.directory


def _ours(place: Path, as_json: bool) -> int:
    from repro.text import count
    from repro_golden.store.rollouts import RolloutSet

    rollout_set = RolloutSet(place)
    every = [rollout_set.read(k) for k in range(len(rollout_set))]
    rows = [_row(k, rollout) for k, rollout in enumerate(every)]
    sampling_facts = facts(rollout_set)
    lines = [
        f"{count(len(rollout_set), 'rollout')} at {rollout_set.directory}",
        f"digest {rollout_set.digest}",
        _origin(every, sampling_facts),
        "",
    ]
    emit(as_json, {"digest": rollout_set.digest, **sampling_facts, "each": rows}, "\n".join([*lines, _table(rows)]))
    return 0


def _origin(every: list[Any], sampling_facts: dict[str, Any]) -> str:
    """Who sampled them: what `facts` say, or the dumps that they were made of."""
    systems = sorted({rollout.meta["dump"]["system"] for rollout in every if "dump" in rollout.meta})
    return f"made of dumps of {', '.join(systems)}" if systems else facts_text(sampling_facts)


def _dumps(place: Path, reading: Reading, sizes: dict[str, int | None], as_json: bool) -> int:
    from repro.text import count
    from repro_golden.base.canonical import digest
    from repro_golden.dumps.rollout.checks import check_dump
    from repro_golden.dumps.rollout.files import content_digest, form_text

    rows, findings, digests = [], [], []
    forms: dict[str, list[str]] = {}
    for path in dumps_at(place):
        dump = reading.read(path)
        digests.append(content_digest(dump))
        forms.setdefault(form_text(dump), []).append(path.name)
        rows.append(_dump_row(dump, digests[-1]))
        findings += [(path.name, finding) for finding in check_dump(dump, **sizes)]
    whole = digest("rollout dumps", *digests)
    lines = [f"{count(len(rows), 'rollout dump')} at {place}", f"digest {whole}"]
    lines += [f"{form}: {_names(names)}" for form, names in forms.items()]
    text = "\n".join([*lines, "", _table(rows), "", *_findings_text(findings)])
    data = {"digest": whole, "each": rows, "findings": [_finding(name, finding) for name, finding in findings]}
    emit(as_json, data, text)
    return int(any(finding.severity == "error" for _, finding in findings))


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)} files)"


def _findings_text(findings: list[tuple[str, Finding]]) -> list[str]:
    """Each rule once, with its first finding, why it matters and what to do."""
    from repro_golden.dumps.rollout.checks import RULES

    lines = []
    for rule in RULES:
        matches = [(name, finding) for name, finding in findings if finding.rule == rule.id]
        if not matches:
            continue
        name, first = matches[0]
        where = name if first.where.sample is None else f"{name}, sample {first.where.sample}"
        more = f" (and {len(matches) - 1} more)" if len(matches) > 1 else ""
        lines += [f"{rule.severity} {rule.id}: {where}: {first.message}{more}", f"  {rule.why}", f"  cure: {rule.fix}"]
    return lines or ["checks: nothing found"]


def _finding(name: str, finding: Finding) -> dict[str, Any]:
    return {
        "file": name, "rule": finding.rule, "severity": finding.severity, "sample": finding.where.sample,
        "field": finding.where.item, "message": finding.message,
    }  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> str:
    from repro.text import number, table

    plain_rows = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    names = list(plain_rows[0]) if plain_rows else []
    cells = [[number(row[n]) if isinstance(row[n], float) else str(row[n]) for n in names] for row in plain_rows]
    return table(names, cells)


def _row(number: int, rollout: Any) -> dict[str, Any]:
    meta, t = rollout.meta, rollout.tensors
    samples = len(t["rewards"])
    statuses = meta.get("statuses", [])
    return {
        "rollout": number,
        "samples": samples,
        "tokens": len(t["tokens"]),
        "response tokens": int(t["response_lengths"].sum()),
        "truncated": sum(status == "truncated" for status in statuses),
        "mean reward": _mean(t["rewards"].double().tolist()),
        "weight version": meta.get("weight_version", ""),
        "digest": rollout.digest[:12],
    }


def _dump_row(dump: RolloutDump, digest: str) -> dict[str, Any]:
    from repro_golden.dumps.rollout.arrays import length
    from repro_golden.dumps.rollout.checks.inputs import said

    samples = dump.samples
    rewards = [sample["reward"] for sample in samples]
    versions = sorted({said(version).strip("'") for sample in samples for version in sample["weight_versions"]})
    return {
        "rollout": f"{'eval ' if dump.evaluation else ''}{dump.rollout_id}",
        "system": dump.system,
        "samples": len(samples),
        "tokens": sum(length(sample["tokens"]) or 0 for sample in samples),
        "response tokens": sum(int(sample["response_length"]) for sample in samples),
        "truncated": sum(sample["status"] == "truncated" for sample in samples),
        "mean reward": _mean(rewards),
        "weight version": ", ".join(versions[:3]) + (f" and {len(versions) - 3} more" if len(versions) > 3 else ""),
        "digest": digest[:12],
        "unknown fields": sorted(said(name) for name in dump.unknown_fields),
    }


def _plain(reward: Any) -> Any:
    """A scalar of NumPy, or an array of one number, as Python's number."""
    import numpy as np

    from repro_golden.dumps.rollout.arrays import numbers

    array = None if isinstance(reward, list) else numbers(reward)
    if array is not None and array.size == 1:
        return array.reshape(-1)[0].item()
    return reward.item() if isinstance(reward, np.generic) else reward


def _mean(rewards: list[Any]) -> float | str:
    """'' without a number; in words where some are none, or where it is not finite, which JSON has no number for."""
    import math

    from repro.text import as_float, number

    numeric = [as_float(reward) for reward in map(_plain, rewards) if isinstance(reward, int | float)]
    if not numeric:
        return ""
    mean = math.fsum(numeric) / len(numeric) if all(map(math.isfinite, numeric)) else sum(numeric)
    if len(numeric) < len(rewards):
        return f"{number(mean)} of {len(numeric)}"
    return mean if math.isfinite(mean) else str(mean)
