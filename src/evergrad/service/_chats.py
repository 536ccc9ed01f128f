"""Chats as the gateway reads them: what a request says, and what was answered to it, in the shapes of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evergrad.loop.traffic import Redact, digest
from evergrad.service._canary import Dealt
from evergrad.types import Message


class GatewayError(Exception):
    """An answer that is an error, in the shape that OpenAI's clients read."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request of somebody who agreed that it is kept."""

    tenant: str
    user: str | None
    session: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, str]
    version_id: str
    dealt: Dealt | None = None
    """The session of a canary that it is a part of."""


def parsed_body(content: bytes) -> Mapping[str, Any]:
    """A body; empty for what the engine will refuse."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def customer_of(tenant: str, body: Mapping[str, Any]) -> str | None:
    user = body.get("user")
    return digest(tenant, user) if isinstance(user, str) and user else None


def agreed_request(body: Mapping[str, Any], tenant: str, version_id: str) -> ChatRequest | None:
    """The request, if it says ``"store": true``; what the engine will refuse is not kept either.

    Raises:
        GatewayError: it asks for several answers, of which nobody could tell which one the conversation went on from.
    """
    if body.get("store") is not True:
        return None
    try:
        messages = tuple(Message(each["role"], _text(each)) for each in body["messages"])
        metadata = {str(key): str(value) for key, value in (body.get("metadata") or {}).items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if body.get("n") not in (None, 1):
        raise GatewayError(400, "store = true goes with n = 1: of several answers, which one counts?", "invalid_request", "n")
    return ChatRequest(tenant, customer_of(tenant, body), str(body.get("session_id") or ""), messages, metadata, version_id)


def _text(message: Mapping[str, Any]) -> str:
    """What a message says; calls of tools, where the model has them apart from its text, are lines of it."""
    content = message.get("content")
    said = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return "\n".join([*([said] if said or not calls else []), *(f"{call['name']}({call['arguments']})" for call in calls)])


def whole_answer(told: bytes, content_type: str) -> tuple[str, str] | None:
    """Id and text of a whole chat completion, or of one in pieces; ``None`` for one that did not end well."""
    if not content_type.startswith("text/event-stream"):
        answer = json.loads(told)
        return answer["id"], _text(answer["choices"][0]["message"])
    pieces, calls, completion_id, ended = list[str](), dict[int, dict[str, str]](), "", False
    for line in told.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            return None
        completion_id = chunk["id"]
        for choice in chunk["choices"]:
            pieces.append(choice["delta"].get("content") or "")
            for each in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(each["index"], {"name": "", "arguments": ""})
                for key in call:
                    call[key] += each["function"].get(key) or ""
            ended = ended or choice["finish_reason"] is not None
    whole = {"content": "".join(pieces), "tool_calls": [{"function": calls[index]} for index in sorted(calls)]}
    return (completion_id, _text(whole)) if ended else None


def references_of(tenant: str, metadata: Mapping[str, str]) -> Iterator[str]:
    for key, value in metadata.items():
        yield digest(tenant, "metadata", key, value)


def redacted_json(value: Any, redact: Redact) -> Any:
    """JSON data with every text in it redacted; keys are the client's words, and stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted_json(each, redact) for key, each in value.items()}
    return [redacted_json(each, redact) for each in value] if isinstance(value, list) else value
