"""A small client of a served endpoint; needs nothing of the house but its nouns.

Any OpenAI client gets chat completions at the same address; this one speaks in :class:`~evergrad.types.Message` and knows the
house's errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import TracebackType
from typing import Any

import httpx

from evergrad.types import EvergradError, FinishReason, Message, Usage

CONNECT_TIMEOUT_S = 5.0


class ClientError(EvergradError):
    """The endpoint could not be reached, refused the request, or answered with something else than an answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the served model said.

    >>> Reply("Refunded 30.", FinishReason.STOP, "production").text
    'Refunded 30.'
    """

    text: str
    finish_reason: FinishReason
    model: str
    """The name that was asked for: an alias or a version id."""
    usage: Usage = field(default_factory=Usage)


class Client:
    """Talks to ``evergrad serve`` or any endpoint of the same wire.

    Use it as a context manager, or call :meth:`close`. ``timeout_s`` bounds the wait for one answer.

    Example::

        with Client("http://127.0.0.1:8000") as client:
            print(client.chat([Message("user", "Please refund order 50F.")]).text)
    """

    def __init__(self, base_url: str, *, timeout_s: float = 300.0) -> None:
        self._http = httpx.Client(
            base_url=_root(base_url),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            # A proxy of the environment leads out of this machine, never to it.
            trust_env=not _is_this_machine(base_url),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives the connection back."""
        self._http.close()

    def chat(self, messages: Sequence[Message], model: str = "production", **options: Any) -> Reply:
        """One answer to a conversation.

        ``options`` go into the request as they are: ``temperature``, ``max_tokens``, ``top_p``, ``seed``.

        Raises:
            ClientError: no such model, an option that the endpoint does not know, or no endpoint.
        """
        data = self._json("POST", "/v1/chat/completions", _body(messages, model, options))
        try:
            choice = data["choices"][0]
            return Reply(choice["message"]["content"] or "", FinishReason(choice["finish_reason"]), data["model"], _usage(data))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ClientError(f"not a chat completion: {error!r}", where=str(self._http.base_url)) from error

    def stream(self, messages: Sequence[Message], model: str = "production", **options: Any) -> Iterator[str]:
        """The same answer piece by piece, as it is generated.

        Raises:
            ClientError: as :meth:`chat`, or the answer broke off.
        """
        body = {**_body(messages, model, options), "stream": True}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                yield from _pieces(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def models(self) -> tuple[str, ...]:
        """Names that answer as ``model``: aliases and version ids."""
        return tuple(str(entry["id"]) for entry in self._json("GET", "/v1/models")["data"])

    def health(self) -> Mapping[str, Any]:
        """What the endpoint says of itself; raises when it is not well."""
        return self._json("GET", "/health")

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        try:
            data = response.json()
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise ClientError(
                f"{path} did not answer with a JSON object", where=str(self._http.base_url), hint="check the address"
            )
        return data

    def _unreachable(self, error: httpx.HTTPError) -> ClientError:
        where = str(self._http.base_url)
        if isinstance(error, httpx.ConnectError):
            return ClientError(
                "nothing answers there", where=where, hint="start it with 'evergrad serve', or correct the address"
            )
        return ClientError(f"the connection failed: {type(error).__name__} {error}".rstrip(), where=where)


def _root(base_url: str) -> str:
    # People paste the address that OpenAI clients want.
    return base_url.rstrip("/").removesuffix("/v1")


def _is_this_machine(base_url: str) -> bool:
    host = httpx.URL(base_url).host
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _body(messages: Sequence[Message], model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "messages": [message.as_dict() for message in messages], **options}


def _usage(data: Mapping[str, Any]) -> Usage:
    usage = data.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            raise ClientError(_message(event), where=str(response.url))
        for choice in event["choices"]:
            piece = choice["delta"].get("content")
            if piece:
                yield piece
    raise ClientError("the answer broke off", where=str(response.url), hint="ask again; the endpoint's log says why")


def _refusal(response: httpx.Response) -> ClientError:
    try:
        text = _message(response.json())
    except ValueError:
        text = response.text[:200]
    return ClientError(f"{response.status_code}: {text}", where=str(response.url))


def _message(data: Any) -> str:
    """The reason in an error body, in OpenAI's or FastAPI's shape."""
    error = data.get("error", data.get("detail", data)) if isinstance(data, dict) else data
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
