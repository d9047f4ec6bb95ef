"""optuna-dashboard over a search's study: a note on the study and on each notable trial, the policy as an artifact.

The objectives have their names since the study was made. Notes are Markdown; names and messages in them are escaped.
What is written here is what optuna-dashboard itself keeps in a study: no parameter, value or trial changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact
from optuna.trial import Trial
from optuna_dashboard import get_note, run_server, save_note, wsgi

from autoprec.errors import UsageError
from autoprec.policy import Number, content_hash
from autoprec.report.quantities import show_accuracy, show_bytes, show_ratio_number, show_throughput
from autoprec.report.saved_search import SavedSearch, SavedTrial
from autoprec.search.arms import BASELINES
from autoprec.search.front import Member

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

__all__ = ["annotate_study", "as_text", "dashboard_app", "serve"]

HOST = "127.0.0.1"
POLICY = "policy.json"
NOTES = "autoprec:notes"
"""User attribute of the study: hashes of the notes that were written here, by what they are on."""
MARKDOWN = re.compile(r"([\\`*_\[\]#|~$])")


def annotate_study(search: SavedSearch) -> int:
    """Write the notes and the artifact that the study lacks; return how many notes were written.

    Notable trials are the baselines, those on the front, those of the proof, and those that did not end well. A note
    that somebody wrote or edited stays as it is.
    """
    study = search.study
    ours: dict[str, str] = dict(study.user_attrs.get(NOTES, {}))
    written = 0
    for name, place, text in [("study", study, _study_note(search)), *_trial_notes(search)]:
        found = get_note(place)
        if found == text or (found and ours.get(name) != content_hash(found)):
            continue
        save_note(place, text)
        ours[name] = content_hash(text)
        written += 1
    if written:
        study.set_user_attr(NOTES, ours)
    _attach_policy(search)
    return written


def dashboard_app(search: SavedSearch) -> WSGIApplication:
    """Return optuna-dashboard over the study's storage and artifacts, as a WSGI application."""
    app: WSGIApplication = wsgi(search.study._storage, artifact_store=_store(search))
    return app


def serve(search: SavedSearch, *, port: int) -> None:
    """Serve optuna-dashboard on 127.0.0.1 until it is interrupted.

    Raises:
        UsageError: the port is taken.
    """
    try:
        run_server(search.study._storage, host=HOST, port=port, artifact_store=_store(search))
    except OSError as error:
        raise UsageError(f"port {port} of {HOST}: {error.strerror or error}; give another --port") from None


def _store(search: SavedSearch) -> FileSystemArtifactStore:
    folder = search.folder / "artifacts"
    folder.mkdir(exist_ok=True)
    return FileSystemArtifactStore(str(folder))


def _attach_policy(search: SavedSearch) -> None:
    """Attach policy.json to the study, where its newest artifact of that name is another."""
    path, store = search.folder / POLICY, _store(search)
    content = path.read_bytes()
    for meta in get_all_artifact_meta(search.study):
        try:
            with store.open_reader(meta.artifact_id) as reader:
                if meta.filename == POLICY and reader.read() == content:
                    return
        except FileNotFoundError:
            continue
    upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=search.study, mimetype="application/json")


def _study_note(search: SavedSearch) -> str:
    front = search.front
    rows = [
        f"| {as_text(m.name)} | {_number(m, 'peak_memory_bytes')} | {_number(m, 'throughput_samples_per_second')} "
        f"| {_number(m, 'accuracy')} | {_verdict(m)} |"
        for m in front.front
    ]
    header = "| policy | peak memory | throughput | accuracy (proof) | proof |\n| --- | --- | --- | --- | --- |"
    return "\n".join(
        [f"## {as_text(front.task)} on {as_text(front.target)}", "", as_text(front.sentence), "", header, *rows]
    )


def _trial_notes(search: SavedSearch) -> Iterator[tuple[str, Trial, str]]:
    members = {member.name: member for member in search.front.front}
    ids = {trial.number: trial._trial_id for trial in search.study.get_trials(deepcopy=False)}
    for trial in search.trials:
        lines = _notable(search, trial, members.get(trial.label) if trial.was_run else None)
        if lines:
            yield f"trial {trial.number}", Trial(search.study, ids[trial.number]), "\n\n".join(lines)


def _notable(search: SavedSearch, trial: SavedTrial, member: Member | None) -> list[str]:
    """Return what there is to say of a trial; nothing for one that is neither good, compared, nor broken."""
    lines = []
    if member is not None:
        if member.name == search.front.recommended:
            lines.append(f"**Recommended.** {as_text(search.front.sentence)}")
        if trial.arm in BASELINES:
            lines.append(f"Baseline: {as_text(trial.arm)}.")
        if member.on_front:
            lines.append("On the front: no feasible trial is better in all three objectives.")
        if member.proof is not None:
            lines.append(f"Proof: {_verdict(member)}: {as_text(member.proof.reason)}.")
    if trial.end != "ok":
        message = "" if trial.outcome is None else trial.outcome.message
        lines.append(f"Ended in **{as_text(trial.end)}**. {as_text(message)}".rstrip())
    elif not trial.is_feasible and trial.was_run:
        lines.append("Infeasible: it trained, but breaks a constraint of the study.")
    return lines


def _number(member: Member, field: str) -> str:
    show = {"peak_memory_bytes": show_bytes, "throughput_samples_per_second": show_throughput}.get(field, show_accuracy)
    number: Number | None = member.numbers.get(field)
    ratio = show_ratio_number(member.ratios.get(field))
    return " ".join(part for part in (show(number), ratio, "" if number is None else f"({number.kind})") if part)


def _verdict(member: Member) -> str:
    if member.outcome != "ok":
        return as_text(member.outcome)
    return "not verified" if member.proof is None else member.proof.verdict


def as_text(text: str) -> str:
    """Return text that Markdown and HTML leave as it is."""
    return MARKDOWN.sub(r"\\\1", escape(" ".join(text.split()), quote=False))
