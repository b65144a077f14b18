"""Tables and bars for people."""

import shutil
import sys


def seconds(value):
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s"


def size(value):
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def bar(value, largest, width):
    """A bar in eighths of a character; something is always visible."""
    eighths = max(1, round(value / largest * width * 8)) if largest > 0 else 1
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


class Printer:
    """Text for a person, on standard error when standard output carries JSON."""

    def __init__(self, *, to_stderr):
        self.out = sys.stderr if to_stderr else sys.stdout
        self.width = min(shutil.get_terminal_size((100, 24)).columns, 110)

    def line(self, text=""):
        print(text, file=self.out, flush=True)

    def title(self, text):
        self.line()
        strong = ("\033[1m", "\033[0m") if self.out.isatty() else ("", "")
        self.line(f"{strong[0]}{text}{strong[1]}")

    def bars(self, rows, show):
        """Rows of (label, value): one bar each, to one scale."""
        label_width = max(len(label) for label, _ in rows)
        value_width = max(len(show(value)) for _, value in rows)
        largest = max(value for _, value in rows)
        room = max(10, self.width - label_width - value_width - 6)
        for label, value in rows:
            text = f"  {label:<{label_width}}  {show(value):>{value_width}}  {bar(value, largest, room)}"
            self.line(text.rstrip())

    def progress(self, label):
        """A context whose value is a function (done, total) for a load; see Progress."""
        return Progress(self, label)


class Progress:
    """A bar that is drawn in place and gone at the end; silent where the output is no terminal."""

    def __init__(self, printer, label):
        self.out, self.label = printer.out, label
        self.drawn = False

    def __enter__(self):
        return self

    def __call__(self, done, total):
        if not self.out.isatty() or not total:
            return
        share = done / total
        filled = round(share * 30)
        text = f"  {self.label}  [{'#' * filled}{'.' * (30 - filled)}] {share:4.0%} of {size(total)}"
        print(f"\r{text}", end="", file=self.out, flush=True)
        self.drawn = True

    def __exit__(self, *_):
        if self.drawn:
            print("\r\033[K", end="", file=self.out, flush=True)
