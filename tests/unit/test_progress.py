"""Progress: lines in a log, bars on a terminal, and a count that stays true when an attempt is taken back."""

from __future__ import annotations

import io
import threading

import pytest

from pipeline.reports.output import table
from pipeline.reports.progress import PlainProgress, TerminalProgress, open_progress
from pipeline.stages.sending import Sending


class NoSink:
    parallel = 1


class MountingSink(NoSink):
    spared_bytes = 60
    spared_blobs = 1


def plain(**options) -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    return PlainProgress(stream, **options), stream


def test_a_log_gets_a_line_at_the_end_and_one_now_and_then():
    progress, stream = plain(interval=0)
    bar = progress.open("file", 2048)
    bar.advance(1024)
    bar.advance(1024)
    bar.finish()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("file: 1 KiB of 2 KiB")
    assert lines[-1].startswith("file: 2 KiB in 0.0 s")
    progress, stream = plain()
    progress.open("file", 10).advance(5)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("total", "seconds", "told"), [(400, 20, ", 60 s left"), (1000, 60, ", 9 min left"), (100, 5, "")]
)
def test_a_log_gets_the_time_to_go(
    total: int, seconds: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("pipeline.reports.progress.time.monotonic", lambda: now)
    progress, stream = plain(interval=0)
    bar = progress.open("file", total)
    now = seconds
    bar.advance(100)
    assert stream.getvalue().rstrip().endswith(told or ")")


def test_quiet_leaves_the_warnings():
    progress, stream = plain(quiet=True)
    progress.note("a note")
    with progress.bar("file", 1) as bar:
        bar.advance(1)
    progress.warn("something")
    assert stream.getvalue() == "warning: something\n"


def test_a_terminal_gets_bars_and_a_log_does_not():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(open_progress(stream=Terminal()), TerminalProgress)
    assert isinstance(open_progress(stream=Terminal(), quiet=True), PlainProgress)
    assert isinstance(open_progress(stream=io.StringIO()), PlainProgress)


@pytest.fixture
def terminal():
    progress = TerminalProgress()
    yield progress
    progress.close()


@pytest.mark.parametrize("kind", ["terminal", "plain"])
def test_a_layer_whose_last_answer_fails_starts_again(kind, request):
    progress = request.getfixturevalue("terminal") if kind == "terminal" else plain()[0]
    sending = Sending(progress, NoSink())
    moved = sending.start("layer", 100)
    moved(60)
    moved(40)
    moved(-100)
    moved(100)
    assert (sending.layers, sending.bytes) == (1, 100)


def test_brackets_in_a_name_are_no_markup(terminal, capsys):
    terminal.note("[red]models/[x].json[/red]")
    with terminal.bar("[bold]name[/nonsense]", 10) as bar:
        bar.advance(10)
    assert "[red]models/[x].json[/red]" in capsys.readouterr().err


def test_what_was_mounted_was_not_sent():
    sending = Sending(plain()[0], MountingSink())
    sending.start("mounted", 60)(60)
    sending.start("sent", 40)(40)
    assert (sending.layers, sending.bytes) == (1, 40)


def test_many_threads_lose_no_byte():
    sending = Sending(plain(quiet=True)[0], NoSink())

    def work() -> None:
        moved = sending.start("layer", 2000)
        for _ in range(2000):
            moved(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sending.layers, sending.bytes) == (8, 16000)


def test_columns_line_up_also_with_chinese():
    assert table([("KEY", "WHAT"), ("千问", "x")]).splitlines() == ["KEY   WHAT", "千问  x"]
