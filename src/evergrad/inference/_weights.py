"""New weights for a running engine: received or read and proved beside it, made live between two steps, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evergrad.inference._folders import local_folder
from evergrad.inference._loop import StepLoop
from evergrad.inference.config import EngineError
from evergrad.transfer import Receiver, load_tensors, merged_tensors, open_receiver


class WeightUpdates:
    """One update at a time. Each either ends with the new version live, or raises and leaves the old one as it was.

    The methods block; call them outside of the event loop and of the engine's thread.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._one_at_a_time = threading.Lock()
        self._receiver: Receiver | None = None
        self._adapter: Mapping[str, Any] | None = None
        """Of the receiver's publisher, where that sends the parts of a LoRA: PEFT's configuration of it."""
        self._live: Receiver | None = None
        """Whose slot the engine serves from: it keeps its lock until other weights are live, whatever is attached meanwhile."""

    def attach(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Attaches to a publisher, in place of the one before.

        Raises:
            TransferError: the descriptor does not lead to a publisher.
        """
        with self._one_at_a_time:
            receiver = open_receiver(descriptor)
            if self._receiver is not None and self._receiver is not self._live:
                self._receiver.close()
            self._receiver, self._adapter = receiver, descriptor.get("adapter")
            return {"tensors": len(receiver.layout.tensors), "layout_hash": receiver.layout.hash}

    def update(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Takes the version that ``manifest`` names from the attached publisher.

        Raises:
            EngineError, TransferError: nothing attached, another layout, a publisher that is gone, a checksum or a tensor that
                does not fit.
        """
        with self._one_at_a_time:
            started = time.perf_counter()
            receiver = self._receiver
            if receiver is None:
                raise EngineError("no publisher is attached", hint="POST /admin/weights/attach its descriptor first")
            receiver.prepare(manifest)
            try:
                receiver.stage()
                receiver.verify()
                receipt = receiver.receipt()
                self._stage_in_engine(receiver)
                policy_version = int(manifest["policy_version"])
                pause_s = self._commit(policy_version)
            except BaseException:
                receiver.abort()
                raise
            receiver.commit()
            self._let_go_of_others(receiver)
            return {**_report(policy_version, pause_s, started), "transfer": receipt.as_dict()}

    def load(self, weights_uri: str, policy_version: int, on_commit: Callable[[], None]) -> dict[str, Any]:
        """Reads whole weights, or an adapter over the engine's base, from a folder.

        Args:
            on_commit: Called between the same two steps.

        Raises:
            EngineError, TransferError: not a local folder, a damaged file, or tensors that do not fit.
        """
        with self._one_at_a_time:
            started = time.perf_counter()
            folder, engine = local_folder(weights_uri), self._loop.engine
            if folder.resolve() == Path(engine.config.model).resolve():
                engine.stage_base()
            elif (folder / "adapter_config.json").is_file():
                engine.stage_weights(dict(merged_tensors(engine.model.base, folder, engine.config.model)))
            else:
                engine.stage_weights(load_tensors(folder), whole=True)
            pause_s = self._commit(policy_version, on_commit)
            self._let_go_of_others(None)
            return _report(policy_version, pause_s, started)

    def close(self) -> None:
        for receiver in {self._receiver, self._live} - {None}:
            assert receiver is not None
            receiver.close()
        self._receiver = self._live = None

    def _stage_in_engine(self, receiver: Receiver) -> None:
        engine, tensors = self._loop.engine, receiver.tensors()
        if self._adapter is not None:
            engine.stage_weights(dict(merged_tensors(engine.model.base, (self._adapter, tensors), engine.config.model)))
        else:
            engine.stage_weights(tensors, known_finite=True)  # the receiver has looked

    def _commit(self, policy_version: int, on_commit: Callable[[], None] | None = None) -> float:
        def commit() -> float:
            started = time.perf_counter()
            self._loop.engine.commit(policy_version)
            if on_commit is not None:
                on_commit()
            return time.perf_counter() - started

        return self._loop.call(commit).result()

    def _let_go_of_others(self, live: Receiver | None) -> None:
        if self._live is not None and self._live is not live and self._live is not self._receiver:
            self._live.close()
        self._live = live


def _report(policy_version: int, pause_s: float, started: float) -> dict[str, Any]:
    return {"policy_version": policy_version, "pause_s": pause_s, "seconds": time.perf_counter() - started}
