"""A Flask site with an application factory, as Flask's documentation has it ("Background Tasks
with Celery"); its base class runs bodies inside the application's context."""

from __future__ import annotations

import json
import sys
from typing import Any

from celery import Celery, shared_task
from celery.result import AsyncResult
from flask import Flask, current_app, request

from celery_outbox import OutboxTask as Task
from tests.acceptance.shapes.settings import BROKER, DATABASE, RESULTS
from tests.wait import eventually


def celery_init_app(app: Flask) -> Celery:
    """Give a Flask app its Celery app."""

    class FlaskTask(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with app.app_context():
                return self.run(*args, **kwargs)

    celery_app = Celery(app.name, task_cls=FlaskTask)
    celery_app.config_from_object(app.config["CELERY"])
    celery_app.set_default()
    app.extensions["celery"] = celery_app
    return celery_app


@shared_task(ignore_result=False)
def add_together(a: int, b: int) -> str:
    """Need the application's context."""
    return f"{current_app.config['GREETING']} {a + b}"


def create_app() -> Flask:
    """The factory."""
    app = Flask("site")
    app.config.from_mapping(
        GREETING="It is",
        CELERY={
            "broker_url": BROKER,
            "result_backend": RESULTS,
            "task_ignore_result": True,
            "outbox_database_url": DATABASE,
        },
    )
    celery_init_app(app)

    @app.post("/add")
    def start_add() -> dict[str, object]:
        result = add_together.delay(
            request.form.get("a", type=int), request.form.get("b", type=int)
        )
        return {"result_id": result.id}

    @app.get("/result/<id>")
    def task_result(id: str) -> dict[str, object]:
        result = AsyncResult(id)
        return {
            "ready": result.ready(),
            "successful": result.successful(),
            "value": result.result if result.ready() else None,
        }

    return app


flask_app = create_app()
celery_app = flask_app.extensions["celery"]


def main() -> None:
    """Ask for a sum as a browser does; write what the site answers in the end."""
    client = flask_app.test_client()
    started = client.post("/add", data={"a": 1, "b": 2}).get_json()

    def answer() -> Any:
        found = client.get(f"/result/{started['result_id']}").get_json()
        return found if found["ready"] else None

    sys.stdout.write(json.dumps(started | eventually(answer, deadline=60)))


if __name__ == "__main__":
    # Under its own name, which the tasks have at the worker.
    from tests.acceptance.shapes import flask_site

    flask_site.main()
