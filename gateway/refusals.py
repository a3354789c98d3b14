"""
What the limits say, in words and headers for clients.
"""

from cache.limits import Figures, Refusal
from gateway.errors import ApiError
from telemetry.vocabulary import MICROS


def refused(refusal: Refusal, tokens: int) -> ApiError:
    """
    A refusal of the limits as the client sees it.

    What can never succeed, or not today, is `insufficient_quota`: clients wait and ask again for the other code.
    """
    level, kind = refusal.level, refusal.limit
    whose = f"this {level.name}"
    if not refusal.can_succeed:
        wanted = f" It needs about {tokens} tokens: shorten it, or lower its maximum." if kind == "tokens" else ""
        message = f"The limit of {whose} can never allow this request ({_limit(refusal)}).{wanted}"
        headers = {"x-should-retry": "false"}
        return ApiError(429, "insufficient_quota", message, kind="insufficient_quota", headers=headers, outcome="quota")
    if kind == "spend":
        message = f"What {whose} may spend today does not allow this request ({_limit(refusal)})."
        headers = {"x-should-retry": "false"} | _after(refusal.retry_after_ms)
        return ApiError(429, "insufficient_quota", message, kind="insufficient_quota", headers=headers, outcome="quota")
    message = f"Rate limit of {whose} reached ({_limit(refusal)}). Try again in {refusal.retry_after_ms / 1000:g} s."
    kind_of_error = "tokens" if kind == "tokens" else "requests"
    headers = _after(refusal.retry_after_ms)
    return ApiError(429, "rate_limit_exceeded", message, kind=kind_of_error, headers=headers, outcome="rate_limited")


def _limit(refusal: Refusal) -> str:
    limits = refusal.level.limits
    match refusal.limit:
        case "requests":
            return f"{limits.requests_per_minute} requests per minute"
        case "tokens":
            return f"{limits.tokens_per_minute} tokens per minute"
        case "concurrent":
            return f"{limits.concurrent} requests at the same time"
        case "spend":
            return f"{f'{(limits.spend_micros_per_day or 0) / MICROS:.6f}'.rstrip('0').rstrip('.')} per day"


def _after(wait_ms: int) -> dict[str, str]:
    """Never too early: who comes back in time is let in."""
    wait_ms = max(1, wait_ms)
    return {"retry-after": str(-(-wait_ms // 1000)), "retry-after-ms": str(wait_ms)}


def figures_headers(figures: Figures) -> dict[str, str]:
    """`x-ratelimit-*`, of the level that is tightest; nothing where nothing is limited, or known."""
    values = {
        "limit-requests": _text(figures.requests_limit),
        "remaining-requests": _text(figures.requests_remaining),
        "reset-requests": duration(figures.requests_reset_ms),
        "limit-tokens": _text(figures.tokens_limit),
        "remaining-tokens": _text(figures.tokens_remaining),
        "reset-tokens": duration(figures.tokens_reset_ms),
    }
    return {f"x-ratelimit-{name}": value for name, value in values.items() if value}


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def duration(wait_ms: int | None) -> str:
    """`12ms`, `1s`, `6m0s`, `1h0m0s`: rounded up."""
    if wait_ms is None:
        return ""
    if wait_ms < 1000:
        return f"{wait_ms}ms"
    minutes, seconds = divmod(-(-wait_ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"
