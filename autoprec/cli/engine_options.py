"""Where the trials of a search run: in processes of this one, or in workers that SLURM or Ray starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from autoprec.cli.task_options import option
from autoprec.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from autoprec.engines.command import Finished
    from autoprec.search.events import Events

__all__ = ["EngineOptions"]

LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a person said of the engine; one field an option."""

    engine: Annotated[
        str, option("local, slurm, ray or ray:ADDRESS: what starts the workers of the study.", "--engine")
    ] = LOCAL
    slurm_partition: Annotated[str | None, option("SLURM's partition; its default.", "--slurm-partition")] = None
    slurm_time: Annotated[int, option("Minutes of a SLURM job, which is then queued again.", "--slurm-time", min=1)] = (
        60
    )
    slurm_option: Annotated[
        list[str] | None, option("More for sbatch: account=NAME, qos=NAME; may be repeated.", "--slurm-option")
    ] = None

    @property
    def is_local(self) -> bool:
        """Whether the trials run in processes of this one.

        Raises:
            UsageError: no such engine, or options that go with another one.
        """
        from autoprec.engines import ENGINES

        kind = self.engine.partition(":")[0]
        if kind not in ENGINES:
            nearest = did_you_mean(kind, ENGINES)
            raise UsageError(f"engine {self.engine!r}; allowed: {', '.join(ENGINES)}, ray:ADDRESS{nearest}")
        given = {"--slurm-partition": self.slurm_partition, "--slurm-option": self.slurm_option}
        wrong = [name for name, value in given.items() if value is not None and kind != "slurm"]
        if wrong:
            raise UsageError(f"{', '.join(wrong)}: with --engine slurm alone")
        return kind == LOCAL

    def run(
        self,
        arguments: list[str],
        proof_arguments: list[str],
        *,
        storage: str | None,
        study_name: str | None,
        num_workers: int | None,
        num_gpus: int,
        output: Path | None,
        events: Events,
    ) -> Finished:
        """Run a search on the engine: `autoprec worker` with `arguments`, then `autoprec search` with the proof's.

        Raises:
            UsageError: what an engine needs is missing.
            StudyError: as `run_on_engine`.
        """
        from autoprec.engines.command import Command
        from autoprec.engines.run import open_engine, run_on_engine
        from autoprec.search.plan import file_name
        from autoprec.search.storage import try_storage

        kind = self.engine.partition(":")[0]
        if storage is None or study_name is None:
            raise UsageError(f"engine {kind}: give --storage and --study-name, which all workers share")
        url, password = self._storage(storage, kind)
        folder = output or Path("runs") / file_name(study_name)
        settings: dict[str, Any] = {"num_gpus": num_gpus}
        if kind == "slurm":
            settings |= {"folder": folder / "jobs", "partition": self.slurm_partition, "minutes": self.slurm_time}
            settings |= {"parameters": dict(_pair(text) for text in self.slurm_option or [])}
        engine = open_engine(self.engine, settings)
        try:
            try_storage(storage)
            place = os.getcwd()
            shared = ["--storage", url, "--study-name", study_name]
            return run_on_engine(
                engine,
                Command(["-q", "worker", *arguments, *shared], folder=place, password=password),
                Command(
                    ["-q", "search", *proof_arguments, *shared], folder=place, password=password, returns_files=True
                ),
                num_workers=num_workers or engine.num_workers,
                storage=storage,
                study_name=study_name,
                folder=folder,
                events=events,
            )
        finally:
            engine.close()

    @property
    def _is_on_this_machine(self) -> bool:
        kind, _, place = self.engine.partition(":")
        return place == "local" if kind == "slurm" else place.partition(":")[0] in ("", "127.0.0.1", "localhost")

    def _storage(self, url: str, kind: str) -> tuple[str, str | None]:
        """Return the URL for the workers' command lines, and the password apart."""
        from autoprec.search.database_urls import sqlite_path, without_password
        from autoprec.search.sharing import require_turns

        if sqlite_path(url) is not None and not self._is_on_this_machine:
            raise UsageError(
                f"engine {self.engine}: SQLite is for the processes of one machine; give --storage"
                " postgresql://USER@HOST/DATABASE"
            )
        require_turns(url)
        shown, password = without_password(url)
        if password is not None and kind == "slurm":
            raise UsageError(
                "engine slurm: the password in --storage would be stored in SLURM's job scripts; leave it out and"
                " put it into PGPASSFILE (~/.pgpass) or PGPASSWORD"
            )
        return shown, password


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise UsageError(f"--slurm-option {text!r}; NAME=VALUE is needed, such as account=physics")
    return name.lstrip("-").replace("-", "_"), value
