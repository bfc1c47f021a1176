"""Runs a program in a pseudo-terminal, reads what it prints, and types."""

from __future__ import annotations

import codecs
import os
import pty
import select
import signal
import subprocess
import termios
from functools import partial


def _enter(inside):
    """Be a program of this terminal, which Ctrl-C reaches also where tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.login_tty(inside)


class Terminal:
    """A command in a terminal; it is killed at the end of the block."""

    def __init__(self, command, folder, environment):
        self.screen, inside = pty.openpty()
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, preexec_fn=partial(_enter, inside)
        )
        os.close(inside)
        termios.tcsetwinsize(self.screen, (24, 80))
        self._poll = select.poll()
        self._poll.register(self.screen, select.POLLIN)
        self.text, self.seen, self.raw = "", 0, ""
        # A read may end in the middle of a character.
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait(timeout=120)
        if self.screen is not None:
            self.close()

    def close(self):
        os.close(self.screen)
        self.screen = None

    def read_until(self, words):
        """Read until these words have come; fail if they do not."""
        while words not in self.text[self.seen :]:
            assert self._read(), f"{words!r} did not come:\n{self.text}"
        self.seen = self.text.index(words, self.seen) + len(words)
        return self

    def type(self, text):
        os.write(self.screen, text.encode())
        return self

    def interrupt(self):
        """Press Ctrl-C; press it again if the first came just before the program waits, when Python
        loses it."""
        for _ in range(10):
            self.type("\x03")
            try:
                return self.process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                continue
        return None

    def end(self):
        """Read to the end; return the exit code."""
        while self._read():
            pass
        return self.process.wait(timeout=120)

    def _read(self):
        ready = self._poll.poll(120_000)
        try:
            got = os.read(self.screen, 4096) if ready else b""
        except OSError:  # on Linux, this means that the other side is closed
            return False
        text = self._decode(got)
        self.raw += text
        self.text += text.replace("\r", "")
        return bool(got)

    def lines(self):
        """Return the lines as they stand on the screen, after what was written over them."""
        found = []
        for line in self.raw.split("\n"):
            shown = ""
            for written in line.split("\r"):
                shown = written + shown[len(written) :]
            found.append(shown.rstrip())
        return found
