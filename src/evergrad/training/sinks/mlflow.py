"""MLflow, in a local database of the run folder unless a tracking server is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from evergrad.training.sinks.base import RunInfo, Sink, SinkError, Writer
from evergrad.training.sinks.identity import kept_identity, remember_identity


class Mlflow(Sink):
    """An MLflow run with the configuration as parameters."""

    package: ClassVar[str | None] = "mlflow"
    module: ClassVar[str] = "mlflow"
    tracking_uri: str | None = None
    """Of a server or store; by default ``mlflow.db`` in the run folder (``mlflow ui --backend-store-uri sqlite:///…``)."""
    experiment: str = "evergrad"

    def open(self, run: RunInfo) -> Writer:
        # The client, not the module's functions: those keep one global run, which may be somebody else's.
        tracking = self.imported().tracking
        try:
            uri = self.tracking_uri or f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
            client = tracking.MlflowClient(tracking_uri=uri)
            identity = kept_identity(run.folder, "mlflow")
            if identity is None:
                identity = client.create_run(self._experiment(client, run), run_name=run.name).info.run_id
                remember_identity(run.folder, "mlflow", identity)
                for key, value in run.config.items():
                    client.log_param(identity, key, str(value)[:500])
            client.update_run(identity, status="RUNNING")
        except Exception as error:  # its errors are many, and none of them is ours
            raise SinkError(f"MLflow does not start: {error}"[:300], hint="check tracking_uri, or remove the sink") from error
        return _Run(client, identity)

    def _experiment(self, client: Any, run: RunInfo) -> str:
        found = client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        # Artifacts of a local store would go to the current folder otherwise.
        place = None if self.tracking_uri else (run.folder / "mlflow").absolute().as_uri()
        return str(client.create_experiment(self.experiment, artifact_location=place))


class _Run:
    def __init__(self, client: Any, identity: str) -> None:
        self._client, self._identity = client, identity

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._identity, name, value, step=step)

    def close(self, done: bool) -> None:
        self._client.set_terminated(self._identity, "FINISHED" if done else "KILLED")
