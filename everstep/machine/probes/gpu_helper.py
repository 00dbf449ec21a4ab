"""The process that talks to the NVIDIA driver, so that a sick driver hangs it and not the agent.

One line of JSON each way (``gpu_link`` has the other end). Standard input asks ``{"look": N}``; at
its end this process ends, so it never outlives its agent. Each GPU has a thread of its own: a call
that hangs blocks that GPU alone, and a watch says which call it is. Between looks each GPU gets one
cheap call (the pulse), and Xid events are waited for, so that news need not wait for a look.

Not here: what is asked (``gpu_calls``), and what the answers mean (``gpu_judge``).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import pynvml

from everstep.machine.probes import gpu_calls

EVENT_WAIT_MS = 2000
DEVICES_MAX = 256
"""More GPUs than any machine has; a sick driver may say any number."""


class Watched:
    """A thread that calls the driver: what it is in now, and for how many ticks of the watch.

    Ticks, not times: when the whole machine was stopped for an hour, no call has hung for it.
    """

    def __init__(self) -> None:
        self.calling = ""
        self.serial = 0
        self._seen_serial = 0
        self.ticks = 0

    def call(self, function: Any, *args: Any) -> Any:
        """Call the driver under the watch's eyes."""
        self.serial += 1
        self.calling = function.__name__
        try:
            return function(*args)
        finally:
            self.calling = ""

    def tick(self) -> int:
        """How many ticks in a row have found it in the same call."""
        if self.calling and self.serial == self._seen_serial:
            self.ticks += 1
        else:
            self.ticks = 0
        self._seen_serial = self.serial
        return self.ticks


class Device(Watched):
    """One GPU and its thread."""

    def __init__(self, helper: Helper, index: int) -> None:
        super().__init__()
        self.index = index
        self.stuck = False
        self.handle: Any = None
        self._helper = helper
        self._who: gpu_calls.Values | None = None
        self._worked: set[str] = set()
        self._ill = ""
        self._wanted = 0
        self._answered = 0
        self._wish = threading.Condition()

    def start(self) -> None:
        """Identify the device, then answer and pulse for ever."""
        threading.Thread(target=self._run, daemon=True).start()

    def want(self, look: int) -> None:
        """Ask for a look; answered at once, as stuck, while a call hangs."""
        with self._wish:
            self._wanted = look
            self._wish.notify()
        if self.stuck:
            self.answer_stuck()

    def answer_stuck(self) -> None:
        """Answer an open wish for a thread that cannot."""
        with self._wish:
            if self._answered == self._wanted:
                return
            self._answered = self._wanted
        seconds = round(self.ticks * self._helper.tick_s, 1)
        self._say(stuck=self.calling or "a driver call", stuck_s=seconds)

    def _run(self) -> None:
        while True:
            with self._wish:
                asked = self._wanted != self._answered or self._wish.wait(self._helper.pulse_s)
            try:
                if self.handle is None:
                    self._identify()
                elif not asked:
                    gpu_calls.pulse(self.call, self.handle)
                ill = ""
            except pynvml.NVMLError as error:
                ill = gpu_calls.error_name(error)
            except Exception as error:  # noqa: BLE001 - this thread has to answer, whatever happens
                ill = type(error).__name__
            if asked:
                self._answer(ill)
            if ill != self._ill:
                self._ill = ill
                self._helper.say({"news": ill or "well", "index": self.index})

    def _identify(self) -> None:
        handle, self._who = gpu_calls.identify(self.call, self.index)
        self._helper.register(self, handle)
        self.handle = handle

    def _answer(self, ill: str) -> None:
        if self.handle is None:
            answer: dict[str, Any] = {"errors": {"handle": ill}}
        else:
            values, skipped, errors = gpu_calls.read(self.call, self.handle, self._worked)
            answer = {"values": values, "skipped": skipped, "errors": errors}
        with self._wish:
            late = self._answered == self._wanted
            self._answered = self._wanted
        if not late:
            self._say(**answer)

    def _say(self, **answer: Any) -> None:
        self._helper.say({"look": self._wanted, "index": self.index, "who": self._who, **answer})


class Helper:
    """The process: reads wishes, keeps the watch, writes answers."""

    def __init__(self, call_deadline_s: float, pulse_s: float) -> None:
        self.pulse_s = pulse_s
        self.tick_s = min(1.0, call_deadline_s / 5)
        self._deadline_s = call_deadline_s
        self._devices: list[Device] = []
        self._by_address: dict[int, int] = {}
        self._events: Any = None
        self._output = threading.Lock()
        # A library that prints must not speak for us.
        self._pipe = os.dup(1)
        os.dup2(2, 1)

    def say(self, line: dict[str, Any]) -> None:
        """Write one line; nobody listening means the end."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._output:
            try:
                while data:
                    data = data[os.write(self._pipe, data) :]
            except OSError:
                os._exit(0)

    def run(self) -> None:
        """Until standard input ends."""
        threading.Thread(target=self._start, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        for line in sys.stdin.buffer:
            try:
                look = json.loads(line)["look"]
            except (ValueError, KeyError, TypeError):
                continue
            self.say({"taken": look, "count": len(self._devices)})
            for device in self._devices:
                device.want(look)

    def register(self, device: Device, handle: Any) -> None:
        """Ask for the Xid events of a device, where it has any."""
        where = gpu_calls.address(handle)
        if where is not None:
            self._by_address[where] = device.index
        if self._events is None:
            return
        try:
            device.call(
                pynvml.nvmlDeviceRegisterEvents,
                handle,
                pynvml.nvmlEventTypeXidCriticalError,
                self._events,
            )
        except pynvml.NVMLError as error:
            self.say({"without_events": gpu_calls.error_name(error), "index": device.index})

    def _start(self) -> None:
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.say({"failed": gpu_calls.error_name(error), "text": str(error)})
            os._exit(1)
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            self.say({"without_events": gpu_calls.error_name(error)})
        self._devices = [Device(self, index) for index in range(min(count, DEVICES_MAX))]
        for device in self._devices:
            device.start()
        self.say({"ready": count, "driver": _driver_version()})
        if self._events is not None and self._devices:
            self._wait_for_events()

    def _wait_for_events(self) -> None:
        """In the thread that started everything: it has nothing else left to do."""
        while True:
            try:
                event = pynvml.nvmlEventSetWait(self._events, EVENT_WAIT_MS)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    time.sleep(EVENT_WAIT_MS / 1000)  # an error may come at once, and again
                continue
            if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                where = gpu_calls.address(event.device)
                index = self._by_address.get(where) if where is not None else None
                self.say({"xid": int(event.eventData), "index": index})

    def _watch(self) -> None:
        """See which calls hang."""
        while True:
            time.sleep(self.tick_s)
            for device in self._devices:
                hangs = device.tick() * self.tick_s >= self._deadline_s
                if hangs:
                    device.answer_stuck()
                if hangs != device.stuck:
                    device.stuck = hangs
                    self.say({"news": "stuck" if hangs else "back", "index": device.index})


def _driver_version() -> str:
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return ""
    return version.decode("utf-8", "replace") if isinstance(version, bytes) else str(version)


def main() -> None:
    """Arguments: deadline of a call, and pause between pulses, both in seconds."""
    Helper(float(sys.argv[1]), float(sys.argv[2])).run()
    os._exit(0)  # a thread that hangs in the driver must not keep the process


if __name__ == "__main__":
    main()
