"""The trainer seen from the loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from evergrad.training.config import LossConfig, TrainerError, UpdatesConfig
from evergrad.training.wire import batch_json, samples_json
from evergrad.types import TrainingBatch, TrainingSample

_HEALTH_TIMEOUT_S = 5.0


class TrainerClient:
    """Asks a trainer server for one operation at a time, in the order of the calls, also when they are not awaited one by
    one. Use as an async context manager, or :meth:`close` it.

    Every method raises :class:`TrainerError` with the server's own words when the operation was refused (the trainer is then
    as it was), when the server cannot be reached, and when it did not answer in time.
    """

    def __init__(self, base_url: str, token: str | None = None, *, timeout_s: float = 1800.0) -> None:
        """
        Args:
            base_url: Such as ``http://127.0.0.1:4711``.
            token: The server's ``EVERGRAD_TOKEN``.
            timeout_s: Seconds an operation may take.
        """
        self.base_url = base_url.rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        self._in_order = asyncio.Lock()
        timeout = httpx.Timeout(timeout_s, connect=_HEALTH_TIMEOUT_S)
        # Workers are ours: a proxy of the environment has no business between us and them.
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False)

    async def step(
        self,
        batch: TrainingBatch,
        loss: LossConfig | None = None,
        lr: float | None = None,
        updates: UpdatesConfig | None = None,
    ) -> dict[str, float]:
        """One optimizer update, or several; returns the metrics (see ``Trainer.step``). A figure that was not finite is NaN."""
        body = {
            "batch": batch_json(batch),
            "loss": (loss or LossConfig()).model_dump(mode="json"),
            "lr": lr,
            "updates": (updates or UpdatesConfig()).model_dump(),
        }
        answer = await self._send("POST", "/step", body)
        return {name: _number(value) for name, value in answer.items()}

    async def descriptor(self) -> dict[str, Any]:
        """Of the trainer's publisher, for an engine to attach to."""
        return await self._send("GET", "/descriptor")

    async def publish(self, policy_version: int) -> dict[str, Any]:
        """Writes the weights into the free slot under this version; returns the manifest, for an engine to update from."""
        return await self._send("POST", "/publish", {"policy_version": policy_version})

    async def save(self, folder: str) -> dict[str, Any]:
        """Writes a checkpoint, whole or not at all; returns its ``updates`` and ``policy_version`` when it is there.

        A trainer of several ranks writes while it goes on with what is asked of it meanwhile.
        """
        state = await self._send("POST", "/save", {"folder": folder})
        await self._send("GET", "/saved", params={"folder": folder})
        return state

    async def load(self, folder: str) -> dict[str, Any]:
        """Goes on from a checkpoint; returns ``updates`` and ``policy_version``."""
        return await self._send("POST", "/load", {"folder": folder})

    async def export(self, folder: str) -> dict[str, Any]:
        """Writes a PEFT adapter or a Hugging Face folder, whole or not at all."""
        return await self._send("POST", "/export", {"folder": folder})

    async def reset(self, weights_uri: str | None = None) -> dict[str, Any]:
        """Starts anew, with a fresh optimizer, from an export, or from the base when None."""
        return await self._send("POST", "/reset", {"weights_uri": weights_uri})

    async def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token but the first, given those before it."""
        answer = await self._send("POST", "/logprobs", {"token_ids": list(token_ids), "temperature": temperature})
        return [float(value) for value in answer["logprobs"]]

    async def score(self, samples: Sequence[TrainingSample], *, reference: bool = False) -> list[tuple[float, ...]]:
        """Log-probabilities of the samples' masked tokens (see ``Trainer.score``)."""
        body = {"samples": samples_json(samples), "reference": reference}
        answer = await self._send("POST", "/score", body)
        return _rows(answer["logprobs"])

    async def values(self, samples: Sequence[TrainingSample]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Log-probabilities and values of the samples' masked tokens (see ``Trainer.values``)."""
        answer = await self._send("POST", "/values", {"samples": samples_json(samples)})
        return _rows(answer["logprobs"]), _rows(answer["values"])

    async def health(self) -> dict[str, Any]:
        """``status``, ``updates``, ``policy_version``, the ``operation`` under way and its ``seconds``; within 5 s."""
        return await self._send("GET", "/health", timeout=_HEALTH_TIMEOUT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        where = f"{self.base_url}{path}"
        # Not httpx's own encoder, which refuses NaN: at masked positions it is legal, and means nothing.
        content = None if body is None else json.dumps(body).encode()
        # Two requests under way are two connections, and the smaller would arrive first. The lock is first come, first served.
        order = self._in_order if path not in ("/health", "/saved") else contextlib.nullcontext()
        try:
            async with order:
                response = await self._http.request(method, where, content=content, **options)
            answer = response.json()
        except httpx.TimeoutException as error:
            raise TrainerError("the trainer did not answer in time", where=where) from error
        except httpx.HTTPError as error:
            raise TrainerError(f"the trainer cannot be reached: {error!r}", where=where) from error
        except ValueError as error:
            raise TrainerError("the trainer's answer is not JSON", where=where) from error
        if response.status_code != 200:
            raise TrainerError(answer.get("error", {}).get("message", f"status {response.status_code}"), where=where)
        return dict(answer)


def _number(value: float | None) -> float:
    """A figure from JSON, which has no word for one that is not finite."""
    return float("nan") if value is None else float(value)


def _rows(answer: Sequence[Sequence[float | None]]) -> list[tuple[float, ...]]:
    return [tuple(_number(value) for value in row) for row in answer]
