"""New weights for a running engine: received or read and proved beside it, made live between two steps, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FuturesTimeout
from pathlib import Path
from typing import Any, Literal

from evergrad.inference._folders import local_folder
from evergrad.inference._loop import StepLoop
from evergrad.inference.config import EngineError
from evergrad.transfer import Receiver, load_tensors, merged_tensors, open_receiver

Mode = Literal["keep", "drain", "abort"]
"""What becomes of the requests that run when weights change. ``keep``: they go on, and their spans say which version drew what.
``drain``: they end first under the old version, and those that have drawn nothing yet wait for the new one. ``abort``: they end
where they are."""

DRAIN_S = 600.0
"""How long a draining update waits."""


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

    def update(self, manifest: Mapping[str, Any], mode: Mode = "keep", *, full_precision: bool = False) -> dict[str, Any]:
        """Takes the version that ``manifest`` names from the attached publisher.

        Args:
            mode: What becomes of the requests that run: see :data:`Mode`.
            full_precision: This version is not quantized, whatever the engine's configuration says.

        Raises:
            EngineError, TransferError: nothing attached, another layout, a publisher that is gone, a checksum or a tensor that
                does not fit, or requests that do not end.
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
                proved = time.perf_counter()
                self._stage_in_engine(receiver, full_precision)
                stage_s = time.perf_counter() - proved
                policy_version = int(manifest["policy_version"])
                pause = self._commit(policy_version, mode)
            except BaseException:
                receiver.abort()
                raise
            receiver.commit()
            self._let_go_of_others(receiver)
            return {**_report(policy_version, pause, started), "stage_s": stage_s, "transfer": receipt.as_dict()}

    def load(self, weights_uri: str, policy_version: int, on_commit: Callable[[], None], mode: Mode = "keep") -> dict[str, Any]:
        """Reads whole weights, or an adapter over the engine's base, from a folder.

        Args:
            on_commit: Called between the same two steps.
            mode: What becomes of the requests that run: see :data:`Mode`.

        Raises:
            EngineError, TransferError: not a local folder, a damaged file, tensors that do not fit, or requests that
                do not end.
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
            pause = self._commit(policy_version, mode, on_commit)
            self._let_go_of_others(None)
            return _report(policy_version, pause, started)

    def load_adapter(self, name: str, folder_uri: str) -> dict[str, Any]:
        """Reads an adapter in PEFT layout, to be served beside the base under ``name``.

        Raises:
            EngineError, TransferError: not a local folder, a damaged file, or an adapter that does not fit the base.
        """
        with self._one_at_a_time:
            started = time.perf_counter()
            engine = self._loop.engine
            adapter = engine.read_adapter(name, local_folder(folder_uri))
            self._loop.call(lambda: engine.add_adapter(adapter)).result()
            return {"adapters": sorted(engine.adapters), "seconds": time.perf_counter() - started}

    def close(self) -> None:
        for receiver in {self._receiver, self._live} - {None}:
            assert receiver is not None
            receiver.close()
        self._receiver = self._live = None

    def _stage_in_engine(self, receiver: Receiver, full_precision: bool) -> None:
        engine, tensors = self._loop.engine, receiver.tensors()
        if self._adapter is not None:
            merged = dict(merged_tensors(engine.model.base, (self._adapter, tensors), engine.config.model))
            engine.stage_weights(merged, full_precision=full_precision)
        else:
            engine.stage_weights(tensors, known_finite=True, full_precision=full_precision)  # the receiver has looked

    def _commit(self, policy_version: int, mode: Mode, on_commit: Callable[[], None] | None = None) -> dict[str, float]:
        loop, started = self._loop, time.perf_counter()

        def commit() -> float:
            begun = time.perf_counter()
            if mode == "abort":
                loop.end_all()
            loop.engine.commit(policy_version)
            if on_commit is not None:
                on_commit()
            return time.perf_counter() - begun

        if mode != "drain":
            return {"pause_s": loop.call(commit).result()}
        if loop.paused:
            raise EngineError("a paused engine cannot drain", hint="POST /admin/resume first, or use another mode")
        try:
            loop.drain().result(DRAIN_S)
            drain_s = time.perf_counter() - started
            return {"pause_s": loop.call(commit).result(), "drain_s": drain_s}
        except FuturesTimeout as error:
            raise EngineError(f"requests did not end within {DRAIN_S:.0f} s", hint="use mode 'keep' or 'abort'") from error
        finally:
            loop.admit()

    def _let_go_of_others(self, live: Receiver | None) -> None:
        if self._live is not None and self._live is not live and self._live is not self._receiver:
            self._live.close()
        self._live = live


def _report(policy_version: int, pause: Mapping[str, float], started: float) -> dict[str, Any]:
    return {"policy_version": policy_version, **pause, "seconds": time.perf_counter() - started}
