"""Text on a terminal: colours, and control characters that must not steer it."""

GREEN, DIM, PLAIN, RESET = "\x1b[32m", "\x1b[2m", "", "\x1b[0m"
UNSAFE = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""Control characters but tab and newline: text must not steer the terminal."""


def shown(text: str, style: str, terminal: bool) -> str:
    """``text`` for a terminal, coloured and with control characters spelled out; elsewhere as it is."""
    if not terminal:
        return text
    safe = text.translate(UNSAFE)
    return f"{style}{safe}{RESET}" if style else safe
