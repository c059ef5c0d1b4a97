"""A small client of the Debug Adapter Protocol: enough to attach to debugpy and ask it things."""

import json
import socket
from typing import Any


class DebugClient:
    """One editor attached to one debugged process."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection((host, port), timeout=120)
        self._file = self._socket.makefile("rb")
        self._sent = 0

    def attach(self, script: str = "", breakpoint_line: int = 0) -> None:
        """Do what an editor does when its user picks an attach entry."""
        self.request("initialize", adapterID="test", clientID="test", pathFormat="path")
        # debugpy answers attach only after configurationDone, and announces itself in between.
        attach = self._send("attach", {"justMyCode": False})
        self.event("initialized")
        if script:
            where = [{"line": breakpoint_line}]
            self.request("setBreakpoints", source={"path": script}, breakpoints=where)
        self.request("configurationDone")
        self._answer(attach)

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the body of its answer."""
        return self._answer(self._send(command, arguments))

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event and return its body."""
        body: dict[str, Any] = self._read(lambda message: message.get("event") == name).get(
            "body", {}
        )
        return body

    def close(self) -> None:
        """Leave, and let the process go on."""
        self.request("disconnect", terminateDebuggee=False)
        self._file.close()
        self._socket.close()

    def _send(self, command: str, arguments: dict[str, Any]) -> int:
        self._sent += 1
        message = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._sent

    def _answer(self, number: int) -> dict[str, Any]:
        answer = self._read(lambda message: message.get("request_seq") == number)
        assert answer["success"], answer
        body: dict[str, Any] = answer.get("body", {})
        return body

    def _read(self, wanted: Any) -> dict[str, Any]:
        while True:
            length = 0
            while (line := self._file.readline()) != b"\r\n":
                assert line, "the adapter closed the connection"
                name, _, value = line.partition(b":")
                if name == b"Content-Length":
                    length = int(value)
            message: dict[str, Any] = json.loads(self._file.read(length))
            if wanted(message):
                return message
