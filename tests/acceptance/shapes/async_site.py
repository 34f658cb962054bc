"""A site of async endpoints, as FastAPI's templates have it: one enqueues, one tells the state, and
the body its progress."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from celery import Celery, current_task
from celery.result import AsyncResult

from tests.acceptance.shapes.settings import BROKER, DATABASE, RESULTS

celery_app = Celery("worker", broker=BROKER, backend=RESULTS, task_cls="celery_outbox:OutboxTask")
celery_app.conf.task_routes = {"site.create": "site-queue"}
celery_app.conf.update(task_track_started=True, outbox_database_url=DATABASE)


@celery_app.task(name="site.create", acks_late=True)
def create_task(word: str) -> str:
    """Say how far it is."""
    for step in range(1, 4):
        current_task.update_state(state="PROGRESS", meta={"process_percent": step * 33})
    return f"made {word}"


async def post_task(word: str) -> dict[str, Any]:
    """``@app.post("/tasks")``"""
    return {"task_id": create_task.delay(word).id}


async def get_status(task_id: str) -> dict[str, Any]:
    """``@app.get("/tasks/{task_id}")``"""
    result = AsyncResult(task_id, app=celery_app)
    return {"task_id": task_id, "task_status": result.status, "task_result": result.result}


async def main() -> None:
    """Several requests at a time; write the last answer to each."""

    async def request(word: str) -> dict[str, Any]:
        started = await post_task(word)
        for _ in range(600):
            answer = await get_status(started["task_id"])
            if answer["task_status"] in ("SUCCESS", "FAILURE", "REVOKED"):
                return answer
            await asyncio.sleep(0.1)
        return answer

    answers = await asyncio.gather(*(request(f"word {number}") for number in range(5)))
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    from tests.acceptance.shapes import async_site

    asyncio.run(async_site.main())
