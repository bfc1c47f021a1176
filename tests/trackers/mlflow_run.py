"""MLflow, with its store in SQLite; the module stands for its active run."""

from pathlib import Path

import mlflow


def start(folder: Path):
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.start_run()
    return mlflow


def read(folder: Path):
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    [run] = client.search_runs(["0"])
    values = {}
    for name in run.data.metrics:
        for each in client.get_metric_history(run.info.run_id, name):
            values.setdefault(each.step, {})[name] = each.value
    start = "accel_fn."
    tags = {name: text for name, text in run.data.tags.items() if name.startswith(start)}
    return values, {name.removeprefix(start): text for name, text in tags.items()}
